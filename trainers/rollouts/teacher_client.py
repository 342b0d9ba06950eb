"""Connections to one teacher: what a scoring request is, in the cheapest form its server has, and what the server can do.

    open: look ─▶ probe: each form until one works ─▶ attempt: request bytes ══▶ server ══▶ answer bytes ─▶ Scored

| form | endpoint | when |
| --- | --- | --- |
| chosen ids, answered as one binary array | `/inference/v1/generate` | exact_reverse_kl; or no top tokens are wanted |
| `prompt_logprobs` | `/inference/v1/generate` | the server has it: nothing is turned into text |
| `prompt_logprobs` | `/v1/completions` | else |

vLLM's Rust front end names the tokens of `prompt_logprobs` by their text in `/v1/completions`: the probe finds that out.
Nothing is retried here, and no attempt is bounded in time: both are `Teacher`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from trainers.config_distillation import DistillationConfig
from trainers.errors import ServerCapabilityError
from trainers.rollouts.client import GenerateClient, ServerFacts
from trainers.rollouts.protocol import COMPLETIONS, GENERATE, RequestFailed
from trainers.rollouts.teacher_answers import Scored, read_chosen, read_prompt_logprobs

KEYS = ("VLLM_TEACHER_API_KEY", "VLLM_API_KEY")
Form = Literal["chosen", "generate", "completions"]

_PROBE_TOKENS = 6
_LEAST_DIFFERENCE = 1e-4  # nats, between log-probabilities at two temperatures


@dataclass(frozen=True, slots=True)
class TeacherNeeds:
    """What the objective wants to know at every position, beside the realised token's log-probability."""

    top_k: int  # ids: the teacher's own likeliest, or those chosen
    chosen: bool  # they are chosen: the student's likeliest
    temperature: float

    @classmethod
    def of(cls, config: DistillationConfig) -> TeacherNeeds:
        if config.exact_reverse_kl:
            return cls(config.teacher_top_k, True, config.teacher_temperature)
        return cls(config.teacher_tops, False, config.teacher_temperature)

    @property
    def forms(self) -> list[Form]:
        """The forms that would do, cheapest first."""
        if self.chosen:
            return ["chosen"]
        return ["generate", "completions"] if self.top_k else ["chosen", "generate", "completions"]


