"""One student server that a run starts: it serves the policy, and takes the trainer's weights."""

from __future__ import annotations

from flows.config import GeneratingRunConfig
from flows.convert import resolve_model
from flows.started_server import StartedServer
from infra.leases import LeaseManager
from infra.registry import Registry, RunRow
from infra.vllm import Needs, ServerSpec
from trainers.references import resolve


def needs(config: GeneratingRunConfig) -> Needs:
    """What the run asks of its student: room for at least one prompt token before the longest completion, and its logprobs."""
    return Needs(max_model_len=config.max_completion_length + 1, max_logprobs=config.server_logprobs)


class Student(StartedServer):
    """A place for one student."""

    role = "student"

    def __init__(
        self, config: GeneratingRunConfig, run: RunRow, registry: Registry, leases: LeaseManager, name: str, key: str
    ) -> None:
        super().__init__(config.servers.student, run, registry, leases, name, key, config.vllm_server_timeout)
        self._config = config

    def _needs(self) -> Needs:
        return needs(self._config)

    def _spec(self) -> ServerSpec:
        adapters = self._config.adapter_serving
        return ServerSpec(
            model=resolve_model(resolve(self._config.model)),
            top_logprobs=self._config.server_logprobs - 1,
            # Where no server can, the run goes on with a warning that the ratio is biased.
            sampling_mask=self._config.restricts_sampling,
            max_lora_rank=adapters.max_lora_rank if adapters else None,
            max_loras=adapters.max_loras if adapters else ServerSpec.max_loras,
            concurrent=self._config.max_concurrent_rollouts,
            seed=self._config.seed,
            **self._common_spec(),
        )
