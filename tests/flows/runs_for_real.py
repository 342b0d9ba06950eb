"""What the tests of whole runs share: a small experiment, the command in a process of its own, and looking for what is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import yaml

from flows import connections, services
from tests.support.tiny_model import build_tiny_model
from tests.support.waiting import wait_until

LOOPWRIGHT = (sys.executable, "-c", "from flows.cli import main; main()")

# Different for every rollout, so that no group is dropped for want of variance; slow, so that a run can be killed midway.
REWARD = """
import os, time
def reward(completions, completion_ids, **columns):
    time.sleep(float(os.environ.get("REWARD_S", "0")))
    return [index + len(ids) / 100 for index, ids in enumerate(completion_ids)]
"""


def write_experiment(folder: Path, model: Path, prompts: int, **fields: Any) -> Path:
    """A config whose run trains each of `prompts` prompts once, two prompts a step; no prompt is dropped."""
    rows = [{"prompt": f"{index}+{index}=", "answer": str(2 * index)} for index in range(prompts)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARD)
    config = {
        "model": str(model),
        "dataset": {"path": str(folder / "rows.jsonl")},
        "reward_funcs": [{"path": f"{folder}/rewards.py:reward"}],
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "token_budget": 0,
        "max_concurrent_rollouts": 8,
        "max_staleness": 1000,
        "max_completion_length": 8,
        "learning_rate": 1e-4,
        "gradient_checkpointing": False,
        "retry": {"backoff_s": 0.5},
        "servers": {"student": {"max_model_len": 64}},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config | fields))
    return path


def sft_config(folder: Path, name: str, rows: int = 1, **fields: Any) -> dict[str, Any]:
    """The config of a supervised run of a tiny model on `rows` sums, both made in `folder`."""
    sums = [{"prompt": f"{index}+{index}=", "completion": str(2 * index)} for index in range(rows)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    return {
        "name": name,
        "model": str(build_tiny_model(folder / "model")),
        "dataset": {"path": str(folder / "rows.jsonl")},
        "max_steps": 2,
        "max_length": 64,
        "per_device_train_batch_size": 1,
        "gradient_checkpointing": False,
        **fields,
    }


def trigger(api: httpx.Client, config: dict[str, Any]) -> str:
    """Start a supervised run as Prefect's pages do; the flow run's id."""
    deployment = api.get("/deployments/name/sft-long-context/local").raise_for_status().json()["id"]
    created = api.post(f"/deployments/{deployment}/create_flow_run", json={"parameters": {"config": config}})
    return created.raise_for_status().json()["id"]


def state_of(api: httpx.Client, flow_run: str) -> dict[str, Any]:
    return api.get(f"/flow_runs/{flow_run}").raise_for_status().json()["state"]


def wait_for_end(api: httpx.Client, flow_run: str, timeout_s: float = 280.0) -> dict[str, Any]:
    """The state in which the flow run ended."""
    going = ("SCHEDULED", "PENDING", "RUNNING")
    return wait_for(lambda: (state := state_of(api, flow_run))["type"] not in going and state, "the flow run ends", timeout_s)


def start(*arguments: str, log: Path, **environment: str) -> subprocess.Popen[bytes]:
    """`loopwright ARGUMENTS`, its output in `log`."""
    with log.open("ab") as output:
        return subprocess.Popen([*LOOPWRIGHT, *arguments], stdout=output, stderr=output, env={**os.environ, **environment})


@contextmanager
def services_up(home: Path, log: Path, *arguments: str) -> Iterator[connections.Up]:
    """`loopwright up ARGUMENTS`, and `down` at the end, after which none of their processes may be left."""
    try:
        assert start("up", *arguments, log=log).wait(700) == 0, log.read_text()
        up = services.running()
        assert up is not None
        yield up
    finally:
        assert start("down", log=log).wait(180) == 0, log.read_text()
    wait_for(lambda: processes(home) == [], "nothing is left of the services", 60)


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 280.0) -> Any:
    return wait_until(condition, timeout_s, what, every_s=0.2)


def processes(home: Path, containing: str = "") -> list[int]:
    """Processes that were started with this Loopwright home, whose command line contains a text."""
    needle = f"LOOPWRIGHT_HOME={home}\0".encode()
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and needle in (entry / "environ").read_bytes():
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if containing in command and "infra/supervisor.py" not in (command if containing else ""):
                    found.append(int(entry.name))
    return found


def ledger(checkpoint: Path) -> dict[str, Any]:
    """What became of the first epoch's prompts: `{"trained": n, "dropped": {cause: n}}`, and the last step."""
    state = json.loads((checkpoint / "rollout_state.json").read_text())
    return {**state["epochs"]["0"], "step": state["step"]}
