"""What can be known to be wrong with a distillation run's teachers before anything is started."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from flows.config import DistillationRunConfig
from flows.config_servers import TeacherConfig
from flows.convert import resolve_model
from trainers.errors import ConfigError
from trainers.references import resolve


def check_teachers(config: DistillationRunConfig, check_model: Callable[[str, str], Iterator[str]]) -> Iterator[str]:
    """Each is up and able, or there is what it takes to start it.

    Args:
        check_model: problems with a model, and how to call its field.
    """
    for name, teacher in config.servers.teachers.items():
        field = f"servers.teachers.{name}"
        if teacher.url is not None:
            yield from _check_given(f"{field}.url", teacher, config)
            continue
        yield from check_model(resolve(str(teacher.model)), f"{field}.model")
        python = resolve(teacher.python)
        if python is not None and shutil.which(python) is None:
            yield f"{field}.python: there is no program {python}"
        if teacher.max_model_len is None:
            yield from _check_length(field, teacher, config)


def _check_given(field: str, teacher: TeacherConfig, config: DistillationRunConfig) -> Iterator[str]:
    from flows.named_servers import address_of
    from flows.teacher import needs
    from infra.errors import InfraError
    from infra.vllm import lacking, probe

    try:
        url, key = address_of(str(teacher.url), teacher)
        missing = lacking(probe(url, key), needs(config))
    except InfraError as error:
        yield f"{field}: {str(error).splitlines()[0]}"
        return
    for line in missing:
        yield f"{field}: the teacher at {url} cannot do what this run needs: {line}"


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
