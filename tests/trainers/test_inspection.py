"""Which rollouts are kept and printed, and what is said of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.support.fake_engine import FakeSource, fake_config, fake_engine, fake_rows, settle
from tests.support.policies import distillation_config
from tests.support.rollout_runs import by_rank, only_step, running
from tests.support.stub_server import StubServer
from tests.support.tool_chat import call, responses, tool_tokenizer
from trainers.rollouts.inspection import KEPT_BETWEEN_STEPS, MAX_CELL_CHARS, Inspection, rollout_row
from trainers.rollouts.reconcile import reconcile
from trainers.rollouts.snapshot import write_snapshot
from trainers.rollouts.trace import MAX_SPANS, MAX_TRACE_CHARS, rollout_trace
from trainers.types import Prompt, Rollout, RolloutGroup, ToolCall, TurnRecord, VersionSpan


def turn(
    prompt: Sequence[int], output: Sequence[int], began_s: float = 0.0, ended_s: float = 0.0, version: int = 4
) -> TurnRecord:
    spans = [VersionSpan(0, len(output), version)]
    ids = [np.array(values, np.int32) for values in (prompt, output)]
    return TurnRecord(*ids, np.zeros(len(output), np.float32), spans, "stop", began_s=began_s, ended_s=ended_s)


def conversation() -> Rollout:
    """Two turns with two calls between them, of which the second failed; the second turn's prompt rewrote a token."""
    prompt = Prompt(
        2, 17, [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2?"}], {}, np.array([5, 9])
    )
    calls = [
        {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "2+2"}}},
        {"type": "function", "function": {"name": "clock", "arguments": {}}},
    ]
    return Rollout(
        prompt,
        [turn([5, 9], [7, 2], 100.0, 101.0), turn([5, 9, 7, 3, 8], [6], 103.0, 104.5, version=5)],
        [
            {"role": "assistant", "content": "let me see", "tool_calls": calls},
            {"role": "tool", "name": "calculator", "content": "4"},
            {"role": "tool", "name": "clock", "content": "no such tool"},
            {"role": "assistant", "content": "It is 4."},
        ],
        reward=1.5,
        rewards={"accuracy": 1.0, "style": None, "Env": 0.5},
        duration_s=4.75,
        tool_calls=[
            ToolCall(0, "calculator", {"expression": "2+2"}, "4", False, 101.0, 0.25),
            ToolCall(0, "clock", {}, "no such tool", True, 101.5, 1.5),
        ],
    )


def reconciled(rollout: Rollout) -> Rollout:
    rollout.reconciled = reconcile(rollout.turns, 1024)
    return rollout


# Rows and traces -----------------------------------------------------------------------------------------------------------


def test_a_row_says_what_became_of_a_rollout() -> None:
    rollout = reconciled(conversation())
    group = RolloutGroup(rollout.prompt, [conversation(), rollout], np.array([-0.5, 0.5], np.float32))
    assert rollout_row(group, 1, "kept") == {
        "epoch": 2,
        "row": 17,
        "prompt": "be brief\n2+2?",
        "completion": (
            'let me see\n→ calculator {"expression": "2+2"}\n→ clock {}\n← calculator: 4\n← clock: no such tool\nIt is 4.'
        ),
        "reward": 1.5,
        "rewards/accuracy": 1.0,
        "rewards/style": None,
        "rewards/Env": 0.5,
        "advantage": 0.5,
        "tokens": 3,
        "turns": 2,
        "tool_calls": 2,
        "tool_failures": 1,
        "forks": 0,
        "realigns": 1,
        "drift_tokens": 1,
        "finish_reason": "stop",
        "version": 5,
        "duration_s": 4.75,
        "outcome": "kept",
    }


def test_a_row_without_rewards_turns_and_advantages_is_still_one() -> None:
    prompt = Prompt(0, 1, [{"role": "user", "content": [{"type": "text", "text": "ü" * 9000}]}], {}, np.array([5]))
    row = rollout_row(RolloutGroup(prompt, [Rollout(prompt)]), 0, "zero_variance")
    assert (row["reward"], row["advantage"], row["finish_reason"], row["version"], row["tokens"]) == (None, None, None, None, 0)
    assert row["prompt"].startswith('[{"type": "text", "text": "üü') and len(row["prompt"]) < MAX_CELL_CHARS + 30


