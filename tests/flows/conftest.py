"""A Loopwright home of each test's own, and a run in it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.config import GRPORunConfig


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("LOOPWRIGHT_HOME", str(folder))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    return folder


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., GRPORunConfig]:
    """Makes a config that validates, whose model and dataset are files that exist."""

    def make(**fields: Any) -> GRPORunConfig:
        model = tmp_path / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text("{}")
        (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
        base = {
            "name": "test",
            "model": str(model),
            "dataset": {"path": str(tmp_path / "rows.jsonl")},
            "reward_funcs": ["trainers.rewards:exact_match_reward"],
            "retry": {"backoff_s": 0},
        }
        return GRPORunConfig.model_validate(base | fields)

    return make


@pytest.fixture
def unused_port() -> Iterator[int]:
    """A bound port on which nothing listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]
