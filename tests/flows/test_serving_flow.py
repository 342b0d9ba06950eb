"""Servers that are kept by a name: who may have it, how a run finds address and key, and what the flow does when one dies."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from flows.config import GRPORunConfig
from flows.failures import RunFailed
from flows.named_servers import address_of, addresses_of
from flows.servers_cli import servers as servers_command
from flows.serving_flow import KeptServer, ServeConfig, keep
from infra.errors import InfraError, ServerStartFailed, ServerUnreachable
from infra.leases import LeaseManager
from infra.registry import Registry
from infra.server_names import NameTaken, find, holding, key_for
from tests.flows.runs_for_real import ledger, processes, start, wait_for, write_experiment
from tests.support.tiny_model import build_tiny_model
from trainers.errors import ConfigError


def kept_row(registry: Registry, name: str, url: str, key: str = "file") -> str:
    return registry.record_server(None, name, url, os.getpid(), details={"model": "m", "key": key}).id


def test_one_process_has_a_name(home: Path) -> None:
    registry = Registry()
    with LeaseManager(registry) as ours, LeaseManager(registry) as theirs:
        with holding(ours, "judge"), pytest.raises(NameTaken, match="'judge' is kept already"), holding(theirs, "judge"):
            pass
        with holding(theirs, "judge"):
            pass
        with pytest.raises(NameTaken, match="is no name"), holding(ours, "a/b"):
            pass


def test_no_server_starts_with_an_empty_key(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # a file can be made, and nothing written to it
    try:
        with pytest.raises(OSError, match="File too large"):
            key_for("judge")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list((home / "keys").iterdir()) == []
    (home / "keys" / "judge").touch()
    with pytest.raises(InfraError, match=r"keys/judge should hold the key of server judge and is empty: delete it"):
        key_for("judge")


def test_a_run_finds_address_and_key_by_name(home: Path, monkeypatch: pytest.MonkeyPatch, config: Callable[..., Any]) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    registry = Registry()
    key, where = key_for("judge")
    assert (where, key_for("judge")[0]) == ("file", key)
    assert (home / "keys" / "judge").stat().st_mode & 0o077 == 0
    old = kept_row(registry, "judge", "http://127.0.0.1:1")
    registry.end_server(old, "exit code 0")
    kept_row(registry, "judge", "http://127.0.0.1:2")
    given: GRPORunConfig = config(servers={"student": {"url": "name:judge"}})
    assert given.servers.student.urls == ["name:judge"]  # what is stored of the run: no address, no key
    assert address_of("name:judge", given.servers.student) == ("http://127.0.0.1:2", key)
    with pytest.raises(ServerUnreachable, match=r"no server is kept by the name 'x' \(kept: judge\)"):
        find(registry, "x")
    kept_row(registry, "other", "http://127.0.0.1:3", key="environment")
    with pytest.raises(ServerUnreachable, match="set VLLM_API_KEY"):
        address_of("name:other", given.servers.student)
    monkeypatch.setenv("VLLM_API_KEY", "another")
    with pytest.raises(ConfigError, match="have different keys"):
        addresses_of(["name:judge", "name:other"], given.servers.student)
    shown = CliRunner().invoke(servers_command, ["list"])
    assert "judge" in shown.output and "no answer" in shown.output and key not in shown.output


@pytest.mark.parametrize("url", ["name:", "name:a/b", "ftp://x"])
def test_what_is_no_address_is_refused(config: Callable[..., Any], url: str) -> None:
    with pytest.raises(ValueError, match="or is name:X for a server that is kept by a name"):
        config(servers={"student": {"url": url}})


class Scripted(KeptServer):
    """Starts servers that live for as many looks as it is told."""

    def __init__(self, config: ServeConfig, *lives: int | Exception) -> None:
        self.config, self.lives, self.stops = config, list(lives), 0

    def start(self) -> Any:
        life = self.lives.pop(0)
        if isinstance(life, Exception):
            raise life
        looks = iter(range(life))
        process = SimpleNamespace(log_tail=lambda lines: "its last line")
        return SimpleNamespace(
            url="http://127.0.0.1:1",
            log_path=Path("log"),
            process=process,
            capabilities=lambda: SimpleNamespace(model="m"),
            alive=lambda: next(looks, None) is not None,
            describe_exit=lambda: "killed by SIGKILL",
        )

    def stop(self) -> None:
        self.stops += 1


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scripted]:
    monkeypatch.setattr("flows.serving_flow.LOOK_S", 0.0)
    monkeypatch.setattr("flows.serving_flow.artifacts.servers_table", lambda rows: None)
    return lambda *lives, **fields: Scripted(ServeConfig(name="judge", model="m", **fields), *lives)


def test_a_server_that_dies_is_started_again_so_often_in_all(serving: Callable[..., Scripted]) -> None:
    kept = serving(3, 0, 2, restarts=2)
    with pytest.raises(RunFailed, match="server judge died: killed by SIGKILL") as caught:
        keep(kept)
    assert (kept.lives, caught.value.failure) == ([], "infrastructure")


def test_one_that_does_not_start_fails_by_its_class_and_one_whose_time_is_up_ends(serving: Callable[..., Scripted]) -> None:
    with pytest.raises(RunFailed, match="no such flag") as caught:
        keep(serving(ServerStartFailed("no such flag", "user")))
    assert caught.value.failure == "user"
    kept = serving(10**9, ttl_s=0.01)
    assert keep(kept)["ended"] == "ttl_s=0.01 is over" and kept.stops == 1


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_run_that_is_killed_finds_its_kept_server_again_and_gives_it_its_weights(home: Path, tmp_path: Path) -> None:
    model, log, registry = build_tiny_model(tmp_path / "model"), tmp_path / "log", Registry()
    code = f"""
        from flows import prefect_api
        with prefect_api.api():
            from flows.serving_flow import ServeConfig, serve_model
            serve_model(ServeConfig(name="policy", model={str(model)!r}, server={{"max_model_len": 64}}))
    """
    with log.open("ab") as output:
        command = [sys.executable, "-c", "import textwrap; exec(textwrap.dedent('''" + code + "'''))"]
        serving = subprocess.Popen(command, stdout=output, stderr=output)
    run: subprocess.Popen[bytes] | None = None
    try:
        wait_for(lambda: "kept as policy at" in log.read_text() or serving.poll() is not None, "the server is ready", 600)
        assert serving.poll() is None, log.read_text()[-5000:]
        (row,) = registry.list_servers(running=True)
        servers = {"student": {"url": "name:policy"}}
        path = write_experiment(tmp_path, model, prompts=30, name="attached", save_steps=2, servers=servers)
        run = start("run", "grpo", str(path), log=tmp_path / "run.log", REWARD_S="1", OMP_NUM_THREADS="1")

        def step() -> int:
            found = registry.find_run("attached")
            return (found.progress.get("step") or 0) if found else 0

        wait_for(lambda: step() >= 4, "four steps", 600)
        run.send_signal(signal.SIGKILL)
        run.wait()
        assert start("reap", log=tmp_path / "run.log").wait(120) == 0
        assert registry.get_run("attached").status == "FAILED"
        run = start("resume", "attached", log=tmp_path / "run.log", REWARD_S="0", OMP_NUM_THREADS="1")
        assert run.wait(600) == 0, (tmp_path / "run.log").read_text()[-5000:]
        done = registry.get_run("attached")
        assert ledger(Path(done.stages["train"]["checkpoint"])) == {"trained": 30, "dropped": {}, "step": 15}
        assert [found.id for found in registry.list_servers()] == [row.id]  # the same one all along
    finally:
        if run is not None and run.poll() is None:
            run.kill()
            run.wait()
        serving.terminate()
        serving.wait(300)
    wait_for(lambda: processes(home) == [], "no process is left", 60)
    # The script that served was ended by a signal, with the port of its own Prefect server still leased.
    assert start("reap", log=tmp_path / "run.log").wait(120) == 0
    assert registry.list_servers(running=True) == [] and registry.list_leases() == []
