"""What can be known to be wrong with a run's servers, students and teachers, before anything is started."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flows.config import DistillationRunConfig, GeneratingRunConfig
from flows.config_servers import ServerConfig, TeacherConfig
from flows.convert import resolve_model
from trainers.errors import ConfigError
from trainers.references import resolve

if TYPE_CHECKING:
    from infra.vllm import Needs


def check_student(config: GeneratingRunConfig) -> Iterator[str]:
    from flows.student import needs

    student = config.servers.student
    yield from _check_server("server", "servers.student", student, student.urls, needs(config))


def check_teachers(config: DistillationRunConfig, check_model: Callable[[str, str], Iterator[str]]) -> Iterator[str]:
    """Each is up and able, or there is what it takes to start it.

    Args:
        check_model: problems with a teacher's model, and how to call its field.
    """
    from flows.teacher import needs

    for name, teacher in config.servers.teachers.items():
        field = f"servers.teachers.{name}"
        urls = [] if teacher.url is None else [teacher.url]
        if not urls:
            yield from check_model(resolve(str(teacher.model)), f"{field}.model")
        yield from _check_server("teacher", field, teacher, urls, needs(config))
        if not urls and teacher.max_model_len is None:
            yield from _check_length(field, teacher, config)


def _check_server(what: str, field: str, config: ServerConfig, urls: Sequence[str], needs: Needs) -> Iterator[str]:
    """Those at `urls` are up and can do what the run needs; for one that is started, its interpreter is there."""
    from flows.named_servers import address_of
    from infra.errors import InfraError
    from infra.vllm import lacking, probe

    python = resolve(config.python)
    if not urls and python is not None and shutil.which(python) is None:
        yield f"{field}.python: there is no program {python}"
    for given in urls:
        try:
            url, key = address_of(given, config)
            missing = lacking(probe(url, key), needs)
        except InfraError as error:
            yield f"{field}.url: {str(error).splitlines()[0]}"
            continue
        for line in missing:
            yield f"{field}.url: the {what} at {url} cannot do what this run needs: {line}"


def _check_length(field: str, teacher: TeacherConfig, config: DistillationRunConfig) -> Iterator[str]:
    """A teacher that is started without a length of its own has room for one token more than the student."""
    student = config.servers.student
    if student.urls:
        return  # its length is known once it was asked, which the trainer does
    longest = student.max_model_len or _positions(config.model)
    own = _positions(str(teacher.model))
    if longest is not None and own is not None and own <= longest:
        yield (
            f"{field}: its model takes {own} tokens and the student's servers {longest}: a teacher is asked for one token more "
            f"than the longest of them: set servers.student.max_model_len={own - 1} or less"
        )


def _positions(model: str) -> int | None:
    """The longest sequence a model's folder says it takes; None: it does not say, or is not here."""
    try:
        found = json.loads((Path(resolve_model(resolve(model))).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, ConfigError):
        return None
    length = found.get("max_position_embeddings") if isinstance(found, dict) else None
    return length if isinstance(length, int) else None
