"""Command line, environment, probe messages and start failures; no server gets up here (see test_vllm_server.py)."""

from __future__ import annotations

import dataclasses
import json
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from infra.errors import ModelNotFound, PortTaken, ServerLacks, ServerStartFailed, ServerUnreachable
from infra.leases import LeaseManager
from infra.process import marked
from infra.registry import Registry
from infra.vllm import Capabilities, Needs, ServerSpec, environment, lacking, probe, start_server
from infra.vllm_command import command_line as features_command_line
from infra.vllm_command import front_of
from infra.vllm_features import Features
from infra.vllm_probe import require
from infra.vllm_serve import main as serve
from tests.support.tiny_model import build_tiny_model

GOOD = Capabilities(
    version="0.32.0",
    model="/m",
    served_name="policy",
    max_model_len=512,
    generate_endpoint=True,
    control_plane=True,
    keyed=True,
    weight_transfer="loopwright",
    logprobs_mode="processed_logprobs",
    max_logprobs=20,
    dtype="float32",
    device="cpu",
    chunked_prefill=False,
)

# Of a vLLM that has all there is, in an interpreter that need not be there.
FULL = Features("0.32.0", "cuda", frozenset({"enable_scale_out", "return_sampling_mask"}), "/vllm/vllm-rs")
BEFORE_028 = Features("0.26.0", "cuda", frozenset(), None)


@pytest.fixture
def port(tmp_path):
    with LeaseManager(Registry(tmp_path / "registry.db")) as leases:
        yield leases.lease_port()


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return str(folder)


def command_line(spec: ServerSpec, port: int, features: Features = FULL) -> list[str]:
    return features_command_line(spec, port, features, front_of(spec, features, cores=16))


def option(arguments: list[str], name: str) -> str:
    return arguments[len(arguments) - 1 - arguments[::-1].index(name) + 1]


