"""`loopwright serve MODEL`: one server in the foreground, set up as a run would set up its student, or a teacher."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace

from infra.errors import InfraError
from infra.leases import LeaseManager
from infra.registry import Registry
from infra.server_names import NameTaken, holding, key_for, record, usage_of
from infra.vllm import ServerSpec, start_server
from infra.vllm_front import RUST_ENV


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m infra.vllm", description="vLLM servers set up for Loopwright.")
    serve = top.add_subparsers(required=True, metavar="serve").add_parser(
        "serve",
        help="serve a model in the foreground",
        description=__doc__,
        epilog="What stands after -- goes to vLLM as it is: loopwright serve MODEL --port 8000 -- --enable-prefix-caching",
    )
    serve.add_argument("model", help="folder of a model, or a hub id")
    serve.add_argument("--port", type=_port, help="port to listen on (default: a free one)")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    serve.add_argument(
        "--name", help="by which runs find it, and its log folder (default: serve, or serve-PID if that is taken)"
    )
    serve.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda when there is a GPU")
    serve.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs to split the model over (default: 1)")
    serve.add_argument("--max-model-len", type=int, help="longest sequence in tokens (default: the model's)")
    serve.add_argument("--dtype", help="default: float32 on CPU, bfloat16 on GPU")
    serve.add_argument("--python", help="interpreter that has vLLM (default: this one)")
    serve.add_argument(
        "--teacher", action="store_true", help="for scoring only: any number of logprobs, weights that cannot be changed"
    )
    serve.add_argument("--weight-dir", action="append", default=[], help="folder weight updates may come from; repeatable")
    return top


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: 1 to 65535")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 after Ctrl-C or SIGTERM, 1 when the server ended by itself, 2 when it could not be started."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    at = given.index("--") if "--" in given else len(given)
    options, extra = parser().parse_args(given[:at]), given[at + 1 :]
    make = ServerSpec.teacher if options.teacher else ServerSpec
    spec = make(
        model=options.model,
        name=options.name or "serve",
        python=options.python,
        device=options.device,
        tensor_parallel_size=options.tensor_parallel_size,
        max_model_len=options.max_model_len,
        dtype=options.dtype,
        extra_args=tuple(extra),
        # Its environment is the user's word here, as a config's `env` is.
        env={RUST_ENV: os.environ[RUST_ENV]} if RUST_ENV in os.environ else {},
        weight_dirs=tuple(options.weight_dir),
    )
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell starts background jobs with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    try:
        try:
            return _serve(spec, options)
        except NameTaken:
            if options.name is not None:
                raise
            return _serve(replace(spec, name=f"serve-{os.getpid()}"), options)
    except KeyboardInterrupt:
        return 0
    except InfraError as error:
        print(f"loopwright serve: {error}", file=sys.stderr)
        return 2


def _serve(spec: ServerSpec, options: argparse.Namespace) -> int:
    registry = Registry()
    with LeaseManager(registry) as leases, holding(leases, spec.name):
        key, where_key = key_for(spec.name)
        gpus = leases.lease_gpus(spec.tensor_parallel_size if spec.resolved_device == "cuda" else 0)
        port = leases.lease_port(port=options.port, host=options.host)
        server = start_server(spec, port, gpus.devices, key=key)
        row = record(registry, server, port.id, where_key)
        try:
            print(f"log: {server.log_path}", flush=True)
            if where_key != "environment":
                print(f"export VLLM_API_KEY={server.api_key}", flush=True)
            server.wait_ready(on_progress=lambda line: print(line, flush=True))
            print(f"ready at {server.url} (for runs: {usage_of(spec.name, spec.frozen)}; Ctrl-C ends it)", flush=True)
            code = server.process.wait()
            print(f"the server ended: {server.describe_exit()}\n{server.process.log_tail(10)}", file=sys.stderr)
            return 1 if code else 0
        finally:
            server.stop()
            registry.end_server(row.id, server.describe_exit())
