"""Whole distillation runs: the command, Prefect, a student and its teachers, the trainer, MLflow."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.registry import Registry, RunRow
from tests.conftest import SharedServer
from tests.flows.runs_for_real import ledger, processes, start, wait_for
from tests.support.in_thread import in_thread
from tests.support.stub_teacher import StubTeacher
from tests.support.tiny_model import build_tiny_model

TEACHERS = ("adding", "ordering")


def write_run(folder: Path, model: Path, rows: int, **fields: Any) -> Path:
    """A config whose run takes each of `rows` prompts once, four a step; every other row is the second teacher's."""
    lines = [{"prompt": f"{i}+{i}=", "answer": str(2 * i), "teacher_id": TEACHERS[i % 2]} for i in range(rows)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    config = {
        "model": str(model),
        "dataset": {"path": str(folder / "rows.jsonl")},
        "eval": {"dataset": {"path": str(folder / "rows.jsonl")}, "reward_func": "trainers.rewards:exact_match_reward"},
        "per_device_train_batch_size": 4,
        "token_budget": 0,
        "max_concurrent_rollouts": 4,
        "max_staleness": 1000,
        "max_completion_length": 16,
        "learning_rate": 3e-3,
        "gradient_checkpointing": False,
        "retry": {"backoff_s": 0.5},
        "save_steps": 1000,
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config | fields))
    return path


def history(home: Path, run: RunRow, metric: str) -> list[float]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{home}/mlflow/mlflow.db")
    return [point.value for point in client.get_metric_history(str(run.mlflow_run_id), metric)]


def check_learnt(home: Path, run: RunRow, steps: int) -> None:
    """The divergence fell, and each teacher's part of it is told."""
    jsd = history(home, run, "jsd")
    assert len(jsd) == steps and sum(jsd[-3:]) < 0.9 * sum(jsd[:3]), jsd
    shares = [history(home, run, f"teacher_token_frac/{name}") for name in TEACHERS]
    assert sum(sum(share) for share in shares) / steps == pytest.approx(1.0, abs=1e-3)
    for name in TEACHERS:
        for metric in ("teacher_jsd", "teacher_entropy", "teacher_score_s"):
            assert history(home, run, f"{metric}/{name}"), f"{metric}/{name} was never logged"
    assert len(history(home, run, "eval/accuracy")) == 2


@pytest.fixture
def stubs() -> Iterator[dict[str, StubTeacher]]:
    first, second = (StubTeacher(seed, max_model_len=10_000, size=64) for seed in (1, 2))
    with in_thread(first.run()), in_thread(second.run()):
        yield dict(zip(TEACHERS, (first, second), strict=True))


@pytest.mark.server
def test_a_student_learns_from_two_teachers_given_by_url(
    vllm_server: SharedServer, stubs: dict[str, StubTeacher], home: Path, tmp_path: Path
) -> None:
    servers = {
        "student": {"url": vllm_server.url},
        "teachers": {name: {"url": stub.url, "api_key_env": "NO_KEY"} for name, stub in stubs.items()},
    }
    path = write_run(tmp_path, vllm_server.model_dir, rows=48, name="taught", servers=servers)
    log = tmp_path / "log"
    code = start("run", "distillation", str(path), log=log, VLLM_API_KEY=vllm_server.key).wait(560)
    assert code == 0, log.read_text()[-5000:]
    run = Registry().get_run("taught")
    assert (run.status, run.flow, set(run.stages)) == (
        "FINISHED",
        "distill-mopd",
        {"evaluate_before", "train", "evaluate", "register"},
    )
    assert ledger(Path(run.stages["train"]["checkpoint"])) == {"trained": 48, "dropped": {}, "step": 12}
    check_learnt(home, run, 12)
    assert all(len(stub.scored) >= 24 and stub.keys == {None} for stub in stubs.values())  # and no key of another server
    assert Registry().list_leases() == [] and processes(home) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_starts_its_student_and_teachers_and_replaces_a_teacher_that_dies(home: Path, tmp_path: Path) -> None:
    models = {name: build_tiny_model(tmp_path / name, seed=seed) for seed, name in enumerate(("student", *TEACHERS))}
    servers = {"student": {"max_model_len": 64}, "teachers": {name: {"model": str(models[name])} for name in TEACHERS}}
    path = write_run(tmp_path, models["student"], rows=160, name="merged", servers=servers)
    log, registry = tmp_path / "log", Registry()
    process = start("run", "distillation", str(path), log=log)

    def teacher() -> Any:
        run = registry.find_run("merged")
        if process.poll() is not None:
            raise AssertionError(log.read_text()[-5000:])
        if run is None or run.progress.get("step", 0) < 3:
            return None
        return next(row for row in registry.list_servers(run.id, running=True) if row.name == "teacher-adding")

    try:
        first = wait_for(teacher, "the third step", 900)
        assert processes(home, "trainers.rollouts.main")
        os.kill(first.pid, signal.SIGKILL)
        code = process.wait(900)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(300)
    assert code == 0, log.read_text()[-5000:]
    run = registry.get_run("merged")
    assert run.status == "FINISHED" and [attempt.status for attempt in registry.list_attempts(run.id)] == ["FINISHED"]
    check_learnt(home, run, 40)

    rows = registry.list_servers(run.id)
    assert sorted(row.name for row in rows) == ["student-0", "teacher-adding", "teacher-adding", "teacher-ordering"]
    assert len({row.url for row in rows if row.name == "teacher-adding"}) == 1  # where the trainer knows it
    assert all(row.ended_at is not None for row in rows)
    checkpoint = next(row for row in registry.list_artefacts(run.id) if row.kind == "checkpoint")
    parents = {row.uri for row in registry.parents(checkpoint.id)}
    assert {str(model) for model in models.values()} <= parents
    assert registry.list_leases() == [] and processes(home) == []
