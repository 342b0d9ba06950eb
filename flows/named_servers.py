"""The servers that a run is given: addresses, and names that the registry knows the address and the key of."""

from __future__ import annotations

import os

from flows.config_servers import ServerConfig
from infra.registry import Registry
from infra.server_names import PREFIX, find, key_of
from trainers.errors import ConfigError
from trainers.references import resolve
from trainers.roster import plain_url


def address_of(url: str, config: ServerConfig, registry: Registry | None = None) -> tuple[str, str | None]:
    """(address, key) of a server that a config names by its URL or as `name:X`; key None: it is to be asked without one.

    Raises:
        ServerUnreachable: no server is kept by that name, or its key cannot be read here.
    """
    url = resolve(url)
    if not url.startswith(PREFIX):
        return plain_url(url), os.environ.get(config.api_key_env)
    row = find(registry or Registry(), url.removeprefix(PREFIX))
    return plain_url(row.url), key_of(row)


def addresses_of(urls: list[str], config: ServerConfig, registry: Registry | None = None) -> tuple[list[str], str | None]:
    """Addresses of all, and their key.

    Raises:
        ServerUnreachable: see `address_of`.
        ConfigError: they have several keys, and a trainer has one.
    """
    found = [address_of(url, config, registry) for url in urls]
    keys = {key for _, key in found}
    if len(keys) > 1:
        raise ConfigError(
            f"the servers {', '.join(urls)} have different keys, and a run uses one for all: start them with the same "
            "VLLM_API_KEY"
        )
    return [address for address, _ in found], next(iter(keys), None)
