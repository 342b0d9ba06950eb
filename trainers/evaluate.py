"""Greedy accuracy on a held-out set: `python -m trainers.evaluate CONFIG.json OUT.json`.

    eval.dataset ─▶ prompts ─▶ greedy completions (a server's, or transformers' `generate`) ─▶ reward ─▶ mean

CONFIG.json is `{"config": <trainer config with eval>, "model": <folder, default config.model>, "url": <server, a list of them,
or none, the default>}`. OUT.json appears whole, by rename: accuracy, problems, scored, failed, mean_length, clipped_ratio,
seconds, examples. Exit code 0, or 1 with the cause on standard error.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from trainers.adapters import version_of
from trainers.config import TrainerConfig, TrainerConfigUnion
from trainers.data import PromptBuilder, load_rows, load_tokenizer
from trainers.errors import ConfigError, LoopwrightError, ServerError
from trainers.metrics import MetricBag
from trainers.references import resolve
from trainers.rewards import RewardFunc, load_callable
from trainers.rollouts.pool import ServerPool
from trainers.rollouts.protocol import RequestFailed, SamplingForm
from trainers.rollouts.scoring import Scorer
from trainers.server import ServerClient
from trainers.types import Prompt, Rollout, RolloutGroup, TurnRecord, VersionSpan

logger = logging.getLogger(__name__)
Generate = Callable[[Sequence[Prompt]], list[TurnRecord | None]]
CONCURRENT_REQUESTS = 128
BATCH = 64
EXAMPLES = 8


def max_new_tokens(config: TrainerConfig) -> int:
    """`eval.max_completion_length`, else the run's own limit."""
    if config.eval is not None and config.eval.max_completion_length is not None:
        return config.eval.max_completion_length
    return getattr(config, "max_completion_length", None) or config.max_length  # type: ignore[attr-defined]


def eval_reward(config: TrainerConfig) -> RewardFunc:
    """`eval.reward_func`, else the first of the run's reward functions.

    Raises:
        ConfigError: there is neither.
    """
    own = config.eval.reward_func if config.eval is not None else None
    specs = [own] if own is not None else list(getattr(config, "reward_funcs", []))
    if not specs:
        raise ConfigError("evaluation has nothing to score with: set eval.reward_func")
    return load_callable(specs[0])


def load_problems(config: TrainerConfig, tokenizer: Any) -> list[Prompt]:
    """The prompts of `eval.dataset`.

    Raises:
        ConfigError: `eval` is not set.
    """
    if config.eval is None:
        raise ConfigError("eval.dataset is not set: there is nothing to evaluate on")
    held_out = config.model_copy(update={"dataset": config.eval.dataset})
    rows = load_rows(held_out.dataset)
    rows.require(held_out.dataset.prompt_column)
    builder = PromptBuilder(tokenizer, held_out, held_out=True)
    return [builder.prompt(0, index, rows[index]) for index in range(len(rows))]


def server_generate(
    urls: Sequence[str],
    timeout_s: float,
    max_tokens: int,
    version: int | None = None,
    *,
    candidates: bool = False,
    adapter: str | None = None,
) -> Generate:
    """Greedy completions from the servers, many requests at once, shared among them. A prompt that is refused gives None.

    Args:
        version: the policy version that the servers must hold; None: whatever they hold.
        adapter: the one in the servers that is evaluated; None: the served model itself.
        candidates: the servers may have been started to return candidate sets, and then refuse temperature 0.
    """

    async def all_turns(prompts: Sequence[Prompt]) -> list[TurnRecord | None]:
        pool = ServerPool(urls, timeout_s, CONCURRENT_REQUESTS, form=SamplingForm(candidates=candidates))
        slots = asyncio.Semaphore(CONCURRENT_REQUESTS)

        async def one(prompt: Prompt, longest: int) -> TurnRecord | None:
            room = longest - len(prompt.token_ids)
            if room < 1:
                return None
            async with slots:
                lease = pool.lease()
                try:
                    return await pool.turn(
                        prompt.token_ids,
                        lease=lease,
                        temperature=0.0,
                        max_tokens=min(max_tokens, room),
                        seed=0,
                        version=lambda: version,
                        adapter=adapter,
                    )
                except RequestFailed as error:
                    logger.warning("evaluation: problem %s failed: %s", prompt.id, error)
                    return None
                finally:
                    pool.release(lease)

        try:
            facts = await pool.open(timeout_s)
            return list(await asyncio.gather(*(one(prompt, facts.max_model_len) for prompt in prompts)))
        finally:
            await pool.close()

    return lambda prompts: asyncio.run(all_turns(prompts))


