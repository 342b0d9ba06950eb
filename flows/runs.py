"""Runs by name: a new one, a resumed one, or a refusal that says why.

A run is one registry row for its whole life. Of the ways back into it (same name, `loopwright resume`, Prefect's retry of the
same flow run) each ends in `open_run`, and of two processes that try at once one gets it.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flows.config import RUN_CONFIGS, RunConfig, changed_fields, trainer_fields
from flows.storage import stored_config
from infra.errors import StorageError
from infra.reaper import owner_alive
from infra.registry import Owner, Registry, RunExists, RunRow, config_hash
from trainers.errors import ConfigError

# These rule how a run is attended to, not what it computes: they may change between attempts.
_ATTENDANCE = ("retry", "limits", "report_to", "oom_retry")
# Nor do these: runs that differ in nothing else have one config hash.
_AROUND = ("name", "tags", "sweep", "storage", "tracking", *_ATTENDANCE)


class RunRefused(ConfigError):
    """A run of this name cannot be started or resumed now."""


def new_name(kind: str) -> str:
    return f"{kind}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def plain_name(text: str) -> str:
    """`text` with what a run's name may not contain replaced."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-.") or "run"


def named(registry: Registry, config: RunConfig, flow_run_id: str | None, fallback: str) -> RunConfig:
    """`config` with a name: its own, else that of the run `flow_run_id` belongs to (a retry), else made from `fallback`."""
    if config.name is not None:
        return config
    runs = registry.list_runs(light=True) if flow_run_id else []
    known = next((run for run in runs if run.prefect_flow_run_id == flow_run_id), None)
    return config.model_copy(update={"name": known.name if known else plain_name(fallback)})


def check_startable(registry: Registry, config: RunConfig) -> RunRow | None:
    """The run that `config.name` would resume, None for a new one.

    Raises:
        RunRefused: it is running or finished, or its config differs though it has a checkpoint; or its folder has checkpoints
            of another config.
    """
    run = registry.find_run(config.name) if config.name else None
    if run is None:
        _check_folder(config)
        return None
    if run.owner is not None and owner_alive(run.owner):
        raise RunRefused(f"run {run.name!r} is running (process {run.owner.pid} on {run.owner.host}): choose another name")
    if run.status == "FINISHED":
        raise RunRefused(f"run {run.name!r} is finished: choose another name")
    differing = differing_fields(run, config)
    if differing and has_checkpoint(registry, run):
        raise RunRefused(
            f"run {run.name!r} has checkpoints of another config; these fields differ: {', '.join(differing)}. "
            "Give the same values to resume it, or choose another name"
        )
    if differing:
        print(f"run {run.name} has no checkpoint yet: it starts anew with other values of {', '.join(differing)}", flush=True)
    return run


def differing_fields(run: RunRow, config: RunConfig) -> list[str]:
    """Fields in which `config` computes something else than what the run was started with."""
    try:
        before = stored(config_of(run))  # with the defaults of fields that came after it was stored
    except ValidationError:
        before = run.config
    return changed_fields(_compared(before), _compared(stored(config)))


def has_checkpoint(registry: Registry, run: RunRow) -> bool:
    """Whether there is something to go on from, as far as the registry or the run's folder know."""
    folder = Path(run.output_dir) if run.output_dir is not None else None
    return bool(registry.list_checkpoints(run.id)) or (folder is not None and any(folder.glob("checkpoint-*/manifest.json")))


