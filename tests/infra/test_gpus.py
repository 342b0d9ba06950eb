"""What NVIDIA's library says of the machine, and what is made of it where there is none or it does not answer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest

from infra import checkup, gpus, provenance

GIB = 1 << 30


class FakeNvml(ModuleType):
    """`pynvml` of a machine with two GPUs, the second in use; `broken`: its driver does not answer."""

    class NVMLError(Exception):
        pass

    def __init__(self, broken: bool = False) -> None:
        super().__init__("pynvml")
        self.broken, self.opened = broken, 0

    def nvmlInit(self) -> None:
        if self.broken:
            raise self.NVMLError("Driver Not Loaded")
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        assert self.opened == 1, "asked before it was opened"
        return index

    def nvmlDeviceGetUUID(self, device: int) -> str:
        return f"GPU-{device}{device}"

    def nvmlDeviceGetName(self, device: int) -> str:
        return "H200"

    def nvmlDeviceGetMemoryInfo(self, device: int) -> SimpleNamespace:
        return SimpleNamespace(total=140 * GIB, used=device * 20 * GIB)

    def nvmlSystemGetDriverVersion(self) -> str:
        return "550.1"


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    module = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield module
    assert module.opened == 0, "the library was not closed"


def test_gpus_of_this_machine(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpus.visible_gpus() == [0, 1]
    assert provenance.gpus() == ["H200 (driver 550.1)"] * 2
    found = [(finding.status, finding.text) for finding in checkup.gpus()]
    assert found == [("ok", "0: H200, 140 GiB, 0.0 used"), ("warn", "1: H200, 140 GiB, 20.0 used")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-11")
    assert gpus.visible_gpus() == [1]


def test_a_driver_that_does_not_answer(nvml: FakeNvml) -> None:
    nvml.broken = True
    assert gpus.visible_gpus() == [] and provenance.gpus() == []
    (finding,) = checkup.gpus()
    assert finding.status in ("ok", "fail")  # by whether the machine has device files
    assert finding.text.endswith("Driver Not Loaded") or finding.text == "none: runs compute on the CPU"


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpus.visible_gpus() == [] and provenance.gpus() == []
    assert [finding.remedy for finding in checkup.gpus()] == ["pip install nvidia-ml-py"]
