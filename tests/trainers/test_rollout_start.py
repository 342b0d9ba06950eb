"""The rollout process starts: what is wrong with the data comes first, streams cross, a slow start says what it does."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.support.streams import Plain
from tests.support.tiny_model import build_tokenizer
from trainers.config import GRPOConfig, SFTConfig
from trainers.errors import DatasetError
from trainers.rollouts.payload import Payload
from trainers.rollouts.process import RolloutProcess

NOBODY = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer().save_pretrained(folder)
    return folder


def rows(folder: Path, count: int) -> dict[str, Any]:
    file = folder / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"{i}+{i}=", "completion": str(2 * i)}) for i in range(count)))
    return {"path": str(file)}


def start(process: RolloutProcess, **changes: Any) -> Any:
    return process.start(**({"resume_dir": None, "version": 0, "world_size": 1, "resume_step": 0} | changes))


def train(process: RolloutProcess, first: int, stop: int = 100) -> list[list[list[int]]]:
    """By step, the rows' ids; until `stop` or the end of the data."""
    steps = []
    for index in range(first, stop):
        if process.next_step(index, 0) is None:
            break
        steps.append([row.input_ids.tolist() for row in process.fetch(index, 0)])
        process.committed(index)
    return steps


def refused(config: Any, payload: Payload | None = None, **changes: Any) -> str:
    process = RolloutProcess(config, payload)
    try:
        with pytest.raises(DatasetError) as caught:
            start(process, **changes)
    finally:
        process.close()
    return str(caught.value)


def grpo(model: Path, dataset: dict[str, Any]) -> GRPOConfig:
    reward = "tests.trainers.rewards_for_tests:half"
    return GRPOConfig(  # type: ignore[call-arg]
        model=str(model), dataset=dataset, reward_funcs=[reward], vllm_server_base_url=NOBODY, vllm_server_timeout=300
    )


def test_what_is_wrong_with_the_data_is_said_before_a_server_is_waited_for(tmp_path: Path, model: Path) -> None:
    """Nobody listens where the server should be, and it would be waited for five minutes."""
    assert "there is no file" in refused(grpo(model, {"path": str(tmp_path / "gone.jsonl")}))
    assert "no column `question`" in refused(grpo(model, rows(tmp_path, 3) | {"prompt_column": "question"}))
    assert "row 0: a str" in refused(grpo(model, {"path": "train_dataset"}), Payload(dataset=Words()))
    checkpoint = tmp_path / "checkpoint"
    process = RolloutProcess(SFTConfig(model=str(model), dataset=rows(tmp_path, 4)))  # type: ignore[arg-type]
    start(process)
    process.snapshot(checkpoint)
    process.close()
    assert "changed: its fingerprint is" in refused(grpo(model, rows(tmp_path, 3)), resume_dir=checkpoint, resume_step=1)


class Words(Plain):
    def __iter__(self) -> Any:
        return iter(["a", "b"])

    def __init__(self) -> None:
        self.column_names = ["prompt"]


def test_a_stream_of_a_config_is_trained_and_resumed_like_a_dataset(tmp_path: Path, model: Path) -> None:
    pytest.importorskip("datasets")
    dataset = rows(tmp_path, 23)
    common = {"model": str(model), "max_length": 64, "token_budget": 30, "num_train_epochs": 2, "shuffle": False}
    process = RolloutProcess(SFTConfig(dataset=dataset, **common))  # type: ignore[arg-type]
    assert start(process).prompts == 23
    whole = train(process, 1)
    process.close()
    config = SFTConfig(dataset=dataset | {"streaming": True}, **common)  # type: ignore[arg-type]
    process = RolloutProcess(config)
    assert start(process).prompts is None
    half = len(whole) // 2 + 2  # in the second epoch
    begun = train(process, 1, half)
    process.request_step(half, 0)
    process.snapshot(tmp_path / "snapshot")
    process.close()
    process = RolloutProcess(config)
    start(process, resume_dir=tmp_path / "snapshot", resume_step=half - 1)
    rest = train(process, half)
    process.close()
    assert begun + rest == whole and sum(len(row) > 0 for step in whole for row in step) == len(whole)


def test_a_stream_given_as_an_object_crosses_to_the_process(tmp_path: Path, model: Path) -> None:
    datasets = pytest.importorskip("datasets")
    given = datasets.Dataset.from_list([{"prompt": f"{i}=", "completion": str(i)} for i in range(9)]).to_iterable_dataset()
    config = SFTConfig(model=str(model), dataset={"path": "train_dataset"}, token_budget=0, per_device_train_batch_size=3)  # type: ignore[arg-type]
    process = RolloutProcess(config, Payload(dataset=given))
    assert start(process).prompts is None
    steps = train(process, 1)
    state = process.snapshot(tmp_path / "s")
    process.close()
    assert len(steps) == 3 and state["epochs"] == {"0": {"trained": 9, "dropped": {}}}


class Slow(Plain):
    def __iter__(self) -> Any:
        import time

        time.sleep(5)
        yield from [{"prompt": "1", "completion": "1"}]


def test_a_slow_start_says_what_it_does(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Reading holds up nothing: the process says every two seconds that it lives, and what it does."""
    caplog.set_level(logging.INFO)
    config = SFTConfig(model=str(model), dataset={"path": "train_dataset"})  # type: ignore[arg-type]
    process = RolloutProcess(config, Payload(dataset=Slow(1)))
    start(process)
    process.close()
    assert "the rollout process starts: reading the data (train_dataset)" in caplog.text