def test_a_trace_has_a_span_for_every_turn_and_call_in_their_order_with_their_times() -> None:
    trace = rollout_trace(reconciled(conversation()))
    shown = [(span["name"], span["type"], span["began_s"], span["ended_s"], span["error"]) for span in trace["spans"]]
    assert shown == [
        ("turn 1", "CHAT_MODEL", 100.0, 101.0, False),
        ("calculator", "TOOL", 101.0, 101.25, False),
        ("clock", "TOOL", 101.5, 103.0, True),
        ("turn 2", "CHAT_MODEL", 103.0, 104.5, False),
    ]
    assert (trace["began_s"], trace["ended_s"], trace["spans_left_out"]) == (100.0, 104.75, 0)
    first, calculator, _, second = trace["spans"]
    assert [message["content"] for message in first["inputs"]["messages"]] == ["be brief", "2+2?"]
    assert [message["content"] for message in second["inputs"]["messages"]] == ["4", "no such tool"]  # only what is new
    assert second["outputs"] == {"role": "assistant", "content": "It is 4."} == trace["outputs"]
    assert (calculator["inputs"], calculator["outputs"]) == ({"expression": "2+2"}, "4")
    assert first["attributes"] == {"prompt_tokens": 2, "tokens": 2, "finish_reason": "stop", "versions": [[0, 2, 4]]}
    assert second["attributes"]["drift"] == "realign" and second["attributes"]["drift_tokens"] == 1


def test_a_hook_that_gives_no_times_and_no_messages_is_traced_as_far_as_known() -> None:
    rollout = conversation()
    rollout.turns = [turn([5], [7]), turn([5, 7], [2])]
    rollout.tool_calls, rollout.completion = [], [{"role": "assistant", "content": "only one"}]
    trace = rollout_trace(rollout)
    assert [span["outputs"] for span in trace["spans"]] == [{"role": "assistant", "content": "only one"}, None]
    assert {(span["began_s"], span["ended_s"]) for span in trace["spans"]} == {(trace["began_s"], trace["ended_s"])}
    assert trace["ended_s"] - trace["began_s"] == pytest.approx(4.75)


def test_a_trace_is_plain_json_of_bounded_size_whatever_is_in_it() -> None:
    rollout = conversation()
    arguments = {"n": float("nan"), "deep": [{1: ("x" * 10_000, object())}], "many": list(range(1_000_000))}
    rollout.tool_calls = [ToolCall(n % 300, "t", arguments, "r" * 50_000, False, 100.0 + n, 0.1) for n in range(900)]
    rollout.turns = [turn([5], [7], 100.0 + n, 101.0 + n) for n in range(300)]
    trace = rollout_trace(rollout)
    assert len(trace["spans"]) == MAX_SPANS and trace["spans_left_out"] == 1000
    assert len(json.dumps(trace, allow_nan=False)) < 2 * MAX_TRACE_CHARS
    call = next(span for span in trace["spans"] if span["type"] == "TOOL")
    assert call["inputs"]["n"] == "nan" and call["inputs"]["deep"][0]["1"][0].endswith("… (10000 characters)")


# What is chosen ------------------------------------------------------------------------------------------------------------


async def test_every_nth_rollout_of_the_run_is_kept_counting_on_over_a_resume(tmp_path: Any) -> None:
    config = fake_config(keep_rollout_every=3, shuffle=False, max_steps=100)
    source = FakeSource()
    engine = fake_engine(config, source, fake_rows(8))
    engine.synced(0)
    request = asyncio.create_task(engine.step(1, 0))
    await settle()
    source.finish(0), source.finish(0)  # rollouts 0 to 3 of prompts 0, 1
    await request
    kept = engine.drain_rows()
    assert [(row["row"], row["reward"]) for row in kept] == [(0, 0.0), (1, 1.0)] and all("trace" in row for row in kept)
    engine.committed(1)
    write_snapshot(tmp_path / "s", engine.snapshot())
    await engine.close()

    source = FakeSource()
    engine = fake_engine(config, source, fake_rows(8), resume=tmp_path / "s", version=1, step=1)
    engine.synced(1)
    request = asyncio.create_task(engine.step(2, 1))
    await settle()
    source.finish(0), source.finish(0, rewards=[1.0, 1.0]), source.finish(0)  # rollouts 4 to 9 of prompts 2 to 4
    await request
    kept = engine.drain_rows()
    assert [(row["row"], row["outcome"]) for row in kept] == [(3, "zero_variance"), (4, "kept")]
    await engine.close()


