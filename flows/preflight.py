"""What can be known to be wrong before anything is started: model, dataset, functions of the user's, servers given by URL.

Needs no torch. The user's functions are imported here, because an import error in an hour is dearer than one now.
"""

from __future__ import annotations

import functools
import inspect
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.config import DistillationRunConfig, GeneratingRunConfig, GRPORunConfig, RunConfig, SFTRunConfig
from flows.config_file import ConfigErrors
from flows.convert import resolve_model
from flows.preflight_servers import check_student, check_teachers
from trainers.config_parts import CallableSpec, DatasetConfig
from trainers.errors import ConfigError, LoopwrightError
from trainers.references import resolve
from trainers.training_arguments import missing_logger
from trainers.vocabulary import Vocabulary, difference, local_tokenizer, vocabulary_of

LEAST_FREE_BYTES = 64 << 20  # less than that holds no checkpoint of anything, and logs besides


class RewardTypeError(ConfigErrors, TypeError):
    """A reward function is of a kind that cannot reach the rollout process (a lambda)."""


def preflight(config: RunConfig) -> None:
    """Check what the run needs.

    Raises:
        ConfigErrors: one line per problem; it is also a TypeError if a reward function is a lambda.
    """
    lines = [*check_model(resolve(config.model)), *check_storage(config)]
    rewards: dict[str, Callable[..., Any]] = {}
    lambdas = 0
    for name, spec in _reward_specs(config):
        try:
            rewards[name] = load_reward(spec)
        except TypeError as error:
            lambdas += 1
            lines.append(f"{name}: {error}")
        except Exception as error:  # importing runs the user's module: anything may come out of it
            lines.append(f"{name}: {_first_line(error)}")
    training = {name: function for name, function in rewards.items() if name != "eval.reward_func"}
    asks = getattr(config, "environment_factory", None) is not None  # an environment may give the whole prompt
    teachers = config.teachers if isinstance(config, DistillationRunConfig) else ()
    if isinstance(config, SFTRunConfig):
        lines.extend(check_recorded(config))
    else:
        lines.extend(check_dataset("dataset", config.dataset, training, prompts=not asks, teachers=teachers))
    if config.eval is not None:
        scorer = next((name for name in ("eval.reward_func", "reward_funcs.0") if name in rewards), None)
        scorers = {scorer: rewards[scorer]} if scorer else {}
        lines.extend(check_dataset("eval.dataset", config.eval.dataset, scorers))
        if not isinstance(config, GRPORunConfig) and config.eval.reward_func is None:
            kind = "supervised" if config.type == "sft" else config.type
            lines.append(f"eval.reward_func: is required for a {kind} run, which has no reward functions to score with")
    if isinstance(config, GeneratingRunConfig):
        lines.extend(check_conversations(config))
        lines.extend(check_student(config))
    if isinstance(config, DistillationRunConfig):
        lines.extend(check_teachers(config, teacher_check(config.model)))
    lines.extend(check_gpus(config))
    lines.extend(filter(None, map(missing_logger, config.report_to)))
    if lines:
        raise (RewardTypeError if lambdas else ConfigErrors)(lines)


def check_gpus(config: RunConfig) -> Iterator[str]:
    """This machine has as many as the run leases; whether they are free is seen when it leases them."""
    from flows.run_processes import gpus_needed
    from infra.gpus import visible_gpus

    there = len(visible_gpus())
    if (needed := gpus_needed(config, there > 0)) > there:
        yield f"servers, trainer.gpus: the run leases {needed} GPUs, for its trainer and each server; this machine has {there}"


def check_model(model: str, field: str = "model") -> Iterator[str]:
    """A folder with a model, a packaged model (converted now if it was not yet), or a hub id that cache or hub know."""
    try:
        model = resolve_model(model)
    except ConfigError as error:
        yield f"{field}: {error}"
        return
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            yield f"{field}: {model} has no config.json, so it is not a Hugging Face model folder"
        return
    if model.startswith(("/", ".", "~")) or model.count("/") > 1 or folder.exists():
        yield f"{field}: there is no folder {model}"
        return
    from huggingface_hub import hf_hub_download

    try:
        hf_hub_download(model, "config.json")
    except Exception as error:  # offline, unknown, gated: the hub client has many
        yield f"{field}: {model} is neither a folder here nor a model on the Hub that can be reached ({_first_line(error)})"


def teacher_check(student: str) -> Callable[[str, str], Iterator[str]]:
    """As `check_model`, of a teacher that is to be started: it also reads token ids as `student`, a model of a config, does.

    Where the files of either are not on this machine, or its tokenizer needs code of its own, the trainer asks the server.
    """

    @functools.cache
    def vocabulary(model: str) -> Vocabulary | None:
        try:
            folder = Path(resolve_model(model)).expanduser()
        except ConfigError:
            return None  # which `check_model` says
        tokenizer = local_tokenizer(str(folder), trust_remote_code=False)
        return None if tokenizer is None else vocabulary_of(tokenizer)

    def check(model: str, field: str) -> Iterator[str]:
        problems = list(check_model(model, field))
        yield from problems
        if problems or model == resolve(student):
            return
        theirs = vocabulary(model)
        ours = None if theirs is None else vocabulary(resolve(student))
        if ours is not None and theirs is not None and (found := difference(ours, theirs)) is not None:
            yield (
                f"{field}: {model} has another vocabulary than {student}: {found} (the model's first). The student would be "
                "taught other tokens than it sampled: name one with the model's tokenizer"
            )

    return check


