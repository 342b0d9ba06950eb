"""The code under test is this repository's, not one that happens to be installed under the same names."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("package", ["flows", "trainers", "infra", "dashboards"])
def test_the_imported_package_is_this_repositorys(package: str) -> None:
    folders = [Path(folder).resolve() for folder in importlib.import_module(package).__path__]
    assert folders == [ROOT / package]
