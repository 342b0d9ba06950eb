"""Which tokens of recorded rows are trained, and the loss on them: as TRL's SFTTrainer has it with the same options."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.policies import ONE_RANK, tiny_policy
from tests.support.tiny_model import build_model, build_tokenizer
from trainers.algorithms.sft import SFT
from trainers.batch import PackedBatch
from trainers.config import SFTConfig
from trainers.data import Rows, check_columns
from trainers.errors import ConfigError, DatasetError
from trainers.losses import loss_inputs
from trainers.packing import pack_row
from trainers.recorded import Recorded, recorded_rows
from trainers.rollouts.source import RecordedSource
from trainers.types import Sample

TALKS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "user", "content": "hi a"},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "b?"},
            {"role": "assistant", "content": "no way"},
        ]
    },
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}]},
]
PAIRS: list[dict[str, Any]] = [{"prompt": talk["messages"][:-1], "completion": talk["messages"][-1:]} for talk in TALKS]


def config(rows: list[dict[str, Any]] = PAIRS, **fields: Any) -> SFTConfig:
    dataset: Any = {"path": "d", "messages_column": "messages" if "messages" in rows[0] else None}
    return SFTConfig(model="m", dataset=dataset, max_length=64, **fields)


def samples(rows: list[dict[str, Any]], settings: SFTConfig) -> list[Sample]:
    """As a run makes them."""
    algorithm, reader = SFT(settings), recorded_rows(build_tokenizer(), settings)
    source = RecordedSource(reader, algorithm, settings.max_length)
    return [sample for i, row in enumerate(rows) for sample in algorithm.samples(source._group(reader.prompt(0, i, row)))]


def trl_trainer(folder: str, rows: list[dict[str, Any]], **options: Any):
    import datasets
    import trl

    datasets.disable_progress_bars()
    args = trl.SFTConfig(
        output_dir=folder, use_cpu=True, bf16=False, report_to=[], per_device_train_batch_size=2, max_length=64,
        gradient_checkpointing=False, **options,
    )  # fmt: skip
    return trl.SFTTrainer(
        build_model(), args, train_dataset=datasets.Dataset.from_list(rows), processing_class=build_tokenizer()
    )


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (PAIRS, {}),
        (PAIRS, {"completion_only_loss": False}),
        (PAIRS, {"assistant_only_loss": True, "completion_only_loss": False}),
        (TALKS, {}),
        (TALKS, {"assistant_only_loss": True, "loss_type": "dft"}),
    ],
    ids=["completion", "all", "assistant in prompt too", "talk", "assistant in talk, dft"],
)
def test_trained_tokens_and_loss_are_trls(tmp_path, rows, options):
    peer: Any = trl_trainer(str(tmp_path), rows, **options)
    theirs = peer.compute_loss(peer.model, next(iter(peer.get_train_dataloader())))
    made = samples(rows, config(rows, **options))
    for sample, row in zip(made, peer.train_dataset, strict=True):
        labels = np.array(row["labels"])
        assert sample.token_ids.tolist() == row["input_ids"]
        # TRL's first label is never predicted either: its loss shifts them.
        np.testing.assert_array_equal(sample.loss_mask[1:], labels[1:] != -100)
    settings = config(rows, gradient_checkpointing=False, **options)
    batch = PackedBatch.from_row(pack_row(made), ONE_RANK.device)
    output = SFT(settings).loss(loss_inputs(tiny_policy(settings)(batch), batch))
    ours = output.losses[0][0] / batch.terms
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_the_gradient_of_dft_is_that_of_the_probability():
    logits = torch.tensor([[1.0, -0.5, 2.0], [0.3, 0.1, -1.0]], dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([2, 0])

    def loss(kind: str) -> torch.Tensor:
        none = torch.zeros(2)
        logprobs = logits.log_softmax(-1)[range(2), targets]
        inputs = loss_inputs_of(logprobs, none)
        return SFT(config(loss_type=kind)).loss(inputs).losses[0][0]

    def loss_inputs_of(logprobs: torch.Tensor, none: torch.Tensor):
        from trainers.algorithms import LossInputs

        return LossInputs(logprobs, none, none.bool(), none, none, none.long(), none.view(2, 1), none.view(2, 1))

    (ours,) = torch.autograd.grad(loss("dft"), logits)
    (expected,) = torch.autograd.grad(-logits.softmax(-1)[range(2), targets].sum(), logits)
    torch.testing.assert_close(ours, expected)


def test_books_are_trained_whole_but_for_the_first_token():
    settings = config(books={})
    row = {"token_ids": np.array([7, 8, 9], np.int32), "book_positions": np.array([4, 0, 1], np.int32)}
    (sample,) = samples([row], settings)
    assert sample.token_ids.tolist() == [7, 8, 9] and sample.loss_mask.tolist() == [False, True, True]
    assert sample.token_ids is row["token_ids"], "a million tokens are not copied"


def test_a_row_without_a_trained_token_gives_no_sample():
    rows = [{"messages": [{"role": "user", "content": "hi"}]}]
    assert samples(rows, config(rows, assistant_only_loss=True)) == []


def test_an_end_of_turn_that_the_template_does_not_write_is_trained():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(" + '<eos>'", "")
    reader = recorded_rows(tokenizer, config(assistant_only_loss=True))
    recorded: Recorded = reader.recorded(reader.prompt(0, 1, PAIRS[1]))
    trained = tokenizer.decode(recorded.token_ids[recorded.loss_mask].tolist())
    assert trained == "so<eos>"


@pytest.mark.parametrize(
    ("template", "message"),
    [(None, "has no chat template"), ("{{ messages[0]['content'] }}", "does not mark what the assistant says")],
)
def test_assistant_only_without_marks_is_refused(template, message):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ConfigError, match=message):
        recorded_rows(tokenizer, config(assistant_only_loss=True))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"packing": False, "token_budget": 512}, "packing=false puts one sequence into each"),
        ({"books": {}, "assistant_only_loss": True}, "assistant_only_loss is about conversations"),
        ({"books": {}, "completion_only_loss": True}, "completion_only_loss is about conversations"),
        ({"rows": TALKS, "completion_only_loss": True}, "set assistant_only_loss=true"),
        ({"books": {"workers": 0}}, "greater than or equal to 1"),
        ({"long_eval": {}}, "asks for nothing"),
        ({"long_eval": {"needle": {"lengths": [4096]}}}, "from 128 up to max_length=64"),
        ({"long_eval": {"needle": {"depths": [0.5, 1.5]}}}, "each from 0 to 1"),
        ({"loss_type": "kl"}, "'nll' or 'dft'"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        config(**fields)


def test_columns_are_those_that_the_rows_need():
    check_columns(Rows(TALKS, "rows"), config(TALKS))
    with pytest.raises(DatasetError, match="no column `completion`"):
        check_columns(Rows([{"prompt": "a"}], "rows"), config())
    with pytest.raises(DatasetError, match="no column `messages`"):
        check_columns(Rows(PAIRS, "rows"), config(TALKS))
    reader = recorded_rows(build_tokenizer(), config(TALKS))
    with pytest.raises(DatasetError, match="column `messages` holds 'hi'"):
        reader.prompt(0, 0, {"messages": "hi"})
