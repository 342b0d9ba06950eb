"""`report_to`: real TensorBoard event files and real W&B offline files, over resumes; loggers that fail or hang."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback, TrainerControl, TrainerState

from flows.config import SFTRunConfig
from tests.support.tiny_model import build_tiny_model
from tests.support.waiting import wait_until
from tests.trainers.test_main import Job
from trainers import loggers
from trainers.errors import ConfigError
from trainers.loggers import Reporter, reporting_callbacks
from trainers.main import main as trainer_main
from trainers.training_arguments import LOGGER_PACKAGES

pytestmark = pytest.mark.filterwarnings("ignore")  # the loggers' own


class Args:
    """What the callbacks read of `TrainingArguments`."""

    run_name = None

    def __init__(self, folder: Path) -> None:
        self.output_dir = str(folder)

    def to_dict(self) -> dict[str, Any]:
        return {"learning_rate": 0.1}

    def to_json_string(self) -> str:
        return "{}"


class Model:
    config = None

    def num_parameters(self) -> int:
        return 7


class Life:
    """What a training loop tells its callbacks, over kills and resumes."""

    def __init__(self, folder: Path, name: str, **options: Any) -> None:
        self.args, self.name, self.options = Args(folder), name, options
        self.saved: list[dict[str, Any]] = []
        self.saved_step = 0

    def begin(self) -> None:
        (reporter,) = reporting_callbacks([self.name], project="tests", run_name="r", **self.options)
        assert isinstance(reporter, Reporter)
        self.reporter = reporter
        self.state = TrainerState(is_world_process_zero=True, global_step=self.saved_step, log_history=list(self.saved))
        self.control = TrainerControl()
        self.fire("on_train_begin", model=Model())

    def fire(self, event: str, **kwargs: Any) -> None:
        getattr(self.reporter, event)(self.args, self.state, self.control, **kwargs)

    def step(self, value: float) -> None:
        self.state.global_step += 1
        logs = {"loss": value, "perf/step_s": 0.5}
        self.state.log_history.append({**logs, "step": self.state.global_step, "epoch": 0.1})
        self.fire("on_log", logs=logs)

    def save(self, told: bool = True) -> None:
        self.saved, self.saved_step = list(self.state.log_history), self.state.global_step
        if told:
            self.fire("on_save")

    def die(self) -> None:
        """As far as a logger's files go, what it was told so far is what a kill leaves."""
        self.reporter.close()
        if self.name == "wandb":
            import wandb

            wandb.finish()
            second = int(time.time())
            wait_until(lambda: int(time.time()) > second, what="W&B names a folder by the second in which it begins")


def live(life: Life) -> list[float]:
    """Steps 1 to 7, the trainer killed twice; the value of each step on the surviving line."""
    life.begin()
    for step in (1, 2, 3):
        life.step(100.0 + step)
        if step == 2:
            life.fire("on_evaluate", metrics={"eval/accuracy": 0.25})
            life.save()
    life.die()
    life.begin()
    for step in (3, 4, 5):
        life.step(200.0 + step)
    life.save(told=False)  # killed between the checkpoint and the word of it
    life.step(206.0)
    life.die()
    life.begin()
    for step in (6, 7):
        life.step(300.0 + step)
    life.save()
    life.fire("on_train_end")
    return [101.0, 102.0, 203.0, 204.0, 205.0, 306.0, 307.0]


def test_tensorboard_shows_one_value_per_step_after_resumes(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    values = live(Life(tmp_path, "tensorboard"))
    assert len(list((tmp_path / "tensorboard").iterdir())) == 3  # one file per attempt, in one folder
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(e.step, e.value) for e in board.Scalars("train/loss")] == list(enumerate(values, start=1))
    assert [(e.step, e.value) for e in board.Scalars("eval/accuracy")] == [(2, 0.25)]


def log_records(data: bytes) -> Iterator[bytes]:
    """Records of W&B's file: a header of 7 bytes, then LevelDB's log format (blocks of 32 KiB; crc, length, type, bytes)."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if at + 7 + length > len(data):  # still being written
            return
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the whole of a record, or its last part
            yield whole
            whole = b""


def wandb_rows(folder: Path) -> tuple[set[str], list[dict[str, Any]]]:
    """Run ids and history rows of every offline run below `folder`, oldest first."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    ids, rows = set(), []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.parent.name):
        for data in log_records(file.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
            if record.WhichOneof("record_type") == "history":
                rows.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item})
    return ids, rows


