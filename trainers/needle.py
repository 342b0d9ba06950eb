"""A needle in a haystack: a sentence with a number, hidden in a long text, which the model is asked for at its end. NumPy only.

    text … ─ sentence with the number ─ … text ─ question ─ number      one sequence of exactly `length` tokens
                       └ at `depth`                            └─ its tokens are the loss terms

The number is found where each of its tokens is the model's likeliest, given those before it: exactly then would greedy
generation write it. One forward tells, without a cache, in whatever way the ranks share the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainers.config_sft import NeedleConfig
from trainers.errors import ConfigError
from trainers.types import Sample

_FILLER = (
    "The ferry leaves the harbour in the morning and comes back before dark. Rain had fallen all night, and the road to the "
    "mill was soft. She counted the letters twice and put them away. Nobody in the village remembered who had built the wall. "
)
_PLACES = ("Lisbon", "Quito", "Tromso", "Hanoi", "Accra", "Perth", "Nairobi", "Calgary")
_SENTENCE = ("\nRemember this: the secret number of {} is", ".\n")
_QUESTION = "\nWhat is the secret number of {0}? The secret number of {0} is"


@dataclass(frozen=True, slots=True)
class Needle:
    """One text to be asked about. `percent`: its depth."""

    length: int
    percent: int
    number: int  # among the texts of this length and depth

    @property
    def name(self) -> str:
        return f"needle/{self.length}/{self.percent}"


def needles(config: NeedleConfig, max_length: int) -> list[Needle]:
    """All texts of an evaluation, shortest first."""
    return [
        Needle(length, round(100 * depth), number)
        for length in sorted(config.lengths or [max_length])
        for depth in sorted(config.depths)
        for number in range(config.samples)
    ]


class Haystack:
    """Makes the texts.

    Args:
        filler: int32 ids of a text to hide sentences in, which is repeated as needed; None: a few sentences of our own.
        seed: of the numbers.
    """

    def __init__(self, tokenizer: Any, filler: np.ndarray | None, seed: int) -> None:
        self._tokenizer, self._seed = tokenizer, seed
        self._filler = self._ids(_FILLER) if filler is None else filler

    def _ids(self, text: str) -> np.ndarray:
        return np.array(self._tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)

    def check(self, asked: list[Needle]) -> None:
        """Raises `ConfigError`: sentence and question do not fit into the length of one of these, and how long it must be."""
        taken = {needle: sum(map(len, self._pieces(needle)[1:])) for needle in asked}
        if short := [needle.length for needle, tokens in taken.items() if needle.length <= tokens]:
            raise ConfigError(
                f"long_eval.needle.lengths: {min(short)} tokens have no room for sentence and question, which take up to "
                f"{max(taken.values())} in this tokenizer: write {max(taken.values()) + 1} or more"
            )

    def _pieces(self, needle: Needle) -> tuple[np.random.Generator, np.ndarray, np.ndarray, np.ndarray]:
        """Sentence, question and answer, and what draws the rest."""
        rng = np.random.default_rng([self._seed, needle.length, needle.percent, needle.number])
        place = _PLACES[int(rng.integers(len(_PLACES)))]
        answer = self._ids(f" {rng.integers(1_000_000, 10_000_000)}")
        # The same pieces in both places: the answer has the tokens that were read.
        hidden = np.concatenate([self._ids(_SENTENCE[0].format(place)), answer, self._ids(_SENTENCE[1])])
        return rng, hidden, self._ids(_QUESTION.format(place)), answer

    def sample(self, needle: Needle) -> Sample:
        """The sequence; its trained tokens are those of the number. It has room (`check`)."""
        rng, hidden, question, answer = self._pieces(needle)
        room = needle.length - len(hidden) - len(question) - len(answer)
        assert room > 0, f"{needle} is {1 - room} tokens too short"
        start = int(rng.integers(len(self._filler)))
        filler = np.resize(np.roll(self._filler, -start), room)
        at = round(needle.percent * room / 100)
        tokens = np.concatenate([filler[:at], hidden, filler[at:], question, answer]).astype(np.int32)
        mask = np.arange(len(tokens)) >= len(tokens) - len(answer)
        zeros = np.zeros(len(tokens), np.float32)
        return Sample("0:0", tokens, mask, zeros, 0.0, 0, np.where(mask, 0, -1).astype(np.int32))


@dataclass(slots=True)
class Score:
    """Of one length and depth."""

    length: int
    percent: int
    texts: float
    found: float
    answer_loss: float  # mean over the texts, nats per token of the number


def scores(asked: list[Needle], found: np.ndarray, losses: np.ndarray) -> Iterator[Score]:
    """`found` and `losses` [texts], summed over ranks."""
    for name in dict.fromkeys(needle.name for needle in asked):
        of = [i for i, needle in enumerate(asked) if needle.name == name]
        first = asked[of[0]]
        yield Score(first.length, first.percent, len(of), float(found[of].sum()), float(losses[of].mean()))
