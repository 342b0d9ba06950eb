"""Runs that are killed: small supervised ones at a pace of their own under `loopwright up`, started through Prefect's API.

A run's pace is its evaluation's reward function, which sleeps after every step until the scene's file `finish` is there: a run
lasts as long as the test needs it, and then no longer, however loaded the machine is.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from flows import services
from infra.process import marked
from infra.registry import Registry, RunRow
from infra.supervisor import descendants
from tests.flows import runs_for_real
from tests.flows.runs_for_real import processes, start
from tests.support.tiny_model import build_tiny_model

STEPS = 120
PATIENCE_S = 600.0  # only a hang takes that long
PACE = """
import os, time
def reward(completions, **columns):
    for _ in range(20):
        if not os.path.exists({finish!r}):
            time.sleep(0.05)
    return [1.0 for _ in completions]
"""


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
    return runs_for_real.wait_for(condition, what, timeout_s)


class Scene:
    """`loopwright up` in a home of its own, and runs in it. `environment` is set for the whole test process already."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.folder, self.home, self.log = folder, home, folder / "log"
        self.model = build_tiny_model(folder / "model")
        self.finish = folder / "finish"
        rows = [{"prompt": f"{index}+1=", "completion": str(index + 1)} for index in range(64)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "eval.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
        (folder / "pace.py").write_text(PACE.format(finish=str(self.finish)))

    def up(self) -> None:
        assert start("up", log=self.log).wait(PATIENCE_S) == 0, self.log.read_text()
        found = services.running()
        assert found is not None
        self.services = found
        if hasattr(self, "api"):
            self.api.close()
        self.api = httpx.Client(base_url=found.prefect_url, timeout=60.0, trust_env=False)

    def down(self) -> None:
        self.api.close()
        assert start("down", log=self.log).wait(180) == 0, self.log.read_text()

    @property
    def registry(self) -> Registry:
        return Registry()

    def config(self, name: str, **fields: Any) -> dict[str, Any]:
        held_out = {"dataset": {"path": str(self.folder / "eval.jsonl")}, "every": 1, "max_completion_length": 1}
        return {
            "name": name,
            "model": str(self.model),
            "dataset": {"path": str(self.folder / "rows.jsonl")},
            "max_steps": STEPS,
            "num_train_epochs": STEPS,
            "max_length": 64,
            "per_device_train_batch_size": 2,
            "token_budget": 0,
            "gradient_checkpointing": False,
            "save_steps": 4,
            "eval": {**held_out, "reward_func": {"path": f"{self.folder}/pace.py:reward"}},
            "retry": {"backoff_s": 0.5},
            **fields,
        }

    def trigger(self, name: str, **fields: Any) -> str:
        """Start a run as Prefect's pages do; the flow run's id."""
        return runs_for_real.trigger(self.api, self.config(name, **fields))

    def set_state(self, flow_run: str, kind: str, name: str) -> None:
        state = {"state": {"type": kind, "name": name}, "force": kind == "SCHEDULED"}
        self.api.post(f"/flow_runs/{flow_run}/set_state", json=state).raise_for_status()

    def state(self, flow_run: str) -> dict[str, Any]:
        return runs_for_real.state_of(self.api, flow_run)

    def run(self, name: str) -> RunRow:
        return self.registry.get_run(name)

    def step(self, name: str) -> int:
        run = self.registry.find_run(name)
        return (run.progress.get("step") or 0) if run else 0

    def attempts(self, name: str) -> list[tuple[str, str | None, str]]:
        rows = self.registry.list_attempts(self.run(name).id)
        return [(row.status, row.failure_class, (row.cause or "").splitlines()[0] if row.cause else "") for row in rows]

    def wait_step(self, name: str, more: int = 2) -> None:
        """The run trains: `more` steps from now."""
        before = self.step(name)
        wait_for(lambda: self.step(name) >= before + more, f"{more} more steps of {name}")

    def flow_pid(self, name: str) -> int:
        owner = self.run(name).owner
        assert owner is not None, name
        return owner.pid

    def kill_flow(self, name: str, number: int = signal.SIGKILL) -> list[int]:
        """A signal to the flow's process; pids of all that it had started."""
        pid = self.flow_pid(name)
        below = descendants(pid)
        os.kill(pid, number)
        return [pid, *below]

    def trainer_pid(self, name: str) -> int:
        config = f"runs/{name}/logs/trainer-"
        return next(pid for pid in processes(self.home, config) if "trainers.main" in command_of(pid))

    def mlflow_status(self, name: str) -> str:
        return self._client().get_run(str(self.run(name).mlflow_run_id)).info.status

    def logged_steps(self, name: str, metric: str = "loss") -> list[int]:
        history = self._client().get_metric_history(str(self.run(name).mlflow_run_id), metric)
        return [point.step for point in history]

    def _client(self) -> Any:
        from mlflow import MlflowClient

        return MlflowClient(f"sqlite:///{self.home}/mlflow/mlflow.db")

    def check_finished(self, name: str) -> None:
        """FINISHED everywhere, each step once, nothing left of it."""
        run = self.run(name)
        assert (run.status, run.owner) == ("FINISHED", None), run.cause
        assert self.mlflow_status(name) == "FINISHED"
        assert self.logged_steps(name) == list(range(1, STEPS + 1))
        assert [row for row in self.registry.list_leases(run_id=run.id) if marked(row.id)] == []
        assert processes(self.home, f"runs/{name}/") == []


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def gone(pids: list[int]) -> bool:
    """None of them runs; one that nobody has waited for yet has an empty command line."""
    return not any(command_of(pid) for pid in pids)