def test_wandb_gets_each_step_once_in_one_run_without_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_RUN_ID", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # no netrc, and nothing of the user's
    monkeypatch.setenv("WANDB_SILENT", "true")
    values = live(Life(tmp_path / "run", "wandb", run_id="abc", config={"model": "m"}))
    # W&B's own process writes the last of it after `finish` has returned.
    wait_until(lambda: 7 in [row.get("train/global_step") for row in wandb_rows(tmp_path / "run")[1]], what="the last step")
    ids, rows = wandb_rows(tmp_path / "run")
    assert ids == {"abc"} and len(list((tmp_path / "run" / "wandb").glob("offline-run-*"))) == 3
    curve = [(row["train/global_step"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert curve == list(enumerate(values, start=1))
    assert [row["train/global_step"] for row in rows if "eval/accuracy" in row] == [2]


def test_an_unreachable_wandb_server_means_files_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert loggers._wandb_mode("https://api.wandb.ai") == "offline"  # no key: nobody is asked
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert loggers._wandb_mode(address) == "online"
    assert loggers._wandb_mode(address) == "offline"


class Broken(TrainerCallback):
    calls = 0

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        Broken.calls += 1
        raise OSError("the disk is full")


def state_at(step: int) -> TrainerState:
    return TrainerState(is_world_process_zero=True, global_step=step)


def test_a_logger_that_fails_is_warned_of_and_given_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reporter = Reporter("broken", Broken)
    args, control = Args(tmp_path), TrainerControl()
    reporter.on_train_begin(args, state_at(0), control)
    for step in range(10):
        reporter.on_log(args, state_at(step), control, logs={"loss": 1.0})
    reporter.on_train_end(args, state_at(10), control)
    assert Broken.calls == loggers.FAILURES
    assert "the disk is full" in caplog.text and "it gets no more of this attempt" in caplog.text


def test_a_logger_that_hangs_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loggers, "WAITING", 5)
    monkeypatch.setattr(loggers, "DRAIN_S", 0.05)
    gate = threading.Event()
    seen: list[int] = []

    class Hanging(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            gate.wait()
            seen.append(state.global_step)

    reporter = Reporter("hanging", Hanging)
    args, control = Args(tmp_path), TrainerControl()
    reporter.on_train_begin(args, state_at(0), control)
    for step in range(50):
        reporter.on_log(args, state_at(step), control, logs={"loss": 1.0})
    reporter.on_train_end(args, state_at(50), control)  # returns, though nothing was taken
    assert "does not keep up" in caplog.text and "did not take everything" in caplog.text
    gate.set()
    wait_until(lambda: seen[:2] == [0, 1], what="the logger goes on with what it was given, in order")


def test_other_ranks_report_nothing(tmp_path: Path) -> None:
    reporter = Reporter("broken", lambda: pytest.fail("made on another rank"))
    reporter.on_train_begin(Args(tmp_path), TrainerState(is_world_process_zero=False), TrainerControl())
    assert reporter._thread is None
    reporter.close()


def test_a_name_or_package_that_is_missing_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"report_to: tensorbored is not supported"):
        reporting_callbacks(["tensorbored"], project="p")
    monkeypatch.setitem(LOGGER_PACKAGES, "wandb", "no_such_package")
    with pytest.raises(ConfigError, match="pip install no_such_package, or leave it out"):
        reporting_callbacks(["wandb"], project="p")


@pytest.mark.parametrize(
    ("given", "why"),
    [("mlflow", "every run is recorded in MLflow"), (["comet_ml"], "'comet_ml' is no logger of a run: tensorboard or wandb")],
)
def test_a_run_config_names_the_loggers_there_are_beside_mlflow(given: Any, why: str) -> None:
    fields: dict[str, Any] = {"model": "m", "dataset": {"path": "d"}}
    assert SFTRunConfig.model_validate(fields | {"report_to": "none"}).report_to == []
    assert SFTRunConfig.model_validate(fields | {"report_to": "tensorboard"}).report_to == ["tensorboard"]
    with pytest.raises(ValueError, match=why):
        SFTRunConfig.model_validate(fields | {"report_to": given})


def test_secrets_of_a_scripts_arguments_are_not_shown(tmp_path: Path) -> None:
    from trainers import AsyncGRPOConfig

    arguments = AsyncGRPOConfig(output_dir=str(tmp_path), model_init_kwargs={"token": "hf_canary", "revision": "main"})
    assert "hf_canary" not in arguments.to_json_string() and "main" in arguments.to_json_string()
    assert arguments.model_init_kwargs["token"] == "hf_canary"


def test_a_run_of_a_flow_reports_over_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    build_tiny_model(tmp_path / "model")
    job = Job(tmp_path, "reported", report_to=["tensorboard"], num_train_epochs=9)
    monkeypatch.setenv("LOOPWRIGHT_REGISTRY_URL", job.registry.url)
    for last in (3, 5):
        _, path = job.attempt(max_steps=last)
        assert trainer_main([str(path)]) == 0
    board = EventAccumulator(str(tmp_path / "reported" / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("train/loss")] == [1, 2, 3, 4, 5]
    assert "train/perf/step_s" in board.Tags()["scalars"]
