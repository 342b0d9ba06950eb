"""A whole recipe with real processes, killed in its second specialist and again while the student is taught: it goes on there.

One recipe serves for both kills, because starting vLLM servers is what this test spends its time on.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.registry import Registry
from tests.flows.runs_for_real import REWARD, processes, start, wait_for
from tests.support.tiny_model import build_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]
PATIENCE_S = 1800.0  # only a hang takes that long
STEPS = {"sft": 2, "a": 3, "b": 30, "merged": 60}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Two domains of twenty sums; the rewards of the first prompt are slow, so that a kill can meet a run midway."""
    for name in ("a", "b"):
        rows = [{"prompt": f"{index}+{index}=", "answer": str(2 * index), "domain": name} for index in range(20)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "sft.jsonl").write_text(json.dumps({"prompt": "1+1=", "completion": "2"}) + "\n")
    (tmp_path / "rewards.py").write_text(REWARD)
    length = {"max_completion_length": 8, "servers": {"student": {"max_model_len": 64}}}
    fields: dict[str, Any] = {
        "name": "r",
        "model": str(build_tiny_model(tmp_path / "model")),
        "shared": {
            "per_device_train_batch_size": 8,
            "token_budget": 0,
            "gradient_checkpointing": False,
            "learning_rate": 1e-4,
            "num_train_epochs": 100,
            "save_steps": 1,
            "save_total_limit": 2,
            "retry": {"backoff_s": 0.5},
        },
        "sft": {"dataset": {"path": str(tmp_path / "sft.jsonl")}, "max_length": 64, "max_steps": STEPS["sft"]},
        "grpo": {"num_generations": 4, "max_staleness": 1000, "max_steps": STEPS["a"], **length},
        "domains": {
            name: {
                "dataset": {"path": str(tmp_path / f"{name}.jsonl")},
                "reward_funcs": [f"{tmp_path}/rewards.py:reward"],
                "overrides": {"max_steps": STEPS[name]},
            }
            for name in ("a", "b")
        },
        "merge": {"beta": 1.0, "max_staleness": 1000, "max_steps": STEPS["merged"], **length},
        "retry": {"backoff_s": 0.5},
    }
    # Every evaluation is a process more; one domain's are enough.
    fields["domains"]["a"]["eval"] = {"dataset": {"path": str(tmp_path / "a.jsonl"), "max_rows": 2}}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(fields))
    return path


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Recipes that were started; an end to what a failed test leaves running."""
    flows: list[subprocess.Popen[bytes]] = []
    yield flows
    for flow in flows:
        if flow.poll() is None:
            flow.send_signal(signal.SIGTERM)
            flow.wait(120)


def step_of(registry: Registry, name: str) -> int:
    run = registry.find_run(name)
    return (run.progress.get("step") or 0) if run else 0


def kill_at(flow: subprocess.Popen[bytes], registry: Registry, name: str, home: Path, log: Path) -> None:
    """SIGKILL to the recipe's own process once the stage's run has made steps; a reaper's pass leaves nothing of it."""

    def trains() -> bool:
        assert flow.poll() is None, log.read_text()[-5000:]
        return step_of(registry, name) >= 2

    wait_for(trains, f"{name} trains", PATIENCE_S)
    flow.kill()
    flow.wait()
    assert start("reap", log=log).wait(300) == 0
    wait_for(lambda: processes(home) == [], "no process is left", 120)
    recipe, run = registry.get_run("r"), registry.get_run(name)
    assert (recipe.status, recipe.failure_class) == ("FAILED", "infrastructure") and "is gone" in str(recipe.cause)
    # Told to stop by its supervisor, the run says so itself, unless it was killed before it could.
    assert run.status in ("KILLED", "FAILED"), run.cause


def test_a_recipe_killed_in_a_specialist_and_in_the_merging_goes_on_there(
    home: Path, recipe: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    log, registry = recipe.parent / "log", Registry()
    environment = {"OMP_NUM_THREADS": "1"}
    started.append(start("specialise-and-merge", str(recipe), log=log, REWARD_S="1", **environment))
    kill_at(started[-1], registry, "r-b", home, log)
    assert set(registry.get_run("r").stages) >= {"sft", "a"} and "b" not in registry.get_run("r").stages
    started.append(start("resume", "r", log=log, **environment))
    kill_at(started[-1], registry, "r-merged", home, log)
    started.append(start("specialise-and-merge", str(recipe), log=log, **environment))
    assert started[-1].wait(PATIENCE_S) == 0, log.read_text()[-5000:]

    runs = {stage: registry.get_run(f"r-{stage}") for stage in STEPS}
    done = registry.get_run("r")
    assert [run.status for run in (done, *runs.values())] == ["FINISHED"] * 5
    assert {stage: run.stages["train"]["step"] for stage, run in runs.items()} == STEPS
    attempts = {stage: len(registry.list_attempts(run.id)) for stage, run in runs.items()}
    assert attempts == {"sft": 1, "a": 1, "b": 2, "merged": 2}
    assert {run.name for run in registry.list_runs(parent=done.id)} == {run.name for run in runs.values()}
    check_lineage(registry, runs)
    check_mlflow(home, done, runs)
    assert registry.list_leases() == [] and processes(home) == []
    assert os.path.exists(home / "recipes" / "r" / "report" / "recipe.md")


def check_lineage(registry: Registry, runs: dict[str, Any]) -> None:
    """From the base model to the merged student: what each was made from."""

    def last(stage: str) -> Any:
        (row,) = registry.find_artefacts(runs[stage].stages["train"]["checkpoint"])
        return row

    parents = {stage: {row.id for row in registry.parents(last(stage).id)} for stage in runs}
    assert {row.kind for row in registry.parents(last("sft").id)} == {"base_model", "dataset"}
    assert last("sft").id in parents["a"] & parents["b"] & parents["merged"]
    assert {last("a").id, last("b").id} <= parents["merged"]


def check_mlflow(home: Path, done: Any, runs: dict[str, Any]) -> None:
    """One parent run with its stages as children, each step once; a domain's accuracy follows it through the stages."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{home}/mlflow/mlflow.db")
    assert client.get_run(done.mlflow_run_id).info.status == "FINISHED"
    for stage, run in runs.items():
        child = client.get_run(run.mlflow_run_id)
        assert (child.info.status, child.data.tags["mlflow.parentRunId"]) == ("FINISHED", done.mlflow_run_id), stage
        steps = [point.step for point in client.get_metric_history(run.mlflow_run_id, "loss")]
        assert steps == list(range(1, STEPS[stage] + 1)), stage
    history = client.get_metric_history(done.mlflow_run_id, "recipe/accuracy/a")
    assert [point.step for point in history] == [0, 1, 2, 3]
