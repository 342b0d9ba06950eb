"""Configuration of supervised fine-tuning, on prompts and completions or on books joined to long sequences."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from trainers.config_base import StrictModel, unknown
from trainers.config_trainer import TrainerConfig

ROPE_TYPES = ("yarn", "linear", "dynamic", "longrope", "llama3", "proportional", "default")
ROPE_FIELDS = (  # of transformers' `rope_parameters`, whatever the type
    "rope_type", "factor", "original_max_position_embeddings", "rope_theta", "partial_rotary_factor", "attention_factor",
    "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "short_factor", "long_factor", "low_freq_factor",
    "high_freq_factor", "mrope_section", "mrope_interleaved",
)  # fmt: skip


class BooksConfig(StrictModel):
    """Texts joined end to end, cut into sequences of `max_length` tokens."""

    text_column: str = Field("text", description="Column with the text, where the data has columns. Default text.")
    cache_dir: str | None = Field(
        None,
        description="Folder of the token cache; may be shared by runs and machines. Default `$LOOPWRIGHT_HOME/token_cache`, "
        "or `~/.loopwright/token_cache`.",
    )
    workers: int | None = Field(None, ge=1, description="Threads that tokenize. None (default): one per CPU core.")
    last_sequence: Literal["keep", "drop"] = Field(
        "keep",
        description="What becomes of the tokens left at the end, fewer than max_length: `keep` (default) trains them as a "
        "shorter sequence, `drop` leaves them out; the log says how many they are.",
    )


class HeldOutBooksConfig(StrictModel):
    """Books that are not trained on: their loss by position is measured."""

    path: str = Field(description="As `dataset.path` with `books`: a folder of .txt files, a file, or a hub id.")
    split: str = Field("train", description="Split of a hub dataset; ignored for files. Default train.")
    sequences: int = Field(1, ge=1, description="Sequences of max_length tokens to measure on, from the first. Default 1.")
    bins: int = Field(64, ge=1, description="Parts of equal length of the sequence in the plot and its table. Default 64.")


class NeedleConfig(StrictModel):
    """A sentence with a number is hidden in a long text, and the number is asked for at its end."""

    lengths: list[int] | None = Field(None, description="Tokens of the text. None (default): max_length.")
    depths: list[float] = Field(
        default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0],
        description="Where the sentence stands: 0 at the beginning, 1 just before the question. Default 0, 0.25, 0.5, 0.75, 1.",
    )
    samples: int = Field(1, ge=1, description="Texts per length and depth, each with another number. Default 1.")

    @field_validator("depths")
    @classmethod
    def _within_the_text(cls, depths: list[float]) -> list[float]:
        if not depths or any(not 0 <= depth <= 1 for depth in depths) or len({round(100 * d) for d in depths}) < len(depths):
            raise ValueError(f"depths {depths}: write one or more different shares of the text, each from 0 to 1, such as 0.5")
        return depths

    @field_validator("lengths")
    @classmethod
    def _room_for_a_sentence(cls, lengths: list[int] | None) -> list[int] | None:
        if lengths is not None and (not lengths or min(lengths) < 128 or len(set(lengths)) < len(lengths)):
            raise ValueError(f"lengths {lengths}: write one or more different numbers of tokens, each 128 or more")
        return lengths


class LongEvalConfig(StrictModel):
    """Evaluation of long sequences by the trainer's own model: before training, at its end, and every `every` steps."""

    every: int = Field(0, ge=0, description="Optimizer steps between two; 0 (default): before and after training only.")
    books: HeldOutBooksConfig | None = Field(None, description="Loss by position on books held out. Default none.")
    needle: NeedleConfig | None = Field(None, description="Retrieval from a long text. Default none.")

    @model_validator(mode="after")
    def _asks_something(self) -> LongEvalConfig:
        if self.books is None and self.needle is None:
            raise ValueError("it asks for nothing: set books.path, or needle={} for the default depths, or leave it out")
        return self


