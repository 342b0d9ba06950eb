"""The keys of `loopwright up --shared`: made once, kept in `<home>/keys.json` (mode 0600), never printed unless asked for.

Prefect's is one `user:password` string, MLflow's a user and a password. Delete the file and start anew to change them.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from dataclasses import asdict, dataclass
from pathlib import Path

from infra.errors import InfraError
from infra.home import home

USER = "loopwright"


@dataclass(frozen=True)
class Keys:
    prefect_password: str
    mlflow_password: str

    @property
    def prefect_auth_string(self) -> str:
        return f"{USER}:{self.prefect_password}"

    def client_environment(self) -> dict[str, str]:
        """What Prefect's and MLflow's clients read."""
        return {
            "PREFECT_API_AUTH_STRING": self.prefect_auth_string,
            "MLFLOW_TRACKING_USERNAME": USER,
            "MLFLOW_TRACKING_PASSWORD": self.mlflow_password,
        }


def keys_file() -> Path:
    return home() / "keys.json"


def read_keys() -> Keys:
    """The keys of this home, made now if there are none; of two processes that make them both get the same.

    Raises:
        InfraError: the file may be read by others, or is damaged.
    """
    path = keys_file()
    write_once(path, json.dumps(asdict(Keys(secrets.token_urlsafe(32), secrets.token_urlsafe(32)))))
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise InfraError(f"{path} may be read by others: `chmod 600 {path}`, and delete it if somebody has seen the keys")
    try:
        return Keys(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise InfraError(f"{path} holds no keys ({error}): delete it, and new ones are made") from None


def write_once(path: Path, secret: str) -> None:
    """Write a file that only its owner may read, whole or not at all; one that is there already stays as it is."""
    if path.exists():
        return
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secret)
        os.link(temporary, path)  # unlike rename, it leaves what somebody else made
    except FileExistsError:
        pass
    finally:
        temporary.unlink(missing_ok=True)
