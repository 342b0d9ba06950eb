"""What each of many processes does to one registry at the same moment. Imported by a fork server, so without pytest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from infra.registry import Owner, Registry, RunExists, SweepExists
from tests.infra.migration_steps import count_schema_statements

PORTS, STAGES = range(24), 10


@dataclass
class Seen:
    """By one writer. `migrated`: it ran schema statements; `artefacts`: ids that it got for what all of them record."""

    number: int
    migrated: bool
    ports: list[int]
    claimed_run: bool
    claimed_sweep: bool
    artefacts: tuple[str, str]


def write(url: str, number: int, ready: Any, results: Any) -> None:
    statements = count_schema_statements()
    ready.wait()
    registry = Registry(url)  # the first of these brings the tables to the newest version
    owner = Owner(number, 1.0, "here")
    try:
        run_id = registry.create_run("shared", "sft").id
    except RunExists:
        run_id = registry.get_run("shared").id
    try:
        sweep_id = registry.create_sweep("shared", {}).id
    except SweepExists:
        sweep_id = registry.get_sweep("shared").id
    ports = [port for port in PORTS if registry.insert_lease("port", str(port), owner, 60)]
    claimed_run = registry.claim_run(run_id, owner, alive=lambda _: True)
    claimed_sweep = registry.claim_sweep(sweep_id, owner, alive=lambda _: True)
    for step in range(STAGES):
        registry.set_stage(run_id, f"{number}-{step}", {"step": step})
        registry.add_costs(run_id, number, {"gpu_s/trainer": float(step), "usd": step / 10})
    dataset = registry.record_artefact("dataset", "data.jsonl", digest="d", details={str(number): True})
    model = registry.record_artefact("model", "models:/m/1", run_id=run_id)
    registry.link(dataset.id, model.id)
    registry.record_trial(sweep_id, 0, "shared:0:1", params={"lr": 1})
    registry.record_trial(sweep_id, number, f"shared:{number}:1", run_id=run_id, status="COMPLETE", value=float(number))
    registry.close()
    results.put(Seen(number, bool(statements), ports, claimed_run, claimed_sweep, (dataset.id, model.id)))
