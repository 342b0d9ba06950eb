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

# What a checkpoint has beside them, which only a run goes on from.
_OF_THE_RUN = ("resume", "rng", "scheduler.pt", "trainer_state.json", "loop_state.json", "loopwright_config.json")
_OF_THE_RUN += ("rollout_state.json", "rollout_buffer.npz", "rollouts_kept.json", "manifest.json", "PINNED")


def export(checkpoint: Path, folder: Path, *, merged: bool = False) -> str:
    """Write a model that `from_pretrained` or peft loads; returns what it is.

    Raises:
        ConfigError: the checkpoint is not whole, `folder` exists, or there is nothing to merge.
    """
    from trainers.checkpoint import fault
    from trainers.merge import merge

    if why := fault(checkpoint):
        raise ConfigError(f"{checkpoint} is no whole checkpoint: {why}")
    if folder.exists():
        raise ConfigError(f"{folder} exists: name a folder that does not")
    folder.parent.mkdir(parents=True, exist_ok=True)
    if merged:
        merge(checkpoint, folder)
        return "model with the adapter merged in"
    temporary = folder.with_name(f".tmp-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(checkpoint, temporary, ignore=shutil.ignore_patterns(*_OF_THE_RUN))
    temporary.rename(folder)
    return "adapter" if (folder / "adapter_config.json").is_file() else "model"


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
