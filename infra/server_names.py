"""Servers that are kept by a name, for whichever run wants them: `loopwright serve --name X`, the flow `serve`.

    serve ─▶ lease (server, X) ─▶ row of `servers` without a run ─▶ find(X) ─▶ address, and where its key is

Of two processes that want to keep a server by one name on one machine, one gets it. The key is that of `VLLM_API_KEY` where it
is set, else a file in `<LOOPWRIGHT_HOME>/keys` that only its owner may read; the registry knows which of both, never the key.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from infra.errors import InfraError, ServerUnreachable
from infra.home import home
from infra.keys import write_once
from infra.leases import LeaseManager
from infra.registry import Registry, ServerRow
from infra.vllm import VLLMServer

PREFIX = "name:"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")
KEY_VARIABLE = "VLLM_API_KEY"


class NameTaken(InfraError, ValueError):
    failure_class = "user"


@contextmanager
def holding(leases: LeaseManager, name: str) -> Iterator[None]:
    """The name is this process's while it lasts.

    Raises:
        NameTaken: another process keeps a server by it.
    """
    if not NAME.match(name):
        raise NameTaken(f"{name!r} is no name for a server: letters, digits, `_`, `-` and `.`, at most 64")
    lease = leases.lease_name("server", name)
    if lease is None:
        raise NameTaken(f"a server named {name!r} is kept already (`loopwright servers list`): choose another name")
    try:
        yield
    finally:
        leases.release(lease)


def key_for(name: str, environ: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """(key, where it is) for a server that is about to be started.

    Raises:
        InfraError: the file that should hold it is empty.
    """
    if given := environ.get(KEY_VARIABLE):
        return given, "environment"
    path = _key_file(name)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    write_once(path, secrets.token_urlsafe(32))
    if key := path.read_text().strip():
        return key, "file"
    raise InfraError(f"{path} should hold the key of server {name} and is empty: delete it, and a new one is made")


def record(registry: Registry, server: VLLMServer, lease_id: str, where_key: str) -> ServerRow:
    """The row by which a server is found."""
    details = {"model": server.spec.model, "key": where_key}
    return registry.record_server(
        None,
        server.spec.name,
        server.url,
        server.process.pid,
        lease_id=lease_id,
        log_path=str(server.log_path),
        details=details,
    )


def usage_of(name: str, teacher: bool) -> str:
    """How a run's config names a server that is kept by a name."""
    return f"servers.{'teachers.NAME' if teacher else 'student'}.url={PREFIX}{name}"


def kept(registry: Registry) -> list[ServerRow]:
    """All that are kept by a name now, as far as is known."""
    return [row for row in registry.list_servers(running=True) if row.run_id is None and "key" in row.details]


def find(registry: Registry, name: str) -> ServerRow:
    """Raises `ServerUnreachable`: no server is kept by this name now."""
    rows = [row for row in kept(registry) if row.name == name]
    if not rows:
        known = ", ".join(sorted({row.name for row in kept(registry)})) or "none is"
        raise ServerUnreachable(
            f"no server is kept by the name {name!r} (kept: {known}): start it with `loopwright serve MODEL --name {name}` or "
            "the flow `serve`"
        )
    return rows[-1]


def key_of(row: ServerRow, environ: Mapping[str, str] = os.environ) -> str:
    """Raises `ServerUnreachable`: its key is not where this process can read it."""
    if row.details.get("key") == "environment":
        if key := environ.get(KEY_VARIABLE):
            return key
        raise ServerUnreachable(f"server {row.name} was started with a key of its own: set {KEY_VARIABLE} to it")
    try:
        return _key_file(row.name).read_text().strip()
    except OSError as error:
        raise ServerUnreachable(
            f"the key of server {row.name} is in {_key_file(row.name)} on {row.host}, which cannot be read here "
            f"({error.strerror}): set {KEY_VARIABLE} to it and leave the name out of the address"
        ) from None


def _key_file(name: str) -> Path:
    return home() / "keys" / name
