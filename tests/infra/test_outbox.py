"""The journal on disk and the rule of what may be sent; no MLflow, no threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from infra.outbox import Held, Outbox, OutboxInUse, Point, leftover


def metrics(step: int, **values: float) -> dict[str, Any]:
    return {"kind": "metrics", "step": step, "time_ms": step * 1000, "values": values}


def commit(step: int) -> dict[str, Any]:
    return {"kind": "commit", "step": step, "checkpoint": None}


def start(resume_step: int | None) -> dict[str, Any]:
    return {"kind": "start", "resume_step": resume_step}


def end(status: str) -> dict[str, Any]:
    return {"kind": "end", "status": status}


def released(held: Held, *records: dict[str, Any]) -> list[tuple[str, int, float]]:
    """(name, step, value) of the points that `records`, 10 bytes each, release."""
    items = [item for number, record in enumerate(records) for item in held.feed(record, number * 10)]
    return [(item.name, item.step, item.value) for item in items if isinstance(item, Point)]


def test_values_are_held_until_their_step_is_committed() -> None:
    held = Held()
    assert released(held, start(0), metrics(1, a=1.0), metrics(2, a=2.0), metrics(3, a=3.0)) == []
    assert released(held, commit(2)) == [("a", 1, 1.0), ("a", 2, 2.0)]
    assert released(held, commit(2)) == []
    assert released(held, commit(3)) == [("a", 3, 3.0)]


def test_values_of_one_step_may_come_in_pieces_and_the_later_value_counts() -> None:
    held = Held()
    assert released(held, metrics(1, a=1.0, b=5.0), metrics(1, a=2.0), metrics(0, c=7.0), commit(1)) == [
        ("c", 0, 7.0),
        ("a", 1, 2.0),
        ("b", 1, 5.0),
    ]


def test_a_resume_supersedes_the_steps_after_the_checkpoint_and_commits_the_others() -> None:
    # Killed after the checkpoint of step 2 was whole, before its commit was written.
    held = Held()
    assert released(held, metrics(1, a=1.0), metrics(2, a=2.0), metrics(3, a=3.0)) == []
    assert held.feed(start(2), 40) == [Point("a", 1.0, 1, 1000), Point("a", 2.0, 2, 2000), {**start(2), "superseded": [3]}]
    assert released(held, metrics(3, a=30.0), commit(3)) == [("a", 3, 30.0)]


def test_a_start_from_the_beginning_supersedes_everything_held_step_0_included() -> None:
    held = Held()
    assert released(held, metrics(0, a=1.0), metrics(1, a=1.0)) == []
    assert held.feed(start(0), 20) == [{**start(0), "superseded": [0, 1]}]
    assert released(held, metrics(0, a=2.0), commit(0)) == [("a", 0, 2.0)]


def test_an_attempt_that_failed_before_it_trained_supersedes_nothing() -> None:
    held = Held()
    assert released(held, metrics(4, a=1.0), metrics(5, a=1.0), start(None), end("FAILED")) == []
    assert released(held, start(4), metrics(5, a=2.0), end("FINISHED")) == [("a", 4, 1.0), ("a", 5, 2.0)]


def test_finishing_commits_the_rest_failing_keeps_it_held() -> None:
    held = Held()
    assert released(held, metrics(1, a=1.0), end("FINISHED")) == [("a", 1, 1.0)]
    (record,) = [*held.feed(metrics(2, a=2.0), 20), *held.feed(end("FAILED"), 30)]
    assert isinstance(record, dict)
    assert record["uncommitted"] == [{"name": "a", "value": 2.0, "step": 2, "time_ms": 2000}]
    assert held.needed_from(40) == 20
    assert released(held, start(1), metrics(2, a=22.0), commit(2)) == [("a", 2, 22.0)]


def test_tags_and_system_metrics_are_ready_at_once_and_rollouts_are_held() -> None:
    held = Held()
    tags = {"kind": "tags", "tags": {"a": "b"}}
    assert held.feed(tags, 0) == [tags]
    system = {"kind": "system", "step": 9, "time_ms": 1, "values": {"system/x": 2.0}}
    assert held.feed(system, 10) == [Point("system/x", 2.0, 9, 1)]
    rollouts = {"kind": "rollouts", "step": 4, "rows": [{"reward": 1}]}
    assert held.feed(rollouts, 20) == []
    traces = [{"kind": "trace", "step": 4, "trace": {"id": name}} for name in "ab"]
    assert [held.feed(trace, 25) for trace in traces] == [[], []]
    assert held.needed_from(30) == 20
    assert held.feed(commit(4), 30) == [rollouts, *traces, commit(4)]
    assert held.needed_from(40) == 40


def test_traces_alone_are_held_released_and_superseded_like_metrics() -> None:
    held = Held()
    traces = [{"kind": "trace", "step": step, "trace": {"id": step}} for step in (1, 2)]
    assert [held.feed(trace, 10 * trace["step"]) for trace in traces] == [[], []]
    assert held.needed_from(30) == 10
    assert held.feed(start(1), 30) == [traces[0], {**start(1), "superseded": []}]
    assert held.feed(commit(2), 40) == [commit(2)]


def test_nothing_behind_a_held_record_counts_as_done() -> None:
    held = Held()
    held.feed(commit(0), 0)
    assert held.needed_from(10) == 10
    held.feed(metrics(1, a=1.0), 10)
    held.feed(metrics(2, a=1.0), 20)
    assert held.needed_from(30) == 10
    held.feed(commit(1), 30)
    assert held.needed_from(40) == 10  # step 2 is still held; reading step 1 again does no harm
    held.feed(commit(2), 40)
    assert held.needed_from(50) == 50


def test_records_come_back_in_order_with_their_offsets(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "t")
    records = [{"kind": "tags", "n": n, "text": "ü\n" * n} for n in range(5)]
    for record in records:
        outbox.append(record)
    read = outbox.read(0)
    assert [record for record, _ in read] == records
    assert read[-1][1] == outbox.size
    assert outbox.read(read[2][1]) == read[3:]
    assert outbox.read(outbox.size) == []
    outbox.close()


def test_a_record_longer_than_a_read_comes_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.outbox.READ_BYTES", 64)
    outbox = Outbox(tmp_path)
    outbox.append({"kind": "tags", "text": "x" * 1000})
    outbox.append({"kind": "tags", "text": "y"})
    first, end = outbox.read(0)[0]
    assert first["text"] == "x" * 1000
    assert [record["text"] for record, _ in outbox.read(end)] == ["y"]
    outbox.close()


def test_values_that_json_does_not_know_come_back(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    outbox.append(metrics(1, a=float("nan"), b=float("inf")))
    values = outbox.read(0)[0][0]["values"]
    assert str(values["a"]) == "nan" and values["b"] == float("inf")
    outbox.append({"kind": "tags", "text": "lone surrogate \ud800"})
    assert len(outbox.read(0)) == 2
    outbox.close()


def test_a_line_torn_by_a_kill_is_skipped_and_harms_no_other(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    outbox.append(commit(1))
    outbox.close()
    with outbox.path.open("ab") as file:
        file.write(b'{"kind": "metr')
    outbox = Outbox(tmp_path)
    outbox.append(commit(2))
    assert [record for record, _ in outbox.read(0)] == [commit(1), {"kind": "torn"}, commit(2)]
    assert Held().feed({"kind": "torn"}, 0) == []
    outbox.close()


def test_a_file_that_was_sent_whole_is_emptied_at_the_next_open(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    outbox.append(commit(1))
    outbox.append(commit(2))
    first = outbox.read(0)[0][1]
    outbox.save_state(offset=first, run_id="abc")
    outbox.close()

    outbox = Outbox(tmp_path)
    assert outbox.state["run_id"] == "abc"
    assert [record for record, _ in outbox.read(outbox.offset)] == [commit(2)]
    outbox.save_state(offset=outbox.size)
    outbox.close()

    outbox = Outbox(tmp_path)
    assert (outbox.offset, outbox.size, outbox.path.stat().st_size) == (0, 0, 0)
    outbox.close()
    # Killed after emptying the file, before the offset was written.
    outbox.save_state(offset=500)
    outbox = Outbox(tmp_path)
    assert outbox.offset == 0
    outbox.close()


def test_a_full_disk_loses_nothing_once_it_has_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    outbox = Outbox(tmp_path)
    outbox.append(commit(1))
    real = os.write
    full = True

    def write(descriptor: int, data: bytes) -> int:
        if full and len(data) < 10:
            raise OSError(28, "No space left on device")
        return real(descriptor, data[: len(data) // 2] if full else data)

    monkeypatch.setattr(os, "write", write)
    outbox.append(commit(2))
    outbox.append(commit(3))
    assert [record for record, _ in outbox.read(0)] == [commit(1)]
    assert caplog.text.count("cannot write") == 1
    full = False
    outbox.append(commit(4))
    assert [record["step"] for record, _ in outbox.read(0)] == [1, 2, 3, 4]
    outbox.close()


def test_what_comes_after_the_end_is_dropped_and_hits_no_other_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    outbox = Outbox(tmp_path / "t")
    outbox.append(commit(1))
    outbox.close()
    others = [(tmp_path / str(n)).open("w+") for n in range(4)]  # these take the closed numbers
    outbox.append(commit(2))
    assert "after the end" in caplog.text
    assert [(tmp_path / str(n)).stat().st_size for n in range(4)] == [0] * 4
    assert outbox.path.read_text().count("commit") == 1
    for other in others:
        other.close()


def test_one_process_at_a_time_has_it_open(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from infra.outbox import Outbox\n"
        "outbox = Outbox(Path(sys.argv[1])); print('open', flush=True); time.sleep(600)"
    )
    child = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline() == b"open\n"
        with pytest.raises(OutboxInUse, match=str(tmp_path)):
            Outbox(tmp_path, lock_timeout_s=0.2)
    finally:
        child.kill()
        child.wait()
        child.stdout and child.stdout.close()
    Outbox(tmp_path, lock_timeout_s=0.2).close()  # a kill frees it


def test_the_state_is_replaced_whole(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    outbox.save_state(run_id="a")
    outbox.save_state(uri="b")
    assert json.loads((tmp_path / "state.json").read_text()) == {"offset": 0, "drained": 0, "run_id": "a", "uri": "b"}
    assert not (tmp_path / "state.json.tmp").exists()
    outbox.close()


def steps_of(outbox: Outbox, offset: int) -> list[int]:
    """Of all records from `offset` on."""
    found: list[int] = []
    while records := outbox.read(offset):
        found += [record["step"] for record, _ in records]
        offset = records[-1][1]
    return found


def test_what_was_sent_is_dropped_in_mid_run_and_offsets_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.outbox.COMPACT_BYTES", 2000)
    outbox = Outbox(tmp_path)
    sent = largest = 0
    for step in range(1000):
        outbox.append(commit(step))
        if step % 10 == 9:  # all but the newest five are sent
            sent = outbox.read(sent)[4 if sent == 0 else 9][1]
            outbox.save_state(offset=sent)
            outbox.compact()
        largest = max(largest, outbox.path.stat().st_size)
    assert largest < 3500 < outbox.size
    assert steps_of(outbox, outbox.offset) == [995, 996, 997, 998, 999]
    outbox.close()
    again = Outbox(tmp_path)  # after a kill, too, the state's offset means the same record
    again.append(commit(1000))
    assert (again.offset, steps_of(again, again.offset)) == (sent, [*range(995, 1001)])
    again.save_state(offset=again.size)
    monkeypatch.setattr("infra.outbox.COMPACT_BYTES", 1)
    again.compact()
    assert again.path.stat().st_size < 64 and steps_of(again, again.offset) == []
    again.append(commit(1001))
    assert steps_of(again, again.offset) == [1001]
    again.close()


def test_killed_while_it_makes_the_file_shorter_the_old_one_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.outbox.COMPACT_BYTES", 100)
    outbox = Outbox(tmp_path)
    for step in range(50):
        outbox.append(commit(step))
    sent = outbox.read(0)[39][1]
    outbox.save_state(offset=sent)

    def no_rename(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "replace", no_rename)
        outbox.compact()
    assert steps_of(outbox, outbox.offset) == [*range(40, 50)]
    assert not outbox.path.with_name("outbox.jsonl.tmp").exists()
    outbox.close()
    outbox.path.with_name("outbox.jsonl.tmp").write_bytes(b'{"kind": "head", "begins_at": 7')
    outbox = Outbox(tmp_path)
    outbox.compact()
    assert (outbox.offset, steps_of(outbox, sent)) == (sent, [*range(40, 50)])
    outbox.close()


def test_records_appended_meanwhile_are_all_there_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.outbox.COMPACT_BYTES", 500)
    outbox = Outbox(tmp_path)
    writer = threading.Thread(target=lambda: [outbox.append(commit(step)) for step in range(1000)])
    writer.start()
    seen: list[int] = []
    while writer.is_alive() or outbox.offset < outbox.size:
        for record, end in outbox.read(outbox.offset)[:50]:
            seen.append(record["step"])
            outbox.state["offset"] = end
        outbox.compact()
    writer.join()
    assert seen == list(range(1000)) and outbox.path.stat().st_size < 3000
    outbox.close()


def test_leftover_is_what_no_sender_got_to(tmp_path: Path) -> None:
    assert not leftover(tmp_path / "nothing")
    outbox = Outbox(tmp_path)
    assert not leftover(tmp_path)
    outbox.append(metrics(1, a=1.0))
    assert leftover(tmp_path)
    outbox.save_state(drained=outbox.size)  # read, and held for a resume
    assert not leftover(tmp_path)
    outbox.append(commit(1))
    assert leftover(tmp_path)
    outbox.close()
