"""Where a run's results came from, noted in the registry when its stages finish.

    dataset, base model and teachers (or the checkpoints of other runs) ─▶ checkpoints ─▶ registered model

A registry that does not take it costs a line in the log, never the run.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from flows.config import DistillationRunConfig, RunConfig
from flows.convert import resolve_model
from infra import provenance
from infra.registry import ArtefactRow, CheckpointRow, Registry, RunRow
from infra.server_names import PREFIX
from trainers.references import resolve

logger = logging.getLogger(__name__)


def note_trained(registry: Registry, run: RunRow, config: RunConfig) -> None:
    """The run's checkpoints, and what they were trained from."""
    try:
        parents = _parents(registry, run, config)
        for row in registry.list_checkpoints(run.id):
            child = _checkpoint(registry, run, config, row)
            for parent in parents:
                registry.link(parent.id, child.id)
    except Exception as error:  # whatever a database's driver raises
        logger.warning("the lineage of %s is not noted: %s: %s", run.name, type(error).__name__, error)


def note_registered(registry: Registry, run: RunRow, config: RunConfig, step: int, name: str, version: str | None) -> None:
    """The model that was registered in MLflow from the checkpoint of `step`; `version` None: it waits in the journal."""
    try:
        uri = f"models:/{name}/{version}" if version is not None else f"models:/{name}"
        model = registry.record_artefact("model", uri, name, run.id, details={"step": step})
        for row in registry.list_checkpoints(run.id):
            if row.step == step:
                registry.link(_checkpoint(registry, run, config, row).id, model.id)
    except Exception as error:
        logger.warning("the lineage of %s is not noted: %s: %s", run.name, type(error).__name__, error)


def _parents(registry: Registry, run: RunRow, config: RunConfig) -> list[ArtefactRow]:
    facts = (provenance.read(Path(run.output_dir)) if run.output_dir else None) or {}
    dataset = _dataset(registry, config, facts.get("dataset", {}))
    base = _base_model(registry, config.model, _digest(facts.get("model", {})))
    teachers = [_base_model(registry, model) for model in teacher_models(registry, config).values()]
    return [dataset, base, *teachers]


def teacher_models(registry: Registry, config: RunConfig) -> dict[str, str]:
    """Teacher → its model, or the address of one that is given by URL, and whose model only its server knows."""
    if not isinstance(config, DistillationRunConfig):
        return {}
    found: dict[str, str] = {}
    for name, teacher in config.servers.teachers.items():
        source = resolve(teacher.model or str(teacher.url))
        found[name] = _model_kept_by(registry, source) if source.startswith(PREFIX) else resolve_model(source)
    return found


def _model_kept_by(registry: Registry, address: str) -> str:
    """That of the newest server kept by the name, whether it still runs or not; the address where none is known."""
    rows = [row for row in registry.list_servers() if row.run_id is None and row.name == address.removeprefix(PREFIX)]
    return rows[-1].details.get("model", address) if rows else address


def _dataset(registry: Registry, config: RunConfig, facts: dict[str, Any]) -> ArtefactRow:
    path = resolve(config.dataset.path)
    details = {name: facts[name] for name in ("split", "rows") if facts.get(name) is not None}
    return registry.record_artefact("dataset", path, Path(path).name, digest=_digest(facts), details=details)


def _base_model(registry: Registry, model: str, digest: str | None = None) -> ArtefactRow:
    """That of another run, where the model is one of its checkpoints."""
    uri = resolve_model(resolve(model))
    known = [row for row in registry.find_artefacts(uri) if row.run_id is not None]
    return known[-1] if known else registry.record_artefact("base_model", uri, Path(uri).name, digest=digest)


def _digest(facts: dict[str, Any]) -> str | None:
    return next((facts[key] for key in ("fingerprint", "digest", "revision") if facts.get(key)), None)


def _checkpoint(registry: Registry, run: RunRow, config: RunConfig, row: CheckpointRow) -> ArtefactRow:
    kind = "adapter" if config.peft is not None else "checkpoint"
    details = {"step": row.step} | ({"stored": row.uri} if row.uri else {})
    return registry.record_artefact(kind, row.path, f"{run.name} step {row.step}", run.id, details=details)
