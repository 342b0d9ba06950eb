"""What `loopwright up --shared` listens on, and what other machines set to use it."""

from __future__ import annotations

import ipaddress
import socket

from flows.connections import client_environment, running
from trainers.errors import ConfigError

_OF_VPNS = ipaddress.ip_network("100.64.0.0/10")  # no private range by its name, used like one


def shared_host(host: str | None) -> str:
    """The private address to listen on.

    Raises:
        ConfigError: it is none of this machine's, a public one, or there are several to choose from.
    """
    import psutil

    entries = [entry for found in psutil.net_if_addrs().values() for entry in found]
    private = [entry.address for entry in entries if entry.family == socket.AF_INET and is_private(entry.address)]
    if host is None:
        lan = [address for address in private if not ipaddress.ip_address(address).is_loopback]
        if len(lan) != 1:
            raise ConfigError(f"this machine has {len(lan)} private addresses ({', '.join(lan) or 'none'}): name one by --host")
        return lan[0]
    if host not in private:
        raise ConfigError(
            f"--host {host} is no private address of this machine (those are {', '.join(private)}). Keys travel unencrypted: "
            "public ones are refused: put a proxy that speaks TLS in front of --host 127.0.0.1"
        )
    return host


def is_private(address: str) -> bool:
    """Of a local network, a VPN, or loopback."""
    known = ipaddress.ip_address(address)
    return (known.is_private or known in _OF_VPNS) and not known.is_unspecified and not known.is_link_local


def other_machines() -> list[str]:
    """Lines for the shell of another machine that is to use what is up here, keys included.

    Raises:
        ConfigError: nothing shared is up.
    """
    up = running()
    if up is None or not up.shared:
        raise ConfigError("nothing is shared: `loopwright up --shared` first")
    found = {"PREFECT_API_URL": up.prefect_url, **client_environment(up, environ={})}
    return [f"export {name}='{value}'" for name, value in found.items()]
