"""Norms and rotations by the kernels: their values, and which of a model's are given to them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from transformers.models.cohere import modeling_cohere
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from trainers import norm_kernels, rotation_kernels


@pytest.mark.parametrize("module", ["fused_norms", "fused_rotation"])
def test_the_kernels_compute_what_models_do(module):
    """Interpreted, in a process of its own: triton decides at its import."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", "-m", f"tests.support.{module}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "equal", done.stderr


def test_norms_of_another_kind_stay_as_they_are():
    assert norm_kernels.enable(LlamaRMSNorm(16)) == 1
    assert norm_kernels.enable(Gemma2RMSNorm(16)) == 0, "its weight is an offset from 1"


def test_a_rotation_of_another_kind_stays_as_it_is():
    own = modeling_cohere.apply_rotary_pos_emb  # turns neighbouring numbers, not halves
    layer = torch.nn.ModuleList([modeling_cohere.CohereLayerNorm(8)])
    assert rotation_kernels.enable(layer) == 0 and modeling_cohere.apply_rotary_pos_emb is own
