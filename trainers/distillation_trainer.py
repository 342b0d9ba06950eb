"""`AsyncDistillationTrainer`: on-policy distillation from a script, from one served teacher or from many."""

from __future__ import annotations

from trainers.arguments import AsyncDistillationConfig
from trainers.async_trainer import AsyncTrainer
from trainers.data import Rows, check_columns
from trainers.streams import Stream

__all__ = ["AsyncDistillationConfig", "AsyncDistillationTrainer"]


class AsyncDistillationTrainer(AsyncTrainer):
    """On-policy distillation from a script: the student generates, the teachers of `args.teacher_server_urls` score.

    Args:
        model: folder or hub id of the student, or a causal language model that is loaded already, or a `PeftModel` with a LoRA
            adapter.
        args: `AsyncDistillationConfig` or a dataclass derived from it. Default: its defaults, in the folder
            `<model>-AsyncDistillation`.
        train_dataset: a `datasets.Dataset` or list of dicts with a column `prompt` (text, or a list of chat messages), and with
            several teachers a column `teacher_id`; or a `datasets.IterableDataset`, which is read in its own order.
        processing_class: tokenizer. Default: the model's.
        callbacks: transformers' `TrainerCallback`s, classes or instances.
        optimizers: (optimizer, scheduler) to use in place of those of `args`; the optimizer over `trainer.model.parameters()`.
        peft_config: `peft.LoraConfig`: train a low-rank adapter in place of the model's own weights. Default: `args.peft`.

    Raises:
        TypeError: an argument is of the wrong kind.
        ConfigError: a value is wrong; DatasetError where it is the dataset's: a row names none of the teachers.
    """

    args_class = AsyncDistillationConfig

    def _check_data(self, data: Rows | Stream) -> None:
        check_columns(data, self.config)
