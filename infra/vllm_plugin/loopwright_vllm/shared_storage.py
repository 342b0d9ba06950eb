"""Weight transfer through a file: the trainer writes one safetensors file, every worker maps and loads it.

    /init_weight_transfer_engine {"init_info": {"directory": D}}      once per trainer
    /start_weight_update
    /update_weights {"update_info": {"path": "D/policy-7.safetensors"}}   checks, then loads
    /finish_weight_update {"weight_version": "7"}

Everything happens in /update_weights, because a worker forgets a session whose update failed but keeps one whose finish
failed. The file is checked against the served model before any parameter is touched, so a bad file leaves the old weights.
Names are the Hugging Face ones; vLLM's own `load_weights` splits and fuses them (qkv, gate/up) and takes this rank's shard.
"""

import hashlib
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.logger import init_logger
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

logger = init_logger("vllm.loopwright")
# It warns at every update about layers that have nothing to load (rotary embedding, tied head); `load` checks completeness.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

ALLOWED_ENV = "LOOPWRIGHT_WEIGHT_DIRS"
# Old checkpoints carry these buffers; no trainer sends them and vLLM computes them itself.
COMPUTED_BUFFERS = ("rotary_emb.inv_freq", ".masked_bias", ".attn.bias")
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass
class SharedStorageInitInfo(WeightTransferInitInfo):
    """`directory`: where update files will lie; inside one of LOOPWRIGHT_WEIGHT_DIRS where the server was started with it."""

    directory: str | None = None


@dataclass
class SharedStorageUpdateInfo(WeightTransferUpdateInfo):
    """`path`: a safetensors file with every parameter. `sha256`: of the whole file, checked when given."""

    path: str
    sha256: str | None = None


class SharedStorageEngine(WeightTransferEngine[SharedStorageInitInfo, SharedStorageUpdateInfo]):
    init_info_cls = SharedStorageInitInfo
    update_info_cls = SharedStorageUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config, vllm_config, device, model):
        super().__init__(config, vllm_config, device, model)
        self.roots = [Path(root).resolve() for root in os.environ.get(ALLOWED_ENV, "").split(os.pathsep) if root]
        self.directory: Path | None = None
        self.expected = checkpoint_shapes(Path(self.model_config.model))
        self.tied = bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))

    def init_transfer_engine(self, init_info):
        if init_info.directory is None:
            return
        directory = Path(init_info.directory).resolve()
        if not directory.is_dir():
            raise ValueError(f"weight directory {directory} does not exist on the server's machine")
        if self.roots and not any(directory.is_relative_to(root) for root in self.roots):
            raise ValueError(f"weight directory {directory} is outside {ALLOWED_ENV}={os.pathsep.join(map(str, self.roots))}")
        self.directory = directory

    def start_weight_update(self):
        pass

    def finish_weight_update(self):
        pass

    def shutdown(self):
        self.directory = None

    def update_weights(self, update_info):
        # The base class ends with an accelerator synchronise, which a CPU build of torch refuses.
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info):
        path = self.allowed_file(update_info.path)
        if update_info.sha256 is not None:
            found = file_sha256(path)
            if found != update_info.sha256.lower():
                raise ValueError(f"{path}: SHA-256 is {found}, the update says {update_info.sha256}")
        with safe_open(path, framework="pt", device="cpu") as file:
            self.check(path, file)
            self.load(path, file)
        logger.info("Loaded weights from %s", path)

    def allowed_file(self, name: str) -> Path:
        """The resolved path. ValueError unless it is a regular .safetensors file inside an allowed directory."""
        path = Path(name).resolve()
        allowed = [self.directory] if self.directory is not None else self.roots
        if not allowed:
            raise ValueError(
                'no weight directory is set: call /init_weight_transfer_engine {"init_info": {"directory": …}} first'
            )
        if not any(path.is_relative_to(root) for root in allowed):
            raise ValueError(f"{path} is outside the allowed weight directories {[str(root) for root in allowed]}")
        if path.suffix != ".safetensors" or not path.is_file():
            raise ValueError(f"{path} is not a .safetensors file")
        return path

    def check(self, path: Path, file) -> None:
        """Names and shapes against the checkpoint the server was started from, and that tied weights are equal."""
        names = set(file.keys())
        if self.expected:
            optional = {name for name in self.expected if self.tied and name.endswith(HEAD)}
            missing = sorted(self.expected.keys() - names - optional)
            surplus = sorted(name for name in names - self.expected.keys() if not (self.tied and name.endswith(HEAD)))
            if missing or surplus:
                raise ValueError(
                    f"{path} does not fit the served model {self.model_config.model}: "
                    f"{len(missing)} parameters missing {missing[:3]}, {len(surplus)} unknown {surplus[:3]}"
                )
            for name in names & self.expected.keys():
                shape = tuple(file.get_slice(name).get_shape())
                if shape != self.expected[name]:
                    raise ValueError(f"{path}: {name} has shape {shape}, the served model {self.expected[name]}")
        heads = [name for name in names if name.endswith(HEAD)]
        embeddings = [name for name in names if name.endswith(EMBEDDING)]
        if (
            self.tied
            and len(heads) == len(embeddings) == 1
            and not torch.equal(file.get_tensor(heads[0]), file.get_tensor(embeddings[0]))
        ):
            raise ValueError(f"{path}: the model ties {heads[0]} to {embeddings[0]}, but the two differ")

    def load(self, path: Path, file) -> None:
        """Layer-wise reload: what vLLM repacks for its kernels (oneDNN, quantisation) is repacked from the new weights."""
        initialize_layerwise_reload(self.model)
        loaded = None
        try:
            # In the file's order a layer's parameters lie together, so few layers are buffered at once.
            loaded = self.model.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
        finally:
            # Also after an error: it puts the old parameters back where nothing was loaded.
            finalize_layerwise_reload(self.model, self.model_config)
        if loaded is not None:
            missing = sorted({name for name, _ in self.model.named_parameters()} - set(loaded))
            if missing:
                raise RuntimeError(
                    f"{path} left {len(missing)} parameters as they were, {missing[:3]}: send a whole model again"
                )
        self.repack_tied_heads()

    def repack_tied_heads(self) -> None:
        """A head that shares the embedding's parameter was not loaded as a layer of its own, so what vLLM packed from the old
        values (oneDNN on CPU) still is in use: without this, every logit after an update comes from the old head."""
        embeddings = [module for module in self.model.modules() if isinstance(module, VocabParallelEmbedding)]
        tied = [module for at, module in enumerate(embeddings) if any(module.weight is m.weight for m in embeddings[:at])]
        if self.tied and len(embeddings) > 1 and not tied:
            raise RuntimeError("the model ties its embeddings, but after the update they no longer share one parameter")
        for module in tied:
            module.quant_method.process_weights_after_loading(module)


def checkpoint_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name → shape of every parameter in a folder's safetensors files, from their headers. Empty when there are none."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")) if folder.is_dir() else []:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return {name: shape for name, shape in shapes.items() if not name.endswith(COMPUTED_BUFFERS)}


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
