"""What is written is what safetensors reads: every type and shape, and views into one storage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from trainers.tensor_file import DTYPES, save_tensors


def test_every_type_comes_back_as_it_was(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for number, dtype in enumerate(DTYPES):
        for shape in [(), (3,), (0, 4), (5, 7), (2, 1, 3)]:
            tensors[f"{number}.{len(shape)}.ü"] = torch.randint(0, 2, shape, generator=generator).to(dtype)
    tensors["turned"] = torch.randn(4, 6, generator=generator).T
    save_tensors(tensors, tmp_path / "file.safetensors")
    found = load_file(tmp_path / "file.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


def test_views_of_one_storage_are_written_each_with_its_own_part(tmp_path: Path) -> None:
    whole = torch.arange(40, dtype=torch.bfloat16)
    parts = dict(zip("abc", whole.split([8, 12, 20]), strict=True))
    save_tensors(parts, tmp_path / "file.safetensors")
    with safe_open(tmp_path / "file.safetensors", framework="pt") as file:
        for name, part in parts.items():
            assert torch.equal(file.get_tensor(name), part)


def test_a_type_that_the_format_lacks_is_refused_and_an_empty_set_is_a_file(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        save_tensors({"a": torch.zeros(2, dtype=torch.complex64)}, tmp_path / "file.safetensors")
    save_tensors({}, tmp_path / "empty.safetensors")
    assert load_file(tmp_path / "empty.safetensors") == {}
