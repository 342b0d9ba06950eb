"""A real Prefect server with its pages, shared by a module's tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx


@dataclass(frozen=True)
class PrefectServer:
    url: str
    environment: dict[str, str]

    @property
    def pages(self) -> str:
        return self.url.removesuffix("/api")

    def api(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60.0, trust_env=False)


@contextmanager
def prefect_server() -> Iterator[PrefectServer]:
    """Running, and named to this process's Prefect clients; its database is in the Loopwright home."""
    from flows import prefect_api
    from infra.leases import LeaseManager
    from infra.registry import Registry

    with LeaseManager(Registry()) as leases:
        lease = leases.lease_port()
        process = prefect_api.start_server(lease)
        environment = prefect_api.settings(lease.port)
        try:
            from prefect.settings import PREFECT_API_URL, temporary_settings

            with temporary_settings({PREFECT_API_URL: environment["PREFECT_API_URL"]}):
                yield PrefectServer(environment["PREFECT_API_URL"], environment)
        finally:
            process.stop()
