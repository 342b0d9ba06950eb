"""The tiny model with a vocabulary for tool calls, and demonstrations by which it learns their form in seconds.

Its shape is that of `tests.support.tiny_model`, so a server that runs the one takes the weights of the other. A tool's name and
an argument's are one token each: a call with its answer takes about twenty tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from examples.guess_environment import GuessNumber
from tests.support import tiny_model
from tests.support.letters import letter_tokenizer

# The first six are those of the tiny model, whose config names three of them.
TAGS = ("<tool>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
WORDS = ("calculator", "expression", "guess", "number", "right")
VOCABULARY = (*tiny_model.SPECIAL, *TAGS, *WORDS, *"0123456789abcdefghijklmnopqrstuvwxyz +-*=:?.,/")
CHAT_TEMPLATE = (
    "{{ '<bos>' }}{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{% for message in messages %}"
    "{% if message.role == 'assistant' %}<assistant>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}"
    "{% for key, value in call.function.arguments.items() %}"
    "<arg_key>{{ key }}</arg_key><arg_value>{{ value }}</arg_value>{% endfor %}</tool_call>{% endfor %}<eos>"
    "{% elif message.role == 'tool' %}<tool>{{ message.content }}"
    "{% else %}<user>{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def build_tokenizer() -> Any:
    assert len(VOCABULARY) == len(set(VOCABULARY)) == 64, len(VOCABULARY)
    vocabulary = {token: index for index, token in enumerate(VOCABULARY)}
    special = ["<user>", "<assistant>", *TAGS]
    return letter_tokenizer(
        vocabulary, CHAT_TEMPLATE, special, WORDS, bos_token="<bos>", eos_token="<eos>", model_max_length=512
    )


class Revealing(GuessNumber):
    """A game of two guesses that tells its number after a miss: chance wins 17 of 81, whoever heeds the answer wins all."""

    def __init__(self) -> None:
        super().__init__(highest=9, guesses=2)

    def reset(self, secret: int) -> str:
        super().reset(secret)
        return "?"

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: The guess.
        """
        answer = super().guess(number)
        return f"no {self.secret}" if answer in ("higher", "lower") else answer


def said(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def called(tool: str, **arguments: Any) -> dict[str, Any]:
    """An assistant message that calls a tool."""
    call = {"type": "function", "function": {"name": tool, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def answered(tool: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "name": tool, "content": content}


def model_written(ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """bool [L]: the tokens of a conversation that a model wrote: those after `<assistant>`, up to and with `<eos>`."""
    begins, ends = (VOCABULARY.index(name) for name in ("<assistant>", "<eos>"))
    written, speaks = np.zeros(len(ids), bool), False
    for place, token in enumerate(ids):
        written[place] = speaks
        speaks = token != ends if speaks else token == begins
    return written


def imitate(
    skilled: Sequence[list[dict[str, Any]]], mixed: Sequence[list[dict[str, Any]]], tools: list[dict], free: int
) -> Any:
    """A model that knows how to do what the assistant does in `skilled`, and does it as often as the assistant in `mixed`.

    It learns the skill until it writes the assistant's tokens with a mean probability of 0.9, then the mixture for 100 steps.

    Args:
        skilled, mixed: conversations.
        tools: the schemas that every prompt shows.
        free: how many of the assistant's first tokens are left out of that probability: those that are chosen by chance.
    """
    import torch

    tokenizer, model = build_tokenizer(), tiny_model.build_model(seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(0.3)  # as drawn they are wide, for varied text; narrower ones learn faster
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.0)
    draws = torch.Generator().manual_seed(0)

    def learn(inputs: Any, labels: Any, rate: float) -> None:
        optimizer.param_groups[0]["lr"] = rate
        rows = torch.randint(len(inputs), (64,), generator=draws)
        model(input_ids=inputs[rows], labels=labels[rows]).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    inputs, labels = _examples(tokenizer, skilled, tools)
    known = labels[:64].where((labels[:64] >= 0).cumsum(1) > free, -100)
    for step in range(1500):
        if step % 20 == 0:
            with torch.no_grad():
                logits = model(input_ids=inputs[:64]).logits[:, :-1]
            losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), known[:, 1:], reduction="none")
            if (probability := float((-losses.sum(1)).exp().mean())) > 0.9:
                break
        learn(inputs, labels, 4e-3 * min(1.0, (step + 1) / 30))
    else:
        raise AssertionError(f"after {step + 1} steps it writes what it should with a probability of {probability:.3f} only")
    mixture = _examples(tokenizer, mixed, tools)
    for left in range(100, 0, -1):
        learn(*mixture, 2e-3 * left / 100)
    return model


def _examples(tokenizer: Any, conversations: Sequence[list[dict[str, Any]]], tools: list[dict]) -> tuple[Any, Any]:
    """Token ids [C, L], and what is to be learnt of them, -100 elsewhere. <pad> is 0 and ends a row, where no token looks."""
    import torch

    rendered = [tokenizer.apply_chat_template(one, tools=tools, tokenize=True, return_dict=False) for one in conversations]
    inputs = torch.zeros(len(rendered), max(map(len, rendered)), dtype=torch.long)
    labels = torch.full_like(inputs, -100)
    for row, ids in enumerate(rendered):
        inputs[row, : len(ids)] = torch.tensor(ids)
        labels[row, : len(ids)] = torch.tensor(np.where(model_written(ids), ids, -100))
    return inputs, labels