def test_cpu_and_gpu_by_the_same_code(model, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    cpu, gpu = ServerSpec(model, device="cpu"), ServerSpec(model, device="cuda", tensor_parallel_size=2, python="/other/python")
    on_cpu, on_gpu = command_line(cpu, 1234), command_line(gpu, 1234)
    assert on_cpu[0] == sys.executable and on_gpu[0] == "/other/python"
    assert (option(on_cpu, "--dtype"), option(on_gpu, "--dtype")) == ("float32", "bfloat16")
    assert {"--enforce-eager", "--no-enable-chunked-prefill"} <= set(on_cpu)
    assert not {"--enforce-eager", "--no-enable-chunked-prefill"} & set(on_gpu)
    assert option(on_gpu, "--tensor-parallel-size") == "2"
    env = environment(gpu, "key", [3, 1])
    assert env["CUDA_VISIBLE_DEVICES"] == "3,1" and env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "VLLM_CPU_KVCACHE_SPACE" not in env and "LOCAL_RANK" not in env
    assert environment(cpu, "key")["CUDA_VISIBLE_DEVICES"] == ""
    assert environment(cpu, "key")["OMP_WAIT_POLICY"] == "PASSIVE"


def test_a_key_that_ends_in_a_newline_as_mounted_secrets_do(model):
    assert environment(ServerSpec(model, device="cpu"), "secret\n")["VLLM_API_KEY"] == "secret"


def test_the_key_is_in_the_environment_only(model):
    spec = ServerSpec(model, device="cpu")
    assert environment(spec, "the-key")["VLLM_API_KEY"] == "the-key"
    assert "the-key" not in " ".join(command_line(spec, 1))


def test_logprobs_and_candidate_sets_are_what_the_run_asks_for(model):
    plain, asking = ServerSpec(model, device="cuda"), ServerSpec(model, device="cuda", top_logprobs=64, sampling_mask=True)
    assert option(command_line(plain, 1), "--max-logprobs") == "20" and "--return-sampling-mask" not in command_line(plain, 1)
    assert option(command_line(asking, 1), "--max-logprobs") == "65" and "--return-sampling-mask" in command_line(asking, 1)


def test_a_teacher_returns_any_number_of_logprobs_and_has_nothing_that_changes_its_weights(model):
    for device in ("cpu", "cuda"):
        spec = ServerSpec.teacher(model, device=device, top_logprobs=64, front_end="python")
        line = command_line(spec, 1)
        assert (option(line, "--max-logprobs"), option(line, "--logprobs-mode")) == ("-1", "processed_logprobs")
        assert not {"--weight-transfer-config", "--worker-extension-cls"} & set(line)
        assert option(line, "--middleware") == "loopwright_vllm.auth.KeyMiddleware"
        assert environment(spec, "key", [0])["VLLM_SERVER_DEV_MODE"] == "0"


def test_what_an_installation_does_not_have_is_left_out(model):
    asking = ServerSpec(model, device="cuda", sampling_mask=True)
    old = command_line(asking, 1, BEFORE_028)
    assert not {"--enable-scale-out", "--return-sampling-mask"} & set(old) and "--enable-scale-out" in command_line(asking, 1)


def test_the_rust_front_end_gets_neither_middleware_nor_what_it_refuses(model):
    spec = ServerSpec.teacher(model, device="cuda", front_end="rust")
    rust, python = command_line(spec, 1), command_line(ServerSpec.teacher(model, device="cuda", front_end="python"), 1)
    refused = {"--middleware", "--generation-config", "--api-server-count"}
    assert not refused & set(rust) and refused <= set(python)
    assert option(python, "--middleware") == "loopwright_vllm.auth.KeyMiddleware"
    front = front_of(spec, FULL)
    assert environment(spec, "key", [0], front)["VLLM_USE_RUST_FRONTEND"] == "1"
    assert environment(spec, "key", [0])["VLLM_USE_RUST_FRONTEND"] == "0"


def test_as_many_sequences_as_requests_in_flight(model):
    def sequences(concurrent: int | None) -> str | None:
        line = command_line(ServerSpec(model, device="cpu", concurrent=concurrent), 1)
        return option(line, "--max-num-seqs") if "--max-num-seqs" in line else None

    assert [sequences(count) for count in (None, 4, 65, 512, 5000)] == [None, "64", "72", "512", "1024"]


def test_adapters_in_one_process_with_room_for_them(model):
    spec = ServerSpec(model, device="cuda", max_lora_rank=16, max_loras=6, tensor_parallel_size=2)
    line = command_line(spec, 1)
    assert (option(line, "--max-lora-rank"), option(line, "--max-loras")) == ("16", "6") and "--enable-lora" in line
    assert "--api-server-count" not in line and "--middleware" in line  # neither several processes nor the Rust front end
    env = environment(spec, "key", [0, 1])
    assert (env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"], env["VLLM_WORKER_MULTIPROC_METHOD"]) == ("1", "spawn")
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in environment(ServerSpec(model, device="cuda"), "key", [0])


def test_a_user_s_settings_win(model, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "theirs")
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    spec = ServerSpec(model, device="cpu", extra_args=("--dtype", "bfloat16"), env={"VLLM_CPU_KVCACHE_SPACE": "4"})
    assert option(command_line(spec, 1), "--dtype") == "bfloat16"
    env = environment(spec, "key")
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert env["VLLM_PLUGINS"] == "theirs,loopwright"
    assert env["PYTHONPATH"].endswith("infra/vllm_plugin:/theirs")


@pytest.mark.parametrize("name", ["/no/such/model", "./missing", "~/missing-model", "a/b/c"])
def test_a_model_that_does_not_exist_is_refused_before_anything_starts(port, name):
    with pytest.raises(ModelNotFound, match="does not exist"):
        start_server(ServerSpec(name, device="cpu"), port)
    assert marked(port.id) == []


def test_a_folder_without_a_model(port, tmp_path):
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        start_server(ServerSpec(str(tmp_path), device="cpu"), port)


def test_an_adapter_is_no_model_and_can_be_made_one(port, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelNotFound, match=r"holds an adapter: make it a model with `python -m trainers\.export .* --merge`"):
        start_server(ServerSpec(str(tmp_path), device="cpu"), port)


def test_an_interpreter_that_does_not_exist_is_the_user_s_error(port, model, tmp_path):
    spec = ServerSpec(model, device="cpu", python=str(tmp_path / "no-python"))
    with pytest.raises(ServerStartFailed, match=r"could not be started: .*no-python") as caught:
        start_server(spec, port, log_path=tmp_path / "log")
    assert caught.value.failure_class == "user" and marked(port.id) == []


def test_serve_refuses_what_is_no_port(model, capsys):
    with pytest.raises(SystemExit):
        serve(["serve", model, "--port", "99999"])
    assert "'99999' is no port: 1 to 65535" in capsys.readouterr().err


def test_too_few_gpus(port, model):
    with pytest.raises(ValueError, match="tensor_parallel_size=2 needs as many GPUs, 1 are leased"):
        start_server(ServerSpec(model, device="cuda", tensor_parallel_size=2), port, gpus=[0])


@pytest.mark.slow
def test_an_unknown_flag_is_the_user_s_error_and_is_quoted(port, tmp_path):
    model = build_tiny_model(tmp_path / "tiny")
    spec = ServerSpec(str(model), device="cpu", extra_args=("--no-such-flag",))
    server = start_server(spec, port, log_path=tmp_path / "log")
    with pytest.raises(ServerStartFailed, match=r"exit code 2.*unrecognized arguments: --no-such-flag") as caught:
        server.wait_ready(timeout_s=250)
    assert caught.value.failure_class == "user"
    assert marked(port.id) == []


class Foreign(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 401)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def foreign_server():
    with HTTPServer(("127.0.0.1", 0), Foreign) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def test_a_foreign_server_on_the_port_is_not_taken_for_ours(port, model, tmp_path, foreign_server):
    """It got the port although it is leased, and says that it is healthy."""
    sleeper = tmp_path / "python"
    sleeper.write_text("#!/bin/sh\nexec sleep 600\n")
    sleeper.chmod(0o755)
    server = start_server(ServerSpec(model, device="cpu", python=str(sleeper)), port, log_path=tmp_path / "log", features=FULL)
    try:
        server.url = f"http://127.0.0.1:{foreign_server}"
        with pytest.raises(PortTaken, match="something else than server student answers"):
            server.wait_ready()
    finally:
        server.stop(grace_s=1.0)


def test_a_server_that_hangs_is_stopped(port, model, tmp_path):
    sleeper = tmp_path / "python"
    sleeper.write_text("#!/bin/sh\nexec sleep 600\n")
    sleeper.chmod(0o755)
    server = start_server(ServerSpec(model, device="cpu", python=str(sleeper)), port, log_path=tmp_path / "log", features=FULL)
    with pytest.raises(ServerStartFailed, match="was not ready after 0 s"):
        server.wait_ready(timeout_s=0.1)
    assert not server.alive() and marked(port.id) == []


@pytest.mark.parametrize(
    ("log", "failure_class", "words"),
    [
        (
            "RuntimeError: CUDA out of memory. Tried\nRuntimeError: Engine core initialization failed.",
            "memory",
            "CUDA out of memory",
        ),
        ("OSError: [Errno 98] Address already in use", None, "another process took the port"),
        ("(APIServer pid=3) ValueError: the cause\nRuntimeError: Engine core failed", "user", "ValueError: the cause"),
        ("usage: api_server.py\napi_server.py: error: unrecognized arguments: --x", "user", "unrecognized arguments: --x"),
        ("just some words", "user", "just some words"),
    ],
)
def test_the_log_tells_why_a_start_failed(port, model, tmp_path, log, failure_class, words):
    (tmp_path / "message").write_text(log)
    failing = tmp_path / "python"
    failing.write_text(f"#!/bin/sh\ncat {tmp_path}/message\nexit 1\n")
    failing.chmod(0o755)
    (tmp_path / "log").write_text("OSError: of an earlier start\n")
    server = start_server(ServerSpec(model, device="cpu", python=str(failing)), port, log_path=tmp_path / "log", features=FULL)
    with pytest.raises((ServerStartFailed, PortTaken), match=words) as caught:
        server.wait_ready()
    assert "earlier start" not in str(caught.value)
    if failure_class is None:
        assert isinstance(caught.value, PortTaken)
    else:
        assert caught.value.failure_class == failure_class


def test_nothing_is_lacking():
    assert lacking(GOOD, Needs(max_model_len=512, max_logprobs=20)) == []


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"control_plane": False}, "VLLM_SERVER_DEV_MODE=1"),
        ({"generate_endpoint": False}, "--enable-scale-out"),
        ({"weight_transfer": None}, '--weight-transfer-config \'{"backend": "loopwright"}\''),
        ({"logprobs_mode": "raw_logprobs"}, "--logprobs-mode processed_logprobs"),
        ({"max_logprobs": 0}, "--max-logprobs 1"),
        ({"max_model_len": 99}, "--max-model-len 100"),
        ({"chunked_prefill": True}, "--no-enable-chunked-prefill"),
    ],
)
def test_what_is_lacking_names_the_flag_to_add(change, flag):
    with pytest.raises(ServerLacks) as caught:
        require("http://server", dataclasses.replace(GOOD, **change), Needs(max_model_len=100))
    assert flag in str(caught.value) and "http://server" in str(caught.value)
    assert str(caught.value).count("\n- ") == 1


