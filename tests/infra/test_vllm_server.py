"""Against the real vLLM CPU server: the key, what it says of itself, weight updates, prefixes, requests in flight."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from infra.process import marked
from infra.vllm import Needs, probe
from tests.conftest import SharedServer
from tests.support.tiny_model import build_model, build_tiny_model
from tests.support.waiting import wait_until

pytestmark = pytest.mark.server

TOLERANCE = 1e-4  # nats; float32 on both sides
LONG_PROMPT = [1, 4, *(6 + i % 40 for i in range(300)), 5]  # many full blocks of keys and values


class Control:
    """The calls of a weight sync, one connection each."""

    def __init__(self, shared: SharedServer, directory: Path) -> None:
        self.shared = shared
        self.directory = directory
        self.call("POST", "/init_weight_transfer_engine", {"init_info": {"directory": str(directory)}})

    def call(self, method: str, path: str, body: Any = None, expect: int = 200, **options: Any) -> Any:
        with httpx.Client(base_url=self.shared.url, headers=self.shared.headers, timeout=120) as client:
            answer = client.request(method, path, json=body, **options)
        assert answer.status_code == expect, f"{path} answered {answer.status_code}: {answer.text[:500]}"
        return answer.json() if answer.text else None

    def pause(self) -> None:
        self.call("POST", "/pause", params={"mode": "keep", "clear_cache": True})

    def push(self, path: Path | str, version: str, **extra: str) -> None:
        self.pause()
        self.call("POST", "/start_weight_update")
        self.call("POST", "/update_weights", {"update_info": {"path": str(path), **extra}})
        self.call("POST", "/finish_weight_update", {"weight_version": version})
        self.call("POST", "/resume")
        assert self.version() == version

    def refused(self, path: Path | str, **extra: str) -> str:
        self.call("POST", "/start_weight_update")
        answer = self.call("POST", "/update_weights", {"update_info": {"path": str(path), **extra}}, expect=500)
        return answer["error"]["message"]

    def version(self) -> str:
        return self.call("GET", "/weight_info")["weight_version"]

    def tokens_generated(self) -> float:
        """Since the server's start, requests that still run included."""
        with httpx.Client(base_url=self.shared.url, headers=self.shared.headers) as client:
            lines = client.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total"))

    def generate(self, prompt: list[int], **sampling: Any) -> dict[str, Any]:
        body = {"token_ids": prompt, "sampling_params": {"temperature": 0.0, "max_tokens": 12, "logprobs": 0, **sampling}}
        return self.call("POST", "/inference/v1/generate", body)["choices"][0]


@pytest.fixture(scope="module")
def weights(tmp_path_factory, vllm_server) -> Path:
    """A folder with `0.safetensors` (what the server started with) and `1.safetensors`."""
    folder = tmp_path_factory.mktemp("weights")
    shutil.copy(vllm_server.model_dir / "model.safetensors", folder / "0.safetensors")
    other = build_tiny_model(tmp_path_factory.mktemp("other"), seed=1)
    shutil.copy(other / "model.safetensors", folder / "1.safetensors")
    return folder


@pytest.fixture
def control(vllm_server, weights):
    control = Control(vllm_server, weights)
    yield control
    vllm_server.restore()


def reference(seed: int, prompt: list[int], output: list[int]) -> list[float]:
    """The logprobs of `output` after `prompt` by transformers."""
    import torch

    with torch.no_grad():
        logits = build_model(seed)(torch.tensor([prompt + output])).logits[0]
    logprobs = torch.log_softmax(logits.double(), -1)
    return [float(logprobs[len(prompt) - 1 + i, token]) for i, token in enumerate(output)]


def check_logprobs(choice: dict[str, Any], prompt: list[int], seeds: dict[str, int]) -> None:
    """Every span's sampled logprobs are those of the model that `seeds` names for the span's version."""
    output = choice["token_ids"]
    found = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert len(found) == len(output)
    assert [0, *(span["end"] for span in choice["weight_versions"])] == [
        *(span["start"] for span in choice["weight_versions"]),
        len(output),
    ]
    for span in choice["weight_versions"]:
        expected = reference(seeds[span["version"]], prompt, output)[span["start"] : span["end"]]
        assert found[span["start"] : span["end"]] == pytest.approx(expected, abs=TOLERANCE), span


