"""The tracker against a fake MLflow: outages, lost answers, refusals, resumes. The real one: `test_tracking_mlflow.py`."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from infra.rollout_table import MAX_ROWS_PER_STEP, MAX_TEXT_CHARS, RolloutTable, bounded_rows, evenly
from infra.tracking import Tracker, end_run, flush_outbox, register_model
from tests.infra.fake_tracking import FakeMlflow


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


@pytest.mark.parametrize("seed", range(25))
def test_any_order_of_kills_and_outages_gives_one_value_per_step_of_the_newest_attempt(
    server: FakeMlflow, tmp_path: Path, seed: int
) -> None:
    dice = random.Random(seed)
    truth: dict[int, float] = {}
    checkpoint, attempt = 0, 0
    while checkpoint < 30:
        attempt += 1
        server.down = dice.random() < 0.3
        server.fail_after = [dice.random() < 0.2 for _ in range(10)]
        tracker = tracker_of(server, tmp_path)
        tracker.start({"a": 1}, resume_step=checkpoint)
        for step in range(checkpoint + 1, checkpoint + 1 + dice.randint(1, 12)):
            truth[step] = attempt * 1000.0 + step
            tracker.log(step, {"loss": truth[step]})
            if step % 4 == 0:
                checkpoint = step
                if dice.random() < 0.8:  # else killed between the checkpoint and its commit
                    tracker.commit(step)
                    server.down = dice.random() < 0.3
        server.down = server.down or dice.random() < 0.5
        tracker.close(None, timeout_s=0.0)  # as far as the journal goes, the same as a kill
    server.down, server.fail_after = False, []
    assert flush_outbox(tmp_path, backend=server.connect)
    tracker = tracker_of(server, tmp_path)
    tracker.start({}, resume_step=checkpoint)
    assert tracker.close("FINISHED")
    assert sorted(server.curve("loss")) == [(step, truth[step]) for step in range(1, checkpoint + 1)]
    assert server.runs == ["run0"]


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


def test_the_table_is_bounded_and_spans_the_run(tmp_path: Path) -> None:
    rows = bounded_rows(evenly([{"completion": "x" * 5000, "n": n} for n in range(1000)]))
    assert len(rows) <= MAX_ROWS_PER_STEP and rows[0]["n"] == 0 and rows[-1]["n"] > 900
    assert len(rows[0]["completion"]) < MAX_TEXT_CHARS + 30
    assert bounded_rows([{"n": 1}]) == [{"n": 1}]
    table = RolloutTable(tmp_path / "rollouts.json", max_rows=40)
    for step in range(1, 1001):
        table.put(step, [{"n": step}, {"n": -step}])
        table.put(step, [{"n": step}, {"n": -step}])  # repeated: no change
    table.save()
    kept = sorted({row[0] for row in json.loads((tmp_path / "rollouts.json").read_text())["data"]})
    assert len(kept) <= 20 and kept[-1] == 1000 and kept[0] < 250
    again = RolloutTable(tmp_path / "rollouts.json", max_rows=40)
    again.drop_after(500)
    again.save()
    assert {row[0] for row in json.loads((tmp_path / "rollouts.json").read_text())["data"]} == {
        step for step in kept if step <= 500
    }


def test_importing_tracking_imports_neither_torch_nor_mlflow() -> None:
    script = "import sys, infra.tracking; sys.exit(len({'torch', 'mlflow', 'transformers', 'sqlalchemy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