def test_a_teacher_need_not_be_able_to_change_its_weights():
    stock = dataclasses.replace(GOOD, control_plane=False, weight_transfer=None, generate_endpoint=False, max_logprobs=-1)
    needs = Needs(max_model_len=100, max_logprobs=64, generate_endpoint=False, frozen=True)
    assert lacking(stock, needs) == []
    lines = lacking(dataclasses.replace(stock, max_logprobs=20, max_model_len=99), needs)
    assert [line.rpartition("add ")[2] for line in lines] == ["--max-logprobs 64", "--max-model-len 100"]


class RustLike(BaseHTTPRequestHandler):
    """Behind our proxy: no OpenAPI page, no weight version, one call for a sync."""

    open = ("/health",)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        answers = {
            "/v1/models": {"data": [{"id": "policy", "root": "/m", "max_model_len": 512}]},
            "/health": {},
            "/version": {"version": "0.26.0"},
            "/server_info": {"vllm_config": "a text"},
            "/loopwright/sync": {"protocol": 1, "workers": []},
        }
        keyed = path in self.open or self.headers.get("Authorization") == "Bearer key"
        self.answer(401 if not keyed else 200 if path in answers else 404, answers.get(path, {}))

    def do_POST(self) -> None:
        self.answer(400 if self.path == "/inference/v1/generate" else 404, {})

    def answer(self, status: int, body: object) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        pass


