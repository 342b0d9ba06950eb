"""Evaluation of long sequences by the policy itself, as it is sharded and spread over ranks: a callback of the loop.

    held-out books ─▶ forward ─▶ loss by position ─▶ metrics, table, plot
    needles        ─▶ forward ─▶ numbers found    ─▶ metrics, table        ─▶ sink (rank 0); files in <output_dir>/long_eval

Before the first step, every `long_eval.every` steps and at the end, on all ranks together: each data-parallel place forwards
its share of the sequences, one at a time, without a gradient. A run that was told to stop does not begin one.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from transformers import TrainerCallback

from trainers.batch import PackedBatch
from trainers.books.sequences import POSITIONS, TOKENS, Books, open_books, text_digests
from trainers.callbacks import MetricSink
from trainers.config_parts import DatasetConfig
from trainers.config_sft import BooksConfig, HeldOutBooksConfig, SFTConfig
from trainers.distributed import Ranks
from trainers.errors import LoopwrightError
from trainers.head import HeadOutputs
from trainers.model import Policy, probe_row
from trainers.needle import Haystack, Needle, needles, scores
from trainers.packing import pack_row
from trainers.position_loss import NAME, buckets
from trainers.position_plot import Bin, bins_of, draw, write_table
from trainers.types import PackedRow

logger = logging.getLogger(__name__)
FOLDER = "long_eval"
_BOOK_EDGES = [0, *(1 << power for power in range(32))]  # a book may be longer than any sequence


class LongEvaluation(TrainerCallback):
    """Measures `policy` by `config.long_eval`. Every rank makes one; only rank 0's `sink` is used."""

    def __init__(
        self,
        config: SFTConfig,
        ranks: Ranks,
        policy: Policy,
        tokenizer: Any,
        sink: MetricSink,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        assert config.long_eval is not None, "nothing is asked for"
        self.config, self.asked, self.ranks, self.policy, self.sink = config, config.long_eval, ranks, policy, sink
        self._tokenizer, self._stop_requested = tokenizer, stop_requested
        self._books: Books | None = None
        self._first: tuple[int, list[Bin]] | None = None  # of this process, drawn beside the later ones
        self._last = -1  # step of the newest evaluation
        if self.asked.needle is not None:
            Haystack(tokenizer, None, config.seed).check(needles(self.asked.needle, config.max_length))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            self._evaluate(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.asked.every and state.global_step % self.asked.every == 0:
            self._evaluate(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._evaluate(state)

    def _evaluate(self, state: Any) -> None:
        step = state.global_step
        if step == self._last or self.ranks.any(self._stop_requested())[0]:
            return
        self._last = step
        folder = Path(self.config.output_dir) / FOLDER / f"step-{step}"
        if self.ranks.is_main:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        metrics: dict[str, float] = {}
        if self.asked.books is not None:
            metrics |= self._loss_by_position(self.asked.books, folder, step)
        if self.asked.needle is not None:
            metrics |= self._retrieval(folder)
        state.log_history.append({**metrics, "step": step, "epoch": state.epoch})
        if self.ranks.is_main:
            self.sink.log(step, metrics)
            self.sink.artifact(folder, f"{FOLDER}/step-{step}")

    # Loss by position ------------------------------------------------------------------------------------------------

    def _open(self, asked: HeldOutBooksConfig) -> Books:
        """The held-out books, on every rank; what is not in the token cache they make together."""
        if self._books is not None:
            return self._books
        config = (self.config.books or BooksConfig.model_validate({})).model_copy(update={"last_sequence": "keep"})
        failure: LoopwrightError | None = None
        try:
            dataset = DatasetConfig.model_validate({"path": asked.path, "split": asked.split})
            self._books = open_books(config, dataset, self._tokenizer, self.config.max_length)
            if self.ranks.is_main:
                self._warn_of_trained(config, dataset)
        except LoopwrightError as error:
            failure = error
        self.ranks.agree(failure)
        assert self._books is not None
        return self._books

    def _warn_of_trained(self, books: BooksConfig, held_out: DatasetConfig) -> None:
        """Say which held-out texts are training texts too, by their content. Of data in files, whose digests are kept."""
        trained = self.config.dataset
        if self.config.books is None or not Path(trained.path).expanduser().exists():
            return
        ours, theirs = (text_digests(books, dataset) for dataset in (held_out, trained))
        if same := len(ours & theirs):
            logger.warning(
                "long_eval.books: %d of the %d texts of %s are also in the training data, %s: they are not held out, and their "
                "loss falls with training; take them out of one of the two", same, len(ours), held_out.path, trained.path,
            )  # fmt: skip

    def _loss_by_position(self, asked: HeldOutBooksConfig, folder: Path, step: int) -> dict[str, float]:
        books = self._open(asked)
        count, device = min(asked.sequences, len(books)), self.ranks.device
        firsts = buckets(self.config.max_length)
        width = -(-self.config.max_length // asked.bins)
        kinds = {"bins": asked.bins, "buckets": len(firsts), "book_buckets": len(_BOOK_EDGES) - 1}
        sums = {name: torch.zeros(2, size, dtype=torch.float64, device=device) for name, size in kinds.items()}
        for index, outputs in self._forwards(count, lambda i: probe_row(books[i][TOKENS])):
            nll = -outputs.logprobs.double()
            both = torch.stack([nll, torch.ones_like(nll)])
            positions = torch.arange(1, len(nll) + 1, device=device)
            own = torch.from_numpy(books[index][POSITIONS][1:].astype(np.int64)).to(device)
            sums["bins"].index_add_(1, positions // width, both)
            sums["buckets"].index_add_(1, _bucket(positions) - 1, both)
            sums["book_buckets"].index_add_(1, _bucket(own), both)
        totals: dict[str, list[list[float]]] = {name: self._summed(value).tolist() for name, value in sums.items()}
        bins = bins_of(totals["bins"], [i * width for i in range(asked.bins + 1)])
        self._first = self._first or (step, bins)
        if self.ranks.is_main:
            write_table(folder / f"{NAME}.csv", bins, Bin._fields)
            by_book = bins_of(totals["book_buckets"], _BOOK_EDGES)
            write_table(folder / "loss_by_book_position.csv", by_book, Bin._fields)
            curves = {f"step {self._first[0]}": self._first[1], f"step {step}": bins}
            draw(curves, folder / f"{NAME}.png", self._trained_window())
        by_position = bins_of(totals["buckets"], [*firsts, 2 * firsts[-1]])
        metrics = {f"eval/{NAME}/{one.first}": one.loss for one in by_position}
        tokens = sum(totals["bins"][1])
        return {"eval/loss": sum(totals["bins"][0]) / tokens, **metrics}

    def _trained_window(self) -> int | None:
        """Positions that the model was trained for before any scaling."""
        text = self.policy.model.config.get_text_config()
        scaled = (getattr(text, "rope_parameters", None) or {}).get("original_max_position_embeddings")
        return scaled or getattr(text, "max_position_embeddings", None)

    # Retrieval -------------------------------------------------------------------------------------------------------

    def _retrieval(self, folder: Path) -> dict[str, float]:
        assert self.asked.needle is not None
        asked: list[Needle] = needles(self.asked.needle, self.config.max_length)
        filler = self._open(self.asked.books)[0][TOKENS] if self.asked.books is not None else None
        haystack = Haystack(self._tokenizer, filler, self.config.seed)
        found = torch.zeros(2, len(asked), dtype=torch.float64, device=self.ranks.device)
        for index, outputs in self._forwards(len(asked), lambda i: pack_row([haystack.sample(asked[i])])):
            found[0, index] = outputs.argmax_hit.all()
            found[1, index] = -outputs.logprobs.mean()
        table = list(scores(asked, *self._summed(found).numpy()))
        if self.ranks.is_main:
            rows = [(one.length, one.percent, int(one.texts), int(one.found), one.answer_loss) for one in table]
            write_table(folder / "needle.csv", rows, ("length", "depth_percent", "texts", "found", "answer_loss"))
        metrics = {f"needle/{one.length}/{one.percent}": one.found / one.texts for one in table}
        return {"needle/mean": sum(one.found for one in table) / len(asked), **metrics}

    # Forwards --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _forwards(self, count: int, make: Callable[[int], PackedRow]) -> Iterator[tuple[int, HeadOutputs]]:
        """This rank's share of `count` rows with the policy's outputs for their terms. A collective. Of ranks that share
        a row, one is given its outputs."""
        ranks, training = self.ranks, self.policy.training
        self.policy.eval()
        for start in range(0, count, ranks.dp_size):
            index = start + ranks.dp_rank
            row = make(index) if index < count else pack_row([])
            outputs = self.policy(PackedBatch.from_row(row, ranks.device, sequence=ranks.sequence), temperature=1.0)
            if index < count and ranks.leads:
                yield index, outputs
        self.policy.train(training)
        for module in self.policy.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # no backward follows, which would do it

    def _summed(self, values: torch.Tensor) -> torch.Tensor:
        """Over all ranks, on the host."""
        values = values.cpu()
        if self.ranks.world_size > 1:
            dist.all_reduce(values, group=self.ranks.control)
        return values


def _bucket(positions: torch.Tensor) -> torch.Tensor:
    """0 for position 0, else 1 + ⌊log₂ position⌋."""
    return torch.frexp(positions.double())[1].long()
