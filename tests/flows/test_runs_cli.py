"""`loopwright runs`: what is listed, shown and compared."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from flows.runs_cli import runs
from infra.registry import NotFound, Registry


def command(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(runs, arguments)
    assert result.exit_code == code, (result.output, result.exception)
    return result


def as_json(*arguments: str, code: int = 0) -> Any:
    return json.loads(command(*arguments, "--json", code=code).stdout)


@pytest.fixture
def registry(home: Path) -> Registry:
    """Two runs that differ in learning rate and result, one of them a trial; a third that failed twice."""
    registry = Registry()
    sweep = registry.create_sweep("lr", {})
    for number, (name, rate) in enumerate([("first", 1e-6), ("second", 2e-6)]):
        config = {"name": name, "type": "sft", "learning_rate": rate, "dataset": {"path": "rows", "max_rows": None}}
        run = registry.create_run(name, "sft-long-context", config, tags={"team": "a"}, output_dir=f"/runs/{name}")
        registry.start_attempt(run.id)
        registry.end_attempt(run.id, 1, "FINISHED")
        registry.set_stage(run.id, "train", {"step": 10, "checkpoint": f"/runs/{name}/checkpoint-10"})
        registry.set_stage(run.id, "evaluate", {"accuracy": 0.25 + number})
        registry.progress(run.id, {"step": 10, "max_steps": 10, "loss": 0.5})
        registry.add_costs(run.id, 1, {"gpu_s/trainer": 60.0, "usd": 0.04 + number})
        registry.update_run(run.id, status="FINISHED")
        if number:
            registry.record_trial(sweep.id, 0, "lr:0:1", run_id=run.id)
    failed = registry.create_run("failed", "train-grpo", {"name": "failed", "type": "grpo"}, tags={"team": "b", "why": "x=y"})
    for number in (1, 2):
        registry.start_attempt(failed.id)
        registry.end_attempt(failed.id, number, "FAILED", "infrastructure", "vLLM server died\nits log", "Traceback: mine")
    registry.update_run(failed.id, status="FAILED", failure_class="infrastructure", cause="vLLM server died\nits log")
    return registry


def names(*arguments: str) -> list[str]:
    rows = as_json("list", *arguments)
    listed = command("list", *arguments).stdout.splitlines()
    assert listed[0].split() == ["NAME", "FLOW", "STATUS", "STEP", "CREATED", "CAUSE"]
    assert [line.split()[0] for line in listed[1:]] == [row["name"] for row in rows]
    return [row["name"] for row in rows]


def test_list_filters(registry: Registry) -> None:
    assert names() == ["failed", "second", "first"]
    assert names("--limit", "2") == ["failed", "second"]
    assert names("--status", "finished") == ["second", "first"]
    assert names("--flow", "train-grpo") == ["failed"]
    assert names("--tag", "team=a") == ["second", "first"]
    assert names("--tag", "team=b", "--tag", "why=x=y") == ["failed"]
    assert names("--tag", "team=a", "--tag", "why=x=y") == []
    assert names("--sweep", "lr") == ["second"]
    assert names("--sweep", "lr", "--status", "failed") == []


def test_list_shows_progress_and_the_first_line_of_the_cause(registry: Registry) -> None:
    lines = command("list").stdout.splitlines()
    assert lines[1].endswith("vLLM server died") and " 10/10 " in lines[2]
    row = as_json("list", "--limit", "1")[0]
    assert (row["status"], row["failure_class"], row["tags"]) == ("FAILED", "infrastructure", {"team": "b", "why": "x=y"})
    assert "config" not in row


def test_list_refuses_what_it_cannot_mean(registry: Registry) -> None:
    assert "`team` is not of the form KEY=VALUE" in command("list", "--tag", "team", code=2).output
    assert isinstance(command("list", "--sweep", "nope", code=1).exception, NotFound)
    assert "0 is not in the range" in command("list", "--limit", "0", code=2).output


def test_show_tells_everything(registry: Registry) -> None:
    run = registry.get_run("first")
    registry.record_checkpoint(run.id, 10, "/runs/first/checkpoint-10", uri="s3://bucket/first/checkpoint-10")
    registry.update_checkpoint(run.id, 10, pinned=True)
    registry.end_server(registry.record_server(run.id, "student-0", "http://127.0.0.1:1", 7).id, "exit code 0")
    dataset = registry.record_artefact("dataset", "rows.jsonl")
    made = registry.record_artefact("checkpoint", "/runs/first/checkpoint-10", run_id=run.id)
    later = registry.record_artefact("checkpoint", "/runs/second/checkpoint-1", run_id=registry.get_run("second").id)
    registry.link(dataset.id, made.id)
    registry.link(made.id, later.id)
    registry.create_run("child", "sft-long-context", parent_run_id=run.id)

    rows = [line.split() for line in command("show", "first").stdout.splitlines()]
    for wanted in (
        ["status", "FINISHED"],
        ["tag", "team", "a"],
        ["cost", "gpu_s/trainer", "60", "s"],
        ["cost", "usd", "0.04", "USD"],
        ["progress", "loss", "0.5"],
        ["from", "dataset", "rows.jsonl"],
        ["made", "checkpoint", "/runs/first/checkpoint-10"],
        ["used", "for", "checkpoint", "second", "/runs/second/checkpoint-1"],
        ["child", "PENDING"],
    ):
        assert wanted in rows, (wanted, rows)
    assert any(row[:1] == ["10"] and row[-2:] == ["pinned", "s3://bucket/first/checkpoint-10"] for row in rows)
    assert any(row[:2] == ["student-0", "http://127.0.0.1:1"] and row[-3:] == ["exit", "code", "0"] for row in rows)
    found = as_json("show", run.id)
    assert found["config"]["learning_rate"] == 1e-6 and found["costs"] == {"gpu_s/trainer": 60.0, "usd": 0.04}
    assert [row["run"] for row in found["lineage"]["children"]] == ["second"]
    assert as_json("show", "child")["parent_run"] == "first"


def test_show_names_the_failure_of_each_attempt_and_ends_with_the_traceback(registry: Registry) -> None:
    registry.update_run(registry.get_run("failed").id, traceback="Traceback: mine\nValueError: no")
    text = command("show", "failed").stdout
    assert text.rstrip().endswith("Traceback: mine\nValueError: no")
    rows = [line.split() for line in text.splitlines()]
    assert [row[:3] for row in rows if row[-3:] == ["vLLM", "server", "died"] and row[0].isdigit()] == [
        ["1", "FAILED", "infrastructure"],
        ["2", "FAILED", "infrastructure"],
    ]
    assert isinstance(command("show", "nope", code=1).exception, NotFound)


def test_diff_names_what_differs_and_says_by_its_exit_code_whether_configs_do(registry: Registry) -> None:
    text = command("diff", "first", "second", code=1).stdout
    rows = [line.split() for line in text.splitlines() if line]
    assert rows == [
        ["CONFIG", "first", "second"],
        ["learning_rate", "1e-06", "2e-06"],
        ["RESULT", "first", "second"],
        ["checkpoint", "/runs/first/checkpoint-10", "/runs/second/checkpoint-10"],
        ["accuracy", "0.25", "1.25"],
        ["COSTS", "first", "second"],
        ["usd", "0.04", "1.04"],
    ]
    everything = as_json("diff", "first", "second", "--all", code=1)
    assert everything["config"]["dataset.path"] == ["rows", "rows"] and everything["config"]["name"] == ["first", "second"]
    assert as_json("diff", "first", "failed", code=1)["config"]["dataset.path"] == ["rows", "–"]


def test_runs_of_one_config_differ_in_nothing_that_counts(registry: Registry) -> None:
    config = {**registry.get_run("first").config, "name": "again", "tags": {}}
    registry.create_run("again", "sft-long-context", config)
    sections = as_json("diff", "first", "again")
    assert sections["config"] == {} and sections["result"]["status"] == ["FINISHED", "PENDING"]
    as_json("diff", "first", "again", "--all")
    assert command("diff", "first", "first").stdout == "first and first do not differ\n"
    assert isinstance(command("diff", "first", "nope", code=1).exception, NotFound)


def test_diff_tells_versions_where_the_folders_still_do(registry: Registry, tmp_path: Path) -> None:
    from infra import provenance

    for name, version in (("first", "1.0"), ("second", "2.0")):
        folder = tmp_path / name
        folder.mkdir()
        facts = {"format": provenance.FORMAT, "packages": {"torch": version}, "dataset": {}, "model": {}}
        (folder / provenance.FILE).write_text(json.dumps(facts))
        registry.update_run(registry.get_run(name).id, output_dir=str(folder))
    (difference,) = as_json("diff", "first", "second", code=1)["circumstances"].items()
    assert "torch" in difference[0] and difference[1] == ["1.0", "2.0"]


def test_listing_imports_nothing_heavy_and_reads_no_configs(registry: Registry) -> None:
    """What makes a thousand runs be listed within a second; the figure is measured by `benchmarks.platform_overhead`."""
    code = (
        "import sys; from sqlalchemy import Engine, event; seen = []\n"
        "event.listen(Engine, 'before_cursor_execute', lambda c, k, statement, *_: seen.append(statement))\n"
        "from flows.cli import cli\n"
        "try: cli(['runs', 'list'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'prefect', 'mlflow', 'pydantic', 'transformers', 'httpx', 'alembic', 'yaml'} & set(sys.modules)\n"
        "read = [text for text in seen if 'FROM runs' in text]\n"
        "assert read and not any('runs.config,' in text or 'runs.stages' in text for text in read), read\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 4
