"""What an installed vLLM can do, and the front end and process count that follow from it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from infra.errors import ServerLacks, ServerStartFailed
from infra.vllm_command import ServerSpec, front_of
from infra.vllm_features import Features, installed, package_folder, read
from infra.vllm_front import Asks, choose, given_processes
from infra.vllm_serve import main as serve

GPU_PYTHON = Features("0.26.0", "cuda", frozenset(), None)
GPU_RUST = Features("0.26.0", "cuda", frozenset(), "/vllm/vllm-rs")
NEWEST = Features("0.32.0", "cuda", frozenset({"enable_scale_out", "return_sampling_mask"}), "/vllm/vllm-rs")
CPU = Features("0.32.0", "cpu", frozenset({"enable_scale_out", "return_sampling_mask"}), None)


def package(folder: Path, version: str, fields: str = "", library: str = "", rust: bool = False) -> Path:
    root = folder / "vllm"
    (root / "engine").mkdir(parents=True)
    (root / "entrypoints" / "openai").mkdir(parents=True)
    (root / "__init__.py").touch()
    (root / "_version.py").write_text(f"__version__ = version = '{version}'\n__version_tuple__ = (0, 1)\n")
    (root / "engine" / "arg_utils.py").write_text(
        f"class EngineArgs:\n    model: str = ''\n    enable_lora: bool = False\n{fields}"
    )
    (root / "entrypoints" / "openai" / "cli_args.py").write_text("parser.add_argument('--api-server-count', '-asc')\n")
    if library:
        (root / library).touch()
    if rust:
        (root / "vllm-rs").touch(mode=0o755)
    return root


def test_the_installed_one_is_read_without_importing_it():
    imported = "vllm" in sys.modules
    found = installed()
    assert ("vllm" in sys.modules) == imported
    assert found.build == "cpu" and found.rust is None and found.version.startswith("0.")
    known = ("enable_scale_out", "return_sampling_mask", "enable_lora", "max_loras", "api_server_count", "uds", "middleware")
    assert all(map(found.takes, (*known, "weight_transfer_config", "worker_extension_cls", "logprobs_mode", "max_num_seqs")))
    assert not found.takes("no_such_argument")
    assert installed(sys.executable) == found


def test_version_build_arguments_and_rust_front_end(tmp_path):
    old = read(str(package(tmp_path / "old", "0.26.0", library="cumem_allocator.abi3.so", rust=True)))
    new = read(str(package(tmp_path / "new", "0.40.1+cu130", "    return_sampling_mask: bool = False\n", "_rocm_C.abi3.so")))
    assert (old.version, old.build, old.rust) == ("0.26.0", "cuda", f"{old.folder}/vllm-rs")
    assert old.arguments == {"model", "enable_lora", "api_server_count"}
    assert (new.version, new.build, new.rust) == ("0.40.1+cu130", "rocm", None)
    assert new.takes("return_sampling_mask")


def test_another_interpreter_with_its_own_path(tmp_path):
    package(tmp_path, "0.99.0")
    assert installed(sys.executable, {"PYTHONPATH": str(tmp_path)}).version == "0.99.0"


def test_an_interpreter_without_vllm_or_that_is_none(tmp_path):
    bare, broken = tmp_path / "bare", tmp_path / "broken"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    broken.write_text("#!/bin/sh\necho no such module >&2\nexit 3\n")
    for script in (bare, broken):
        script.chmod(0o755)
    with pytest.raises(ServerStartFailed, match=r"bare has no vLLM: pip install .*servers\.student\.python") as caught:
        installed(str(bare))
    assert caught.value.failure_class == "user"
    with pytest.raises(ServerStartFailed, match="no Python interpreter that works: no such module"):
        installed(str(broken))
    with pytest.raises(ServerStartFailed, match="there is no program /no/python"):
        package_folder("/no/python")


@pytest.mark.parametrize(
    ("asks", "features", "cores", "rust", "processes", "why"),
    [
        (Asks("cpu"), CPU, 64, False, 1, "on a CPU the model is the limit"),
        (Asks("cpu", scores=True), CPU, 64, False, 1, "on a CPU the model is the limit"),
        (Asks("cuda"), GPU_RUST, 16, False, 1, "it sends log-probabilities as arrays"),
        (Asks("cuda", scores=True, front_end="rust"), GPU_RUST, 16, True, 1, "as given"),
        (Asks("cuda"), GPU_PYTHON, 16, False, 1, "it sends log-probabilities as arrays"),
        (Asks("cuda", scores=True), GPU_RUST, 32, True, 1, "the fastest for log-probabilities of prompts"),
        (Asks("cuda", scores=True, api_processes=2), GPU_RUST, 32, False, 2, "2, as given"),
        (Asks("cuda", scores=True, front_end="python"), GPU_RUST, 32, False, 8, "8 for log-probabilities of prompts"),
        (Asks("cpu", scores=True), GPU_RUST, 32, False, 1, "on a CPU the model is the limit"),
        (Asks("cuda", scores=True), GPU_PYTHON, 6, False, 3, "on 6 cores"),
        (Asks("cuda", scores=True), GPU_PYTHON, 1, False, 1, "on 1 cores"),
        (Asks("cuda", adapters=True), GPU_RUST, 16, False, 1, "adapters are loaded in one process only"),
        (Asks("cuda", sampling_mask=True), NEWEST, 16, False, 1, "it sends log-probabilities as arrays"),
        (Asks("cuda", sampling_mask=True), GPU_RUST, 16, False, 1, "--return-sampling-mask is not in vLLM 0.26.0"),
        (Asks("cuda", front_end="python"), GPU_RUST, 16, False, 1, "1 API process"),
        (Asks("cuda", api_processes=2), GPU_RUST, 16, False, 2, "2, as given"),
        (Asks("cpu", api_processes=2), CPU, 2, False, 2, "2, as given"),
    ],
)  # fmt: skip
def test_what_is_chosen_and_why(asks, features, cores, rust, processes, why):
    choice = choose(asks, features, cores)
    assert (choice.rust, choice.api_processes) == (rust, processes)
    assert why in "; ".join(choice.reasons)


def test_candidate_sets_only_where_they_exist():
    def mask(device, features) -> bool:
        return choose(Asks(device, sampling_mask=True), features, 8).sampling_mask

    assert mask("cuda", NEWEST) and not mask("cuda", GPU_PYTHON) and not mask("cpu", CPU)
    assert "needs a GPU" in choose(Asks("cpu", sampling_mask=True), CPU, 8).reasons[0]


@pytest.mark.parametrize(
    ("asks", "features", "why"),
    [
        (Asks("cuda", front_end="rust"), GPU_RUST, "no endpoints for weight updates"),
        (Asks("cuda", scores=True, front_end="rust"), GPU_PYTHON, "installed without it"),
        (Asks("cpu", front_end="rust"), GPU_RUST, "on a CPU the model is the limit"),
        (Asks("cuda", front_end="rust", adapters=True), GPU_RUST, "adapters"),
        (Asks("cuda", front_end="rust", sampling_mask=True), NEWEST, "no candidate sets"),
        (Asks("cuda", adapters=True, api_processes=4), GPU_PYTHON, "one process only; leave it out"),
    ],
)
def test_what_cannot_be_is_refused(asks, features, why):
    with pytest.raises(ServerLacks, match=why):
        choose(asks, features, 16)


def test_a_user_s_arguments_and_environment_win():
    def front(make=ServerSpec, **fields):
        return front_of(make("/m", device="cuda", **fields), GPU_RUST, cores=16)

    teacher = ServerSpec.teacher
    assert front(teacher, front_end="python", env={"VLLM_USE_RUST_FRONTEND": "1"}).rust and not front().rust
    assert not front(teacher, env={"VLLM_USE_RUST_FRONTEND": "0"}).rust
    assert front(extra_args=("--api-server-count", "3")).api_processes == 3
    assert front(extra_args=("--enable-lora",)).api_processes == 1
    with pytest.raises(ServerLacks, match="adapters"):
        front(env={"VLLM_USE_RUST_FRONTEND": "1"}, extra_args=("--enable-lora",))


@pytest.mark.parametrize("given", ["--hf-overrides", "--hf_overrides={}", "--hf-overrides.rope_theta=1", "--generation-config"])
def test_a_teacher_with_an_argument_that_the_rust_front_end_refuses_gets_python_ones(given):
    spec = ServerSpec.teacher("/m", device="cuda", extra_args=("--max-num-seqs", "8", given, "{}"))
    choice = front_of(spec, GPU_RUST, cores=16)
    assert not choice.rust and choice.api_processes == 8
    assert f"the Rust one refuses {given.partition('=')[0].partition('.')[0].replace('_', '-')}" in choice.reasons[0]
    assert front_of(replace(spec, extra_args=("--max-num-seqs", "8")), GPU_RUST, cores=16).rust
    assert front_of(replace(spec, env={"VLLM_USE_RUST_FRONTEND": "1"}), GPU_RUST, cores=16).rust  # a later one may take it


def test_a_teacher_whose_tokenizer_the_rust_front_end_cannot_read_gets_python_ones(tmp_path):
    spec = ServerSpec.teacher(str(tmp_path), device="cuda")
    (tmp_path / "tokenizer.model").touch()
    choice = front_of(spec, GPU_RUST, cores=16)
    assert not choice.rust and "refuses a model that has no tokenizer.json, tiktoken.model or *.tiktoken" in choice.reasons[0]
    (tmp_path / "tokenizer.json").touch()
    assert front_of(spec, GPU_RUST, cores=16).rust


def test_vllm_s_other_spelling_of_arguments_is_understood():
    teacher = ServerSpec.teacher("/m", device="cuda", extra_args=("--enable_lora",))
    assert not front_of(teacher, GPU_RUST, cores=16).rust
    assert front_of(replace(teacher, extra_args=("--api_server_count=3",)), GPU_RUST, cores=16).api_processes == 3


@pytest.mark.parametrize("said", ["0", "1", None])
def test_loopwright_serve_takes_the_front_end_from_its_environment(monkeypatch, said):
    specs = []
    monkeypatch.setattr("infra.vllm_serve._serve", lambda spec, options: specs.append(spec) or 0)
    monkeypatch.setattr("infra.vllm_serve.signal.signal", lambda *_: None)
    monkeypatch.delenv("VLLM_USE_RUST_FRONTEND", raising=False)
    if said is not None:
        monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", said)
    assert serve(["serve", "/m", "--teacher", "--device", "cuda"]) == 0
    assert front_of(specs[0], GPU_RUST, cores=16).rust == (said != "0")


def test_process_counts_in_arguments():
    assert given_processes(["--x", "-asc", "2", "--api-server-count=5"]) == 5
    assert given_processes([]) is None
    for bad in (["--api-server-count", "0"], ["--api-server-count=-1"], ["-asc"]):
        with pytest.raises(ServerLacks, match="1 or more"):
            given_processes(bad)
