"""Tokens of a request that streams to nobody leave the engine in batches, not one message per step.

    a step of the scheduler ─▶ outputs of a token each ─┬─ requests that did not ask ──────────────────────▶ front end
                                                        └─ kept: ids, rows of log-probabilities ─ N or end ─▶ front end

With log-probabilities, a request's token is a message of three small arrays. To write and read those of 256 requests takes
Python several milliseconds of every step, as long as the step's work on the GPU; written as one array for 64 tokens they take
next to nothing. A request asks by `extra_args` (`vllm_xargs` in some bodies): {"loopwright_hold_tokens": 64}.

What comes out is the same: each front end reads several tokens of a step already, for speculative decoding. An answer that is
aborted may lack tokens that were held. The first token, and whatever carries more than tokens, goes out at once and takes the
held ones along; so does everything when the weights get a new version, which a front end stamps on tokens as they come.
"""

from __future__ import annotations

import functools
import logging
import operator
from typing import Any

import numpy as np

ASKED_BY = "loopwright_hold_tokens"
MOST_TOKENS = 1024
NEW: Any = object()
HELD_FIELDS = frozenset({"request_id", "new_token_ids", "new_logprobs", "trace_headers"})


class StepRows:
    """Log-probabilities of one step; in place of vLLM's `LogprobsLists`, whose cutting into requests makes arrays for each."""

    def __init__(self, lists: Any) -> None:
        self.lists = lists
        self.whole: dict[int, np.ndarray] = {}

    def slice_request(self, index: int, positions: int) -> Rows:
        counts = self.lists.cu_num_generated_tokens
        start = index if counts is None else counts[index]
        return Rows(self, start, start + positions)

    def joined(self, width: int) -> np.ndarray:
        """int32 [rows, 2 × width + 1]: ids, bits of the log-probabilities, rank of the sampled token."""
        if width not in self.whole:
            ids, logprobs, ranks = self.lists[:3]
            parts = ids[:, :width].astype(np.int32), logprobs[:, :width].astype(np.float32).view(np.int32)
            self.whole[width] = np.concatenate([*parts, ranks.astype(np.int32)[:, None]], axis=1)
        return self.whole[width]


class Rows:
    """A request's rows of a step."""

    __slots__ = ("start", "step", "stop")

    def __init__(self, step: StepRows, start: int, stop: int) -> None:
        self.step, self.start, self.stop = step, start, stop

    def lists(self) -> Any:
        """As vLLM cuts them."""
        ids, logprobs, ranks = (array[self.start : self.stop] for array in self.step.lists[:3])
        return type(self.step.lists)(ids, logprobs, ranks, None)


class Held:
    """What is kept of a request. `width`: columns of its rows; 0: it asked for no log-probabilities."""

    __slots__ = ("client", "like", "limit", "rows", "tokens", "width")

    def __init__(self, limit: int, width: int, client: int) -> None:
        self.limit, self.width, self.client = limit, width, client
        self.tokens: list[int] = []
        self.rows: list[np.ndarray] = []
        self.like: Any = None

    def add(self, output: Any) -> None:
        self.tokens += output.new_token_ids
        rows = output.new_logprobs
        if rows is not None:
            self.rows.append(rows.step.joined(self.width)[rows.start : rows.stop])
            self.like = rows.step.lists

    def take(self) -> tuple[list[int], Any]:
        """Token ids and their `LogprobsLists`, which are then no longer held."""
        tokens, self.tokens = self.tokens, []
        if not self.rows:
            return tokens, None
        joined, self.rows = np.concatenate(self.rows), []
        ids, logprobs, ranks = joined[:, : self.width], joined[:, self.width : -1], joined[:, -1]
        like = self.like
        return tokens, type(like)(
            ids.astype(like[0].dtype),
            np.ascontiguousarray(logprobs).view(np.float32).astype(like[1].dtype, copy=False),
            ranks.astype(like[2].dtype),
            None,
        )


