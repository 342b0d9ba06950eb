"""`python -m loopwright_vllm.serve MODEL ARGUMENT…`: `vllm serve`, with the key before every front end.

    Python front ends    API server processes, each with the middleware ─▶ engine
    Rust front end       this process: key, POST /loopwright/sync ══ Unix socket ══▶ Rust ─▶ engine

vLLM's own command asks for the version of a distribution named `vllm`, which its CPU build does not have, so its subcommand
is called here. The Rust front end loads no middleware and guards a few paths only, so it listens on a socket in a folder that
belongs to this user alone, and what is reachable is the proxy. It also knows no `{% generation %}` in chat templates, a mark
for training: such a template is given to it without.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

BEHIND = "--behind-proxy"  # first, where a user's arguments never are: this is the server, and the proxy is there
TEMPLATE, TOKENIZER = "chat_template.jinja", "tokenizer_config.json"
GENERATION_MARK = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")


def run_vllm(arguments: list[str]) -> None:
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()  # workers are spawned, not forked
    parser = FlexibleArgumentParser(prog="vllm")
    command = ServeSubcommand()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    options = parser.parse_args(["serve", *arguments])
    command.validate(options)
    command.cmd(options)


def split(arguments: list[str]) -> tuple[str, int, list[str]]:
    """Host, port and the other arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    known, others = parser.parse_known_args(arguments)
    return known.host, known.port, others


def plain_template(model: str, folder: Path) -> list[str]:
    """`--chat-template` with a copy of the model's that has no marks for training; nothing where it has none."""
    text = template_of(files_of(model))
    plain = GENERATION_MARK.sub("", text)
    if plain == text:
        return []
    path = folder / TEMPLATE
    path.write_text(plain)
    return ["--chat-template", str(path)]


def files_of(model: str) -> Path:
    """The folder of a model, or where the files of a hub id that hold its template lie; without any where there are none."""
    if not Path(model).is_dir():
        with suppress(ImportError, OSError, ValueError):
            from huggingface_hub import snapshot_download

            return Path(snapshot_download(model, allow_patterns=[TEMPLATE, TOKENIZER]))
    return Path(model)


def template_of(folder: Path) -> str:
    """The chat template in a file of its own, else the one among the tokenizer's settings; empty: none."""
    if (folder / TEMPLATE).is_file() and (text := (folder / TEMPLATE).read_text()):
        return text
    settings = json.loads((folder / TOKENIZER).read_text()) if (folder / TOKENIZER).is_file() else {}
    found = settings.get("chat_template") or ""
    if isinstance(found, list):  # named ones
        found = next((item["template"] for item in found if item["name"] == "default"), "")
    return found


class Stopped(SystemExit):
    """SIGTERM came."""


def stop(number: int, frame: Any) -> NoReturn:
    raise Stopped(128 + number)


def run_behind_proxy(arguments: list[str]) -> int:
    """Returns the exit code of the server behind, which ends with this process.

    Raises:
        Stopped: by a signal, once the server behind has ended and its folder is gone.
    """
    from loopwright_vllm import proxy

    signal.signal(signal.SIGTERM, stop)  # uvicorn raises the signal anew when it is done: by itself that would be the end
    host, port, others = split(arguments)
    with tempfile.TemporaryDirectory(prefix="loopwright-vllm-") as name:  # mode 0700
        socket = os.path.join(name, "front")
        if "--chat-template" not in others:
            others += plain_template(others[0], Path(name))
        command = [sys.executable, "-m", "loopwright_vllm.serve", BEHIND, *others, "--uds", socket]
        # The key is for the proxy: behind it nothing needs one, and a log of its environment must not show it.
        env = {variable: value for variable, value in os.environ.items() if variable != "VLLM_API_KEY"}
        with subprocess.Popen(command, env=env) as server:
            try:
                proxy.run(host, port, socket, server)
            finally:
                if server.poll() is None:
                    server.send_signal(signal.SIGTERM)
        return server.returncode


def main() -> int:
    arguments = sys.argv[1:]
    if arguments[:1] == [BEHIND]:
        run_vllm(arguments[1:])
    elif os.environ.get("VLLM_USE_RUST_FRONTEND") == "1":
        try:
            return run_behind_proxy(arguments)
        except Stopped:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)  # who waits for this process sees what ended it
    else:
        run_vllm(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
