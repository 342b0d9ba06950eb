"""Prompt log-probabilities at a request's temperature: the plugin's method around one that gathers as vLLM's does."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from infra.vllm import PLUGIN

sys.path.insert(0, str(PLUGIN))
from loopwright_vllm.prompt_temperature import by_temperature  # type: ignore[import-not-found]

LOGITS = np.random.default_rng(0).normal(size=16)


def normalised(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum())


def gather(runner: Any, finished: set[str]) -> dict[str, Any]:
    """Of every request: its log-probabilities, if its prompt is done; it is then forgotten."""
    found = {name: runner.sampler.compute_logprobs(LOGITS)[:count] for name, count in runner.num_prompt_logprobs.items()}
    for name in finished & found.keys():
        del runner.num_prompt_logprobs[name]
    return {name: values for name, values in found.items() if name in finished}


def runner(mode: str, **temperatures: float) -> SimpleNamespace:
    return SimpleNamespace(
        num_prompt_logprobs={name: number + 2 for number, name in enumerate(temperatures)},
        model_config=SimpleNamespace(logprobs_mode=mode),
        requests={name: SimpleNamespace(sampling_params=SimpleNamespace(temperature=t)) for name, t in temperatures.items()},
        sampler=SimpleNamespace(compute_logprobs=normalised),
    )


def test_each_request_has_its_own_temperature() -> None:
    one = runner("processed_logprobs", plain=1.0, hot=2.0, greedy=0.0, cold=0.5, chunked=2.0)
    found = by_temperature(gather)(one, {"plain", "hot", "greedy", "cold"})
    for name, temperature, count in (("plain", 1.0, 2), ("hot", 2.0, 3), ("greedy", 1.0, 4), ("cold", 0.5, 5)):
        np.testing.assert_allclose(found[name], normalised(LOGITS / temperature)[:count])
    assert one.num_prompt_logprobs == {"chunked": 6}, "what is done is forgotten, the rest goes on"
    assert one.sampler.compute_logprobs is normalised, "sampling is as before"
    assert by_temperature(gather)(one, {"chunked"}).keys() == {"chunked"} and not one.num_prompt_logprobs


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logits"])
def test_other_modes_are_left_alone(mode: str) -> None:
    one = runner(mode, hot=2.0)
    np.testing.assert_array_equal(by_temperature(gather)(one, {"hot"})["hot"], normalised(LOGITS)[:2])


def test_a_failure_leaves_the_sampler_as_it_was() -> None:
    one = runner("processed_logprobs", hot=2.0)

    def fails(runner: Any) -> dict[str, Any]:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        by_temperature(fails)(one)
    assert one.sampler.compute_logprobs is normalised and one.num_prompt_logprobs == {"hot": 2}
