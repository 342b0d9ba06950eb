"""Lineage, costs, sweeps and trials in the registry, on SQLite and on Postgres alike."""

from __future__ import annotations

import pytest

from infra.registry import Owner, Registry, RunNotFound, SweepExists, SweepNotFound

ME = Owner(pid=100, start_time=1.5, host="here")
OTHER = Owner(pid=200, start_time=2.5, host="here")


def test_lineage_goes_back_and_forth_step_by_step(registry: Registry) -> None:
    run = registry.create_run("r1", "sft")
    data = registry.record_artefact("dataset", "data.jsonl", digest="1", details={"rows": 3})
    base = registry.record_artefact("base_model", "org/model")
    first = registry.record_artefact("checkpoint", "/runs/r1/checkpoint-5", run_id=run.id)
    second = registry.record_artefact("checkpoint", "/runs/r1/checkpoint-10", run_id=run.id)
    model = registry.record_artefact("model", "models:/r1/1", "r1", run_id=run.id)
    for parent, child in ((data, first), (base, first), (first, second), (data, second), (second, model)):
        registry.link(parent.id, child.id)
        registry.link(parent.id, child.id)
    assert [row.id for row in registry.parents(second.id)] == [data.id, first.id]
    assert [row.id for row in registry.children(data.id)] == [first.id, second.id]
    assert [row.id for row in registry.parents(model.id)] == [second.id]
    assert [row.id for row in registry.parents(first.id)] == [data.id, base.id]
    assert registry.parents(base.id) == []
    assert [row.id for row in registry.list_artefacts(run.id)] == [first.id, second.id, model.id]
    # The same thing again is the same row; another content at the same address is not.
    again = registry.record_artefact("dataset", "data.jsonl", digest="1", details={"split": "train"})
    assert (again.id, again.details) == (data.id, {"rows": 3, "split": "train"})
    assert registry.record_artefact("dataset", "data.jsonl", digest="2").id != data.id
    with pytest.raises(ValueError, match="no kind of artefact"):
        registry.record_artefact("thing", "x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="its own parent"):
        registry.link(data.id, data.id)


def test_costs_are_set_by_attempt_and_summed(registry: Registry) -> None:
    run = registry.create_run("r1", "sft")
    registry.add_costs(run.id, 1, {"gpu_s/trainer": 10.0})
    registry.add_costs(run.id, 1, {"gpu_s/trainer": 12.5})
    registry.add_costs(run.id, 1, {"gpu_s/trainer": 11.0})  # an older value that comes late
    registry.add_costs(run.id, 2, {"gpu_s/trainer": 2.5, "tokens/generated": 100, "usd": 0.4})
    assert registry.costs(run.id) == {"gpu_s/trainer": 15.0, "tokens/generated": 100.0, "usd": 0.4}
    assert [(row.attempt, row.kind, row.unit) for row in registry.list_costs(run.id)] == [
        (1, "gpu_s/trainer", "s"),
        (2, "gpu_s/trainer", "s"),
        (2, "tokens/generated", "tokens"),
        (2, "usd", "usd"),
    ]
    with pytest.raises(ValueError, match="no kind of cost"):
        registry.add_costs(run.id, 1, {"coffee": 1.0})
    with pytest.raises(RunNotFound):
        registry.add_costs("nope", 1, {"usd": 1.0})


def test_sweeps_and_trials(registry: Registry) -> None:
    sweep = registry.update_sweep(registry.create_sweep("s", {"trials": 3}).id, owner=ME)
    assert (sweep.status, sweep.owner, sweep.result) == ("PENDING", ME, {})
    with pytest.raises(SweepExists, match="'s' exists already"):
        registry.create_sweep("s", {})
    with pytest.raises(SweepNotFound, match="'t'"):
        registry.get_sweep("t")
    assert not registry.claim_sweep(sweep.id, OTHER, alive=lambda owner: True)
    assert registry.claim_sweep(sweep.id, OTHER, alive=lambda owner: False)
    registry.update_sweep(sweep.id, status="FINISHED", result={"best": 1}, owner=None)
    found = registry.get_sweep("s")
    assert (found.status, found.result, found.owner, found.config) == ("FINISHED", {"best": 1}, None, {"trials": 3})
    with pytest.raises(ValueError, match="DONE"):
        registry.update_sweep(sweep.id, status="DONE")
    assert [row.name for row in registry.list_sweeps()] == ["s"]

    run = registry.create_run("s-t0", "sft")
    registry.record_trial(sweep.id, 0, "s:0:1", params={"lr": 1.0}, run_id=run.id)
    registry.record_trial(sweep.id, 0, "s:0:1", params={"lr": 1.0})  # taken up again: the same row
    registry.update_trial("s:0:1", status="PRUNED", value=0.25, ended_at=1.0)
    registry.record_trial(sweep.id, 0, "s:0:2", attempt=2, params={"lr": 1.0})
    assert [(row.key, row.attempt, row.status, row.value, row.run_id) for row in registry.list_trials(sweep.id)] == [
        ("s:0:1", 1, "PRUNED", 0.25, run.id),
        ("s:0:2", 2, "RUNNING", None, None),
    ]
    with pytest.raises(ValueError, match="no trial has the key 's:9:1'"):
        registry.update_trial("s:9:1", status="FAIL")
