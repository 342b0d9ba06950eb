"""Configuration of on-policy distillation, from one teacher or, each row from its own, from many."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from trainers.config_trainer import LEAST_TEMPERATURE, PolicyLossConfig, check_urls
from trainers.roster import plain_url

# Fields that one loss reads and the other does not.
_OF_LOSS = {
    "jsd": ("beta", "teacher_top_k", "add_tail_bucket", "exact_reverse_kl"),
    "policy_gradient": (
        "score_centering",
        "num_sampler_logprobs",
        "vllm_importance_sampling_clip_min",
        "vllm_importance_sampling_clip_max",
        "importance_sampling",
        "epsilon",
        "epsilon_high",
    ),
}


def key_variable(teacher: str) -> str:
    """Environment variable with the key of one teacher. Not set: its key is that of all teachers, or of all servers. Set and
    empty: it has none."""
    return f"VLLM_TEACHER_API_KEY_{teacher}"


class DistillationConfig(PolicyLossConfig):
    """Asynchronous on-policy distillation: the student generates, served teachers score (arXiv:2306.13649)."""

    type: Literal["distillation"] = Field("distillation", description="Algorithm.")
    teacher_server_urls: dict[str, str] = Field(
        default_factory=lambda: {"default": "http://localhost:8001"},
        description="Teacher servers by name. Of several, each row is scored by the one that its column `teacher_id` names.",
    )
    loss: Literal["jsd", "policy_gradient"] = Field(
        "jsd",
        description="jsd (default): a divergence of the two distributions at every token. policy_gradient: the sampled tokens "
        "alone, with advantage log teacher − log student, through the policy losses.",
    )
    beta: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Generalised Jensen-Shannon divergence: 0 (default) KL(teacher ‖ student), 1 KL(student ‖ teacher). Above "
        "0 it is taken over the teacher's likeliest token, the sampled one and the rest.",
    )
    teacher_temperature: float = Field(
        1.0,
        ge=LEAST_TEMPERATURE,
        description="Divides the teacher's logits, and with loss=jsd the student's; sampling has its own. Default 1.",
    )
    teacher_top_k: int = Field(
        8, ge=1, description="The teacher's likeliest tokens at every position, for beta=0 or exact_reverse_kl. Default 8."
    )
    add_tail_bucket: bool = Field(
        True, description="Count the rest of the vocabulary as one more token; else both sides are renormalised. Default true."
    )
    exact_reverse_kl: bool = Field(
        False,
        description="With beta above 0: the teacher scores the student's own teacher_top_k likeliest tokens. Default false.",
    )
    teacher_balance: bool = Field(
        False, description="Every teacher weighs the same in a step, however many tokens it scored. Default false."
    )
    teacher_concurrency: int | None = Field(
        None, ge=1, description="Most scoring requests at once per teacher. None: as many as rollouts."
    )
    max_teacher_failure_frac: float = Field(
        0.1, ge=0, le=1, description="Fail the run above this share of a teacher's failed scorings. Default 0.1."
    )
    log_completions_steps: int = Field(
        100, ge=1, description="With log_completions: print a table every this many scored samples. Default 100."
    )
    score_centering: bool = Field(
        False, description="Subtract the sampler's mean score at every position (needs its top logprobs). Default false."
    )

    @property
    def teachers(self) -> tuple[str, ...]:
        return tuple(self.teacher_server_urls)

    @property
    def loss_temperature(self) -> float:
        return self.teacher_temperature if self.loss == "jsd" else self.temperature

    @property
    def sampler_tops(self) -> int:
        return self.teacher_top_k if self.exact_reverse_kl else super().sampler_tops

    @property
    def teacher_tops(self) -> int:
        """The teacher's own likeliest tokens at every position that the objective asks for, beside the sampled one."""
        if self.loss == "policy_gradient" or self.exact_reverse_kl or self.beta == 1:
            return 0
        return self.teacher_top_k if self.beta == 0 else 1

    @field_validator("teacher_server_urls", mode="before")
    @classmethod
    def _none_is_the_default(cls, given: Any) -> Any:
        return cls.model_fields["teacher_server_urls"].get_default(call_default_factory=True) if given is None else given

    @field_validator("teacher_server_urls")
    @classmethod
    def _teachers_are_told_apart(cls, given: dict[str, str]) -> dict[str, str]:
        if not given:
            raise ValueError("no teacher is given: name at least one, as in {default: http://localhost:8001}")
        for name in given:
            if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
                raise ValueError(
                    f"{name!r} cannot name a teacher: a name has letters, digits, `_`, `-` and `.`, and does not start with "
                    "either of the last two"
                )
        check_urls([plain_url(url) for url in given.values()])
        return given

    @model_validator(mode="after")
    def _fields_are_of_the_loss(self) -> DistillationConfig:
        (other,) = set(_OF_LOSS) - {self.loss}
        for name in _OF_LOSS[other]:
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name}={value!r} is of loss={other}, and loss is {self.loss}: leave it out, or set loss={other}"
                )
        return self

    @model_validator(mode="after")
    def _reverse_needs_beta(self) -> DistillationConfig:
        if self.exact_reverse_kl and self.beta == 0:
            raise ValueError(
                "exact_reverse_kl=true with beta=0: that divergence is the teacher's expectation, taken over the teacher's own "
                "likeliest tokens; set beta above 0, or leave exact_reverse_kl out"
            )
        return self

    @model_validator(mode="after")
    def _something_is_compared(self) -> DistillationConfig:
        if self.beta == 1 and not (self.add_tail_bucket or self.exact_reverse_kl):
            raise ValueError(
                "add_tail_bucket=false with beta=1: the sampled token is then all that is compared, with all of either side: "
                "nothing is learned; leave add_tail_bucket out, or set exact_reverse_kl=true"
            )
        return self
