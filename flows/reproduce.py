"""`loopwright reproduce`: start a run again as it was, after saying what is no longer as it was.

    RUN ─▶ config (registry), facts (provenance.json) ─▶ facts of now ─▶ differences ─▶ refused, or a new run, RUN its parent

A run that the registry does not know is given by its folder, or a checkpoint's: provenance.json there has config and facts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flows.config import RUN_CONFIGS, RunConfig, SFTRunConfig, absolute_paths
from flows.config_file import leaves, merge_layers, override_layers
from flows.convert import resolve_model
from flows.launch import launch
from flows.preflight import preflight
from flows.provenance import facts_of
from flows.runs import check_startable, stored
from infra import provenance
from infra.provenance import Difference
from infra.registry import Registry, RunNotFound, RunRow
from infra.tracking_params import REMOVED
from trainers.errors import ConfigError, DatasetError
from trainers.references import resolve

TAG = "loopwright.reproduces"
# A new run has its own.
_FILLED = ("name", "output_dir", "vllm_server_base_url")


class ReproduceRefused(ConfigError):
    """The run cannot be started as it was."""


@dataclass
class Reproduction:
    """What would be started, and what differs but for what was `asked` for."""

    source: str
    attempt: int | None
    config: RunConfig
    parent: RunRow | None = None
    differences: list[Difference] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    unknown: str = ""  # why nothing is known of how it was

    @property
    def serious(self) -> list[Difference]:
        return [difference for difference in self.differences if difference.serious]

    def lines(self) -> list[str]:
        """What there is to say, the serious things first, marked by `!`."""
        if self.unknown:
            return [self.unknown]
        found = [f"{'!' if each.serious else ' '} {each}" for each in self.differences]
        return [*found, *(f"  asked for: {line}" for line in self.asked)] or ["everything is as it was"]


def plan(run: str, overrides: Sequence[str] = (), name: str | None = None) -> Reproduction:
    """What starting `run` again would be.

    Args:
        run: name or id in the registry, else a folder with a provenance.json (a run's or a checkpoint's).
        overrides: `field=value`; what they change is no difference to worry about.
        name: of the new run. Default: the old one's with the first free `-r<n>`.

    Raises:
        RunNotFound, ConfigError: there is no such run, or an override is wrong.
    """
    registry = Registry()
    row, tree, then = _source(registry, run)
    source = row.name if row else str(tree.get("name") or Path(run).absolute().name)
    if missing := [name for name, value in leaves(tree) if value == REMOVED and not _given(name, overrides)]:
        raise ReproduceRefused(f"{', '.join(missing)}: a secret, so it is not stored; give it as {missing[0]}=…")
    config = _config(run, tree, overrides, name or _free_name(registry, source))
    found = Reproduction(source, (then or {}).get("attempt"), config, row)
    if then is None:
        found.unknown = f"{source} has no {provenance.FILE}: what it ran with is not known, only its config"
        return found
    before = _config(run, tree, (), source)
    now = facts_of(config)
    if then["dataset"].get("fingerprint"):
        now["dataset"]["fingerprint"] = _fingerprint(config)
    found.differences = provenance.differences(then, now)
    for section in ("dataset", "model"):
        if getattr(config, section) != getattr(before, section):  # another one, on purpose
            found.differences = [each for each in found.differences if not (each.serious and each.what.startswith(section))]
    found.asked = list(overrides)
    return found


def start(found: Reproduction, accept: bool = False) -> dict[str, Any]:
    """Run it to its end; its result. The registry has the old run as its parent, MLflow the tag `loopwright.reproduces`.

    Raises:
        ReproduceRefused: data or model are not what they were, and `accept` is false.
        LoopwrightError: the run was refused or failed.
    """
    if found.serious and not accept:
        what = "\n".join(f"  {each}" for each in found.serious)
        raise ReproduceRefused(
            f"{found.source} cannot be reproduced exactly:\n{what}\nRestore what it ran with, name another one on purpose "
            "(dataset.path=…, model=…), or pass --accept-differences"
        )
    registry = Registry()
    config = found.config
    check_startable(registry, config)
    preflight(config)
    if found.parent is not None:  # the flow goes on with this row as it would with its own
        folder = config.storage.folder() / str(config.name)
        flow = found.parent.flow
        registry.create_run(str(config.name), flow, stored(config), output_dir=str(folder), parent_run_id=found.parent.id)
    return launch(config)


def _source(registry: Registry, run: str) -> tuple[RunRow | None, dict[str, Any], dict[str, Any] | None]:
    """The registry's row, the config as stored, the facts."""
    folder = Path(run).expanduser()
    try:
        row = registry.get_run(run)
    except RunNotFound:
        then = provenance.read(folder)
        if then is None:
            if folder.is_dir():
                raise ReproduceRefused(f"{folder} has no {provenance.FILE} that can be read") from None
            raise
        return None, dict(then["config"]), then
    return row, dict(row.config), provenance.read(Path(row.output_dir)) if row.output_dir else None


def _config(run: str, tree: dict[str, Any], overrides: Sequence[str], name: str) -> RunConfig:
    kind = tree.get("type")
    if kind not in RUN_CONFIGS:
        raise ReproduceRefused(f"{run} is of kind {kind!r}: only training runs ({', '.join(RUN_CONFIGS)}) can be reproduced")
    fields = {key: value for key, value in tree.items() if key not in _FILLED}
    tags = {**fields.get("tags", {}), TAG: str(tree.get("name") or run)}
    layers = [(f"run {run}", {**fields, "tags": tags}), *override_layers(overrides), ("--name", {"name": name})]
    return absolute_paths(merge_layers(kind, layers).config)


def _fingerprint(config: RunConfig) -> str:
    from trainers.books.sequences import open_books
    from trainers.data import load_data, load_tokenizer

    dataset = config.dataset.model_copy(update={"path": resolve(config.dataset.path)})
    try:
        if isinstance(config, SFTRunConfig) and config.books is not None:  # whose tokens are in the cache
            tokenizer = load_tokenizer(config.model_copy(update={"model": resolve_model(config.model)}))
            return open_books(config.books, dataset, tokenizer, config.max_length).fingerprint()
        return load_data(dataset).fingerprint()
    except DatasetError as error:
        return f"cannot be read ({error})"


def _free_name(registry: Registry, source: str) -> str:
    number = 2
    while registry.find_run(f"{source}-r{number}") is not None:
        number += 1
    return f"{source}-r{number}"


def _given(name: str, overrides: Sequence[str]) -> bool:
    return any(override.partition("=")[0].strip() == name for override in overrides)
