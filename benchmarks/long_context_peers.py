"""One long sequence a step by others: Hugging Face's Trainer, and TRL's SFTTrainer. Started by `long_context`, a process a run.

Both train the whole model from float32 weights with bfloat16 autocast, gradient checkpointing and activation offload, AdamW,
torch's own attention (`sdpa`), on one recorded row of random tokens, all of them trained. What they cannot import is said.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from typing import Any

import torch
import transformers

PEERS = ("hf", "trl")


def measure(peer: str, model: transformers.PreTrainedModel, tokens: int, steps: int) -> dict[str, Any]:
    """Seconds of a step after one of warm-up (`steps` 0: of that one) and the peak of allocated memory.

    Raises:
        torch.cuda.OutOfMemoryError: it does not fit.
    """
    clock = _Clock()
    cuda = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        common = {
            "output_dir": folder,
            "max_steps": steps + 1,
            "per_device_train_batch_size": 1,
            "learning_rate": 1e-5,
            "gradient_checkpointing": True,
            "optim": "adamw_torch",
            "bf16": cuda,
            "use_cpu": not cuda,
            "report_to": [],
            "save_strategy": "no",
            "logging_steps": 1,
            "disable_tqdm": True,
        }
        trainer, said = (_hugging_face if peer == "hf" else _trl)(model, tokens, common)
        trainer.add_callback(clock)
        losses = [entry["loss"] for entry in (trainer.train(), trainer.state.log_history)[1] if "loss" in entry]
    seconds = clock.steps[1:] if steps else clock.steps
    result = {"perf/step_s": sum(seconds) / len(seconds), "loss": losses[-1], **said}
    return result | {"peak_bytes": torch.cuda.max_memory_allocated() if cuda else 0}


class _Clock(transformers.TrainerCallback):
    """Seconds of each step, the device's work included."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.began = 0.0

    @staticmethod
    def _now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began = self._now()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(self._now() - self.began)


def _rows(model: transformers.PreTrainedModel, tokens: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    config: Any = model.config
    return [torch.randint(config.vocab_size, (tokens,), generator=generator).tolist() for _ in range(2)]


def _knows_offload() -> bool:
    """Whether this version's gradient checkpointing offloads by itself."""
    field = transformers.TrainingArguments.__dataclass_fields__["gradient_checkpointing_kwargs"]
    return "`offload`" in str(field.metadata.get("help"))


def _hugging_face(model: transformers.PreTrainedModel, tokens: int, common: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Its own offload where the version has one, else torch's `save_on_cpu` around the step. Both pin memory: on a GPU only."""
    cuda, own = torch.cuda.is_available(), _knows_offload()
    said = "none" if not cuda else "its own" if own else "save_on_cpu"
    kwargs = {"use_reentrant": False, **({"offload": True} if said == "its own" else {})}

    class Trainer(transformers.Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            by_torch = said == "save_on_cpu"
            with torch.autograd.graph.save_on_cpu(pin_memory=True) if by_torch else contextlib.nullcontext():
                return super().training_step(*args, **kwargs)

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        ids = torch.tensor([row["input_ids"] for row in rows])
        return {"input_ids": ids, "labels": ids.clone()}

    args = transformers.TrainingArguments(gradient_checkpointing_kwargs=kwargs, remove_unused_columns=False, **common)
    rows: Any = [{"input_ids": ids} for ids in _rows(model, tokens)]
    trainer = Trainer(model=model, args=args, train_dataset=rows, data_collator=collate)
    return trainer, {"peer": f"transformers {transformers.__version__} Trainer", "offload": said}


def _trl(model: transformers.PreTrainedModel, tokens: int, common: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Its loss is computed in chunks of the vocabulary, its `activation_offloading` is on."""
    import datasets
    import trl

    cuda = torch.cuda.is_available()
    args = trl.SFTConfig(  # pyright: ignore[reportPrivateImportUsage]
        max_length=tokens,
        activation_offloading=cuda,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        **common,
    )
    trainer = trl.SFTTrainer(  # pyright: ignore[reportPrivateImportUsage]
        model=model,
        args=args,
        train_dataset=datasets.Dataset.from_dict({"input_ids": _rows(model, tokens)}),
        processing_class=_tokenizer(model),
    )
    return trainer, {"peer": f"trl {trl.__version__} SFTTrainer", "offload": "activation_offloading" if cuda else "none"}


def _tokenizer(model: transformers.PreTrainedModel) -> Any:
    """A vocabulary of three words: the rows hold ids already."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    config: Any = model.config
    words = {"[unk]": 0, "[end]": config.eos_token_id, "[pad]": config.pad_token_id - 1}
    made = Tokenizer(WordLevel(words, unk_token="[unk]"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="[unk]", eos_token="[end]", pad_token="[pad]", padding_side="right"
    )
