"""Weight transfer of a vLLM worker, one backend for every way (`--weight-transfer-config '{"backend": "loopwright"}'`).

    /init_weight_transfer_engine {"init_info": {…}}      once per trainer and way, see `InitInfo`
    /start_weight_update
    /update_weights {"update_info": {…}}                 checks, receives, loads; see `UpdateInfo`
    /finish_weight_update {"weight_version": "7"}

Everything happens in /update_weights, because a worker forgets a session whose update failed but keeps one whose finish
failed. Names, shapes and checksums are checked before any parameter is touched, so a bad update leaves the old weights. Only a
broadcast that is loaded while it arrives, for want of memory, can leave a mixture: the state then says `torn`, until the next
whole update.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.logger import init_logger

from loopwright_vllm import sparse
from loopwright_vllm.carriers import BroadcastCarrier, Carrier, IpcCarrier, WeightFolder, gpu_uuid
from loopwright_vllm.compat import current_config
from loopwright_vllm.layout import Layout
from loopwright_vllm.loading import Loader

logger = init_logger("vllm.loopwright")
DEFAULT_TIMEOUT_S = 600.0
MIRROR_SHARE = 0.5  # of free GPU memory that a mirror or staged update may take


@dataclass
class InitInfo(WeightTransferInitInfo):
    """`transport`: "file", "ipc" or "broadcast".

    `directory`: where update files will lie (file). `handles`: shared GPU memory (ipc). `group`: backend, host, port, token,
    first_rank, world_size (broadcast). `layout`: of buckets, needed for all but whole files. `partial`: the layout leaves out
    parameters that never change.
    """

    transport: str = "file"
    directory: str | None = None
    handles: dict | None = None
    group: dict | None = None
    layout: dict | None = None
    partial: bool = False


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """`path`: a safetensors file: every parameter by name, or a sparse update's streams; `sha256` is checked when given.

    `layout`: id of the layout the buckets follow. `buckets`: those that this call brings, `last` False when more calls follow.
    `sparse`: index → {"width", "relative", "low", "sizes" of the streams, "checksum" of the patched bucket} (see sparse.py).
    `base`: the version it patches.
    `keep`: checksums by bucket: keep a mirror for sparse updates to come. `timeout_s`: a broadcast that takes longer fails.
    """

    path: str | None = None
    sha256: str | None = None
    version: str | None = None
    layout: str | None = None
    buckets: list | None = None
    last: bool = True
    sparse: dict | None = None
    base: str | None = None
    keep: list | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S


class LoopwrightEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config, vllm_config, device, model):
        super().__init__(config, vllm_config, device, model)
        self.folder = WeightFolder()
        self.loader = Loader(model, self.model_config, record=device.type == "cuda")
        self.layouts: dict[str, tuple[Layout, bool]] = {}
        self.carrier: Carrier | None = None
        self.pending: dict[int, torch.Tensor] = {}
        self.mirror: dict[int, torch.Tensor] = {}
        self.mirror_of: tuple[str, str] | None = None  # layout and version
        self.version: str | None = None
        self.torn = False

    def init_transfer_engine(self, init_info):
        if init_info.layout is not None:
            layout = Layout.parse(init_info.layout)
            self.loader.check({entry.name: entry.shape for entry in layout.entries}, partial=init_info.partial)
            self.layouts[layout.id] = layout, init_info.partial
        if init_info.transport == "file":
            if init_info.directory is not None:
                self.folder.use(init_info.directory)
            return
        self.shutdown()
        if init_info.transport == "ipc":
            self.carrier = IpcCarrier(init_info.handles or {}, self.device)
        elif init_info.transport == "broadcast":
            group = dict(init_info.group or {})
            rank = group.pop("first_rank") + self.index
            self.carrier = BroadcastCarrier(**group, rank=rank, device=self.device)
        else:
            raise ValueError(f"transport {init_info.transport!r} is unknown: file, ipc or broadcast")

    @property
    def index(self) -> int:
        """This worker among all of its server's."""
        parallel = self.parallel_config
        return getattr(parallel, "data_parallel_index", 0) * parallel.world_size + parallel.rank

    def start_weight_update(self):
        self.pending.clear()

    def finish_weight_update(self):
        pass

    def shutdown(self):
        carrier, self.carrier = self.carrier, None
        if carrier is not None:
            carrier.close()

    @staticmethod
    def trainer_send_weights(iterator, trainer_args):
        """Abstract in the base class before vLLM 0.28; the trainer's side is not written in vLLM's classes."""
        raise NotImplementedError("updates are sent by Loopwright's trainer")

    def update_weights(self, update_info):
        # The base class ends with an accelerator synchronise, which a CPU build of torch refuses.
        with current_config(self.vllm_config):
            self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info):
        if update_info.layout is None:
            self._load_file(update_info)
        else:
            layout, partial = self._layout(update_info.layout)
            if update_info.sparse is not None:
                self._patch(update_info, layout)
                buckets = iter(self.mirror.items())
                self._load(layout, buckets, persistent=True, partial=partial)
                self.mirror_of = (layout.id, str(update_info.version))
            else:
                self._receive(update_info, layout, partial)
        if update_info.last:
            self.version, self.torn = update_info.version, False

    def state(self) -> dict[str, Any]:
        """What the trainer chooses a way by, and which version this worker holds. `config`: of vLLM's, what it asks for."""
        model = self.model_config
        return {
            "version": self.version,
            "torn": self.torn,
            "gpu_uuid": gpu_uuid(self.device),
            "machine": machine(),
            "plan": self.loader.plan is not None,
            "why_no_plan": self.loader.why_no_plan,
            "config": {
                "model_config": {"model": model.model, "dtype": str(model.dtype), "max_model_len": model.max_model_len},
                "weight_transfer_config": {"backend": "loopwright"},
            },
        }

    # Ways to receive -------------------------------------------------------------------------------------------------

    def _layout(self, name: str) -> tuple[Layout, bool]:
        if name not in self.layouts:
            raise ValueError(f"layout {name} is unknown to this worker: call /init_weight_transfer_engine with it first")
        return self.layouts[name]

    def _load_file(self, update_info: UpdateInfo) -> None:
        """A file with every parameter under its own name."""
        if update_info.path is None:
            raise ValueError("the update has neither a path nor a layout")
        path = self.folder.file(update_info.path, update_info.sha256)
        with safe_open(path, framework="pt", device="cpu") as file:
            names = list(file.keys())
            self.loader.check({name: tuple(file.get_slice(name).get_shape()) for name in names}, partial=False)
            tied = self.loader.ties(names)
            if tied and not torch.equal(file.get_tensor(tied[0]), file.get_tensor(tied[1])):
                raise ValueError(f"{path}: the model ties {tied[0]} to {tied[1]}, but the two differ")
            with self._touching():
                self.loader.load([{name: file.get_tensor(name) for name in names}])
        self.mirror, self.mirror_of = {}, None
        logger.info("Loaded weights from %s", path)

    def _receive(self, update_info: UpdateInfo, layout: Layout, partial: bool) -> None:
        """Whole buckets, in one call or several."""
        indices = range(len(layout.buckets)) if update_info.buckets is None else [int(i) for i in update_info.buckets]
        sizes = {index: layout.buckets[index] for index in indices}
        buckets, persistent = self._source(update_info, layout, sizes)
        split = update_info.buckets is not None and (self.pending or not update_info.last)
        keep = update_info.keep is not None
        if split or keep or (not persistent and self._room(layout.nbytes)):
            # All of it first: a failure on the way then touches nothing.
            self.pending |= {index: self._own(bucket, keep) for index, bucket in buckets}
            if not update_info.last:
                return
            if missing := set(range(len(layout.buckets))) - self.pending.keys():
                raise ValueError(f"the last call of the update came before buckets {sorted(missing)[:3]}")
            ordered = {index: self.pending[index] for index in sorted(self.pending)}
            if keep:
                self._check_sums(ordered, dict(enumerate(update_info.keep or [])))
            self._load(layout, iter(ordered.items()), persistent=True, partial=partial)
            self.pending = {}
            self.mirror = ordered if keep else {}
            self.mirror_of = (layout.id, str(update_info.version)) if keep else None
            return
        self.mirror, self.mirror_of = {}, None
        self._load(layout, buckets, persistent=persistent, partial=partial)

    def _source(
        self, update_info: UpdateInfo, layout: Layout, sizes: dict[int, int]
    ) -> tuple[Iterator[tuple[int, torch.Tensor]], bool]:
        if update_info.path is not None:
            path = self.folder.file(update_info.path, update_info.sha256)
            return self._file_buckets(path, layout, sizes), True
        if self.carrier is None:
            raise ValueError("no transport is open: call /init_weight_transfer_engine first")
        return self.carrier.receive(sizes, update_info.timeout_s), self.carrier.persistent

    def _file_buckets(self, path, layout: Layout, sizes: dict[int, int]) -> Iterator[tuple[int, torch.Tensor]]:
        """Buckets put together from a file of named tensors."""
        with safe_open(path, framework="pt", device="cpu") as file:
            if set(file.keys()) != {entry.name for entry in layout.entries}:
                raise ValueError(f"{path} does not hold the tensors of layout {layout.id}")
            for index, size in sizes.items():
                bucket = torch.zeros(size, dtype=torch.uint8)
                for name, view in layout.views(index, bucket).items():
                    tensor = file.get_tensor(name)
                    if tensor.dtype != view.dtype or tensor.shape != view.shape:
                        raise ValueError(f"{path}: {name} is {tensor.dtype} {tuple(tensor.shape)}, its layout {view.dtype}")
                    view.copy_(tensor)
                yield index, bucket

    def _patch(self, update_info: UpdateInfo, layout: Layout) -> None:
        """Bring the mirror to the update's version; checked bucket by bucket, and dropped if it does not fit."""
        if self.mirror_of != (layout.id, str(update_info.base)):
            raise ValueError(f"no mirror of version {update_info.base} to patch: this worker has {self.mirror_of}; send all")
        changes = {int(index): change for index, change in (update_info.sparse or {}).items()}
        self.mirror_of = None
        for index, streams in self._streams(update_info, changes):
            bucket, change = self.mirror[index], changes[index]
            streams = [stream.to(bucket.device) for stream in streams]
            sparse.patch(bucket, int(change["width"]), bool(change["relative"]), int(change["low"]), streams)
        self._check_sums(self.mirror, {index: change["checksum"] for index, change in changes.items()})

    def _streams(self, update_info: UpdateInfo, changes: dict[int, dict]) -> Iterator[tuple[int, list[torch.Tensor]]]:
        if update_info.path is not None:
            path = self.folder.file(update_info.path, update_info.sha256)
            with safe_open(path, framework="pt", device="cpu") as file:
                for index in changes:
                    yield index, [file.get_tensor(f"{index}.{name}") for name in sparse.STREAMS]
            return
        if self.carrier is None:
            raise ValueError("a sparse update without a file needs a transport: call /init_weight_transfer_engine first")
        sizes = {index: sum(map(int, change["sizes"])) for index, change in changes.items()}
        for index, data in self.carrier.receive({i: (size + 3) // 4 * 4 for i, size in sizes.items()}, update_info.timeout_s):
            streams = data[: sizes[index]].split(list(map(int, changes[index]["sizes"])))
            yield index, [stream.clone() for stream in streams]  # each aligned to its integers

    def _check_sums(self, buckets: dict[int, torch.Tensor], expected: dict[int, int]) -> None:
        for index, wanted in expected.items():
            found = sparse.checksum(buckets[index])
            if found != int(wanted):
                raise ValueError(f"bucket {index} has checksum {found}, the update says {wanted}: nothing was loaded; send all")

    def _own(self, bucket: torch.Tensor, keep: bool) -> torch.Tensor:
        """A copy that outlives the carrier's buffer: on the GPU where there is room, else on the host."""
        if bucket.device.type == "cuda" and not self._room(bucket.numel()):
            return bucket.to("cpu")
        target = self.device if keep and self._room(bucket.numel()) else bucket.device
        return bucket.to(target, copy=True)

    def _room(self, nbytes: int) -> bool:
        if self.device.type == "cpu":
            return True
        return nbytes < MIRROR_SHARE * torch.cuda.mem_get_info(self.device)[0]

    def _load(self, layout: Layout, buckets: Iterator[tuple[int, torch.Tensor]], *, persistent: bool, partial: bool) -> None:
        ready = self.loader.ready
        with self._touching():
            self.loader.load(
                (layout.views(index, b if persistent or ready else b.clone()) for index, b in buckets), partial=partial
            )

    @contextmanager
    def _touching(self) -> Iterator[None]:
        """While parameters are written the worker holds no version; one that failed stays torn until a whole update."""
        self.version, self.torn = None, True
        try:
            yield
        except BaseException as error:
            logger.error("A weight update failed while it was loaded: %s", error)
            raise


def machine() -> str:
    """The same for processes of one machine that can share memory and files; the trainer makes its own alike."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{platform.node()} {file.read().strip()}"
    except OSError:
        return platform.node()
