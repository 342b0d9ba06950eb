"""The two generation endpoints of vLLM as a turn's request travels to them; `answers` reads what comes back.

`/inference/v1/generate` where the server has it (it says which policy version sampled which tokens), else `/v1/completions`,
stamped with the version known at dispatch. No connection here: `client` sends, this module only knows the bodies.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from trainers.algorithms import SamplerNeeds
from trainers.config import AsyncTrainerConfig

logger = logging.getLogger(__name__)

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
# What a server with our plugin does for whom reads an answer only when it ended; others know nothing of it. That many tokens go
# from its engine to its front end at once, and log-probabilities come as arrays.
BATCHED: dict[str, Any] = {"loopwright_hold_tokens": 64}
ARRAYS = BATCHED | {"loopwright_arrays": 1}


class RequestFailed(Exception):
    """A request was given up. `cause` is short and countable (`http_400`, `timeout`, …); the message has the details."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class Retryable(Exception):
    """An attempt failed in a way that another may not. `cause` as in `RequestFailed`."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class SamplingForm:
    """What every request of a run asks for beside its own temperature, length and seed."""

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    top_logprobs: int = 0  # the sampler's K most likely tokens at every position; 0: the sampled token's logprob alone
    candidates: bool = False  # the ids every token was sampled among

    @classmethod
    def of(cls, config: AsyncTrainerConfig, needs: SamplerNeeds) -> SamplingForm:
        """What `config` says and the run's objective needs."""
        if config.repetition_penalty != 1:
            logger.warning(
                "repetition_penalty=%g: the server samples from penalised logits, which the trainer does not compute: "
                "the ratio to the sampler is biased",
                config.repetition_penalty,
            )
        return cls(config.top_p, config.top_k, config.min_p or 0.0, config.repetition_penalty, *needs)


PLAIN = SamplingForm()


def request_body(
    form: SamplingForm,
    generate: bool,
    model: str,
    prompt_ids: np.ndarray,
    *,
    temperature: float,
    max_tokens: int,
    seed: int,
    version: int | None,
) -> tuple[str, bytes]:
    """Path and JSON body of one turn. `generate`: the server has `/inference/v1/generate`."""
    top_k = form.top_k
    if form.candidates and temperature == 0:
        # A server that returns candidate sets refuses temperature 0: the likeliest token is then the only candidate.
        temperature, top_k = 1.0, 1
    # Neutral values are said, because the server would otherwise take those of the model's generation config.
    sampling: dict[str, Any] = {
        "temperature": temperature,
        "top_p": form.top_p,
        "top_k": top_k,
        "min_p": form.min_p,
        "repetition_penalty": form.repetition_penalty,
        "max_tokens": max_tokens,
        "seed": seed,
        "logprobs": form.top_logprobs,
    }
    # Cached prefixes are only shared within one policy version.
    body: dict[str, Any] = {"model": model, "cache_salt": str(version)}
    if generate:
        # Flat: how the server keeps them, without an object per token and rank. The Python front ends know the one name of
        # further arguments, the Rust front end the other; what they do not know they leave out.
        sampling |= {"detokenize": False, "flat_logprobs": True, "extra_args": ARRAYS, "vllm_xargs": BATCHED}
        if form.top_logprobs:
            # The sampled token counts among them here, so that one of the K would be missing whenever it is none of them.
            sampling["logprobs"] += 1
        body |= {"token_ids": prompt_ids.tolist(), "sampling_params": sampling}
        return GENERATE, msgspec.json.encode(body)
    body |= {"prompt": prompt_ids.tolist(), "return_token_ids": True, "return_tokens_as_token_ids": True, **sampling}
    body["vllm_xargs"] = BATCHED
    return COMPLETIONS, msgspec.json.encode(body)


def refusal(form: SamplingForm, message: str) -> str | None:
    """What to do about a 400 whose cause is what `form` asks of the server; None if it has another."""
    if "logprobs" in message and form.top_logprobs:
        return (
            f"it does not return the {form.top_logprobs} most likely tokens that the objective needs: start it with "
            f"--max-logprobs {form.top_logprobs + 1}, or lower num_sampler_logprobs, or set score_centering=false; with "
            f"exact_reverse_kl lower teacher_top_k ({message})"
        )
    return None
