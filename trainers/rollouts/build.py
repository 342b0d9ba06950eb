"""Puts a run's rollout side together: data, tokenizer, source, engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from trainers.algorithms import build_algorithm
from trainers.books.sequences import open_books
from trainers.config import AsyncTrainerConfig, SFTConfig, TrainerConfig
from trainers.data import PromptBuilder, Rows, as_data, check_columns, load_data, load_tokenizer
from trainers.metrics import MetricBag
from trainers.recorded import RecordedRows, recorded_rows
from trainers.rollouts.engine import StepEngine
from trainers.rollouts.parts import Parts, loop_class, without_torch
from trainers.rollouts.payload import Payload
from trainers.rollouts.pool import ServerPool
from trainers.rollouts.protocol import SamplingForm
from trainers.rollouts.snapshot import read_state
from trainers.rollouts.source import RecordedSource, RolloutSource
from trainers.streams import Stream


def concurrency_cap(config: AsyncTrainerConfig, world_size: int) -> int:
    """Most rollouts in flight."""
    if config.max_concurrent_rollouts is not None:
        return config.max_concurrent_rollouts
    per_step = config.per_device_train_batch_size * config.gradient_accumulation_steps * world_size
    return max(config.max_staleness, 1) * per_step


def open_data(
    config: TrainerConfig, payload: Payload, resume_dir: Path | None, say: Callable[[str], None] = lambda text: None
) -> Rows | Stream:
    """The run's data, checked as far as it can be before anything else is waited for; `say` is told how far books are.

    Raises:
        DatasetError: it cannot be read, lacks a column, or is not the one of the checkpoint.
    """
    if isinstance(config, SFTConfig) and config.books is not None:
        with without_torch(config):
            tokenizer = payload.tokenizer or load_tokenizer(config)
        rows = open_books(config.books, config.dataset, tokenizer, config.max_length, given=payload.dataset, say=say)
    else:
        rows = as_data(payload.dataset, "train_dataset") if payload.dataset is not None else load_data(config.dataset)
        check_columns(rows, config)
    fingerprint = rows.fingerprint()
    if resume_dir is not None:
        read_state(resume_dir, rows.source, fingerprint, config.allow_dataset_change, rows.cut_by)
    return rows


async def build_engine(
    config: TrainerConfig,
    payload: Payload,
    *,
    version: int,
    resume_step: int,
    resume_dir: Path | None,
    world_size: int,
    say: Callable[[str], None],
) -> tuple[StepEngine, dict[str, Any]]:
    """An engine with its source opened and its ledger restored, not yet started, and the `SourceInfo` fields.

    Args:
        version, resume_step, resume_dir, world_size: as in `StepSource.start`.
        say: told what is being done. What takes long runs beside the event loop, so that it can be told on.

    Raises:
        DatasetError, ConfigError, ServerError: the data, the model or the server cannot be used.
    """
    say(f"reading the data ({config.dataset.path})")
    rows = await asyncio.to_thread(open_data, config, payload, resume_dir, say)
    say(f"loading the tokenizer of {config.model}")
    metrics = MetricBag()
    threads = concurrency_cap(config, world_size) if isinstance(config, AsyncTrainerConfig) else 0
    parts = Parts(config, payload, metrics, threads)
    await parts.open()
    builder: PromptBuilder | RecordedRows = parts.builder
    algorithm = build_algorithm(config)
    rng = np.random.default_rng([config.seed, resume_step])
    holder: list[StepEngine] = []  # the loop reports progress to the engine, which is built after it

    source: RolloutSource
    if isinstance(config, SFTConfig):
        builder = recorded_rows(parts.tokenizer, config)
        source = RecordedSource(builder, algorithm, config.max_length)
        if not config.packing:
            config = config.model_copy(update={"token_budget": 0, "per_device_train_batch_size": 1})
    else:
        assert isinstance(config, AsyncTrainerConfig), config
        source = loop_class(config, payload)(
            payload.args if payload.args is not None else config,
            settings=config,
            algorithm=algorithm,
            rows=rows,
            tokenizer=parts.tokenizer,
            pool=ServerPool(
                config.server_urls,
                config.vllm_server_timeout,
                concurrency_cap(config, world_size),
                on_retry=lambda cause: metrics.add("rollout/vllm_retry_total", 1),
                # Waiting for a server has a limit of its own.
                on_outage=lambda: holder[0].progress(),
                unreachable_s=config.vllm_server_timeout,
                form=SamplingForm.of(config, algorithm.sampler_needs()),
            ),
            conversations=parts.conversations(config, lambda: holder[0].progress()),
            scorer=parts.scorer(config, rows, lambda: holder[0].progress()),
            metrics=metrics,
            next_seed=lambda: int(rng.integers(0, 2**63 - 1)),
            progress=lambda: holder[0].progress(),
        )
        say(f"waiting for {', '.join(config.server_urls)}, and for setup()")
    try:
        await source.open()
    except BaseException:
        await source.close()  # connections, and environments that were made
        raise
    budget = config.token_budget
    token_budget = source.max_sequence_tokens if budget is None else budget if budget > 0 else None
    engine = StepEngine(
        config,
        algorithm,
        source,
        rows,
        builder,
        token_budget=token_budget,
        max_sequence_tokens=source.max_sequence_tokens,
        version=version,
        resume_step=resume_step,
        world_size=world_size,
        metrics=metrics,
        rng=rng,
    )
    holder.append(engine)
    if resume_dir is not None:
        engine.restore(resume_dir)
    info = {
        "prompts": None if isinstance(rows, Stream) else len(rows),
        "fingerprint": engine.fingerprint,
        "token_budget": token_budget,
        "max_sequence_tokens": source.max_sequence_tokens,
        "vocab_size": len(parts.tokenizer),
    }
    return engine, info
