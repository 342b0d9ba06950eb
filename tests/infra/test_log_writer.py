"""What a supervised command prints reaches its log file whole, in order, and without secrets."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import uuid
from pathlib import Path

import pytest

from infra import log_writer, redaction
from infra.log_writer import KEEP, LONGEST, LogWriter
from infra.process import Supervised
from infra.redaction import Redactor, protect_references
from tests.support.waiting import wait_until

SECRETS = ["the-key-of-a-server", "wJalr/XUtnFEMI"]


class Pipe:
    """A log writer with its command's end of the pipe."""

    def __init__(self, path: Path) -> None:
        self.writer = LogWriter(str(path), Redactor({}, SECRETS))
        source, self.end = os.pipe()
        self.writer.start(source)

    def print(self, data: bytes) -> None:
        while data:
            data = data[os.write(self.end, data) :]

    def close(self) -> None:
        os.close(self.end)
        self.writer.join(30)


def written(path: Path, *parts: bytes) -> bytes:
    pipe = Pipe(path)
    for part in parts:
        pipe.print(part)
    pipe.close()
    return path.read_bytes()


def test_a_secret_that_comes_in_two_pieces_is_removed_and_other_bytes_stay_as_they_are(tmp_path: Path) -> None:
    log = tmp_path / "log"
    pipe = Pipe(log)
    pipe.print(b"loading 10%\rloading 20%\r")
    wait_until(lambda: log.read_bytes() == b"loading 10%\rloading 20%\r", what="the progress bar")
    pipe.print(b"\xff\xfe caf\xc3\xa9\nkey: the-key-of")
    wait_until(lambda: b"caf" in log.read_bytes(), what="the whole line")
    assert b"the-key" not in log.read_bytes(), "half a line was written"
    pipe.print(b"-a-server\nno newline at the end: wJalr/XUtnFEMI")
    pipe.close()
    assert log.read_bytes() == (
        b"loading 10%\rloading 20%\r\xff\xfe caf\xc3\xa9\nkey: (removed)\nno newline at the end: (removed)"
    )


def test_a_line_without_end_is_written_piece_by_piece_and_a_secret_on_the_seam_is_removed(tmp_path: Path) -> None:
    secret = SECRETS[0].encode()
    filler = b"x" * (LONGEST + 1 - KEEP - 5)
    # Whatever is read at once, the first piece ends within KEEP bytes of here.
    text = written(tmp_path / "log", filler + secret + b"y" * LONGEST + secret)
    assert text == filler + b"(removed)" + b"y" * LONGEST + b"(removed)"


def test_a_full_disk_loses_lines_says_so_and_does_not_stop_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full, write = True, os.write

    def on_disk(target: int, data: bytes) -> int:
        if full and target == pipe.writer._target:
            raise OSError(28, "No space left on device")
        return write(target, data)

    log = tmp_path / "log"
    pipe = Pipe(log)
    monkeypatch.setattr(log_writer.os, "write", on_disk)
    pipe.print(b"0123456789\n" * 20000)  # more than a pipe holds: it is read meanwhile
    wait_until(lambda: pipe.writer._lost == 220000, what="all of it to be lost")
    full = False
    pipe.print(b"there is room again\n")
    pipe.close()
    assert log.read_text() == "[220000 bytes of this log could not be written]\nthere is room again\n"


def test_what_a_command_and_its_children_print_has_no_secret_of_theirs_or_of_their_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner knows a secret that no variable's name gives away; the command's environment has one of its own."""
    monkeypatch.setattr(redaction, "_protected", set())
    monkeypatch.setenv("JUDGE", "judge-of-the-reward")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "owner/secret/key")
    protect_references({"reward_funcs": [{"kwargs": {"judge": "${oc.env:JUDGE}"}}]})
    code = """
        import os, subprocess, sys
        print("started with", os.environ["VLLM_API_KEY"], os.environ["JUDGE"])
        print("GET http://bucket/x?X-Amz-Signature=abcdef0123&part=1 and s3://me:hidden@host/", file=sys.stderr)
        subprocess.run([sys.executable, "-S", "-c", "import sys; print('child:', sys.argv[1])", "owner/secret/key"])
        raise ValueError(f"refused: {os.environ['VLLM_API_KEY']}")
    """
    environment = {"VLLM_API_KEY": "random-key-of-a-run", "JUDGE": "judge-of-the-reward", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-S", "-c", textwrap.dedent(code)]
    process = Supervised.start(command, environment, tmp_path / "log", f"test-{uuid.uuid4().hex}")
    assert process.wait(60) == 1
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[:3] == [
        "started with (removed) (removed)",
        "GET http://bucket/x?X-Amz-Signature=(removed)&part=1 and s3://(removed)@host/",
        "child: (removed)",
    ]
    assert lines[-1] == "ValueError: refused: (removed)"


def test_the_owners_secrets_are_on_no_command_line_and_in_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "token-of-the-owner")
    process = Supervised.start(
        [sys.executable, "-S", "-c", "print('up', flush=True); import time; time.sleep(600)"],
        {},
        tmp_path / "log",
        f"test-{uuid.uuid4().hex}",
    )
    try:
        wait_until(lambda: process.log_tail() == "up")
        for pid in (process.pid, process.supervisor_pid):
            for what in ("cmdline", "environ"):
                assert b"token-of-the-owner" not in Path(f"/proc/{pid}/{what}").read_bytes()
        assert all("token-of-the-owner" not in path.read_text() for path in tmp_path.iterdir())
        assert json.loads(process.status_path.read_text())["pid"] == process.pid
    finally:
        process.stop(1.0)


def test_a_log_that_cannot_be_opened_is_told_before_anything_is_started(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        Supervised.start(["/bin/touch", str(tmp_path / "ran")], None, tmp_path / "log", "test-no-log")
    assert not (tmp_path / "ran").exists()
