"""Prompt log-probabilities at a request's temperature: the plugin's methods around one that gathers as vLLM's V1 model runner
does, and around those of its V2 model runner."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from infra.vllm import PLUGIN

sys.path.insert(0, str(PLUGIN))
from loopwright_vllm.prompt_temperature import by_temperature, install, wrap  # type: ignore[import-not-found]

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


# The V2 model runner's class as vLLM has it, with PyTorch in place of its GPU kernels --------------------------------------

VOCABULARY, SLOTS = 16, 8


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> type:
    module = pytest.importorskip("vllm.v1.worker.gpu.sample.prompt_logprob")

    def of_tokens(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return logits.log_softmax(-1).gather(-1, ids)

    def topk(logits: torch.Tensor, count: int, realised: torch.Tensor, logits_mode: bool) -> Any:
        ids = torch.cat([realised[:, None], torch.topk(logits, count).indices], 1)
        return SimpleNamespace(logprob_token_ids=ids, logprobs=of_tokens(logits, ids), selected_token_ranks=realised)

    monkeypatch.setattr(module, "get_prompt_logprobs_token_ids", lambda count, *_: torch.arange(count) % VOCABULARY)
    monkeypatch.setattr(module, "compute_topk_scores", topk)
    monkeypatch.setattr(module, "compute_token_logprobs", of_tokens)
    kind = type("Worker", (module.PromptLogprobsWorker,), {})
    wrap(kind)
    return kind


class Step:
    """Whole prompts of 4 tokens each; their hidden states are their logits."""

    LENGTH = 4

    def __init__(self, worker: Any, names: list[str]) -> None:
        self.worker, count = worker, len(names)
        self.hidden = torch.randn(self.LENGTH * count, VOCABULARY, generator=torch.Generator().manual_seed(0))
        self.lengths = np.full(SLOTS, self.LENGTH)
        self.batch = SimpleNamespace(
            req_ids=names,
            idx_mapping_np=np.arange(count)[::-1],
            idx_mapping=None,
            num_tokens=self.LENGTH * count,
            num_computed_prefill_tokens_np=np.zeros(count, int),
            num_scheduled_tokens=np.full(count, self.LENGTH),
            prefill_len_np=np.full(count, self.LENGTH),
            query_start_loc_np=self.LENGTH * np.arange(count + 1),
            query_start_loc=None,
        )

    def logits(self, name: str) -> torch.Tensor:
        at = self.LENGTH * self.batch.req_ids.index(name)
        return self.hidden[at : at + self.LENGTH - 1]

    def add(self, **params: dict[str, Any]) -> None:
        from vllm.sampling_params import SamplingParams

        for name, slot in zip(self.batch.req_ids, self.batch.idx_mapping_np, strict=True):
            self.worker.add_request(name, slot, SamplingParams(**params[name]))

    def likeliest(self) -> dict[str, Any]:
        return self.worker.compute_prompt_logprobs(lambda rows: rows, self.hidden, self.batch, None, None, self.lengths)

    def chosen(self) -> dict[str, Any]:
        return self.worker.compute_prompt_token_id_logprobs(lambda rows: rows, self.hidden, self.batch, self.lengths)


TEMPERATURES = {"plain": 1.0, "hot": 2.0, "greedy": 0.0, "cold": 0.5}


def test_in_the_second_model_runner_each_request_has_its_own_temperature_too(worker: type) -> None:
    step = Step(worker(SLOTS, torch.device("cpu"), "processed_logprobs"), [*TEMPERATURES, "unasked"])
    step.add(unasked={}, **{name: {"temperature": t, "prompt_logprobs": 3} for name, t in TEMPERATURES.items()})
    asked = step.worker.uses_prompt_logprobs.copy()
    found = step.likeliest()
    assert found.keys() == TEMPERATURES.keys()
    for name, temperature in TEMPERATURES.items():
        wanted = (step.logits(name) / (temperature or 1.0)).log_softmax(-1)
        torch.testing.assert_close(found[name].logprobs, wanted.gather(-1, found[name].logprob_token_ids))
        assert found[name].logprobs.shape == (3, 4)
    np.testing.assert_array_equal(step.worker.uses_prompt_logprobs, asked)


def test_and_so_have_ids_that_a_request_chooses(worker: type) -> None:
    if not hasattr(worker, "compute_prompt_token_id_logprobs"):
        pytest.skip("this vLLM scores no chosen ids")
    step = Step(worker(SLOTS, torch.device("cpu"), "processed_logprobs"), list(TEMPERATURES))
    ids = np.array([[1, 5], [0, 9], [3, 2]])
    step.add(**{n: {"temperature": t, "prompt_logprob_token_ids": ids, "max_tokens": 1} for n, t in TEMPERATURES.items()})
    found = step.chosen()
    assert found.keys() == TEMPERATURES.keys()
    for name, temperature in TEMPERATURES.items():
        wanted = (step.logits(name) / (temperature or 1.0)).log_softmax(-1)
        torch.testing.assert_close(found[name], wanted.gather(-1, torch.from_numpy(ids)))
    assert not step.worker.token_id_scores and step.chosen() == {}


def test_the_second_model_runner_s_other_modes_are_left_alone(worker: type) -> None:
    step = Step(worker(SLOTS, torch.device("cpu"), "raw_logprobs"), ["hot"])
    step.add(hot={"temperature": 2.0, "prompt_logprobs": 3})
    hot = step.likeliest()["hot"]
    torch.testing.assert_close(hot.logprobs, step.logits("hot").log_softmax(-1).gather(-1, hot.logprob_token_ids))


def test_both_model_runners_of_the_installed_vllm_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = pytest.importorskip("vllm.v1.worker.gpu_model_runner").GPUModelRunner
    worker = pytest.importorskip("vllm.v1.worker.gpu.sample.prompt_logprob").PromptLogprobsWorker
    for kind, names in (
        (runner, ["_get_prompt_logprobs_dict"]),
        (worker, ["add_request", "compute_prompt_logprobs", "compute_prompt_token_id_logprobs"]),
    ):
        for name in filter(kind.__dict__.__contains__, names):
            monkeypatch.setattr(kind, name, getattr(kind, name))  # as it is, also afterwards
    stock = runner._get_prompt_logprobs_dict, worker.compute_prompt_logprobs
    install()
    installed = runner._get_prompt_logprobs_dict, worker.compute_prompt_logprobs
    install()
    assert (runner._get_prompt_logprobs_dict, worker.compute_prompt_logprobs) == installed
    assert all(new is not old for new, old in zip(installed, stock, strict=True))
