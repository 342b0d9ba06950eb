"""What infra raises on purpose.

    InfraError
    ├── PortTaken, NotEnoughGPUs        a resource is held by somebody else
    ├── ServerUnreachable               nothing, or something that is no vLLM server of ours, answers at a URL
    ├── ServerStartFailed               a vLLM server ended before it was ready; carries the end of its log
    ├── StorageError                    shared storage did not do what was asked; nothing that was there is lost by it
    │   ├── NotStored                   there is no such object
    │   ├── Damaged                     a file or object is not what its SHA-256 says
    │   └── StorageRefused (ValueError) credentials, permission or bucket; says what to set
    ├── ModelNotFound (ValueError)      a model folder that does not exist or holds no model
    └── ServerLacks (ValueError)        the server is up but cannot do what is needed; says which flag to add

`failure_class` is one of the retry policy's classes, as in `trainers.errors` (which infra does not import).
"""

from __future__ import annotations


class InfraError(Exception):
    failure_class: str = "infrastructure"


class PortTaken(InfraError):
    """A port that was asked for is leased, something else listens there, or nothing can."""


class NotEnoughGPUs(InfraError):
    """Fewer GPUs are free than were asked for."""


class ServerUnreachable(InfraError):
    """No server of ours answers."""


class ServerStartFailed(InfraError):
    """A server did not get ready. `failure_class` is read from its log: `user` for a refused flag, `memory` for lack of it."""

    def __init__(self, message: str, failure_class: str = "infrastructure") -> None:
        super().__init__(message)
        self.failure_class = failure_class


class StorageError(InfraError):
    """Shared storage is out of reach, full, or answered with an error."""


class NotStored(StorageError):
    """There is no object of this name."""


class Damaged(StorageError):
    """A file or an object differs from what its manifest says."""


class StorageRefused(StorageError, ValueError):
    """The storage does not let us in, or has no such bucket; trying again does not help."""

    failure_class = "user"


class ModelNotFound(InfraError, ValueError):
    failure_class = "user"


class ServerLacks(InfraError, ValueError):
    failure_class = "user"
