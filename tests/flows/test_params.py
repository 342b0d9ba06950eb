"""Params of runs of a kind: the same keys, values that differ where the configs do, no secrets and no addresses."""

from __future__ import annotations

from typing import Any

from flows.config import GRPORunConfig, SFTRunConfig
from flows.params import params_of
from infra.tracking_params import flatten

GRPO: dict[str, Any] = {"model": "m", "dataset": {"path": "d.jsonl"}, "reward_funcs": ["a:b"]}


def flat(**fields: Any) -> dict[str, str]:
    return flatten(params_of(GRPORunConfig.model_validate({**GRPO, **fields})))


def differing(left: dict[str, str], right: dict[str, str]) -> set[str]:
    assert left.keys() == right.keys()
    return {name for name in left if left[name] != right[name]}


def test_runs_of_a_kind_have_the_same_keys_and_differ_where_their_configs_do() -> None:
    plain = flat()
    assert differing(plain, flat(learning_rate=1e-4)) == {"learning_rate"}
    assert differing(plain, flat(model_init_kwargs={"revision": "x"})) == {"model_init_kwargs"}
    assert differing(plain, flat(reward_funcs=["a:c"])) == {"reward_funcs"}
    assert "eval.every" in plain and "peft.r" in plain and plain["peft.r"] == "null"
    assert differing(plain, flat(eval={"dataset": {"path": "e.jsonl"}, "every": 5})) >= {"eval.dataset.path", "eval.every"}
    assert differing(plain, flat(servers={"student": {"count": 2}})) == {"servers.student.count"}


def test_what_names_or_attends_to_a_run_is_no_param() -> None:
    assert flat() == flat(
        name="other",
        tags={"a": "b"},
        storage={"uri": "/elsewhere"},
        tracking={"experiment": "x"},
        retry={"infrastructure": 9},
        limits={"wall_clock_s": 5},
        report_to=["tensorboard"],
        servers={"student": {"url": "http://127.0.0.1:9", "python": "/opt/python", "env": {"A": "b"}}},
    )
    assert "output_dir" not in flat() and "vllm_server_base_url" not in flat()


def test_secrets_in_mappings_and_lists_are_removed() -> None:
    shown = flat(
        model_init_kwargs={"token": "canary-1", "revision": "main"},
        reward_funcs=[{"path": "a:b", "kwargs": {"api_key": "canary-2"}}],
    )
    assert "canary" not in str(shown) and "main" in shown["model_init_kwargs"]


def test_long_values_that_differ_look_different() -> None:
    one, two = flat(reward_funcs=["a:" + "x" * 900]), flat(reward_funcs=["a:" + "y" * 900])
    assert differing(one, two) == {"reward_funcs"} and "see config.yaml" in one["reward_funcs"]


def test_an_sft_run_has_all_its_fields() -> None:
    shown = params_of(SFTRunConfig.model_validate({"model": "m", "dataset": {"path": "d.jsonl"}, "max_length": 64}))
    assert (shown["type"], shown["max_length"], shown["trainer.ranks"]) == ("sft", 64, 1)