class OpenMetrics(RustLike):
    """As vLLM's own check of a key leaves it."""

    open = ("/health", "/metrics")


class DeafMetrics(RustLike):
    def do_GET(self) -> None:
        if self.path != "/metrics":
            super().do_GET()


@contextmanager
def listening(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("key", ["key", "key\n"])
def test_a_front_end_without_openapi_page_is_asked_path_by_path(key):
    with listening(RustLike) as url:
        found = probe(url, key)
    assert (found.version, found.generate_endpoint, found.control_plane, found.keyed) == ("0.26.0", True, True, True)
    assert (found.weight_transfer, found.max_logprobs) == ("loopwright", None)  # its workers are ours


@pytest.mark.parametrize(("key", "hint"), [("other", "its key differs from"), (None, "set")])
def test_a_wrong_key_is_told_with_the_places_it_may_come_from(key, hint):
    with listening(RustLike) as url, pytest.raises(ServerUnreachable, match=f"{hint} VLLM_API_KEY, or .*`api_key_env` names"):
        probe(url, key)


def test_only_a_server_that_refuses_counts_as_keyed():
    with listening(OpenMetrics) as url:
        assert not probe(url, "key").keyed
    with listening(DeafMetrics) as url, pytest.raises(ServerUnreachable, match="no vLLM server answers"):
        probe(url, "key")


def test_a_server_of_ours_that_answers_without_its_key_is_not_used(port, model, tmp_path):
    sleeper = tmp_path / "python"
    sleeper.write_text("#!/bin/sh\nexec sleep 600\n")
    sleeper.chmod(0o755)
    spec = ServerSpec(model, device="cpu", python=str(sleeper))
    with listening(OpenMetrics) as url:
        server = start_server(spec, port, key="key", log_path=tmp_path / "log", features=FULL)
        try:
            server.url = url
            with pytest.raises(ServerStartFailed, match="answers without its key"):
                server.wait_ready()
        finally:
            server.stop(grace_s=1.0)


class WithoutLength(RustLike):
    """Serves models and is no vLLM."""

    def answer(self, status: int, body: object) -> None:
        super().answer(status, {"data": [{"id": "a-model"}], "version": "3"})


class ListsAlone(RustLike):
    def answer(self, status: int, body: object) -> None:
        super().answer(status, [] if self.path.startswith("/server_info") else body)


@pytest.mark.parametrize(
    ("engine", "why"), [(WithoutLength, r"KeyError\('max_model_len'\)"), (ListsAlone, "AttributeError.*no attribute 'get'")]
)
def test_probing_an_engine_that_is_no_vllm(engine, why):
    with listening(engine) as url, pytest.raises(ServerUnreachable, match=f"is not a vLLM server: {why}"):
        probe(url, "key")


def test_probing_where_nothing_listens():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(ServerUnreachable, match="no vLLM server answers"):
            probe(f"http://127.0.0.1:{unused.getsockname()[1]}")


def test_probing_something_else(foreign_server):
    with pytest.raises(ServerUnreachable, match="set VLLM_API_KEY"):
        probe(f"http://127.0.0.1:{foreign_server}")
    with pytest.raises(ServerUnreachable, match="its key differs"):
        probe(f"http://127.0.0.1:{foreign_server}", "wrong")


def test_serve_by_hand_refuses_what_it_cannot_start(capsys):
    assert serve(["serve", "/no/such/model"]) == 2
    assert "model folder /no/such/model does not exist" in capsys.readouterr().err
