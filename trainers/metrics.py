"""The metric catalog, and the bag in which values travel.

A metric that is not in the catalog cannot be logged. `<…>` in a name stands for a reward function, tool or cause.
Reductions: `mean` Σ numerator / Σ denominator over window and ranks; `sum` over window and ranks; `total` sum since the
run's start; `max`, `min` extremum; `last` the newest value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Literal

Reduction = Literal["mean", "sum", "total", "max", "min", "last"]
ALL = ("grpo", "distillation", "sft")
GENERATING = ("grpo", "distillation")


@dataclass(frozen=True, slots=True)
class MetricSpec:
    name: str
    unit: str
    reduction: Reduction
    meaning: str
    algorithms: tuple[str, ...] = ALL


def _specs(algorithms: tuple[str, ...], rows: Iterable[tuple[str, str, Reduction, str]]) -> dict[str, MetricSpec]:
    return {name: MetricSpec(name, unit, reduction, meaning, algorithms) for name, unit, reduction, meaning in rows}


CATALOG: dict[str, MetricSpec] = {
    **_specs(
        ALL,
        [
            ("loss", "nats", "mean", "objective of the whole optimizer step, divided by its trained tokens"),
            ("grad_norm", "1", "last", "global gradient norm before clipping"),
            ("learning_rate", "1", "last", "learning rate of the step"),
            ("num_tokens", "tokens", "total", "tokens forwarded since the run's start"),
            ("epoch", "epochs", "last", "passes over the prompts, prompts done / prompts, this step's among them"),
            ("entropy", "nats", "mean", "entropy of the policy at trained positions"),
            ("batch/forwarded_tokens_per_step", "tokens", "sum", "tokens forwarded in the step, all ranks"),
            ("batch/trained_tokens_per_step", "tokens", "sum", "loss terms in the step, all ranks"),
            ("batch/samples_per_step", "samples", "sum", "samples in the step, all ranks"),
            ("batch/groups_per_step", "groups", "sum", "distinct groups with a sample in the step"),
            ("batch/microbatches_per_step", "1", "last", "gradient_accumulation_steps"),
            ("batch/masked_token_frac", "1", "mean", "forwarded tokens that carry no loss term"),
            ("batch/samples_per_row", "samples", "mean", "samples per row slot"),
            ("batch/row_tokens_mean", "tokens", "mean", "tokens per row slot"),
            ("batch/row_tokens_max", "tokens", "max", "tokens of the longest row"),
            ("batch/row_fill_frac", "1", "mean", "row tokens / token_budget"),
            ("batch/row_imbalance", "1", "mean", "heaviest row's attention cost / mean cost within a micro-batch"),
            ("batch/pad_frac", "1", "mean", "padded share of forwarded positions; 0 unless rows are lengthened to a multiple"),
            ("batch/dropped_oversize_total", "samples", "total", "samples longer than token_budget"),
            ("sample/forwarded_tokens_mean", "tokens", "mean", "length of the step's samples"),
            ("sample/forwarded_tokens_max", "tokens", "max", "longest of the step's samples"),
            ("sample/trained_tokens_mean", "tokens", "mean", "trained tokens per sample"),
            ("sample/rollout_queue_size", "samples", "last", "samples waiting when the step was planned"),
            ("sample/time_in_queue_s", "s", "mean", "from entering the queue to being planned"),
            ("perf/step_s", "s", "mean", "wall clock of an optimizer step"),
            ("perf/fwd_bwd_s", "s", "mean", "forward and backward of all micro-batches"),
            ("perf/optimizer_s", "s", "mean", "clipping, optimizer and schedule"),
            ("perf/rollout_wait_s", "s", "mean", "the trainer waited for work"),
            ("perf/forwarded_tok_s_fwd_bwd", "tokens/s", "mean", "forwarded tokens / fwd_bwd_s, all ranks"),
            ("perf/forwarded_tok_s_wall_clock", "tokens/s", "mean", "forwarded tokens / step_s, all ranks"),
            ("perf/trained_tok_s_wall_clock", "tokens/s", "mean", "trained tokens / step_s, all ranks"),
            ("perf/mfu_fwd_bwd", "1", "mean", "model FLOPs / peak during forward and backward; left out on unknown devices"),
            ("perf/mfu_wall_clock", "1", "mean", "model FLOPs / peak over the whole step; left out on unknown devices"),
            ("perf/peak_memory_bytes", "bytes", "max", "peak device memory; left out on CPU"),
            ("eval/accuracy", "1", "last", "mean reward of greedy completions on the held-out set"),
            ("cost/tokens/trained", "tokens", "total", "loss terms since the run's start, all ranks"),
            ("cost/gpu_s/<role>", "s", "last", "GPU seconds leased for trainer, students or teachers, at most a minute old"),
            ("cost/idle_gpu_s/trainer", "s", "total", "of the trainer's, it waited for work"),
            ("cost/idle_gpu_s/<role>", "s", "last", "of the students' or teachers', no request ran; at most a minute old"),
            ("cost/usd", "USD", "last", "GPU hours × limits.usd_per_gpu_hour, at most a minute old"),
        ],
    ),
    **_specs(
        ("sft",),
        [
            ("token_accuracy", "1", "mean", "trained tokens whose argmax prediction is right"),
            (
                "loss_by_position/<bucket>",
                "nats",
                "mean",
                "negative log-likelihood of the trained tokens at positions `bucket` … 2 · `bucket` − 1 of their sequence",
            ),
            ("eval/loss", "nats", "mean", "negative log-likelihood on the held-out books of `long_eval`"),
            ("eval/loss_by_position/<bucket>", "nats", "mean", "the same at positions `bucket` … 2 · `bucket` − 1"),
            (
                "needle/<length>/<depth>",
                "1",
                "mean",
                "numbers found in texts of `length` tokens, hidden at `depth` percent of them",
            ),
            ("needle/mean", "1", "mean", "numbers found, over all lengths and depths"),
        ],
    ),
    **_specs(
        ("grpo",),
        [
            ("reward", "1", "mean", "reward of scored rollouts, groups dropped later included"),
            ("reward_std", "1", "mean", "population standard deviation within a group"),
            ("rewards/<func>", "1", "mean", "one reward function, where it applied"),
            ("rewards/<func>_none_frac", "1", "mean", "rollouts to which the function did not apply"),
            ("rewards/<func>_call_s", "s", "mean", "time of a call of one reward function"),
            ("rollout/correctness_mean", "1", "mean", "rollouts with a positive reward"),
            ("tools/call_frequency", "calls", "mean", "tool calls per rollout"),
            ("tools/failure_frequency", "1", "mean", "tool calls that failed"),
            ("tools/loop_exhausted_frac", "1", "mean", "rollouts stopped by max_tool_calling_iterations or their token budget"),
            ("tools/latency_s", "s", "mean", "time of a tool call"),
            ("tools/parallel_calls_mean", "calls", "mean", "calls in a turn that made any"),
            ("tools/unknown_name_total", "calls", "total", "calls of a tool that does not exist"),
            ("tools/<name>/call_total", "calls", "total", "calls of one tool"),
            ("tools/<name>/failure_total", "calls", "total", "of these, failed"),
            ("tools/<name>/latency_s", "s", "mean", "time of a call of this tool"),
            ("env/reset_s", "s", "mean", "time of an environment's reset"),
            ("env/step_s", "s", "mean", "time of a call of an environment's method"),
            ("env/reward_s", "s", "mean", "time of an environment's get_reward"),
        ],
    ),
    **_specs(
        GENERATING,
        [
            ("ratio", "1", "mean", "importance ratio exp(log π − log q)"),
            ("kl", "nats", "mean", "k3 estimate of KL(q ‖ π) from the sampler's logprobs"),
            ("clip_ratio/low_mean", "1", "mean", "trained tokens clipped below (A < 0)"),
            ("clip_ratio/high_mean", "1", "mean", "trained tokens clipped above (A > 0)"),
            ("clip_ratio/region_mean", "1", "mean", "trained tokens clipped on either side"),
            ("clip_ratio/low_min", "1", "min", "lowest micro-batch share clipped below"),
            ("clip_ratio/high_max", "1", "max", "highest micro-batch share clipped above"),
            ("completions/mean_length", "tokens", "mean", "completion length"),
            ("completions/min_length", "tokens", "min", "shortest completion"),
            ("completions/max_length", "tokens", "max", "longest completion"),
            ("completions/clipped_ratio", "1", "mean", "completions that did not end in EOS"),
            ("completions/empty_total", "completions", "total", "completions without a token, or with EOS only"),
            ("rollout/duration_s", "s", "mean", "dispatch to last token of a rollout"),
            ("rollout/turns_mean", "turns", "mean", "turns per rollout"),
            ("rollout/turns_max", "turns", "max", "most turns of a rollout"),
            ("rollout/samples_per_rollout", "samples", "mean", "training samples per rollout"),
            ("rollout/score_s", "s", "mean", "time a group's scoring took"),
            ("rollout/score_wait_s", "s", "mean", "time a group waited for a scoring slot"),
            ("rollout/score_queue_size", "groups", "last", "groups waiting for or in scoring"),
            ("rollout/concurrency", "rollouts", "last", "rollouts in flight"),
            ("rollout/concurrency_cap", "rollouts", "last", "most rollouts allowed in flight"),
            ("rollout/generated_tok_s", "tokens/s", "mean", "sampled tokens per second of wall clock"),
            ("rollout/backpressure_s", "s", "sum", "generation held back because the queue was full"),
            ("rollout/vllm_retry_total", "requests", "total", "requests sent again"),
            ("rollout/failed_total/<cause>", "rollouts", "total", "rollouts given up"),
            ("rollout/dropped_groups_total/<cause>", "groups", "total", "groups dropped before training"),
            ("rollout/fork_frac", "1", "mean", "turns after the first whose history differed too much: a new sequence began"),
            ("rollout/realign_frac", "1", "mean", "turns after the first whose history differed a little and was mended"),
            ("rollout/drift_tokens_mean", "tokens", "mean", "tokens in which a turn's history differed from what was held"),
            ("rollout/drift_tokens_max", "tokens", "max", "largest of these"),
            ("rollout/score_block_s", "s", "mean", "time a finished group waited because scoring was full"),
            ("sampling/masked_mean", "1", "mean", "trained tokens of weight 0: ratio to the sampler out of bounds, or clipped"),
            ("sampling/sampler_mass", "1", "mean", "probability the sampler's top tokens cover"),
            ("sampling/ratio_outside_frac", "1", "mean", "trained tokens whose ratio to the sampler is outside the bounds"),
            ("cost/tokens/generated", "tokens", "total", "tokens sampled since the run's start"),
            ("cost/tokens/dropped", "tokens", "total", "of these, in groups and samples that were not trained on"),
            ("server/<name>/kv_cache_usage", "1", "last", "used share of a server's KV cache"),
            ("server/<name>/running", "requests", "last", "requests a server is generating"),
            ("server/<name>/waiting", "requests", "last", "requests waiting in a server"),
            ("server/<name>/preemptions_total", "requests", "total", "requests a server took back for lack of cache"),
            ("server/<name>/generated_tok_s", "tokens/s", "last", "tokens a server generated per second"),
            ("server/<name>/concurrency_cap", "rollouts", "last", "most rollouts allowed in flight on a server"),
            ("sample/staleness_mean", "versions", "mean", "versions between a sample's oldest token and its training step"),
            ("sample/staleness_max", "versions", "max", "largest of these"),
            ("sample/dropped_stale_total", "samples", "total", "samples dropped for exceeding max_staleness"),
            ("perf/weight_sync_s", "s", "mean", "whole weight sync"),
            ("perf/weight_sync_pause_s", "s", "mean", "pausing the servers"),
            ("perf/weight_sync_barrier_s", "s", "mean", "ranks waiting for one another around the sync"),
            ("perf/weight_sync_transfer_s", "s", "mean", "gather, write and load of the weights"),
            ("perf/weight_sync_load_s", "s", "mean", "loading the weights into paused servers"),
            ("perf/weight_sync_bytes", "bytes", "mean", "bytes sent per sync"),
            ("perf/weight_probe_abs_diff", "nats", "max", "largest logprob difference between trainer and server on the probe"),
        ],
    ),
    **_specs(
        ("recipe",),
        [("recipe/accuracy/<domain>", "1", "last", "mean reward of greedy completions on a domain's held-out set")],
    ),
    **_specs(
        ("distillation",),
        [
            ("jsd", "nats", "mean", "divergence of student and teacher that the loss takes, or the policy gradient follows"),
            (
                "teacher_entropy",
                "nats",
                "mean",
                "entropy of the teacher over what it reported and the rest: at most its own",
            ),
            ("teacher_jsd/<id>", "nats", "mean", "`jsd` where one of several teachers scored"),
            ("teacher_entropy/<id>", "nats", "mean", "`teacher_entropy` where one of several teachers scored"),
            ("teacher_token_frac/<id>", "1", "mean", "trained tokens that one of several teachers scored"),
            ("teacher_score_s/<id>", "s", "mean", "time a teacher took to score a sequence"),
        ],
    ),
    **_specs(
        ("sweep",),
        [
            ("sweep/value", "that of the metric", "last", "what a finished trial is judged by"),
            ("sweep/best", "that of the metric", "last", "best of the trials that have finished"),
        ],
    ),
}

_PLACEHOLDER = re.compile(r"<\w+>")
_PATTERNS = [
    (
        re.compile(
            "".join(re.escape(part) if i % 2 == 0 else r"[\w.\-]+" for i, part in enumerate(re.split(r"(<\w+>)", name))) + r"\Z"
        ),
        spec,
    )
    for name, spec in CATALOG.items()
    if _PLACEHOLDER.search(name)
]


@cache
def spec_of(name: str) -> MetricSpec:
    """The catalog entry of a concrete name.

    Raises:
        KeyError: the name is not in the catalog.
    """
    if name in CATALOG and "<" not in name:
        return CATALOG[name]
    # The longest pattern wins: `rewards/<func>_none_frac` before `rewards/<func>`.
    for pattern, spec in sorted(_PATTERNS, key=lambda item: -len(item[1].name)):
        if pattern.match(name):
            return spec
    raise KeyError(f"metric {name!r} is not in the catalog (trainers/metrics.py); add it there first")


def sanitize(name: str) -> str:
    """A user-given name (reward function, tool) as MLflow accepts it within a metric key."""
    return re.sub(r"[^\w.\-]", "_", name)


class MetricBag:
    """Accumulates metrics by their catalog reduction; mergeable and JSON-serialisable as {name: [numerator, denominator]}."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[float, float]] = {}

    def add(self, name: str, numerator: float, denominator: float = 1.0) -> None:
        """Add one observation. `denominator` only matters for `mean`."""
        reduction = spec_of(name).reduction
        old = self._values.get(name)
        if old is None:
            self._values[name] = (float(numerator), float(denominator))
        elif reduction in ("mean", "sum", "total"):
            self._values[name] = (old[0] + numerator, old[1] + denominator)
        elif reduction == "max":
            self._values[name] = (max(old[0], numerator), 1.0)
        elif reduction == "min":
            self._values[name] = (min(old[0], numerator), 1.0)
        else:
            self._values[name] = (float(numerator), 1.0)

    def merge(self, other: dict[str, tuple[float, float]]) -> None:
        for name, (numerator, denominator) in other.items():
            self.add(name, numerator, denominator)

    def drain(self) -> dict[str, tuple[float, float]]:
        """Pairs since the last drain; starts anew."""
        values, self._values = self._values, {}
        return values

    def values(self) -> dict[str, float]:
        """Reduced values. `total` here is the sum within this bag; the loop keeps the running total."""
        return {
            name: (n / d if spec_of(name).reduction == "mean" else n)
            for name, (n, d) in self._values.items()
            if spec_of(name).reduction != "mean" or d
        }
