"""When a trial may start, and that its process is one nothing outlives."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from flows.child_run import run_trial
from flows.config import RUN_CONFIGS, RunConfig
from flows.run_processes import RunProcesses, gpus_needed
from flows.runs import RunRefused, stored
from flows.sweep_file import sweep_config
from flows.sweep_space import Plan
from infra.leases import LeaseManager
from infra.registry import Owner, Registry
from tests.flows.runs_for_real import processes, wait_for
from tests.flows.sweep_fakes import SWEEP


def trial(number: int = 0, **base: Any) -> RunConfig:
    plan = Plan(sweep_config(SWEEP | {"base": SWEEP["base"] | base}))
    return plan.trial_config(number, {"learning_rate": 1.0})


@pytest.mark.parametrize(
    ("kind", "fields", "with_gpus", "without"),
    [
        ("sft", {"trainer": {"ranks": 2}}, 2, 0),
        ("sft", {"trainer": {"gpus": 0}}, 0, 0),
        ("grpo", {"servers": {"student": {"count": 2, "tensor_parallel_size": 2}}}, 5, 0),
        ("grpo", {"servers": {"student": {"url": "http://h:1"}}}, 1, 0),
        ("grpo", {"servers": {"student": {"gpus": 0}}, "trainer": {"ranks": 1, "gpus": 1}}, 1, 1),
    ],
)
def test_what_a_trial_leases(kind: str, fields: dict[str, Any], with_gpus: int, without: int) -> None:
    base = {"model": "m", "dataset": {"path": "d"}} | ({"reward_funcs": ["a:b"]} if kind == "grpo" else {})
    config = RUN_CONFIGS[kind].model_validate(base | fields)
    assert (gpus_needed(config, True), gpus_needed(config, False)) == (with_gpus, without)


def test_a_trial_waits_for_gpus_and_for_an_older_process_of_its_run(home: Path, tmp_path: Path) -> None:
    registry = Registry()
    config = trial(trainer={"ranks": 2})
    with LeaseManager(registry) as leases:
        trials = RunProcesses(registry, leases, tmp_path, gpus=lambda: [0, 1, 2])
        assert trials.ready(config)
        held = registry.insert_leases("gpu", ["0", "1"], 2, Owner.current(), 60.0)
        assert held is not None and not trials.ready(config)
        registry.delete_lease(held[0].id)
        assert trials.ready(config)
        # More than the machine has: waiting is of no use, the run itself says what is wrong.
        assert trials.ready(trial(trainer={"ranks": 4}))
        run = registry.create_run(str(config.name), "sft-long-context")
        registry.update_run(run.id, status="RUNNING", owner=Owner.current())
        assert not trials.ready(config)
        registry.update_run(run.id, owner=None)
        assert trials.ready(config)


def test_a_run_of_the_same_name_that_is_no_trial_of_the_sweep_is_left_alone(home: Path) -> None:
    config = trial()
    other = config.model_copy(update={"sweep": None})
    Registry().create_run(str(config.name), "sft-long-context", stored(other))
    with pytest.raises(RunRefused, match="a run is named 's-t0' already, and is no trial of sweep 's'"):
        run_trial(config)


def test_a_finished_run_is_not_run_again(home: Path) -> None:
    registry, config = Registry(), trial()
    run = registry.create_run(str(config.name), "sft-long-context", stored(config))
    registry.update_run(run.id, status="FINISHED")
    run_trial(config)
    assert registry.get_run(run.id).updated_at == registry.find_run("s-t0").updated_at  # type: ignore[union-attr]
    assert registry.list_attempts(run.id) == []


def test_a_trial_that_is_refused_says_why_and_leaves_no_lease(home: Path, tmp_path: Path) -> None:
    """Its model does not exist: the process ends by itself."""
    registry = Registry()
    with LeaseManager(registry) as leases:
        trials = RunProcesses(registry, leases, tmp_path)
        trials.start(0, trial(model=str(tmp_path / "nothing")))
        assert len(registry.list_leases("process")) == 1
        how = wait_for(lambda: trials.ended(0), "the trial's process ends", 250)
        assert "exit code 2" in how and f"error: model: there is no folder {tmp_path}/nothing" in how
        assert registry.list_leases() == [] and trials.ended(0) == "its process is not known"
        trials.stop(0)  # harmless
    assert processes(home) == []


def test_trials_are_stopped_together(home: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "never")  # whoever reads this waits: the process is in the middle of its preflight
    registry = Registry()
    with LeaseManager(registry) as leases:
        trials = RunProcesses(registry, leases, tmp_path)
        for number in (0, 1):
            trials.start(number, trial(number, dataset={"path": str(tmp_path / "never")}))
        trials.stop_all()
        assert registry.list_leases() == []
    assert processes(home) == []
