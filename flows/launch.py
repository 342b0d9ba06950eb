"""How the CLI runs a flow: in this process, on the API of `loopwright up` or a Prefect server of its own."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import click

from flows import prefect_api
from flows.config import RunConfig
from flows.failures import RunFailed, describe
from flows.preflight import preflight
from flows.presets import ENTRYPOINTS
from flows.runs import check_startable, new_name
from infra.registry import Registry
from trainers.errors import LoopwrightError


def launch(config: RunConfig) -> dict[str, Any]:
    """Run the flow of `config` to its end; its result.

    Raises:
        LoopwrightError: the run was refused or failed.
    """
    if config.name is None:
        config = config.model_copy(update={"name": new_name(config.type)})
    check_startable(Registry(), config)
    preflight(config)  # again in the flow; here it saves the user the wait for Prefect

    def flow() -> Any:
        module, _, name = ENTRYPOINTS[config.type].rpartition(".")
        return getattr(import_module(module), name)

    return run_flow("run", flow, config)


def run_flow(what: str, load: Callable[[], Any], config: Any) -> dict[str, Any]:
    """Run a flow whose only parameter is `config` in this process, under the config's name; its result, which is printed.

    `load` imports it, once it is known which API Prefect talks to.

    Raises:
        LoopwrightError: it was refused or failed.
    """
    with prefect_api.api() as url:
        flow = load()
        click.echo(f"{what} {config.name}; Prefect at {url.removesuffix('/api')}")
        try:
            result = flow.with_options(flow_run_name=config.name)(config)
        except LoopwrightError:
            raise
        except Exception as error:
            raise RunFailed("user", f"{what} {config.name} failed: {describe(error)}") from error
        finally:
            _flush_logs()
    assert isinstance(result, dict), result
    click.echo("\n".join(f"{name}: {value}" for name, value in result.items()))
    return result


def _flush_logs() -> None:
    """What the flow logged reaches Prefect while its server is still there."""
    from prefect.logging.handlers import APILogWorker

    APILogWorker.drain_all(timeout=10)
