"""The kill table of docs/operations.md, row by row, on real processes: Prefect, its worker, MLflow, flows, trainers.

Each scene has a run that is killed again and again and one beside it that nobody touches; both end with every step once. The
rows that need a vLLM server are in `test_kills.py`.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import yaml

from flows.reaping import reap_all
from infra.supervisor import descendants
from tests.flows.kill_scenes import PATIENCE_S, Scene, gone, wait_for
from tests.flows.runs_for_real import processes, start

pytestmark = pytest.mark.timeout(2400)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("scene")
    home = folder / "home"
    home.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOOPWRIGHT_HOME", str(home))
        patch.setenv("PREFECT_WORKER_QUERY_SECONDS", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.delenv("PREFECT_API_URL", raising=False)
        scene = Scene(folder, home)
        try:
            scene.up()
            yield scene
        finally:
            scene.down()
        wait_for(lambda: processes(home) == [], "nothing is left of the services", 60)
        assert scene.registry.list_leases() == []


@pytest.fixture(autouse=True)
def paced(scene: Scene) -> Iterator[None]:
    scene.finish.unlink(missing_ok=True)
    yield
    scene.finish.touch()


def test_a_run_goes_on_after_every_kill_of_its_own_processes(scene: Scene) -> None:
    killed, beside = scene.trigger("killed"), scene.trigger("beside")
    wait_for(lambda: scene.step("killed") >= 2 and scene.step("beside") >= 2, "both train")

    # SIGKILL to the trainer: the flow resumes it by its policy.
    os.kill(scene.trainer_pid("killed"), signal.SIGKILL)
    wait_for(lambda: len(scene.attempts("killed")) == 2, "the second attempt")
    assert scene.attempts("killed")[0] == ("FAILED", "infrastructure", "the trainer ended: killed by SIGKILL")
    scene.wait_step("killed")

    # SIGKILL to the flow: what it had started goes with it; the reaper says so, and a worker takes it up again.
    tree, lost = scene.kill_flow("killed"), scene.flow_pid("killed")
    wait_for(lambda: scene.state(killed)["type"] != "RUNNING", "Prefect knows")
    wait_for(lambda: gone(tree), "nothing is left of it")
    reap_all()
    wait_for(lambda: len(scene.attempts("killed")) == 3, "the third attempt")
    assert (
        scene.attempts("killed")[1][:2] == ("FAILED", "infrastructure") and f"process {lost} " in scene.attempts("killed")[1][2]
    )
    scene.wait_step("killed")
    assert scene.state(killed)["type"] == "RUNNING" and scene.run("killed").prefect_flow_run_id == killed

    # Cancelled: KILLED, and nobody takes it up.
    tree = descendants(scene.flow_pid("killed"))
    scene.set_state(killed, "CANCELLING", "Cancelling")
    wait_for(lambda: scene.state(killed)["type"] == "CANCELLED", "Prefect cancels it")
    wait_for(lambda: gone(tree), "nothing is left of it")
    assert "scheduled again" not in reap_all()  # and it ends what a flow that Prefect killed after 30 s had not ended
    assert (scene.run("killed").status, scene.run("killed").cause) == ("KILLED", "cancelled in Prefect")
    assert (scene.run("killed").owner, scene.mlflow_status("killed")) == (None, "KILLED")

    # Retried from Prefect's pages, then SIGTERM to the flow: as after Ctrl-C, it is the user's to go on.
    scene.set_state(killed, "SCHEDULED", "AwaitingRetry")
    wait_for(lambda: len(scene.attempts("killed")) == 4, "the fourth attempt")
    scene.wait_step("killed")
    tree = scene.kill_flow("killed", signal.SIGTERM)
    wait_for(lambda: scene.state(killed)["type"] == "CRASHED", "Prefect sees it crash")
    wait_for(lambda: gone(tree), "nothing is left of it")
    assert (scene.run("killed").status, scene.run("killed").cause) == ("KILLED", "stopped by SIGTERM")
    assert scene.mlflow_status("killed") == "KILLED"
    assert "scheduled again" not in reap_all() and scene.state(killed)["type"] == "CRASHED"

    scene.finish.touch()
    assert start("resume", "killed", log=scene.log).wait(PATIENCE_S) == 0, scene.log.read_text()[-5000:]
    assert [status for status, *_ in scene.attempts("killed")] == ["FAILED", "FAILED", "KILLED", "KILLED", "FINISHED"]
    scene.check_finished("killed")
    wait_for(lambda: scene.state(beside)["type"] not in ("RUNNING", "PENDING", "SCHEDULED"), "the other ends")
    assert (scene.state(beside)["type"], scene.attempts("beside")) == ("COMPLETED", [("FINISHED", None, "")])
    scene.check_finished("beside")


@contextmanager
def own_run(scene: Scene, folder: Path, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """A run of a user's own (`loopwright run`), which no worker's death may touch."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(scene.config(name)))
    own = start("run", "sft", str(path), log=folder / f"{name}.log")
    try:
        yield own
    finally:
        if own.poll() is None:
            own.terminate()
            own.wait(60)


