"""Prompt log-probabilities at the request's temperature.

vLLM scores prompts from plain logits: in 0.26 and 0.32 `temperature` reaches what `logprobs` returns and not what
`prompt_logprobs` does, whatever `--logprobs-mode` says. A teacher that scores at another temperature needs it. With
`processed_logprobs` the logits of a request's prompt are divided by its temperature before they are normalised.

    model runner   gathers, once for the requests of each temperature                 for requests in       is given here
    V1             `GPUModelRunner._get_prompt_logprobs_dict`                         `num_prompt_logprobs`  a normalisation
    V2, on GPUs    `PromptLogprobsWorker.compute_prompt_logprobs`                     `uses_prompt_logprobs` logits
    V2 in 0.32     `compute_prompt_token_id_logprobs`, of ids that a request chooses  `token_id_scores`      logits
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

_MODE = "processed_logprobs"


def install() -> None:
    """Once, in a process that runs a model, where it is not known yet which model runner it takes. What is built differently is
    left as it is; a trainer notices."""
    with suppress(ImportError):
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        plain = getattr(GPUModelRunner, "_get_prompt_logprobs_dict", None)
        if plain is not None and not hasattr(plain, "by_temperature"):
            GPUModelRunner._get_prompt_logprobs_dict = by_temperature(plain)
    with suppress(ImportError, AttributeError):
        from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker

        if not hasattr(PromptLogprobsWorker.add_request, "by_temperature"):
            wrap(PromptLogprobsWorker)


def by_temperature(plain: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """The method `plain` of a model runner (V1), such that it respects temperatures."""

    def gather(runner: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        asked = runner.num_prompt_logprobs
        if not asked or runner.model_config.logprobs_mode != _MODE:
            return plain(runner, *args, **kwargs)
        normalise = runner.sampler.compute_logprobs

        def call(temperature: float) -> dict[str, Any]:
            runner.sampler.compute_logprobs = _divided(normalise, temperature)
            return plain(runner, *args, **kwargs)

        temperatures = {name: _temperature(getattr(runner.requests.get(name), "sampling_params", None)) for name in asked}
        try:
            return _in_groups(runner, "num_prompt_logprobs", temperatures, call)
        finally:
            runner.sampler.compute_logprobs = normalise

    gather.by_temperature = True  # type: ignore[attr-defined]
    return gather


def wrap(worker: Any) -> None:
    """`worker`: the V2 model runner's class that gathers. Its instances keep the temperature of every slot."""
    add_request, plain = worker.add_request, worker.compute_prompt_logprobs
    plain_chosen = getattr(worker, "compute_prompt_token_id_logprobs", None)

    def add(self: Any, name: str, slot: int, params: Any) -> None:
        if not hasattr(self, "loopwright_temperatures"):
            self.loopwright_temperatures = np.ones(self.max_num_reqs)
        self.loopwright_temperatures[slot] = _temperature(params)
        add_request(self, name, slot, params)

    def gather(self: Any, logits_of: Any, hidden: Any, batch: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        asked, slots = self.uses_prompt_logprobs, batch.idx_mapping_np
        if self.logprobs_mode != _MODE or not asked[slots].any():
            return plain(self, logits_of, hidden, batch, *args, **kwargs)
        found: dict[str, Any] = {}
        try:
            for temperature in np.unique(self.loopwright_temperatures[slots[asked[slots]]]).tolist():
                self.uses_prompt_logprobs = asked & (self.loopwright_temperatures == temperature)
                found |= plain(self, _quotient(logits_of, temperature), hidden, batch, *args, **kwargs)
        finally:
            self.uses_prompt_logprobs = asked
        return found

    def gather_chosen(self: Any, logits_of: Any, hidden: Any, batch: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        def call(temperature: float) -> dict[str, Any]:
            return plain_chosen(self, _quotient(logits_of, temperature), hidden, batch, *args, **kwargs)

        if self.logprobs_mode != _MODE or not getattr(self, "token_id_scores", None):
            return call(1.0)
        slots = dict(zip(batch.req_ids, batch.idx_mapping_np, strict=False))
        temperatures = {
            name: float(self.loopwright_temperatures[slots[name]]) for name in self.token_id_scores if name in slots
        }
        return _in_groups(self, "token_id_scores", temperatures, call)

    add.by_temperature = True  # type: ignore[attr-defined]
    worker.add_request, worker.compute_prompt_logprobs = add, gather
    if plain_chosen is not None:
        worker.compute_prompt_token_id_logprobs = gather_chosen


def _in_groups(
    owner: Any, field: str, temperatures: Mapping[str, float], call: Callable[[float], dict[str, Any]]
) -> dict[str, Any]:
    """What `call` finds, once for each temperature: meanwhile `owner.field`, a dict by request, has the requests of that one
    alone. What it deletes there stays deleted."""
    groups: defaultdict[float, dict[str, Any]] = defaultdict(dict)
    for name, value in getattr(owner, field).items():
        groups[temperatures.get(name, 1.0)][name] = value
    found: dict[str, Any] = {}
    try:
        for temperature, requests in groups.items():
            setattr(owner, field, requests)
            found |= call(temperature)
    finally:
        setattr(owner, field, {name: value for some in groups.values() for name, value in some.items()})
    return found


def _temperature(params: Any) -> float:
    """0 means greedy, which leaves probabilities as they are."""
    return getattr(params, "temperature", None) or 1.0


def _divided(normalise: Any, temperature: float) -> Any:
    return normalise if temperature == 1.0 else lambda logits: normalise(logits / temperature)


def _quotient(logits_of: Any, temperature: float) -> Any:
    return logits_of if temperature == 1.0 else lambda hidden: logits_of(hidden) / temperature