class SFTConfig(TrainerConfig):
    """Supervised fine-tuning: a dataset row is a finished rollout."""

    type: Literal["sft"] = Field("sft", description="Algorithm.")
    max_length: int = Field(
        1024, ge=2, description="Longest sequence in tokens; longer rows are dropped and counted. Default 1024."
    )
    learning_rate: float = Field(2e-5, ge=0, description="Peak learning rate. Default 2e-5.")
    books: BooksConfig | None = Field(
        None,
        description="The dataset is texts, which are joined end to end and cut to `max_length`; `{}` takes the defaults. "
        "Default none: its rows are prompts and completions, or conversations.",
    )
    packing: bool = Field(
        True,
        description="Several sequences per packed row, as many as fit into token_budget; false: one sequence a row. "
        "Default true.",
    )
    loss_type: Literal["nll", "dft"] = Field(
        "nll",
        description="`nll` (default): negative log-likelihood; `dft`: each token's weighted by its own probability, which is "
        "taken as a constant (arXiv:2508.05629).",
    )
    completion_only_loss: bool | None = Field(
        None,
        description="Train the completion alone; false: the prompt too, all but its first token. None (default): true for "
        "rows with a completion.",
    )
    assistant_only_loss: bool = Field(
        False,
        description="Train what the assistant says alone, as the chat template marks it by `{% generation %}`, in every turn. "
        "Default false.",
    )
    pad_to_multiple_of: int | None = Field(
        None, ge=1, description="Lengthen each packed row to a multiple of this many tokens by untrained ones. None: not."
    )
    rope_parameters: dict[str, Any] | None = Field(
        None,
        description="Rotary scaling for sequences beyond the window the model was trained on, as "
        "`{rope_type: yarn, factor: auto}`; the base and the trained window are read from the model. Default: the model's own.",
    )
    long_eval: LongEvalConfig | None = Field(
        None, description="Loss by position on held-out books, and retrieval from a long text. Default none."
    )

    @field_validator("rope_parameters")
    @classmethod
    def _rotary_scaling(cls, given: dict[str, Any] | None) -> dict[str, Any] | None:
        for name in given or {}:
            if name not in ROPE_FIELDS:
                raise ValueError(unknown(str(name), ROPE_FIELDS, f"field `{name}`"))
        if given is not None and given.get("rope_type") not in ROPE_TYPES:
            raise ValueError(
                f"rope_type is {given.get('rope_type')!r}: write one of {', '.join(ROPE_TYPES)}, as in "
                "{rope_type: yarn, factor: auto}"
            )
        factor = (given or {}).get("factor", "auto")
        if factor != "auto" and (isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor < math.inf):
            raise ValueError(f"factor is {factor!r}: write a number of 1 or more, or auto")
        trained = (given or {}).get("original_max_position_embeddings", 1)
        if isinstance(trained, bool) or not isinstance(trained, int) or trained < 1:
            raise ValueError(
                f"original_max_position_embeddings is {trained!r}: write the trained window in tokens, or leave it out"
            )
        return given

    @model_validator(mode="after")
    def _one_kind_of_rows(self) -> SFTConfig:
        if not self.packing and (self.token_budget or 0) > 0:
            raise ValueError(
                f"token_budget={self.token_budget} fills packed rows, and packing=false puts one sequence into each: leave "
                "token_budget out (max_length bounds a sequence), or set packing=true"
            )
        for name, value in (
            ("completion_only_loss", self.completion_only_loss),
            ("assistant_only_loss", self.assistant_only_loss),
        ):
            if self.books is not None and value:
                raise ValueError(f"{name} is about conversations, and books are trained whole: leave it or `books` out")
            if self.dataset.messages_column is not None and value and name == "completion_only_loss":
                raise ValueError(
                    "completion_only_loss needs a prompt and a completion apart, and dataset.messages_column holds both in "
                    "one: set assistant_only_loss=true to train the assistant's turns alone"
                )
        if self.books is not None and self.dataset.messages_column is not None:
            raise ValueError("dataset.messages_column names conversations, and books are texts: leave it or `books` out")
        if self.books is not None and 0 < (self.token_budget or 0) < self.max_length:
            raise ValueError(
                f"token_budget={self.token_budget} is less than one sequence of books, which has max_length={self.max_length}: "
                "raise it, leave it out, or lower max_length"
            )
        if self.books is not None and self.dataset.streaming:
            raise ValueError("books are read from their token cache: leave dataset.streaming out")
        return self

    @model_validator(mode="after")
    def _needles_fit(self) -> SFTConfig:
        needle = self.long_eval.needle if self.long_eval is not None else None
        lengths = (needle.lengths or [self.max_length]) if needle is not None else []
        if any(not 128 <= length <= self.max_length for length in lengths):
            raise ValueError(
                f"long_eval.needle.lengths {lengths}: each must be from 128 up to max_length={self.max_length}, which is what "
                "the model is set up for"
            )
        return self
