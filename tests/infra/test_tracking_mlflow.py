"""Tracking against a real MLflow server: real kills, a real outage, and everything read back through MLflow's own client."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from infra.mlflow_server import MLflowServer, MLflowServerError, healthy
from infra.tracking import Tracker, default_uri, end_run, flush_outbox, register_model
from infra.tracking_mlflow import prepare_environment

prepare_environment()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MLflowServer]:
    server = MLflowServer.start(free_port(), tmp_path_factory.mktemp("home") / "mlflow")
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()
    assert not healthy(server.url)


def history(uri: str, run_id: str, name: str) -> list[tuple[int, float]]:
    from mlflow import MlflowClient

    return [(metric.step, metric.value) for metric in MlflowClient(uri).get_metric_history(run_id, name)]


def train(folder: Path, uri: str, attempt: int, resume: int, last: int, where: str) -> int:
    arguments = [
        sys.executable,
        "-m",
        "tests.infra.killed_trainer",
        str(folder),
        uri,
        *map(str, (attempt, resume, last)),
        where,
    ]
    return subprocess.run(arguments, timeout=200, stderr=subprocess.DEVNULL).returncode


def test_killed_anywhere_and_resumed_there_is_one_value_per_step_of_the_newest_attempt(
    server: MLflowServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    assert train(tmp_path, server.url, 1, 0, 20, "step:7") == -signal.SIGKILL
    assert train(tmp_path, server.url, 2, 5, 20, "checkpoint") == -signal.SIGKILL  # checkpoint 10 is whole, not committed
    assert train(tmp_path, server.url, 3, 10, 15, "sent") == -signal.SIGKILL
    assert end_run(tmp_path, "FAILED", "killed by SIGKILL", "infrastructure", timeout_s=60)
    client = MlflowClient(server.url)
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments() if e.name == "killed"])
    assert (run.info.status, run.data.tags["loopwright.cause"]) == ("FAILED", "killed by SIGKILL")
    assert train(tmp_path, server.url, 4, 15, 20, "never") == 0

    expected = [(step, 1000.0 * (1 + (step - 1) // 5) + step) for step in range(1, 21)]
    assert sorted(history(server.url, run.info.run_id, "loss")) == expected
    assert sorted(history(server.url, run.info.run_id, "reward")) == [(step, 0.5) for step in range(1, 21)]
    (run,) = client.search_runs([run.info.experiment_id])  # one MLflow run for all of it
    assert run.info.status == "FINISHED"
    assert run.data.params == {"attempt_independent": "1"}
    assert run.data.tags["loopwright.attempt"] == "4" and run.data.tags["loopwright.cause"] == ""
    assert len(run.inputs.dataset_inputs) == 1
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)  # `load_table` looks for runs there, whatever its client's address
    table = client.load_table(run.info.experiment_id, "rollouts.json", run_ids=[run.info.run_id])
    assert list(table["completion"]) == [f"attempt {1 + (step - 1) // 5}" for step in range(1, 21)]
    traces = client.search_traces(locations=[run.info.experiment_id], run_id=run.info.run_id)
    told = sorted((int(trace.info.tags["loopwright.step"]), trace.info.response_preview) for trace in traces)
    assert told == [(step, f"attempt {1 + (step - 1) // 5}") for step in range(1, 21)]
    pointers = [file.path for file in client.list_artifacts(run.info.run_id, "checkpoints")]
    # Checkpoint 10 has no commit; the resume from it released its values.
    assert pointers == ["checkpoints/checkpoint-15.json", "checkpoints/checkpoint-20.json", "checkpoints/checkpoint-5.json"]


class Road:
    """A TCP road to a port that can be closed (connections cut, new ones refused) and opened again on the same port."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = free_port()
        self._sockets: list[socket.socket] = []
        self.open()

    def open(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port), reuse_port=False)
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def close(self) -> None:
        for end in (self._listener, *self._sockets):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._sockets.clear()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self.target))
            self._sockets += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pipe, args=(source, sink), daemon=True).start()

    def _pipe(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


def test_mlflow_out_of_reach_at_the_start_in_the_middle_and_at_the_end(server: MLflowServer, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    road = Road(int(server.url.rpartition(":")[2]))
    road.close()
    tracker = Tracker(tmp_path, f"http://127.0.0.1:{road.port}", "outage", "r", system_metrics_s=0.1)
    tracker.start({"a": 1})
    tracker.log(1, {"loss": 1.0})
    tracker.commit(1)
    while tracker._sender.last_error is None:
        assert tracker._sender._thread.is_alive()
        time.sleep(0.05)
    assert tracker.run_id is None
    road.open()
    while not (tracker.run_id and history(server.url, tracker.run_id, "loss")):
        assert tracker._sender._thread.is_alive()
        time.sleep(0.05)
    road.close()
    for step in range(2, 30):
        tracker.log(step, {"loss": float(step), "kl": float("nan")})
    tracker.commit(20)
    assert not tracker.close("FINISHED", timeout_s=0.5)
    assert history(server.url, tracker.run_id, "loss") == [(1, 1.0)]
    road.open()
    assert flush_outbox(tmp_path)
    assert flush_outbox(tmp_path)
    road.close()
    assert sorted(history(server.url, tracker.run_id, "loss")) == [(step, float(step)) for step in range(1, 30)]
    assert len(history(server.url, tracker.run_id, "kl")) == 28
    assert MlflowClient(server.url).get_run(tracker.run_id).info.status == "FINISHED"
    load = history(server.url, tracker.run_id, "system/cpu_utilization_percentage")
    assert len(load) == len({step for step, _ in load}) > 0


def test_a_registered_model_loads_again_with_its_lineage(
    server: MLflowServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow
    from mlflow import MlflowClient

    model = tmp_path / "final"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    (model / "model.safetensors").write_bytes(bytes(range(256)))
    (model / "resume").mkdir()
    (model / "resume" / "optimizer.distcp").write_bytes(b"large")
    (model / "templates").mkdir()
    (model / "templates" / "tools.jinja").write_text("{{ messages }}")
    tracker = Tracker(tmp_path, server.url, "models", "r", system_metrics_s=0)
    tracker.start({"model": "base"})
    tracker.log(1, {"reward": 1.0})
    assert tracker.close("FINISHED")
    lineage = {"base_model": "base", "checkpoint_step": 1}
    assert register_model(tmp_path, model, "team/arith", lineage) == "1"
    assert register_model(tmp_path, model, "team/arith", lineage) == "1"
    version = MlflowClient(server.url).get_model_version("team_arith", "1")
    assert version.run_id == tracker.run_id
    assert {"base_model": "base", "checkpoint_step": "1"}.items() <= version.tags.items()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
    folder = Path(mlflow.artifacts.download_artifacts("models:/team_arith/1", dst_path=str(tmp_path / "down")))
    assert (folder / "model.safetensors").read_bytes() == bytes(range(256))
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    found = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
    assert found == {"config.json", "model.safetensors", "templates/tools.jinja"}  # not what only a resume needs
    stored = list((server.log_path.parent / "artifacts").rglob("model.safetensors"))
    assert len(stored) == 1 and not stored[0].is_symlink()
    assert MlflowClient(server.url).get_run(version.run_id).info.status == "FINISHED"  # registering does not reopen it


def test_without_a_server_the_local_store_is_written_and_a_server_shows_it(
    server: MLflowServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import mlflow
    from mlflow import MlflowClient

    monkeypatch.setenv("LOOPWRIGHT_HOME", str(server.log_path.parent.parent))
    monkeypatch.chdir(tmp_path)
    tracker = Tracker(tmp_path / "run", None, "local", "r", system_metrics_s=0)
    tracker.start({"a": 1}, {"source": str(tmp_path / "d.jsonl"), "digest": "d", "rows": 2})
    tracker.log(1, {"loss": 1.0})
    tracker.log_rollouts(1, [{"completion": "x"}])
    assert tracker.close("FINISHED", timeout_s=60)
    assert json.loads((tmp_path / "run" / "tracking" / "state.json").read_text())["uri"] == default_uri()
    assert capfd.readouterr().out == ""  # stdout is the command's
    assert not (tmp_path / "mlruns").exists()
    run = MlflowClient(server.url).get_run(tracker.run_id or "")
    assert mlflow.data.get_source(run.inputs.dataset_inputs[0].dataset).uri == str(tmp_path / "d.jsonl")  # type: ignore[attr-defined]
    assert history(server.url, run.info.run_id, "loss") == [(1, 1.0)]
    seen = MlflowClient(server.url).list_artifacts(run.info.run_id)
    assert {file.path for file in seen} == {"config.yaml", "rollouts.json"}


def test_a_taken_port_is_told_before_anything_is_started(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(MLflowServerError, match="is taken"):
            MLflowServer.start(taken.getsockname()[1], tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("this is no database, and long enough to tell" * 100)
    server = MLflowServer.start(free_port(), tmp_path)
    try:
        with pytest.raises(MLflowServerError, match=r"ended with code 1; .*server.log ends with:(.|\n)*not a database"):
            server.wait_ready()
    finally:
        server.stop()
