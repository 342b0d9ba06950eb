"""Evaluating a run's checkpoint, or a model: what is measured, with which words it is refused, and where the figures go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.config import SFTRunConfig
from flows.config_file import ConfigErrors
from flows.evaluate_config import EvaluateConfig
from flows.evaluate_file import load_evaluation
from flows.evaluate_flow import measure
from flows.evaluate_subject import subject
from flows.runs import stored
from infra.registry import Registry, RunRow
from tests.support.tiny_model import build_tiny_model
from trainers.errors import ConfigError

REWARD = "def reward(completions, answer, **columns):\n    return [float(bool(text)) for text in answer]\n"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Any]:
    """A held-out set of four problems, of which the reward gives points for three, and that reward."""
    rows = [{"prompt": f"{index}+1=", "answer": "x" if index else ""} for index in range(4)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(REWARD)
    return {
        "dataset": {"path": str(tmp_path / "test.jsonl")},
        "reward_func": {"path": f"{tmp_path}/reward.py:reward"},
        "max_completion_length": 2,
    }


@pytest.fixture
def run(home: Path, tmp_path: Path) -> RunRow:
    """A run with two checkpoints, one of which is not here."""
    config = SFTRunConfig(name="trained", model=str(tmp_path / "model"), dataset={"path": "rows.jsonl"})  # type: ignore[arg-type]
    registry = Registry()
    made = registry.create_run("trained", "sft-long-context", stored(config), output_dir=str(home / "runs" / "trained"))
    registry.update_run(made.id, status="RUNNING", mlflow_run_id="0" * 32)
    registry.record_checkpoint(made.id, 4, str(tmp_path / "model"))
    registry.record_checkpoint(made.id, 8, str(tmp_path / "elsewhere"))
    return made


def test_a_checkpoint_of_a_run_that_trains_is_measured_as_a_child_of_its_mlflow_run(
    home: Path, tmp_path: Path, run: RunRow, files: dict[str, Any]
) -> None:
    build_tiny_model(tmp_path / "model")
    config = EvaluateConfig(run="trained", step=4, name="held out", **files)
    found = subject(config, Registry())
    assert (found.step, found.model, found.fields["eval"]["every"]) == (4, str(tmp_path / "model"), 0)
    result = measure(config, found, Registry())
    assert (result["accuracy"], result["scored"], result["subject"]) == (0.75, 4, "trained step 4")

    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{home}/mlflow/mlflow.db")
    tracked = client.get_run(result["mlflow_run"])
    assert (tracked.info.status, tracked.info.run_name) == ("FINISHED", "held out")
    assert tracked.data.tags["mlflow.parentRunId"] == "0" * 32 and tracked.data.tags["loopwright.step"] == "4"
    points = client.get_metric_history(result["mlflow_run"], "eval/accuracy")
    assert [(point.step, point.value) for point in points] == [(4, 0.75)]
    assert [item.path for item in client.list_artifacts(result["mlflow_run"], "evaluation")] == ["evaluation/evaluate.out.json"]
    assert Registry().list_leases() == []


def test_what_a_run_does_not_have_is_said(run: RunRow, files: dict[str, Any]) -> None:
    registry = Registry()
    with pytest.raises(ConfigError, match=r"has no checkpoint of step 5 \(checkpoints: 4, 8\)"):
        subject(EvaluateConfig(run="trained", step=5, **files), registry)
    with pytest.raises(ConfigError, match=r"not on this machine: loopwright checkpoints fetch trained 8"):
        subject(EvaluateConfig(run="trained", **files), registry)
    Path(run.output_dir or "", "..", "..").mkdir(parents=True, exist_ok=True)
    registry.forget_checkpoint(run.id, 8)
    Path(registry.list_checkpoints(run.id)[0].path).mkdir()
    with pytest.raises(ConfigError, match="has no `eval`: say what to evaluate it on, by `dataset`"):
        subject(EvaluateConfig(run="trained"), registry)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([], "either `run`, a run's checkpoint, or `model`"),
        (["run=a", "model=b"], "give one of the two"),
        (["model=b"], "`dataset` is required with `model`"),
        (["model=b", "dataset.path=c", "reward_func=d:e", "step=3"], "`step` is of a run's checkpoint"),
        (["run=a", "server.url=http://x"], "`server` goes with `model`"),
        (["model=b", "dataset.path=c", "reward_func=d:e", "server.gpus=1"], "server.url is missing"),
        (["run=a", "stepp=3"], "unknown field `stepp`"),
    ],
)
def test_a_config_that_cannot_be_is_refused(fields: list[str], message: str) -> None:
    with pytest.raises(ConfigErrors, match=message.replace("(", r"\(")):
        load_evaluation(None, fields)


def test_a_file_and_fields_over_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, Any]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evaluate.yaml").write_text("run: trained\nreward_func: reward.py:reward\ndataset: {path: test.jsonl}\n")
    config = load_evaluation(Path("evaluate.yaml"), ["step=4"])
    assert (config.run, config.step) == ("trained", 4)
    assert config.dataset is not None and config.dataset.path == files["dataset"]["path"]
    assert config.reward_func is not None and config.reward_func.path == files["reward_func"]["path"]


def test_a_models_problems_are_put_as_the_config_says(home: Path, tmp_path: Path, files: dict[str, Any]) -> None:
    shown = {"enable_thinking": False}
    found = subject(EvaluateConfig(model=str(tmp_path), chat_template_kwargs=shown, **files), Registry())
    assert found.fields["chat_template_kwargs"] == shown
