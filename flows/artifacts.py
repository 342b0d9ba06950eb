"""What a flow run's page in Prefect shows: links, the servers, live progress, the result.

Nothing here may end a run: with Prefect out of reach a message goes to the log once and training goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

log = logging.getLogger(__name__)


def quietly(action: Callable[[], Any], whom: str = "Prefect") -> Any:
    """The action's result; None, with a line in the log, if it fails."""
    try:
        return action()
    except Exception as error:  # whatever a client raises when its server is away
        log.warning("%s did not take it: %s: %s", whom, type(error).__name__, error)
        return None


def mlflow_link(page: str | None, uri: str, run_id: str) -> None:
    """A link to the MLflow run; without a server to link to, where it is stored."""
    if page is None:
        text = f"MLflow run `{run_id}` in `{uri}`; `loopwright up` serves the store of the Loopwright home."
        markdown("mlflow-run", text, "MLflow run")
    else:
        quietly(lambda: create_link_artifact(key="mlflow-run", link=page, link_text="MLflow run", description="Metrics"))


def checkpoint_link(path: str, step: int) -> None:
    url, text = Path(path).as_uri(), f"checkpoint of step {step}"
    quietly(lambda: create_link_artifact(key="checkpoint", link=url, link_text=text, description=path))


def servers_table(rows: list[dict[str, Any]]) -> None:
    quietly(lambda: create_table_artifact(key="servers", table=rows, description="vLLM servers of this run"))


def markdown(key: str, text: str, description: str) -> None:
    quietly(lambda: create_markdown_artifact(key=key, markdown=text, description=description))


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
        self._shown = (percent, text)
        if self._id is None:
            self._id = quietly(lambda: create_progress_artifact(progress=percent, key="progress", description=text))
        else:
            artifact = self._id
            quietly(lambda: update_progress_artifact(artifact_id=artifact, progress=percent, description=text))


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
