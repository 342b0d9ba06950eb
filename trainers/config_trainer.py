"""Configuration that algorithms share: fields of every trainer, of those that generate, and of those with a policy loss."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from trainers.config_base import StrictModel, unknown
from trainers.config_parts import CallableSpec, DatasetConfig, EvalConfig
from trainers.config_peft import ADAPTER_RANKS, AdapterServing, PeftConfig
from trainers.packing import row_multiple
from trainers.roster import plain_url
from trainers.training_arguments import config_refusal

CHECKPOINT_KWARGS = ("offload", "use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")
DType = Literal["auto", "float32", "bfloat16", "float16"]
LEAST_TEMPERATURE = 0.01  # vLLM takes a lower one for this one: its log-probabilities would be at another than the trainer's


class TrainerConfig(StrictModel):
    """Fields of every algorithm."""

    @classmethod
    def refusal(cls, name: str) -> str | None:
        return (config_refusal(name) if name not in cls.model_fields else None) or super().refusal(name)

    # What to run
    model: str = Field(description="Folder with a Hugging Face model, or a hub id.")
    dataset: DatasetConfig = Field(description="Training prompts.")
    eval: EvalConfig | None = Field(None, description="Held-out evaluation. Default none.")
    output_dir: str = Field(
        "runs/run", description="Folder for checkpoints and logs. Flows set it from `storage` and the run name."
    )

    # Model
    model_init_kwargs: dict[str, Any] | None = Field(None, description="Keyword arguments of `from_pretrained`. Default none.")
    dtype: DType = Field("float32", description="Type the weights are loaded in. Default float32.")
    trust_remote_code: bool = Field(False, description="Run Python code shipped with the model or tokenizer. Default false.")
    peft: PeftConfig | None = Field(None, description="Train a low-rank adapter (LoRA). Default none: the whole model.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Extra arguments of `apply_chat_template`. Default none."
    )

    # Batch and length of the run
    max_steps: int = Field(-1, ge=-1, description="Optimizer steps; -1 (default): `num_train_epochs` passes over the prompts.")
    num_train_epochs: float = Field(1.0, gt=0, description="Passes over the prompts when max_steps is -1. Default 1.")
    per_device_train_batch_size: int = Field(
        8, ge=1, description="Samples per row when token_budget ≤ 0; else only sizes max_concurrent_rollouts. Default 8."
    )
    gradient_accumulation_steps: int = Field(1, ge=1, description="Micro-batches per optimizer step. Default 1.")
    token_budget: int | None = Field(
        None,
        description="Most tokens in one packed row. None: the longest sequence allowed; ≤ 0: rows of a fixed sample count.",
    )

    # Optimizer
    learning_rate: float = Field(1e-6, ge=0, description="Peak learning rate. Default 1e-6.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay. Default 0.")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="Adam β1. Default 0.9.")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="Adam β2. Default 0.999.")
    adam_epsilon: float = Field(1e-8, gt=0, description="Adam ε. Default 1e-8.")
    max_grad_norm: float = Field(1.0, ge=0, description="Clip the global gradient norm to this; 0: no clipping. Default 1.")
    optim: str = Field("adamw_torch", description="Optimizer by transformers' name. Default adamw_torch.")
    optim_args: str | None = Field(None, description="Optimizer arguments, `key=value,…`. Default none.")
    lr_scheduler_type: str = Field(
        "constant", description="Schedule by transformers' name. A decaying one needs max_steps. Default constant."
    )
    lr_scheduler_kwargs: dict[str, Any] | None = Field(None, description="Extra schedule arguments. Default none.")
    warmup_steps: float = Field(0, ge=0, description="Warm-up steps; below 1: fraction of max_steps. Default 0.")
    bf16: bool | None = Field(None, description="bfloat16 autocast/FSDP mixed precision. None: true on a GPU, false on CPU.")
    gradient_checkpointing: bool = Field(True, description="Recompute activations in the backward. Default true.")
    gradient_checkpointing_kwargs: dict[str, Any] | None = Field(
        None,
        description="Its arguments, and `offload: true`: keep each layer's input in pinned host memory until its backward. "
        "Default none.",
    )
    save_attention: bool = Field(
        False,
        description="Keep what attention returns (with `offload`, in host memory) instead of running it again in the backward: "
        "less time at long sequences, as much memory again as the layers' inputs. Default false.",
    )
    mlp_tile_tokens: int | None = Field(
        None,
        ge=16,
        description="Run each layer's MLP over slices of this many tokens, so that its wide tensors never exist for the whole "
        "row. None (default): at once.",
    )
    cp_size: int = Field(
        1,
        ge=1,
        description="Ranks that share each row by ring attention. Needs rows of one sequence (packing=false; "
        "elsewhere token_budget=0 and per_device_train_batch_size=1). Default 1.",
    )
    sp_size: int = Field(
        1,
        ge=1,
        description="Ranks that share each row by Ulysses (all-to-all over the attention heads, which it divides); beside "
        "cp_size, cp_size × sp_size ranks do. Default 1.",
    )

    # Bookkeeping
    logging_steps: int = Field(1, ge=1, description="Log every this many steps. Default 1.")
    logging_first_step: bool = Field(False, description="Log the first step too where logging_steps is above 1. Default false.")
    report_to: list[str] = Field(
        default_factory=list,
        description="Loggers beside Loopwright's own metrics: tensorboard, wandb; a script may name any that transformers has. "
        "Default none.",
    )
    save_steps: int = Field(50, ge=1, description="Checkpoint every this many steps, and at the end. Default 50.")
    save_total_limit: int | None = Field(3, ge=1, description="Keep this many newest checkpoints. None: all. Default 3.")
    seed: int = Field(42, ge=0, description="Seed of shuffling, sampling and initialisation. Default 42.")
    shuffle: bool = Field(True, description="Shuffle prompts, by (seed, epoch). Default true.")
    allow_dataset_change: bool = Field(False, description="Resume although the dataset's fingerprint changed. Default false.")
    rollout_worker_timeout: float = Field(
        300.0, gt=0, description="Seconds without progress before the run fails. Default 300."
    )
    save_rollout_buffer: bool = Field(True, description="Keep generated, untrained samples in the checkpoint. Default true.")
    queue_maxsize: int = Field(1024, ge=1, description="Most samples waiting for the trainer. Default 1024.")
    queue_max_bytes: int = Field(
        2**31, ge=1, description="Most bytes of samples waiting for the trainer; at it, no new prompt starts. Default 2 GiB."
    )

    @property
    def loss_temperature(self) -> float:
        """What the objective divides the logits by."""
        return 1.0

    @property
    def teachers(self) -> tuple[str, ...]:
        """Names of the models to learn from, in the order in which packed rows number them."""
        return ()

    @field_validator("report_to", mode="before")
    @classmethod
    def _list_of_loggers(cls, value: Any) -> Any:
        """As transformers reads it: one name, or `none`."""
        names = [value] if isinstance(value, str) else value
        return [] if names in (None, ["none"]) else names

    @field_validator("gradient_checkpointing_kwargs")
    @classmethod
    def _arguments_of_checkpoint(cls, kwargs: dict[str, Any] | None) -> dict[str, Any] | None:
        for name in kwargs or {}:
            if name not in CHECKPOINT_KWARGS:
                raise ValueError(unknown(str(name), CHECKPOINT_KWARGS, f"argument `{name}`"))
        return kwargs

    @model_validator(mode="after")
    def _kept_for_a_recomputation(self) -> TrainerConfig:
        if not self.gradient_checkpointing:
            offload = (self.gradient_checkpointing_kwargs or {}).get("offload")
            name = "save_attention" if self.save_attention else "gradient_checkpointing_kwargs.offload" if offload else None
            if name is not None:
                raise ValueError(
                    f"{name} is about what gradient checkpointing keeps: set gradient_checkpointing=true, or leave it out"
                )
        return self

    @model_validator(mode="after")
    def _rows_can_be_shared(self) -> TrainerConfig:
        counted = self.token_budget is not None and self.token_budget <= 0 and self.per_device_train_batch_size == 1
        if self.cp_size > 1 and getattr(self, "packing", True) and not counted:
            switch = "packing=false" if hasattr(self, "packing") else "token_budget=0 and per_device_train_batch_size=1"
            raise ValueError(
                f"cp_size={self.cp_size} with packing: ring attention runs one sequence a row. Set {switch}, or write "
                f"sp_size={self.cp_size}, which packs"
            )
        multiple = row_multiple(self.cp_size, self.sp_size)
        longest = getattr(self, "max_length", None)
        if longest is not None and longest % multiple:
            raise ValueError(
                f"max_length={longest} does not divide among cp_size × sp_size = {self.cp_size} × {self.sp_size} ranks, which "
                f"need a multiple of {multiple}: write {longest + -longest % multiple}. Shorter sequences are padded"
            )
        return self

    @model_validator(mode="after")
    def _base_is_not_quantised(self) -> TrainerConfig:
        asked = {"quantization_config", "load_in_4bit", "load_in_8bit"} & set(self.model_init_kwargs or {})
        if asked:
            raise ValueError(
                f"model_init_kwargs.{sorted(asked)[0]}: a quantised model (QLoRA) is not trained here: its log-probabilities "
                "are not those of the weights that are served. Write dtype=bfloat16 (2 bytes a parameter) and peft"
            )
        return self


class AsyncTrainerConfig(TrainerConfig):
    """What every algorithm that generates has."""

    max_completion_length: int = Field(
        2048, ge=1, description="Most tokens sampled per completion, all turns together. Default 2048."
    )
    temperature: float = Field(
        1.0,
        ge=LEAST_TEMPERATURE,
        description="Sampling temperature; the policy is softmax(logits / temperature). Default 1.",
    )
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Sample among the most likely tokens of this total probability; needs top_k. Default 1.",
    )
    top_k: int = Field(0, ge=0, description="Sample among this many most likely tokens. 0 (default): all.")
    min_p: float | None = Field(
        None, ge=0, le=1, description="Sample among tokens at least this fraction as likely as the likeliest; needs top_k."
    )
    repetition_penalty: float = Field(
        1.0,
        gt=0,
        description="Above 1, tokens that occurred become less likely; the ratio is then biased. Default 1.",
    )
    vllm_server_base_url: str | list[str] = Field(
        "http://localhost:8000", description="Student server, or a list of several. Flows fill it in."
    )
    vllm_server_timeout: float = Field(
        1800.0,
        gt=0,
        description="Seconds to wait for a server, a sync, or a request and its repeats; one try may take half. Default 1800.",
    )
    max_concurrent_rollouts: int | None = Field(
        None, ge=1, description="Most rollouts in flight. None: max(max_staleness, 1) × batch size × accumulation × ranks."
    )
    max_staleness: int = Field(4, ge=0, description="Policy versions a sample's oldest token may lag behind. Default 4.")
    weight_sync_steps: int = Field(1, ge=1, description="Optimizer steps between weight syncs. Default 1.")
    weight_sync: Literal["auto", "nccl", "ipc", "shared_storage", "sparse", "lora"] = Field(
        "auto",
        description="How weights reach the servers: broadcasts (nccl), memory of a shared GPU (ipc), a file (shared_storage), "
        "only what changed (sparse), the adapter alone (lora). Default auto: by where they run and whether they take adapters.",
    )
    weight_check_steps: int = Field(
        50, ge=0, description="Compare a probe's logprobs with the server every this many syncs; 0: never."
    )
    max_rollout_failure_frac: float = Field(
        0.1, ge=0, le=1, description="Fail the run above this share of failed rollouts. Default 0.1."
    )
    loop_cls: CallableSpec | None = Field(
        None, description="Subclass of `AsyncRolloutLoop` by import path, to change how rollouts are made. Default none."
    )
    log_completions: bool = Field(False, description="Print a table of the step's completions at every log. Default false.")
    num_completions_to_print: int | None = Field(
        None, ge=1, description="Rows of that table. None: all the rollouts of the step that were kept."
    )
    keep_rollout_every: int = Field(
        100,
        ge=0,
        description="Keep every n-th rollout as a row of the MLflow table `rollouts` and as a trace. 0: none. Default 100.",
    )

    @property
    def loss_temperature(self) -> float:
        """That of sampling."""
        return self.temperature

    @property
    def adapter_serving(self) -> AdapterServing | None:
        """With what servers take this run's adapters: as many as there are versions in use, one that just left and a new one.

        None: what is served is whole weights.
        """
        if self.peft is None or self.weight_sync not in ("auto", "lora") or self.peft.merged_only:
            return None
        rank = next(rank for rank in ADAPTER_RANKS if rank >= self.peft.largest_rank)
        return AdapterServing(rank, self.max_staleness + 2)

    @property
    def restricts_sampling(self) -> bool:
        """Tokens are sampled among a part of the vocabulary, over which their log-probabilities are renormalised."""
        return self.top_p < 1 or self.top_k > 0 or bool(self.min_p)

    @model_validator(mode="after")
    def _adapters_can_be_served(self) -> AsyncTrainerConfig:
        if self.weight_sync != "lora":
            return self
        if self.peft is None:
            raise ValueError("weight_sync=lora sends an adapter: set `peft` (peft: {r: 16}), or weight_sync=auto")
        if cause := self.peft.merged_only:
            raise ValueError(
                f"weight_sync=lora with peft {cause}: vLLM cannot serve that as an adapter; set weight_sync=auto, which sends "
                "the merged weights, or leave it out of `peft`"
            )
        return self

    @model_validator(mode="after")
    def _candidates_are_bounded(self) -> AsyncTrainerConfig:
        cause = "top_p" if self.top_p < 1 else "min_p" if self.min_p else None
        if cause is not None and not self.top_k:
            raise ValueError(
                f"{cause} needs top_k: the server returns the tokens that each one was sampled among, and only top_k bounds "
                "how many those are: set top_k too (50, say), or sample among all tokens"
            )
        return self

    @field_validator("vllm_server_base_url")
    @classmethod
    def _servers_are_different(cls, given: str | list[str]) -> str | list[str]:
        urls = _plain_urls(given)
        if not urls:
            raise ValueError("the list of servers is empty: name at least one, as in http://localhost:8000")
        check_urls(urls)
        return given

    @property
    def server_urls(self) -> list[str]:
        """The student servers, without a trailing slash or `/v1`."""
        return _plain_urls(self.vllm_server_base_url)


def check_urls(urls: list[str]) -> None:
    """Raises `ValueError` for one that is no address, or is there twice. Empty ones a flow fills in."""
    for url in filter(None, urls):
        if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", url):
            raise ValueError(f"{url!r} is no address of a server: write it as http://localhost:8000")
        if urls.count(url) > 1:
            raise ValueError(f"{url} is named twice: name every server once")


def _plain_urls(given: str | list[str]) -> list[str]:
    return [plain_url(url) for url in ([given] if isinstance(given, str) else given)]


class PolicyLossConfig(AsyncTrainerConfig):
    """What algorithms have that weigh sampled tokens by an advantage: how far the policy may be from the sampler."""

    score_centering: bool = Field(
        True, description="Subtract the sampler's mean score at every position (needs its top logprobs). Default true."
    )
    num_sampler_logprobs: int = Field(
        8, ge=1, description="The sampler's most likely tokens that score centering sums over. Default 8."
    )
    vllm_importance_sampling_clip_min: float = Field(
        0.5, ge=0, description="Lowest ratio to the sampler that is not masked, or truncated to it. Default 0.5."
    )
    vllm_importance_sampling_clip_max: float = Field(
        5.0, gt=0, description="Highest ratio to the sampler that is not masked, or truncated to it. Default 5."
    )
    importance_sampling: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = Field(
        "none",
        description="How the ratio to the sampler weighs a token: truncated to the two bounds, or masked outside them; its own "
        "ratio or its sequence's product; in place of the clip. none (default): score centering masks, else only the clip.",
    )
    epsilon: float = Field(0.2, gt=0, description="Lower clip of the ratio: 1 − ε. Default 0.2.")
    epsilon_high: float | None = Field(None, gt=0, description="Upper clip: 1 + ε_high. None: epsilon.")

    @property
    def sampler_tops(self) -> int:
        """The sampler's likeliest tokens at every position that the objective asks for; 0: none."""
        return self.num_sampler_logprobs if self.score_centering else 0

    @property
    def server_logprobs(self) -> int:
        """Log-probabilities per token that the server must be willing to return (`--max-logprobs`).

        One more than are used: `/inference/v1/generate` counts the sampled token among them.
        """
        return self.sampler_tops + 1

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> PolicyLossConfig:
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        if not low <= 1 <= high:
            raise ValueError(
                f"vllm_importance_sampling_clip_min={low:g} and vllm_importance_sampling_clip_max={high:g} would mask every "
                "token of an up-to-date sampler: the first must be at most 1, the second at least 1"
            )
        return self

    @model_validator(mode="after")
    def _centering_is_by_token(self) -> PolicyLossConfig:
        if self.score_centering and self.importance_sampling.startswith("sequence"):
            raise ValueError(
                f"importance_sampling={self.importance_sampling} weighs whole sequences, and score_centering is for weights of "
                "tokens only: set score_centering=false, or importance_sampling=token_truncate or token_mask"
            )
        return self
