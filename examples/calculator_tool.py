"""Products that a small model gets wrong by itself, and a calculator it may call.

    export VLLM_API_KEY=$(openssl rand -hex 16)
    CUDA_VISIBLE_DEVICES=0 loopwright serve Qwen/Qwen3-0.6B --port 8000
    CUDA_VISIBLE_DEVICES=1 python examples/calculator_tool.py

The same as a flow, with servers, checkpoints and tracking: examples/calculator_tool.yaml.
"""

from __future__ import annotations

import argparse
import ast
import json
import operator
import random
import re
from typing import Any

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def calculator(expression: str) -> float:
    """
    Work out an expression of numbers, + - * / and parentheses.

    Args:
        expression: What to work out, for example "12 * (3 + 4)".

    Returns:
        The result.
    """
    return _value(ast.parse(expression.strip(), mode="eval").body)


def _value(node: ast.expr) -> Any:
    # What raises here reaches the model as a message, and it may try again.
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(left), _value(right))
        case ast.UnaryOp(operand=operand, op=op) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(operand))
    raise ValueError("only numbers, + - * / and parentheses are understood")


def right_answer(completions: list[list[dict[str, Any]]], answer: list[str], **columns: Any) -> list[float]:
    """1 if the last number of the last message is the answer."""
    numbers = [re.findall(r"-?\d+", completion[-1]["content"]) for completion in completions]
    return [float(found[-1:] == [right]) for found, right in zip(numbers, answer, strict=True)]


def problems(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Dataset rows."""
    draw = random.Random(seed)
    pairs = [(draw.randint(100, 999), draw.randint(100, 999)) for _ in range(count)]
    return [{"prompt": f"What is {a} * {b}? End with the number alone.", "answer": str(a * b)} for a, b in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a model to use a calculator.")
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="folder or hub id; its chat template must show tools")
    parser.add_argument("--server", default="http://localhost:8000")
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--write-data", metavar="FILE", help="write the problems for the flow, and do nothing else")
    options = parser.parse_args()
    rows = problems(2000)
    if options.write_data:
        with open(options.write_data, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        return

    from trainers import AsyncGRPOConfig, AsyncGRPOTrainer

    trainer = AsyncGRPOTrainer(
        model=options.model,
        reward_funcs=right_answer,
        args=AsyncGRPOConfig(
            output_dir="calculator-tool",
            vllm_server_base_url=options.server,
            max_steps=options.max_steps,
            max_completion_length=512,
            max_tool_calling_iterations=3,
            learning_rate=1e-6,
        ),
        train_dataset=rows,
        tools=[calculator],
    )
    trainer.train()


if __name__ == "__main__":
    main()