def test_a_run_outlives_its_worker(scene: Scene, tmp_path: Path) -> None:
    lost = scene.trigger("lost")
    with own_run(scene, tmp_path, "own") as own:
        wait_for(lambda: scene.step("lost") >= 2 and scene.step("own") >= 2, "both train")

        # SIGKILL to the worker: its flow runs go with it, another worker comes and takes them up.
        kill_worker(scene)
        reap_all()
        wait_for(lambda: len(scene.attempts("lost")) == 2, "the second attempt")
        scene.wait_step("lost")
        assert scene.state(lost)["type"] == "RUNNING" and scene.attempts("own") == [("RUNNING", None, "")]

        scene.finish.touch()
        wait_for(lambda: scene.state(lost)["type"] != "RUNNING", "the lost run ends")
        assert scene.state(lost)["type"] == "COMPLETED", scene.state(lost)["message"]
        assert own.wait(PATIENCE_S) == 0, (tmp_path / "own.log").read_text()[-5000:]
    assert [row[:2] for row in scene.attempts("lost")] == [("FAILED", "infrastructure"), ("FINISHED", None)]
    assert scene.attempts("own") == [("FINISHED", None, "")]
    scene.check_finished("lost")
    scene.check_finished("own")


@pytest.mark.slow
def test_runs_outlive_worker_and_supervisor_and_the_services(scene: Scene, tmp_path: Path) -> None:
    lost = scene.trigger("lost-twice")
    with own_run(scene, tmp_path, "own-too") as own:
        wait_for(lambda: scene.step("lost-twice") >= 2 and scene.step("own-too") >= 2, "both train")

        # SIGKILL to worker and flow at once, with the supervisor that would have cleaned up after the worker.
        kill_worker(scene, beside=[scene.flow_pid("lost-twice")], supervisor=True)
        reap_all()
        wait_for(lambda: len(scene.attempts("lost-twice")) == 2, "the second attempt")
        scene.wait_step("lost-twice")

        # SIGKILL to the daemon of `loopwright up`: Prefect, MLflow and the worker go, and with it its flow runs; a trainer
        # still saves what it has. Once the services are back, its run goes on.
        tree = descendants(scene.services.pid)
        os.kill(scene.services.pid, signal.SIGKILL)
        wait_for(lambda: gone(tree), "nothing is left of the services")
        scene.wait_step("own-too")
        scene.up()
        reap_all()
        scene.finish.touch()
        wait_for(lambda: scene.state(lost)["type"] not in ("RUNNING", "CRASHED", "SCHEDULED", "PENDING"), "the lost run ends")
        assert scene.state(lost)["type"] == "COMPLETED", scene.state(lost)["message"]
        assert own.wait(PATIENCE_S) == 0, (tmp_path / "own-too.log").read_text()[-5000:]
    assert [row[:2] for row in scene.attempts("lost-twice")] == [("FAILED", "infrastructure")] * 2 + [("FINISHED", None)]
    assert scene.attempts("own-too") == [("FINISHED", None, "")]
    scene.check_finished("lost-twice")
    scene.check_finished("own-too")


def kill_worker(scene: Scene, beside: Sequence[int] = (), supervisor: bool = False) -> None:
    """SIGKILL to the worker, and to others with it; returns when nothing is left of all it had started."""
    (worker,) = processes(scene.home, "prefect worker start")
    tree = [worker, *descendants(worker)]
    parent = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
    for pid in [*([parent] if supervisor else []), worker, *beside]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: gone(tree), "nothing is left of the worker")
