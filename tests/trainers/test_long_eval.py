"""Evaluation of long sequences: loss by position and needles, against the model's own logits; when it happens; the plot."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerControl, TrainerState

from tests.support import long_eval_worker
from tests.support.policies import ONE_RANK, tiny_policy
from tests.support.tiny_model import build_tokenizer
from tests.trainers.test_distributed import launch
from trainers.config import SFTConfig
from trainers.errors import ConfigError, DatasetError
from trainers.long_eval import LongEvaluation
from trainers.metrics import spec_of
from trainers.needle import Haystack, Needle, needles
from trainers.position_plot import Bin, bins_of, draw, main, read_table, write_table


class Sink:
    def __init__(self) -> None:
        self.values: dict[int, dict[str, float]] = {}
        self.kept: list[tuple[str, list[str]]] = []

    def log(self, step, metrics):
        for name in metrics:
            spec_of(name)
        self.values[step] = metrics

    def artifact(self, path, name):
        self.kept.append((name, sorted(file.name for file in path.iterdir())))


def evaluation(tmp_path, stop=lambda: False, **long_eval: Any) -> tuple[LongEvaluation, Sink]:
    config: Any = SFTConfig(
        model="m", dataset={"path": "d"}, max_length=256, output_dir=str(tmp_path / "run"),
        books={"cache_dir": str(tmp_path / "cache")}, long_eval=long_eval,
    )  # type: ignore[arg-type]  # fmt: skip
    sink: Any = Sink()
    return LongEvaluation(config, ONE_RANK, tiny_policy(config), build_tokenizer(), sink, stop), sink


def begin(callback: LongEvaluation, step: int = 0, event: str = "on_train_begin") -> TrainerState:
    state = TrainerState(global_step=step)
    getattr(callback, event)(None, state, TrainerControl())
    return state


def write_held_out(tmp_path, characters: int) -> None:
    (tmp_path / "held").mkdir()
    words = " ".join(np.random.default_rng(0).choice(["calm", "sea", "wind"], characters))
    (tmp_path / "held" / "a.txt").write_text(words[: characters - 1])  # the end of text is a token too


@torch.no_grad()
def plain_nll(callback: LongEvaluation, ids: np.ndarray) -> np.ndarray:
    """By the model's own forward, without packed rows and our head."""
    model = callback.policy.model
    name = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    logprobs = model(input_ids=tokens).logits[0, :-1].double().log_softmax(-1)
    model.set_attn_implementation(name)
    return -logprobs.gather(-1, tokens[0, 1:, None])[:, 0].numpy()


def test_loss_by_position_is_the_models_on_the_held_out_tokens(tmp_path):
    write_held_out(tmp_path, 256 + 100)
    callback, sink = evaluation(tmp_path, books={"path": str(tmp_path / "held"), "sequences": 5, "bins": 4})
    state = begin(callback)
    books = callback._books
    assert books is not None and len(books) == 2
    nlls = [plain_nll(callback, books[i]["token_ids"]) for i in range(2)]
    metrics = sink.values[0]
    assert metrics["eval/loss"] == pytest.approx(np.concatenate(nlls).mean(), rel=1e-4)
    assert metrics["eval/loss_by_position/128"] == pytest.approx(nlls[0][127:].mean(), rel=1e-4)
    assert metrics["eval/loss_by_position/2"] == pytest.approx(np.concatenate([nll[1:3] for nll in nlls]).mean(), rel=1e-4)
    assert state.log_history[-1].items() >= metrics.items()
    folder = tmp_path / "run" / "long_eval" / "step-0"
    bins = read_table(folder / "loss_by_position.csv")
    assert [(one.first, one.last, one.tokens) for one in bins] == [(0, 63, 126), (64, 127, 100), (128, 191, 64), (192, 255, 64)]
    assert bins[1].loss == pytest.approx(np.concatenate([nlls[0][63:127], nlls[1][63:]]).mean(), rel=1e-4)
    with open(folder / "loss_by_book_position.csv", newline="") as stream:
        own = {int(row["first"]): int(row["tokens"]) for row in csv.DictReader(stream)}
    assert own[256] == 99, "the second sequence goes on in the book"
    assert sink.kept == [("long_eval/step-0", ["loss_by_book_position.csv", "loss_by_position.csv", "loss_by_position.png"])]