def _check_folder(config: RunConfig) -> None:
    """The trainer goes on from whatever checkpoint lies in the run's folder, so one that no run here wrote (its registry was
    another one, or is lost) must be of the same config."""
    if config.name is None:
        return
    folder = config.storage.folder() / config.name
    newest = max(folder.glob("checkpoint-*/loopwright_config.json"), key=lambda path: path.stat().st_mtime, default=None)
    where: str | Path = folder
    if newest is not None:
        try:
            trained = json.loads(newest.read_text(encoding="utf-8"))
        except ValueError:
            return  # not whole: the trainer does not take it either
    else:
        storage = config.storage.of_run(config.name)
        try:
            trained = stored_config(storage)
        except StorageError as error:
            raise RunRefused(f"storage.uri: {error}") from error
        if trained is None:
            return
        where, trained["output_dir"] = str(storage.uri), str(folder)  # written on another machine, maybe
    # The server's address is of the attempt, not of the run.
    wanted = {**trainer_fields(config, folder), "vllm_server_base_url": trained.get("vllm_server_base_url")}
    differing = changed_fields(trained, wanted)
    if differing:
        raise RunRefused(
            f"{where} holds checkpoints of another run, whose config differs in {', '.join(differing)}: choose another name "
            "or storage.uri, or move them away"
        )


def open_run(registry: Registry, config: RunConfig, flow: str, flow_run_id: str | None = None) -> tuple[RunRow, bool]:
    """The registry row of this run, RUNNING and owned by this process, and whether it is resumed. `config.name` is set.

    Raises:
        RunRefused: see `check_startable`; or another process was faster.
    """
    known, values = check_startable(registry, config), stored(config)
    anew = known is not None and bool(differing_fields(known, config))
    folder = config.storage.folder() / str(config.name)
    row = claimed(registry, known, "run", str(config.name), flow, config=values, output_dir=str(folder), tags=config.tags)
    if anew:
        _forget_first_start(registry, row, storage_folder=config.storage.folder())
    # A mirrored run works in this machine's folder, wherever it worked before.
    moved = {"output_dir": str(folder)} if config.storage.remote else {}
    return begun(registry, row, values, flow_run_id, **moved), known is not None and not anew


def claimed(registry: Registry, known: RunRow | None, what: str, name: str, flow: str, **columns: Any) -> RunRow:
    """`known`, or a new row of `columns`, owned by this process. `what`: it is called in a refusal.

    Raises:
        RunRefused: another process was faster.
    """
    try:
        row = known or registry.create_run(name, flow, **columns)
    except RunExists as error:
        raise RunRefused(str(error)) from error
    if not registry.claim_run(row.id, Owner.current(), owner_alive):
        raise RunRefused(f"{what} {row.name!r} was taken up by another process just now")
    return row


def begun(registry: Registry, row: RunRow, values: dict[str, Any], flow_run_id: str | None, **columns: Any) -> RunRow:
    """The claimed row, RUNNING with the config `values`; of an earlier end nothing is left."""
    hashed = config_hash({name: value for name, value in values.items() if name not in _AROUND})
    ended = {"failure_class": None, "cause": None, "traceback": None}
    return registry.update_run(
        row.id, status="RUNNING", **ended, prefect_flow_run_id=flow_run_id, config=values, config_hash=hashed, **columns
    )


def _forget_first_start(registry: Registry, run: RunRow, storage_folder: Path) -> None:
    """A run that got nowhere is begun anew with a corrected config. MLflow's params are immutable, so what was tracked under
    the first ones stays as it is, and the run gets another MLflow run."""
    for stage in run.stages:
        registry.set_stage(run.id, stage, None)
    registry.update_run(run.id, mlflow_run_id=None, progress={}, output_dir=str(storage_folder / run.name))
    tracked = Path(run.output_dir or "", "tracking")
    if run.output_dir is not None and tracked.is_dir():
        tracked.rename(tracked.with_name(f"tracking-until-{time.strftime('%Y%m%d-%H%M%S')}"))


def stored(config: RunConfig) -> dict[str, Any]:
    """The config as the registry and Prefect keep it: every value, references unresolved."""
    return config.model_dump(mode="json")


def config_of(run: RunRow) -> RunConfig:
    """The config a run was started with.

    Raises:
        RunRefused: it trains nothing itself: it is a recipe.
    """
    kind = run.config["type"]
    if kind not in RUN_CONFIGS:
        raise RunRefused(f"{run.name!r} is a {kind}, not a training run: its stages' runs are named {run.name}-<stage>")
    return RUN_CONFIGS[kind].model_validate(run.config)


def _compared(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in _ATTENDANCE}
