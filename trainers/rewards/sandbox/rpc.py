"""Calls between two processes that do not trust each other, over a pair of pipes, in plain data.

    judge ── {"op": "call", "on": 3, "args": […]} ─▶ program
          ◀─ {"value": …, "args": […]} | {"error": [type, message]} ──

None, booleans, numbers, strings, bytes, lists, tuples, sets and dictionaries travel as values and are rebuilt; everything else
stays where it is and travels as a number, seen from the other side as a `Proxy`. While a side waits for an answer it serves the
other's calls, so a function may be passed as an argument. Lists, sets and dictionaries among a call's arguments come back
with its answer, so that changes in place are seen.

What may be asked of a side is its `operations`: the program's side answers everything, the judge's only calls of functions
that it passed itself.
"""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from itertools import islice
from typing import Any, BinaryIO

MESSAGE_BYTES = 8 << 20
_ITEMS = 1_000_000
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_CHANGEABLE = (list, dict, set)


class PeerGone(BaseException):
    """The other side ended or broke the protocol: nothing it might say counts. No test's `except Exception` stops it."""


class ProgramError(Exception):
    """An exception of the program's whose class is its own."""


class Peer:
    """One side. `operations` maps a name to a function of the object it is asked of and the decoded arguments."""

    def __init__(self, reader: BinaryIO, writer: BinaryIO, operations: dict[str, Callable[..., Any]]) -> None:
        self._reader, self._writer, self._operations = reader, writer, operations
        self._objects: list[Any] = []  # what the other side knows by number

    # Values

    def encode(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is list:
            return [self.encode(item) for item in value]
        if kind is Proxy:
            return {"t": "yours", "v": object.__getattribute__(value, "_number")}
        for plain in (str, int, float, list, tuple, dict, set, frozenset, bytes, bytearray, complex):
            if isinstance(value, plain):
                return self._encode_tagged(plain, value)
        self._objects.append(value)
        return {"t": "mine", "v": len(self._objects) - 1}

    def _encode_tagged(self, plain: type, value: Any) -> Any:
        if plain is dict:
            return {"t": "dict", "v": [[self.encode(k), self.encode(v)] for k, v in dict.items(value)]}
        if plain.__name__ in _SEQUENCES:
            return {"t": plain.__name__, "v": [self.encode(item) for item in plain.__iter__(value)]}
        if plain in (bytes, bytearray):
            return {"t": "bytes", "v": bytes(value).hex()}
        if plain is complex:
            return {"t": "complex", "v": [value.real, value.imag]}
        return self.encode(plain(value))  # a subclass counts as what it is a kind of

    def decode(self, data: Any) -> Any:
        if isinstance(data, list):
            return [self.decode(item) for item in data]
        if not isinstance(data, dict):
            return data
        kind, value = data["t"], data["v"]
        if kind in _SEQUENCES:
            return _SEQUENCES[kind]([self.decode(item) for item in value])
        if kind == "dict":
            return {self.decode(k): self.decode(v) for k, v in value}
        if kind == "bytes":
            return bytes.fromhex(value)
        if kind == "complex":
            return complex(*value)
        return self._objects[value] if kind == "yours" else Proxy(self, int(value))

    # Messages

    def receive(self) -> dict[str, Any]:
        line = self._reader.readline(MESSAGE_BYTES)
        if not line.endswith(b"\n"):
            raise PeerGone
        return json.loads(line)

    def send(self, message: dict[str, Any]) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")
        self._writer.flush()

    def ask(
        self, operation: str, on: int | None = None, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The other side's answer.

        Raises:
            PeerGone: there is none.
            Exception: what was raised there: a builtin exception, or `ProgramError`.
        """
        changeable = [arg for arg in args if isinstance(arg, _CHANGEABLE)]
        encoded = {name: self.encode(value) for name, value in (kwargs or {}).items()}
        message = {"op": operation, "on": on, "args": [self.encode(arg) for arg in args], "kwargs": encoded}
        try:
            self.send(message)
            while "op" in (answer := self.receive()):
                self.serve(answer)
            error = answer.get("error")
            value = None if error else self.decode(answer["value"])
            for old, new in zip(changeable, map(self.decode, answer.get("args", ())), strict=True) if not error else ():
                _overwrite(old, new)
        except Exception as broken:
            raise PeerGone from broken
        if error:
            raise _exception(*map(str, error))
        return value

    def serve(self, message: dict[str, Any]) -> None:
        """Do what the other side asks and answer it."""
        try:
            args = [self.decode(arg) for arg in message["args"]]
            kwargs = {name: self.decode(value) for name, value in message["kwargs"].items()}
            on = None if message["on"] is None else self._objects[message["on"]]
            changeable = [arg for arg in args if isinstance(arg, _CHANGEABLE)]
            value = self.encode(self._operations[message["op"]](on, *args, **kwargs))
            answer = {"value": value, "args": [self.encode(arg) for arg in changeable]}
        except PeerGone:
            raise
        except BaseException as error:  # SystemExit of a program is its failure, not this process's end
            answer = {"error": [type(error).__name__, str(error)]}
        self.send(answer)


class Proxy:
    """An object of the other side. Equal to another one if they are equal over there; never equal to plain data."""

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def _ask(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        return object.__getattribute__(self, "_peer").ask(operation, object.__getattribute__(self, "_number"), args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ask("call", *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._ask("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", name, value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Proxy) and self._ask("method", "__eq__", other) is True

    def __hash__(self) -> int:
        return hash(object.__getattribute__(self, "_number"))

    def __iter__(self) -> Any:
        return iter(self._ask("items"))

    def __next__(self) -> Any:
        return self._ask("method", "__next__")

    def __len__(self) -> int:
        return self._ask("method", "__len__")

    def __bool__(self) -> bool:
        return True

    def __contains__(self, item: Any) -> bool:
        return self._ask("method", "__contains__", item) is True

    def __getitem__(self, key: Any) -> Any:
        return self._ask("method", "__getitem__", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._ask("method", "__setitem__", key, value)

    def __str__(self) -> str:
        return str(self._ask("method", "__str__"))

    def __repr__(self) -> str:
        return str(self._ask("method", "__repr__"))


def _method(on: Any, name: str, *args: Any) -> Any:
    if not hasattr(type(on), name):
        raise TypeError(f"a {type(on).__name__} has no {name}")  # what `len`, `list` and their like expect
    return getattr(type(on), name)(on, *args)


OPEN: dict[str, Callable[..., Any]] = {
    "call": lambda on, *args, **kwargs: on(*args, **kwargs),
    "get": lambda on, name: getattr(on, name),
    "set": lambda on, name, value: setattr(on, name, value),
    "method": _method,
    "items": lambda on: list(islice(on, _ITEMS)),
}


def _overwrite(old: Any, new: Any) -> None:
    assert type(new) is type(old), (type(new), type(old))
    if isinstance(old, list):
        old[:] = new
    else:
        old.clear()
        old.update(new)


def _exception(name: str, message: str) -> Exception:
    known = getattr(builtins, name, None)
    if isinstance(known, type) and issubclass(known, Exception):
        try:
            return known(message)
        except TypeError:  # UnicodeDecodeError and its like take more
            pass
    return ProgramError(f"{name}: {message}")
