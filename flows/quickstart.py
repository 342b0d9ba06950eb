"""`loopwright quickstart`: a whole experiment in ten minutes on two cores, through the same flows as any other.

    services up ─┐
    task, model ─┴▶ sft-long-context, until held-out accuracy no longer rises ─▶ train-grpo with a server ─▶ table, JSON line

Standard output ends with one JSON object; progress and everything the flows print go to standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from threading import Event, Thread
from typing import Any

import click

from flows.artifacts import duration
from flows.config import GRPORunConfig, RunConfig, SFTRunConfig
from infra.gpus import visible_gpus
from infra.home import home
from infra.registry import Registry
from trainers.errors import LoopwrightError

EXPERIMENT = "quickstart"
REWARD = "trainers.rewards:exact_match_reward"
CLEAR_RISE = 0.15  # what GRPO has to add to the accuracy after SFT
LONGEST_ANSWER = 6  # tokens; three digits and the end of turn are four
WATCH_S = 0.5
LINE_S = 10.0


class QuickstartFailed(LoopwrightError):
    """A part of the quick start did not do what it should."""

    failure_class = "infrastructure"


def sft_config(name: str, task: Path, seed: int) -> SFTRunConfig:
    """Imitate the demonstrations until accuracy has not risen for 100 steps."""
    return SFTRunConfig.model_validate(
        {
            **_common(name, task, seed),
            "model": str(task / "model"),
            "dataset": {"path": str(task / "sft.jsonl")},
            "eval": {**_held_out(task), "every": 50, "patience": 2, "reward_func": REWARD},
            "max_length": 32,
            "max_steps": 500,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant_with_warmup",
            "warmup_steps": 60,
            "logging_steps": 5,
        }
    )


def grpo_config(name: str, task: Path, seed: int, model: str, gpus: int) -> GRPORunConfig:
    """32 prompts × 8 generations a step; the server computes on a GPU if there is one, the trainer on a second one."""
    # Captured graphs would take longer to make than the run lasts.
    extra = ["--enforce-eager", "--gpu-memory-utilization", "0.3"] if gpus else []
    return GRPORunConfig.model_validate(
        {
            **_common(name, task, seed),
            "model": model,
            "dataset": {"path": str(task / "grpo.jsonl")},
            "eval": {**_held_out(task), "every": 10},
            "reward_funcs": [REWARD],
            "num_generations": 8,
            "max_completion_length": LONGEST_ANSWER,
            "max_steps": 40,
            "max_staleness": 2,
            "learning_rate": 3e-4,
            "weight_check_steps": 10,
            "servers": {"student": {"max_model_len": 64, "extra_args": extra}},
            "trainer": {"gpus": 0 if gpus < 2 else None},
        }
    )


def _common(name: str, task: Path, seed: int) -> dict[str, Any]:
    return {
        "name": name,
        "seed": seed,
        "storage": {"uri": str(task / "runs")},
        "tracking": {"experiment": EXPERIMENT},
        "token_budget": 0,  # rows of a fixed number of samples
        "per_device_train_batch_size": 256,
        "gradient_checkpointing": False,
        "save_steps": 1000,  # the run's end only: it is over before a checkpoint would have paid off
    }


def _held_out(task: Path) -> dict[str, Any]:
    return {"dataset": {"path": str(task / "held_out.jsonl")}, "max_completion_length": LONGEST_ANSWER}


def run(seed: int = 0) -> None:
    """The whole quick start; the last line on standard output is its result.

    Raises:
        LoopwrightError: a stage failed, or accuracy did not rise as it should.
    """
    from flows import services

    began = time.monotonic()
    # What flows log still goes to Prefect; on this terminal the lines below say what happens.
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "WARNING")
    ours = services.running() is None
    try:
        result = _run(seed, f"quickstart-{datetime.now():%Y%m%d-%H%M%S}-seed{seed}", began)
    except KeyboardInterrupt:
        if ours and services.stop():
            _say("stopped, the services too")
        raise
    print(json.dumps(result), flush=True)
    gain = result["accuracy_grpo"] - result["accuracy_sft"]
    if gain < CLEAR_RISE:
        raise QuickstartFailed(f"GRPO added {gain:.3f} to the accuracy, less than {CLEAR_RISE}: see its run in MLflow")


def _run(seed: int, name: str, began: float) -> dict[str, Any]:
    from flows import services

    task = home() / "quickstart" / name
    gpus = len(visible_gpus())
    _say(f"services, task and model ({'no GPU' if not gpus else f'{gpus} GPU' + 's' * (gpus > 1)}); files in {task}")
    with _child("flows.quickstart_task", str(task), "--seed", str(seed)):
        services.start()
    addresses = services.running()
    if addresses is None:
        raise QuickstartFailed("the services ended as soon as they were up: see `loopwright up`")
    prefect = os.environ.get("PREFECT_API_URL", addresses.prefect_url).removesuffix("/api")
    _say(f"MLflow {addresses.mlflow_url}  Prefect {prefect}")
    sft = _stage("SFT", sft_config(f"{name}-sft", task, seed))
    grpo = _stage("GRPO", grpo_config(f"{name}-grpo", task, seed, sft["checkpoint"], gpus))
    seconds = time.monotonic() - began
    print(
        f"\nSums of two numbers below 100, {sft['scored']} problems that neither stage has seen\n\n"
        f"  {'model':<22}{'steps':>7}{'accuracy':>11}\n"
        f"  {'random weights':<22}{0:>7}{sft['accuracy_before']:>11.3f}\n"
        f"  {'after SFT':<22}{sft['step']:>7}{sft['accuracy']:>11.3f}\n"
        f"  {'after GRPO':<22}{grpo['step']:>7}{grpo['accuracy']:>11.3f}\n\n"
        f"MLflow   {addresses.mlflow_url}  (experiment {EXPERIMENT})\n"
        f"Prefect  {prefect}\n"
        f"Model    {grpo['checkpoint']}\n"
        f"The services stay up; `loopwright down` stops them. Took {duration(seconds)}.\n",
        flush=True,
    )
    return {
        "accuracy_base": sft["accuracy_before"],
        "accuracy_sft": sft["accuracy"],
        "accuracy_grpo": grpo["accuracy"],
        "steps": grpo["step"],
        "seconds": round(seconds, 1),
        "mlflow_run": grpo["mlflow_run"],
    }


def _stage(title: str, config: RunConfig) -> dict[str, Any]:
    from flows.launch import launch

    with contextlib.redirect_stdout(sys.stderr), _watched(title, str(config.name)):
        result = launch(config)
    _say(f"{title}: accuracy {result['accuracy_before']:.3f} → {result['accuracy']:.3f} in {result['step']} steps")
    return result


@contextlib.contextmanager
def _child(module: str, *arguments: str) -> Iterator[None]:
    """`python -m module` beside the block; waited for at its end, ended with it if the block fails.

    Raises:
        QuickstartFailed: it did not exit with 0.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield
        output = process.communicate()[0]
    except BaseException:
        process.kill()
        process.wait()
        raise
    if process.returncode:
        raise QuickstartFailed(f"python -m {module} failed:\n{output[-2000:]}")


