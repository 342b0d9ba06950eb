"""Whose line an error of the user's functions came from: its place in one line, and its traceback without ours."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

_ENGINE = str(Path(__file__).parent)
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


def _is_users(frame: traceback.FrameSummary) -> bool:
    return not frame.filename.startswith((_ENGINE, *_LIBRARIES, "<"))


def where(error: BaseException) -> str:
    """The last lines of the user's that an error came through, as `file:line in function`; the very last one if none is."""
    frames = [
        frame
        for each in (error, error.__cause__)
        for frame in (traceback.extract_tb(each.__traceback__) if each is not None else ())
        if not frame.filename.startswith(_ENGINE)
    ]
    own = [frame for frame in frames if _is_users(frame)]
    return ", ".join(f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in own[-2:] or frames[-1:])


def user_traceback(error: BaseException) -> str:
    """The traceback from the first line of the user's on; all of it where none is the user's.

    Of an error that we raised because of the user's (`raise ... from`), the user's.
    """
    cause = error.__cause__
    if cause is not None and not any(map(_is_users, traceback.extract_tb(error.__traceback__))):
        error = cause
    told = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = told
    while part is not None:
        first = next((index for index, frame in enumerate(part.stack) if _is_users(frame)), 0)
        part.stack = traceback.StackSummary.from_list(list(part.stack)[first:])
        part = part.__cause__ or part.__context__
    return "".join(told.format()).rstrip()
