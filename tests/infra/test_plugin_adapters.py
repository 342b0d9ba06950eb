"""An adapter loaded by one copy of its file is the one that vLLM loads matrix by matrix; here everything stays on the host."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from infra.vllm import PLUGIN

pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm.lora import lora_model
from vllm.lora.peft_helper import PEFTHelper

sys.path.insert(0, str(PLUGIN))
from loopwright_vllm import adapters

PREFIX = "base_model.model.model.layers"


@pytest.fixture
def folder(tmp_path) -> Path:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(3):
        for module, (inputs, outputs) in {"self_attn.q_proj": (6, 10), "mlp.down_proj": (5, 7)}.items():
            tensors[f"{PREFIX}.{layer}.{module}.lora_A.weight"] = torch.randn(4, inputs, generator=generator).bfloat16()
            tensors[f"{PREFIX}.{layer}.{module}.lora_B.weight"] = torch.randn(outputs, 4, generator=generator).bfloat16()
    save_file(tensors, tmp_path / adapters.FILE, metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "bias": "none"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.fixture
def wrapped(monkeypatch):
    """vLLM's class with the plugin's way of reading; `whole_file` is put on the host."""

    class Model(lora_model.LoRAModel):
        pass

    read: list[str] = []

    def whole_file(name: str) -> Any:
        read.append(name)
        return adapters.WholeFile(f"{name}/{adapters.FILE}", torch.device("cpu"))

    monkeypatch.setattr(adapters, "whole_file", whole_file)
    adapters.wrap(Model, lora_model)
    return Model, read


def load(model: Any, folder: Path, **changes: Any) -> Any:
    helper = PEFTHelper.from_local_dir(str(folder), 512)
    given = {"lora_model_id": 1, "device": "cpu", "dtype": torch.bfloat16} | changes
    return model.from_local_checkpoint(str(folder), {"q_proj", "down_proj"}, peft_helper=helper, **given)


def test_an_adapter_is_the_same_by_one_copy(folder, wrapped):
    model, read = wrapped
    stock, ours = load(lora_model.LoRAModel, folder), load(model, folder)
    assert read == [str(folder)]
    assert set(ours.loras) == set(stock.loras) and len(ours.loras) == 6
    for name, matrices in stock.loras.items():
        assert torch.equal(ours.loras[name].lora_a, matrices.lora_a)
        assert torch.equal(ours.loras[name].lora_b, matrices.lora_b)
        assert ours.loras[name].scaling == matrices.scaling == 2.0


def test_what_is_read_afterwards_is_read_by_safetensors(folder, wrapped):
    import safetensors

    load(wrapped[0], folder)
    assert lora_model.safetensors is safetensors
    with pytest.raises(ValueError, match="expected target modules"):
        helper = PEFTHelper.from_local_dir(str(folder), 512)
        wrapped[0].from_local_checkpoint(str(folder), {"q_proj"}, peft_helper=helper, device="cpu", dtype=torch.bfloat16)
    assert lora_model.safetensors is safetensors


def test_an_adapter_that_is_wanted_elsewhere_goes_vllm_s_way(folder, wrapped):
    model, read = wrapped
    load(model, folder, device=torch.device("cpu"))
    assert not read


def test_other_files_are_refused(folder):
    path, device = folder / adapters.FILE, torch.device("cpu")
    whole = path.read_bytes()
    path.write_bytes(whole[:-2])
    with pytest.raises(ValueError, match="not what its header says"):
        adapters.WholeFile(str(path), device)
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(ValueError, match="not what its header says"):
        adapters.WholeFile(str(path), device)
    save_file({"a": torch.zeros(3, dtype=torch.int64)}, path)
    with pytest.raises(ValueError, match="a is I64"):
        adapters.WholeFile(str(path), device)


def test_without_a_gpu_nothing_is_copied(folder):
    if torch.cuda.is_available():
        assert adapters.whole_file(str(folder)).data.is_cuda
    else:
        assert adapters.whole_file(str(folder)) is None
