"""Which student servers a run has, as files in its folder: servers may come and go while it trains.

    flow, `loopwright servers`, a user's hand ─▶ servers.json ─▶ trainer rank 0 (looks before a sync and while it waits)
              flow, `loopwright servers list` ◀─ serving.json ◀─ trainer rank 0 (after every sync)

Both appear by rename, so a reader sees a whole file or the one before.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

logger = logging.getLogger(__name__)
SERVERS_FILE, SERVING_FILE = "servers.json", "serving.json"


@dataclass(frozen=True, slots=True)
class Listed:
    """A server by its name in the run, and its URL without `/v1`. A process started anew at the same URL is the same server."""

    name: str
    url: str


@dataclass(frozen=True, slots=True)
class Serving:
    """What the trainer last did with a server. `version`: policy version it took; None: out, for the reason `why`."""

    name: str
    url: str
    version: int | None
    why: str = ""


def plain_url(url: str) -> str:
    """A server's address in the one form in which addresses are compared: no trailing slash, no `/v1`, the host in small
    letters, and this machine as 127.0.0.1 (with https as it is written: its certificate is for a name)."""
    plain = url.strip().rstrip("/").removesuffix("/v1")
    plain = re.sub(r"^https?://[^/@]+(?=/|$)", lambda host: host[0].lower(), plain, flags=re.IGNORECASE)
    return re.sub(r"^http://(localhost|0\.0\.0\.0)(?=[:/]|$)", "http://127.0.0.1", plain)


def write_servers(folder: Path, servers: Sequence[Listed]) -> None:
    """`{"servers": [{"name": …, "url": …}]}`."""
    _write(folder / SERVERS_FILE, {"servers": [asdict(server) for server in servers]})


def write_serving(folder: Path, servers: Sequence[Serving]) -> None:
    _write(folder / SERVING_FILE, {"servers": [asdict(server) for server in servers]})


def read_serving(folder: Path) -> list[Serving]:
    """Empty before the first sync."""
    try:
        found = json.loads((folder / SERVING_FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return []
    return [Serving(**server) for server in found["servers"]]


def read_servers(folder: Path) -> list[Listed]:
    """Empty where there is no such file. Raises `ValueError` for one that makes no sense."""
    try:
        return _servers(folder / SERVERS_FILE)
    except FileNotFoundError:
        return []


class Roster:
    """The trainer's look at servers.json; one costs a `stat` while nothing changes.

    Args:
        folder: the run's.
        current: what is there already is of this run (a flow wrote it). Otherwise it may be an earlier run's, and only
            what is written from now on counts.
    """

    def __init__(self, folder: Path, current: bool = False) -> None:
        self._path = folder / SERVERS_FILE
        self._seen = None if current else self._signature()

    @property
    def changed(self) -> bool:
        """Whether `read` would give something new."""
        return self._signature() not in (None, self._seen)

    def read(self) -> list[Listed] | None:
        """The servers, if the file was written since the last look. None: as before, also for a file that makes no sense."""
        signature = self._signature()
        if signature in (None, self._seen):
            return None
        self._seen = signature
        try:
            return _servers(self._path)
        except (OSError, ValueError) as error:
            logger.warning("%s is ignored, the servers stay as they are: %s", self._path, error)
            return None

    def _signature(self) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size


def _servers(path: Path) -> list[Listed]:
    content = json.loads(path.read_text(encoding="utf-8"))
    entries = content.get("servers") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ValueError('it lists no server: write {"servers": [{"name": "…", "url": "http://…"}]}')
    servers = [_listed(entry) for entry in entries]
    for what in ("name", "url"):
        values = [getattr(server, what) for server in servers]
        if twice := [value for value in values if values.count(value) > 1]:
            raise ValueError(f"two servers have the {what} {twice[0]}")
    return servers


def _listed(entry: object) -> Listed:
    if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) and entry[key] for key in ("name", "url")):
        raise ValueError(f'a server is {{"name": "…", "url": "http://…"}}, not {entry!r}')
    address = urlsplit(entry["url"])  # ValueError for one that cannot be taken apart
    if address.scheme not in ("http", "https") or not address.hostname or address.port == 0:
        raise ValueError(f"{entry['url']!r} is no address of a server: write http://host:port")
    return Listed(entry["name"], plain_url(entry["url"]))


def _write(path: Path, content: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)
