"""What `loopwright export` writes of a checkpoint, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer

from flows import export_cli
from infra.registry import NotFound, Registry
from tests.support.fake_source import FakeSource
from tests.support.policies import ONE_RANK, grpo_config, tiny_policy
from tests.support.tiny_model import build_tokenizer
from trainers.algorithms.grpo import GRPO
from trainers.errors import ConfigError
from trainers.export import export, main
from trainers.loop import TrainLoop


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = grpo_config(output_dir=str(tmp_path_factory.mktemp("run")), max_steps=1)
    loop = TrainLoop(config, GRPO(config), tiny_policy(config), ONE_RANK, FakeSource(), tokenizer=build_tokenizer())
    found = loop.run().checkpoint
    assert found is not None
    return found


def test_a_model_is_written_that_others_load_and_nothing_of_the_run(checkpoint: Path, tmp_path: Path) -> None:
    assert export(checkpoint, tmp_path / "new" / "model") == "model"
    names = {path.name for path in (tmp_path / "new" / "model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not names & {"resume", "rng", "scheduler.pt", "manifest.json", "loop_state.json", "rollout_state.json"}
    ours, theirs = (AutoModelForCausalLM.from_pretrained(folder) for folder in (checkpoint, tmp_path / "new" / "model"))
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(tmp_path / "new" / "model")("1+1")["input_ids"]
    assert not list((tmp_path / "new").glob(".tmp*"))


def test_what_cannot_be_exported_says_why(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="exists: name a folder that does not"):
        export(checkpoint, tmp_path)
    with pytest.raises(ConfigError, match="no whole checkpoint: no readable manifest"):
        export(tmp_path, tmp_path / "out")
    assert main([str(checkpoint), str(tmp_path / "out"), "--merge"]) == 1
    assert "holds no adapter" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_run_is_exported_from_its_newest_checkpoint_that_is_here(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOPWRIGHT_REGISTRY_URL", f"sqlite:///{tmp_path}/registry.db")
    registry = Registry()
    run = registry.create_run("mine", "train-grpo", {})
    with pytest.raises(NotFound, match="has no checkpoint yet"):
        export_cli._newest("mine")
    registry.record_checkpoint(run.id, 2, "/gone/checkpoint-2")
    with pytest.raises(NotFound, match="loopwright checkpoints fetch mine"):
        export_cli._newest("mine")
    registry.record_checkpoint(run.id, 1, str(checkpoint))
    done = CliRunner().invoke(export_cli.export, ["mine", str(tmp_path / "model")])
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "llama"
