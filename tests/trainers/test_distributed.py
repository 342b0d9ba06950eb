"""Two ranks with sharded parameters (gloo; NCCL where there are two GPUs) do what one rank on the same kind of device does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support import rank_worker
from tests.support.policies import tiny_policy
from trainers.distributed import Ranks

WORKER = Path(__file__).parents[1] / "support" / "rank_worker.py"
SYNC_WORKER = WORKER.with_name("sync_worker.py")
ROOT = Path(__file__).parents[2]


def launch(ranks: int, folder: Path, devices: str, worker: Path = WORKER) -> None:
    """Run a worker under torchrun; its output is shown if it fails."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    if devices == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(worker)]
    done = subprocess.run(
        [*command, str(folder)], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=560, check=False
    )
    assert done.returncode == 0, f"{ranks} ranks: exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"


@pytest.fixture(scope="module", params=["cpu", *(["cuda"] if torch.cuda.device_count() >= 2 else [])])
def done(request, tmp_path_factory) -> Path:
    """One rank in this process, two under torchrun, which also go on from one rank's checkpoint; then one from theirs."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / request.param).touch()
    one = Ranks(0, 1, 0, torch.device(request.param), None, None)
    rank_worker.scenarios(one, folder)
    for first in (1, 2):
        (folder / f"from-{first}").mkdir()
    (folder / "from-1" / "checkpoint-3").symlink_to(folder / "halves-1" / "checkpoint-3")
    launch(2, folder, request.param)
    (folder / "from-2" / "checkpoint-3").symlink_to(folder / "halves-2" / "checkpoint-3")
    rank_worker.train(one, folder, 6, "from-2")
    return folder


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], atol: float) -> None:
    assert a.keys() == b.keys() and a
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=atol, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("kind", rank_worker.KINDS)
def test_sharded_gradients_equal_one_ranks(done, kind):
    one, two = (torch.load(done / kind / f"gradients-{ranks}.pt") for ranks in (1, 2))
    assert max(value.abs().max() for value in one.values()) > 1e-3
    close(one, two, 1e-11)


def test_two_ranks_train_as_one_does(done):
    one, two = (torch.load(done / f"straight-{ranks}-6-{ranks}.pt") for ranks in (1, 2))
    # Adam divides rounding in near-zero gradients by themselves: weights drift, most on GPUs, whose sums are ordered otherwise.
    cuda = (done / "cuda").exists()
    close(one, two, 1e-3 if cuda else 1e-4)
    losses = [json.loads((done / f"straight-{ranks}-6-{ranks}.json").read_text()) for ranks in (1, 2)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-3 if cuda else 1e-4) and len(losses[0]) == 6


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_run_equals_one_that_was_not_interrupted(done, ranks):
    straight = torch.load(done / f"straight-{ranks}-6-{ranks}.pt")
    halves = torch.load(done / f"halves-{ranks}-6-{ranks}.pt")
    half = torch.load(done / f"halves-{ranks}-3-{ranks}.pt")
    close(straight, halves, 0.0 if not torch.cuda.is_available() else 1e-5)
    assert any(not torch.equal(half[name], halves[name]) for name in half), "the second half changed nothing"


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1)])
def test_a_checkpoint_resumes_on_another_number_of_ranks(done, first, second):
    close(torch.load(done / f"straight-{first}-6-{first}.pt"), torch.load(done / f"from-{first}-6-{second}.pt"), 1e-5)


def test_what_fails_on_rank_0_fails_on_every_rank_with_its_words(done):
    zero, one = (json.loads((done / f"seen-{rank}.json").read_text()) for rank in (0, 1))
    assert zero[0].startswith("WeightSyncError: http://fake did not take policy version 0, twice: no room")
    assert one[0].startswith("WeightSyncError: rank 0: http://fake did not take policy version 0, twice: no room")
    assert zero[1] == "RolloutProcessDied: killed by SIGKILL" and one[1] == "RolloutProcessDied: rank 0: killed by SIGKILL"


def test_ranks_that_fetch_their_rows_from_a_real_process_train_as_one_does(done):
    one, two = (torch.load(done / f"recorded-{ranks}.pt") for ranks in (1, 2))
    close(one, two, 1e-3 if (done / "cuda").exists() else 1e-5)
    begun = dict(tiny_policy().model.named_parameters())
    assert any((one[name] - begun[name]).abs().max() > 1e-3 for name in one if name in begun), "nothing was learnt"


def test_a_process_that_dies_while_rows_are_fetched_ends_every_rank_and_rank_0_says_how(done):
    zero, one = ((done / f"dead-{rank}.txt").read_text() for rank in (0, 1))
    assert zero.startswith("RolloutProcessDied: the rollout process (pid") and "was killed by SIGKILL" in zero
    assert one == zero.replace("RolloutProcessDied: ", "RolloutProcessDied: rank 0: ")


def test_two_hundred_syncs_of_two_ranks_some_of_them_refused(tmp_path):
    """Neither rank hangs, no server is left paused, and whoever holds a version holds its weights."""
    launch(2, tmp_path, "cpu", worker=SYNC_WORKER)
    zero, one = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1))
    assert zero["refused"] == one["refused"] > 0 and zero["behind"] > zero["refused"]
