"""The tracker against a fake MLflow: outages, lost answers, refusals, resumes. The real one: `test_tracking_mlflow.py`."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.outbox import leftover
from infra.tracking import Tracker, end_run, flush_outbox, register_model
from tests.infra.fake_tracking import FakeMlflow
from tests.support.waiting import wait_until


@pytest.fixture
def server() -> FakeMlflow:
    return FakeMlflow()


def tracker_of(server: FakeMlflow, output_dir: Path, **options: Any) -> Tracker:
    return Tracker(output_dir, "http://fake", "exp", "r1", system_metrics_s=0, backend=server.connect, **options)


def steps(tracker: Tracker, first: int, last: int, value: float = 0.0) -> None:
    for step in range(first, last + 1):
        tracker.log(step, {"loss": value + step})


def test_a_run_from_start_to_end(server: FakeMlflow, tmp_path: Path) -> None:
    seen: list[str] = []
    tracker = tracker_of(server, tmp_path, tags={"team": "a"}, on_run_id=seen.append)
    tracker.start({"model": "m", "optim": {"lr": 0.1}, "hub_token": "s3cret"}, {"source": "x.jsonl", "digest": "d"})
    steps(tracker, 1, 4)
    tracker.commit(2, tmp_path / "checkpoint-2")
    tracker.set_tags({"bottleneck": "balanced"})
    assert tracker.close("FINISHED")
    assert tracker.run_id == "run0" and seen == ["run0"]
    assert server.curve("loss") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert server.params == {"model": "m", "optim.lr": "0.1", "hub_token": "(removed)"}
    assert "s3cret" not in str(server.artifacts) + (tmp_path / "tracking" / "outbox.jsonl").read_text()
    assert server.datasets == [{"source": "x.jsonl", "digest": "d"}]
    assert {
        "team": "a",
        "bottleneck": "balanced",
        "loopwright.attempt": "1",
        "mlflow.runName": "r1",
    }.items() <= server.tags.items()
    assert json.loads(server.artifacts["checkpoints/checkpoint-2.json"])["path"] == str(tmp_path / "checkpoint-2")
    assert server.statuses == ["RUNNING", "FINISHED"]


def test_a_resume_goes_on_in_the_same_run_with_one_value_per_step(server: FakeMlflow, tmp_path: Path) -> None:
    tracker = tracker_of(server, tmp_path)
    tracker.start({"max_steps": 5}, resume_step=0)
    steps(tracker, 1, 3, 100)
    tracker.commit(2)
    assert tracker.close("FAILED", "RuntimeError: boom", "infrastructure")
    assert server.curve("loss") == [(1, 101.0), (2, 102.0)]
    assert server.tags["loopwright.cause"] == "RuntimeError: boom"
    tail = server.artifacts["attempts/1/uncommitted_metrics.jsonl"].splitlines()
    assert [(json.loads(line)["step"], json.loads(line)["value"]) for line in tail] == [(3, 103.0)]

    tracker = tracker_of(server, tmp_path)
    tracker.start({"max_steps": 9}, resume_step=2)
    steps(tracker, 3, 5, 200)
    assert tracker.close("FINISHED")
    assert server.runs == ["run0"]
    assert server.curve("loss") == [(1, 101.0), (2, 102.0), (3, 203.0), (4, 204.0), (5, 205.0)]
    assert server.params == {"max_steps": "5"}  # immutable: the first attempt's
    assert "max_steps: 9" in server.artifacts["attempts/2/config.yaml"]
    assert server.tags["loopwright.attempt"] == "2" and server.tags["loopwright.resume_step"] == "2"
    assert server.tags["loopwright.cause"] == ""
    assert server.statuses[-3:] == ["FAILED", "RUNNING", "FINISHED"]


def test_an_attempt_that_fails_before_training_leaves_values_and_table_alone(server: FakeMlflow, tmp_path: Path) -> None:
    def complain(run_id: str) -> None:
        raise OSError("the registry is out of reach")

    tracker = tracker_of(server, tmp_path, on_run_id=complain)
    tracker.start({}, resume_step=0)
    steps(tracker, 1, 3, 100)
    tracker.log_rollouts(1, [{"completion": "c"}])
    tracker.commit(2)
    tracker.log(2, {"late": 1.0})
    tracker.close("FAILED")
    tracker = tracker_of(server, tmp_path)
    tracker.start({})
    tracker.close("FAILED", "ConfigError: no such file")
    tracker = tracker_of(server, tmp_path)
    tracker.start({}, resume_step=2)
    steps(tracker, 3, 3, 300)
    tracker.close("FINISHED")
    assert server.curve("loss") == [(1, 101.0), (2, 102.0), (3, 303.0)] and server.curve("late") == [(2, 1.0)]
    assert server.artifacts["rollouts.json"]["data"] == [[1, "c"]]
    assert server.tags["loopwright.attempt"] == "3"


def test_falling_back_behind_a_committed_step_keeps_one_value_per_step(server: FakeMlflow, tmp_path: Path) -> None:
    tracker = tracker_of(server, tmp_path)
    tracker.start({})
    steps(tracker, 1, 4, 100)
    tracker.commit(4)
    tracker.close("FAILED")
    tracker = tracker_of(server, tmp_path)
    tracker.start({}, resume_step=2)
    steps(tracker, 3, 6, 200)
    tracker.close("FINISHED")
    assert server.curve("loss") == [(1, 101.0), (2, 102.0), (3, 103.0), (4, 104.0), (5, 205.0), (6, 206.0)]


def test_the_training_thread_never_waits_for_mlflow(server: FakeMlflow, tmp_path: Path) -> None:
    server.gate.clear()  # every request hangs until the gate opens: a call that waited for one would hang here
    tracker = tracker_of(server, tmp_path)
    tracker.start({"a": 1})
    steps(tracker, 1, 500)
    tracker.log_rollouts(1, [{"completion": "c"}])
    tracker.commit(500, tmp_path)
    tracker.set_tags({"x": 1})
    tracker.log_artifact_dir(tmp_path, "folder")
    assert tracker.run_id is None and server.points == []
    server.gate.set()
    assert tracker.close("FINISHED")
    assert server.curve("loss") == [(step, float(step)) for step in range(1, 501)]


def test_down_at_the_start_and_back_later(server: FakeMlflow, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server.down = True
    tracker = tracker_of(server, tmp_path)
    tracker.start({"a": 1})
    steps(tracker, 1, 3)
    server.down = False
    assert tracker.close("FINISHED")
    assert server.runs == ["run0"] and server.params == {"a": "1"}
    assert server.curve("loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_down_in_the_middle_with_lost_answers(server: FakeMlflow, tmp_path: Path) -> None:
    server.fail_after = [True] * 6  # the run, the params, the points: all stored, no answer arrived
    tracker = tracker_of(server, tmp_path)
    tracker.start({"a": 1})
    steps(tracker, 1, 3)
    tracker.commit(3)
    assert tracker.close("FINISHED")
    assert server.fail_after == [], "the test must have lost answers"
    assert server.runs == ["run0"]
    assert server.curve("loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_down_at_the_end_warns_and_leaves_the_rest_for_later(
    server: FakeMlflow, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = tracker_of(server, tmp_path)
    tracker.start({"a": 1})
    steps(tracker, 1, 3)
    server.down = True
    assert not tracker.close("FINISHED", timeout_s=0.0)
    assert "out of reach" in caplog.text and str(tmp_path) in caplog.text
    assert server.curve("loss") == []
    assert not flush_outbox(tmp_path, backend=server.connect, timeout_s=0.0)
    server.down = False
    assert flush_outbox(tmp_path, backend=server.connect)
    assert server.curve("loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert server.statuses[-1] == "FINISHED"
    stored = len(server.points)
    assert flush_outbox(tmp_path, backend=server.connect)
    assert len(server.points) == stored


def test_never_reached_in_the_first_attempt_reached_in_the_second(server: FakeMlflow, tmp_path: Path) -> None:
    server.down = True
    tracker = tracker_of(server, tmp_path)
    tracker.start({"a": 1})
    steps(tracker, 1, 4, 100)
    tracker.commit(2)
    assert not tracker.close("FAILED", timeout_s=0.0)
    server.down = False
    tracker = tracker_of(server, tmp_path)
    tracker.start({"a": 1}, resume_step=2)
    steps(tracker, 3, 5, 200)
    assert tracker.close("FINISHED")
    assert server.runs == ["run0"] and server.params == {"a": "1"}
    assert server.curve("loss") == [(1, 101.0), (2, 102.0), (3, 203.0), (4, 204.0), (5, 205.0)]


STEPS, SAVE_EVERY = 20, 4
FATES = st.fixed_dictionaries(
    {
        "steps": st.integers(1, 12),
        "uncommitted": st.booleans(),  # killed between its last checkpoint and the commit
        "down": st.lists(st.booleans(), min_size=13, max_size=13),  # before the attempt, and after each of its steps
        "lost_answers": st.lists(st.booleans(), max_size=10),
        "disk_full": st.sets(st.integers(1, 12), max_size=3),
        "drains": st.booleans(),  # everything that can be sent is, before the kill
    }
)


@settings(max_examples=40, deadline=None)
@given(attempts=st.lists(FATES, max_size=8))
def test_any_order_of_kills_and_outages_gives_one_value_per_step_of_the_newest_attempt(attempts: list[dict[str, Any]]) -> None:
    server = FakeMlflow()
    truth: dict[int, float] = {}
    checkpoint = 0
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("infra.outbox.COMPACT_BYTES", 400)
        patch.setattr("infra.tracking_sender.STOPPING_RETRY_S", 0.0)
        for number, fate in enumerate(attempts, start=1):
            server.down, server.fail_after = fate["down"][0], list(fate["lost_answers"])
            tracker = tracker_of(server, Path(folder))
            tracker.start({"a": 1}, resume_step=checkpoint)
            for index, step in enumerate(range(checkpoint + 1, min(checkpoint + fate["steps"], STEPS) + 1), start=1):
                truth[step] = number * 1000.0 + step
                is_saved = step % SAVE_EVERY == 0  # by a checkpoint that is whole, so there was room
                with full_disk() if index in fate["disk_full"] and not is_saved else nullcontext():
                    tracker.log(step, {"loss": truth[step]})
                if is_saved:
                    checkpoint = step
                    if not fate["uncommitted"]:
                        tracker.commit(step)
                server.down = fate["down"][index]
            # As far as the journal goes, the same as a kill: what is on the disk stays, nothing more is sent.
            tracker.close(None, timeout_s=0.0 if server.down or not fate["drains"] else 20.0)
        server.down, server.fail_after = False, []
        tracker = tracker_of(server, Path(folder))
        tracker.start({"a": 1}, resume_step=checkpoint)
        for step in range(checkpoint + 1, STEPS + 1):
            truth[step] = step
            tracker.log(step, {"loss": truth[step]})
        assert tracker.close("FINISHED")
        assert sorted(server.curve("loss")) == [(step, truth[step]) for step in range(1, STEPS + 1)]
        assert server.runs == ["run0"] and server.statuses[-1] == "FINISHED"
        stored = len(server.points)
        assert flush_outbox(folder, backend=server.connect) and len(server.points) == stored
        assert not leftover(Path(folder) / "tracking")


@contextmanager
def full_disk() -> Iterator[None]:
    def write(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("infra.outbox.os.write", write)
        yield


def test_the_journal_stays_short_while_the_run_goes_on(
    server: FakeMlflow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.outbox.COMPACT_BYTES", 20_000)
    tracker = tracker_of(server, tmp_path)
    tracker.start({}, resume_step=0)
    journal, written = tmp_path / "tracking" / "outbox.jsonl", 0
    for step in range(1, 101):
        tracker.log(step, {"loss": float(step)})
        trace = {"began_s": 1.0, "ended_s": 2.0, "inputs": "x" * 2000, "outputs": None, "spans": []}
        tracker.log_rollouts(step, [{"completion": "c", "trace": trace}])
        if step % 2 == 0:
            tracker.commit(step)
            wait_until(lambda: tracker._outbox.offset == tracker._outbox.size, what="everything was sent")
    written = tracker._outbox.size
    assert journal.stat().st_size < 50_000 < 200_000 < written
    assert tracker.close("FINISHED")
    assert len(server.traces) == 100 and len(server.curve("loss")) == 100


def test_an_outage_without_end_leaves_out_rollouts_and_no_metric(
    server: FakeMlflow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("infra.tracking.UNSENT_BYTES", 5_000)
    server.down = True
    tracker = tracker_of(server, tmp_path)
    tracker.start({})
    for step in range(1, 101):
        tracker.log(step, {"loss": float(step)})
        tracker.log_rollouts(step, [{"completion": "x" * 500}])
    server.down = False
    assert tracker.close("FINISHED")
    assert len(server.curve("loss")) == 100 and 0 < len(server.artifacts["rollouts.json"]["data"]) < 20
    assert caplog.text.count("rollouts to look at are left out") == 1


def test_what_mlflow_refuses_is_kept_aside_and_takes_nothing_along(
    server: FakeMlflow, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.refuse = lambda point: point.name == "bad name?"
    tracker = tracker_of(server, tmp_path)
    tracker.start({})
    tracker.log(1, {"loss": 1.0, "bad name?": 2.0, "reward": 3.0})
    tracker.log_artifact_dir(tmp_path / "missing")
    assert tracker.close("FINISHED")
    assert server.curve("loss") == [(1, 1.0)] and server.curve("reward") == [(1, 3.0)]
    rejected = [json.loads(line) for line in (tmp_path / "tracking" / "rejected.jsonl").read_text().splitlines()]
    assert len(rejected) == 2
    assert "missing" in rejected[0]["error"]  # artefacts are ready at once, metrics at the commit
    assert rejected[1]["record"]["name"] == "bad name?"


def test_a_metric_that_is_not_in_the_catalog_cannot_be_logged(server: FakeMlflow, tmp_path: Path) -> None:
    from trainers.metrics import spec_of

    tracker = tracker_of(server, tmp_path, check=spec_of)
    tracker.start({})
    with pytest.raises(KeyError, match="perf/surprise"):
        tracker.log(1, {"loss": 1.0, "perf/surprise": 2.0})
    tracker.log(1, {"rewards/accuracy": 1.0})
    tracker.close("FINISHED")
    assert server.curve("rewards/accuracy") == [(1, 1.0)] and server.curve("loss") == []


def test_tags_are_sent_when_they_change(server: FakeMlflow, tmp_path: Path) -> None:
    tracker = tracker_of(server, tmp_path, tags={"bottleneck": "balanced"})
    for value in ("balanced", "balanced", "generation-bound", "generation-bound"):
        tracker.set_tags({"bottleneck": value})
    tracker.close("FINISHED")
    lines = (tmp_path / "tracking" / "outbox.jsonl").read_text().splitlines()
    assert [json.loads(line)["tags"] for line in lines if json.loads(line)["kind"] == "tags"] == [
        {"bottleneck": "generation-bound"}
    ]


def test_a_killed_trainers_run_is_ended_by_another_process(server: FakeMlflow, tmp_path: Path) -> None:
    tracker = tracker_of(server, tmp_path)
    tracker.start({})
    steps(tracker, 1, 2)
    tracker.close(None)
    assert server.statuses == ["RUNNING"]
    assert end_run(tmp_path, "KILLED", "cancelled by the user", backend=server.connect)
    assert server.statuses[-1] == "KILLED" and server.tags["loopwright.cause"] == "cancelled by the user"
    assert "uncommitted" in str(list(server.artifacts))


def test_models_are_registered_once_per_content(server: FakeMlflow, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    server.fail_after = [False, True, True]
    assert register_model(tmp_path, model, "org/name", {"base": "m"}, backend=server.connect) == "1"
    assert register_model(tmp_path, model, "org/name", backend=server.connect) == "1"
    (model / "config.json").write_text('{"a": 1}')
    assert register_model(tmp_path, model, "org/name", backend=server.connect) == "2"
    assert len([name for name in server.artifacts if name.startswith("models/")]) == 2
    server.down = True
    (model / "config.json").write_text('{"a": 22}')
    assert register_model(tmp_path, model, "org/name", backend=server.connect, timeout_s=0.0) is None
    server.down = False
    assert flush_outbox(tmp_path, backend=server.connect)
    assert len(server.versions) == 3


def test_system_metrics_grow_over_attempts(server: FakeMlflow, tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, "http://fake", "exp", "r1", system_metrics_s=0.05, backend=server.connect)
    tracker.start({})
    while not (tmp_path / "tracking" / "outbox.jsonl").read_text().count('"system"'):
        assert tracker._sampler is not None and tracker._sampler._thread.is_alive()
        time.sleep(0.05)
    assert tracker.close("FINISHED")
    cpu = [step for step, _ in server.curve("system/cpu_utilization_percentage")]
    assert cpu and cpu == sorted(set(cpu))


def test_rollouts_make_one_table_that_resumes_with_the_run(server: FakeMlflow, tmp_path: Path) -> None:
    tracker = tracker_of(server, tmp_path)
    tracker.start({})
    for step in (1, 2, 3):
        tracker.log_rollouts(step, [{"prompt": "p", "completion": f"first {step}", "reward": 0.5}])
    tracker.commit(2)
    tracker.close("FAILED")
    table = server.artifacts["rollouts.json"]
    assert table == {
        "columns": ["step", "prompt", "completion", "reward"],
        "data": [[1, "p", "first 1", 0.5], [2, "p", "first 2", 0.5]],
    }
    tracker = tracker_of(server, tmp_path)
    tracker.start({}, resume_step=1)  # behind the commit: a table is a file, so here the newest attempt can win
    tracker.log_rollouts(2, [{"prompt": "p", "completion": "second 2", "reward": None, "extra": [1]}])
    tracker.close("FINISHED")
    table = server.artifacts["rollouts.json"]
    assert table["columns"] == ["step", "prompt", "completion", "reward", "extra"]
    assert table["data"] == [[1, "p", "first 1", 0.5, None], [2, "p", "second 2", None, "[1]"]]


def test_importing_tracking_imports_neither_torch_nor_mlflow() -> None:
    script = "import sys, infra.tracking; sys.exit(len({'torch', 'mlflow', 'transformers', 'sqlalchemy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