def local_generate(model: Any, tokenizer: Any, max_tokens: int) -> Generate:
    """Greedy completions from a transformers model (an attention implementation of its own, not the packed one)."""
    import torch

    ends = model.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends]) | {tokenizer.eos_token_id}
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id

    @torch.no_grad()
    def generate(prompts: Sequence[Prompt]) -> list[TurnRecord | None]:
        turns: list[TurnRecord | None] = [None] * len(prompts)
        # Neighbours in length share a batch, so that little is padded.
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].token_ids))
        for start in range(0, len(order), BATCH):
            part = order[start : start + BATCH]
            longest = max(len(prompts[i].token_ids) for i in part)
            ids = torch.full((len(part), longest), pad, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, i in enumerate(part):
                tokens = torch.from_numpy(prompts[i].token_ids.astype(np.int64))
                ids[row, longest - len(tokens) :] = tokens
                mask[row, longest - len(tokens) :] = 1
            out = model.generate(
                input_ids=ids.to(model.device),
                attention_mask=mask.to(model.device),
                max_new_tokens=max_tokens,
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                eos_token_id=sorted(end for end in ends if end is not None),
                pad_token_id=pad,
            )[:, longest:].cpu()
            for row, i in enumerate(part):
                turns[i] = _turn(prompts[i], out[row].numpy(), ends)
        return turns

    return generate


def _turn(prompt: Prompt, output: np.ndarray, ends: set[int | None]) -> TurnRecord:
    stops = np.flatnonzero(np.isin(output, [end for end in ends if end is not None]))
    kept = output[: stops[0] + 1] if len(stops) else output
    span = VersionSpan(0, len(kept), 0)
    logprobs = np.zeros(len(kept), np.float32)
    return TurnRecord(prompt.token_ids, kept.astype(np.int32), logprobs, [span], "stop" if len(stops) else "length")


def evaluate(problems: Sequence[Prompt], tokenizer: Any, generate: Generate, reward: RewardFunc) -> dict[str, Any]:
    """Mean reward over the problems it applies to; a problem whose generation or scoring failed counts as 0.

    Raises:
        ServerError: not one problem could be generated.
        ConfigError: the reward applied to no problem.
    """
    began = time.perf_counter()
    turns = generate(problems)
    if problems and not any(turn is not None for turn in turns):
        raise ServerError("evaluation: the server answered none of the problems; see the warnings above")
    groups: list[RolloutGroup] = []
    for prompt, turn in zip(problems, turns, strict=True):
        rollout = Rollout(prompt, failed="generation")
        if turn is not None:
            text = tokenizer.decode(turn.output_ids.tolist(), skip_special_tokens=True)
            rollout = Rollout(prompt, [turn], [{"role": "assistant", "content": text}])
        groups.append(RolloutGroup(prompt, [rollout]))

    async def score() -> None:
        scorer = Scorer([reward], None, MetricBag())
        try:
            await asyncio.gather(*(scorer.score(group) for group in groups))
        finally:
            await scorer.close()

    asyncio.run(score())
    rollouts = [group.rollouts[0] for group in groups]
    values = [0.0 if rollout.failed is not None else rollout.reward for rollout in rollouts]
    scored = [value for value in values if not np.isnan(value)]
    if not scored:
        raise ConfigError("evaluation: the reward function returned None for every problem; check the dataset's columns")
    done = [turn for turn in turns if turn is not None]
    return {
        "accuracy": float(np.mean(scored)),
        "problems": len(problems),
        "scored": len(scored),
        "failed": sum(rollout.failed is not None for rollout in rollouts),
        "mean_length": float(np.mean([len(turn.output_ids) for turn in done])),
        "clipped_ratio": float(np.mean([turn.finish_reason != "stop" for turn in done])),
        "seconds": time.perf_counter() - began,
        "examples": [
            {"prompt": r.prompt.messages, "completion": r.completion[0]["content"], "reward": None if np.isnan(v) else v}
            for r, v in zip(rollouts[:EXAMPLES], values, strict=False)
            if r.completion
        ],
    }


def newest_adapter(url: str, timeout_s: float) -> str | None:
    """The newest adapter that a run has put into a server; None: it has none, and the served model is the run's first."""
    names = ServerClient(url, timeout_s).loaded_adapters()
    found = {version: name for name in names if (version := version_of(name)) is not None}
    return found[max(found)] if found else None


def plain_model(source: str, config: TrainerConfig) -> Any:
    """The model of a folder, ready for `generate`, in bfloat16 on a GPU."""
    import torch

    from trainers.model import from_pretrained

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else config.dtype
    extra = {"trust_remote_code": True} if config.trust_remote_code else {}
    try:
        model = from_pretrained(source, dtype=dtype, **extra)
        return model.to(device).eval()
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {source!r} cannot be loaded: {error}") from error


def run(payload: dict[str, Any]) -> dict[str, Any]:
    """Evaluate as CONFIG.json says."""
    fields = payload["config"]
    config: TrainerConfig = TypeAdapter(TrainerConfigUnion).validate_python(resolve(fields))
    source, url = payload.get("model") or config.model, payload.get("url")
    urls = [url] if isinstance(url, str) else url
    tokenizer = load_tokenizer(config.model_copy(update={"model": source}))
    problems = load_problems(config, tokenizer)
    reward = eval_reward(config)
    limit = max_new_tokens(config)
    if urls:
        timeout_s, candidates = getattr(config, "vllm_server_timeout", 1800.0), getattr(config, "restricts_sampling", False)
        adapter = newest_adapter(urls[0], timeout_s) if getattr(config, "adapter_serving", None) else None
        generate = server_generate(urls, timeout_s, limit, candidates=candidates, adapter=adapter)
    else:
        generate = local_generate(plain_model(source, config), tokenizer, limit)
    return evaluate(problems, tokenizer, generate, reward)


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 2:
        print("usage: python -m trainers.evaluate CONFIG.json OUT.json", file=sys.stderr)
        return 2
    logging.basicConfig(level="INFO", format="%(levelname)s %(name)s: %(message)s")
    out = Path(arguments[1])
    try:
        result = run(json.loads(Path(arguments[0]).read_text(encoding="utf-8")))
    except (LoopwrightError, ValueError, OSError) as error:
        print(f"evaluation failed: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    temporary.write_text(json.dumps(result, indent=1, ensure_ascii=False), encoding="utf-8")
    temporary.replace(out)
    print(f"accuracy {result['accuracy']:.4f} on {result['scored']} problems in {result['seconds']:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