@contextlib.contextmanager
def _watched(title: str, name: str) -> Iterator[None]:
    """Lines on standard error about the run's progress while the block runs."""
    over = Event()
    thread = Thread(target=_watch, args=(title, name, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _watch(title: str, name: str, over: Event) -> None:
    """A line when the stage moves on, at every evaluation, and every ten seconds while there is something new to say."""
    registry = Registry()
    event, said, said_at = None, "", 0.0
    while not over.wait(WATCH_S):
        run = registry.find_run(name)
        if run is None:
            continue
        doing, figures = describe(run.progress, run.stages, serving=bool(registry.list_servers(run.id)))
        text, now = ", ".join([doing, *figures]), time.monotonic()
        # While it steps, what it does reads differently every time; only a new accuracy is an event.
        latest = ("stepping" if figures else doing, run.progress.get("eval/accuracy"))
        if text != said and (latest != event or now - said_at >= LINE_S):
            _say(f"{title}: {text}")
            event, said, said_at = latest, text, now


def describe(progress: dict[str, Any], stages: dict[str, Any], serving: bool) -> tuple[str, list[str]]:
    """What a run is doing, and the figures to show with it."""
    if "train" in stages:
        return "registering the model" if "evaluate" in stages else "evaluating the trained model", []
    step = progress.get("step") or 0
    if not step:
        if "evaluate_before" in stages:
            return "starting the trainer", []
        return "starting vLLM, which takes about a minute" if serving else "starting", []
    figures = [
        f"{text} {progress[field]:.3f}"
        for field, text in (("loss", "loss"), ("reward", "reward"), ("eval/accuracy", "held-out accuracy"))
        if progress.get(field) is not None
    ]
    if progress.get("eta_s"):
        figures.append(f"at most {duration(progress['eta_s'])} left")
    return f"step {step} of at most {progress.get('max_steps')}", figures


def _say(text: str) -> None:
    click.echo(f"[{datetime.now():%H:%M:%S}] {text}", err=True)
