"""A run's facts, the same run again with the same curve, and what is said when something is no longer as it was."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from flows.cli import cli
from flows.reproduce import ReproduceRefused, plan, start
from infra import provenance
from infra.registry import Registry
from tests.flows.runs_for_real import sft_config
from tests.support.tiny_model import build_tiny_model

# Both on one Prefect server, which takes longer to start than a run.
TWICE = """
import sys
from flows import prefect_api
from flows.cli import cli
with prefect_api.api():
    cli(["run", "sft", sys.argv[1]], standalone_mode=False)
    cli(["reproduce", "first", "--name", "again"], standalone_mode=False)
"""


def experiment(folder: Path) -> Path:
    folder.mkdir()
    fields = {"max_steps": 6, "save_steps": 3, "learning_rate": 1e-3, "seed": 7, "per_device_train_batch_size": 4}
    config = sft_config(folder, "first", rows=24, **fields)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def curve(run_id: str) -> list[tuple[int, float]]:
    from mlflow import MlflowClient

    from infra.tracking import default_uri

    return [(point.step, point.value) for point in MlflowClient(default_uri()).get_metric_history(run_id, "loss")]


def test_the_same_run_again_has_the_same_curve_and_what_has_changed_is_named(home: Path, tmp_path: Path) -> None:
    path = experiment(tmp_path / "experiment")
    done = subprocess.run([sys.executable, "-c", TWICE, str(path)], capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    said = done.stdout.partition("first, attempt 1, against now:\n")[2].partition("run again; Prefect at")[0]
    assert said and not any(word in said for word in ("!", "package", "model", "dataset")), said  # code may be worked on

    registry = Registry()
    first, again = registry.get_run("first"), registry.get_run("again")
    assert (first.status, again.status, again.parent_run_id) == ("FINISHED", "FINISHED", first.id)
    assert again.config["tags"]["loopwright.reproduces"] == "first"
    assert first.mlflow_run_id and again.mlflow_run_id and first.output_dir
    losses = curve(first.mlflow_run_id)
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5, 6] and len({value for _, value in losses}) == 6
    assert curve(again.mlflow_run_id) == losses, "bit for bit"
    _facts_are_everywhere(Path(first.output_dir), first.mlflow_run_id)
    _changes_are_named(tmp_path / "experiment", Path(first.output_dir))


def _facts_are_everywhere(folder: Path, mlflow_run: str) -> None:
    from mlflow import MlflowClient

    from infra.tracking import default_uri

    facts = provenance.read(folder)
    assert facts is not None and facts["attempt"] == 1
    assert facts["packages"]["torch"] and facts["packages"]["prefect"]
    assert facts["dataset"]["rows"] == 24 and facts["dataset"]["fingerprint"] and facts["dataset"]["digest"]
    assert facts["model"]["digest"] and facts["config"]["seed"] == facts["seed"] == 7
    for checkpoint in (3, 6):
        copy = folder / f"checkpoint-{checkpoint}"
        assert provenance.read(copy) == facts
        assert provenance.FILE in json.loads((copy / "manifest.json").read_text())["files"]
    artefacts = MlflowClient(default_uri()).list_artifacts(mlflow_run, "provenance")
    assert [artefact.path for artefact in artefacts] == ["provenance/provenance-1.json"]


def _changes_are_named(experiment: Path, folder: Path) -> None:
    def check(*arguments: str) -> tuple[int, list[str]]:
        result = CliRunner().invoke(cli, ["reproduce", *arguments, "--check"], catch_exceptions=False)
        return result.exit_code, result.output.splitlines()[1:]

    assert check("first")[0] == 0
    assert check(str(folder / "checkpoint-3"))[0] == 0, "a checkpoint is enough, without the registry"

    rows = experiment / "rows.jsonl"
    before = rows.read_text()
    rows.write_text(before.replace('"46"', '"47"'))
    code, lines = check("first")
    assert code == 1 and lines[0].startswith(f"! dataset {rows} (fingerprint): ")
    with pytest.raises(ReproduceRefused, match="cannot be reproduced exactly:\n  dataset"):
        start(plan("first"))
    (experiment / "other.jsonl").write_text(rows.read_text())
    assert check("first", f"dataset.path={experiment / 'other.jsonl'}")[0] == 0, "another one on purpose"
    rows.write_text(before.replace(", ", ",  "))
    assert check("first")[0] == 0, "the same rows in other bytes"

    build_tiny_model(experiment / "model", seed=1)
    code, lines = check("first")
    assert code == 1 and lines[0].startswith(f"! model {experiment / 'model'} (digest): ")
    rows.unlink()
    code, lines = check("first")
    assert code == 1 and any("cannot be read" in line for line in lines), lines


def test_differences_between_two_moments() -> None:
    then: dict[str, Any] = {
        "python": "3.11.7",
        "packages": {"torch": "2.13.0", "gone": "1"},
        "code": {"/code": {"commit": "a", "diff_digest": None}},
        "files": {"/code/reward.py": "1"},
        "model": {"name": "m", "revision": "r1"},
        "dataset": {"path": "d", "fingerprint": "f1", "digest": "x"},
    }
    now: dict[str, Any] = {
        "python": "3.11.7",
        "packages": {"torch": "2.14.0", "new": "2"},
        "code": {"/code": {"commit": "b", "diff_digest": "9"}},
        "files": {"/code/reward.py": "2"},
        "model": {"name": "m", "revision": "r2"},
        "dataset": {"path": "d", "fingerprint": "f1", "digest": "y"},
    }
    assert provenance.differences(then, then) == []
    found = [f"{'!' if each.serious else ''}{each}" for each in provenance.differences(then, now)]
    assert found == [
        "!model m (revision): r1 → r2",
        "file /code/reward.py: 1 → 2",
        "package gone: 1 → none",
        "package new: none → 2",
        "package torch: 2.13.0 → 2.14.0",
        "code /code (commit): a → b",
        "code /code (uncommitted changes): none → 9",
    ]


def test_a_run_that_is_not_there_and_one_whose_secret_is_not_stored(home: Path, tmp_path: Path) -> None:
    assert CliRunner().invoke(cli, ["reproduce", "nothing"]).exit_code != 0
    with pytest.raises(ReproduceRefused, match=r"has no provenance\.json"):
        plan(str(tmp_path))
    facts = {"config": {"type": "sft", "hub_token": "(removed)"}, "dataset": {}, "format": provenance.FORMAT}
    provenance.write(tmp_path, 1, facts)
    with pytest.raises(ReproduceRefused, match="hub_token: a secret, so it is not stored"):
        plan(str(tmp_path))


def test_git_state_is_of_the_moment_bounded_and_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from infra import git_state

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    assert git_state.top_level(tmp_path) is None or tmp_path.is_relative_to(Path.cwd())
    git("init", "-q")
    assert git_state.top_level(tmp_path) == tmp_path.resolve()
    (tmp_path / "code.py").write_text("x = 1\n")
    (tmp_path / ".env").write_text("A=1\n")
    git("add", "-A")
    git("commit", "-qm", "first")
    clean = git_state.git_state(tmp_path)
    assert clean["commit"] and (clean["diff"], clean["diff_digest"], clean["untracked"]) == ("", None, [])
    monkeypatch.setenv("MY_API_KEY", "canary-of-mine")
    (tmp_path / "code.py").write_text("x = 'canary-of-mine'\n")
    (tmp_path / ".env").write_text("A=plain-text\n")
    (tmp_path / "new.py").write_text("")
    dirty = git_state.git_state(tmp_path)
    assert dirty["commit"] == clean["commit"] and dirty["untracked"] == ["new.py"]
    assert "+x = '(removed)'" in dirty["diff"] and "plain-text" not in dirty["diff"] and dirty["diff_digest"]
    monkeypatch.setattr(git_state, "MAX_DIFF_CHARS", 20)
    cut = git_state.git_state(tmp_path)
    assert "… cut: " in cut["diff"] and len(cut["diff"]) < 60
