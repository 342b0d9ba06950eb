"""Norms by the kernels: their values, and which norms are given to them."""

from __future__ import annotations

import os
import subprocess
import sys

from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from trainers import norm_kernels


def test_the_kernels_compute_what_models_do():
    """Interpreted, in a process of its own: triton decides at its import."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.fused_norms"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "equal", done.stderr


def test_norms_of_another_kind_stay_as_they_are():
    assert norm_kernels.enable(LlamaRMSNorm(16)) == 1
    assert norm_kernels.enable(Gemma2RMSNorm(16)) == 0, "its weight is an offset from 1"
