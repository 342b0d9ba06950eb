"""What the tests of whole runs share: a small experiment, the command in a process of its own, and looking for what is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

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


def start(*arguments: str, log: Path, **environment: str) -> subprocess.Popen[bytes]:
    """`loopwright ARGUMENTS`, its output in `log`."""
    with log.open("ab") as output:
        return subprocess.Popen([*LOOPWRIGHT, *arguments], stdout=output, stderr=output, env={**os.environ, **environment})


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 280.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:.0f} s in vain: {what}")
        time.sleep(0.2)
    return value


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
