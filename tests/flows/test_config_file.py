"""Sources of a run config: precedence, provenance, errors that name their source, references."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows.config import GRPORunConfig
from flows.config_file import ConfigErrors, load_config
from flows.yaml_text import parse_yaml
from trainers.references import resolve

MINIMAL = """
model: some/model
dataset: {path: data.jsonl}
reward_funcs: [trainers.rewards:accuracy_reward]
"""


def write(tmp_path: Path, extra: str = "", name: str = "run.yaml") -> Path:
    path = tmp_path / name
    path.write_text(MINIMAL + extra)
    return path


def problems(
    tmp_path: Path, extra: str = "", overrides: tuple[str, ...] = (), environ: dict[str, str] | None = None
) -> list[str]:
    with pytest.raises(ConfigErrors) as caught:
        load_config("grpo", write(tmp_path, extra), overrides, environ or {})
    return caught.value.lines


def test_a_later_source_wins_and_each_value_knows_its_own(tmp_path: Path) -> None:
    path = write(tmp_path, "num_generations: 4\nmax_steps: 5\nservers: {student: {max_model_len: 64}}\n")
    environ = {"LOOPWRIGHT_NUM_GENERATIONS": "2", "LOOPWRIGHT_SEED": "7", "LOOPWRIGHT_SERVERS__STUDENT__DTYPE": "bfloat16"}
    loaded = load_config("grpo", path, ["max_steps=9", "servers.student.tensor_parallel_size=2"], environ)
    assert isinstance(loaded.config, GRPORunConfig)
    assert (loaded.config.num_generations, loaded.config.max_steps, loaded.config.seed) == (4, 9, 7)
    student = loaded.config.servers.student
    assert (student.max_model_len, student.dtype, student.tensor_parallel_size) == (64, "bfloat16", 2)
    origins = {name: origin for name, _, origin in loaded.rows()}
    assert origins["num_generations"] == str(path)
    assert origins["max_steps"] == "command line `max_steps=9`"
    assert origins["seed"] == "environment LOOPWRIGHT_SEED"
    assert origins["servers.student.max_model_len"] == str(path)
    assert origins["servers.student.dtype"] == "environment LOOPWRIGHT_SERVERS__STUDENT__DTYPE"
    assert origins["weight_decay"] == "default"


def test_overrides_are_yaml_with_lists_sections_and_list_items(tmp_path: Path) -> None:
    loaded = load_config(
        "grpo",
        write(tmp_path, "optim: {learning_rate: 0.1}\n"),
        [
            "optim.learning_rate=1e-4",
            'servers.student.extra_args=["--x", "1"]',
            "reward_funcs.0.kwargs.strict=true",
            "reward_funcs.0.path=a.b:c",
            "eval=null",
            "tags.note=a=b",
        ],
        {},
    )
    config = loaded.config
    assert isinstance(config, GRPORunConfig)
    assert config.learning_rate == 1e-4
    assert config.servers.student.extra_args == ["--x", "1"]
    assert config.reward_funcs[0].path == "a.b:c"
    assert config.reward_funcs[0].kwargs == {"strict": True}
    assert config.tags == {"note": "a=b"}
    assert loaded.origin("learning_rate") == "command line `optim.learning_rate=1e-4`"


def test_the_optimizers_name_and_the_section_of_the_same_name_live_together(tmp_path: Path) -> None:
    config = load_config("grpo", write(tmp_path, "optim: sgd\n"), ["optim.weight_decay=0.5"], {}).config
    assert (config.optim, config.weight_decay) == ("sgd", 0.5)


def test_json_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"model": "m", "dataset": {"path": "d"}, "max_length": 33}))
    assert load_config("sft", path, (), {}).config.model_dump()["max_length"] == 33


def test_unknown_fields_name_their_source_and_the_nearest_name_all_at_once(tmp_path: Path) -> None:
    lines = problems(
        tmp_path,
        "num_generation: 4\neval: {dataset: {path: x, spilt: y}}\n",
        ("servers.studnet.gpus=1", "optim.learning_rat=1", "reward_funcs.0.kwarg.a=1"),
        {"LOOPWRIGHT_MAX_STEP": "3"},
    )
    text = "\n".join(lines)
    assert len(lines) == 6
    assert f"{tmp_path / 'run.yaml'}: unknown field `num_generation` in GRPORunConfig: did you mean `num_generations`?" in lines
    assert f"{tmp_path / 'run.yaml'}: eval.dataset: unknown field `spilt` in DatasetConfig: did you mean `split`?" in lines
    assert "`servers.studnet.gpus=1`: servers: unknown field `studnet` in ServersConfig: did you mean `student`?" in text
    assert "unknown field `optim.learning_rat`: did you mean `optim.learning_rate`?" in text
    assert "reward_funcs.0: unknown field `kwarg` in CallableSpec: did you mean `kwargs`?" in text
    assert "environment LOOPWRIGHT_MAX_STEP: unknown field `max_step`: did you mean LOOPWRIGHT_MAX_STEPS?" in lines


def test_wrong_values_are_one_readable_line_each(tmp_path: Path) -> None:
    lines = problems(tmp_path, "epsilon: -1\n", ("max_steps=soon", "trainer.ranks=0"))
    assert sorted(lines) == [
        f"{tmp_path / 'run.yaml'}: epsilon: Input should be greater than 0 (got -1)",
        "command line `max_steps=soon`: max_steps: Input should be a valid integer, "
        "unable to parse string as an integer (got 'soon')",
        "command line `trainer.ranks=0`: trainer.ranks: Input should be greater than or equal to 1 (got 0)",
    ]
    assert not any("pydantic" in line or "https://" in line for line in lines)


def test_missing_fields_and_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigErrors) as caught:
        load_config("sft", None, ["dataset.path=x"], {})
    assert caught.value.lines == ["model: is required and not set"]
    with pytest.raises(ConfigErrors, match=r"missing\.yaml: cannot be read: No such file"):
        load_config("sft", tmp_path / "missing.yaml", (), {})
    twice = tmp_path / "twice.yaml"
    twice.write_text("model: a\nmodel: b\n")
    with pytest.raises(ConfigErrors, match=r"twice\.yaml: key `model` is written twice"):
        load_config("sft", twice, (), {})
    twice = tmp_path / "twice.json"
    twice.write_text('{"servers": {"teachers": {"math": {"url": "http://a:1"}, "math": {"url": "http://b:1"}}}}')
    with pytest.raises(ConfigErrors, match=r"twice\.json: key `math` is written twice"):
        load_config("distillation", twice, (), {})


def test_an_override_without_a_value_is_refused(tmp_path: Path) -> None:
    assert problems(tmp_path, overrides=("max_steps",)) == ["command line: `max_steps` is not of the form field=value"]


def test_variables_of_another_algorithm_and_reserved_ones_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: m\ndataset: {path: d}\n")
    environ = {"LOOPWRIGHT_NUM_GENERATIONS": "4", "LOOPWRIGHT_HOME": "/tmp/x", "LOOPWRIGHT_LEASE": "1"}
    assert load_config("sft", path, (), environ).config.type == "sft"


def test_references_stay_as_written_and_resolve_only_when_used(tmp_path: Path) -> None:
    extra = "servers: {student: {env: {HF_TOKEN: '${oc.env:MY_TOKEN}'}}}\n"
    loaded = load_config("grpo", write(tmp_path, extra), (), {"MY_TOKEN": "hunter2"})
    shown = {name: value for name, value, _ in loaded.rows()}
    assert shown["servers.student.env.HF_TOKEN"] == "${oc.env:MY_TOKEN}"
    assert "hunter2" not in loaded.config.model_dump_json()
    assert resolve(shown, {"MY_TOKEN": "hunter2"})["servers.student.env.HF_TOKEN"] == "hunter2"
    assert resolve(["a ${oc.env:NOPE,b}"], {}) == ["a b"]


def test_a_reference_to_an_unset_variable_or_of_another_kind_is_refused(tmp_path: Path) -> None:
    lines = problems(tmp_path, "tags: {a: '${oc.env:NOT_SET}', b: '${model}'}\n")
    source = tmp_path / "run.yaml"
    assert lines == [
        f"{source}: tags.a: the environment variable NOT_SET is not set, which `${{oc.env:NOT_SET}}` needs",
        f"{source}: tags.b: `${{model}}` is not a reference; write ${{oc.env:NAME}} or ${{oc.env:NAME,default}}",
    ]


def test_a_number_cannot_be_a_reference(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, overrides=("max_steps=${oc.env:STEPS}",), environ={"STEPS": "3"})
    assert "a reference stands for text only" in line and "'3'" not in line


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1e5", 1e5),
        ("12", 12),
        (".5", 0.5),
        ("true", True),
        ("on", "on"),
        ("null", None),
        ("2026-01-02", "2026-01-02"),
        ("'1'", "1"),
    ],
)
def test_scalars_read_as_in_hydra(text: str, value: object) -> None:
    parsed = parse_yaml(text)
    assert parsed == value and type(parsed) is type(value)
