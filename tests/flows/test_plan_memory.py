"""`loopwright plan-memory`: what it chooses, what it prints, and that its lines are a config."""

from __future__ import annotations

import json

import pytest
import yaml
from click.testing import CliRunner

from flows.config import SFTRunConfig
from flows.plan_memory import GIB, Machine, choose, combinations, config_lines, nearest, plan
from flows.plan_memory_cli import plan_memory
from trainers.errors import ConfigError
from trainers.model_shape import ModelShape

SMALL = ModelShape(28, 1024, 3072, 16, 8, 128, 151936, tied=True, qk_norms=True, trained_positions=40960)
EIGHT = ModelShape(36, 4096, 12288, 32, 8, 128, 151936, tied=False, qk_norms=True, trained_positions=40960)
H200 = Machine(1, int(139.8 * GIB), 128 * GIB)
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def run(*arguments: str):
    return CliRunner().invoke(plan_memory, arguments)


@pytest.mark.parametrize("shape", [SMALL, EIGHT], ids=["0.6b", "8b"])
@pytest.mark.parametrize("tokens", [4096, 65536, 1 << 20])
@pytest.mark.parametrize("gpus", [1, 8])
def test_the_chosen_one_is_the_fastest_of_its_kind_that_fits(shape, tokens, gpus):
    rows = plan(shape, tokens, Machine(gpus, H200.gpu_bytes, gpus * H200.host_bytes))
    chosen = choose(rows)
    if chosen is None:
        assert (shape, tokens, gpus) == (EIGHT, 1 << 20, 1) and not any(row.fits for row in rows)
        return
    assert chosen.fits
    kinds = [(row.levers.bf16_masters, row.levers.lora_rank) for row in rows]
    place = kinds.index((chosen.levers.bf16_masters, chosen.levers.lora_rank))
    assert not any(row.fits for row in rows[:place]), "an earlier kind would have fitted"
    alike = [row for row, kind in zip(rows, kinds, strict=True) if kind == kinds[place] and row.fits]
    assert max(row.tokens_per_s for row in alike) <= 1.01 * chosen.tokens_per_s


def test_every_combination_is_there_once():
    for gpus in (1, 4):
        ways = list(combinations(SMALL, 65536, gpus, {}))
        assert len(set(ways)) == len(ways)
        shared = {(way.cp_size, way.sp_size) for way in ways}
        assert shared == {(1, 1)} if gpus == 1 else {(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)}
        assert {(way.offload, way.save_attention, way.mlp_tile_tokens) for way in ways} == {
            (offload, saved, tile) for offload in (False, True) for saved in (False, True) for tile in (None, 8192)
        }


def test_what_does_not_fit_says_of_what_there_is_too_little():
    rows = plan(SMALL, 1 << 20, Machine(1, H200.gpu_bytes, 0))
    assert {row.short_of for row in rows if row.levers.offload} == {"host memory"}
    assert "GPU memory" in {row.short_of for row in rows if not row.levers.offload}
    assert nearest(rows).required_bytes == min(row.required_bytes for row in rows)


@pytest.mark.parametrize("gpus", [1, 8])
@pytest.mark.parametrize("shape", [SMALL, EIGHT], ids=["0.6b", "8b"])
def test_its_lines_are_a_config(shape, gpus):
    for row in plan(shape, 99_999, Machine(gpus, H200.gpu_bytes, H200.host_bytes)):
        fields = yaml.safe_load("\n".join(config_lines(shape, row.levers, 99_999, gpus)))
        config = SFTRunConfig.model_validate({"model": "m", "dataset": {"path": "data.jsonl"}, **fields})
        assert config.trainer.ranks == gpus
        assert config.max_length >= 99_999
        assert (config.cp_size, config.sp_size) == (row.levers.cp_size, row.levers.sp_size)
        assert (config.mlp_tile_tokens, config.save_attention) == (row.levers.mlp_tile_tokens, row.levers.save_attention)
        assert bool((config.gradient_checkpointing_kwargs or {}).get("offload")) == row.levers.offload
        assert (config.dtype == "bfloat16", config.peft and config.peft.r) == (row.levers.bf16_masters, row.levers.lora_rank)
        assert config.rope_parameters == {"rope_type": "yarn", "factor": "auto"}


def test_json(model):
    done = run("--model", model, "--max-length", "65536", "--gpus", "2", "--gpu-memory", "80", "--host-memory", "200", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.output)
    assert report["gpus"] == 2 and report["gpu_gib"] == 80.0 and report["parameters"] == 1_235_814_400
    assert report["chosen"] in report["rows"] and report["chosen"]["fits"]
    assert report["config"][0] == "max_length: 65536"
    assert not any("rope_parameters" in line for line in report["config"]), "the model was trained on as many"
    for row in report["rows"]:
        assert row["peak_gib"] < row["required_gib"] and row["step_s"] > row["attention_s"] > 0
        assert row["fits"] == (row["short_of"] == "") == (row["required_gib"] <= 80 and row["host_gib"] <= 200)


def test_a_table_and_the_lines_to_write(model):
    done = run("--model", model, "--max-length", "262144", "--gpu-memory", "80", "--host-memory", "200", "--gpus", "1")
    assert done.exit_code == 0, done.output
    table, said = done.output.split("\n\n")
    assert table.splitlines()[0].split() == ["levers", "GPU", "GiB", "peak", "at", "host", "GiB", "s/step", "tokens/s", "fits"]
    assert said.startswith("the fastest that fits: ")
    assert "max_length: 262144" in said and "rope_parameters: {rope_type: yarn, factor: auto}" in said
    only = run("--model", model, "--max-length", "65536", "--gpu-memory", "80", "--host-memory", "200", "--weights", "lora")
    assert "peft: {r: 16}" in only.output


def test_where_nothing_fits_it_says_what_the_least_needs(model):
    done = run("--model", model, "--max-length", "4194304", "--gpu-memory", "16", "--host-memory", "64", "--gpus", "1")
    assert done.exit_code == 1
    assert "nothing fits 16.0 GiB a GPU and 64.0 GiB of host memory" in done.output
    assert "--weights lora" not in done.output  # it was an adapter already


def test_what_it_cannot_plan_is_refused(model, monkeypatch):
    monkeypatch.setattr("infra.gpus.visible_gpus", lambda: [])
    done = run("--model", model, "--max-length", "4096")
    assert isinstance(done.exception, ConfigError) and "--gpu-memory" in str(done.exception)
    done = run("--model", "nowhere/", "--max-length", "4096", "--gpu-memory", "80")
    assert isinstance(done.exception, ConfigError)
    done = run("--model", model, "--max-length", "4096", "--gpu-memory", "nan")
    assert isinstance(done.exception, ConfigError) and "--gpu-memory nan" in str(done.exception)
    assert run("--model", model, "--max-length", "4096", "--gpu-memory", "inf").exit_code == 2
    with pytest.raises(ConfigError, match="--max-length of 2 or more"):
        plan(SMALL, 1, H200)
