"""The quick start's task: sums of two numbers below 100, character by character, and a small Llama that has seen nothing.

    seed ─▶ 10,000 problems, shuffled ─▶ held out 512 │ sft 3,000 demonstrations │ grpo 6,488 prompts
    seed ─▶ tokenizer, chat template, 1.2M random weights   (in a process of its own, which needs torch)

The demonstrations are what makes the cold start stop short: their writer works with care on 40% of the problems and on the
others drops every carry (37+48=75). A model that imitates him well knows both ways of adding and prefers the wrong one: it
plateaus where no more demonstrations of this kind would help, while its samples are often right. That is what reinforcement
with a verifiable reward can use.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT = 100  # operands are 0 … 99
CAREFUL = 0.4  # share of demonstrations that carry
HELD_OUT, SFT = 512, 3000  # the remaining problems are GRPO's prompts

SPECIAL = ("<pad>", "<unk>", "<system>", "<user>", "<assistant>", "<end>")
CHARACTERS = "0123456789+-*/=() .,?"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '<assistant>' }}"
    "{% generation %}{{ message['content'] + '<end>' }}{% endgeneration %}"
    "{% else %}{{ '<' + message['role'] + '>' + message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Problem:
    """`a+b`, e.g. 37+48: the answer is 85, without carrying 75."""

    a: int
    b: int

    @property
    def question(self) -> str:
        return f"{self.a}+{self.b}"

    @property
    def answer(self) -> str:
        return str(self.a + self.b)

    @property
    def careless(self) -> str:
        """The sum digit by digit, every carry dropped; equal to `answer` where there is none."""
        tens, ones = (self.a // 10 + self.b // 10) % 10, (self.a % 10 + self.b % 10) % 10
        return str(10 * tens + ones)


@dataclass(frozen=True, slots=True)
class Task:
    """Rows for each purpose; no problem is in two of them."""

    held_out: list[dict[str, str]]  # prompt, answer
    sft: list[dict[str, str]]  # prompt, completion
    grpo: list[dict[str, str]]  # prompt, answer


def make_task(seed: int) -> Task:
    """The task of a seed; the same seed gives the same rows in the same order."""
    rng = random.Random(seed)
    problems = [Problem(a, b) for a in range(LIMIT) for b in range(LIMIT)]
    rng.shuffle(problems)
    held_out, demonstrated, rest = problems[:HELD_OUT], problems[HELD_OUT : HELD_OUT + SFT], problems[HELD_OUT + SFT :]
    return Task(
        held_out=_questions(held_out),
        sft=[
            {"prompt": problem.question, "completion": problem.answer if rng.random() < CAREFUL else problem.careless}
            for problem in demonstrated
        ],
        grpo=_questions(rest),
    )


def _questions(problems: Iterable[Problem]) -> list[dict[str, str]]:
    return [{"prompt": problem.question, "answer": problem.answer} for problem in problems]


def write_task(folder: Path, seed: int) -> None:
    """`held_out.jsonl`, `sft.jsonl` and `grpo.jsonl` in `folder`."""
    task = make_task(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("held_out", "sft", "grpo"):
        lines = "".join(json.dumps(row) + "\n" for row in getattr(task, name))
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def build_tokenizer() -> Any:
    """A fast tokenizer with one token per character; anything outside `CHARACTERS` becomes `<unk>`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<end>",
        additional_special_tokens=["<system>", "<user>", "<assistant>"],
        clean_up_tokenization_spaces=False,
        model_max_length=64,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(seed: int) -> Any:
    """A `LlamaForCausalLM` of 1.2M random float32 parameters; heads of 32, the smallest vLLM's CPU attention takes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    vocabulary = (*SPECIAL, *CHARACTERS)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        pad_token_id=vocabulary.index("<pad>"),
        bos_token_id=None,
        eos_token_id=vocabulary.index("<end>"),
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m flows.quickstart_task", description="Write the quick start's task and model."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write_task(args.folder, args.seed)
    build_model(args.seed).save_pretrained(args.folder / "model")
    build_tokenizer().save_pretrained(args.folder / "model")


if __name__ == "__main__":
    main()
