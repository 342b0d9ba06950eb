"""The command as a user runs it: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from flows.cli import cli
from infra.registry import Registry
from infra.vllm import ServerSpec

LOOPWRIGHT = (sys.executable, "-c", "from flows.cli import main; main()")


def loopwright(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*LOOPWRIGHT, *arguments], capture_output=True, text=True, env=dict(os.environ), timeout=120)
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture
def path(tmp_path: Path, home: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    path = tmp_path / "run.yaml"
    path.write_text(
        f"name: mine\nmodel: {tmp_path}/model\ndataset: {{path: {tmp_path}/rows.jsonl}}\n"
        "reward_funcs: ['trainers.rewards:exact_match_reward']\n"
    )
    return path


def test_help_names_every_command_and_imports_nothing_heavy() -> None:
    check = (
        "import sys; from flows.cli import cli\n"
        "try: cli(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'prefect', 'mlflow', 'sqlalchemy', 'pydantic', 'transformers', 'httpx'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for command in ("run", "resume", "reap", "runs", "config", "up", "down", "status", "serve", "servers", "quickstart"):
        assert f"\n  {command} " in done.stdout


@pytest.mark.parametrize(
    "given",
    [
        ["/m", "--", "--enable-lora", "--max-loras", "4"],
        ["/m", "--port", "8000", "--", "--enable-lora", "--max-loras", "4"],
        ["--port", "8000", "/m", "--", "--enable-lora", "--max-loras", "4"],
    ],
)
def test_serve_passes_on_to_vllm_what_stands_after_two_dashes(monkeypatch: pytest.MonkeyPatch, given: list[str]) -> None:
    specs: list[ServerSpec] = []
    monkeypatch.setattr("infra.vllm_serve._serve", lambda spec, options: specs.append(spec) or 0)
    monkeypatch.setattr("infra.vllm_serve.signal.signal", lambda *_: None)
    assert CliRunner().invoke(cli, ["serve", *given]).exit_code == 0
    assert (specs[0].model, specs[0].extra_args) == ("/m", ("--enable-lora", "--max-loras", "4"))


def test_config_show_tells_where_each_value_comes_from(path: Path) -> None:
    lines = loopwright("config", "show", "grpo", str(path), "optim.learning_rate=1e-4").stdout.splitlines()
    rows = {line.split()[0]: line.split(maxsplit=2) for line in lines}
    assert rows["name"][1:] == ['"mine"', str(path)]
    assert rows["learning_rate"][1:] == ["0.0001", "command line `optim.learning_rate=1e-4`"]
    assert rows["seed"][1:] == ["42", "default"]


def test_bad_input_is_one_line_each_on_stderr_with_exit_code_2_and_starts_nothing(path: Path, home: Path) -> None:
    done = loopwright("run", "grpo", str(path), "num_generation=3", code=2)
    assert done.stderr == (
        "error: command line `num_generation=3`: unknown field `num_generation` in GRPORunConfig: "
        "did you mean `num_generations`?\n"
    )
    done = loopwright("run", "grpo", str(path), code=2)
    assert done.stderr == f"error: model: there is no folder {path.parent}/model\n"
    assert Registry().list_runs() == []
    assert not (home / "prefect").exists()


def test_runs_are_listed_and_shown(home: Path) -> None:
    registry = Registry()
    run = registry.create_run("mine", "train-grpo", {"type": "grpo"}, output_dir="/x")
    registry.progress(run.id, {"step": 3, "max_steps": 10})
    registry.start_attempt(run.id)
    registry.end_attempt(run.id, 1, "FAILED", "user", "KeyError: answer")
    registry.record_checkpoint(run.id, 2, "/x/checkpoint-2")
    registry.update_run(run.id, status="FAILED", cause="KeyError: answer\nmore", failure_class="user")
    listed = loopwright("runs", "list", "--status", "failed").stdout
    assert "mine  train-grpo  FAILED  3/10" in listed and listed.rstrip().endswith("KeyError: answer")
    assert "mine" not in loopwright("runs", "list", "--status", "running").stdout
    shown = loopwright("runs", "show", "mine").stdout
    assert "/x/checkpoint-2" in shown and "1        FAILED" in shown


@pytest.mark.parametrize(
    "arguments",
    [
        "resume nobody",
        "reproduce nobody",
        "evaluate run=nobody",
        "servers list nobody",
        "checkpoints verify nobody",
        "export nobody x",
    ],
)
def test_unknown_runs_are_a_line_with_where_to_look_and_start_nothing(home: Path, arguments: str) -> None:
    done = loopwright(*arguments.split(), code=2)
    assert done.stderr.startswith("error: no run is named 'nobody'") and done.stderr.count("\n") == 1
    assert done.stderr.endswith("; `loopwright runs list` shows those there are\n")
    assert not (home / "prefect").exists()


def test_a_home_or_registry_that_cannot_be_used_is_an_error_not_a_traceback(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "registry.db").write_text("this is no database, and long enough to be looked at" * 20)
    done = loopwright("runs", "list", code=1)
    assert done.stderr == f"error: sqlite:///{home}/registry.db cannot be used: file is not a database\n"
    monkeypatch.setenv("LOOPWRIGHT_HOME", str(home / "registry.db"))
    done = loopwright("status", code=1)
    assert done.stderr == f"error: LOOPWRIGHT_HOME={home}/registry.db cannot be made: File exists\n"


@pytest.mark.parametrize(
    ("variable", "value", "arguments", "told"),
    [
        (
            "LOOPWRIGHT_REGISTRY_URL", "postgresql+psycopg://me:hidden-word@127.0.0.1:9/x", "runs list",
            "is LOOPWRIGHT_REGISTRY_URL right, and the database up?",
        ),
        ("PREFECT_API_URL", "http://127.0.0.1:9/api", "deploy", "no Prefect server answers at PREFECT_API_URL=http://127.0.0.1:9/api"),
    ],
)  # fmt: skip
def test_a_service_that_is_named_and_does_not_answer_is_one_line_with_what_to_mend(
    home: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, arguments: str, told: str
) -> None:
    monkeypatch.setenv(variable, value)
    done = loopwright(*arguments.split(), code=1)
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert told in done.stderr and "hidden-word" not in done.stderr


def test_a_status_that_does_not_exist_is_refused(home: Path) -> None:
    assert "'done' is not one of 'pending', 'running'" in loopwright("runs", "list", "--status", "done", code=2).stderr


def test_reap_and_status_say_when_there_is_nothing(home: Path) -> None:
    assert loopwright("reap").stdout == "nothing to reap\n"
    assert "not running" in loopwright("status").stdout
    assert loopwright("down").stdout == "nothing was running\n"
