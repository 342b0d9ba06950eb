"""A real run on two real servers: one is killed while it generates, one is taken away, one is added; nothing is lost."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.registry import Registry
from tests.flows.runs_for_real import LOOPWRIGHT, ledger, processes, start, wait_for, write_experiment
from tests.support.tiny_model import build_tiny_model
from trainers.roster import read_servers, read_serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
PATIENCE_S = 900.0
PROMPTS = 240
# Slow until the file is there: the run must last as long as starting servers takes.
REWARD = """
import os, time
def reward(completions, completion_ids, **columns):
    for _ in range(60):
        if not os.path.exists({finish!r}):
            time.sleep(0.5)
    return [index + len(ids) / 100 for index, ids in enumerate(completion_ids)]
"""


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            process.terminate()
            process.wait(120)


def command(*arguments: str) -> str:
    done = subprocess.run([*LOOPWRIGHT, *arguments], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_servers_die_come_and_go_while_one_attempt_trains_every_prompt_once(
    home: Path, tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    finish, log = tmp_path / "finish", tmp_path / "log"
    servers = {"student": {"count": 2, "max_model_len": 64}}
    model = build_tiny_model(tmp_path / "model")
    path = write_experiment(tmp_path, model, prompts=PROMPTS, name="elastic", save_steps=50, servers=servers)
    (tmp_path / "rewards.py").write_text(REWARD.format(finish=str(finish)))
    started.append(start("run", "grpo", str(path), log=log, OMP_NUM_THREADS="1"))
    registry = Registry()

    def step() -> int:
        run = registry.find_run("elastic")
        return (run.progress.get("step") or 0) if run else 0

    def serving() -> dict[str, str]:
        """Name → URL of those that hold the policy."""
        return {server.name: server.url for server in read_serving(folder) if server.version is not None}

    def ended(url: str) -> bool:
        return any(row.url == url and row.ended_at is not None for row in registry.list_servers(run.id))

    wait_for(lambda: step() >= 2 or started[0].poll() is not None, "two steps", PATIENCE_S)
    assert started[0].poll() is None, log.read_text()[-5000:]
    run = registry.get_run("elastic")
    folder = Path(str(run.output_dir))
    first = serving()
    assert sorted(first) == ["student-0", "student-1"] and len(registry.list_leases("port", run_id=run.id)) == 2

    # Killed while it generates: the other goes on, a new one comes.
    victim = next(row for row in registry.list_servers(run.id) if row.name == "student-1")
    os.kill(int(str(victim.pid)), signal.SIGKILL)
    before = step()
    wait_for(lambda: "student-1" not in [server.name for server in read_servers(folder)], "it is off the list", 60)
    wait_for(lambda: step() >= before + 2, "steps on the server that is left", PATIENCE_S)
    wait_for(
        lambda: serving().get("student-1") not in (None, first["student-1"]), "its replacement has the weights", PATIENCE_S
    )
    assert ended(first["student-1"]) and not ended(first["student-0"])
    shown = command("servers", "list", "elastic")
    assert shown.count(" up ") == 2 and first["student-0"] in shown, shown

    # Taken away, then added, from another process.
    assert "student-0: taken away" in command("servers", "remove", "elastic", "--url", first["student-0"])
    wait_for(lambda: ended(first["student-0"]), "it is ended", 120)
    wait_for(lambda: len(registry.list_leases("port", run_id=run.id)) == 1, "its port is free", 60)
    assert "student-2: being started" in command("servers", "add", "elastic")
    wait_for(lambda: "student-2" in serving() or started[0].poll() is not None, "the added one has the weights", PATIENCE_S)
    assert sorted(serving()) == ["student-1", "student-2"]

    finish.touch()
    assert started[0].wait(PATIENCE_S) == 0, log.read_text()[-5000:]
    done = registry.get_run("elastic")
    checkpoint = Path(done.stages["train"]["checkpoint"])
    assert ledger(checkpoint) == {"trained": PROMPTS, "dropped": {}, "step": PROMPTS // 2}
    (attempt,) = registry.list_attempts(run.id)
    assert attempt.status == "FINISHED"
    rows = registry.list_servers(run.id)
    assert [row.name for row in rows] == ["student-0", "student-1", "student-1", "student-2"]
    assert all(row.ended_at is not None for row in rows) and rows[1].exit == "killed by SIGKILL"
    text = log.read_text()
    assert "vLLM server student-1 died: killed by SIGKILL" in text and "2 replacements are left" in text
    assert registry.list_leases() == []
    wait_for(lambda: processes(home) == [], "no process is left", 60)
