"""A recipe's course with fake runs: every stage once, from what the one before made, whatever is killed and whenever."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.child_run import run_stage
from flows.config import RunConfig
from flows.config_file import ConfigErrors
from flows.evaluate_subject import Subject
from flows.failures import RunFailed
from flows.recipe_accuracy import Accuracy
from flows.recipe_config import RecipeConfig
from flows.recipe_course import Course
from flows.recipe_data import JOINED
from flows.recipe_plan import Plan
from flows.recipe_runs import RunRefused, check_startable, open_recipe, open_stage
from flows.recipe_stages import StageRuns
from flows.runs import check_startable as check_run
from flows.runs import config_of
from flows.sweep_outcome import may_go_on
from infra.registry import URL_VARIABLE, Registry
from tests.flows.test_recipe_config import recipe
from trainers.errors import ConfigError


class Killed(BaseException):
    """SIGKILL of the recipe's process."""


class FakeRunner:
    """Each stage's process ends at once, as `script` says: `done`, `lost`, `fails`, or `kill` of the recipe while it runs."""

    def __init__(self, registry: Registry, script: dict[str, list[str]]) -> None:
        self.registry, self.script = registry, script
        self.started: list[tuple[str, str]] = []  # stage, the model it begins from
        self.running: dict[str, RunConfig] = {}
        self.configs: dict[str, RunConfig] = {}
        self.most_at_once = 0

    def ready(self, config: RunConfig) -> bool:
        return True

    def start(self, key: str, config: RunConfig) -> None:
        self.started.append((key, config.model))
        self.running[key] = self.configs[key] = config
        self.most_at_once = max(self.most_at_once, len(self.running))

    def ended(self, key: str) -> str | None:
        end = self.script.get(key, []).pop(0) if self.script.get(key) else "done"
        if end == "kill":
            raise Killed
        if end == "goes on":
            return None
        run = self.registry.get_run(str(self.running.pop(key).name))
        if end == "done":
            self.registry.set_stage(run.id, "train", {"checkpoint": f"/{key}/checkpoint", "step": 3})
            self.registry.set_stage(run.id, "register", {"model": run.name, "version": "1"})
            self.registry.update_run(run.id, status="FINISHED")
        elif end == "fails":
            self.registry.update_run(run.id, status="FAILED", failure_class="memory", cause="out of memory")
        return "exit code 0" if end == "done" else "killed by SIGKILL"

    def stop_all(self) -> None:
        self.running.clear()


class FakeAccuracy:
    def __init__(self) -> None:
        self.measured: list[tuple[str, str]] = []

    def measure(self, title: str, model: str, parent_run: str | None) -> bool:
        self.measured.append((title, model))
        return True


