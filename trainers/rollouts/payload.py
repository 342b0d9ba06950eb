"""Python objects handed to the rollout process: reward functions, a dataset, a loop class of the user's own.

    file = JSON line {"main": path of the user's script or null, "path": sys.path} │ pickle of `Payload`

The script that called `train()` is `__main__` there and cannot be `__main__` here. It is imported again as
`__loopwright_main__`, and pickle's references to `__main__` are led to it. `LOOPWRIGHT_ROLLOUT_PROCESS=1` is set before that
import, under which a trainer's `train()` does nothing: a script needs no `if __name__ == "__main__"` guard.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import json
import os
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAIN_ALIAS = "__loopwright_main__"
INERT_ENV = "LOOPWRIGHT_ROLLOUT_PROCESS"


@dataclass
class Payload:
    """What cannot be said in JSON.

    `reward_funcs` replace the config's; `dataset` is a `datasets.Dataset` or list of dicts; `tokenizer` replaces the model's;
    `loop_class` a subclass of `AsyncRolloutLoop`; `args` is what that loop sees as `self.config`.
    """

    reward_funcs: list[Any] | None = None
    dataset: Any = None
    tokenizer: Any = None
    loop_class: type | None = None
    args: Any = None


def require_picklable(what: str, value: Any) -> None:
    """Raises `TypeError` naming the object and the three ways to write it instead."""
    try:
        pickle.dumps(value)
    except Exception as error:
        target = value.func if isinstance(value, functools.partial) else value
        name = getattr(target, "__qualname__", None) or repr(target)
        raise TypeError(
            f"{what} `{name}` cannot be handed to the rollout process ({error}). Write it as (1) a function at the top level "
            "of a module or script, (2) `functools.partial` of such a function, for arguments known beforehand, or (3) an "
            "instance of a class defined at top level with `__call__`, for state"
        ) from error


def write_payload(payload: Payload, directory: Path) -> Path:
    """Write the payload to a file only this user can read.

    Raises:
        TypeError: something in it cannot be pickled (a lambda, a closure); the message names it.
    """
    for function in payload.reward_funcs or []:
        require_picklable("reward function", function)
    require_picklable("loop class", payload.loop_class)
    require_picklable("train_dataset", payload.dataset)
    require_picklable("processing_class", payload.tokenizer)
    require_picklable("args", payload.args)
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None:
        main = spec.origin  # run as `python -m package.module`
    header = {"main": os.path.abspath(main) if main else None, "path": sys.path}
    file = directory / "payload.pickle"
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
        stream.write(json.dumps(header).encode() + b"\n")
        pickle.dump(payload, stream)
    return file


def read_payload(file: Path) -> Payload:
    """Load a payload written by this user's trainer; imports the user's script if anything in it comes from there."""
    os.environ[INERT_ENV] = "1"
    with open(file, "rb") as stream:
        header = json.loads(stream.readline())
        for entry in header["path"]:
            if entry not in sys.path:
                sys.path.append(entry)
        return _Unpickler(stream, header["main"]).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BufferedReader, main: str | None) -> None:
        super().__init__(stream)
        self._main = main

    def find_class(self, module_name: str, global_name: str) -> Any:
        if module_name == "__main__":
            return functools.reduce(getattr, global_name.split("."), _import_main(self._main))
        return super().find_class(module_name, global_name)


def _import_main(path: str | None) -> Any:
    if MAIN_ALIAS in sys.modules:
        return sys.modules[MAIN_ALIAS]
    if path is None or not os.path.exists(path):
        raise TypeError(
            "a reward function or loop class was defined in an interactive session, which the rollout process cannot "
            "import: put it into a file and import it from there"
        )
    spec = importlib.util.spec_from_file_location(MAIN_ALIAS, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[MAIN_ALIAS] = module
    spec.loader.exec_module(module)
    return module
