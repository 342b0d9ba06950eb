"""`python -m trainers.merge CHECKPOINT FOLDER`: an adapter and its base as one model, which transformers and vLLM load.

    CHECKPOINT/adapter_config.json ─ names ─▶ base ─┐
    CHECKPOINT/adapter_model.safetensors ───────────┴─ merge_and_unload ─▶ FOLDER/model.safetensors, tokenizer

FOLDER appears whole, by rename. Exit code 0, or 1 with the cause on standard error.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from trainers.errors import ConfigError, LoopwrightError


def merge(checkpoint: Path, folder: Path, dtype: str = "auto") -> None:
    """Args: dtype: of the merged weights; "auto": the base's.

    Raises:
        ConfigError: there is no adapter in `checkpoint`, its base cannot be loaded, or `folder` exists.
    """
    from peft import PeftConfig, PeftModel
    from transformers import AutoTokenizer

    from trainers.model import from_pretrained

    if not (checkpoint / "adapter_config.json").is_file():
        raise ConfigError(f"{checkpoint} holds no adapter (adapter_config.json): a whole model needs no merging")
    if folder.exists():
        raise ConfigError(f"{folder} exists: name a folder that does not")
    base = PeftConfig.from_pretrained(str(checkpoint)).base_model_name_or_path
    try:
        model = PeftModel.from_pretrained(from_pretrained(str(base), dtype=dtype), str(checkpoint)).merge_and_unload()
        tokenizer = AutoTokenizer.from_pretrained(str(checkpoint) if _has_tokenizer(checkpoint) else str(base))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the adapter of {checkpoint} or its base {base!r} cannot be loaded: {error}") from error
    temporary = folder.with_name(f".tmp-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    temporary.rename(folder)


def _has_tokenizer(folder: Path) -> bool:
    return (folder / "tokenizer_config.json").is_file()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainers.merge", description="Merge an adapter into its base model.")
    parser.add_argument("checkpoint", type=Path, help="folder with an adapter: a checkpoint of a run with `peft`")
    parser.add_argument("folder", type=Path, help="folder to write the merged model to; must not exist")
    parser.add_argument("--dtype", default="auto", help="type of the merged weights (default: the base's)")
    options = parser.parse_args(arguments)
    try:
        merge(options.checkpoint, options.folder, options.dtype)
    except LoopwrightError as error:
        print(f"merge: {error}", file=sys.stderr)
        return 1
    print(f"merged model in {options.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
