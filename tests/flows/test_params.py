"""Params of runs of a kind: the same keys, values that differ where the configs do, no secrets and no addresses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas
import pytest

from flows import provenance
from flows.config import GRPORunConfig, SFTRunConfig, trainer_fields
from flows.params import params_of
from flows.training import NoServers, TrainerJob, command
from infra.leases import LeaseManager
from infra.registry import Registry
from infra.tracking_params import flatten
from tests.support.tiny_model import build_tiny_model
from trainers.main import main as trainer_main

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


@pytest.mark.filterwarnings("ignore")  # MLflow's and its database library's own
def test_two_runs_side_by_side_in_mlflow_differ_in_the_changed_param_only(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    registry = Registry()
    monkeypatch.setenv("LOOPWRIGHT_REGISTRY_URL", registry.url)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n')
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    base: dict[str, Any] = {
        "model": str(build_tiny_model(tmp_path / "model")),
        "dataset": {"path": str(tmp_path / "rows.jsonl")},
        "max_steps": 2,
        "num_train_epochs": 2,
        "max_length": 32,
        "tracking": {"uri": uri, "experiment": "compared"},
    }
    for name, changed in (("one", {}), ("two", {"learning_rate": 1e-3})):
        config = SFTRunConfig.model_validate({**base, "name": name, "tags": {"team": name}, **changed})
        run = registry.create_run(name, "sft-long-context", {}, output_dir=str(tmp_path / name))
        registry.start_attempt(run.id)
        fields = trainer_fields(config, tmp_path / name)
        job = TrainerJob(registry, run, config, NoServers(), LeaseManager(registry), fields, uri)
        provenance.record(registry, run.id, config, tmp_path / name, 1)
        assert trainer_main([command(job, 1)[-1]]) == 0

    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    table = mlflow.search_runs(experiment_names=["compared"])
    assert isinstance(table, pandas.DataFrame)
    params = table.filter(like="params.")
    assert len(table) == 2 and not params.isna().any(axis=None)
    assert [str(name) for name in params.columns[params.nunique() > 1]] == ["params.learning_rate"]
    tags = table.set_index("tags.loopwright.run")
    assert set(tags["tags.loopwright.flow"]) == {"sft-long-context"} and set(tags["tags.loopwright.attempt"]) == {"1"}
    assert tags.loc["one", "tags.team"] == "one" and tags.loc["one", "tags.loopwright.output_dir"] == str(tmp_path / "one")
    named = {"host", "run_id", "version.torch", "version.python", "failure_class", "checkpoint"}
    assert {f"tags.loopwright.{name}" for name in named} <= set(table.columns)
    assert "tags.bottleneck" in table.columns
