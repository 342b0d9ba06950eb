"""Tokens held back in the engine, on vLLM's own structs: what a front end gets is what it would have got token by token."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from infra.vllm import PLUGIN

pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

sys.path.insert(0, str(PLUGIN))
from loopwright_vllm import holding

COLUMNS = 4


def request(name: str, hold: Any = 3, **params: Any) -> Any:
    extra = {} if hold is None else {"extra_args": {holding.ASKED_BY: hold}}
    return SimpleNamespace(request_id=name, sampling_params=SamplingParams(**extra, **params), client_index=len(name) % 2)


class FakeScheduler:
    """Answers a step as vLLM's does: an output per request, with its rows of the step's log-probabilities."""

    def __init__(self, *requests: Any) -> None:
        self.requests = {one.request_id: one for one in requests}
        self.step = 0

    def update_from_output(self, scheduler_output: dict[str, Any], model_runner_output: Any) -> dict[int, Any]:
        outputs: dict[int, list[Any]] = {}
        for row, (name, fields) in enumerate(scheduler_output.items()):
            one = self.requests[name]
            if one.sampling_params.num_logprobs is not None:
                fields = fields | {
                    "new_logprobs": model_runner_output.logprobs.slice_request(row, len(fields["new_token_ids"]))
                }
            if "finish_reason" in fields:
                del self.requests[name]
            outputs.setdefault(one.client_index, []).append(EngineCoreOutput(request_id=name, **fields))
        return {client: EngineCoreOutputs(outputs=listed) for client, listed in outputs.items()}

    def finish_requests(self, names: list[str]) -> None:
        for name in names:
            self.requests.pop(name, None)


class FakeEngine:
    def __init__(self, scheduler: Any) -> None:
        self.scheduler, self._weight_version, self.output_queue = scheduler, "1", SimpleNamespace(put_nowait=self._put)
        self.sent: list[Any] = []

    def _put(self, entry: Any) -> None:
        self.sent.append(entry)

    def set_weight_version(self, version: str) -> None:
        self._weight_version = version


@pytest.fixture
def held():
    """A class of schedulers and one of engines that hold tokens back."""
    scheduler, engine = type("Held", (FakeScheduler,), {}), type("Engine", (FakeEngine,), {})
    holding.wrap(scheduler, engine, EngineCoreOutput, EngineCoreOutputs, LogprobsLists)
    return scheduler, engine


def logprobs(step: int, rows: int) -> LogprobsLists:
    draw = np.random.default_rng(step)
    ids = draw.integers(0, 151936, (rows, COLUMNS)).astype(np.int32)
    return LogprobsLists(ids, draw.normal(size=(rows, COLUMNS)).astype(np.float32), draw.integers(0, 99, rows).astype(np.int64))


def run(scheduler: Any, steps: list[dict[str, dict[str, Any]]]) -> list[list[Any]]:
    """Of every step the outputs that left, as they arrive at a front end."""
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
    left: list[list[Any]] = []
    for number, step in enumerate(steps):
        answer = scheduler.update_from_output(step, SimpleNamespace(logprobs=logprobs(number, len(step))))
        arrived = [decoder.decode(list(map(bytes, encoder.encode(outputs)))) for outputs in answer.values()]
        left.append([output for outputs in arrived for output in outputs.outputs])
    return left


def stream(left: list[list[Any]], name: str, width: int | None) -> dict[str, Any]:
    """Everything of one request, in order; of its log-probabilities the columns that a front end reads."""
    mine = [output for outputs in left for output in outputs if output.request_id == name]
    told = [output.new_logprobs for output in mine if output.new_logprobs is not None]
    return {
        "tokens": [token for output in mine for token in output.new_token_ids],
        "finish": [output.finish_reason for output in mine if output.finish_reason is not None],
        "ids": [row[:width].tolist() for lists in told for row in lists.logprob_token_ids],
        "logprobs": [row[:width].tolist() for lists in told for row in lists.logprobs],
        "ranks": [rank for lists in told for rank in lists.sampled_token_ranks.tolist()],
    }


def requests() -> list[Any]:
    return [
        request("sampled", logprobs=0),
        request("top", logprobs=2),
        request("none"),
        request("unasked", hold=None, logprobs=1),
        request("all", logprobs=-1),
        request("given", logprob_token_ids=[5, 6], logprobs=2),
    ]


def steps(names: list[str], count: int) -> list[dict[str, dict[str, Any]]]:
    plain = [{name: {"new_token_ids": [10 * number + at]} for at, name in enumerate(names)} for number in range(count)]
    for fields in plain[-1].values():
        fields["finish_reason"] = FinishReason.LENGTH
    return plain


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_a_front_end_gets_what_it_would_have_got_token_by_token(held, count):
    mine = requests()
    names = [one.request_id for one in mine]
    stock, ours = run(FakeScheduler(*mine), steps(names, count)), run(held[0](*mine), steps(names, count))
    for one in mine:
        width = one.sampling_params.num_logprobs
        width = None if width is None or width < 0 else width + 1
        assert stream(ours, one.request_id, width) == stream(stock, one.request_id, width)


def test_who_asked_gets_batches_and_others_every_token(held):
    mine = requests()
    left = run(held[0](*mine), steps([one.request_id for one in mine], 7))
    count = {
        one.request_id: [len(o.new_token_ids) for outputs in left for o in outputs if o.request_id == one.request_id]
        for one in mine
    }
    assert count["sampled"] == count["top"] == count["none"] == [3, 3, 1]
    assert count["unasked"] == count["all"] == count["given"] == [1] * 7


def test_what_carries_more_than_tokens_goes_at_once_and_takes_the_held_along(held):
    mine = steps(["top"], 6)
    mine[0]["top"]["kv_transfer_params"] = {"first": True}
    mine[2]["top"]["num_nans_in_logits"] = 4
    left = run(held[0](request("top", hold=64, logprobs=2)), mine)
    assert [[output.new_token_ids for output in outputs] for outputs in left] == [[[0]], [], [[10, 20]], [], [], [[30, 40, 50]]]
    assert left[2][0].num_nans_in_logits == 4


def test_several_tokens_of_a_step_are_held_as_they_come(held):
    scheduler = held[0](request("top", hold=4, logprobs=2))
    answer = []
    for number in range(3):
        lists = logprobs(number, 2)._replace(cu_num_generated_tokens=[0, 2])
        step = {"top": {"new_token_ids": [2 * number, 2 * number + 1]}}
        answer += scheduler.update_from_output(step, SimpleNamespace(logprobs=lists)).values()
    left = [output for outputs in answer for output in outputs.outputs]
    assert [output.new_token_ids for output in left] == [[0, 1, 2, 3]]
    told = np.concatenate([logprobs(number, 2).logprobs[:, :3] for number in (0, 1)])
    assert left[0].new_logprobs.logprobs.tolist() == told.tolist()


def test_a_new_version_is_told_after_the_tokens_of_the_old_one(held):
    scheduler = held[0](request("top", hold=64, logprobs=2), request("some", hold=64, logprobs=0))
    engine = held[1](scheduler)
    assert run(scheduler, steps(["top", "some"], 3)[:2]) == [[], []]
    engine.set_weight_version("2")
    assert engine._weight_version == "2"
    told = dict(engine.sent)
    assert {client: outputs.weight_version for client, outputs in told.items()} == {0: "1", 1: "1"}
    assert [output.new_token_ids for client in (1, 0) for output in told[client].outputs] == [[0, 10], [1, 11]]
    engine.set_weight_version("3")
    assert len(engine.sent) == 2


def test_nothing_is_kept_of_requests_that_ended(held):
    scheduler = held[0](*requests())
    run(scheduler, steps(["sampled", "top"], 3)[:2])
    scheduler.finish_requests(["sampled"])
    assert set(scheduler.loopwright_holder.held) == {"top"}
    run(scheduler, steps(["top"], 1))
    assert not scheduler.loopwright_holder.held


@pytest.mark.parametrize("hold", [0, 1, -5, "64", 2.5, None])
def test_what_is_no_number_of_tokens_asks_for_nothing(hold):
    assert holding.asked(request("x", hold=hold)) is None


def test_the_installed_vllm_holds():
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    stock = Scheduler.update_from_output, Scheduler.finish_requests, EngineCore.set_weight_version
    try:
        holding.install()
        installed = Scheduler.update_from_output
        holding.install()
        assert Scheduler.update_from_output is installed is not stock[0]
        assert EngineCore.set_weight_version is not stock[2]
    finally:
        Scheduler.update_from_output, Scheduler.finish_requests, EngineCore.set_weight_version = stock


def test_an_engine_built_otherwise_stays_as_it_is(monkeypatch):
    from vllm.v1.core.sched.scheduler import Scheduler

    stock = Scheduler.update_from_output
    other = msgspec.defstruct("EngineCoreOutput", [("request_id", str), ("tokens", list, [])])
    monkeypatch.setattr("vllm.v1.engine.EngineCoreOutput", other)
    warned: list[str] = []
    monkeypatch.setattr(
        holding.logging.getLogger("vllm.loopwright"), "warning", lambda text, error: warned.append(text % error)
    )
    holding.install()
    assert Scheduler.update_from_output is stock
    assert warned == ["tokens leave the engine one by one: outputs of an engine have other fields"]
