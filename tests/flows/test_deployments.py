"""What `loopwright deploy` tells a real Prefect server, and what that server then does by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from flows import automations, prefect_yaml
from flows.automations import CRASHED, NO_HEARTBEAT, NOTIFY, Notification
from flows.cli import cli
from flows.config import RUN_CONFIGS
from flows.config_file import load_config
from flows.deployments import Plan, deploy, load_flow, standard_targets
from flows.presets import ENTRYPOINTS, PRESETS, Preset
from flows.work_pools import GPUS_PER_RUN, RUNS_WITHOUT_GPUS, default_limit
from tests.support.prefect_server import PrefectServer, prefect_server
from tests.support.waiting import wait_until
from trainers.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOOPWRIGHT_HOME", str(tmp_path_factory.mktemp("home")))
        patch.delenv("PREFECT_API_URL", raising=False)
        patch.delenv(automations.NOTIFY_VARIABLE, raising=False)
        with prefect_server() as running:
            yield running


@pytest.fixture(scope="module")
def deployed(server: PrefectServer) -> PrefectServer:
    assert {change.done for change in deploy()} <= {"created", "unchanged"}
    return server


def done(plan: Plan | None = None) -> dict[str, str]:
    return {change.what: change.done for change in deploy(plan)}


def deployment(server: PrefectServer, name: str) -> dict[str, Any]:
    with server.api() as api:
        return api.get(f"/deployments/name/{name}").raise_for_status().json()


def test_a_new_server_has_every_flow_and_preset_and_doing_it_again_changes_nothing(deployed: PrefectServer) -> None:
    assert set(done().values()) == {"unchanged"}
    for preset in PRESETS.values():
        found = deployment(deployed, f"{load_flow(preset.kind).name}/{preset.name}")
        assert found["parameters"] == {"config": dict(preset.fields)}
        assert found["enforce_parameter_schema"] and found["description"] == preset.summary
    assert deployment(deployed, "reap/local")["work_queue_name"] == "maintenance"
    with deployed.api() as api:
        pool = api.get("/work_pools/loopwright").json()
        queues = {
            queue["name"]: queue["concurrency_limit"] for queue in api.post("/work_pools/loopwright/queues/filter").json()
        }
    # One slot more than runs: only the reaper can take it, when dead runs hold all the others.
    assert (pool["concurrency_limit"], queues) == (default_limit() + 1, {"default": default_limit(), "maintenance": 1})


def test_the_limit_is_what_the_gpus_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpus, runs in ((0, RUNS_WITHOUT_GPUS), (1, 1), (8, 8 // GPUS_PER_RUN)):
        monkeypatch.setattr("flows.work_pools.visible_gpus", lambda gpus=gpus: list(range(gpus)))
        assert default_limit() == runs


def test_what_people_set_in_prefect_stays_and_what_is_asked_for_changes(deployed: PrefectServer) -> None:
    with deployed.api() as api:
        local = deployment(deployed, "sft-long-context/local")
        schedule = {"schedule": {"cron": "0 4 * * *", "timezone": "UTC"}, "active": False}
        api.post(f"/deployments/{local['id']}/schedules", json=[schedule]).raise_for_status()
        change = {"parameters": {"config": {"seed": 7}}, "job_variables": {"env": {"MINE": "1"}}, "tags": ["mine"]}
        api.patch(f"/deployments/{local['id']}", json=change).raise_for_status()
        (silence,) = [found for found in api.post("/automations/filter").json() if found["name"] == NO_HEARTBEAT]
        api.patch(f"/automations/{silence['id']}", json={"enabled": False}).raise_for_status()
        api.patch("/work_pools/loopwright", json={"concurrency_limit": 9}).raise_for_status()

        changed = {what for what, state in done().items() if state != "unchanged"}
        assert changed == {"deployment sft-long-context/local"}  # whose heartbeat variable was gone
        after = deployment(deployed, "sft-long-context/local")
        assert after["parameters"] == {"config": {"seed": 7}} and "mine" in after["tags"]
        assert after["job_variables"]["env"]["MINE"] == "1" and len(after["job_variables"]["env"]) == 2
        assert [one["schedule"]["cron"] for one in after["schedules"]] == ["0 4 * * *"]
        assert not api.get(f"/automations/{silence['id']}").json()["enabled"]
        assert api.get("/work_pools/loopwright").json()["concurrency_limit"] == 9

        assert done(Plan([], pool_limit=3))["work pool loopwright"] == "updated"
        assert api.get("/work_pools/loopwright").json()["concurrency_limit"] == 4
        api.patch(f"/automations/{silence['id']}", json={"enabled": True}).raise_for_status()


def test_prefect_yaml_is_what_the_code_makes() -> None:
    assert prefect_yaml.PATH.read_text(encoding="utf-8") == prefect_yaml.text(), "run `python -m flows.prefect_yaml`"
    names = {(entry["entrypoint"], entry["name"]) for entry in yaml.safe_load(prefect_yaml.text())["deployments"]}
    assert names == {(ENTRYPOINTS[target.flow], target.name) for target in standard_targets()}


@pytest.mark.timeout(900)
def test_prefect_deploys_the_same_from_prefect_yaml(deployed: PrefectServer) -> None:
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    environment = {**os.environ, **deployed.environment}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=800)
    differing = {what for what, state in done().items() if state != "unchanged"}
    assert differing == set()


@pytest.mark.parametrize("preset", PRESETS.values(), ids=list(PRESETS))
def test_a_preset_with_model_and_dataset_is_a_valid_config(preset: Preset) -> None:
    teachers = ["servers.teachers.math.model=t"] if preset.kind == "distillation" else []
    given = ["model=m", "dataset.path=rows.jsonl", *teachers]
    loaded = load_config(preset.kind, None, given, {}, preset.name)
    assert isinstance(loaded.config, RUN_CONFIGS[preset.kind])
    assert loaded.origin("max_steps") in (f"preset {preset.name}", "default")
    changed = load_config(preset.kind, None, [*given, "seed=9"], {"LOOPWRIGHT_SEED": "8"}, preset.name)
    assert changed.config.seed == 9


def test_presets_on_the_command_line(home: Path) -> None:
    run = CliRunner().invoke
    assert "grpo-cpu-tiny" in run(cli, ["config", "presets"]).output
    printed = yaml.safe_load(run(cli, ["config", "presets", "sft-cpu-tiny"]).output)
    assert printed == dict(PRESETS["sft-cpu-tiny"].fields)
    shown = run(cli, ["config", "show", "sft", "--preset", "sft-cpu-tiny", "dataset.path=rows.jsonl"])
    assert "preset sft-cpu-tiny" in shown.output and shown.exit_code == 0, shown.output
    assert "name a CONFIG file, or a preset" in run(cli, ["run", "grpo"]).output
    with pytest.raises(ConfigError, match="for grpo, not for sft; for sft there are: sft-cpu-tiny"):
        run(cli, ["run", "sft", "--preset", "grpo-cpu-tiny"], catch_exceptions=False)


@pytest.fixture
def invoke(deployed: PrefectServer, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """`loopwright deploy …` on the server; its output. Raises what the command raises."""
    monkeypatch.setenv("PREFECT_API_URL", deployed.url)

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(cli, ["deploy", *arguments], catch_exceptions=False)
        return result.output

    return run


def test_a_schedule_starts_runs_with_its_config(deployed: PrefectServer, invoke: Callable[..., str], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "completion": "2"}\n')
    nightly = ["sft", f"dataset.path={rows}", "--preset", "sft-cpu-tiny", "--name", "nightly", "--schedule", "0 2 * * *"]
    assert "created" in invoke(*nightly, "--concurrency", "1")
    assert "nothing changed" in invoke(*nightly)
    found = deployment(deployed, "sft-long-context/nightly")
    (schedule,) = found["schedules"]
    wanted = {"config": {**PRESETS["sft-cpu-tiny"].fields, "dataset": {"path": str(rows)}}}
    assert found["parameters"] == schedule["parameters"] == wanted
    assert found["global_concurrency_limit"]["limit"] == 1

    query = {"deployments": {"id": {"any_": [found["id"]]}}, "sort": "EXPECTED_START_TIME_ASC"}
    with deployed.api() as api:
        runs = wait_until(lambda: api.post("/flow_runs/filter", json=query).json(), 120, "Prefect schedules runs")
    assert runs[0]["parameters"] == wanted and runs[0]["auto_scheduled"]

    moved = invoke(*nightly[:-1], "30 3 * * 1", "--timezone", "Europe/Berlin")
    assert "30 3 * * 1 (Europe/Berlin)" in moved
    (schedule,) = deployment(deployed, "sft-long-context/nightly")["schedules"]
    assert schedule["schedule"]["timezone"] == "Europe/Berlin" and schedule["parameters"] == wanted
    assert set(done().values()) == {"unchanged"}  # what is asked for later, for all, leaves it alone


def test_what_cannot_be_scheduled_is_refused_with_the_remedy(invoke: Callable[..., str], tmp_path: Path) -> None:
    base = ["sft", f"dataset.path={tmp_path}", "model=m"]
    with pytest.raises(ConfigError, match="leave `name` out"):
        invoke(*base, "name=one", "--name", "x", "--schedule", "0 2 * * *")
    for wrong in (["--schedule", "every night"], ["--schedule", "0 2 * * *", "--timezone", "Mars/Base"]):
        with pytest.raises(ConfigError, match=r"--(schedule|timezone)"):
            invoke(*base, "--name", "x", *wrong)
    with pytest.raises(ConfigError, match="dataset: is required"):
        invoke("sft", "--preset", "sft-cpu-tiny", "--name", "x", "--schedule", "0 2 * * *")
    with pytest.raises(ConfigError, match="choose another --name"):
        invoke(*base, "--name", "local")
    assert "is for the deployment of one FLOW" in invoke("--name", "x")
    assert "what shall this deployment of your own be called" in invoke(*base)


def test_without_a_server_there_is_nothing_to_tell(home: Path) -> None:
    with pytest.raises(ConfigError, match="loopwright up"):
        CliRunner().invoke(cli, ["deploy"], catch_exceptions=False)


@pytest.fixture
def hook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """An address that takes notifications, and what it was told."""
    told: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        thread = threading.Thread(target=listener.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listener.server_port}/canary-in-the-path", told
        listener.shutdown()
        thread.join()


def test_failed_and_crashed_runs_are_told_and_a_crash_starts_the_reaper(
    deployed: PrefectServer, hook: tuple[str, list[dict[str, Any]]]
) -> None:
    url, told = hook
    assert "canary" not in repr(Notification(url))
    plan = Plan([], notification=Notification(url))
    changes = deploy(plan)
    assert "canary" not in str(changes) and done(plan)[f"automation {NOTIFY}"] == "unchanged"
    reaper = deployment(deployed, "reap/local")["id"]
    local = deployment(deployed, "sft-long-context/local")["id"]
    config = {"model": "m", "dataset": {"path": "x"}}
    with deployed.api() as api:

        def post(path: str, body: dict[str, Any]) -> Any:
            # 503: the server's SQLite file is locked for the moment
            answer = wait_until(lambda: (got := api.post(path, json=body)).status_code != 503 and got, 60, path)
            return answer.raise_for_status().json()

        def end(kind: str, message: str) -> str:
            flow_run = post(f"/deployments/{local}/create_flow_run", {"parameters": {"config": config}})["id"]
            for state in ({"type": "RUNNING"}, {"type": kind, "message": message}):
                post(f"/flow_runs/{flow_run}/set_state", {"state": state, "force": True})
            return flow_run

        def reaps() -> list[dict[str, Any]]:
            query = {"deployments": {"id": {"any_": [reaper]}}}
            return api.post("/flow_runs/filter", json=query).json()

        before = len(reaps())
        wait_until(lambda: _loaded(api), 60, "the server has loaded its automations")
        failed = end("FAILED", 'column "answer" is missing\nTraceback …')
        crashed = end("CRASHED", "killed")
        wait_until(lambda: {one["flow_run_id"] for one in told} >= {failed, crashed}, 120, "both are told")
        by_run = {one["flow_run_id"]: one for one in told}
        assert by_run[failed]["state"] == "Failed" and by_run[failed]["message"].startswith('column "answer"')
        assert by_run[crashed]["flow"] == "sft-long-context" and failed in by_run[failed]["url"]
        wait_until(lambda: len(reaps()) > before, 60, "the reaper is to run")
        assert done(Plan([], notification=Notification(remove=True)))[f"automation {NOTIFY}"] == "removed"
        stored = {found["name"] for found in api.post("/automations/filter").json()}
        assert NOTIFY not in stored and CRASHED in stored


def _loaded(api: Any) -> bool:
    return any(found["name"] == NOTIFY and found["enabled"] for found in api.post("/automations/filter").json())


def test_an_address_that_is_none_is_refused_without_being_shown() -> None:
    with pytest.raises(ConfigError, match=automations.NOTIFY_VARIABLE) as refused:
        Notification("canary")
    assert "canary" not in str(refused.value)
