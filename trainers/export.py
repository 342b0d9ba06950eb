"""`python -m trainers.export CHECKPOINT FOLDER [--merge]`: of a checkpoint, what others load, and nothing to resume from.

    CHECKPOINT (whole?) ─┬─ model, adapter and tokenizer files, copied ─────────▶ FOLDER
                         └─ `--merge`: an adapter and its base as one model ────▶ FOLDER

FOLDER appears whole, by rename. Exit code 0, or 1 with the cause on standard error.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from trainers.errors import ConfigError, LoopwrightError

ADAPTER = "adapter_config.json"
# What a checkpoint has beside them, which only a run goes on from.
_OF_THE_RUN = ("resume", "rng", "scheduler.pt", "trainer_state.json", "loop_state.json", "loopwright_config.json")
_OF_THE_RUN += ("rollout_state.json", "rollout_buffer.npz", "rollouts_kept.json", "manifest.json", "PINNED")


def export(checkpoint: Path, folder: Path, *, merged: bool = False) -> str:
    """Write a model that `from_pretrained` or peft loads; returns what it is.

    Args:
        checkpoint: of a run; to be merged, also an adapter that no run has written, which has no manifest.

    Raises:
        ConfigError: the checkpoint is not whole, `folder` exists, or there is nothing to merge.
    """
    from trainers.checkpoint import MANIFEST, fault

    if (not merged or (checkpoint / MANIFEST).exists()) and (why := fault(checkpoint)):
        raise ConfigError(f"{checkpoint} is no whole checkpoint: {why}")
    if folder.exists():
        raise ConfigError(f"{folder} exists: name a folder that does not")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".tmp-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    if merged:
        _merge(checkpoint, temporary)
    else:
        shutil.copytree(checkpoint, temporary, ignore=shutil.ignore_patterns(*_OF_THE_RUN))
    temporary.rename(folder)
    if merged:
        return "model with the adapter merged in"
    return "adapter" if (folder / ADAPTER).is_file() else "model"


def _merge(checkpoint: Path, folder: Path) -> None:
    """Write the adapter in `checkpoint` and the base that it names as one model, in the base's type."""
    from peft import PeftConfig, PeftModel
    from transformers import AutoTokenizer

    from trainers.model import from_pretrained

    if not (checkpoint / ADAPTER).is_file():
        raise ConfigError(f"{checkpoint} holds no adapter ({ADAPTER}): a whole model needs no merging")
    base = str(PeftConfig.from_pretrained(str(checkpoint)).base_model_name_or_path)
    has_tokenizer = (checkpoint / "tokenizer_config.json").is_file()
    try:
        model = PeftModel.from_pretrained(from_pretrained(base, dtype="auto"), str(checkpoint)).merge_and_unload()
        tokenizer = AutoTokenizer.from_pretrained(str(checkpoint) if has_tokenizer else base)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the adapter of {checkpoint} or its base {base!r} cannot be loaded: {error}") from error
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainers.export", description="Write a checkpoint's model for others.")
    parser.add_argument("checkpoint", type=Path, help="folder of a checkpoint")
    parser.add_argument("folder", type=Path, help="folder to write to; must not exist")
    parser.add_argument("--merge", action="store_true", help="merge the adapter into its base model")
    options = parser.parse_args(arguments)
    try:
        what = export(options.checkpoint, options.folder, merged=options.merge)
    except LoopwrightError as error:
        print(f"export: {error}", file=sys.stderr)
        return 1
    print(f"{what} in {options.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
