"""Named tensors into the served model: vLLM's own loaders, and after a proven first update the copies they end in.

    groups of named tensors ─▶ no plan yet: layer-wise reload (recorded) ─▶ parameters
                           └─▶ plan: one fused copy per group ────────────┘

What vLLM repacks for its kernels (oneDNN on CPU, quantisation) the layer-wise reload repacks; then there never is a plan.
Names are the Hugging Face ones; `load_weights` splits and fuses them (qkv, gate/up) and takes this rank's shard.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from loopwright_vllm.plan import Plan, Recorder

# It warns at every update about layers that have nothing to load (rotary embedding, tied head); `load` checks completeness.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

# Old checkpoints carry these buffers; no trainer sends them and vLLM computes them itself.
COMPUTED_BUFFERS = ("rotary_emb.inv_freq", ".masked_bias", ".attn.bias")
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


class Loader:
    """Loads updates into one worker's model. `record`: look for a plan (pointless where kernels want repacked weights)."""

    def __init__(self, model: torch.nn.Module, model_config: Any, *, record: bool) -> None:
        self.model, self.model_config = model, model_config
        self.expected = checkpoint_shapes(Path(model_config.model))
        self.tied = bool(getattr(model_config.hf_text_config, "tie_word_embeddings", False))
        self.record = record
        self.plan: Plan | None = None
        self.why_no_plan = "no whole update yet" if record else "this device's kernels want repacked weights"

    def check(self, shapes: dict[str, tuple[int, ...]], *, partial: bool) -> None:
        """Names and shapes of an update against the checkpoint the server was started from.

        Args:
            partial: the update leaves out what never changes; it must hold whole blocks, because vLLM fuses tensors of a block.
        """
        if not self.expected:
            return
        names = set(shapes)
        optional = {name for name in self.expected.keys() | names if self.tied and name.endswith(HEAD)}
        missing = sorted(self.expected.keys() - names - optional)
        surplus = sorted(names - self.expected.keys() - optional)
        if partial:
            sent = {block(name) for name in names}
            missing = [name for name in missing if block(name) in sent]
        if missing or surplus:
            raise ValueError(
                f"the update does not fit the served model {self.model_config.model}: "
                f"{len(missing)} parameters missing {missing[:3]}, {len(surplus)} unknown {surplus[:3]}"
            )
        for name in names & self.expected.keys():
            if tuple(shapes[name]) != self.expected[name]:
                raise ValueError(f"{name} has shape {tuple(shapes[name])}, the served model {self.expected[name]}")

    def ties(self, names: Iterable[str]) -> tuple[str, str] | None:
        """(head, embedding) where both are in an update although the model ties them: they must be equal."""
        heads = [name for name in names if name.endswith(HEAD)]
        embeddings = [name for name in names if name.endswith(EMBEDDING)]
        return (heads[0], embeddings[0]) if self.tied and len(heads) == len(embeddings) == 1 else None

    @property
    def ready(self) -> bool:
        """Whether the next update is a fused copy."""
        return self.plan is not None and self.plan.holds(self.model.parameters())

    def load(self, groups: Iterable[dict[str, torch.Tensor]], *, partial: bool = False) -> None:
        """Args: groups: named contiguous tensors; without a plan all of them must stay as they are until the end."""
        if self.ready:
            assert self.plan is not None
            for group in groups:
                self.plan.apply(group)
            return
        pairs = [pair for group in groups for pair in group.items()]
        if not self.record or partial:
            self._reload(iter(pairs), partial=partial)
            return
        recorder = Recorder()
        for name, tensor in pairs:
            recorder.announce(name, tensor)
        with recorder:
            self._reload(iter(pairs), partial=False)
        self.plan = recorder.plan(self.model.named_parameters())
        self.why_no_plan = recorder.problem or ""

    def _reload(self, pairs: Iterator[tuple[str, torch.Tensor]], *, partial: bool) -> None:
        initialize_layerwise_reload(self.model)
        loaded = None
        try:
            # In the update's order a layer's parameters lie together, so few layers are buffered at once.
            loaded = self.model.load_weights(pairs)
        finally:
            # Also after an error: it puts the old parameters back where nothing was loaded.
            finalize_layerwise_reload(self.model, self.model_config)
        if loaded is not None and not partial:
            missing = sorted({name for name, _ in self.model.named_parameters()} - set(loaded))
            if missing:
                raise RuntimeError(f"{len(missing)} parameters stayed as they were, {missing[:3]}: send a whole model again")
        self._repack_tied_heads()

    def _repack_tied_heads(self) -> None:
        """A head that shares the embedding's parameter was not loaded as a layer of its own, so what vLLM packed from the old
        values (oneDNN on CPU) still is in use: without this, every logit after an update comes from the old head."""
        embeddings = [module for module in self.model.modules() if isinstance(module, VocabParallelEmbedding)]
        tied = [module for at, module in enumerate(embeddings) if any(module.weight is m.weight for m in embeddings[:at])]
        if self.tied and len(embeddings) > 1 and not tied:
            raise RuntimeError("the model ties its embeddings, but after the update they no longer share one parameter")
        for module in tied:
            module.quant_method.process_weights_after_loading(module)


def block(name: str) -> str:
    """What is sent or left out as a whole: the name up to its first number (a layer), else its first two parts."""
    parts = name.split(".")
    for at, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: at + 1])
    return ".".join(parts[:2])


def checkpoint_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name → shape of every parameter in a folder's safetensors files, from their headers. Empty when there are none."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")) if folder.is_dir() else []:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return {name: shape for name, shape in shapes.items() if not name.endswith(COMPUTED_BUFFERS)}
