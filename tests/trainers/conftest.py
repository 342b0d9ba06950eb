"""What several modules of trainer tests need."""

from __future__ import annotations

import pytest

from trainers.errors import ConfigError
from trainers.rewards.sandbox.launch import in_force


@pytest.fixture(scope="session")
def confined() -> None:
    """Skips where the kernel cannot confine a program: there, `code_reward` refuses to run any."""
    try:
        in_force(False)
    except ConfigError as error:
        pytest.skip(str(error))
