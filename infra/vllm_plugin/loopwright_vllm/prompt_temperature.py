"""Prompt log-probabilities at the request's temperature.

vLLM scores prompts from plain logits: in 0.26 and 0.32 `temperature` reaches what `logprobs` returns and not what
`prompt_logprobs` does, whatever `--logprobs-mode` says. A teacher that scores at another temperature needs it. With
`processed_logprobs` the logits of a request's prompt are divided by its temperature before they are normalised.

The model runner gathers prompt log-probabilities in one method, for all requests in `num_prompt_logprobs`. Here that method is
called once for the requests of each temperature, with a normalisation that divides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

_MODE = "processed_logprobs"


def install() -> None:
    """Once, in a process that runs a model. A vLLM that is built differently is left as it is."""
    try:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    except ImportError:
        return
    plain = getattr(GPUModelRunner, "_get_prompt_logprobs_dict", None)
    if plain is not None and not hasattr(plain, "by_temperature"):
        GPUModelRunner._get_prompt_logprobs_dict = by_temperature(plain)


def by_temperature(plain: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """The method `plain` of a model runner, such that it respects temperatures."""

    def gather(runner: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        asked = runner.num_prompt_logprobs
        if not asked or runner.model_config.logprobs_mode != _MODE:
            return plain(runner, *args, **kwargs)
        groups: defaultdict[float, dict[str, int]] = defaultdict(dict)
        for request, count in asked.items():
            groups[_temperature(runner.requests.get(request))][request] = count
        found: dict[str, Any] = {}
        normalise = runner.sampler.compute_logprobs
        try:
            for temperature, requests in groups.items():
                runner.num_prompt_logprobs = requests  # those that are done are deleted from it
                runner.sampler.compute_logprobs = _divided(normalise, temperature)
                found |= plain(runner, *args, **kwargs)
        finally:
            runner.sampler.compute_logprobs = normalise
            runner.num_prompt_logprobs = {request: count for some in groups.values() for request, count in some.items()}
        return found

    gather.by_temperature = True  # type: ignore[attr-defined]
    return gather


def _temperature(request: Any) -> float:
    """0 means greedy, which leaves probabilities as they are."""
    return getattr(getattr(request, "sampling_params", None), "temperature", None) or 1.0


def _divided(normalise: Any, temperature: float) -> Any:
    return normalise if temperature == 1.0 else lambda logits: normalise(logits / temperature)
