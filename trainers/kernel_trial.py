"""Where Triton kernels run, and the trial that each has before a run uses it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)
OFF = 0.03  # of the norm of what torch's operators compute: more is no rounding


def takes(x: torch.Tensor) -> bool:
    """Whether kernels that compute in float32 run on a tensor like this: in 16 bits on a GPU, or interpreted."""
    return (x.is_cuda and x.dtype != torch.float32) or os.environ.get("TRITON_INTERPRET") == "1"


def passed(what: str, difference: Callable[[], float]) -> bool:
    """Whether kernels compile here and compute the right values; the log says why not.

    Args:
        what: what then stays as the model has it.
        difference: runs the kernels and torch's operators; how far they are apart, of the norm.
    """
    try:
        off = difference()
        if off < OFF:
            return True
        why = f"they differ from torch's operators by {off:.3g} of the norm"
    except Exception as error:
        why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
    logger.warning("%s stay as the model has them, not by kernels: %s", what, why)
    return False
