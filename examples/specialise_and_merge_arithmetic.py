"""Data and model of `specialise_and_merge_arithmetic.yaml`: sums and orderings of numbers below 100, character by character.

    python examples/specialise_and_merge_arithmetic.py FOLDER [--seed N]

    seed ─▶ per domain: held out │ demonstrations │ prompts to reinforce on      (no problem is in two of them)
    seed ─▶ tokenizer, chat template, 1.2M random weights                       (those of `loopwright quickstart`)

As in the quick start the demonstrations come from a careless writer, in either domain: he carries (37+48=85, not 75) and puts
all three numbers in order (`62,31,9`: `9,31,62`, not `62,9,31` with the first left where it was) on CAREFUL of the problems
only. The model that imitates him knows both ways of both domains and prefers the wrong ones: there is something for a
specialist to gain in its domain.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from flows.quickstart_task import LIMIT, Problem, build_model, build_tokenizer

CAREFUL = 0.4  # share of demonstrations without carelessness
HELD_OUT, DEMONSTRATED, PROMPTS = 256, 3000, 4000  # of each domain


@dataclass(frozen=True, slots=True)
class Ordering:
    """`a,b,c`, e.g. 62,31,9: the answer is 9,31,62; with the first left where it was 62,9,31."""

    numbers: tuple[int, int, int]

    @property
    def question(self) -> str:
        return _text(self.numbers)

    @property
    def answer(self) -> str:
        return _text(sorted(self.numbers))

    @property
    def careless(self) -> str:
        first, *rest = self.numbers
        return _text([first, *sorted(rest)])


def _text(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


def additions(rng: random.Random) -> list[Problem]:
    """Every sum, shuffled."""
    problems = [Problem(a, b) for a in range(LIMIT) for b in range(LIMIT)]
    rng.shuffle(problems)
    return problems


def orderings(rng: random.Random) -> list[Ordering]:
    """As many orderings as are needed, none of them twice, each of three different numbers."""
    found: dict[tuple[int, ...], Ordering] = {}
    while len(found) < HELD_OUT + DEMONSTRATED + PROMPTS:
        a, b, c = rng.sample(range(LIMIT), 3)
        found[a, b, c] = Ordering((a, b, c))
    return list(found.values())


def make_rows(seed: int) -> dict[str, list[dict[str, str]]]:
    """Rows by the name of their file; the same seed gives the same rows in the same order."""
    rng = random.Random(seed)
    rows: dict[str, list[dict[str, str]]] = {"sft": [], "held_out": []}
    for name, problems in (("addition", additions(rng)), ("ordering", orderings(rng))):
        held_out, rest = problems[:HELD_OUT], problems[HELD_OUT:]
        rows["sft"] += [
            {"prompt": problem.question, "completion": problem.answer if rng.random() < CAREFUL else problem.careless}
            for problem in rest[:DEMONSTRATED]
        ]
        rows[f"{name}_held_out"] = _questions(held_out)
        rows["held_out"] += rows[f"{name}_held_out"]
        rows[name] = _questions(rest[DEMONSTRATED : DEMONSTRATED + PROMPTS])
    return rows


def _questions(problems: Iterable[Problem | Ordering]) -> list[dict[str, str]]:
    return [{"prompt": problem.question, "answer": problem.answer} for problem in problems]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the two domains' data and the base model.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for name, rows in make_rows(args.seed).items():
        (args.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    build_model(args.seed).save_pretrained(args.folder / "model")
    build_tokenizer().save_pretrained(args.folder / "model")


if __name__ == "__main__":
    main()
