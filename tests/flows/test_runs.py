"""Runs by name: new, resumed, refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.config import GRPORunConfig, trainer_fields
from flows.runs import RunRefused, check_startable, config_of, named, open_run, plain_name
from infra.registry import Owner, Registry

Make = Callable[..., GRPORunConfig]


@pytest.fixture
def registry(home: Path) -> Registry:
    return Registry()


def test_a_new_run_is_running_owned_and_knows_its_folder_and_config(registry: Registry, config: Make, home: Path) -> None:
    run, resumed = open_run(registry, config(seed=5), "train-grpo", "flow-run-1")
    assert not resumed
    assert (run.status, run.owner, run.prefect_flow_run_id) == ("RUNNING", Owner.current(), "flow-run-1")
    assert run.output_dir == str(home / "runs" / "test")
    assert config_of(run) == config(seed=5)


def test_a_failed_run_goes_on_under_the_same_name(registry: Registry, config: Make) -> None:
    first, _ = open_run(registry, config(), "train-grpo")
    registry.update_run(first.id, status="FAILED", cause="x", failure_class="user", owner=None)
    again, resumed = open_run(registry, config(retry={"infrastructure": 9}), "train-grpo")
    assert resumed and again.id == first.id
    assert (again.status, again.cause, again.failure_class) == ("RUNNING", None, None)
    assert again.config["retry"]["infrastructure"] == 9  # how it is attended to may change


def test_a_run_whose_process_is_gone_goes_on_though_it_says_running(registry: Registry, config: Make) -> None:
    run, _ = open_run(registry, config(), "train-grpo")
    registry.update_run(run.id, owner=Owner(2**22 + 1, 1.0, Owner.current().host))
    assert open_run(registry, config(), "train-grpo")[1]


def test_a_running_run_is_refused(registry: Registry, config: Make) -> None:
    open_run(registry, config(), "train-grpo")
    with pytest.raises(RunRefused, match=r"run 'test' is running \(process \d+ on "):
        check_startable(registry, config())


def test_a_running_run_of_another_machine_is_refused(registry: Registry, config: Make) -> None:
    run, _ = open_run(registry, config(), "train-grpo")
    registry.update_run(run.id, owner=Owner(1, 1.0, "elsewhere"))
    with pytest.raises(RunRefused, match="on elsewhere"):
        check_startable(registry, config())


def test_another_config_is_refused_once_there_is_a_checkpoint_and_the_differing_fields_are_named(
    registry: Registry, config: Make
) -> None:
    run, _ = open_run(registry, config(), "train-grpo")
    registry.update_run(run.id, status="FAILED", owner=None)
    registry.record_checkpoint(run.id, 5, "/somewhere/checkpoint-5")
    with pytest.raises(RunRefused, match=r"these fields differ: learning_rate, trainer\.ranks\."):
        check_startable(registry, config(learning_rate=0.5, trainer={"ranks": 2}))


def test_a_run_without_a_checkpoint_starts_anew_with_a_corrected_config(registry: Registry, config: Make, capsys) -> None:
    run, _ = open_run(registry, config(), "train-grpo")
    registry.update_run(run.id, status="FAILED", owner=None, mlflow_run_id="first", progress={"step": 1})
    registry.set_stage(run.id, "evaluate_before", {"accuracy_before": 0.5})
    tracked = Path(str(run.output_dir), "tracking")
    tracked.mkdir(parents=True)
    again, resumed = open_run(registry, config(learning_rate=0.5), "train-grpo")
    assert (again.id, resumed, again.mlflow_run_id, again.stages, again.progress) == (run.id, False, None, {}, {})
    assert again.config["learning_rate"] == 0.5 and not tracked.exists()
    assert "it starts anew with other values of learning_rate" in capsys.readouterr().out
    registry.update_run(run.id, status="FAILED", owner=None)
    assert open_run(registry, config(learning_rate=0.5), "train-grpo")[1]


def test_a_run_that_its_flow_is_still_ending_is_refused(registry: Registry, config: Make) -> None:
    run, _ = open_run(registry, config(), "train-grpo")
    registry.update_run(run.id, status="KILLED")
    with pytest.raises(RunRefused, match="is running"):
        check_startable(registry, config())


def test_a_finished_run_is_refused(registry: Registry, config: Make) -> None:
    run, _ = open_run(registry, config(), "train-grpo")
    registry.update_run(run.id, status="FINISHED", owner=None)
    with pytest.raises(RunRefused, match="is finished: choose another name"):
        check_startable(registry, config())


def test_checkpoints_of_another_config_that_no_run_here_wrote_are_refused(registry: Registry, config: Make, home: Path) -> None:
    mine = config()
    folder = home / "runs" / "test"
    checkpoint = folder / "checkpoint-3"
    checkpoint.mkdir(parents=True)
    written = {**trainer_fields(mine, folder), "vllm_server_base_url": "http://127.0.0.1:1"}
    (checkpoint / "loopwright_config.json").write_text(json.dumps(written))
    assert check_startable(registry, mine) is None  # its registry was lost: the run goes on
    with pytest.raises(RunRefused, match=r"checkpoints of another run, whose config differs in learning_rate: choose"):
        open_run(registry, config(learning_rate=0.5), "train-grpo")
    assert registry.list_runs() == []


def test_a_nameless_config_takes_its_flow_runs_name_and_finds_its_run_again_on_a_retry(
    registry: Registry, config: Make
) -> None:
    fresh = named(registry, config(name=None), "id-1", "red seagull")
    assert fresh.name == "red-seagull"
    open_run(registry, fresh, "train-grpo", "id-1")
    assert named(registry, config(name=None), "id-1", "renamed since").name == "red-seagull"
    assert named(registry, config(name="own"), "id-1", "x").name == "own"


@pytest.mark.parametrize(("text", "name"), [("a b/c", "a-b-c"), ("--", "run"), ("ok_1.2", "ok_1.2")])
def test_plain_names(text: str, name: str) -> None:
    assert plain_name(text) == name
