"""Ranks that share rows (ring attention, Ulysses, both) do what one rank does with whole rows: loss, gradients, runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.support import sequence_worker
from tests.support.fake_source import make_samples
from tests.support.policies import ONE_RANK, grpo_config
from tests.support.sequence_worker import CASES, Case
from tests.support.thread_ring import attention_of_threads
from tests.support.tiny_model import build_model
from trainers import attention
from trainers.attention import PackedLayout, reference
from trainers.attention.blocks import REFERENCE
from trainers.config import SFTConfig
from trainers.distributed import init_distributed
from trainers.errors import ConfigError
from trainers.packing import pack_row
from trainers.sequence_parallel import Axis, SequenceParallel, padded
from trainers.types import PackedRow

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=["cpu", *(["cuda"] if torch.cuda.device_count() >= 2 else [])])
def done(request, tmp_path_factory) -> Path:
    """What two and four ranks left; two alone where there are not more GPUs."""
    counts = ["2", "4"] if request.param == "cpu" or torch.cuda.device_count() >= 4 else ["2"]
    folder = tmp_path_factory.mktemp("sequence")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if request.param == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, sequence_worker.__file__, str(folder), *counts]
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=560, check=False)
    assert run.returncode == 0, f"exit code {run.returncode}\n{run.stdout[-2000:]}\n{run.stderr[-6000:]}"
    return folder


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_share_rows_compute_what_one_rank_does(done, name):
    case = CASES[name]
    if case.ranks == 4 and not (done / f"{name}-0.pt").exists():
        pytest.skip("needs four GPUs")
    one = sequence_worker.step_of(Case(1, hidden=case.hidden, fields=case.fields, longest=case.longest), ONE_RANK)
    assert max(value.abs().max() for value in one["gradients"].values()) > 1e-3
    for rank in range(case.ranks):
        got = torch.load(done / f"{name}-{rank}.pt", weights_only=False)
        assert got["loss"] == pytest.approx(one["loss"], abs=1e-9)
        np.testing.assert_allclose(got["probe"], one["probe"], atol=1e-9)
        assert got["gradients"].keys() == one["gradients"].keys()
        for parameter, value in one["gradients"].items():
            torch.testing.assert_close(got["gradients"][parameter], value, atol=1e-9, rtol=0, msg=f"{rank}: {parameter}")


def test_saved_attention_sends_nothing_round_again(done):
    """Of a ring of two: one pass forward and three back for every layer and row; one more where a layer is computed again."""
    passes = [torch.load(done / f"{name}-0.pt", weights_only=False)["passes"] for name in CASES if name.startswith("cp with")]
    assert passes == [2 * 6 * (1 + 1 + 3), 2 * 6 * (1 + 3)]


def test_a_run_resumes_with_another_way_of_sharing_and_trains_as_one_rank_does(done, tmp_path):
    """Two steps under Ulysses, two more under ring attention from its checkpoint; and these two by one rank."""
    one = sequence_worker.train(tmp_path / "straight", ONE_RANK, Case(1), 4)
    halfway, shared = (torch.load(done / f"run-{steps}.pt") for steps in (2, 4))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint-2").symlink_to(done / "run" / "checkpoint-2")
    alone = sequence_worker.train(tmp_path / "run", ONE_RANK, Case(1), 4)
    for name, weight in one["weights"].items():
        assert name.endswith("bias") or not torch.equal(halfway["weights"][name], weight), "the later steps changed nothing"
        torch.testing.assert_close(shared["weights"][name], weight, atol=1e-6, rtol=0)
        torch.testing.assert_close(alone["weights"][name], weight, atol=1e-6, rtol=0)
    assert len(one["history"]) == 4
    for run in (shared, alone):
        assert [entry["step"] for entry in run["history"]] == [1, 2, 3, 4]
        for got, wanted in zip(run["history"], one["history"], strict=True):
            assert got == pytest.approx(wanted, abs=1e-6), "a metric counts more than once, or not at all"


def test_a_run_on_packed_rows_from_a_real_process_trains_and_evaluates_as_one_rank_does(done, tmp_path):
    one = sequence_worker.recorded(tmp_path / "recorded", ONE_RANK)
    for rank in (0, 1):
        got = torch.load(done / f"recorded-{rank}.pt", weights_only=False)
        assert got["ended"] == one["ended"] and one["ended"][0] > 1 and one["ended"][1] == "data"
        assert got["accuracy"] == one["accuracy"] and one["accuracy"][0] == one["ended"][0]
        for a, b in zip(got["history"], one["history"], strict=True):
            assert a == pytest.approx(b, abs=1e-4)
        for name, weight in one["weights"].items():
            torch.testing.assert_close(got["weights"][name], weight, atol=1e-4, rtol=0)


def test_a_row_of_several_sequences_is_refused_by_every_rank_of_a_ring(done):
    for rank in (0, 1):
        text = json.loads((done / f"refusal-{rank}.json").read_text())
        assert text.startswith("cp_size=2 with a row of 2 sequences") and "sp_size" in text


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_the_ring_equals_whole_attention(ranks):
    generator = torch.Generator().manual_seed(ranks)
    tokens, scale = 2 * ranks * 3, 0.3
    shapes = [(tokens, heads, 8) for heads in (4, 2, 2, 4)]
    q, k, v, d_out = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted = reference(*inputs, PackedLayout.from_numpy(np.array([0, tokens]), "cpu"), scale)
    wanted_grads = torch.autograd.grad((wanted * d_out).sum(), inputs)
    got = attention_of_threads(ranks, [q, k, v], d_out, scale, REFERENCE)
    for a, b in zip(got, [wanted.detach(), *wanted_grads], strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


def test_queries_are_taken_in_parts_where_their_scores_would_be_too_many(monkeypatch):
    q, k, v, d_out = (torch.randn(12, heads, 8, dtype=torch.float64) for heads in (4, 2, 2, 4))
    out, lse = REFERENCE.forward(q, k, v, 0.3, True)
    whole = [out, lse, *REFERENCE.backward(d_out, q, k, v, out, lse, 0.3, True)]
    monkeypatch.setattr(attention.blocks, "SCORES", 5 * 4 * 12)  # five queries
    parts = [*REFERENCE.forward(q, k, v, 0.3, True), *REFERENCE.backward(d_out, q, k, v, out, lse, 0.3, True)]
    for a, b in zip(parts, whole, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("cp", "sp"), [(2, 1), (1, 2), (2, 2), (3, 2)])
def test_every_token_and_term_of_a_row_is_on_exactly_one_rank(cp, sp):
    row = pack_row(make_samples(seed=1, step=1, count=1 if cp > 1 else 3, longest=40))
    whole = padded(row, SequenceParallel(Axis(cp), Axis(sp)).multiple)
    tokens, seen, terms = len(whole.input_ids), [], []
    for c in range(cp):
        for s in range(sp):
            ranks = SequenceParallel(Axis(cp, c), Axis(sp, s))
            positions = ranks.positions(tokens)
            part, own = ranks.part(row)
            np.testing.assert_array_equal(part.input_ids, whole.input_ids[positions])
            np.testing.assert_array_equal(part.position_ids, whole.position_ids[positions])
            np.testing.assert_array_equal(part.cu_seqlens, whole.cu_seqlens)
            np.testing.assert_array_equal(positions[part.token_index], row.token_index[own])
            for name in ("targets", "advantages", "top_ids", "sequence_index"):
                np.testing.assert_array_equal(getattr(part, name), getattr(row, name)[own])
            seen.append(positions)
            terms.append(own)
    assert sorted(np.concatenate(seen)) == list(range(tokens))
    assert sorted(np.concatenate(terms)) == list(range(len(row.targets)))


def test_what_is_padded_comes_last_and_is_no_term():
    row = pack_row(make_samples(seed=1, step=1, count=2, longest=12))
    tokens = len(row.input_ids)
    longer = padded(row, tokens + 3)
    np.testing.assert_array_equal(longer.input_ids[:tokens], row.input_ids)
    assert longer.cu_seqlens.tolist() == [*row.cu_seqlens[:-1], tokens + 3]
    assert longer.position_ids[-4:].tolist() == [row.position_ids[-1] + i for i in range(4)]
    for name in PackedRow.FIELDS[3:]:
        assert getattr(longer, name) is getattr(row, name)
    assert padded(row, tokens) is row


def test_a_ring_gives_every_rank_as_much_attention():
    """Pairs of query and key within what is causal, of 4 ranks with 8 tokens each."""
    loads = []
    for rank in range(4):
        positions = SequenceParallel(cp=Axis(4, rank)).positions(32)
        loads.append(int((positions[:, None] >= np.arange(32)).sum()))
    assert len(set(loads)) == 1


def sft(**fields) -> SFTConfig:
    return SFTConfig(model="m", dataset={"path": "d.jsonl"}, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "fields", "words"),
    [
        (sft, {"cp_size": 2}, "packing=false, or write sp_size=2"),
        (grpo_config, {"cp_size": 2}, "token_budget=0 and per_device_train_batch_size=1, or write sp_size=2"),
        (grpo_config, {"cp_size": 2, "token_budget": 0, "per_device_train_batch_size": 2}, "with packing"),
        (sft, {"cp_size": 2, "packing": False, "max_length": 1001}, "need a multiple of 4: write 1004"),
        (sft, {"cp_size": 2, "sp_size": 3, "packing": False, "max_length": 1000}, "need a multiple of 12: write 1008"),
        (sft, {"sp_size": 3, "max_length": 1000}, "need a multiple of 3: write 1002"),
    ],
)
def test_a_config_whose_rows_cannot_be_shared_is_refused(make, fields, words):
    with pytest.raises(ValueError) as caught:
        make(**fields)
    assert words in str(caught.value)


def test_rows_that_can_be_shared_are_not_refused():
    assert sft(cp_size=2, packing=False, max_length=1004).cp_size == 2
    assert sft(sp_size=2, max_length=1002).sp_size == 2
    assert grpo_config(sp_size=3).sp_size == 3


def test_ranks_that_cannot_be_divided_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r"2 × 1 ranks share each row, and 1 ranks are no multiple of that: start 2"):
        init_distributed(cp_size=2)
    monkeypatch.setenv("WORLD_SIZE", "6")
    with pytest.raises(ConfigError, match=r"2 × 2 ranks share each row, and 6 ranks are no multiple of that: start 8"):
        init_distributed(cp_size=2, sp_size=2)


def changed_model(**fields) -> nn.Module:
    model = build_model(hidden=128)
    for name, value in fields.items():
        setattr(model.config, name, value)
    return model


@pytest.mark.parametrize(
    ("ranks", "fields", "words"),
    [
        (SequenceParallel(sp=Axis(3)), {}, "sp_size=3 does not divide the 4 attention heads"),
        (
            SequenceParallel(cp=Axis(2)),
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8},
            "no windows",
        ),
        (SequenceParallel(cp=Axis(2)), {"layer_types": ["chunked_attention"] * 2, "attention_chunk_size": 8}, "no windows"),
        (SequenceParallel(sp=Axis(2)), {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type: yarn"),
        (SequenceParallel(cp=Axis(2)), {"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, "rope_type: yarn"),
    ],
)
def test_a_model_whose_rows_cannot_be_shared_is_refused(ranks, fields, words):
    with pytest.raises(ConfigError, match=words):
        attention.check_shared(changed_model(**fields), ranks, longest=100)


def test_the_sizes_that_would_fit_are_named():
    with pytest.raises(ConfigError, match="write one of 2, 4, and the rest as cp_size"):
        attention.check_shared(build_model(hidden=128), SequenceParallel(sp=Axis(3)))


def test_a_window_that_no_sequence_reaches_is_not_refused():
    model = changed_model(layer_types=["full_attention", "sliding_attention"], sliding_window=100)
    attention.check_shared(model, SequenceParallel(cp=Axis(2)), longest=100)


def test_attention_to_later_tokens_is_refused():
    module = nn.Module()
    module.is_causal = False
    layout, x = PackedLayout.from_numpy(np.array([0, 4]), "cpu"), torch.zeros(1, 2, 4, 8)
    with pytest.raises(ConfigError, match="is_causal is false"):
        attention.packed_attention(module, x, x, x, packed_layout=layout)


def test_keys_and_values_of_different_width_are_refused_by_a_ring():
    layout = PackedLayout.from_numpy(np.array([0, 4]), "cpu", SequenceParallel(cp=Axis(2)))
    x = torch.zeros(1, 2, 2, 8)
    with pytest.raises(ConfigError, match="keys have 8 numbers a head and values 4"):
        attention.packed_attention(nn.Module(), x, x, x[..., :4], packed_layout=layout)
