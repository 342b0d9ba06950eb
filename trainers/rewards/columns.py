"""Which columns of a dataset a reward function needs, told by its signature before anything is generated."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from trainers.errors import DatasetError

GIVEN = ("prompts", "completions", "completion_ids")  # by the engine


def missing_columns(function: Callable[..., Any], columns: Sequence[str]) -> Iterator[str]:
    """Parameters without a default that neither the engine nor the dataset provides.

    Args:
        columns: the dataset's, without that of the prompt, which comes as `prompts`.
    """
    # Alternatives, of which the signature requires none: one group of columns is needed, whole.
    choices: tuple[tuple[str, ...], ...] = getattr(getattr(function, "func", function), "column_choices", ())
    if choices and not any(set(group) <= set(columns) for group in choices):
        yield "` or `".join("` and `".join(group) for group in choices)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # built in C: says nothing of its parameters
        return
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) or parameter.default is not parameter.empty:
            continue
        if parameter.name not in (*GIVEN, *columns):
            yield parameter.name


def require_columns_of(
    functions: Iterable[tuple[str, Callable[..., Any]]], source: str, columns: Sequence[str], prompt: str
) -> None:
    """Raises `DatasetError` where a reward function, given with its name, asks for what would never be given to it.

    Args:
        source, columns: the dataset as messages call it, and all its columns.
        prompt: which of these is the prompt.
    """
    given = [column for column in columns if column != prompt]
    for name, function in functions:
        for column in missing_columns(function, given):
            remedy = f"the prompt comes as `prompts`; {source} has besides" if column == prompt else f"{source} has only"
            raise DatasetError(
                f"reward function `{name}` needs `{column}`: {remedy}: {', '.join(given) or 'nothing'}. Add the column to the "
                "data, give the parameter a default, or bind it with `kwargs` (in a script: functools.partial)"
            )