def test_a_number_is_found_where_greedy_generation_would_write_it(tmp_path):
    callback, sink = evaluation(tmp_path, needle={"lengths": [200, 256], "depths": [0, 1], "samples": 2})
    assert callback.asked.needle is not None
    asked = needles(callback.asked.needle, 256)
    haystack = Haystack(build_tokenizer(), None, callback.config.seed)
    model, expected = callback.policy.model, {}
    losses = {}
    for needle in asked:
        sample = haystack.sample(needle)
        answer = sample.token_ids[sample.loss_mask]
        context = torch.from_numpy(sample.token_ids[: -len(answer)].astype(np.int64))[None]
        name = model.config._attn_implementation
        model.set_attn_implementation("sdpa")
        written = model.generate(input_ids=context, max_new_tokens=len(answer), do_sample=False, eos_token_id=None)
        model.set_attn_implementation(name)
        expected.setdefault(needle.name, []).append(written[0, -len(answer) :].tolist() == answer.tolist())
        losses.setdefault(needle.name, []).append(plain_nll(callback, sample.token_ids)[-len(answer) :].mean())
    begin(callback)
    assert sink.values[0] == {"needle/mean": np.mean(list(expected.values())), **{k: np.mean(v) for k, v in expected.items()}}
    with open(tmp_path / "run" / "long_eval" / "step-0" / "needle.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["length"], row["depth_percent"], row["texts"]) for row in rows] == [
        ("200", "0", "2"), ("200", "100", "2"), ("256", "0", "2"), ("256", "100", "2"),
    ]  # fmt: skip
    assert float(rows[-1]["answer_loss"]) == pytest.approx(np.mean(losses["needle/256/100"]), rel=1e-3)


def test_a_model_that_knows_the_number_is_credited(tmp_path, monkeypatch):
    callback, sink = evaluation(tmp_path, needle={"depths": [0.5], "samples": 3})
    forward = callback.policy.forward
    knows = iter([True, False, True])

    def half_right(batch, temperature=None):
        outputs = forward(batch, temperature)
        hits = torch.ones_like(outputs.argmax_hit)
        hits[-1] = next(knows)  # one wrong digit is a wrong number
        return outputs._replace(argmax_hit=hits)

    monkeypatch.setattr(callback.policy, "forward", half_right)
    begin(callback)
    assert sink.values[0]["needle/256/50"] == sink.values[0]["needle/mean"] == 2 / 3


@pytest.mark.parametrize("percent", [0, 25, 100])
def test_the_sentence_stands_at_its_depth(percent):
    tokenizer = build_tokenizer()
    filler = np.array(tokenizer("0" * 50)["input_ids"], np.int32)
    sample = Haystack(tokenizer, filler, 0).sample(Needle(400, percent, 0))
    text = tokenizer.decode(sample.token_ids.tolist())
    assert len(sample.token_ids) == 400
    answer = tokenizer.decode(sample.token_ids[sample.loss_mask].tolist())
    assert len(answer) == 8 and answer[0] == " " and answer[1:].isdigit() and text.endswith(answer)
    before, _, after = text.partition("\n")
    assert text.count("\n") == 3 and set(before) <= {"0"} and text.count(answer) == 2
    hidden, _, rest = after.partition("\n")
    filling = len(before) + len(rest.partition("\n")[0])
    assert len(before) == round(percent * filling / 100) and hidden.endswith(answer + ".")


def test_numbers_differ_and_come_again_with_the_seed():
    def answers(seed: int) -> list[list[int]]:
        haystack = Haystack(build_tokenizer(), None, seed)
        return [sample.token_ids[-8:].tolist() for sample in (haystack.sample(Needle(300, 50, i)) for i in range(5))]

    assert answers(1) == answers(1) != answers(2)
    assert len({tuple(answer) for answer in answers(1)}) == 5


def test_a_text_without_room_is_refused_before_training_and_the_length_that_is_said_is_enough(tmp_path):
    with pytest.raises(ConfigError, match="128 tokens have no room for sentence and question") as refused:
        evaluation(tmp_path, needle={"lengths": [128, 256]})
    enough = int(re.search(r"write (\d+) or more", str(refused.value))[1])  # type: ignore[index]
    for length in range(enough, enough + 20):
        haystack, asked = Haystack(build_tokenizer(), None, 0), [Needle(length, 50, number) for number in range(5)]
        haystack.check(asked)
        assert all(len(haystack.sample(needle).token_ids) == length for needle in asked)


