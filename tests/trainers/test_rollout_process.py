"""The rollout process as a process: steps over the wire, deaths on either side, environment, refusals."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.in_thread import in_thread
from tests.support.stub_server import StubServer
from tests.support.tiny_model import build_tokenizer
from tests.support.weights import number_weights
from trainers.config import GRPOConfig, SFTConfig
from trainers.errors import DatasetError, NoProgress, RolloutProcessDied, ServerError
from trainers.rollouts.process import RolloutProcess, child_environment
from trainers.roster import Listed
from trainers.step_source import STATE_FILE

if TYPE_CHECKING:
    from tests.conftest import SharedServer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def stub() -> Iterator[StubServer]:
    with running_stub() as server:
        yield server


@contextmanager
def running_stub() -> Iterator[StubServer]:
    server = StubServer()
    server._ids = [7, 2]
    with in_thread(server.run()):
        yield server


def rows(folder: Path, count: int) -> dict[str, Any]:
    file = folder / "rows.jsonl"
    file.write_text(
        "\n".join(json.dumps({"prompt": f"{i}+{i}=", "completion": str(2 * i), "answer": "1"}) for i in range(count))
    )
    return {"path": str(file)}


def grpo(folder: Path, model: Path, url: str, reward: str = "half", prompts: int = 6, **changes: Any) -> GRPOConfig:
    values: dict[str, Any] = {
        "model": str(model),
        "dataset": rows(folder, prompts),
        "reward_funcs": [f"tests.trainers.rewards_for_tests:{reward}"],
        "num_generations": 2,
        "token_budget": 0,
        "per_device_train_batch_size": 4,
        "vllm_server_base_url": url,
        "max_completion_length": 8,
        "keep_rollout_every": 1,
    }
    return GRPOConfig(**(values | changes))


def started(config: Any, **changes: Any) -> RolloutProcess:
    process = RolloutProcess(config)
    try:
        process.start(**({"resume_dir": None, "version": 0, "world_size": 1, "resume_step": 0} | changes))
    except BaseException:
        process.close()
        raise
    return process


def gone(pid: int, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.1)
    return False


def test_recorded_rows_are_trained_in_order_and_resumed_exactly(tmp_path: Path, model: Path) -> None:
    config = SFTConfig(model=str(model), dataset=rows(tmp_path, 10), max_length=64, token_budget=30, num_train_epochs=1)

    def run(process: RolloutProcess, first: int, stop: int) -> tuple[list[list[int]], bool]:
        steps = []
        for index in range(first, stop):
            step = process.next_step(index, 0)
            if step is None:
                return steps, True
            steps.append(process.fetch(index, 0)[0].input_ids.tolist())
            process.committed(index)
        return steps, False

    process = started(config)
    whole, finished = run(process, 1, 100)
    process.close()
    assert finished and len(whole) > 3
    process = started(config)
    begun, _ = run(process, 1, 3)
    process.request_step(3, 0)  # prefetched, lost with the process
    state = process.snapshot(tmp_path / "snapshot")
    assert state == json.loads((tmp_path / "snapshot" / STATE_FILE).read_text()) and state["step"] == 2
    process.close()
    process = started(config, resume_dir=tmp_path / "snapshot", resume_step=2)
    rest, finished = run(process, 3, 100)
    process.close()
    assert finished and begun + rest == whole


def test_servers_are_changed_in_mid_run_and_a_step_is_waited_for_in_parts(
    tmp_path: Path, model: Path, stub: StubServer
) -> None:
    with running_stub() as other:
        stub.delay_s = 1000.0
        process = started(grpo(tmp_path, model, stub.url))
        try:
            before = len(stub.requests)
            process.synced(0)
            assert not process.ready(1, 0, 0.05)
            deadline = time.monotonic() + 30
            while len(stub.requests) == before and time.monotonic() < deadline:
                assert not process.ready(1, 0, 0.05)
            # Its requests would never be answered: they are asked of the new one.
            process.servers([Listed("student-1", other.url)])
            while not process.ready(1, 0, 1.0):
                assert time.monotonic() < deadline + 30
            step = process.next_step(1, 0)
            assert step is not None and step.totals.sequences > 0 and other.requests
        finally:
            stub.delay_s = 0.0
            process.close()


def test_generated_steps_cross_with_their_rows(tmp_path: Path, model: Path, stub: StubServer) -> None:
    process = RolloutProcess(grpo(tmp_path, model, stub.url))
    info = process.start(resume_dir=None, version=0, world_size=2, resume_step=0)
    assert (info.prompts, info.vocab_size, info.max_sequence_tokens, info.token_budget) == (6, 64, 64, None)
    assert process.pid is not None
    for number in (signal.SIGTERM, signal.SIGINT):  # meant for the trainer, which still wants a snapshot
        os.kill(process.pid, number)
    process.synced(0)
    process.request_step(1, 0)
    step = process.next_step(1, 0)
    assert step is not None and step.totals.sequences == 8
    parts = [process.fetch(1, rank) for rank in range(2)]
    assert [len(part) for part in parts] == [1, 1] and sum(len(row.targets) for (row,) in parts) == step.totals.tokens
    process.committed(1)
    process.synced(1)
    last = process.next_step(2, 1)
    assert last is not None and last.totals.sequences == 4
    process.committed(2)
    assert process.next_step(3, 2) is None
    table = process.drain_rollouts()
    assert len(table) == 12 and {row["step"] for row in table} <= {1, 2, 3} and process.drain_rollouts() == []
    assert process.snapshot(tmp_path / "s")["epochs"] == {"0": {"trained": 6, "dropped": {}}}
    process.close()
    process.close()


def test_a_killed_run_trains_every_prompt_exactly_once(tmp_path: Path, model: Path, stub: StubServer) -> None:
    """Checkpoint at step 1, killed after step 2 with step 3 asked for; the resumed run does the epoch's rest and no more."""
    config = grpo(tmp_path, model, stub.url, prompts=9)
    trained: dict[int, list[tuple[int, ...]]] = {}

    def train(process: RolloutProcess, index: int, version: int) -> bool:
        step = process.next_step(index, version)
        if step is None:
            return False
        row = process.fetch(index, 0)[0]
        trained[index] = [tuple(row.input_ids[a:b].tolist()) for a, b in itertools.pairwise(row.cu_seqlens.tolist())]
        process.committed(index)
        process.synced(version + 1)
        return True

    process = started(config)
    process.synced(0)
    assert train(process, 1, 0)
    process.snapshot(tmp_path / "checkpoint")
    assert train(process, 2, 1)
    process.request_step(3, 2)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(RolloutProcessDied):
        process.next_step(3, 2)
    process.close()

    process = started(config, resume_dir=tmp_path / "checkpoint", version=1, resume_step=1)
    process.synced(1)
    index = 2
    while train(process, index, index - 1):
        index += 1
    state = process.snapshot(tmp_path / "end")
    process.close()
    counts = Counter(ids for step in range(1, index) for ids in trained[step])
    assert len(counts) == 9 and set(counts.values()) == {2}
    assert state["epochs"] == {"0": {"trained": 9, "dropped": {}}}


