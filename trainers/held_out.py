"""Evaluation in mid-run (`eval.every`): greedy accuracy on the held-out set, the same numbers as `trainers.evaluate`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from trainers import evaluate
from trainers.config import AsyncTrainerConfig, TrainerConfig
from trainers.distributed import Ranks
from trainers.model import Policy, gathered_parameters
from trainers.rewards import RewardFunc
from trainers.rollouts.payload import Payload
from trainers.types import Prompt


class HeldOut:
    """Called by every rank; rank 0 measures, by the servers where the run has any, else by a plain copy of the model."""

    def __init__(
        self,
        config: TrainerConfig,
        ranks: Ranks,
        tokenizer: Any,
        payload: Payload | None = None,
        served_as: Callable[[], str | None] = lambda: None,
        serving: Callable[[], Sequence[str]] | None = None,
    ) -> None:
        """`serving`: URLs of the servers that hold the policy; default: the config's."""
        self.config, self.ranks, self.tokenizer, self.served_as = config, ranks, tokenizer, served_as
        self.serving = serving
        given = payload.reward_funcs if payload is not None else None
        own = config.eval is not None and config.eval.reward_func is not None
        self._reward: RewardFunc | None = None if own or not given else given[0]
        self._problems: list[Prompt] = []

    def __call__(self, policy: Policy, version: int) -> dict[str, float]:
        """{"eval/accuracy": …}. `version` is the policy version that the servers hold."""
        whole: dict[str, torch.Tensor] = {}
        if not isinstance(self.config, AsyncTrainerConfig):
            whole = dict(gathered_parameters(policy.model, None, keep=self.ranks.is_main))
        return {"eval/accuracy": self.ranks.rank_zero(lambda: self._measure(policy.model, whole, version))}

    def _measure(self, model: PreTrainedModel, whole: dict[str, torch.Tensor], version: int) -> float:
        config = self.config
        self._problems = self._problems or evaluate.load_problems(config, self.tokenizer)
        self._reward = self._reward or evaluate.eval_reward(config)
        limit = evaluate.max_new_tokens(config)
        if isinstance(config, AsyncTrainerConfig):
            generate = evaluate.server_generate(
                config.server_urls if self.serving is None else self.serving(),
                config.vllm_server_timeout,
                limit,
                version,
                candidates=config.restricts_sampling,
                adapter=self.served_as(),
            )
        else:
            generate = evaluate.local_generate(self._copy(model, whole), self.tokenizer, limit)
        return evaluate.evaluate(self._problems, self.tokenizer, generate, self._reward)["accuracy"]

    def _copy(self, model: PreTrainedModel, whole: dict[str, torch.Tensor]) -> PreTrainedModel:
        device = self.ranks.device
        # `from_config` writes the attention implementation into the config it is given: the trained model must keep its own.
        config = copy.deepcopy(model.config)
        # Initialising a model draws random numbers: training must go on as if there had been no evaluation.
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            plain: Any = type(model)._from_config(config, attn_implementation="sdpa", dtype=model.dtype)
        plain.load_state_dict(whole, strict=False)  # tied weights come once
        plain.generation_config = model.generation_config
        return plain.to(device).eval()