def test_two_ranks_find_what_one_does_also_where_they_share_sequences(tmp_path):
    """Five sequences over two ranks: the last place has none. Parameters are sharded, and whole nowhere afterwards."""
    write_held_out(tmp_path, 4 * 256 + 100)
    (one,) = long_eval_worker.run(tmp_path).values()
    launch(2, tmp_path, "cpu", Path(long_eval_worker.__file__))
    two = json.loads((tmp_path / "metrics-2.json").read_text())
    assert "needle/256/50" in one and len(one) == 12
    for found in (two["own"], two["shared"]):
        assert found == pytest.approx(one, abs=1e-9)


# When -------------------------------------------------------------------------------------------------------------------------


def test_before_every_so_many_steps_and_at_the_end(tmp_path):
    callback, sink = evaluation(tmp_path, every=2, needle={"depths": [1]})
    begin(callback)
    for step in (1, 2, 3, 4):
        begin(callback, step, "on_step_end")
    begin(callback, 4, "on_train_end")
    assert list(sink.values) == [0, 2, 4]
    begin(callback, 5, "on_train_end")
    assert list(sink.values) == [0, 2, 4, 5]
    resumed, sink = evaluation(tmp_path, needle={"depths": [1]})
    begin(resumed, 4)
    begin(resumed, 6, "on_step_end")
    assert not sink.values


def test_a_run_that_was_told_to_stop_begins_none(tmp_path):
    callback, sink = evaluation(tmp_path, lambda: True, needle={"depths": [1]})
    begin(callback)
    begin(callback, 3, "on_train_end")
    assert not sink.values and not (tmp_path / "run").exists()


def test_training_goes_on_as_if_there_had_been_none(tmp_path):
    callback, _ = evaluation(tmp_path, needle={"depths": [1]})
    callback.policy.train()
    before = torch.get_rng_state()
    begin(callback)
    assert callback.policy.training and torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in callback.policy.parameters())


def test_held_out_books_that_are_not_there_are_named(tmp_path):
    callback, _ = evaluation(tmp_path, books={"path": str(tmp_path / "none.jsonl")})
    with pytest.raises(DatasetError, match=r"none\.jsonl"):
        begin(callback)


def test_held_out_books_that_are_trained_on_are_said(tmp_path, caplog):
    """By what is in them: another name, and another folder."""
    write_held_out(tmp_path, 300)
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained" / "b.txt").write_text("another book, which is not held out")
    callback, _ = evaluation(tmp_path, books={"path": str(tmp_path / "held")})
    callback.config.dataset.path = str(tmp_path / "trained")
    begin(callback)
    assert "also in the training data" not in caplog.text
    (tmp_path / "trained" / "c.txt").write_bytes((tmp_path / "held" / "a.txt").read_bytes())
    callback, _ = evaluation(tmp_path, books={"path": str(tmp_path / "held")})
    callback.config.dataset.path = str(tmp_path / "trained")
    begin(callback)
    assert "1 of the 1 texts of" in caplog.text and "also in the training data" in caplog.text


# The plot ---------------------------------------------------------------------------------------------------------------------


def test_bins_are_means_of_their_tokens_and_empty_ones_are_left_out():
    assert bins_of([[6.0, 0.0, 1.0], [3.0, 0.0, 2.0]], [0, 10, 20, 30]) == [Bin(0, 9, 3, 2.0), Bin(20, 29, 2, 0.5)]


def test_tables_of_two_runs_are_drawn_together(tmp_path, capsys):
    for name, slope in (("plain", 0.01), ("yarn", 0.0)):
        rows = [Bin(10 * i, 10 * i + 9, 5, 2 + slope * i) for i in range(20)]
        write_table(tmp_path / f"{name}.csv", rows, Bin._fields)
    tables = [f"{name}={tmp_path / name}.csv" for name in ("plain", "yarn")]
    assert main([str(tmp_path / "both.png"), *tables]) == 0
    one = tmp_path / "one.png"
    assert draw({"yarn": read_table(tmp_path / "yarn.csv")}, one, trained_window=100)
    images = [path.read_bytes() for path in (tmp_path / "both.png", one)]
    assert all(image.startswith(b"\x89PNG") for image in images) and images[0] != images[1]
    assert main([str(tmp_path / "x.png")]) == 2
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    assert main([str(tmp_path / "x.png"), f"bad={tmp_path / 'bad.csv'}"]) == 1
    assert "give a loss_by_position.csv" in capsys.readouterr().err


def test_without_matplotlib_the_table_stays_and_a_warning_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert not draw({"a": [Bin(0, 9, 3, math.e)]}, tmp_path / "a.png")
    assert "matplotlib is not installed" in caplog.text and not (tmp_path / "a.png").exists()
