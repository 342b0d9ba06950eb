"""SIGKILL to every part of a real run, one after the other: it goes on by policy or by `resume`, and leaves nothing behind.

One run serves for all kills, because starting a vLLM server is what these tests spend their time on.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.registry import Registry
from tests.flows.runs_for_real import ledger, processes, start, wait_for, write_experiment
from tests.support.tiny_model import build_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
PATIENCE_S = 600.0
SERVER = "--served-model-name"  # in every server's command line
Launch = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def launch() -> Iterator[Launch]:
    """`runs_for_real.start`, and an end to what a failed test leaves running."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        started.append(start(*arguments, **options))
        return started[-1]

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()


def step_of(registry: Registry, name: str) -> int:
    run = registry.find_run(name)
    return (run.progress.get("step") or 0) if run else 0


def attempts(registry: Registry, name: str) -> int:
    return len(registry.list_attempts(registry.get_run(name).id))


def kill_one(home: Path, program: str) -> None:
    (pid, *_) = wait_for(lambda: processes(home, program), f"a process of {program}", PATIENCE_S)
    os.kill(pid, signal.SIGKILL)


def test_a_run_survives_the_loss_of_every_part_and_trains_each_prompt_once(home: Path, tmp_path: Path, launch: Launch) -> None:
    model = build_tiny_model(tmp_path / "model")
    path = write_experiment(
        tmp_path, model, prompts=80, name="killed", save_steps=4, retry={"infrastructure": 5, "backoff_s": 0.5}
    )
    log, registry = tmp_path / "log", Registry()
    flow = launch("run", "grpo", str(path), log=log, REWARD_S="2", OMP_NUM_THREADS="1")

    # Each kill waits for steps of the attempt before, so that every one is in mid-run.
    for number, program in enumerate(("trainers.main", "trainers.rollouts.main"), start=1):
        before = step_of(registry, "killed")
        wait_for(lambda before=before: step_of(registry, "killed") >= before + 4, "four more steps", PATIENCE_S)
        kill_one(home, program)
        wait_for(lambda number=number: attempts(registry, "killed") > number, f"an attempt after {program}", PATIENCE_S)
    causes = [attempt.cause or "" for attempt in registry.list_attempts(registry.get_run("killed").id)]
    assert causes[0].startswith("the trainer ended: killed by SIGKILL")
    assert "rollout process" in causes[1] and "SIGKILL" in causes[1]

    # The only server: the trainer waits for its replacement, which gets the weights before it is asked for anything.
    before = step_of(registry, "killed")
    wait_for(lambda: step_of(registry, "killed") >= before + 4, "four more steps", PATIENCE_S)
    kill_one(home, SERVER)
    wait_for(lambda: "student-0 is started again" in log.read_text(), "the flow replaces the server", 60)
    before = step_of(registry, "killed")
    wait_for(lambda: step_of(registry, "killed") >= before + 4, "steps on the new server", PATIENCE_S)
    assert attempts(registry, "killed") == 3 and "vLLM server student-0 died: killed by SIGKILL" in log.read_text()

    # The flow run itself: nothing may be left after the reaper's pass, and the run says why it failed.
    before = step_of(registry, "killed")
    wait_for(lambda: step_of(registry, "killed") >= before + 2, "two more steps", PATIENCE_S)
    flow.kill()
    flow.wait()
    assert launch("reap", log=log).wait(120) == 0
    wait_for(lambda: processes(home) == [], "no process is left", 60)
    assert registry.list_leases() == []
    run = registry.get_run("killed")
    assert (run.status, run.failure_class) == ("FAILED", "infrastructure")
    assert f"process {flow.pid}" in str(run.cause) and "is gone" in str(run.cause)
    lost_flow_run = str(run.prefect_flow_run_id)

    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{home}/mlflow/mlflow.db")
    assert client.get_run(str(run.mlflow_run_id)).info.status == "FAILED"

    assert launch("resume", "killed", log=log, REWARD_S="0", OMP_NUM_THREADS="1").wait(PATIENCE_S) == 0, log.read_text()[-5000:]
    done = registry.get_run("killed")
    assert (done.id, done.status, done.mlflow_run_id) == (run.id, "FINISHED", run.mlflow_run_id)
    # 80 prompts, two a step: with one trained twice or left out, steps and prompts would not both be right.
    assert ledger(Path(done.stages["train"]["checkpoint"])) == {"trained": 80, "dropped": {}, "step": 40}
    assert [point.step for point in client.get_metric_history(str(done.mlflow_run_id), "loss")] == list(range(1, 41))
    assert client.get_run(str(done.mlflow_run_id)).info.status == "FINISHED"
    assert "1 Prefect flow run(s) marked Crashed" in log.read_text(), lost_flow_run
    assert processes(home) == []


def test_two_runs_at_once_do_not_disturb_each_other_and_one_is_cancelled(home: Path, tmp_path: Path, launch: Launch) -> None:
    model = build_tiny_model(tmp_path / "model")
    registry, flows = Registry(), {}
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        path = write_experiment(folder, model, prompts=20, name=name, save_steps=2)
        flows[name] = launch("run", "grpo", str(path), log=folder / "log", REWARD_S="1", OMP_NUM_THREADS="1")
    wait_for(lambda: min(step_of(registry, "one"), step_of(registry, "two")) >= 1, "both runs train", PATIENCE_S)
    ports = [lease.resource for lease in registry.list_leases("port")]
    assert len(ports) == len(set(ports)) == 4  # a Prefect and a vLLM server each

    flows["two"].send_signal(signal.SIGTERM)
    flows["two"].wait(PATIENCE_S)
    stopped = registry.get_run("two")
    assert (stopped.status, stopped.owner) == ("KILLED", None)
    assert registry.list_leases(run_id=stopped.id) == []

    assert flows["one"].wait(PATIENCE_S) == 0, (tmp_path / "one" / "log").read_text()[-5000:]
    assert ledger(Path(registry.get_run("one").stages["train"]["checkpoint"])) == {"trained": 20, "dropped": {}, "step": 10}

    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{home}/mlflow/mlflow.db")
    assert client.get_run(str(stopped.mlflow_run_id)).info.status == "KILLED"
    wait_for(lambda: processes(home) == [], "no process is left", 60)
