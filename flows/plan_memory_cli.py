"""`loopwright plan-memory`: what fits, before anything is started."""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from flows.plan_memory import Machine, Row

SHOWN = 10
MOST_GIB = 1 << 30


@click.command("plan-memory")
@click.option("--model", required=True, metavar="NAME|FOLDER|CONFIG", help="A model's folder, its config.json, or a hub id.")
@click.option("--max-length", required=True, type=click.IntRange(min=2), metavar="N", help="Tokens of the longest sequence.")
@click.option("--gpus", type=click.IntRange(min=1), help="GPUs of one host. Default: those that this process sees, or 1.")
@click.option(
    "--gpu-memory", type=click.FloatRange(1, MOST_GIB), metavar="GIB", help="Of one GPU. Default: that of the first one here."
)
@click.option(
    "--host-memory", type=click.FloatRange(0, MOST_GIB), metavar="GIB", help="Of the host. Default: what is free here."
)
@click.option("--weights", type=click.Choice(["all", "lora"]), help="Train these. Default: all, or else an adapter.")
@click.option("--lora-rank", type=click.IntRange(min=1), default=16, show_default=True, help="Of the adapter that is planned.")
@click.option(
    "--attention",
    type=click.Choice(["cudnn", "flash"]),
    default="cudnn",
    show_default=True,
    help="Whose measured speed counts: cuDNN's, or FlashAttention 3 or 4's where it is installed.",
)
@click.option("--all", "every", is_flag=True, help="Show every combination.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object: every combination, the chosen one, its config lines.")
def plan_memory(
    model: str,
    max_length: int,
    gpus: int | None,
    gpu_memory: float | None,
    host_memory: float | None,
    weights: str | None,
    lora_rank: int,
    attention: str,
    every: bool,
    as_json: bool,
) -> None:
    """Predict GPU memory, host memory and seconds per step of each combination of levers; name the fastest that fits.

    From the model's config.json alone. Seconds are those of H200s. Exit code 1: nothing fits.
    """
    from flows import plan_memory as planner
    from trainers.model_shape import read_shape

    shape = read_shape(model)
    machine = _machine(gpus, gpu_memory, host_memory)
    rows = planner.plan(shape, max_length, machine, kernel=attention, lora_rank=lora_rank, only=weights)  # type: ignore[arg-type]
    chosen = planner.choose(rows)
    lines = planner.config_lines(shape, chosen.levers, max_length, machine.gpus) if chosen is not None else []
    if as_json:
        report = {
            "model": model,
            "parameters": shape.parameters,
            "max_length": max_length,
            "gpus": machine.gpus,
            "gpu_gib": round(machine.gpu_bytes / planner.GIB, 2),
            "host_gib": round(machine.host_bytes / planner.GIB, 2),
            "attention": attention,
            "rows": [row.fields() for row in rows],
            "chosen": chosen.fields() if chosen is not None else None,
            "config": lines,
        }
        click.echo(json.dumps(report, ensure_ascii=False))
    else:
        _print(rows, chosen, lines, machine, every)
    sys.exit(0 if chosen is not None else 1)


def _machine(gpus: int | None, gpu_memory: float | None, host_memory: float | None) -> Machine:
    """What was given, the rest as it is here.

    Raises:
        ConfigError: there is no GPU here whose memory could be read, or a size is no number.
    """
    from flows.plan_memory import GIB, Machine
    from infra.gpus import memory_bytes, visible_gpus
    from trainers.errors import ConfigError

    for name, given in (("--gpu-memory", gpu_memory), ("--host-memory", host_memory)):
        if given is not None and math.isnan(given):  # a range lets it pass
            raise ConfigError(f"{name} nan is no number of GiB: write one, such as 139.8")
    seen = visible_gpus()
    if gpu_memory is None and not seen:
        raise ConfigError("there is no GPU here to plan for: say how much one has, as in --gpu-memory 139.8 (an H200)")
    gpu_bytes = int(gpu_memory * GIB) if gpu_memory is not None else memory_bytes(seen[0])
    host_bytes = int(host_memory * GIB) if host_memory is not None else _free_here()
    return Machine(gpus or len(seen) or 1, gpu_bytes, host_bytes)


def _free_here() -> int:
    with open("/proc/meminfo") as file:
        return 1024 * int(next(line for line in file if line.startswith("MemAvailable")).split()[1])


def _print(rows: list[Row], chosen: Row | None, lines: list[str], machine: Machine, every: bool) -> None:
    from flows.plan_memory import kind_of, nearest
    from flows.text_table import print_table

    wanted = chosen or nearest(rows)
    alike = rows if every else [row for row in rows if kind_of(row) == kind_of(wanted)]
    shown = sorted(alike, key=lambda row: not row.fits)[: None if every else SHOWN]
    head = ("levers", "GPU GiB", "peak at", "host GiB", "s/step", "tokens/s", "fits")
    print_table([head, *(_cells(row) for row in shown)])
    click.echo()
    if chosen is None:
        there, needed = (machine.gpu_bytes, machine.host_bytes), (wanted.required_bytes, wanted.peak.host_bytes)
        (gpu, host), (needed_gpu, needed_host) = ([size / 2**30 for size in sizes] for sizes in (there, needed))
        remedy = "use more GPUs or a shorter --max-length" + ("" if wanted.levers.lora_rank else ", or --weights lora")
        click.echo(
            f"nothing fits {gpu:.1f} GiB a GPU and {host:.1f} GiB of host memory; what needs the least of a GPU, "
            f"{wanted.levers.names}, needs {needed_gpu:.1f} GiB and {needed_host:.1f} GiB of host memory: {remedy}"
        )
        return
    click.echo(f"the fastest that fits: {chosen.levers.names}. In the config:")
    click.echo("\n".join(f"  {line}" for line in lines))


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.levers.names,
        f"{row.required_bytes / 2**30:.1f}",
        row.peak.moment,
        f"{row.peak.host_bytes / 2**30:.1f}",
        f"{row.seconds.seconds:.1f}",
        f"{row.tokens_per_s:.0f}",
        "yes" if row.fits else f"no: {row.short_of}",
    )
