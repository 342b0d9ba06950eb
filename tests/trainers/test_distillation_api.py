"""AsyncDistillationTrainer: bad input before anything starts, its arguments, and the quick start run for real against stubs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import HfArgumentParser, TrainingArguments

import trainers
from tests.support.forwarding import forwarding
from tests.support.in_thread import in_thread, port_or_any
from tests.support.scripts import quick_start, run_script
from tests.support.stub_teacher import StubTeacher
from trainers import AsyncDistillationConfig, AsyncDistillationTrainer, AsyncGRPOConfig
from trainers.config import DistillationConfig
from trainers.errors import ConfigError, DatasetError

# A port nothing listens on: whoever got that far would fail otherwise, and later.
NOWHERE = {"vllm_server_base_url": "http://127.0.0.1:9", "vllm_server_timeout": 1.0}
TWO = {"math": "http://127.0.0.1:9", "code": "http://127.0.0.1:10"}


def make(tmp_path: Path, rows=({"prompt": "1+1="},), args=None, **fields):
    args = args or AsyncDistillationConfig(output_dir=str(tmp_path / "out"), **NOWHERE, **fields)
    return AsyncDistillationTrainer(model="some/model", args=args, train_dataset=list(rows) if rows is not None else None)


def test_public_names():
    for name in ("AsyncDistillationTrainer", "AsyncDistillationConfig"):
        assert getattr(trainers, name).__name__ == name


def test_the_defaults_are_the_source_s():
    args = AsyncDistillationConfig()
    assert isinstance(args, TrainingArguments)
    assert args.teacher_server_urls == {"default": "http://localhost:8001"}
    assert (args.beta, args.teacher_temperature, args.teacher_top_k, args.add_tail_bucket) == (0.0, 1.0, 8, True)
    assert (args.learning_rate, args.logging_steps, args.gradient_checkpointing) == (1e-6, 1, True)
    assert (args.log_completions, args.log_completions_steps, args.num_completions_to_print) == (False, 100, None)
    expected = DistillationConfig.model_validate(
        {"model": "m", "dataset": {"path": "d"}, "output_dir": "trainer_output", "bf16": args.bf16}
    )
    assert args.to_config(model="m", dataset={"path": "d"}) == expected
    none = AsyncDistillationConfig(teacher_server_urls=None)
    assert none.to_config(model="m", dataset={"path": "d"}).teachers == ("default",)


@dataclass
class Mine(AsyncDistillationConfig):
    extra: float = 0.5


def test_it_may_be_subclassed_and_read_from_a_command_line():
    (args,) = HfArgumentParser(Mine).parse_args_into_dataclasses(["--beta", "1.0", "--teacher_top_k", "16", "--extra", "2"])
    assert (args.beta, args.teacher_top_k, args.extra) == (1.0, 16, 2.0)


def test_the_default_folder_is_named_after_the_model():
    trainer = AsyncDistillationTrainer("org/Model-1B", train_dataset=[{"prompt": "1"}])
    assert trainer.args.output_dir == "Model-1B-AsyncDistillation"


@pytest.mark.parametrize(
    ("rows", "fields", "error", "message"),
    [
        (None, {}, ConfigError, "train_dataset is missing"),
        ([{"question": "1+1="}], {}, DatasetError, "no column `prompt`; it has: question"),
        ([{"prompt": "1"}], {"teacher_server_urls": TWO}, DatasetError, "no column `teacher_id`; it has: prompt"),
        (
            [{"prompt": "1", "teacher_id": "math"}, {"prompt": "2", "teacher_id": "maths"}],
            {"teacher_server_urls": TWO},
            DatasetError,
            "row 1 of the dataset has `teacher_id` 'maths': name one of the teachers math, code",
        ),
    ],
)
def test_wrong_data(tmp_path, rows, fields, error, message):
    with pytest.raises(error, match=message):
        make(tmp_path, rows, **fields)


def test_rows_that_name_their_teachers_pass_and_one_teacher_needs_no_column(tmp_path):
    rows = [{"prompt": "1", "teacher_id": "math"}, {"prompt": "2", "teacher_id": "code"}]
    assert make(tmp_path, rows, teacher_server_urls=TWO).config.teachers == ("math", "code")
    assert make(tmp_path, Dataset.from_list(rows), teacher_server_urls=TWO).config.type == "distillation"
    assert make(tmp_path).config.teachers == ("default",)


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        ({}, "no teacher is given"),
        ({"a b": "http://h:1"}, "'a b' cannot name a teacher"),
        ({"a": "http://h:1", "b": "http://h:1/v1"}, "http://h:1 is named twice"),
        ({"a": "h:1"}, "'h:1' is no address of a server"),
    ],
)
def test_malformed_and_duplicate_teachers_fail_at_once(urls, message):
    with pytest.raises(ConfigError, match=message):
        AsyncDistillationConfig(teacher_server_urls=urls)


def test_another_trainer_s_arguments_are_refused(tmp_path):
    with pytest.raises(TypeError, match="args is a AsyncGRPOConfig: pass an AsyncDistillationConfig"):
        make(tmp_path, args=AsyncGRPOConfig(output_dir=str(tmp_path)))


# The source's quick start, but for the import line, the data (there is no hub) and where the model is.
QUICKSTART = """
from datasets import Dataset
from trainers import AsyncDistillationTrainer

dataset = Dataset.from_list([{"prompt": f"{i}+{i}="} for i in range(16)])

trainer = AsyncDistillationTrainer(
    model="MODEL",
    train_dataset=dataset,
)
trainer.train()
with open("after", "a") as file:
    file.write(f"{trainer.state.global_step}\\n")
"""


@pytest.mark.server
def test_the_quick_start_as_it_is_written(vllm_server, tmp_path):
    teacher = StubTeacher(max_model_len=10_000, size=64)
    student = forwarding(vllm_server.url, port_or_any(8000))
    with in_thread(student) as url, in_thread(teacher.run(port_or_any(8001))):
        urls = {"default": teacher.url.replace("127.0.0.1", "localhost")}
        script = quick_start(QUICKSTART, vllm_server.model_dir, vllm_server_base_url=url, teacher_server_urls=urls)
        done = run_script(script, tmp_path, key=vllm_server.key)
    assert done.returncode == 0, done.stderr
    (steps,) = (tmp_path / "after").read_text().split()
    checkpoint = tmp_path / f"{vllm_server.model_dir.name}-AsyncDistillation" / f"checkpoint-{steps}"
    assert json.loads((checkpoint / "manifest.json").read_text())["step"] == int(steps)
    history = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    assert len(history) == int(steps)
    assert all(entry["jsd"] > 0 and entry["teacher_entropy"] > 0 for entry in history)
    ledger = json.loads((checkpoint / "rollout_state.json").read_text())
    assert ledger["epoch"] * 16 + ledger["next_index"] == 16
    assert len(teacher.scored) >= 16  # each completion once, and the probes