def test_the_child_has_neither_devices_nor_ranks() -> None:
    given = {
        "PATH": "/bin",
        "RANK": "3",
        "LOCAL_RANK": "3",
        "TORCHELASTIC_RUN_ID": "x",
        "CUDA_VISIBLE_DEVICES": "0",
        "VLLM_API_KEY": "k",
    }
    environment = child_environment(given)
    assert environment["CUDA_VISIBLE_DEVICES"] == environment["HIP_VISIBLE_DEVICES"] == ""
    assert environment["VLLM_API_KEY"] == "k" and not {"RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"} & environment.keys()


def test_a_killed_child_is_noticed_and_named(tmp_path: Path, model: Path, stub: StubServer) -> None:
    process = started(grpo(tmp_path, model, stub.url, "slow"))
    process.synced(0)
    assert process.pid is not None
    killer = threading.Timer(0.5, os.kill, (process.pid, signal.SIGKILL))
    killer.start()
    with pytest.raises(RolloutProcessDied, match="was killed by SIGKILL"):
        process.next_step(1, 0)
    with pytest.raises(RolloutProcessDied, match="was killed by SIGKILL"):
        process.snapshot(tmp_path / "s")
    process.close()


def test_a_child_that_exits_is_noticed_and_named(tmp_path: Path, model: Path, stub: StubServer) -> None:
    process = started(grpo(tmp_path, model, stub.url, "die"))
    process.synced(0)
    with pytest.raises(RolloutProcessDied, match="ended with exit code 7"):
        process.next_step(1, 0)
    process.close()


def test_a_child_that_no_longer_answers_is_no_progress(tmp_path: Path, model: Path, stub: StubServer) -> None:
    process = started(grpo(tmp_path, model, stub.url, "hold_the_interpreter", rollout_worker_timeout=4))
    process.synced(0)
    with pytest.raises(NoProgress, match="has said nothing for"):
        process.next_step(1, 0)
    pid = process.pid
    process.close()
    assert pid is not None and gone(pid, 5)


@pytest.mark.parametrize("reward", ["half", "hold_the_interpreter"])
def test_the_child_dies_with_the_trainer(tmp_path: Path, model: Path, stub: StubServer, reward: str) -> None:
    """Also while a reward function holds the interpreter, when no thread of the child can look."""
    config = grpo(tmp_path, model, stub.url, reward)
    code = (
        "import sys, time; from pathlib import Path; from trainers.config import GRPOConfig\n"
        "from trainers.rollouts.process import RolloutProcess\n"
        "process = RolloutProcess(GRPOConfig.model_validate_json(sys.argv[1]))\n"
        "process.start(resume_dir=None, version=0, world_size=1, resume_step=0); process.synced(0)\n"
        "print(process.pid, flush=True); time.sleep(600)"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code, config.model_dump_json()], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    child = int(trainer.stdout.readline())
    time.sleep(0.5)
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    assert gone(child, 20)


def test_what_the_child_refuses_reaches_the_trainer_as_it_is(tmp_path: Path, model: Path, stub: StubServer) -> None:
    with pytest.raises(DatasetError, match="no column `question`"):
        started(grpo(tmp_path, model, stub.url, dataset=rows(tmp_path, 2) | {"prompt_column": "question"}))
    with pytest.raises(ServerError, match="no answer from"):
        started(grpo(tmp_path, model, "http://127.0.0.1:9", vllm_server_timeout=0.1))


@pytest.mark.server
def test_an_epoch_from_the_real_server(tmp_path: Path, vllm_server: SharedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", vllm_server.key)
    config = grpo(tmp_path, vllm_server.model_dir, vllm_server.url, prompts=6, num_generations=4, per_device_train_batch_size=8)
    process = started(config)
    number_weights(vllm_server, 0)
    process.synced(0)
    trained, index = 0, 1
    while (step := process.next_step(index, index - 1)) is not None:
        row = process.fetch(index, 0)[0]
        assert (row.sampler_logprobs <= 0).all() and len(row.targets) == step.totals.tokens > 0
        assert (row.input_ids[row.token_index + 1] == row.targets).all()
        trained += step.totals.sequences
        process.committed(index)
        number_weights(vllm_server, index)
        process.synced(index)
        index += 1
    state = process.snapshot(tmp_path / "s")
    process.close()
    assert trained == 24 and state["epochs"] == {"0": {"trained": 6, "dropped": {}}}
