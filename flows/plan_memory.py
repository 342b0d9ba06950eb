"""What a run on long sequences would need, for each sensible combination of levers, and the fastest that fits.

    config.json ─▶ shape ─▶ combinations ─▶ memory and seconds of each ─▶ what fits ─▶ the fastest, as lines of a config
                                              (trainers.memory_plan, trainers.step_time)

All weights in float32 come first, then all weights in bfloat16, then an adapter: a later kind is taken where no combination of
an earlier one fits. Nothing is loaded, no GPU is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trainers import memory_plan, step_time
from trainers.errors import ConfigError
from trainers.memory_plan import GIB, Levers
from trainers.model_shape import ModelShape
from trainers.packing import row_multiple

TILE_TOKENS = 8192
ALIKE = 1.005  # steps that differ by less are as fast as one another


@dataclass(frozen=True, slots=True)
class Machine:
    """`host_bytes` is what one host of all `gpus` has."""

    gpus: int
    gpu_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class Row:
    """One combination. Memory is that of one GPU, but for `host_gib`."""

    levers: Levers
    peak: memory_plan.Peak
    required_bytes: int
    seconds: step_time.StepTime
    tokens_per_s: float  # of all GPUs: those that do not share a row have one each
    short_of: str  # what there is too little of: "", "GPU memory", "host memory"

    @property
    def fits(self) -> bool:
        return not self.short_of

    def fields(self) -> dict[str, Any]:
        """For JSON."""
        levers = self.levers
        return {
            "offload": levers.offload,
            "save_attention": levers.save_attention,
            "mlp_tile_tokens": levers.mlp_tile_tokens,
            "cp_size": levers.cp_size,
            "sp_size": levers.sp_size,
            "dtype": "bfloat16" if levers.bf16_masters else "float32",
            "lora_rank": levers.lora_rank,
            "peak_gib": round(self.peak.bytes / GIB, 2),
            "peak_at": self.peak.moment,
            "required_gib": round(self.required_bytes / GIB, 2),
            "states_gib": round(self.peak.states_bytes / GIB, 2),
            "host_gib": round(self.peak.host_bytes / GIB, 2),
            "step_s": round(self.seconds.seconds, 2),
            "attention_s": round(self.seconds.attention_s, 2),
            "tokens_per_s": round(self.tokens_per_s, 1),
            "fits": self.fits,
            "short_of": self.short_of,
        }


def kinds(lora_rank: int, only: str | None) -> list[dict[str, Any]]:
    """What is trained and in what type, the first choice first.

    Args:
        only: "all" or "lora".
    """
    whole: list[dict[str, Any]] = [{}, {"bf16_masters": True}]
    adapter: list[dict[str, Any]] = [{"bf16_masters": True, "lora_rank": lora_rank}]
    return {"all": whole, "lora": adapter}.get(only or "", whole + adapter)


def combinations(shape: ModelShape, tokens: int, gpus: int, kind: dict[str, Any]) -> Iterator[Levers]:
    """Every way of one kind that a run of this shape could be started in."""
    sizes = [size for size in range(1, gpus + 1) if gpus % size == 0]
    for cp_size, sp_size in itertools.product(sizes, sizes):
        if gpus % (cp_size * sp_size) or tokens < cp_size * sp_size:
            continue
        own = -(-tokens // (cp_size * sp_size))
        tiles = (None, TILE_TOKENS) if own > TILE_TOKENS else (None,)
        for offload, save_attention, tile in itertools.product((False, True), (False, True), tiles):
            levers = Levers(offload, save_attention, tile, cp_size, sp_size, **kind)
            try:
                memory_plan.check(shape, levers, tokens, gpus)
            except ConfigError:
                continue
            yield levers


def row(shape: ModelShape, levers: Levers, tokens: int, machine: Machine, kernel: step_time.Kernel) -> Row:
    peak = memory_plan.peak(shape, levers, tokens, machine.gpus, machine.gpu_bytes)
    needed = memory_plan.required_bytes(peak, machine.gpus)
    seconds = step_time.step_time(shape, levers, tokens, machine.gpus, machine.gpu_bytes, kernel)
    rows_at_once = machine.gpus // (levers.cp_size * levers.sp_size)
    short = "GPU memory" if needed > machine.gpu_bytes else "host memory" if peak.host_bytes > machine.host_bytes else ""
    return Row(levers, peak, needed, seconds, rows_at_once * tokens / seconds.seconds, short)


def plan(
    shape: ModelShape,
    tokens: int,
    machine: Machine,
    *,
    kernel: step_time.Kernel = "cudnn",
    lora_rank: int = 16,
    only: str | None = None,
) -> list[Row]:
    """All combinations, kind by kind, the fastest of a kind first.

    Raises:
        ConfigError: a number makes no sense, or no combination could be started.
    """
    if tokens < 2 or machine.gpus < 1:
        raise ConfigError(f"{tokens} tokens on {machine.gpus} GPUs: give --max-length of 2 or more and --gpus of 1 or more")
    rows: list[Row] = []
    for kind in kinds(lora_rank, only):
        ways = [row(shape, levers, tokens, machine, kernel) for levers in combinations(shape, tokens, machine.gpus, kind)]
        rows += sorted(ways, key=lambda way: -way.tokens_per_s)
    return rows


def kind_of(row: Row) -> tuple[bool, int | None]:
    return row.levers.bf16_masters, row.levers.lora_rank


def choose(rows: Sequence[Row]) -> Row | None:
    """The fastest that fits of the first kind of which any does; of those as fast, the one with the fewest levers."""
    fitting = [row for row in rows if row.fits]
    if not fitting:
        return None
    alike = [row for row in fitting if kind_of(row) == kind_of(fitting[0])]
    fastest = max(row.tokens_per_s for row in alike)
    return min((row for row in alike if row.tokens_per_s * ALIKE >= fastest), key=_levers_used)


def _levers_used(row: Row) -> tuple[int, int]:
    levers = row.levers
    used = (levers.offload, levers.save_attention, levers.mlp_tile_tokens is not None, levers.cp_size > 1, levers.sp_size > 1)
    return sum(used), row.required_bytes


def nearest(rows: Sequence[Row]) -> Row:
    """Where nothing fits: the one that needs the least GPU memory."""
    return min(rows, key=lambda row: row.required_bytes)


def config_lines(shape: ModelShape, levers: Levers, tokens: int, gpus: int) -> list[str]:
    """Lines of a run's config that say these levers."""
    multiple = row_multiple(levers.cp_size, levers.sp_size)
    lines = [f"max_length: {tokens + -tokens % multiple}"]
    if shape.trained_positions is not None and tokens > shape.trained_positions:
        lines.append("rope_parameters: {rope_type: yarn, factor: auto}")
    if levers.bf16_masters:
        lines.append("dtype: bfloat16")
    if levers.lora_rank is not None:
        lines.append(f"peft: {{r: {levers.lora_rank}}}")
    if levers.offload:
        lines.append("gradient_checkpointing_kwargs: {offload: true}")
    if levers.save_attention:
        lines.append("save_attention: true")
    if levers.mlp_tile_tokens is not None:
        lines.append(f"mlp_tile_tokens: {levers.mlp_tile_tokens}")
    if levers.cp_size > 1:
        lines += [f"cp_size: {levers.cp_size}", "packing: false"]
    if levers.sp_size > 1:
        lines.append(f"sp_size: {levers.sp_size}")
    if gpus > 1:
        lines.append(f"trainer: {{ranks: {gpus}, gpus: {gpus}}}")
    return lines
