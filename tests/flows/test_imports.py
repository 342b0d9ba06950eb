"""What a flow, the run form and the CLI import stays light."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "modules",
    [
        "trainers.config, trainers.types, trainers.metrics, trainers.planner",
        "flows.config, flows.config_file, flows.preflight, flows.runs, flows.cli",
        "flows.grpo, flows.sft, flows.deployments, flows.services, flows.launch",
    ],
)
def test_importing_pulls_in_no_torch(modules: str) -> None:
    check = f"import sys, {modules}; sys.exit('torch was imported' if 'torch' in sys.modules else 0)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
