"""A whole run through every real part: the command, Prefect, a vLLM server, the trainer, MLflow."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infra.registry import Registry
from tests.conftest import SharedServer
from tests.flows.runs_for_real import ledger, processes, start, write_experiment


@pytest.mark.server
def test_a_grpo_run_from_the_command_line(vllm_server: SharedServer, home: Path, tmp_path: Path) -> None:
    path = write_experiment(
        tmp_path,
        vllm_server.model_dir,
        prompts=6,
        name="whole",
        save_steps=2,
        log_completions=True,
        num_completions_to_print=1,
        keep_rollout_every=10,
        eval={"dataset": {"path": str(tmp_path / "rows.jsonl")}},
        servers={"student": {"url": vllm_server.url, "api_key_env": "STUDENT_KEY"}},
        tags={"purpose": "test"},
    )
    log = tmp_path / "log"
    code = start("run", "grpo", str(path), log=log, STUDENT_KEY=vllm_server.key).wait(560)
    assert code == 0, log.read_text()[-5000:]

    registry = Registry()
    run = registry.get_run("whole")
    assert (run.status, run.cause, run.owner) == ("FINISHED", None, None)
    assert set(run.stages) == {"evaluate_before", "train", "evaluate", "register"}
    checkpoint = Path(run.stages["train"]["checkpoint"])
    assert ledger(checkpoint) == {"trained": 6, "dropped": {}, "step": 3}
    assert run.progress["step"] == 3

    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{home}/mlflow/mlflow.db")
    tracked = client.get_run(str(run.mlflow_run_id))
    assert tracked.info.status == "FINISHED"
    assert tracked.data.tags["purpose"] == "test"
    assert [point.step for point in client.get_metric_history(tracked.info.run_id, "loss")] == [1, 2, 3]
    assert [point.step for point in client.get_metric_history(tracked.info.run_id, "eval/accuracy")] == [0, 3]
    assert client.get_model_version("whole", run.stages["register"]["version"]).run_id == tracked.info.run_id
    traces = client.search_traces(locations=[tracked.info.experiment_id], run_id=tracked.info.run_id)
    assert len(traces) == 3  # rollouts 0, 10 and 20 of 24
    for trace in traces:
        root, turn = sorted(trace.data.spans, key=lambda span: span.parent_id is not None)
        assert root.start_time_ns <= turn.start_time_ns < turn.end_time_ns <= root.end_time_ns
        assert root.attributes["rewards/reward"] == root.attributes["reward"]
    trainer_log = next(checkpoint.parent.glob("logs/trainer-*.log")).read_text()
    assert all(f"\nStep {step} " in trainer_log for step in (1, 2, 3)) and "| Prompt " in trainer_log

    assert registry.list_leases() == []
    assert processes(home) == []
    text = log.read_text()
    assert vllm_server.key not in text
    stored = "".join(file.read_text(errors="replace") for file in home.rglob("*.json"))
    assert vllm_server.key not in stored and os.environ.get("STUDENT_KEY") is None


@pytest.mark.server
def test_a_run_that_fails_says_why_everywhere_and_goes_on_when_the_cause_is_gone(
    vllm_server: SharedServer, home: Path, tmp_path: Path
) -> None:
    """A reward that raises, then is mended: FAILED with its cause, then resumed under the same name."""
    path = write_experiment(
        tmp_path, vllm_server.model_dir, prompts=4, name="mended", servers={"student": {"url": vllm_server.url}}
    )
    good = (tmp_path / "rewards.py").read_text()
    (tmp_path / "rewards.py").write_text("def reward(completions, **columns):\n    raise KeyError('colour')\n")
    log = tmp_path / "log"
    code = start("run", "grpo", str(path), log=log, VLLM_API_KEY=vllm_server.key).wait(560)
    assert code == 1, log.read_text()[-5000:]
    run = Registry().get_run("mended")
    assert run.status == "FAILED" and run.failure_class == "user" and "colour" in str(run.cause)
    assert log.read_text().rstrip().splitlines()[-1].startswith("error: ")

    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{home}/mlflow/mlflow.db")
    assert client.get_run(str(run.mlflow_run_id)).info.status == "FAILED"

    (tmp_path / "rewards.py").write_text(good)
    code = start("run", "grpo", str(path), log=log, VLLM_API_KEY=vllm_server.key).wait(560)
    assert code == 0, log.read_text()[-5000:]
    again = Registry().get_run("mended")
    assert (again.id, again.status, again.mlflow_run_id) == (run.id, "FINISHED", run.mlflow_run_id)
    assert ledger(Path(again.stages["train"]["checkpoint"]))["trained"] == 4
    assert processes(home) == []
