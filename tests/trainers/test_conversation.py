"""Conversations with tools through the whole rollout side, against a server that answers by script."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.rollout_runs import by_rank, only_step, running
from tests.support.stub_server import StubServer
from tests.support.tool_chat import call, responses, text, tool_tokenizer
from trainers.errors import ConfigError
from trainers.rollouts.loop import AsyncRolloutLoop
from trainers.types import Prompt, Rollout

calls_made: list[Any] = []


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    calls_made.append((a, b))
    return a + b


async def slow_add(a: int, b: int) -> int:
    """Add two numbers, slowly.

    Args:
        a: the first
        b: the second
    """
    await asyncio.sleep(0.01)
    return a + b


def fail(how: str) -> str:
    """Fail.

    Args:
        how: the way
    """
    if how == "exit":
        raise SystemExit(3)
    if how == "stop":
        raise StopIteration
    raise ValueError(f"no {how}")


async def cancel() -> str:
    """Cancel itself."""
    raise asyncio.CancelledError


class Noting(AsyncRolloutLoop):
    """Keeps every rollout."""

    async def setup(self) -> None:
        self.config.clear()

    async def generate_one(self, prompt: Prompt) -> Rollout:
        rollout = await super().generate_one(prompt)
        self.config.append(rollout)
        return rollout


async def converse(
    script: Callable[[list[str]], str], tools: list[Any], max_model_len: int = 4000, **changes: Any
) -> tuple[list[Rollout], Any, Any, StubServer]:
    """One group of two rollouts in which the model answers by the tool results it was shown. (rollouts, step, engine, stub)."""
    stub = StubServer(max_model_len=max_model_len)
    stub.script = lambda prompt: script(responses(prompt))
    kept: list[Rollout] = []
    values: dict[str, Any] = {"num_generations": 2, "max_completion_length": 2000, "token_budget": -1} | changes
    async with running(
        stub, [by_rank], 1, loop_class=Noting, args=kept, tokenizer=tool_tokenizer(), tools=tools, **values
    ) as engine:
        step = await only_step(engine)
    return kept, step, engine, stub


def once(said: str, then: str = "done") -> Callable[[list[str]], str]:
    return lambda results: then if results else said


async def test_a_tool_call_its_result_and_the_answer_are_one_sample() -> None:
    rollouts, step, _, _ = await converse(once("Let me see.\n" + call("add", a=1, b=2), "It is 3"), [add])
    rollout = rollouts[0]
    assert rollout.completion == [
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}],
        },
        {"role": "tool", "name": "add", "content": "3"},
        {"role": "assistant", "content": "It is 3"},
    ]
    (record,) = rollout.tool_calls
    assert (record.turn, record.name, record.arguments, record.result, record.error) == (0, "add", {"a": 1, "b": 2}, "3", False)
    assert not rollout.exhausted and [turn.finish_reason for turn in rollout.turns] == ["stop", "stop"]
    assert all(turn.began_s and turn.ended_s >= turn.began_s for turn in rollout.turns)
    assert rollout.reconciled is not None
    (sequence,) = rollout.reconciled.sequences
    trained = text(sequence.token_ids[sequence.loss_mask])
    assert trained == "Let me see.\n" + call("add", a=1, b=2) + "<|im_end|>It is 3<|im_end|>"
    assert "Add two numbers." in text(rollout.prompt.token_ids)  # the model is told of the tool, from the first turn
    assert step.totals.sequences == 2 and step.totals.tokens == 2 * len(trained.replace("<|im_end|>", "$"))
    metrics = step.metrics
    assert metrics["tools/call_frequency"] == (2.0, 2.0) and metrics["tools/failure_frequency"] == (0.0, 2.0)
    assert metrics["tools/add/call_total"][0] == 2 and metrics["tools/loop_exhausted_frac"] == (0.0, 2.0)
    assert metrics["rollout/turns_mean"] == (4.0, 2.0) and metrics["rollout/drift_tokens_mean"] == (0.0, 2.0)
    assert metrics["rollout/fork_frac"] == (0.0, 2.0) and metrics["rollout/samples_per_rollout"] == (2.0, 2.0)
    assert metrics["completions/mean_length"] == (float(step.totals.tokens), 2.0)


def half(of: str) -> str:
    """Half of a pair.

    Args:
        of: The pair.
    """
    return of + "\ud83d"


async def test_a_result_that_is_no_unicode_text_is_shown_as_far_as_it_is() -> None:
    rollouts, _, _, stub = await converse(once(call("half", of="a")), [half])
    assert [rollout.tool_calls[0].result for rollout in rollouts] == ["a?", "a?"]
    assert responses(stub.requests[-1]["token_ids"]) == ["a?"]


async def test_calls_of_one_turn_run_in_the_models_order() -> None:
    calls_made.clear()
    said = "\n".join([call("add", a=1, b=1), call("slow_add", a=2, b=2), call("add", a=3, b=3)])
    rollouts, step, _, stub = await converse(once(said), [add, slow_add])
    assert [record.result for record in rollouts[0].tool_calls] == ["2", "4", "6"]
    assert responses(stub.requests[-1]["token_ids"]) == ["2", "4", "6"]
    assert sorted(calls_made) == [(1, 1), (1, 1), (3, 3), (3, 3)]
    assert step.metrics["tools/parallel_calls_mean"] == (6.0, 2.0)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (call("subtract", a=1), "unknown tool 'subtract'; there are: add, fail, cancel"),
        (call("add", a=1), "missing a required argument: 'b'"),
        (call("add", a=1, b=2, c=3), "unexpected keyword argument 'c'"),
        ('<tool_call>\n{"name": "add", "arguments": [1, 2]}\n</tool_call>', "the arguments must be an object"),
        ('<tool_call>\n{"name": "add", "argum\n</tool_call>', "the tool call is not valid JSON"),
        ('<tool_call>\n{"name": "add"', "the tool call is not valid JSON"),
        ("<tool_call>\n[1]\n</tool_call>", "a tool call must be an object"),
        (call("fail", how="way"), "ValueError: no way"),
        (call("fail", how="exit"), "SystemExit: 3"),
        (call("fail", how="stop"), "StopIteration"),
        (call("cancel"), "CancelledError"),
    ],
)
async def test_what_goes_wrong_in_a_call_is_told_to_the_model_and_counted(said: str, told: str) -> None:
    rollouts, step, _, stub = await converse(once(said), [add, fail, cancel])
    assert all(told in responses(request["token_ids"])[0] for request in stub.requests[2:])
    assert all(rollout.completion[-1]["content"] == "done" for rollout in rollouts)
    assert step.metrics["tools/failure_frequency"] == (2.0, 2.0) and "rollout/failed_total/generate" not in step.metrics
    # What the model wrote is trained as it wrote it, broken calls included.
    assert step.totals.tokens == 2 * (len(said) + 1 + len("done") + 1)
    unknown = step.metrics.get("tools/unknown_name_total", (0.0, 0.0))[0]
    assert unknown == (2 if "subtract" in said else 0)
    assert not any("subtract" in name for name in step.metrics)


async def test_arguments_written_as_a_string_are_read() -> None:
    said = '<tool_call>\n{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}\n</tool_call>'
    rollouts, step, _, _ = await converse(once(said), [add])
    assert rollouts[0].tool_calls[0].result == "3"
    # The template writes the arguments as an object: from there on the turn is context, and what came before stays trained.
    assert step.metrics["rollout/realign_frac"] == (2.0, 2.0) and step.metrics["rollout/drift_tokens_max"][0] > 10
    assert rollouts[0].reconciled is not None
    (sequence,) = rollouts[0].reconciled.sequences
    assert text(sequence.token_ids[sequence.loss_mask]) == '<tool_call>\n{"name": "add", "arguments": done<|im_end|>'


async def test_the_cap_on_tool_calls_ends_a_conversation_and_the_refused_call_stays_trained() -> None:
    calls_made.clear()
    said = call("add", a=1, b=1)
    rollouts, step, _, _ = await converse(lambda results: said, [add], max_tool_calling_iterations=2)
    assert [len(rollout.turns) for rollout in rollouts] == [3, 3] and len(calls_made) == 4
    assert all(rollout.exhausted and rollout.completion[-1]["role"] == "assistant" for rollout in rollouts)
    assert step.metrics["tools/loop_exhausted_frac"] == (2.0, 2.0)
    assert step.totals.tokens == 2 * 3 * (len(said) + 1)
    assert step.metrics["completions/clipped_ratio"] == (0.0, 2.0)  # it ended its last turn


async def test_the_completion_length_bounds_all_turns_together() -> None:
    said = call("add", a=1, b=1)
    per_turn = len(said) + 1
    rollouts, step, _, stub = await converse(lambda results: said, [add], max_completion_length=2 * per_turn + 7)
    limits = [request["sampling_params"]["max_tokens"] for request in stub.requests]
    assert sorted(limits) == sorted([2 * per_turn + 7, per_turn + 7, 7] * 2)
    assert all([len(turn.output_ids) for turn in rollout.turns] == [per_turn, per_turn, 7] for rollout in rollouts)
    assert step.metrics["tools/loop_exhausted_frac"] == (2.0, 2.0) and step.metrics["completions/clipped_ratio"] == (2.0, 2.0)

    calls_made.clear()  # nothing is left after the second turn: its call is not made
    rollouts, _, _, _ = await converse(lambda results: said, [add], max_completion_length=2 * per_turn)
    assert [len(rollout.turns) for rollout in rollouts] == [2, 2] and len(calls_made) == 2
    assert all(rollout.exhausted for rollout in rollouts)


async def test_a_conversation_that_fills_the_context_ends_with_what_it_has() -> None:
    def flood(count: int) -> str:
        """Answer at length.

        Args:
            count: characters
        """
        return "x" * count

    rollouts, step, _, stub = await converse(once(call("flood", count=5000)), [flood], max_model_len=2000)
    assert len(stub.requests) == 2 and [len(rollout.turns) for rollout in rollouts] == [1, 1]
    assert all(rollout.exhausted and rollout.failed is None for rollout in rollouts)
    assert step.totals.sequences == 2 and step.metrics["tools/loop_exhausted_frac"] == (2.0, 2.0)


async def test_a_tool_that_does_not_return_costs_its_rollout_only() -> None:
    release = threading.Event()
    first = iter([True])

    def hang(a: int) -> str:
        """Wait, the first time.

        Args:
            a: anything
        """
        if next(first, False):
            release.wait(30)
        return "back"

    kept, step, _, _ = await converse(once(call("hang", a=1)), [hang], num_generations=3, vllm_server_timeout=0.5)
    release.set()
    assert step.totals.sequences == 2 and len(kept) == 2
    assert step.metrics["rollout/failed_total/tool_timeout"][0] == 1


async def test_an_asynchronous_tool_that_blocks_does_not_stop_generation() -> None:
    release = threading.Event()
    stub = StubServer(max_model_len=4000)
    stub.script = lambda prompt: "done" if responses(prompt) or "p3" not in text(prompt) else call("block")

    async def block() -> str:
        """Block the event loop."""
        release.wait(30)
        return "back"

    values: dict[str, Any] = {"max_completion_length": 500, "token_budget": -1, "num_generations": 2}
    async with running(stub, [by_rank], 12, tokenizer=tool_tokenizer(), tools=[block], **values) as engine:
        request = asyncio.create_task(only_step(engine))
        doing = ""
        for _ in range(2000):
            doing = engine.describe()
            if "2 rollouts in flight" in doing and "2 tool or environment calls run" in doing:
                break
            await asyncio.sleep(0.01)
        assert "2 rollouts in flight" in doing and "2 tool or environment calls run" in doing, doing
        assert len(stub.requests) == 24  # all but the second turns of p3
        release.set()
        assert (await request).totals.groups == 12


async def test_without_calls_a_run_with_tools_is_one_turn() -> None:
    rollouts, step, _, _ = await converse(lambda results: "42", [add])
    assert [len(rollout.turns) for rollout in rollouts] == [1, 1]
    assert step.metrics["tools/call_frequency"] == (0.0, 2.0) and "tools/failure_frequency" not in step.metrics
    assert "rollout/fork_frac" not in step.metrics


async def test_a_hook_may_converse_from_messages_of_its_own() -> None:
    class Twice(AsyncRolloutLoop):
        async def generate_one(self, prompt: Prompt) -> Rollout:
            first = await self.converse(prompt)
            asked = [*prompt.messages, *first.completion, {"role": "user", "content": "sure?"}]
            second = await self.converse(prompt, asked)
            first.turns += second.turns
            first.completion += [asked[-1], *second.completion]
            return first

    stub = StubServer(max_model_len=4000)
    values: dict[str, Any] = {"max_completion_length": 100, "token_budget": -1, "num_generations": 2}
    async with running(stub, [by_rank], 1, loop_class=Twice, tokenizer=tool_tokenizer(), **values) as engine:
        step = await only_step(engine)
    assert step.totals.sequences == 2 and step.totals.tokens == 2 * 2 * 3
    assert text(stub.requests[-1]["token_ids"]).endswith(
        "42<|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_a_rewritten_history_forks_and_every_sequence_carries_the_advantage() -> None:
    template = tool_tokenizer().chat_template.replace(
        "{{ message.content }}{% for call", "{% if loop.last %}{{ message.content }}{% endif %}{% for call"
    )
    stub = StubServer(max_model_len=4000)
    stub.script = lambda prompt: "done" if responses(prompt) else "a long thought " + call("add", a=1, b=2)
    kept: list[Rollout] = []
    values: dict[str, Any] = {
        "max_completion_length": 500,
        "token_budget": -1,
        "num_generations": 2,
        "fork_threshold_tokens": 5,
    }
    async with running(
        stub, [by_rank], 1, loop_class=Noting, args=kept, tokenizer=tool_tokenizer(template), tools=[add], **values
    ) as engine:
        step = await only_step(engine)
    assert step.totals.sequences == 4 and step.metrics["rollout/fork_frac"] == (2.0, 2.0)
    assert step.metrics["rollout/samples_per_rollout"] == (4.0, 2.0)
    row = step.rows[0][0]
    by_sequence = [sorted(set(np.asarray(row.advantages)[row.sequence_index == i].tolist())) for i in range(4)]
    assert sorted(len(values) for values in by_sequence) == [1, 1, 1, 1]
    assert sorted(round(values[0], 3) for values in by_sequence) == [-1.0, -1.0, 1.0, 1.0]


async def test_a_message_the_template_refuses_is_shown_as_the_model_wrote_it() -> None:
    one_call = (
        "{% if message.tool_calls and message.tool_calls | length > 1 %}{{ raise_exception('one call only') }}{% endif %}"
    )
    template = tool_tokenizer().chat_template.replace(
        "{% if message.role == 'tool' %}", one_call + "{% if message.role == 'tool' %}"
    )
    said = call("add", a=1, b=1) + "\n" + call("add", a=2, b=2)
    stub = StubServer(max_model_len=4000)
    stub.script = lambda prompt: "done" if responses(prompt) else said
    values: dict[str, Any] = {"max_completion_length": 500, "token_budget": -1, "num_generations": 2}
    async with running(stub, [by_rank], 1, tokenizer=tool_tokenizer(template), tools=[add], **values) as engine:
        step = await only_step(engine)
    assert responses(stub.requests[-1]["token_ids"]) == ["2", "4"] and step.totals.sequences == 2
    assert step.metrics["rollout/drift_tokens_max"][0] == 0


async def test_a_sample_longer_than_a_row_is_dropped_and_counted() -> None:
    stub = StubServer(max_model_len=4000)
    stub.script = lambda prompt: "y" * 900 if "p0" in text(prompt) else "42"
    values: dict[str, Any] = {"max_completion_length": 1000, "token_budget": 900, "num_generations": 2}
    async with running(stub, [by_rank], 2, tokenizer=tool_tokenizer(), tools=[add], **values) as engine:
        step = await only_step(engine)
        assert engine.ledger.state_dict()["dropped"] == {"oversize": 1}
    assert step.totals.groups == 1 and step.metrics["batch/dropped_oversize_total"][0] == 2


async def test_a_template_that_shows_no_tools_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"there are tools \(add\), but the tokenizer's chat template does not mention `tools`"
    ):
        async with running(StubServer(), [by_rank], tools=[add]):
            pass


async def test_a_partial_is_a_tool_without_what_it_binds() -> None:
    rollouts, _, _, stub = await converse(once(call("add", a=1)), [functools.partial(add, b=40)])
    assert rollouts[0].tool_calls[0].result == "41"
    shown = text(stub.requests[0]["token_ids"])
    assert '"name": "add"' in shown and "the first" in shown and "the second" not in shown
