"""Teachers of a run: started and given ones, what the trainer is told of them, and one that dies."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows.config import DistillationRunConfig
from flows.config_file import ConfigErrors
from flows.lineage import teacher_models
from flows.params import params_of
from flows.preflight import preflight
from flows.run_processes import gpus_needed
from flows.runs import open_run
from flows.server_health import Pulse
from flows.students_and_teachers import StudentsAndTeachers
from flows.teacher import Teacher
from flows.teachers import Teachers
from infra.errors import ServerStartFailed
from infra.leases import LeaseManager
from infra.registry import Registry
from infra.vllm import ServerSpec
from tests.flows.fake_places import FakePlace
from tests.support.tiny_model import build_tokenizer

Make = Callable[..., DistillationRunConfig]
URL = "http://127.0.0.1:7"


@pytest.fixture
def config(tmp_path: Path) -> Make:
    """Makes a config that validates, whose models and dataset are files that exist."""

    def make(teachers: dict[str, Any] | None = None, rows: str = "", student: Any = None, **fields: Any) -> Any:
        for name in ("model", "math", "code"):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "config.json").write_text('{"max_position_embeddings": 128}')
        rows = rows or '{"prompt": "1+1=", "teacher_id": "math"}\n{"prompt": "2+1=", "teacher_id": "code"}\n'
        (tmp_path / "rows.jsonl").write_text(rows)
        given = teachers or {name: {"model": str(tmp_path / name)} for name in ("math", "code")}
        base = {
            "name": "test",
            "model": str(tmp_path / "model"),
            "dataset": {"path": str(tmp_path / "rows.jsonl")},
            "retry": {"backoff_s": 0},
            "max_completion_length": 16,
            "servers": {"student": {"max_model_len": 64} if student is None else student, "teachers": given},
        }
        return DistillationRunConfig.model_validate(base | fields)

    return make


# The config, and what is seen before anything starts


def wrong(**fields: Any) -> str:
    with pytest.raises(ValueError) as caught:
        DistillationRunConfig.model_validate({"model": "m", "dataset": {"path": "d"}, **fields})
    return str(caught.value)


@pytest.mark.parametrize(
    ("servers", "message"),
    [
        ({}, "servers.teachers\n  Field required"),
        ({"teachers": {}}, "no teacher is given"),
        ({"teachers": {"a": {}}}, "neither `model` nor `url` is set"),
        ({"teachers": {"a": {"model": "m", "url": URL}}}, "both `model` and `url` are set"),
        ({"teachers": {"a b": {"model": "m"}}}, "'a b' cannot name a teacher"),
        ({"teachers": {"a": {"url": URL}, "b": {"url": f"{URL}/v1"}}}, f"{URL} is named twice"),
        ({"teachers": {"a": {"url": "h:1"}}}, "a server's address starts with http://"),
        (
            {"student": {"max_model_len": 64}, "teachers": {"a": {"model": "m", "max_model_len": 64}}},
            "teachers.a.max_model_len=64 must be greater than the student's 64",
        ),
    ],
)
def test_servers_that_make_no_sense_are_refused(servers: dict[str, Any], message: str) -> None:
    assert message in wrong(servers=servers)


def test_the_trainer_s_addresses_are_not_for_the_user_to_say() -> None:
    assert "filled in by the flow: set servers.teachers" in wrong(teacher_server_urls={"a": URL})


def test_what_is_all_right_passes_and_names_its_teachers(home: Path, config: Make) -> None:
    assert config().teachers == ("math", "code")
    preflight(config())
    preflight(config(teachers={"one": {"model": config().model}}, rows='{"prompt": "1"}\n'))  # the only one needs no column


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rows": '{"prompt": "1"}\n'}, "has no column `teacher_id`; it has: prompt"),
        ({"rows": '{"prompt": "1", "teacher_id": "maths"}\n'}, "row 0 of the dataset has `teacher_id` 'maths': name one of"),
        (
            {"teachers": {"math": {"model": "/none"}, "code": {"model": "/no"}}},
            "servers.teachers.math.model: there is no folder",
        ),
        (
            {"student": {"max_model_len": 128}},
            "servers.teachers.math: its model takes 128 tokens and the student's servers 128",
        ),
        ({"student": {}}, "set servers.student.max_model_len=127 or less"),
        ({"eval": {"dataset": {"path": "ROWS"}}}, "eval.reward_func: is required for a distillation run"),
        ({"trainer": {"gpus": 1}}, "the run leases 1 GPUs, for its trainer and each server; this machine has 0"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(
    home: Path, config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr("infra.gpus.visible_gpus", lambda: [])
    if "eval" in fields:
        fields = {"eval": {"dataset": {"path": str(tmp_path / "rows.jsonl")}}}
    with pytest.raises(ConfigErrors) as caught:
        preflight(config(**fields))
    assert any(message in line for line in caught.value.lines), caught.value.lines


def test_a_started_teacher_reads_the_student_s_tokens(home: Path, config: Make, tmp_path: Path) -> None:
    made = config()
    for name in ("model", "math", "code"):
        tokenizer = build_tokenizer()
        tokenizer.add_tokens(["<think>"] if name == "code" else [])
        tokenizer.save_pretrained(tmp_path / name)
    with pytest.raises(ConfigErrors) as caught:
        preflight(made)
    (line,) = caught.value.lines
    assert line.startswith(f"servers.teachers.code.model: {tmp_path / 'code'} has another vocabulary than {made.model}: 1 of ")


def test_a_teacher_given_by_url_that_does_not_answer(home: Path, config: Make, unused_port: int) -> None:
    url = f"http://127.0.0.1:{unused_port}"
    with pytest.raises(ConfigErrors) as caught:
        preflight(config(teachers={"one": {"url": url}}))
    (line,) = caught.value.lines
    assert line.startswith(f"servers.teachers.one.url: no vLLM server answers at {url}")


def test_gpus_are_those_of_the_trainer_the_students_and_the_teachers_it_starts(config: Make) -> None:
    made = config(teachers={"a": {"model": "m", "tensor_parallel_size": 2}, "b": {"model": "m", "gpus": 0}, "c": {"url": URL}})
    assert (gpus_needed(made, True), gpus_needed(made, False)) == (4, 0)


def test_params_say_what_teaches_not_where(config: Make) -> None:
    params = params_of(config(teachers={"a": {"url": URL}, "b": {"model": "m"}}))
    assert "teacher_server_urls" not in params
    assert URL not in params["servers.teachers"] and '"model": "m"' in params["servers.teachers"]


# Their life in a run


class Run:
    """Teachers over fake places; `sick`: URLs that do not answer."""

    def __init__(self, config: DistillationRunConfig, folder: Path, **scripts: list[str]) -> None:
        registry = Registry()
        self.places: dict[str, FakePlace] = {}
        self.sick: set[str] = set()
        self.checked: list[tuple[str, str | None]] = []
        row, _ = open_run(registry, config.model_copy(update={"storage": config.storage}), "distill-mopd")
        self.scripts = scripts
        self.teachers = Teachers(
            config,
            row,
            registry,
            LeaseManager(registry),
            make=self._make,
            check=lambda url, key: self.checked.append((url, key)),
            pulse=Pulse(lambda url: url not in self.sick, every_s=0.0),
        )
        self.teachers.lease()

    def _make(self, name: str) -> FakePlace:
        self.places[name] = FakePlace(f"teacher-{name}", self.scripts.get(name))
        return self.places[name]

    def tend_until(self, condition: Callable[[], Any]) -> str | None:
        deadline = time.monotonic() + 20
        while True:
            gone = self.teachers.tend()
            if condition():
                return gone
            assert time.monotonic() < deadline, "in vain"
            time.sleep(0.01)


@pytest.fixture
def run(home: Path, tmp_path: Path, config: Make) -> Any:
    made: list[Run] = []

    def make(scripts: dict[str, list[str]] | None = None, **fields: Any) -> Run:
        made.append(Run(config(storage={"uri": str(tmp_path / "runs")}, **fields), tmp_path, **(scripts or {})))
        return made[-1]

    yield make
    for one in made:
        one.teachers.stop()


def test_started_and_given_ones_are_told_to_the_trainer_each_with_its_own_key(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THEIRS", "their-key")
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.delenv("NONE", raising=False)
    given = {"given": {"url": URL, "api_key_env": "THEIRS"}, "open": {"url": "http://127.0.0.1:8", "api_key_env": "NONE"}}
    made = run(teachers={"own": {"model": "m"}, **given})
    made.teachers.ensure()
    assert list(made.teachers.addresses().items()) == [
        ("own", "http://127.0.0.1/teacher-own/1"),
        ("given", URL),
        ("open", "http://127.0.0.1:8"),
    ]
    assert sorted(made.checked, key=str) == [("http://127.0.0.1:7", "their-key"), ("http://127.0.0.1:8", None)]
    keys = made.teachers.environment()
    assert (keys["VLLM_TEACHER_API_KEY_given"], keys["VLLM_TEACHER_API_KEY_open"]) == ("their-key", "")
    assert len(keys["VLLM_TEACHER_API_KEY_own"]) > 20
    assert [row["name"] for row in made.teachers.rows()] == ["teacher-given", "teacher-open", "teacher-own"]


def test_one_that_dies_is_started_again_and_the_trainer_goes_on_meanwhile(run: Any) -> None:
    made = run({"math": ["up", "waits"]})
    made.teachers.ensure()
    made.places["math"].die()
    assert "SIGKILL" in str(made.teachers.death())
    made.tend_until(lambda: made.places["math"].starts == 2)
    assert made.teachers.tend() is None and [row["name"] for row in made.teachers.rows()] == ["teacher-code"]
    made.places["math"].go.set()
    assert made.tend_until(lambda: len(made.teachers.rows()) == 2) is None


def test_one_that_cannot_come_back_ends_the_attempt_and_the_next_one_starts_it_again(run: Any) -> None:
    made = run(retry={"replace_servers": 0, "backoff_s": 0})
    made.teachers.ensure()
    made.places["code"].die()
    assert "vLLM server teacher-code died" in str(made.tend_until(lambda: made.teachers.tend()))
    made.teachers.ensure()
    assert made.places["code"].starts == 2 and made.teachers.tend() is None


def test_one_that_does_not_start_fails_ensure_and_the_others_stay(run: Any) -> None:
    made = run({"code": ["fails"]})
    with pytest.raises(ServerStartFailed):
        made.teachers.ensure()
    made.teachers.ensure()
    assert {name: place.starts for name, place in made.places.items()} == {"math": 1, "code": 2}


def test_a_given_one_that_falls_silent_is_told_of_and_left_alone(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("flows.teachers.UNHEALTHY_S", 0.0)
    made = run(teachers={"given": {"url": URL}})
    made.teachers.ensure()
    made.sick.add(URL)
    shown: list[str] = []
    made.tend_until(lambda: shown.append(capsys.readouterr().out) or "has not answered" in "".join(shown))
    made.sick.clear()
    made.tend_until(lambda: shown.append(capsys.readouterr().out) or "answers again" in "".join(shown))
    assert made.teachers.death() is None


def test_students_and_teachers_are_one_set_of_servers() -> None:
    calls: list[str] = []

    class Kind:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getattr__(self, method: str) -> Any:
            def call(*given: Any) -> Any:
                calls.append(f"{self.name}.{method}")
                fields = {"config_fields": {"vllm_server_base_url": "s"}, "addresses": {"a": "t"}, "death": None, "tend": None}
                fields |= {"environment": {self.name: "key"}, "rows": [self.name], "busy_gpu_s": {self.name: 1.0}}
                return fields.get(method)

            return call

    both = StudentsAndTeachers(Kind("students"), Kind("teachers"))  # type: ignore[arg-type]
    both.lease()
    both.ensure()
    # Teachers start beside the students, and are waited for when those are up.
    assert calls[2:] == ["teachers.begin", "students.ensure", "teachers.ensure"]
    assert both.config_fields() == {"vllm_server_base_url": "s", "teacher_server_urls": {"a": "t"}}
    assert both.environment() == {"students": "key", "teachers": "key"} and both.rows() == ["students", "teachers"]
    assert both.busy_gpu_s() == {"students": 1.0, "teachers": 1.0}
    assert both.tend() is None and both.death() is None


def test_a_started_one_scores_only_is_a_token_longer_and_keeps_its_address(
    home: Path, config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, specs, ports = Registry(), [], []

    class Server:
        process, log_path = SimpleNamespace(pid=1), Path("log")
        wait_ready = require = stop = lambda self, *args, **options: None

        def __init__(self, spec: ServerSpec, port: Any, *args: Any, **options: Any) -> None:
            specs.append(spec)
            ports.append(port.port)
            self.url = f"http://127.0.0.1:{port.port}"

        def describe_exit(self) -> str:
            return "exit code 0"

        def capabilities(self) -> SimpleNamespace:
            return SimpleNamespace(model="m", version="1", max_model_len=65, device="cpu")

    monkeypatch.setattr("flows.started_server.start_server", Server)
    row = registry.create_run("test", "distill-mopd", output_dir=str(home))
    with LeaseManager(registry) as leases:
        teacher = Teacher(config(teacher_top_k=32), row, registry, leases, "math", "key")
        teacher.start(print)
        teacher.stop()
        assert leases.held() and teacher.url is None  # nobody else gets its port meanwhile
        teacher.start(print)
        teacher.give_up()
        assert leases.held() == []
    assert ports[0] == ports[1]
    assert (specs[0].frozen, specs[0].max_logprobs, specs[0].top_logprobs, specs[0].max_model_len) == (True, -1, 32, 65)
    assert [server.name for server in registry.list_servers(row.id)] == ["teacher-math"] * 2


def test_the_models_of_teachers_are_known_by_folder_by_name_or_by_address(home: Path, config: Make, tmp_path: Path) -> None:
    registry = Registry()
    for model in ("org/earlier", "org/judge"):  # the newest by this name is the one that was asked
        registry.record_server(None, "judge", URL, 1, details={"model": model, "key": "file"})
    made = config(teachers={"a": {"model": str(tmp_path / "math")}, "b": {"url": "name:judge"}, "c": {"url": URL}})
    assert teacher_models(registry, made) == {"a": str(tmp_path / "math"), "b": "org/judge", "c": URL}
