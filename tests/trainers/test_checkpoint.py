"""Checkpoints: exact resume, whole or absent, fallback, retention, a full disk."""

from __future__ import annotations

import errno
import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.fake_source import FakeSource
from tests.support.policies import ONE_RANK, grpo_config, tiny_policy
from trainers import checkpoint as module
from trainers.algorithms.grpo import GRPO
from trainers.callbacks import PrintSink
from trainers.checkpoint import checkpoints, fault, latest_whole
from trainers.errors import CheckpointError
from trainers.loop import TrainLoop


def run(folder: Path, steps: int, resume: Path | None = None, source: FakeSource | None = None, **fields) -> TrainLoop:
    config = grpo_config(
        **{
            "output_dir": str(folder),
            "max_steps": steps,
            "save_steps": 3,
            "lr_scheduler_type": "linear",
            "warmup_steps": 2,
            **fields,
        }
    )
    torch.manual_seed(0)
    loop = TrainLoop(config, GRPO(config), tiny_policy(config), ONE_RANK, source or FakeSource(), sink=PrintSink())
    loop.run(resume)
    return loop


def weights(loop: TrainLoop) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in loop.policy.named_parameters()}


def test_three_steps_and_three_more_after_a_resume_equal_six(tmp_path):
    straight = run(tmp_path / "a", 6)
    run(tmp_path / "b", 6, source=FakeSource(steps=3))
    source = FakeSource()
    resumed = run(tmp_path / "b", 6, latest_whole(tmp_path / "b"), source)
    assert [call[:2] for call in source.calls if call[0] in ("start", "next")] == [
        ("start", 0),
        ("next", 4),
        ("next", 5),
        ("next", 6),
    ]
    assert weights(straight).keys() == weights(resumed).keys()
    for name, value in weights(straight).items():
        assert torch.equal(value, weights(resumed)[name]), name
    for a, b in zip(straight.optimizer.state.values(), resumed.optimizer.state.values(), strict=True):
        assert a["step"] == b["step"] == 6 and torch.equal(a["exp_avg_sq"], b["exp_avg_sq"])
    assert straight.totals == resumed.totals and straight.totals["num_tokens"] > 0
    assert [e["learning_rate"] for e in straight.callbacks.state.log_history] == [
        e["learning_rate"] for e in resumed.callbacks.state.log_history
    ]


def test_generators_go_on_where_they_were(tmp_path):
    loop = run(tmp_path, 3)
    drawn = (random.random(), np.random.rand(), torch.rand(1).item())
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    loop.checkpointer.restore(tmp_path / "checkpoint-3")
    # Nothing drew between the save and the end of the run.
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == drawn


def test_a_checkpoint_is_a_transformers_folder_with_everything_needed(tmp_path):
    loop = run(tmp_path, 3)
    folder = tmp_path / "checkpoint-3"
    model = AutoModelForCausalLM.from_pretrained(folder)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, dict(loop.policy.model.named_parameters())[name]), name
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (
        manifest["step"] == 3 and {"model.safetensors", "rollout_state.json", "trainer_state.json"} <= manifest["files"].keys()
    )
    assert json.loads((folder / "rollout_state.json").read_text()) == {"done": 3}
    assert json.loads((folder / "loopwright_config.json").read_text())["type"] == "grpo"
    assert not list(tmp_path.glob(".tmp*"))


def damage_size(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"x")


def damage_content(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)


def test_a_file_that_cannot_be_read_is_a_fault_not_an_error(tmp_path, monkeypatch):
    run(tmp_path, 3)

    def bad_sector(path):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("trainers.checkpoint._sha256", bad_sector)
    assert fault(tmp_path / "checkpoint-3").endswith(" cannot be read (Input/output error)")
    assert latest_whole(tmp_path) is None


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_size, "bytes, the manifest says"),
        (damage_content, "differs from its SHA-256"),
        (lambda folder: (folder / "scheduler.pt").unlink(), "scheduler.pt is missing"),
        (lambda folder: (folder / "manifest.json").unlink(), "no readable manifest"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "no readable manifest"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path, damage, message, caplog):
    run(tmp_path, 6)
    assert latest_whole(tmp_path) == tmp_path / "checkpoint-6"
    damage(tmp_path / "checkpoint-6")
    assert message in str(fault(tmp_path / "checkpoint-6"))
    assert latest_whole(tmp_path) == tmp_path / "checkpoint-3"
    assert message in caplog.text and "falling back" in caplog.text