class TeacherClient:
    """Keep-alive connections to one teacher.

    Args:
        label: what to call it in messages.
        base_url: of the server, without `/v1`.
        needs: what every request asks for.
        keys: as in `GenerateClient`.
    """

    def __init__(self, label: str, base_url: str, needs: TeacherNeeds, keys: Sequence[str] = KEYS) -> None:
        self.server = GenerateClient(base_url, keys=keys)
        self.form: Form | None = None
        self._label, self._needs = label, needs

    async def open(self, wait_s: float) -> ServerFacts:
        """Connect and look at the server, waiting up to `wait_s` for it. Raises `ServerError`."""
        return await self.server.open(wait_s)

    async def probe(self, vocab_size: int) -> None:
        """Find the form to ask in, with a prompt of a few ids below `vocab_size`.

        Raises:
            ServerCapabilityError: it cannot score as this run needs; the message says why and what to do.
            Retryable: it answered about itself, and then failed.
        """
        facts = self.server.facts
        assert facts is not None, "open() comes first"
        prompt = np.unique(np.linspace(0, vocab_size - 1, _PROBE_TOKENS).astype(np.int32))
        reasons = []
        for form in self._needs.forms:
            if form != "completions" and not facts.generate:
                reasons.append(f"it has no {GENERATE}: start it with --enable-scale-out")
                continue
            self.form = form
            try:
                scored = await self._score_probe(prompt, self._needs.temperature)
            except RequestFailed as error:
                reasons.append(_remedy(form, self._needs, str(error)))
                continue
            if np.isnan(scored.targets).any():
                reasons.append(f"{facts.model} names tokens by their text, not their ids: VLLM_USE_RUST_FRONTEND=0 does not")
                continue
            listed = (scored.ids >= 0).sum(axis=1).min()  # the realised token may be one of those asked for
            if not self._needs.chosen and listed < min(self._needs.top_k, vocab_size) - 1:
                reasons.append(_too_few(self._needs, f"it sent {listed} beside the sampled token's"))
                continue
            await self._check_scale(prompt, scored)
            return
        self.form = None
        raise ServerCapabilityError(f"{self._label} cannot score: {'; '.join(dict.fromkeys(reasons))}")

    async def close(self) -> None:
        await self.server.close()

    async def attempt(self, token_ids: np.ndarray, start: int, chosen: np.ndarray | None = None) -> Scored:
        """One try of scoring positions [start, L) of `token_ids`, int32 [L]. `chosen`: int32 [L − start, K], ids to score there
        where those are chosen; −1: none.

        Raises:
            Retryable: another try may succeed.
            RequestFailed: the server refuses the request.
        """
        return await self._ask(token_ids, start, chosen, self._needs.temperature)

    async def _ask(self, token_ids: np.ndarray, start: int, chosen: np.ndarray | None, temperature: float) -> Scored:
        assert self.server.facts is not None and self.form is not None, "open() comes first"
        ids = _asked_for(token_ids[start:], chosen) if self.form == "chosen" else None
        path, body = _request(self.form, self.server.facts.model, token_ids, start, self._needs.top_k, ids, temperature)
        status, answer = await self.server.post(path, body)
        if status != 200:
            raise self.server.refused(path, status, answer[:300].decode(errors="replace"))
        if ids is not None:
            return read_chosen(answer, ids)
        return read_prompt_logprobs(answer, token_ids, start, self._needs.top_k)

    # At the start

    async def _score_probe(self, prompt: np.ndarray, temperature: float) -> Scored:
        width = self._needs.top_k if self._needs.chosen else 0
        chosen = np.tile(np.arange(width, dtype=np.int32) % (prompt.max() + 1), (len(prompt) - 1, 1))
        return await self._ask(prompt, 1, chosen, temperature)

    async def _check_scale(self, prompt: np.ndarray, scored: Scored) -> None:
        """Raises `ServerCapabilityError` if what it returns are no log-probabilities at the temperature asked for."""
        values = np.concatenate([scored.targets[:, None], np.where(scored.ids < 0, -np.inf, scored.logprobs)], axis=1)
        distinct = not self._needs.chosen  # of chosen ids, several may be one
        if values.max() > 1e-3 or (distinct and np.exp(values, dtype=np.float64).sum(axis=1).max() > 1 + 1e-3):
            raise ServerCapabilityError(
                f"{self._label} returns logits, not log-probabilities: start it with --logprobs-mode processed_logprobs"
            )
        if self._needs.temperature == 1:
            return
        plain = await self._score_probe(prompt, 1.0)
        if np.abs(plain.targets - scored.targets).max() < _LEAST_DIFFERENCE:
            raise ServerCapabilityError(
                f"{self._label} returns log-probabilities at temperature 1, whatever is asked for: by itself vLLM applies none "
                "to those of prompts, in any --logprobs-mode. With infra/vllm_plugin on its PYTHONPATH and --logprobs-mode "
                "processed_logprobs it does, as in servers that a flow starts; or set teacher_temperature=1"
            )


def _asked_for(realised: np.ndarray, chosen: np.ndarray | None) -> np.ndarray:
    """int32 [P, 1 + K]: the realised token and those chosen, without it."""
    if chosen is None:
        return realised[:, None].astype(np.int32)
    return np.concatenate([realised[:, None], np.where(chosen == realised[:, None], -1, chosen)], axis=1, dtype=np.int32)


def _request(
    form: Form, model: str, token_ids: np.ndarray, start: int, top_k: int, ids: np.ndarray | None, temperature: float
) -> tuple[str, bytes]:
    """Path and JSON body. The one token that must be generated is thrown away."""
    sampling: dict[str, Any] = {"max_tokens": 1, "temperature": temperature}
    if ids is None:
        sampling["prompt_logprobs"] = top_k
    else:
        sampling |= {"prompt_logprob_start": start - 1, "prompt_logprob_token_ids": ids.tolist()}
    tokens = token_ids.tolist()
    if form == "completions":
        return COMPLETIONS, msgspec.json.encode({"model": model, "prompt": tokens, **sampling})
    sampling["detokenize"] = False
    return GENERATE, msgspec.json.encode({"model": model, "token_ids": tokens, "sampling_params": sampling})


def _remedy(form: Form, needs: TeacherNeeds, message: str) -> str:
    """What to do about a probe that was refused."""
    if "max allowed" in message or "max_logprobs" in message:
        return _too_few(needs, message)
    if form == "chosen" and needs.chosen:
        return (
            "it does not score chosen ids (prompt_logprob_token_ids), which exact_reverse_kl needs: set it to false, or use a "
            f"GPU server of vLLM 0.32 or newer with VLLM_USE_V2_MODEL_RUNNER=1 and VLLM_USE_RUST_FRONTEND=0 ({message})"
        )
    return message


def _too_few(needs: TeacherNeeds, message: str) -> str:
    return f"it returns fewer than {needs.top_k} log-probabilities a token: start it with --max-logprobs -1 ({message})"
