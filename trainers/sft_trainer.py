"""`LongContextSFTTrainer`: supervised fine-tuning from a script, on sequences of up to a million tokens and more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainers.arguments import LongContextSFTConfig
from trainers.async_trainer import AsyncTrainer
from trainers.books.texts import TextRows, open_texts
from trainers.config_parts import DatasetConfig
from trainers.data import Rows, as_data, check_columns
from trainers.errors import ConfigError
from trainers.rollouts.payload import Payload
from trainers.streams import Stream

__all__ = ["LongContextSFTConfig", "LongContextSFTTrainer"]


class LongContextSFTTrainer(AsyncTrainer):
    """Supervised fine-tuning from a script: no server, no reward, and long sequences by the options of `args`.

    Args:
        model: folder or hub id, or a causal language model that is loaded already, or a `PeftModel` with a LoRA adapter.
            `args.rope_parameters` is applied to a model given by name.
        args: `LongContextSFTConfig` or a dataclass derived from it. Default: its defaults, in the folder
            `<model>-LongContextSFT`.
        train_dataset: books, which are joined end to end to `args.max_length` tokens: the path of a folder of .txt files or of
            a file, or a `datasets.Dataset` or list of dicts with a column `text`. Or rows with the columns `prompt` and
            `completion`, or `messages` with whole conversations; these may be a `datasets.IterableDataset`.
        processing_class: tokenizer. Default: the model's.
        callbacks: transformers' `TrainerCallback`s, classes or instances.
        optimizers: (optimizer, scheduler) to use in place of those of `args`; the optimizer over `trainer.model.parameters()`.
        peft_config: `peft.LoraConfig`: train a low-rank adapter in place of the model's own weights. Default: `args.peft`.

    Raises:
        TypeError: an argument is of the wrong kind.
        ConfigError: a value is wrong; DatasetError where it is the dataset's.
    """

    args_class = LongContextSFTConfig

    def _check(self) -> None:
        super()._check()
        if self._model is not None and self.args.rope_parameters is not None:
            raise ConfigError(
                "rope_parameters is for a model given by name; this one is loaded already: give its folder, or load it with "
                "from_pretrained(…, rope_parameters=…) and leave them out of args"
            )

    def _check_dataset(self) -> None:
        if self._is_path:
            open_texts(DatasetConfig.model_validate(self._dataset()), self._text_column)
        else:
            super()._check_dataset()

    def _check_data(self, data: Rows | Stream) -> None:
        if self._joins(data):
            if isinstance(data, Rows):
                TextRows(data, self._text_column)
                return
            raise ConfigError(
                "train_dataset is a stream of texts, and books are read from a cache of all their tokens: pass a Dataset, or "
                "the path of a folder or file"
            )
        check_columns(data, self.config)

    @property
    def _is_path(self) -> bool:
        return isinstance(self.train_dataset, str | Path)

    @property
    def _text_column(self) -> str:
        books: Any = self.args.books or {}
        return books.get("text_column", "text")

    def _joins(self, data: Rows | Stream) -> bool:
        """Whether these rows are texts to be joined."""
        return self.args.books is not None or (
            self._text_column in data.columns and not {"prompt", "messages"} & {*data.columns}
        )

    def _given(self) -> dict[str, Any]:
        if self._is_path or self._joins(as_data(self.train_dataset, "train_dataset")):
            return {"books": self.args.books or {}}
        return {}

    def _dataset(self) -> dict[str, Any]:
        if self._is_path:
            return {"path": str(self.train_dataset)}
        columns = as_data(self.train_dataset, "train_dataset").columns
        return super()._dataset() | (
            {"messages_column": "messages"} if "messages" in columns and "prompt" not in columns else {}
        )

    def _payload(self) -> Payload:
        payload = super()._payload()
        if self._is_path:
            payload.dataset = None
        return payload
