"""Kept rollouts as MLflow traces: what the outbox does with them (fake MLflow), and what a real MLflow shows of them."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.mlflow_server import MLflowServer
from infra.tracking import Tracker, flush_outbox
from infra.tracking_mlflow import MlflowBackend, prepare_environment
from tests.infra.fake_tracking import FakeMlflow

prepare_environment()
BEGAN_S = 1_790_000_000.25
BEGAN_NS = 1_790_000_000_250_000_000


def turn(number: int, began_s: float, ended_s: float, text: str, **attributes: Any) -> dict[str, Any]:
    return {
        "name": f"turn {number}",
        "type": "CHAT_MODEL",
        "began_s": began_s,
        "ended_s": ended_s,
        "inputs": {"messages": [{"role": "user", "content": "2+2?"}]},
        "outputs": {"role": "assistant", "content": text},
        "attributes": {
            "prompt_tokens": 10 * number,
            "tokens": 3,
            "finish_reason": "stop",
            "versions": [[0, 3, 7]],
            **attributes,
        },
        "error": False,
    }


def row(prompt: int = 17) -> dict[str, Any]:
    """A rollout of two turns with a tool call that failed between them."""
    tool = {
        "name": "calculator",
        "type": "TOOL",
        "began_s": BEGAN_S + 1.5,
        "ended_s": BEGAN_S + 1.75,
        "inputs": {"expression": "2+"},
        "outputs": "SyntaxError: ü",
        "attributes": {"turn": 1},
        "error": True,
    }
    first = turn(1, BEGAN_S, BEGAN_S + 1.5, "let me see")
    second = turn(2, BEGAN_S + 1.75, BEGAN_S + 4, "4", drift="realign", drift_tokens=2)
    return {
        "epoch": 0,
        "row": prompt,
        "prompt": "2+2?",
        "completion": "let me see\n→ calculator\n4",
        "reward": 1.0,
        "rewards/accuracy": 1.0,
        "advantage": 0.5,
        "realigns": 1,
        "outcome": "kept",
        "trace": {
            "began_s": BEGAN_S,
            "ended_s": BEGAN_S + 4,
            "inputs": {"messages": [{"role": "user", "content": "2+2?"}]},
            "outputs": {"role": "assistant", "content": "4"},
            "spans": [first, tool, second],
            "spans_left_out": 0,
        },
    }


@pytest.fixture(params=["server", "sqlite"], scope="module")
def uri(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home = tmp_path_factory.mktemp("home") / "mlflow"
    if request.param == "sqlite":
        yield f"sqlite:///{home}/mlflow.db"
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = MLflowServer.start(port, home)
    try:
        server.wait_ready()
        yield server.url
    finally:
        server.stop()


def traces_of(uri: str, run_id: str) -> list[Any]:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_run(run_id).info.experiment_id
    return list(client.search_traces(locations=[experiment], run_id=run_id))


def test_mlflow_shows_a_rollout_as_a_trace_of_its_run_once_after_a_replay(uri: str, tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, uri, "traces", "my run", system_metrics_s=0)
    tracker.start({"a": 1})
    tracker.log_rollouts(5, [row()])
    other = Tracker(tmp_path / "other", uri, "traces", "another", system_metrics_s=0)
    other.start({"a": 1})
    other.log_rollouts(1, [row()])
    assert other.close("FINISHED", timeout_s=60) and tracker.close("FINISHED", timeout_s=60)
    run_id = tracker.run_id
    assert run_id is not None
    # As after a kill between the sending and the note of it: every record is sent again, and once more by a third process.
    for _ in range(2):
        state = json.loads((tmp_path / "tracking" / "state.json").read_text())
        (tmp_path / "tracking" / "state.json").write_text(json.dumps({**state, "offset": 0}))
        assert flush_outbox(tmp_path, timeout_s=60)

    (trace,) = traces_of(uri, run_id)
    assert trace.info.state.value == "OK"
    assert (trace.info.request_time, trace.info.execution_duration) == (int(BEGAN_S * 1000), 4000)
    assert trace.info.trace_metadata["mlflow.sourceRun"] == run_id
    assert {
        "loopwright.run": "my run",
        "loopwright.step": "5",
        "loopwright.prompt": "0:17",
        "loopwright.outcome": "kept",
    }.items() <= (trace.info.tags.items())
    assert trace.info.token_usage == {"input_tokens": 30, "output_tokens": 6, "total_tokens": 36}
    spans = {span.name: span for span in trace.data.spans}
    assert len(trace.data.spans) == 4 and set(spans) == {"rollout", "turn 1", "calculator", "turn 2"}
    root = spans["rollout"]
    assert root.parent_id is None and {span.parent_id for span in spans.values()} == {None, root.span_id}
    assert (
        root.attributes.items() >= {"step": 5, "run": "my run", "reward": 1.0, "rewards/accuracy": 1.0, "realigns": 1}.items()
    )
    times = {name: (span.start_time_ns - BEGAN_NS, span.end_time_ns - BEGAN_NS) for name, span in spans.items()}
    seconds = {"rollout": (0, 4), "turn 1": (0, 1.5), "calculator": (1.5, 1.75), "turn 2": (1.75, 4)}
    assert times == {name: (began * 10**9, ended * 10**9) for name, (began, ended) in seconds.items()}
    assert (
        spans["turn 2"].outputs == {"role": "assistant", "content": "4"} and spans["turn 2"].get_attribute("drift") == "realign"
    )
    assert (
        spans["turn 1"].inputs == {"messages": [{"role": "user", "content": "2+2?"}]}
        and spans["turn 1"].span_type == "CHAT_MODEL"
    )
    assert spans["turn 1"].get_attribute("versions") == [[0, 3, 7]]
    tool = spans["calculator"]
    assert (tool.span_type, tool.inputs, tool.outputs) == ("TOOL", {"expression": "2+"}, "SyntaxError: ü")
    assert (tool.status.status_code.value, spans["turn 1"].status.status_code.value) == ("ERROR", "OK")


def test_traces_are_found_by_their_tags(uri: str, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    tracker = Tracker(tmp_path, uri, "tags", "r", system_metrics_s=0)
    tracker.start({})
    for step in (1, 2):
        tracker.log_rollouts(step, [row(prompt) for prompt in range(3)])
    assert tracker.close("FINISHED", timeout_s=60)
    client = MlflowClient(uri)
    experiment = client.get_run(tracker.run_id or "").info.experiment_id
    found = client.search_traces(locations=[experiment], filter_string="tags.`loopwright.step` = '2'")
    assert sorted(trace.info.tags["loopwright.prompt"] for trace in found) == ["0:0", "0:1", "0:2"]


def test_long_tags_are_no_trouble_and_an_experiment_that_is_gone_is_tried_again(uri: str, tmp_path: Path) -> None:
    from infra.rollout_traces import trace_record
    from infra.tracking_mlflow import Rejected

    backend = MlflowBackend(uri, "experiment")
    run = backend.open_run(None, "key", 1, {})
    trace = trace_record(row(), "r", 1)
    trace["attributes"]["run"] = "x" * 20_000  # longer than a tag may be: MLflow cuts it
    backend.log_trace(run, trace)
    assert len(traces_of(uri, run)) == 1
    backend._experiment_ids[run] = "123456789"  # there is none
    with pytest.raises(Exception) as failure:
        backend.log_trace(run, trace_record(row(), "r", 1))
    assert not isinstance(failure.value, Rejected)  # it may be restored: tried again


# The outbox, against a fake ------------------------------------------------------------------------------------------------


def tracker_of(server: FakeMlflow, folder: Path) -> Tracker:
    return Tracker(folder, "http://fake", "exp", "r1", system_metrics_s=0, backend=server.connect)


def prompts(server: FakeMlflow) -> list[tuple[int, int]]:
    return [(trace["attributes"]["step"], trace["attributes"]["row"]) for trace in server.traces.values()]


def test_traces_wait_for_the_commit_and_those_of_steps_trained_again_never_arrive(tmp_path: Path) -> None:
    server = FakeMlflow()
    tracker = tracker_of(server, tmp_path)
    tracker.start({})
    for step in (1, 2, 3):
        tracker.log_rollouts(step, [row(step)])
    tracker.commit(2)
    tracker.close("FAILED")
    assert prompts(server) == [(1, 1), (2, 2)]
    tracker = tracker_of(server, tmp_path)
    tracker.start({}, resume_step=2)
    tracker.log_rollouts(3, [row(33)])
    tracker.close("FINISHED")
    assert prompts(server) == [(1, 1), (2, 2), (3, 33)]
    columns = server.artifacts["rollouts.json"]["columns"]
    assert [cells[columns.index("row")] for cells in server.artifacts["rollouts.json"]["data"]] == [1, 2, 33]
    assert "trace" not in columns


def test_a_trace_whose_answer_was_lost_is_sent_again_under_its_id(tmp_path: Path) -> None:
    server = FakeMlflow()
    tracker = tracker_of(server, tmp_path)
    tracker.start({})
    server.fail_after = [False, True, False, True]
    tracker.log_rollouts(1, [row(1), row(2)])
    tracker.commit(1)
    assert tracker.close("FINISHED")
    assert sorted(prompts(server)) == [(1, 1), (1, 2)]


def test_after_an_outage_traces_arrive(tmp_path: Path) -> None:
    server = FakeMlflow()
    server.down = True
    tracker = tracker_of(server, tmp_path)
    tracker.start({})
    tracker.log_rollouts(1, [row(1)])
    tracker.commit(1)
    assert not tracker.close("FINISHED", timeout_s=0.0)
    server.down = False
    assert flush_outbox(tmp_path, backend=server.connect)
    assert prompts(server) == [(1, 1)] and not (tmp_path / "tracking" / "rejected.jsonl").exists()


def test_a_server_that_fails_at_traces_alone_gets_everything_else(tmp_path: Path) -> None:
    server = FakeMlflow()
    server.refuse_traces = True
    tracker = tracker_of(server, tmp_path)
    tracker.start({})
    tracker.log_rollouts(1, [row(1)])
    tracker.commit(1)
    tracker.log(2, {"loss": 2.0})
    assert tracker.close("FINISHED", timeout_s=30)
    assert server.curve("loss") == [(2, 2.0)] and server.statuses[-1] == "FINISHED" and server.traces == {}
    (rejected,) = [json.loads(line) for line in (tmp_path / "tracking" / "rejected.jsonl").read_text().splitlines()]
    assert "500 Internal Server Error" in rejected["error"] and rejected["record"]["trace"]["attributes"]["row"] == 1


def test_many_rows_of_a_step_are_an_even_choice_with_their_traces(tmp_path: Path) -> None:
    server = FakeMlflow()
    tracker = tracker_of(server, tmp_path)
    tracker.start({})
    tracker.log_rollouts(1, [row(n) for n in range(200)])
    tracker.close("FINISHED")
    kept = [number for _, number in prompts(server)]
    assert kept == list(range(0, 200, 4))
    table = server.artifacts["rollouts.json"]
    assert [cells[table["columns"].index("row")] for cells in table["data"]] == kept
