"""Data of `open_mopd_smollm3.yaml`: the released prompts of Open-MOPD, one file per domain.

    python examples/open_mopd_smollm3.py FOLDER [--file train.parquet]

The mixture has the columns `prompt` (chat messages) and `domain` (math, code, if). Without --file it is downloaded at the
revision below. Only the prompts are written: the student is taught by specialists, so answers are not needed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

REPOSITORY, REVISION = "BytedTsinghua-SIA/Open-MOPD-Data", "9e897efe3257599d4300e2d5ee865a1cc714af87"
FILE = "rl_prompt_mix/train.parquet"
DOMAINS = {"math": "math", "code": "code", "if": "instructions"}  # the mixture's name, the recipe's


def split(rows: Iterable[Mapping[str, Any]], folder: Path) -> dict[str, int]:
    """Write `<domain>.jsonl` for each domain; prompts by domain.

    Raises:
        SystemExit: a row is of another domain, or a domain has no row.
    """
    prompts: dict[str, list[str]] = {name: [] for name in DOMAINS.values()}
    for row in rows:
        if row["domain"] not in DOMAINS:
            raise SystemExit(f"a row is of domain {row['domain']!r}, and not of {', '.join(DOMAINS)}")
        prompts[DOMAINS[row["domain"]]].append(json.dumps({"prompt": row["prompt"]}, ensure_ascii=False) + "\n")
    if empty := [name for name, lines in prompts.items() if not lines]:
        raise SystemExit(f"no row is of {', '.join(empty)}")
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in prompts.items():
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return {name: len(lines) for name, lines in prompts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the released prompts, one file per domain.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--file", help="the mixture, if it is on this machine already")
    args = parser.parse_args()
    from datasets import Dataset

    path = args.file
    if path is None:
        from huggingface_hub import hf_hub_download

        path = hf_hub_download(REPOSITORY, FILE, revision=REVISION, repo_type="dataset")
    rows: Any = Dataset.from_parquet(path).select_columns(["prompt", "domain"])
    for name, count in split(rows, args.folder).items():
        print(f"{count} prompts in {args.folder / name}.jsonl")


if __name__ == "__main__":
    main()
