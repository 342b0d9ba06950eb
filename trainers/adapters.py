"""What trainer and rollouts agree on about adapters in a server: their names, and what a server must be able to do.

A version's adapter is named `policy-v<version>-<run>`: a name is never used for other weights, also by a run that was resumed,
because servers keep prefixes by name. No torch.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

_NAME = re.compile(r"policy-v(\d+)-([0-9a-f]+)")


def new_run() -> str:
    """Tells the adapters of this process from those of any other."""
    return secrets.token_hex(3)


def adapter_name(version: int, run: str) -> str:
    return f"policy-v{version}-{run}"


def version_of(name: str) -> int | None:
    """The policy version of an adapter of ours, else None."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def is_later(name: str, than: str) -> bool:
    """Whether both are of one run, and `name` of a later version."""
    one, two = _NAME.fullmatch(name), _NAME.fullmatch(than)
    return bool(one and two and one[2] == two[2] and int(one[1]) > int(two[1]))


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """What a server says of adapters."""

    max_lora_rank: int
    max_loras: int
    at_runtime: bool  # they can be loaded while it serves
    api_processes: int
    data_parallel: int
    forked_workers: bool = False  # of tensor parallelism

    def lacking(self, rank: int, loras: int) -> list[str]:
        """What is missing for `loras` adapters of a rank up to `rank`, each with what to start the server with."""
        lines = []
        if not self.at_runtime:
            lines.append("it loads no adapters while it serves: set VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment")
        if self.max_lora_rank < rank:
            lines.append(f"its adapters have at most rank {self.max_lora_rank}: --max-lora-rank {rank}")
        if self.max_loras < loras:
            lines.append(f"it keeps {self.max_loras} adapters: --max-loras {loras} (max_staleness + 2)")
        if self.api_processes > 1:
            lines.append(f"it has {self.api_processes} API processes, an adapter is loaded in one: --api-server-count 1")
        if self.data_parallel > 1:
            lines.append(f"it has {self.data_parallel} data-parallel engines: start as many servers of one engine each")
        if self.forked_workers:
            lines.append("its tensor-parallel workers are forked: set VLLM_WORKER_MULTIPROC_METHOD=spawn in its environment")
        return lines
