"""What differs between the vLLM versions this package runs under, found by looking at what is there.

before 0.28   the base class has the abstract static `trainer_send_weights`; no call runs inside a current config;
              the engine keeps no weight version
since 0.28    trainer classes of their own; calls run inside the current config; `update_weight_version`
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any


def current_config(vllm_config: Any) -> AbstractContextManager[Any]:
    """The context that layers are loaded in; nothing where the worker is in it already."""
    # Not at the top: the proxy (`proxy.py`) needs the calls below and none of vLLM.
    from vllm.config import get_current_vllm_config_or_none, set_current_vllm_config

    return nullcontext() if get_current_vllm_config_or_none() is not None else set_current_vllm_config(vllm_config)


async def pause(engine: Any) -> None:
    """Requests in flight are kept, prefixes forgotten. Without the server's own wait for outputs on their way, which only
    keeps the order of events tidy."""
    await engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=True)


async def resume(engine: Any) -> None:
    await engine.engine_core.resume_scheduler_async()


async def set_version(engine: Any, version: str) -> bool:
    """False where the engine keeps none."""
    if not hasattr(engine, "update_weight_version"):
        return False
    await engine.update_weight_version(version)
    return True