async def test_what_was_kept_and_went_with_no_committed_step_is_sent_again_after_a_kill(tmp_path: Any) -> None:
    config = fake_config(keep_rollout_every=1, per_device_train_batch_size=2, shuffle=False, max_steps=100)
    source = FakeSource()
    engine = fake_engine(config, source, fake_rows(8))
    engine.synced(0)
    await settle()
    source.finish(0)
    await settle()
    assert await engine.step(1, 0) is not None and [row["row"] for row in engine.drain_rows()] == [0, 0]
    source.finish(0)
    await settle()
    assert await engine.step(2, 1) is not None and [row["row"] for row in engine.drain_rows()] == [1, 1]  # asked for ahead
    source.finish(0, rewards=[1.0, 1.0])  # and this one goes with no step yet
    await settle()
    engine.committed(1)
    write_snapshot(tmp_path / "s", engine.snapshot())
    await engine.close()

    engine = fake_engine(config, FakeSource(), fake_rows(8), resume=tmp_path / "s", version=1, step=1)
    engine.synced(1)
    await settle()
    assert await engine.step(2, 1) is not None  # from the buffer
    assert [(row["row"], row["outcome"]) for row in engine.drain_rows()] == [(1, "kept")] * 2 + [(2, "zero_variance")] * 2
    engine.committed(2)
    assert engine.snapshot().kept == [] and engine.snapshot().state["rollouts_finished"] == 6
    await engine.close()


async def test_a_step_is_printed_with_its_own_rollouts_and_none_that_finished_meanwhile() -> None:
    config = fake_config(keep_rollout_every=0, log_completions=True, shuffle=False, max_steps=2, max_staleness=2)
    source = FakeSource()
    engine = fake_engine(config, source, fake_rows(8))
    engine.synced(0)
    first = asyncio.create_task(engine.step(1, 0))
    await settle()
    source.finish(1), source.finish(0, rewards=[1.0, 1.0])  # prompt 0 has no variance
    source.finish(0), source.finish(0)  # prompts 2 and 3; two groups of two make a step
    await first
    rows = engine.drain_rows()
    assert [row["row"] for row in rows] == [1, 1, 2, 2] and not any("trace" in row for row in rows)
    assert [row["advantage"] for row in rows] == [-0.5, 0.5, -0.5, 0.5]
    assert engine.drain_rows() == []
    second = asyncio.create_task(engine.step(2, 1))
    engine.committed(1)
    engine.synced(1)
    await settle()
    source.finish(0)
    await second
    assert [row["row"] for row in engine.drain_rows()] == [3, 3, 4, 4]
    engine.committed(2)
    assert engine._inspection._groups == {}  # what was trained is not held
    await engine.close()


