"""`LongContextSFTTrainer`: from a plain script, on books or rows, with every lever; what cannot be is refused at once."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.support.tiny_model import build_model, build_tiny_model, build_tokenizer
from trainers import LongContextSFTConfig, LongContextSFTTrainer
from trainers.errors import ConfigError, DatasetError

PAIRS = [{"prompt": "2+2", "completion": "4"}] * 4
TALKS = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}]}] * 4
TEXTS = [{"text": "the sea was calm and we had no wind " * 20}, {"text": "rain " * 30}]


def arguments(tmp_path, **fields: Any):
    return LongContextSFTConfig(**{"output_dir": str(tmp_path / "out"), "report_to": [], **fields})


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(build_tiny_model(tmp_path_factory.mktemp("model")))


def test_a_script_trains_on_books_beyond_the_window_with_every_lever(tmp_path, model):
    args = arguments(
        tmp_path,
        max_length=1024,
        max_steps=2,
        learning_rate=1e-2,
        shuffle=False,
        packing=False,
        pad_to_multiple_of=64,
        loss_type="dft",
        rope_parameters={"rope_type": "yarn", "factor": "auto"},
        gradient_checkpointing_kwargs={"offload": True},
        save_attention=True,
        mlp_tile_tokens=64,
        books={"cache_dir": str(tmp_path / "cache")},
        long_eval={"needle": {"depths": [0.5]}},
    )
    trainer = LongContextSFTTrainer(model, args, TEXTS)
    result = trainer.train()
    assert result.global_step == 2 and trainer.model.config.rope_parameters["factor"] == 2.0
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    # 872 tokens of two books: less than one sequence, in one row of 896.
    assert [entry["batch/forwarded_tokens_per_step"] for entry in steps] == [872, 872]
    assert steps[0]["batch/trained_tokens_per_step"] == 871 and steps[0]["batch/pad_frac"] == pytest.approx(24 / 896)
    assert steps[1]["loss_by_position/512"] != steps[0]["loss_by_position/512"]
    asked = [entry["step"] for entry in trainer.state.log_history if "needle/1024/50" in entry]
    assert asked == [0, 2]
    assert (tmp_path / "out" / "long_eval" / "step-2" / "needle.csv").is_file()
    with pytest.raises(DatasetError, match=r"train_dataset changed, or max_length, .* did: its"):
        longer = dataclasses.replace(args, max_length=512, rope_parameters=None, max_steps=3)
        LongContextSFTTrainer(model, longer, TEXTS).train(resume_from_checkpoint=True)


def test_what_the_dataset_is_follows_from_its_columns(tmp_path, model):
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text("calm")
    args = arguments(tmp_path)

    def config(data: Any, **fields: Any) -> Any:
        return LongContextSFTTrainer(model, dataclasses.replace(args, **fields), data).config

    assert config(PAIRS).books is None and config(PAIRS).dataset.messages_column is None
    assert config(TALKS).books is None and config(TALKS).dataset.messages_column == "messages"
    assert config(TEXTS).books.text_column == "text"
    assert config([{"body": "x"}], books={"text_column": "body"}).books.text_column == "body"
    given = config(tmp_path / "books", books={"workers": 3})
    assert (given.dataset.path, given.books.workers) == (str(tmp_path / "books"), 3)


@pytest.mark.parametrize(
    ("data", "fields", "error", "message"),
    [
        ([{"prompt": "a"}], {}, DatasetError, "no column `completion`"),
        ("/nowhere/books.jsonl", {}, DatasetError, "there is no file /nowhere"),
        (None, {}, ConfigError, "train_dataset is missing"),
        (PAIRS, {"books": {}}, DatasetError, "no column `text`"),
        (PAIRS, {"assistant_only_loss": True, "books": {}}, ConfigError, "about conversations"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_at_once(tmp_path, model, data, fields, error, message):
    with pytest.raises(error, match=message):
        LongContextSFTTrainer(model, arguments(tmp_path, **fields), data)


def test_a_stream_of_texts_is_refused(tmp_path, model):
    datasets = pytest.importorskip("datasets")
    with pytest.raises(ConfigError, match="train_dataset is a stream of texts"):
        LongContextSFTTrainer(model, arguments(tmp_path), datasets.Dataset.from_list(TEXTS).to_iterable_dataset())


def test_rotary_scaling_of_a_model_that_is_loaded_already_is_refused(tmp_path):
    args = arguments(tmp_path, rope_parameters={"rope_type": "yarn"})
    with pytest.raises(ConfigError, match="this one is loaded already"):
        LongContextSFTTrainer(build_model(), args, PAIRS, processing_class=build_tokenizer())
