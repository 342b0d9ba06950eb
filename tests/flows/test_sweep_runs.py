"""Sweeps by name, what is said of those that are gone, and the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from flows.cli import cli
from flows.sweep_file import sweep_config
from flows.sweep_reaping import reap_sweeps, sweep_folder
from flows.sweep_report import best_so_far, markdown, summary, write
from flows.sweep_runs import SweepRefused, check_startable, config_of, named, open_sweep, reopen_failed
from infra.registry import Owner, Registry
from tests.flows.sweep_fakes import SWEEP

GONE = Owner(pid=2**22 - 1, start_time=1.0, host=Owner.current().host)
CONFIG = sweep_config(SWEEP)


@pytest.fixture
def registry(home: Path) -> Registry:
    return Registry()


def test_of_a_name_there_is_one_sweep(registry: Registry) -> None:
    row, resumed = open_sweep(registry, CONFIG, "flow-run")
    assert not resumed and (row.status, row.owner) == ("RUNNING", Owner.current())
    assert config_of(row) == CONFIG
    with pytest.raises(SweepRefused, match=rf"is running \(process {os.getpid()} on "):
        open_sweep(registry, CONFIG, None)
    registry.update_sweep(row.id, owner=GONE)
    other = sweep_config(SWEEP | {"seed": 5, "base": {**SWEEP["base"], "max_steps": 3}, "parallel": 1})
    with pytest.raises(SweepRefused, match=r"these fields differ: base\.max_steps, seed\. "):
        check_startable(registry, other)
    again, resumed = open_sweep(registry, sweep_config(SWEEP | {"parallel": 1, "limits": {"failed_trials": 1}}), None)
    assert resumed and again.id == row.id and again.config["parallel"] == 1
    registry.update_sweep(row.id, status="FINISHED", owner=None)
    with pytest.raises(SweepRefused, match="is finished"):
        open_sweep(registry, CONFIG, None)


def test_a_new_sweep_does_not_take_over_runs_that_are_no_trials_of_it(registry: Registry) -> None:
    registry.create_run("s-t12", "sft-long-context")
    registry.create_run("s-tail", "sft-long-context")
    with pytest.raises(SweepRefused, match="a run is named 's-t12' already"):
        open_sweep(registry, CONFIG, None)


def test_failed_trials_are_tried_again_when_asked(registry: Registry) -> None:
    row, _ = open_sweep(registry, CONFIG, None)
    registry.record_trial(row.id, 0, "s:0:1", attempt=1, params={"seed": 1}, status="FAILED")
    registry.record_trial(row.id, 1, "s:1:1", attempt=1, params={"seed": 2}, status="FINISHED", value=1.0)
    registry.update_sweep(row.id, status="FINISHED", owner=None)
    assert [(trial.number, trial.attempt, trial.params) for trial in reopen_failed(registry, row)] == [(0, 2, {"seed": 1})]
    assert reopen_failed(registry, row) == []
    assert open_sweep(registry, CONFIG, None)[1]


def test_names_are_made_of_the_day_or_of_the_flow_run(registry: Registry) -> None:
    due = datetime(2026, 5, 4, 2)
    dated = CONFIG.model_copy(update={"name": "nightly-{date}"})
    assert named(registry, dated, None, "x", due).name == "nightly-2026-05-04"
    nameless = CONFIG.model_copy(update={"name": None})
    assert named(registry, nameless, "id", "quick fox", due).name == "quick-fox"
    open_sweep(registry, CONFIG, "id")
    assert named(registry, nameless, "id", "another", due).name == "s"  # Prefect's retry of the same flow run
    assert named(registry, dated, "id", "x", datetime(2026, 5, 5, 0)).name == "s"  # also one that is due on the next day


def test_a_sweep_whose_process_is_gone_has_failed(registry: Registry) -> None:
    row, _ = open_sweep(registry, CONFIG, None)
    assert reap_sweeps(registry) == []
    registry.update_sweep(row.id, owner=GONE)
    assert reap_sweeps(registry) == ["s"]
    reaped = registry.get_sweep("s")
    assert reaped.status == "FAILED" and f"process {GONE.pid}" in str(reaped.cause)
    assert reap_sweeps(registry) == []
    assert open_sweep(registry, CONFIG, None)[1]
    assert sweep_folder("s").parent.parent == Path(os.environ["LOOPWRIGHT_HOME"])


def trials(registry: Registry) -> list[Any]:
    row, _ = open_sweep(registry, CONFIG, None)
    for number, (status, value) in enumerate([("FINISHED", 3.0), ("FINISHED", 1.0), ("PRUNED", 7.0), ("FAILED", None)]):
        params = {"learning_rate": 10.0**-number, "note": "a|b"}
        registry.record_trial(
            row.id, number, f"s:{number}:1", params=params, status=status, value=value, attempt=1, ended_at=10.0 - number
        )
    return registry.list_trials(row.id)


def test_the_report_has_the_best_what_mattered_and_every_trial(registry: Registry, tmp_path: Path) -> None:
    rows = trials(registry)
    found = summary(CONFIG, rows, {"learning_rate": 0.75, "note": 0.25})
    assert found["best"] == {"trial": 1, "run": "s-t1", "value": 1.0, "params": {"learning_rate": 0.1, "note": "a|b"}}
    assert found["counts"] == {"FINISHED": 2, "PRUNED": 1, "FAILED": 1, "RUNNING": 0}
    assert summary(sweep_config(SWEEP | {"direction": "maximize"}), rows)["best"]["trial"] == 0
    assert best_so_far(found) == [(1.0, 1.0), (3.0, 1.0)]  # in the order they ended
    page = markdown(found)
    assert "**Best**: run `s-t1`, loss **1** (minimize)" in page
    assert "| `learning_rate` | 0.750 |" in page
    assert "| 2 | PRUNED | 7 | 0.01 | a\\|b |" in page and "| 3 | FAILED |  | 0.001 |" in page
    folder = write(tmp_path / "report", found)
    assert json.loads((folder / "sweep.json").read_text()) == found
    for name in ("history.png", "importance.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")


def test_the_report_of_a_sweep_without_values(registry: Registry, tmp_path: Path) -> None:
    found = summary(CONFIG, [], {})
    page = markdown(found)
    assert "6 trials: none yet." in page and "No trial has a value yet." in page
    assert "Too few finished trials" in page
    assert {file.name for file in write(tmp_path / "report", found).iterdir()} == {"sweep.json", "sweep.md", "history.png"}


def test_show_and_its_json_agree(registry: Registry) -> None:
    from click.testing import CliRunner

    trials(registry)
    shown = CliRunner().invoke(cli, ["sweep", "show", "s"])
    assert shown.exit_code == 0, shown.output
    lines = [line.split() for line in shown.output.splitlines()]
    assert ["best", "s-t1,", "loss", "1"] in lines and ["s-t2", "PRUNED", "7", "0.01", "a|b"] in lines
    found = json.loads(CliRunner().invoke(cli, ["sweep", "show", "s", "--json"]).output)
    assert found["best"]["run"] == "s-t1" and found["status"] == "RUNNING" and len(found["rows"]) == 4


def test_bad_input_is_told_in_lines_and_starts_nothing(home: Path, tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps(SWEEP | {"space": {"learning_rat": [1.0]}}))
    command = [sys.executable, "-c", "from flows.cli import main; main()", "sweep", "run", str(tmp_path / "sweep.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    hint = "unknown field `learning_rat` in SFTRunConfig: did you mean `learning_rate`?"
    assert all(line.startswith("error: ") and line.endswith(hint) for line in done.stderr.splitlines())
    done = subprocess.run([*command[:3], "sweep", "show", "none"], capture_output=True, text=True, timeout=120)
    told = "error: no sweep is named 'none'; there is none yet; `loopwright sweep run FILE` starts one\n"
    assert (done.returncode, done.stderr) == (2, told)
    assert Registry().list_sweeps() == [] and not (home / "prefect").exists()


def test_the_example_is_a_valid_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flows.sweep_file import load_sweep
    from flows.sweep_space import checked

    monkeypatch.chdir(tmp_path)
    example = Path(__file__).parents[2] / "examples" / "sweep_gsm8k.yaml"
    plan = checked(load_sweep(example))
    trial = plan.trial_config(0, {"learning_rate": 1e-5, "num_generations": 8})
    assert trial.max_steps == 60 and trial.eval is not None and trial.eval.every == plan.config.pruning.every_steps