def test_no_checkpoint_is_none(tmp_path):
    (tmp_path / "checkpoint-x").mkdir()
    assert latest_whole(tmp_path) is None and latest_whole(tmp_path / "nowhere") is None


def test_the_newest_are_kept(tmp_path):
    run(tmp_path, 6, save_steps=1, save_total_limit=2)
    assert [step for step, _ in checkpoints(tmp_path)] == [5, 6]
    run(tmp_path / "all", 4, save_steps=1, save_total_limit=None)
    assert [step for step, _ in checkpoints(tmp_path / "all")] == [1, 2, 3, 4]


def test_a_failed_save_leaves_the_last_good_one_and_training_goes_on(tmp_path, caplog):
    class FullDisk(FakeSource):
        def snapshot(self, directory):
            if self.done == 4:
                raise OSError(28, "No space left on device")
            return super().snapshot(directory)

    loop = run(tmp_path, 6, source=FullDisk(), save_steps=2)
    assert loop.callbacks.state.global_step == 6
    assert [step for step, _ in checkpoints(tmp_path)] == [2, 6] and not list(tmp_path.glob(".tmp*"))
    assert "SAVING STEP 4 FAILED" in caplog.text and "No space left" in caplog.text


def test_free_space_is_checked_before_anything_is_written(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="the last step, 3, could not be saved"):
        run(tmp_path, 3)
    assert "1,000 bytes free" in caplog.text and not list(tmp_path.iterdir())


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    run(tmp_path, 3)
    config = grpo_config(output_dir=str(tmp_path))
    other = tiny_policy(config, tied=False)
    loop = TrainLoop(config, GRPO(config), other, ONE_RANK, FakeSource(), sink=PrintSink())
    with pytest.raises(CheckpointError, match="does not fit this run's model"):
        loop.run(tmp_path / "checkpoint-3")


def test_a_failure_while_tensors_are_written_is_a_failed_save_too(tmp_path, caplog, monkeypatch):
    """torch.distributed.checkpoint wraps what goes wrong in something that is no `Exception`."""

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.distributed.checkpoint.filesystem.FileSystemWriter.write_data", full)
    with pytest.raises(CheckpointError, match="the last step, 3, could not be saved"):
        run(tmp_path, 3)
    assert "rank 0: OSError: [Errno 28] No space left on device" in caplog.text and not list(tmp_path.iterdir())


def test_the_best_every_kth_and_pinned_ones_are_kept_too_and_the_manifest_says_what_was_measured(tmp_path):
    """`run` saves through the loop, which measures; here by what a checkpoint's manifest says."""
    loop = run(tmp_path, 1, save_steps=1)
    manifest = json.loads((tmp_path / "checkpoint-1" / "manifest.json").read_text())
    assert manifest["metrics"]["loss"] == loop.callbacks.state.log_history[0]["loss"]
    loop.checkpointer.retention = module.Retention(1, best=1, metric="reward", every=4)
    (tmp_path / "checkpoint-1" / module.PINNED).touch()
    state = loop.callbacks.state
    for step, reward in ((2, 0.1), (3, 0.9), (4, 0.2), (5, float("nan")), (6, 0.3)):
        state.global_step = step
        loop.checkpointer.save(state, {}, lambda directory: None, {"reward": reward})
    assert [step for step, _ in checkpoints(tmp_path)] == [1, 3, 4, 6]
    assert all(fault(path) is None for _, path in checkpoints(tmp_path))


def test_a_deletion_that_is_cut_short_leaves_nothing_that_looks_whole(tmp_path, monkeypatch):
    run(tmp_path, 3)
    monkeypatch.setattr(module.shutil, "rmtree", lambda *args, **kwargs: None)
    module.remove(tmp_path / "checkpoint-3")
    assert latest_whole(tmp_path) is None
