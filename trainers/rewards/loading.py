"""How a reward function (or a tool, or a class) named in a config becomes an object."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainers.config_parts import CallableSpec
from trainers.errors import ConfigError
from trainers.references import resolve

RewardFunc = Callable[..., Any]


def reward_name(function: RewardFunc) -> str:
    """The name under which a reward function's metrics appear."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def load_object(path: str) -> Any:
    """The object named `package.module:name` or `file.py:name`.

    Raises:
        ConfigError: nothing importable is there; the message says what to write.
    """
    module_name, separator, name = path.rpartition(":")
    if not separator or not module_name or not name:
        raise ConfigError(f"`{path}` is no import path: write `package.module:name` or `file.py:name`")
    try:
        if module_name.endswith(".py"):
            module = _load_file(Path(module_name).resolve())
        else:
            module = importlib.import_module(module_name)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"cannot import `{path}`: {type(error).__name__}: {error}") from error
    try:
        return functools.reduce(getattr, name.split("."), module)
    except AttributeError:
        known = ", ".join(sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_")))
        raise ConfigError(f"`{module_name}` has no `{name}`; it has: {known}") from None


def _load_file(file: Path) -> Any:
    if not file.is_file():
        raise ConfigError(f"there is no file {file}")
    name = "loopwright_user_" + re.sub(r"\W", "_", str(file))
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None, file
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def load_callable(spec: CallableSpec) -> RewardFunc:
    """The function of a spec with its arguments bound; a class is instantiated with them.

    Raises:
        ConfigError: it does not exist or is not callable.
    """
    target = load_object(spec.path)
    kwargs = resolve(spec.kwargs)
    if isinstance(target, type):
        target = target(**kwargs)
    elif kwargs:
        target = functools.partial(target, **kwargs)
    if not callable(target):
        raise ConfigError(f"`{spec.path}` is a {type(target).__name__}, which cannot be called")
    return target