def test_every_path_but_health_wants_the_key(vllm_server):
    with httpx.Client(base_url=vllm_server.url, timeout=60) as client:
        paths = client.get("/openapi.json", headers=vllm_server.headers).json()["paths"]
        assert {"/pause", "/update_weights", "/collective_rpc", "/server_info", "/metrics", "/v1/models"} <= set(paths)
        open_paths = set()
        for path, methods in paths.items():
            for method in methods:
                for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Bearer {vllm_server.key[:-1]}"}):
                    answer = client.request(method, path.replace("{response_id}", "x"), headers=headers)
                    assert vllm_server.key not in answer.text
                    if answer.status_code != 401:
                        open_paths.add((method, path))
        assert open_paths == {("get", "/health")}
        for path in ("/openapi.json", "/docs", "/redoc", "/no-such-path", "/health/"):
            assert client.get(path).status_code == 401, path
        assert client.get("/health").status_code == 200
        assert client.get("/version", headers=vllm_server.headers).json()["version"]


def test_the_key_is_in_no_log_and_on_no_command_line(vllm_server):
    process = vllm_server.server.process
    assert vllm_server.key not in vllm_server.server.log_path.read_text()
    for pid in marked(process.lease):
        assert vllm_server.key.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_it_says_what_it_can_do(vllm_server):
    found = probe(vllm_server.url, vllm_server.key)
    assert found == vllm_server.server.capabilities()
    assert (found.model, found.served_name, found.max_model_len) == (str(vllm_server.model_dir), "policy", 512)
    assert (found.generate_endpoint, found.control_plane, found.keyed) == (True, True, True)
    assert (found.weight_transfer, found.logprobs_mode) == ("loopwright", "processed_logprobs")
    assert (found.dtype, found.device, found.chunked_prefill) == ("float32", "cpu", False)
    vllm_server.server.require(Needs(max_model_len=512))


def test_sampled_logprobs_are_the_model_s(control):
    choice = control.generate([1, 4, 8, 43, 5], temperature=1.0, seed=7, max_tokens=40, ignore_eos=True)
    check_logprobs(choice, [1, 4, 8, 43, 5], {"default": 0})


def test_an_update_changes_what_is_generated_and_back_exactly(control, weights):
    prompt = [1, 4, 8, 43, 8, 47, 48, 5]
    before = control.generate(prompt)
    control.push(weights / "1.safetensors", "1")
    changed = control.generate(prompt)
    assert changed["token_ids"] != before["token_ids"]
    check_logprobs(changed, prompt, {"1": 1})
    control.push(weights / "0.safetensors", "2")
    after = control.generate(prompt)
    check_logprobs(after, prompt, {"2": 0})
    assert after["token_ids"] == before["token_ids"]
    assert after["logprobs"] == before["logprobs"]


def test_a_repeated_prompt_gets_the_new_weights(control, weights):
    """Its keys and values are in the prefix cache; those of the old weights must not be used."""
    control.generate(LONG_PROMPT)
    control.push(weights / "1.safetensors", "1")
    check_logprobs(control.generate(LONG_PROMPT), LONG_PROMPT, {"1": 1})