class Holder:
    """Of one scheduler. `held`: request id → what is kept of it; None: it did not ask."""

    def __init__(self, output_type: Any) -> None:
        self.output_type = output_type
        self.held: dict[str, Held | None] = {}
        names, defaults = output_type.__struct_fields__, output_type.__struct_defaults__
        optional = zip(names[len(names) - len(defaults) :], defaults, strict=True)
        others = [(name, default) for name, default in optional if name not in HELD_FIELDS]
        # In C, because it is done for every request of every step.
        self.others = operator.attrgetter(*(name for name, _ in others))
        self.defaults = tuple(default for _, default in others)

    def sift(self, outputs: list[Any], requests: dict[str, Any]) -> list[Any]:
        """Those of a step that go out now, with what was held of their requests. `requests`: those that have not ended."""
        going: list[Any] = []
        for output in outputs:
            name = output.request_id
            request = requests.get(name)
            held = self.held.get(name, NEW)
            if held is NEW:
                held = asked(request) if request is not None else None
                self.held[name] = held
            if held is not None:
                held.add(output)
                if len(held.tokens) < held.limit and self._tokens_alone(output):
                    continue
                output.new_token_ids, output.new_logprobs = held.take()
            elif type(output.new_logprobs) is Rows:
                output.new_logprobs = output.new_logprobs.lists()
            if request is None:
                self.held.pop(name, None)
            going.append(output)
        return going

    def forget(self, requests: dict[str, Any]) -> None:
        """What is held of requests that ended otherwise than by an output."""
        self.held = {name: held for name, held in self.held.items() if name in requests}

    def flush(self) -> dict[int, list[Any]]:
        """Everything that is held, by front end."""
        going: dict[int, list[Any]] = {}
        for name, held in self.held.items():
            if held is not None and held.tokens:
                tokens, logprobs = held.take()
                output = self.output_type(request_id=name, new_token_ids=tokens, new_logprobs=logprobs)
                going.setdefault(held.client, []).append(output)
        return going

    def _tokens_alone(self, output: Any) -> bool:
        try:
            return self.others(output) == self.defaults
        except ValueError:  # an array among them
            return False


def asked(request: Any) -> Held | None:
    """What a request asks for; None: nothing, or what is not held: log-probabilities of a whole vocabulary or of given ids."""
    params = request.sampling_params
    tokens = (getattr(params, "extra_args", None) or {}).get(ASKED_BY)
    if not isinstance(tokens, int) or tokens < 2 or getattr(params, "logprob_token_ids", None):
        return None
    logprobs = params.num_logprobs
    if logprobs is not None and logprobs < 0:
        return None
    return Held(min(tokens, MOST_TOKENS), 0 if logprobs is None else logprobs + 1, request.client_index)


def install() -> None:
    """Into this process's vLLM. One whose engine is built otherwise stays as it is, and says so."""
    try:
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.outputs import LogprobsLists

        known = LogprobsLists._fields[:4] == ("logprob_token_ids", "logprobs", "sampled_token_ranks", "cu_num_generated_tokens")
        if not known or not set(EngineCoreOutput.__struct_fields__) >= HELD_FIELDS:
            raise AttributeError("outputs of an engine have other fields")
        if not getattr(Scheduler.update_from_output, "holds", False):
            wrap(Scheduler, EngineCore, EngineCoreOutput, EngineCoreOutputs, LogprobsLists)
    except (ImportError, AttributeError) as error:
        logging.getLogger("vllm.loopwright").warning("tokens leave the engine one by one: %s", error)


def wrap(scheduler: Any, engine: Any, output_type: Any, outputs_type: Any, lists_type: Any) -> None:
    update_from_output, finish_requests = scheduler.update_from_output, scheduler.finish_requests
    set_weight_version = getattr(engine, "set_weight_version", None)  # since 0.28

    def holder(of: Any) -> Holder:
        if not hasattr(of, "loopwright_holder"):
            of.loopwright_holder = Holder(output_type)
        return of.loopwright_holder

    @functools.wraps(update_from_output)
    def update(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        if type(model_runner_output.logprobs) is lists_type:
            model_runner_output.logprobs = StepRows(model_runner_output.logprobs)
        answer = update_from_output(self, scheduler_output, model_runner_output)
        for outputs in answer.values():
            outputs.outputs = holder(self).sift(outputs.outputs, self.requests)
        return answer

    @functools.wraps(finish_requests)
    def finish(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = finish_requests(self, *args, **kwargs)
        holder(self).forget(self.requests)
        return answer

    def set_version(self: Any, weight_version: str) -> None:
        queue = getattr(self, "output_queue", None)
        for client, outputs in holder(self.scheduler).flush().items() if queue is not None else ():
            queue.put_nowait((client, outputs_type(outputs=outputs, weight_version=self._weight_version)))
        set_weight_version(self, weight_version)

    update.holds = True
    scheduler.update_from_output, scheduler.finish_requests = update, finish
    if set_weight_version is not None:
        engine.set_weight_version = functools.wraps(set_weight_version)(set_version)
