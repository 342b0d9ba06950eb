"""What a flow run's page in Prefect shows: links, the servers, live progress, the result.

Nothing here may end a run: with Prefect out of reach a message goes to the log once and training goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.settings import PREFECT_API_URL

from flows import prefect_api

log = logging.getLogger(__name__)
PATIENCE_S = 24 * 3600.0


def quietly(action: Callable[[], Any], whom: str = "Prefect") -> Any:
    """The action's result; None, with a line in the log, if it fails."""
    try:
        return action()
    except Exception as error:  # whatever a client raises when its server is away
        log.warning("%s did not take it: %s: %s", whom, type(error).__name__, error)
        return None


def wait_for_prefect(patience_s: float = PATIENCE_S) -> None:
    """Returns when Prefect's server answers. A flow's last state that cannot be reported is lost, and what the worker or the
    reaper say instead is a guess; so a flow that has ended waits for the server."""
    url = PREFECT_API_URL.value()
    began, pause = time.monotonic(), 0.5
    while url is not None and not _answers(url) and time.monotonic() - began < patience_s:
        if prefect_api.own_server_is_gone():
            log.warning("Prefect's server of this process has ended; the flow's last state is told to nobody")
            return
        if pause == 0.5:
            log.warning("Prefect at %s is out of reach; the flow has ended and waits to tell it so", url)
        time.sleep(pause)
        pause = min(2 * pause, 5.0)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5.0, trust_env=False).status_code < 500
    except httpx.HTTPError:
        return False


def mlflow_link(page: str | None, uri: str, run_id: str) -> bool:
    """A link to the MLflow run; without a server to link to, where it is stored. False: Prefect did not take it."""
    if page is None:
        text = f"MLflow run `{run_id}` in `{uri}`; `loopwright up` serves the store of the Loopwright home."
        return markdown("mlflow-run", text, "MLflow run")
    made = quietly(lambda: create_link_artifact(key="mlflow-run", link=page, link_text="MLflow run", description="Metrics"))
    return made is not None


def checkpoint_link(path: str, step: int) -> None:
    url, text = Path(path).as_uri(), f"checkpoint of step {step}"
    quietly(lambda: create_link_artifact(key="checkpoint", link=url, link_text=text, description=path))


def servers_table(rows: list[dict[str, Any]]) -> bool:
    made = quietly(lambda: create_table_artifact(key="servers", table=rows, description="vLLM servers of this run"))
    return made is not None


def markdown(key: str, text: str, description: str) -> bool:
    return quietly(lambda: create_markdown_artifact(key=key, markdown=text, description=description)) is not None


class Progress:
    """One progress artifact, made at the first figures and updated after."""

    def __init__(self) -> None:
        self._id: UUID | None = None
        self._shown: tuple[float, str] | None = None

    def show(self, progress: dict[str, Any]) -> None:
        """Figures of the registry's `progress`; the same ones again cost nothing."""
        step, steps = progress.get("step") or 0, progress.get("max_steps") or 0
        percent = round(min(100.0 * step / steps, 100.0), 1) if steps > 0 else 0.0
        if self._shown == (percent, text := describe(progress)):
            return
        if self._id is None:
            done = self._id = quietly(lambda: create_progress_artifact(progress=percent, key="progress", description=text))
        else:
            artifact = self._id
            done = quietly(lambda: (update_progress_artifact(artifact_id=artifact, progress=percent, description=text), True))
        if done is not None:
            self._shown = (percent, text)


def describe(progress: dict[str, Any]) -> str:
    """`step 3 of 20 · 12,345 tokens · reward 0.41 · 2 min left · waits for rollouts`, with what is known."""
    step, steps = progress.get("step") or 0, progress.get("max_steps") or 0
    parts = [f"step {step}" + (f" of {steps}" if steps > 0 else "")]
    if progress.get("num_tokens") is not None:
        parts.append(f"{progress['num_tokens']:,.0f} tokens")
    if progress.get("reward") is not None:
        parts.append(f"reward {progress['reward']:.3g}")
    if progress.get("eta_s") is not None:
        parts.append(f"{duration(progress['eta_s'])} left")
    if progress.get("bottleneck"):
        parts.append(f"bottleneck: {progress['bottleneck']}")
    return " · ".join(parts)


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
