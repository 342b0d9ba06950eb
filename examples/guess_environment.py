"""A game as an environment: find a number from the answers "higher" and "lower".

    export VLLM_API_KEY=$(openssl rand -hex 16)
    CUDA_VISIBLE_DEVICES=0 loopwright serve Qwen/Qwen3-0.6B --port 8000
    CUDA_VISIBLE_DEVICES=1 python examples/guess_environment.py

The same as a flow, with servers, checkpoints and tracking: examples/guess_environment.yaml.
"""

from __future__ import annotations

import argparse
import json


class GuessNumber:
    """One game. The public methods are the model's tools, but for `reset` and `get_reward`.

    Args:
        highest: the secret is a number from 1 to this.
        guesses: how many the player has; 3 are enough for 7 numbers.
    """

    def __init__(self, highest: int = 7, guesses: int = 3) -> None:
        self.highest, self.guesses = highest, guesses

    def reset(self, secret: int) -> str:
        self.secret, self.left, self.won = secret, self.guesses, False
        return f"I am thinking of a number from 1 to {self.highest}. Find it with at most {self.guesses} guesses."

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: The guess.

        Returns:
            "right", or where the number lies.
        """
        if self.won or not self.left:
            return "the game is over"
        self.left -= 1
        self.won = number == self.secret
        return "right" if self.won else "higher" if number < self.secret else "lower"

    def get_reward(self) -> float:
        return float(self.won)


def games(highest: int = 7, count: int = 2000) -> list[dict[str, int]]:
    """Dataset rows: `reset` takes their columns, and what it returns is the prompt."""
    return [{"secret": 1 + index % highest} for index in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a model to find a number.")
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="folder or hub id; its chat template must show tools")
    parser.add_argument("--server", default="http://localhost:8000")
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--write-data", metavar="FILE", help="write the games for the flow, and do nothing else")
    options = parser.parse_args()
    rows = games()
    if options.write_data:
        with open(options.write_data, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        return

    from trainers import AsyncGRPOConfig, AsyncGRPOTrainer

    trainer = AsyncGRPOTrainer(
        model=options.model,
        args=AsyncGRPOConfig(
            output_dir="guess-environment",
            vllm_server_base_url=options.server,
            max_steps=options.max_steps,
            max_completion_length=512,
            max_tool_calling_iterations=4,
            learning_rate=1e-6,
        ),
        train_dataset=rows,
        environment_factory=GuessNumber,
    )
    trainer.train()


if __name__ == "__main__":
    main()
