"""`loopwright export RUN|CHECKPOINT DEST`: a run's model for others, written by a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click


@click.command()
@click.argument("source", metavar="RUN|CHECKPOINT")
@click.argument("dest", type=click.Path(path_type=Path))
@click.option("--merge", is_flag=True, help="Merge the adapter of a LoRA run into its base model.")
def export(source: str, dest: Path, merge: bool) -> None:
    """Write the model of RUN (name or id: its newest checkpoint), or of a CHECKPOINT's folder, to DEST, which must not exist.

    Weights, configuration and tokenizer, as `from_pretrained` and vLLM load them; of a LoRA run the adapter alone, or with
    --merge the whole model. What a run resumes from stays behind.
    """
    folder = Path(source)
    checkpoint = folder if folder.is_dir() else _newest(source)
    command = [sys.executable, "-m", "trainers.export", str(checkpoint), str(dest), *(["--merge"] if merge else [])]
    sys.exit(subprocess.run(command).returncode)


def _newest(run: str) -> Path:
    """The folder of a run's newest checkpoint on this machine."""
    from infra.registry import NotFound, Registry

    registry = Registry()
    found = registry.get_run(run)
    rows = sorted(registry.list_checkpoints(found.id), key=lambda row: row.step, reverse=True)
    if not rows:
        raise NotFound(f"run {found.name} has no checkpoint yet")
    here = [row for row in rows if Path(row.path).is_dir()]
    if not here:
        remedy = f"bring one with `loopwright checkpoints fetch {found.name}`"
        raise NotFound(f"none of run {found.name}'s checkpoints is on this machine: {remedy}")
    return Path(here[0].path)