class Scene:
    """A recipe in a registry of its own, worked on as often as `work` is called."""

    def __init__(self, folder: Path, **fields: Any) -> None:
        self.registry = Registry(folder / "registry.db")
        for name in ("a", "b"):
            (folder / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": f"{name}{i}"}) + "\n" for i in range(3)))
        reward = ["trainers.rewards:exact_match_reward"]
        domains = {name: {"dataset": {"path": str(folder / f"{name}.jsonl")}, "reward_funcs": reward} for name in ("a", "b")}
        self.config = recipe(
            domains=domains, storage={"uri": str(folder / "runs")}, retry={"backoff_s": 0.0, "infrastructure": 1}, **fields
        )
        self.folder = folder

    @property
    def plan(self) -> Plan:
        return Plan(RecipeConfig.model_validate(self.config))

    def work(self, **script: list[str]) -> tuple[FakeRunner, FakeAccuracy, dict[str, Any]]:
        row, _ = open_recipe(self.registry, self.plan, None)
        self.runner, self.accuracy = FakeRunner(self.registry, script), FakeAccuracy()
        changes: list[None] = []
        runs = StageRuns(self.registry, row, self.plan.config, self.runner, lambda: changes.append(None))
        course = Course(self.registry, row, self.plan, runs, self.accuracy, lambda: changes.append(None))
        try:
            merged = course.run()
        finally:
            self.registry.update_run(row.id, owner=None, status="FAILED")
        return self.runner, self.accuracy, merged


@pytest.fixture
def scene(tmp_path: Path, home: Path) -> Scene:
    return Scene(tmp_path)


WHOLE = [("sft", "base"), ("a", "/sft/checkpoint"), ("b", "/sft/checkpoint"), ("merged", "/sft/checkpoint")]


def test_every_stage_begins_from_what_the_one_before_it_made(scene: Scene):
    runner, accuracy, merged = scene.work()
    assert runner.started == WHOLE and runner.most_at_once == 1  # without GPUs one after the other
    assert merged["checkpoint"] == "/merged/checkpoint" and merged["run"] == "r-merged"
    assert accuracy.measured == [
        ("base", "base"),
        ("sft", "/sft/checkpoint"),
        ("a", "/a/checkpoint"),
        ("b", "/b/checkpoint"),
        ("merged", "/merged/checkpoint"),
    ]
    student = scene.registry.get_run("r-merged")
    teachers = student.config["servers"]["teachers"]
    assert {name: teachers[name]["model"] for name in teachers} == {"a": "/a/checkpoint", "b": "/b/checkpoint"}
    rows = [json.loads(line) for line in Path(student.config["dataset"]["path"]).read_text().splitlines()]
    assert sorted((row["teacher_id"], row["prompt"]) for row in rows) == [(n, f"{n}{i}") for n in "ab" for i in range(3)]
    (joined,) = scene.registry.find_artefacts(student.config["dataset"]["path"])
    assert [row.name for row in scene.registry.parents(joined.id)] == ["a.jsonl", "b.jsonl"]
    parent = scene.registry.get_run("r")
    assert {run.name for run in scene.registry.list_runs(parent=parent.id)} == {"r-sft", "r-a", "r-b", "r-merged"}


@pytest.mark.parametrize("place", range(4))
def test_a_recipe_killed_in_any_stage_goes_on_with_that_one(scene: Scene, place: int):
    stage = WHOLE[place][0]
    with pytest.raises(Killed):
        scene.work(**{stage: ["kill"]})
    assert scene.runner.started == WHOLE[: place + 1]
    runner, _, merged = scene.work()
    assert runner.started == WHOLE[place:]  # what was finished is not run again
    assert merged["checkpoint"] == "/merged/checkpoint"


def test_a_stage_that_finished_while_the_recipe_was_dead_is_taken_as_it_is(scene: Scene):
    with pytest.raises(Killed):
        scene.work(b=["goes on", "kill"])
    run = scene.registry.get_run("r-b")
    scene.registry.set_stage(run.id, "train", {"checkpoint": "/b/checkpoint", "step": 3})
    scene.registry.set_stage(run.id, "register", {})
    scene.registry.update_run(run.id, status="FINISHED")
    scene.work()
    assert scene.registry.get_run("r").stages["b"]["checkpoint"] == "/b/checkpoint"


def test_specialists_run_side_by_side_where_they_are_asked_to(tmp_path: Path, home: Path):
    scene = Scene(tmp_path, parallel=2)
    runner, _, _ = scene.work(a=["goes on", "goes on"])
    assert runner.most_at_once == 2
    # In turn or not, the student's teachers are in the order of the domains.
    assert list(scene.registry.get_run("r-merged").config["servers"]["teachers"]) == ["a", "b"]


def test_specialists_that_would_put_their_weights_into_one_server_run_one_after_the_other(tmp_path: Path, home: Path):
    server = {"student": {"url": "http://10.0.0.1:8000"}}
    scene = Scene(tmp_path, parallel=2, grpo={"max_steps": 7, "num_generations": 4, "servers": server})
    runner, _, _ = scene.work(a=["goes on", "done"])
    assert runner.started == WHOLE and runner.most_at_once == 1


def test_a_lost_stage_goes_on_as_often_as_it_may(scene: Scene):
    runner, _, _ = scene.work(a=["lost", "done"])
    assert [stage for stage, _ in runner.started] == ["sft", "a", "b", "a", "merged"]  # b while a waits its turn


def test_a_stage_that_is_lost_too_often_fails_the_recipe(scene: Scene):
    with pytest.raises(RunFailed, match="r-a: killed by SIGKILL") as failed:
        scene.work(a=["lost", "lost"])
    assert failed.value.failure == "infrastructure"


def test_a_failed_stage_fails_the_recipe_with_its_cause_and_can_be_mended(scene: Scene):
    with pytest.raises(RunFailed, match="r-b: out of memory") as failed:
        scene.work(b=["fails"])
    assert failed.value.failure == "memory"
    scene.config["grpo"]["token_budget"] = 512  # what has not trained yet may change
    with pytest.raises(RunRefused, match=r"stage 'r-a' has trained with another config; these fields differ: token_budget"):
        scene.work()
    del scene.config["grpo"]["token_budget"]
    scene.config["domains"]["b"]["overrides"] = {"token_budget": 512}
    runner, _, _ = scene.work()
    assert runner.started == WHOLE[2:] and runner.configs["b"].token_budget == 512


def test_a_stage_that_is_refused_is_its_users_fault_and_not_lost(scene: Scene, monkeypatch: pytest.MonkeyPatch):
    """Its process ends before its flow begins: what it says of that is in the row that the recipe has made."""
    monkeypatch.setenv(URL_VARIABLE, scene.registry.url)
    row, _ = open_recipe(scene.registry, scene.plan, None)
    config = scene.plan.specialist("a", "/nowhere")
    open_stage(scene.registry, row, config, "train-grpo")
    with pytest.raises(ConfigErrors, match="there is no folder /nowhere"):
        run_stage(config)
    run = scene.registry.get_run("r-a")
    assert (run.status, run.failure_class) == ("FAILED", "user") and not may_go_on(run)
    assert "there is no folder /nowhere" in str(run.cause)


def test_a_recipe_whose_domains_have_dots_in_their_names_goes_on_after_its_last_stage(scene: Scene):
    scene.config["domains"] = {f"{name}.v1": domain for name, domain in scene.config["domains"].items()}
    scene.work()
    assert scene.work()[0].started == []  # what stages before it made is not taken for another config


def test_prompts_that_are_gone_are_joined_again_and_must_be_the_same(scene: Scene):
    with pytest.raises(Killed):
        scene.work(merged=["kill"])
    prompts = Path(scene.registry.get_run("r").stages[JOINED]["path"])
    prompts.unlink()
    text = (scene.folder / "a.jsonl").read_text()
    (scene.folder / "a.jsonl").write_text(text.replace("a0", "other"))
    with pytest.raises(ConfigError, match="data sets have changed since the prompts were joined"):
        scene.work()
    prompts.unlink()
    (scene.folder / "a.jsonl").write_text(text)
    assert scene.work()[0].started == WHOLE[3:] and prompts.is_file()


def test_prompts_are_joined_anew_for_other_data_sets_until_the_student_has_trained(scene: Scene):
    domain = scene.config["domains"]["a"]
    del domain["reward_funcs"]
    domain["specialist"] = "/there"
    with pytest.raises(RunFailed, match="r-merged: out of memory"):
        scene.work(merged=["fails"])
    domain["dataset"]["max_rows"] = 1
    scene.work()
    prompts = Path(scene.registry.get_run("r").stages[JOINED]["path"])
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    assert sorted(row["teacher_id"] for row in rows) == ["a", "b", "b", "b"]
    assert scene.work()[0].started == []
    domain["dataset"]["max_rows"] = 2
    with pytest.raises(RunRefused, match=r"stage 'r-merged' has trained with another config; these fields differ: dataset \("):
        scene.work()
    domain["dataset"]["max_rows"] = 1
    del domain["specialist"]
    domain["reward_funcs"] = scene.config["domains"]["b"]["reward_funcs"]
    with pytest.raises(RunRefused, match=r"these fields differ: servers\.teachers\.a\.model"):
        scene.work()  # which would train a specialist that nobody learns from


def test_a_domain_may_be_called_data(scene: Scene):
    scene.config["domains"] = {"data": scene.config["domains"]["a"], "b": scene.config["domains"]["b"]}
    _, accuracy, merged = scene.work()
    assert merged["checkpoint"] == "/merged/checkpoint" and ("data", "/data/checkpoint") in accuracy.measured


def test_a_supervised_run_cannot_be_put_before_specialists_that_have_trained(scene: Scene):
    scene.config["sft"], given = None, scene.config["sft"]
    with pytest.raises(Killed):
        scene.work(b=["kill"])
    scene.config["sft"] = given
    with pytest.raises(RunRefused, match=r"stage 'r-a' has trained with another config; these fields differ: model"):
        scene.work()


def test_a_name_that_is_taken_is_refused(scene: Scene):
    scene.registry.create_run("r-b", "train-grpo", {})
    with pytest.raises(RunRefused, match="a run is named 'r-b' already"):
        check_startable(scene.registry, scene.plan)


def test_a_model_is_measured_once_but_again_if_it_or_its_problems_are_others(scene: Scene, monkeypatch: pytest.MonkeyPatch):
    measured: list[str] = []

    def measure(config: Any, found: Subject, registry: Registry) -> dict[str, Any]:
        measured.append(found.model)
        return {"accuracy": len(measured) / 4, "scored": 3}

    monkeypatch.setattr("flows.recipe_accuracy.measure", measure)
    monkeypatch.setattr("flows.recipe_accuracy.subject", lambda config, _: Subject({}, config.model, 0, None, None, "e"))
    held_out = scene.config["domains"]["a"]["eval"] = {"dataset": {"path": str(scene.folder / "a.jsonl")}}
    row, _ = open_recipe(scene.registry, scene.plan, None)
    accuracy = Accuracy(scene.registry, row, scene.plan)
    told = [accuracy.measure("base", model, None) for model in ("one", "one", "other", "other")]
    assert (told, measured, accuracy.all()) == ([True, False, True, False], ["one", "other"], {"base": {"a": 0.5}})
    held_out["dataset"]["max_rows"] = 2
    accuracy = Accuracy(scene.registry, row, scene.plan)
    assert accuracy.all() == {"base": {}} and accuracy.measure("base", "other", None)
    assert accuracy.all() == {"base": {"a": 0.75}}


def test_a_recipe_is_not_taken_for_a_run_that_trains(scene: Scene):
    row, _ = open_recipe(scene.registry, scene.plan, None)
    with pytest.raises(RunRefused, match="'r' is a recipe, not a training run"):
        config_of(row)
    scene.registry.update_run(row.id, owner=None, status="FAILED")
    with pytest.raises(RunRefused, match="'r' is a recipe"):
        check_run(scene.registry, scene.plan.sft().model_copy(update={"name": "r"}))


def test_a_recipe_at_work_or_finished_is_refused(scene: Scene):
    row, _ = open_recipe(scene.registry, scene.plan, None)
    with pytest.raises(RunRefused, match="is running"):
        open_recipe(scene.registry, scene.plan, None)
    scene.registry.update_run(row.id, owner=None, status="FINISHED")
    with pytest.raises(RunRefused, match="is finished"):
        check_startable(scene.registry, scene.plan)
