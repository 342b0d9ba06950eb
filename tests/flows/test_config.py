"""The run config: what trainers get, what the flow keeps, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from flows.config import GRPORunConfig, SFTRunConfig, absolute_paths, changed_fields, trainer_fields
from trainers.config import GRPOConfig, TrainerConfigUnion


def grpo(**fields: Any) -> GRPORunConfig:
    return GRPORunConfig.model_validate({"model": "m", "dataset": {"path": "d"}, "reward_funcs": ["a:b"], **fields})


def test_the_trainer_gets_its_fields_and_nothing_of_infra() -> None:
    config = grpo(name="x", num_generations=4, servers={"student": {"env": {"A": "1"}}}, tags={"a": "b"})
    fields = trainer_fields(config, Path("/runs/x"))
    assert not fields.keys() & {"servers", "name", "tags", "storage", "tracking", "retry", "limits", "trainer"}
    trainer = TypeAdapter(TrainerConfigUnion).validate_python(fields)
    assert isinstance(trainer, GRPOConfig)
    assert (trainer.output_dir, trainer.num_generations) == ("/runs/x", 4)


def test_the_trainer_gets_references_resolved_except_in_keyword_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_DIR", "/models")
    monkeypatch.setenv("JUDGE_KEY", "hunter2")
    config = grpo(
        model="${oc.env:MODEL_DIR}/m",
        reward_funcs=[{"path": "a:b", "kwargs": {"key": "${oc.env:JUDGE_KEY}"}}],
        model_init_kwargs={"token": "${oc.env:JUDGE_KEY}"},
    )
    fields = trainer_fields(config, Path("/runs/x"))
    assert fields["model"] == "/models/m"
    assert "hunter2" not in str(fields)


def test_a_dump_validates_again_and_its_schema_hides_what_the_flow_fills_in() -> None:
    config = grpo(name="x")
    assert GRPORunConfig.model_validate(config.model_dump(mode="json")) == config
    properties = GRPORunConfig.model_json_schema()["properties"]
    assert "output_dir" not in properties and "vllm_server_base_url" not in properties
    missing = [name for name, field in properties.items() if not field.get("description")]
    assert missing == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"output_dir": "x"}, "filled in by the flow: set storage.uri and name instead"),
        ({"vllm_server_base_url": "http://x"}, "set servers.student.url instead"),
        ({"reward_funcs": []}, "reward_funcs is empty"),
        ({"storage": {"uri": "gs://bucket/x"}}, "gs:// is no storage: write a folder"),
        ({"servers": {"student": {"env": {"HF_TOKEN": "hf_abc"}}}}, r"write \$\{oc.env:HF_TOKEN\}"),
        ({"servers": {"student": {"url": "localhost:1"}}}, "starts with http"),
        ({"servers": {"student": {"gpus": 1, "tensor_parallel_size": 2}}}, "fewer than tensor_parallel_size"),
        (
            {"servers": {"student": {"gpus": 3, "tensor_parallel_size": 2, "extra_args": ["--data-parallel-size", "2"]}}},
            "gpus=3 is fewer than tensor_parallel_size=2 × --data-parallel-size 2",
        ),
        ({"servers": {"student": {"url": []}}}, "the list of servers is empty"),
        ({"servers": {"student": {"url": ["http://a", "b:1"]}}}, "starts with http"),
        ({"servers": {"student": {"url": ["http://a", "http://a/"]}}}, "http://a is named twice"),
        ({"servers": {"student": {"url": ["http://localhost:1", "http://127.0.0.1:1"]}}}, "http://127.0.0.1:1 is named twice"),
        ({"servers": {"student": {"url": "http://a", "count": 2}}}, "count=2 is for servers that the run starts"),
        ({"trainer": {"ranks": 2, "gpus": 1}}, "each rank takes one GPU"),
        ({"trainer": {"ranks": 3}, "sp_size": 2}, "trainer.ranks=3: .* no multiple of that: start 4"),
        ({"tracking": {"uri": "http://me:secret@host"}}, "leave the password out"),
        ({"name": "a/b"}, "a run's name has letters"),
    ],
)
def test_refusals_say_what_to_write_instead(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        grpo(**fields)


def test_one_server_or_several_and_the_devices_of_each() -> None:
    assert grpo(servers={"student": {"url": "http://a/"}}).servers.student.urls == ["http://a"]
    assert grpo(servers={"student": {"url": "http://a/v1/"}}).servers.student.urls == ["http://a"]
    assert grpo(servers={"student": {"url": ["http://a", "${oc.env:B}"]}}).servers.student.urls == ["http://a", "${oc.env:B}"]
    assert grpo().servers.student.urls == []
    for arguments in (["--data-parallel-size", "3"], ["--x", "--data-parallel-size=3"], ["-dp", "3", "--y"]):
        student = grpo(servers={"student": {"tensor_parallel_size": 2, "extra_args": arguments}}).servers.student
        assert student.gpus_needed == 6


def test_sft_has_no_servers() -> None:
    with pytest.raises(ValidationError, match="unknown field `servers` in SFTRunConfig"):
        SFTRunConfig.model_validate({"model": "m", "dataset": {"path": "d"}, "servers": {}})


def test_local_paths_become_absolute_and_hub_ids_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "d.jsonl").write_text("{}")
    config = grpo(
        model="model",
        dataset={"path": "d.jsonl"},
        eval={"dataset": {"path": "org/hub-set"}, "reward_func": "r.py:score"},
        reward_funcs=["r.py:score", "pkg.mod:f"],
        tools=["t.py:tool", "pkg.mod:tool"],
        environment_factory={"path": "e.py:Game", "kwargs": {"highest": 3}},
        loop_cls="l.py:Loop",
        storage={"uri": "out"},
    )
    done = absolute_paths(config)
    assert (done.model, done.dataset.path, done.storage.uri) == (
        str(tmp_path / "model"),
        str(tmp_path / "d.jsonl"),
        str(tmp_path / "out"),
    )
    assert done.eval is not None and done.eval.dataset.path == "org/hub-set"
    assert [spec.path for spec in done.reward_funcs] == [f"{tmp_path / 'r.py'}:score", "pkg.mod:f"]
    assert [spec.path for spec in done.tools] == [f"{tmp_path / 't.py'}:tool", "pkg.mod:tool"]
    assert done.environment_factory is not None and done.environment_factory.path == f"{tmp_path / 'e.py'}:Game"
    assert done.loop_cls is not None and done.loop_cls.path == f"{tmp_path / 'l.py'}:Loop"
    assert done.eval.reward_func is not None and done.eval.reward_func.path == f"{tmp_path / 'r.py'}:score"
    assert absolute_paths(done) == done
    (tmp_path / "books").mkdir()
    sft = SFTRunConfig.model_validate(
        {"model": "model", "dataset": {"path": "books"}, "books": {"cache_dir": "c"}, "long_eval": {"books": {"path": "books"}}}
    )
    sft = absolute_paths(sft)
    assert sft.long_eval is not None and sft.long_eval.books is not None and sft.books is not None
    places = (sft.dataset.path, sft.long_eval.books.path, sft.books.cache_dir)
    assert places == (str(tmp_path / "books"), str(tmp_path / "books"), str(tmp_path / "c"))


def test_storage_reads_plain_paths_and_file_uris(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOPWRIGHT_HOME", str(tmp_path / "home"))
    assert grpo().storage.folder() == tmp_path / "home" / "runs"
    assert grpo(storage={"uri": "file:///a/b%20c"}).storage.folder() == Path("/a/b c")
    assert grpo(storage={"uri": "/a/b"}).storage.folder() == Path("/a/b")


def test_changed_fields_are_named_by_their_leaves() -> None:
    old = grpo(seed=1, trainer={"ranks": 1}).model_dump(mode="json")
    new = grpo(seed=2, trainer={"ranks": 2}).model_dump(mode="json")
    assert changed_fields(old, new) == ["seed", "trainer.ranks"]
    assert changed_fields(old, old) == []