def check_recorded(config: SFTRunConfig) -> Iterator[str]:
    """The dataset of a supervised run can be read and has its columns; of books, texts can be found."""
    from trainers.books.texts import open_texts
    from trainers.data import needed_columns

    if config.books is None:
        yield from check_dataset("dataset", config.dataset, {}, needed_columns(config), prompts=False)
    books = {"dataset": config.dataset} if config.books is not None else {}
    if config.long_eval is not None and (held_out := config.long_eval.books) is not None:
        path = DatasetConfig.model_validate({"path": held_out.path, "split": held_out.split})
        books["long_eval.books"] = path
    for name, dataset in books.items():
        try:
            column = config.books.text_column if config.books is not None else "text"
            open_texts(dataset.model_validate(resolve(dataset.model_dump())), column)
        except LoopwrightError as error:
            yield f"{name}: {_first_line(error)}"


def check_dataset(
    name: str,
    dataset: DatasetConfig,
    rewards: Mapping[str, Callable[..., Any]],
    columns_needed: Sequence[str] = (),
    prompts: bool = True,
    teachers: Sequence[str] = (),
) -> Iterator[str]:
    """It can be read, has the columns that the run and its reward functions need, and names one of `teachers` in every row."""
    from trainers.data import load_data, teacher_names
    from trainers.rewards.columns import missing_columns
    from trainers.routing import check_teachers as check_column

    try:
        rows = load_data(dataset.model_validate(resolve(dataset.model_dump())))
    except LoopwrightError as error:
        yield f"{name}: {_first_line(error)}"
        return
    for column in [*[dataset.prompt_column] * prompts, *columns_needed]:
        try:
            rows.require(column)
        except LoopwrightError as error:
            yield f"{name}: {_first_line(error)}"
    try:
        if teachers:
            check_column(rows.source, rows.columns, teacher_names(rows), teachers)
    except LoopwrightError as error:
        yield f"{name}: {_first_line(error)}"
    columns = [column for column in rows.columns if column != dataset.prompt_column]
    for reward, function in rewards.items():
        for column in missing_columns(function, columns):
            yield f"{name}: {rows.source} has no column `{column}`, which {reward} needs; it has: {', '.join(rows.columns)}"


def check_storage(config: RunConfig) -> Iterator[str]:
    """Checkpoints can be written: there is a folder with room for files, and the bucket lets us write and delete."""
    from infra.errors import StorageError

    folder = config.storage.folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        yield f"storage.uri: {folder} cannot be made: {error.strerror}"
        return
    if not os.access(folder, os.W_OK):
        yield f"storage.uri: {folder} cannot be written to"
    if (free := shutil.disk_usage(folder).free) < LEAST_FREE_BYTES:
        yield f"storage.uri: {folder} has {free:,} bytes free: make room, or name a folder on a larger disk"
    if config.storage.remote:
        try:
            config.storage.of_run(str(config.name)).quick_check()
        except StorageError as error:
            yield f"storage.uri: {_first_line(error)}"


def check_conversations(config: GeneratingRunConfig) -> Iterator[str]:
    """Tools, environment and loop class are there. The rollout process looks closer, once it has a tokenizer."""
    from trainers import AsyncRolloutLoop
    from trainers.rewards import load_callable, load_object

    grpo = config if isinstance(config, GRPORunConfig) else None
    for index, spec in enumerate(grpo.tools if grpo else ()):
        try:
            tool = load_callable(spec)
        except Exception as error:  # importing runs the user's module: anything may come out of it
            yield f"tools.{index}: {_first_line(error)}"
            continue
        if not inspect.getdoc(getattr(tool, "func", tool)):  # of a partial, the function's
            yield f"tools.{index}: `{spec.path}` has no docstring: the model is told of a tool what that and its types say"
    for name, spec in (("environment_factory", grpo and grpo.environment_factory), ("loop_cls", config.loop_cls)):
        try:
            found = None if spec is None else load_object(spec.path)
        except Exception as error:
            yield f"{name}: {_first_line(error)}"
            continue
        if spec is None:
            continue
        if not callable(found):
            yield f"{name}: `{spec.path}` is a {type(found).__name__}: name a class or a function"
        elif name == "loop_cls" and not (isinstance(found, type) and issubclass(found, AsyncRolloutLoop)):
            yield f"{name}: `{spec.path}` is no subclass of AsyncRolloutLoop"


def _reward_specs(config: RunConfig) -> Iterator[tuple[str, CallableSpec]]:
    for index, spec in enumerate(config.reward_funcs if isinstance(config, GRPORunConfig) else ()):
        yield f"reward_funcs.{index}", spec
    if config.eval is not None and config.eval.reward_func is not None:
        yield "eval.reward_func", config.eval.reward_func


def load_reward(spec: CallableSpec) -> Callable[..., Any]:
    """The function a spec names.

    Raises:
        TypeError: it is a lambda, which has no name for its metrics and cannot reach another process.
        ConfigError: it cannot be imported or called.
    """
    from trainers.rewards import load_callable, reward_name

    function = load_callable(spec.model_copy(update={"path": resolve(spec.path)}))
    if reward_name(function) == "<lambda>":
        raise TypeError(f"`{spec.path}` is a lambda: write it as a function with `def` in an importable module")
    return function


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
