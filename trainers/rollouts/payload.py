"""Python objects handed to the rollout process: reward functions, a dataset, a loop class of the user's own.

    file = JSON line (how to import the user's script again) │ one pickle per field of `Payload`

The script that called `train()` is `__main__` there and cannot be `__main__` here. If a pickle refers to it, it is imported
again as `__loopwright_main__` and the reference is led there. Meanwhile `LOOPWRIGHT_ROLLOUT_PROCESS=1` makes the trainer
classes inert, and the `train()` call that started this process ends the import: whatever the objects need was defined before
it. So a script needs no `if __name__ == "__main__"` guard; what it does before `train()` it does twice.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.machinery
import importlib.util
import io
import json
import os
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from trainers.errors import ConfigError

MAIN_ALIAS = "__loopwright_main__"
INERT_ENV = "LOOPWRIGHT_ROLLOUT_PROCESS"
_LISTS = {"reward_funcs": "reward function", "tools": "tool"}  # fields of `Payload` whose items are pickled one by one
_WAYS = (
    "Write it as (1) a function at the top level of a module or script, (2) `functools.partial` of such a function, for "
    "arguments known beforehand, or (3) an instance of a class defined at top level with `__call__`, for state"
)


@dataclass
class Payload:
    """What cannot be said in JSON.

    `reward_funcs`, `tools` and `environment_factory` replace the config's; `dataset` is a `datasets.Dataset` or list of dicts;
    `tokenizer` replaces the model's; `loop_class` is a subclass of `AsyncRolloutLoop`, `args` what it sees as `self.config`.
    """

    reward_funcs: list[Any] | None = None
    dataset: Any = None
    tokenizer: Any = None
    loop_class: type | None = None
    args: Any = None
    tools: list[Any] | None = None
    environment_factory: Any = None


# train() calls: a script may train twice, and the second run's rollout process must get past the first call ----------------


class ScriptDone(BaseException):
    """The imported script reached the `train()` call that started this process: no error; no `except Exception` stops it."""


_train_calls = 0
_stop_at = 0  # in the rollout process: the number of the call at which the import ends


def in_rollout_process() -> bool:
    """Whether this process imports a script only for the objects defined in it."""
    return os.environ.get(INERT_ENV) == "1"


def count_train_call() -> None:
    """Note a `train()` call; in the rollout process raises `ScriptDone` at the one that started it."""
    global _train_calls
    _train_calls += 1
    if in_rollout_process() and _train_calls == _stop_at:
        raise ScriptDone


# Writing ----------------------------------------------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """Notes whether anything pickled is defined in `__main__`."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.main_names: list[str] = []

    def reducer_override(self, obj: Any) -> Any:
        if getattr(obj, "__module__", None) == "__main__" and hasattr(obj, "__qualname__"):
            self.main_names.append(obj.__qualname__)
        return NotImplemented


def _pickled(what: str, value: Any, main: dict[str, Any]) -> bytes:
    """`value` as bytes.

    Raises:
        TypeError: it cannot be pickled, or is defined where another process cannot import it.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    try:
        pickler.dump(value)
    except Exception as error:
        raise TypeError(f"{what} `{_name(value)}` cannot be handed to the rollout process ({error}). {_WAYS}") from error
    if pickler.main_names and main["file"] is None:
        raise TypeError(
            f"{what} `{_name(value)}` needs `{pickler.main_names[0]}`, which was defined in an interactive session, where the "
            "rollout process cannot import it. Put it into a file and import it from there"
        )
    return stream.getvalue()


def _name(value: Any) -> str:
    while isinstance(value, functools.partial):
        value = value.func
    return getattr(value, "__qualname__", None) or type(value).__qualname__


def require_picklable(what: str, value: Any) -> None:
    """Raises `TypeError` naming the object and the three ways to write it instead."""
    _pickled(what, value, _main_script())


def _main_script() -> dict[str, Any]:
    """How to import `__main__` again: `file` (None in an interactive session), and `package` if it was run with `-m`."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    file = getattr(main, "__file__", None) if spec is None else spec.origin
    file = os.path.abspath(file) if file and os.path.isfile(file) else None
    return {"file": file, "package": getattr(main, "__package__", None) or None}


def write_payload(payload: Payload, directory: Path) -> Path:
    """Write the payload to a file only this user can read.

    Raises:
        TypeError: something in it cannot be pickled (a lambda, a closure); the message names it.
    """
    main = _main_script()
    parts = [_pickled(what, item, main) for field, what in _LISTS.items() for item in getattr(payload, field) or []]
    names = {
        "dataset": "train_dataset",
        "tokenizer": "processing_class",
        "loop_class": "loop class",
        "args": "args",
        "environment_factory": "environment_factory",
    }
    parts += [_pickled(what, getattr(payload, field), main) for field, what in names.items()]
    header = {
        "main": main,
        "path": [os.path.abspath(entry) for entry in sys.path],
        "argv": sys.argv,
        "train_call": _train_calls,
        **{name: None if (given := getattr(payload, name)) is None else len(given) for name in _LISTS},
        "fields": list(names),
    }
    file = directory / "payload.pickle"
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
        stream.write(json.dumps(header).encode() + b"\n")
        stream.writelines(parts)
    return file


# Reading ----------------------------------------------------------------------------------------------------------------------


def read_payload(file: Path) -> Payload:
    """Load a payload written by this user's trainer; imports the user's script if anything in it comes from there.

    Raises:
        ConfigError: the script cannot be imported a second time; the message names the line's error and the remedy.
    """
    global _stop_at
    os.environ[INERT_ENV] = "1"
    with open(file, "rb") as stream:
        header = json.loads(stream.readline())
        sys.path.extend(entry for entry in header["path"] if entry not in sys.path)
        sys.argv = header["argv"]
        _stop_at = header["train_call"]
        unpickler = functools.partial(_Unpickler, stream, header["main"])
        counts = {name: header[name] for name in _LISTS}
        payload = Payload()
        for name, count in counts.items():
            setattr(payload, name, None if count is None else [unpickler().load() for _ in range(count)])
        return dataclasses.replace(payload, **{field: unpickler().load() for field in header["fields"]})


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BufferedReader, main: dict[str, Any]) -> None:
        super().__init__(stream)
        self._main = main

    def find_class(self, module_name: str, global_name: str) -> Any:
        if module_name == "__main__":
            return functools.reduce(getattr, global_name.split("."), _import_main(**self._main))
        return super().find_class(module_name, global_name)


def _import_main(file: str, package: str | None) -> ModuleType:
    if MAIN_ALIAS in sys.modules:
        return sys.modules[MAIN_ALIAS]
    # The loader is named, as a script need not end in .py.
    loader = importlib.machinery.SourceFileLoader(MAIN_ALIAS, file)
    spec = importlib.util.spec_from_file_location(MAIN_ALIAS, file, loader=loader)
    assert spec is not None, file
    module = importlib.util.module_from_spec(spec)
    if package:
        module.__package__, module.__spec__ = package, None  # relative imports go by the package
    sys.modules[MAIN_ALIAS] = module
    try:
        loader.exec_module(module)
    except ScriptDone:
        pass
    except BaseException as error:
        del sys.modules[MAIN_ALIAS]
        raise ConfigError(
            f"the rollout process imports {file} for the objects defined in it, and that failed: "
            f"{type(error).__name__}: {error}. "
            'Put what must run only once under `if __name__ == "__main__":`, or the objects into a module of their own'
        ) from error
    return module