def test_requests_in_flight_go_on_under_the_new_weights(control, weights):
    prompts = [[1, 4, *(6 + (7 * i + j) % 40 for j in range(20)), 5] for i in range(8)]

    def one(index: int) -> dict[str, Any]:
        return control.generate(prompts[index], temperature=1.0, seed=index, max_tokens=300, ignore_eos=True)

    def paused_midway() -> list[Future[dict[str, Any]]]:
        """The requests, in a server that paused before it had generated all of their tokens; empty when it had them."""
        before = control.tokens_generated()
        answers = [pool.submit(one, index) for index in range(len(prompts))]
        wait_until(lambda: control.tokens_generated() > before + 40, what="tokens of running requests")
        control.pause()
        if control.tokens_generated() < before + 300 * len(prompts):
            return answers
        control.call("POST", "/resume")
        return []

    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = wait_until(paused_midway, 240, "a pause while requests run")
        control.push(weights / "1.safetensors", "1")
        choices = [answer.result() for answer in answers]
    assert {choice["finish_reason"] for choice in choices} == {"length"}
    assert {len(choice["token_ids"]) for choice in choices} == {300}
    spanning = [i for i, choice in enumerate(choices) if len(choice["weight_versions"]) == 2]
    assert spanning, "no request was in flight during the update"
    for index in spanning[:4]:
        check_logprobs(choices[index], prompts[index], {"default": 0, "1": 1})


def test_requests_sent_while_paused_wait(control):
    control.pause()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(control.generate, [1, 4, 8, 5])
        time.sleep(0.3)
        assert not waiting.done()
        control.call("POST", "/resume")
        assert waiting.result()["finish_reason"] in ("length", "stop")


def broken(weights: Path, name: str, change) -> Path:
    tensors = load_file(weights / "1.safetensors")
    change(tensors)
    save_file(tensors, weights / name)
    return weights / name


def test_bad_updates_are_refused_and_leave_the_old_weights(control, weights, tmp_path):
    before = control.generate(LONG_PROMPT)
    good = weights / "1.safetensors"
    embedding = "model.embed_tokens.weight"

    missing = broken(weights, "missing.safetensors", lambda tensors: tensors.pop("model.norm.weight"))
    assert "1 parameters missing ['model.norm.weight']" in control.refused(missing)
    unknown = broken(weights, "unknown.safetensors", lambda t: t.update({"model.extra.weight": t["model.norm.weight"].clone()}))
    assert "1 unknown ['model.extra.weight']" in control.refused(unknown)
    shape = broken(weights, "shape.safetensors", lambda t: t.update({embedding: t[embedding][:32].clone()}))
    assert "has shape (32, 64), the served model (64, 64)" in control.refused(shape)
    untied = broken(weights, "untied.safetensors", lambda t: t.update({"lm_head.weight": t[embedding] + 1}))
    assert "the model ties lm_head.weight" in control.refused(untied)
    truncated = weights / "truncated.safetensors"
    truncated.write_bytes(good.read_bytes()[:-1000])
    control.refused(truncated)
    assert "SHA-256 is" in control.refused(good, sha256="0" * 64)
    assert "is not a .safetensors file" in control.refused(weights / "none.safetensors")
    shutil.copy(good, weights / "weights.bin")
    assert "is not a .safetensors file" in control.refused(weights / "weights.bin")
    shutil.copy(good, tmp_path / "outside.safetensors")
    os.symlink(tmp_path / "outside.safetensors", weights / "link.safetensors")
    for outside in (
        tmp_path / "outside.safetensors",
        weights / "link.safetensors",
        weights / ".." / "x.safetensors",
        "/etc/passwd",
    ):
        assert "outside the allowed weight directories" in control.refused(outside)
    assert "Invalid update_info" in control.refused(good, unknown="field")

    assert control.version() == "default"
    assert control.generate(LONG_PROMPT) == before
    control.push(good, "1", sha256=hashlib.sha256(good.read_bytes()).hexdigest())
    check_logprobs(control.generate(LONG_PROMPT), LONG_PROMPT, {"1": 1})
    # A tied head that is sent along and equal is taken.
    control.push(broken(weights, "tied.safetensors", lambda t: t.update({"lm_head.weight": t[embedding].clone()})), "2")
    check_logprobs(control.generate(LONG_PROMPT), LONG_PROMPT, {"2": 1})


def test_a_weight_directory_must_exist(control):
    answer = control.call("POST", "/init_weight_transfer_engine", {"init_info": {"directory": "/no/such/folder"}}, expect=500)
    assert "does not exist on the server's machine" in answer["error"]["message"]