async def test_nothing_is_sent_that_was_not_asked_for() -> None:
    config = fake_config(keep_rollout_every=0, max_steps=1)
    source = FakeSource(delay_s=0.0)
    engine = fake_engine(config, source, fake_rows(8))
    engine.synced(0)
    await asyncio.wait_for(engine.step(1, 0), 30)
    assert engine.drain_rows() == []
    await engine.close()


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: the first
        b: the second
    """
    if b == 0:
        raise ValueError("by nothing")
    return a * b


async def test_a_conversation_with_tools_is_kept_and_printed_as_it_was() -> None:
    def answer(prompt: str) -> str:
        said = [call("multiply", a=6, b=0), call("multiply", a=6, b=7), "It is 42"]
        return said[min(len(responses(prompt)), 2)]

    stub = StubServer(max_model_len=4000)
    stub.script = answer
    fields = {"num_generations": 2, "max_completion_length": 2000, "token_budget": -1, "log_completions": True}
    async with running(stub, [by_rank], 1, tokenizer=tool_tokenizer(), tools=[multiply], **fields) as engine:
        await only_step(engine)
        kept, _, *printed = engine.drain_rows()
    failed, done = printed[0]["completion"].splitlines()[:2], printed[0]["completion"].splitlines()[2:]
    assert failed[0] == '→ multiply {"a": 6, "b": 0}' and failed[1].startswith("← multiply: ") and "by nothing" in failed[1]
    assert done == ['→ multiply {"a": 6, "b": 7}', "← multiply: 42", "It is 42"]
    assert len(printed) == 2 and printed[1]["completion"] == printed[0]["completion"] == kept["completion"]
    assert (kept["turns"], kept["tool_calls"], kept["tool_failures"], kept["forks"], kept["drift_tokens"]) == (3, 2, 1, 0, 0)
    spans = kept["trace"]["spans"]
    assert [span["name"] for span in spans] == ["turn 1", "multiply", "turn 2", "multiply", "turn 3"]
    begins = [span["began_s"] for span in spans]
    assert begins == sorted(begins) and begins[0] == kept["trace"]["began_s"] > 1e9
    assert all(span["began_s"] <= span["ended_s"] <= kept["trace"]["ended_s"] for span in spans)
    assert (spans[1]["error"], spans[3]["error"], spans[3]["inputs"]) == (True, False, {"a": 6, "b": 7})
    assert [span["attributes"].get("drift") for span in spans if span["type"] == "CHAT_MODEL"] == [None, "clean", "clean"]


def group(row: int, rollouts: int) -> RolloutGroup:
    made = [reconciled(conversation()) for _ in range(rollouts)]
    return RolloutGroup(Prompt(0, row, [], {}, np.array([5])), made, np.arange(rollouts, dtype=np.float32))


def test_printed_rows_are_drawn_by_seed_and_step_if_there_are_more_than_asked_for() -> None:
    def drawn(seed: int, step: int) -> list[float]:
        inspection = Inspection(fake_config(keep_rollout_every=0, log_completions=True, num_completions_to_print=3, seed=seed))
        inspection.take(group(1, 20), "kept", 20)
        inspection.take(group(2, 20), "kept", 20)
        return [row["advantage"] for row in inspection.drain(step, ["0:1"] * 20)]

    assert len(drawn(0, 1)) == 3 and drawn(0, 1) == sorted(drawn(0, 1)) == drawn(0, 1)
    assert len({tuple(drawn(seed, step)) for seed in (0, 1) for step in (1, 2)}) == 4


def test_a_group_spread_over_steps_is_shown_with_each_until_its_last_sample_is_settled() -> None:
    inspection = Inspection(fake_config(keep_rollout_every=0, log_completions=True))
    inspection.take(group(1, 4), "kept", 3)
    assert len(inspection.drain(1, ["0:1", "0:1"])) == 4
    inspection.settled("0:1"), inspection.settled("0:1")
    assert len(inspection.drain(2, ["0:1", "0:9"])) == 4
    inspection.settled("0:1")
    assert inspection.drain(3, ["0:1"]) == []


def test_a_table_for_every_so_many_samples() -> None:
    """Of steps of 3, 2, 2 and 3 samples the second and the fourth reach five since the last."""
    inspection = Inspection(distillation_config(keep_rollout_every=0, log_completions=True, log_completions_steps=5))
    for row in range(3):
        inspection.take(group(row, 1), "kept", 9)
    steps = [["0:0", "0:0", "0:1"], ["0:1", "0:2"], ["0:0", "0:2"], ["0:1"] * 3]
    assert [[row["row"] for row in inspection.drain(i, groups)] for i, groups in enumerate(steps, 1)] == [[], [1, 2], [], [1]]


def test_of_many_kept_between_two_steps_the_newest_are_sent() -> None:
    inspection = Inspection(fake_config(keep_rollout_every=1))
    for row in range(KEPT_BETWEEN_STEPS):
        inspection.take(group(row, 2), "kept", 2)
    rows = [row["row"] for row in inspection.drain(1, [])]
    assert len(rows) == KEPT_BETWEEN_STEPS and rows[-1] == KEPT_BETWEEN_STEPS - 1 and rows[0] == KEPT_BETWEEN_STEPS // 2
    assert inspection.drain(2, []) == []
