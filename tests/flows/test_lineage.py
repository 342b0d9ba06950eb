"""What a run was made from, and what came of it, is noted in the registry."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.config import GRPORunConfig
from flows.lineage import note_registered, note_trained
from flows.provenance import facts_of
from infra import provenance
from infra.registry import Registry


@pytest.fixture
def registry(home: Path) -> Registry:
    return Registry()


def test_checkpoints_come_from_data_and_model_and_a_model_from_a_checkpoint(
    registry: Registry, config: Callable[..., GRPORunConfig], tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "test"
    run = registry.create_run("test", "train-grpo", output_dir=str(folder))
    settings = config()
    provenance.write(folder, 1, facts_of(settings))
    provenance.note(folder, 1, fingerprint="f00d", rows=1)
    registry.record_checkpoint(run.id, 5, str(folder / "checkpoint-5"))
    registry.record_checkpoint(run.id, 10, str(folder / "checkpoint-10"), uri="s3://bucket/test/checkpoint-10")
    note_trained(registry, run, settings)
    note_trained(registry, run, settings)  # by a resume
    note_registered(registry, run, settings, 10, "test", "3")

    made = {row.name: row for row in registry.list_artefacts(run.id)}
    assert list(made) == ["test step 5", "test step 10", "test"]
    assert made["test step 10"].details == {"step": 10, "stored": "s3://bucket/test/checkpoint-10"}
    assert made["test"].uri == "models:/test/3"
    dataset, base = registry.parents(made["test step 5"].id)
    assert (dataset.kind, dataset.uri, dataset.digest) == ("dataset", settings.dataset.path, "f00d")
    assert (base.kind, base.uri, base.run_id) == ("base_model", settings.model, None)
    assert base.digest == json.loads((folder / "provenance.json").read_text())["model"]["digest"]
    assert [row.name for row in registry.parents(made["test"].id)] == ["test step 10"]
    assert [row.id for row in registry.parents(made["test step 10"].id)] == [dataset.id, base.id]

    # A second run goes on from the first one's checkpoint.
    (folder / "checkpoint-10").mkdir(parents=True)
    (folder / "checkpoint-10" / "config.json").write_text("{}")
    second = registry.create_run("second", "train-grpo", output_dir=str(tmp_path / "runs" / "second"))
    registry.record_checkpoint(second.id, 1, "/second/checkpoint-1")
    note_trained(registry, second, config(name="second", model=str(folder / "checkpoint-10")))
    (child,) = registry.list_artefacts(second.id)
    assert made["test step 10"].id in [row.id for row in registry.parents(child.id)]


def test_a_registry_that_does_not_take_it_costs_a_line(
    registry: Registry, config: Callable[..., GRPORunConfig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = registry.create_run("test", "train-grpo")
    monkeypatch.setattr(registry, "record_artefact", lambda *_, **__: (_ for _ in ()).throw(OSError("unreachable")))
    note_trained(registry, run, config())
    note_registered(registry, run, config(), 1, "test", None)
    assert caplog.text.count("the lineage of test is not noted: OSError: unreachable") == 2
