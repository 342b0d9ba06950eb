"""Loss by position beyond the window a model was trained for, with YaRN and without.

    python -m benchmarks.beyond_window --books FOLDER [--held-out FOLDER] [--work FOLDER] [--short-steps N] [--json]

A small model with a vocabulary of its own is trained on books at WINDOW tokens; then two runs go on at LENGTH tokens, one as
the model is and one with YaRN, each evaluated before its first step and after its last. The picture of the two is
`beyond_window.png` in the work folder. The last book of the folder is held out unless another folder is named.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from examples.sft_books_cpu import make_model
from trainers.position_plot import Bin, draw, read_table

WINDOW, LENGTH = 256, 2048
VOCABULARY = 1024
LONG_STEPS = 20
TOKENS_PER_STEP = 8192


def train(name: str, model: Path, books: Path, held_out: Path, work: Path, **fields: Any) -> Path:
    """One run; its folder, where model and tables lie."""
    from trainers import LongContextSFTConfig, LongContextSFTTrainer

    folder = work / name
    args = LongContextSFTConfig(
        output_dir=str(folder),
        report_to=[],
        logging_steps=20,
        save_steps=100_000,
        gradient_checkpointing=fields["max_length"] > WINDOW,
        token_budget=TOKENS_PER_STEP,
        books={"cache_dir": str(work / "tokens")},
        long_eval={"books": {"path": str(held_out), "sequences": 16, "bins": 32}},
        **fields,
    )
    trainer = LongContextSFTTrainer(model=str(model), args=args, train_dataset=str(books))
    trainer.train()
    trainer.save_model()
    return folder


def mean_loss(bins: list[Bin], first: int, last: int) -> float:
    """Over the tokens of bins that lie within the positions."""
    inside = [one for one in bins if one.first >= first and one.last <= last]
    return sum(one.loss * one.tokens for one in inside) / sum(one.tokens for one in inside)


def measure(books: Path, held_out: Path, work: Path, short_steps: int) -> dict[str, Any]:
    began = time.perf_counter()
    start = work / "model"
    make_model(start, books, window=WINDOW, vocabulary=VOCABULARY, hidden=128, layers=4)
    short = train(
        "short", start, books, held_out, work, max_length=WINDOW, max_steps=short_steps, learning_rate=2e-3, warmup_steps=20
    )
    curves: dict[str, list[Bin]] = {}
    figures: dict[str, Any] = {"window": WINDOW, "length": LENGTH, "short_steps": short_steps, "steps": LONG_STEPS}
    for name, rope in (("plain", None), ("yarn", {"rope_type": "yarn", "factor": "auto"})):
        run = train(
            name,
            short,
            books,
            held_out,
            work,
            max_length=LENGTH,
            max_steps=LONG_STEPS,
            learning_rate=2e-4,
            rope_parameters=rope,
        )
        for step in (0, LONG_STEPS):
            bins = read_table(run / "long_eval" / f"step-{step}" / "loss_by_position.csv")
            curves[f"{name}, step {step}"] = bins
            figures[f"{name}_{step}"] = {
                "inside": mean_loss(bins, 0, WINDOW - 1),
                "beyond": mean_loss(bins, WINDOW, LENGTH - 1),
                "last_quarter": mean_loss(bins, LENGTH - LENGTH // 4, LENGTH - 1),
            }
    draw(curves, work / "beyond_window.png", WINDOW)
    return {**figures, "seconds": time.perf_counter() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--books", type=Path, required=True, help="folder of .txt files")
    parser.add_argument("--held-out", type=Path, help="folder of .txt files not trained on; default: the last of the books")
    parser.add_argument("--work", type=Path, help="where models and tables go; default: a temporary folder")
    parser.add_argument("--short-steps", type=int, default=1500, help="steps of 8,192 tokens within the window; default 1500")
    parser.add_argument("--json", action="store_true", help="one JSON line")
    given = parser.parse_args()
    work = given.work or Path(tempfile.mkdtemp(prefix="beyond-window-"))
    books, held_out = given.books, given.held_out
    if held_out is None:
        *training, last = sorted(books.glob("*.txt"))
        books, held_out = work / "books", work / "held_out"
        for folder, files in ((books, training), (held_out, [last])):
            folder.mkdir(parents=True, exist_ok=True)
            for file in files:
                shutil.copy(file, folder)
    figures = measure(books, held_out, work, given.short_steps)
    print(json.dumps(figures) if given.json else json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
