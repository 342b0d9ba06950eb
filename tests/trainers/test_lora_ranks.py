"""Adapters on two gloo ranks: sharded, trained, saved, sent and merged as by one rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support import lora_worker
from tests.support.policies import ONE_RANK
from tests.trainers.test_distributed import close, launch

WORKER = Path(lora_worker.__file__)


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lora-ranks")
    for variant in lora_worker.VARIANTS:
        lora_worker.train(ONE_RANK, folder, f"{variant}-straight-1", 4)
    launch(2, folder, "cpu", WORKER)
    return folder


@pytest.mark.parametrize("variant", lora_worker.VARIANTS)
def test_two_ranks_train_an_adapter_as_one_does(done, variant):
    one, two = (torch.load(done / f"{variant}-straight-{ranks}-4-{ranks}.pt") for ranks in (1, 2))
    for part in ("adapter", "merged"):
        close(one[part], two[part], 1e-5)
    losses = [json.loads((done / f"{variant}-straight-{ranks}-4-{ranks}.json").read_text()) for ranks in (1, 2)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5) and len(losses[0]) == 4
    fresh = torch.load(done / f"{variant}-straight-2-4-2.pt")["adapter"]
    assert any(name.endswith("lora_B.default.weight") and tensor.abs().max() > 1e-4 for name, tensor in fresh.items())


def test_two_ranks_resume_an_adapter_exactly(done):
    straight, halves = (torch.load(done / f"plain-{kind}-2-4-2.pt") for kind in ("straight", "halves"))
    close(straight["adapter"], halves["adapter"], 0.0)
    logged = [json.loads((done / f"plain-{kind}-2-4-2.json").read_text()) for kind in ("straight", "halves")]
    assert logged[0] == logged[1]
