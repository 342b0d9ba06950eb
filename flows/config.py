"""The run config: the trainer's fields at the top level, joined with what infra needs (servers, storage, tracking, …).

`trainer_fields(config)` is what the trainer gets; everything else stays with the flow. One nested model is the flow's only
parameter, because Prefect drops constraints of top-level parameters; its JSON schema is the run form.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from pydantic import ConfigDict, Field, field_validator, model_validator
from pydantic.json_schema import SkipJsonSchema

from flows.config_servers import NAME, DistillationServersConfig, ServersConfig
from flows.convert import resolve_model
from flows.form import lay_out
from infra.home import home
from infra.storage import is_remote
from infra.storage.run_storage import RunStorage
from infra.tracking_params import is_secret
from trainers.config import DistillationConfig, GRPOConfig, SFTConfig, StrictModel
from trainers.metrics import spec_of
from trainers.packing import unshared_ranks
from trainers.references import REFERENCE, is_reference, resolve
from trainers.training_arguments import LOGGER_PACKAGES


class LaunchConfig(StrictModel):
    """How the trainer is launched."""

    ranks: int = Field(default=1, ge=1, description="Trainer processes on this machine, sharded with FSDP2. Default 1.")
    gpus: int | None = Field(
        default=None,
        ge=0,
        description="GPUs to lease: one per rank, or 0 for CPU. Default none: one per rank if there are any.",
    )

    def gpus_leased(self, there: bool) -> int:
        """GPUs that the trainer leases, on a machine where `there` are any or not."""
        if self.gpus is not None:
            return self.gpus
        return self.ranks if there else 0

    @model_validator(mode="after")
    def _one_gpu_per_rank(self) -> LaunchConfig:
        if self.gpus not in (None, 0, self.ranks):
            raise ValueError(
                f"gpus={self.gpus} with ranks={self.ranks}: each rank takes one GPU, so write gpus={self.ranks} or gpus=0"
            )
        return self


class StorageConfig(StrictModel):
    """Where checkpoints go."""

    uri: str | None = Field(
        default=None,
        description="Folder, plain or as file://…, or s3://bucket/prefix; checkpoints go to `<uri>/<name>`. With s3:// the "
        "run works in `<LOOPWRIGHT_HOME>/runs` and is mirrored. Default `<LOOPWRIGHT_HOME>/runs`.",
    )
    endpoint_url: str | None = Field(
        default=None, description="Address of an S3 service other than Amazon's. Default: AWS_ENDPOINT_URL_S3, if set."
    )
    timeout_s: float = Field(
        default=60.0, gt=0, description="Seconds without an answer after which a request to S3 is tried again. Default 60."
    )
    upload_wait_s: float = Field(
        default=600.0, ge=0, description="Seconds the end of a training waits for the last upload to S3. Default 600."
    )
    keep_best: int = Field(
        default=0, ge=0, description="Beside the newest `save_total_limit`, keep this many best checkpoints. Default 0."
    )
    best_metric: str = Field(default="eval/accuracy", description="Metric that `keep_best` goes by. Default eval/accuracy.")
    best_mode: Literal["max", "min"] = Field(
        default="max", description="Whether the largest or the smallest value is the best. Default max."
    )
    keep_every: int | None = Field(
        default=None, ge=1, description="Also keep checkpoints whose step is a multiple of this. Default none."
    )

    @field_validator("uri")
    @classmethod
    def _known_scheme(cls, uri: str | None) -> str | None:
        parts = urlsplit(uri or "")
        if parts.scheme not in ("", "file", "s3"):
            raise ValueError(f"{parts.scheme}:// is no storage: write a folder, file:///folder or s3://bucket/prefix")
        if parts.scheme == "s3" and not parts.netloc:
            raise ValueError("no bucket is named: write s3://bucket/prefix")
        if parts.scheme == "s3" and "@" in parts.netloc:
            raise ValueError(
                "leave credentials out of the address: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile"
            )
        return uri

    @field_validator("endpoint_url")
    @classmethod
    def _plain_endpoint(cls, url: str | None) -> str | None:
        if url is not None and not is_reference(url):
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https"):
                raise ValueError("an endpoint's address starts with http:// or https://")
            if parts.username or parts.password:
                raise ValueError("leave credentials out of the address: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
        return url

    @field_validator("best_metric")
    @classmethod
    def _in_the_catalog(cls, name: str) -> str:
        try:
            spec_of(name)
        except Exception as error:
            raise ValueError(f"{name} is no metric: see docs/metrics.md ({error})") from None
        return name

    @property
    def remote(self) -> bool:
        """Whether checkpoints go to S3."""
        return is_remote(self.uri)

    def folder(self) -> Path:
        """The local folder that `uri` names, or in which a mirrored run works."""
        if self.uri is None or self.remote:
            return home() / "runs"
        path = unquote(urlsplit(self.uri).path) if self.uri.startswith("file:") else self.uri
        return Path(path).expanduser().resolve()

    def of_run(self, name: str) -> RunStorage:
        """Where the run of this name keeps its checkpoints, and which; for the trainer, so without references."""
        keep = {"best": self.keep_best, "metric": self.best_metric, "mode": self.best_mode, "every": self.keep_every}
        if not self.remote:
            return RunStorage(keep=keep)
        options = {"endpoint_url": resolve(self.endpoint_url), "timeout_s": self.timeout_s}
        return RunStorage(f"{str(self.uri).rstrip('/')}/{name}", options, keep, self.upload_wait_s)


class TrackingConfig(StrictModel):
    """Where metrics go."""

    uri: str | None = Field(
        default=None,
        description="MLflow tracking URI. Default: the store in `<LOOPWRIGHT_HOME>/mlflow`, which `loopwright up` serves.",
    )
    experiment: str = Field(default="loopwright", min_length=1, description="MLflow experiment. Default loopwright.")

    @field_validator("uri")
    @classmethod
    def _no_password(cls, uri: str | None) -> str | None:
        if uri and urlsplit(REFERENCE.sub("", uri)).password:
            raise ValueError("leave the password out of the address: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD")
        return uri


class RetryConfig(StrictModel):
    """How often a failed attempt is resumed by itself, by the class of its failure."""

    infrastructure: int = Field(default=3, ge=0, description="Server or process died, network, port taken. Default 3.")
    memory: int = Field(default=0, ge=0, description="Out of memory. Default 0: fail with the numbers.")
    user: int = Field(default=0, ge=0, description="Reward function, config or dataset. Default 0: fail at once.")
    no_progress: int = Field(default=0, ge=0, description="Nothing moved for rollout_worker_timeout. Default 0.")
    divergence: int = Field(default=0, ge=0, description="Loss or gradient not finite. Default 0.")
    replace_servers: int = Field(
        default=3, ge=0, description="Servers of the run that died and are started again while it goes on. Default 3."
    )
    backoff_s: float = Field(
        default=5.0, ge=0, description="Seconds before the first resume, doubled each time up to 5 minutes. Default 5."
    )


class ParentRetry(StrictModel):
    """Runs of a sweep or recipe that were lost, and the sweep or recipe itself. (A run's own `retry` comes first; a run goes on
    from its last checkpoint.)"""

    infrastructure: int = Field(
        default=1,
        ge=0,
        description="Times a trial or stage goes on that failed as infrastructure, or whose process died. Default 1.",
    )
    lost: int = Field(
        default=3,
        ge=0,
        description="Times the sweep or recipe goes on by itself after its process died, with its worker or alone, if a worker "
        "ran it. Default 3.",
    )
    backoff_s: float = Field(default=5.0, ge=0, description="Seconds before either goes on. Default 5.")

    @property
    def own(self) -> RetryConfig:
        """That of the sweep or recipe itself."""
        return RetryConfig(infrastructure=self.lost, backoff_s=self.backoff_s)


class LimitsConfig(StrictModel):
    """What a run may use."""

    wall_clock_s: float | None = Field(
        default=None,
        gt=0,
        description="Seconds one flow run may take; then it checkpoints, stops and fails, and can be resumed. Default none.",
    )
    gpu_hours: float | None = Field(
        default=None,
        gt=0,
        description="GPU hours the run may hold, over all attempts; then as above, and a resume needs a higher limit. "
        "Default none.",
    )
    usd: float | None = Field(
        default=None,
        gt=0,
        description="US dollars the run may cost, over all attempts; needs `usd_per_gpu_hour`; then as above. Default none.",
    )
    usd_per_gpu_hour: float | None = Field(
        default=None,
        ge=0,
        description="Price of a GPU in US dollars per hour, for `usd` and `cost/usd`. Default none: not counted.",
    )

    @model_validator(mode="after")
    def _price_known(self) -> LimitsConfig:
        if self.usd is not None and not self.usd_per_gpu_hour:
            raise ValueError(f"usd={self.usd:g} needs the price of a GPU: set usd_per_gpu_hour as well")
        return self


class TrialOf(StrictModel):
    """The sweep that a run is a trial of."""

    name: str = Field(description="Name of the sweep.")
    trial: int = Field(ge=0, description="Number of the trial in it.")
    watch: str = Field(description="Metric whose running mean the registry keeps, by step: the sweep compares trials by it.")
    average_steps: int = Field(default=1, ge=1, description="Newest values of the metric that are averaged. Default 1.")
    every_steps: int = Field(default=1, ge=1, description="Steps between two kept values. Default 1.")


class RunSettings(StrictModel):
    """What every run config has around the trainer's fields."""

    model_config = ConfigDict(json_schema_extra=lay_out)

    name: str | None = Field(
        default=None, description="Name of the run, unique in the registry; the same name again resumes. Default: made up."
    )
    tags: dict[str, str] = Field(default_factory=dict, description="Tags of the MLflow run. Default none.")
    sweep: TrialOf | None = Field(default=None, description="Filled in by `loopwright sweep` for its trials. Default none.")
    trainer: LaunchConfig = Field(default_factory=LaunchConfig, description="Launching the trainer.")
    storage: StorageConfig = Field(default_factory=StorageConfig, description="Checkpoints.")
    tracking: TrackingConfig = Field(default_factory=TrackingConfig, description="MLflow.")
    retry: RetryConfig = Field(default_factory=RetryConfig, description="Resuming by itself.")
    limits: LimitsConfig = Field(default_factory=LimitsConfig, description="Limits of the run.")
    oom_retry: bool = Field(
        default=False,
        description="Out of memory: try again once with rows half as long and twice as many; sequences longer than those "
        "are then dropped. Default false.",
    )

    @classmethod
    def refusal(cls, name: str) -> str | None:
        if name in FILLED_IN:
            return f"`{name}` is filled in by the flow: set {FILLED_IN[name]} instead"
        return super().refusal(name)

    @field_validator("report_to", check_fields=False)
    @classmethod
    def _loggers(cls, names: list[str]) -> list[str]:
        for name in names:
            if name == "mlflow":
                raise ValueError("every run is recorded in MLflow: leave mlflow out")
            if name not in LOGGER_PACKAGES:
                raise ValueError(f"{name!r} is no logger of a run: {' or '.join(LOGGER_PACKAGES)}")
        return names

    @field_validator("name")
    @classmethod
    def _plain_name(cls, name: str | None) -> str | None:
        if name is not None and not NAME.match(name):
            raise ValueError(
                "a run's name has letters, digits, `_`, `-` and `.`, starts with a letter or digit, and has at most 128"
            )
        return name

    @model_validator(mode="after")
    def _ranks_share_rows(self) -> RunSettings:
        wrong = unshared_ranks(self.trainer.ranks, getattr(self, "cp_size", 1), getattr(self, "sp_size", 1))
        if wrong is not None:
            raise ValueError(f"trainer.ranks={self.trainer.ranks}: {wrong}")
        return self


FILLED_IN = {
    "output_dir": "storage.uri and name",
    "vllm_server_base_url": "servers.student.url",
    "teacher_server_urls": "servers.teachers",
}


class GRPORunConfig(GRPOConfig, RunSettings):
    """A GRPO run: trainer, server, storage, tracking."""

    servers: ServersConfig = Field(default_factory=ServersConfig, description="vLLM servers.")
    output_dir: SkipJsonSchema[str] = Field(default="", exclude=True)
    vllm_server_base_url: SkipJsonSchema[str] = Field(default="", exclude=True)

    @model_validator(mode="after")
    def _has_reward(self) -> GRPORunConfig:
        if not self.reward_funcs and self.environment_factory is None and self.loop_cls is None:
            raise ValueError(
                "reward_funcs is empty: name at least one reward function as `package.module:name`, or an environment_factory "
                "whose environment has a `get_reward`"
            )
        return self


class DistillationRunConfig(DistillationConfig, RunSettings):
    """A distillation run: trainer, student and teachers, storage, tracking."""

    servers: DistillationServersConfig = Field(description="vLLM servers: of the student, and the teachers.")
    output_dir: SkipJsonSchema[str] = Field(default="", exclude=True)
    vllm_server_base_url: SkipJsonSchema[str] = Field(default="", exclude=True)
    # Their names are what the trainer's config checks; the addresses come with `flows.teachers`.
    teacher_server_urls: SkipJsonSchema[dict[str, str]] = Field(default_factory=lambda: {"default": ""}, exclude=True)

    @model_validator(mode="after")
    def _teachers_are_named(self) -> DistillationRunConfig:
        self.teacher_server_urls = self._teachers_are_told_apart(dict.fromkeys(self.servers.teachers, ""))
        return self


class SFTRunConfig(SFTConfig, RunSettings):
    """A supervised run: trainer, storage, tracking."""

    output_dir: SkipJsonSchema[str] = Field(default="", exclude=True)


GeneratingRunConfig = GRPORunConfig | DistillationRunConfig  # those with a student
RunConfig = GeneratingRunConfig | SFTRunConfig
RUN_CONFIGS: dict[str, type[GRPORunConfig] | type[DistillationRunConfig] | type[SFTRunConfig]] = {
    "grpo": GRPORunConfig,
    "distillation": DistillationRunConfig,
    "sft": SFTRunConfig,
}
_INFRA_FIELDS = {*RunSettings.model_fields, "servers"}


def trainer_fields(config: RunConfig, output_dir: Path) -> dict[str, Any]:
    """The trainer's part as JSON-ready data, with what the flow knows filled in.

    References are resolved (a packaged model to its folder as well), but for what may be a secret: the trainer resolves that
    where it uses it.
    """
    fields = resolve_plain({name: value for name, value in config.model_dump(mode="json").items() if name not in _INFRA_FIELDS})
    return {**fields, "model": resolve_model(fields["model"]), "output_dir": str(output_dir)}


def resolve_plain(value: Any) -> Any:
    """`value` with its references resolved, but for what may be a secret: keyword arguments, and fields made for secrets."""
    if isinstance(value, dict):
        kept = ("kwargs", "model_init_kwargs")
        return {name: item if name in kept or is_secret(name) else resolve_plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [resolve_plain(item) for item in value]
    return resolve(value)


def absolute_paths(config: RunConfig) -> RunConfig:
    """`config` with local paths made absolute, so that a worker or a resume in another folder reads the same files."""
    data = config.model_dump(mode="json", exclude_unset=True)
    for holder in (data, *data.get("servers", {}).get("teachers", {}).values()):
        if holder.get("model") and Path(holder["model"]).exists():
            holder["model"] = str(Path(holder["model"]).resolve())
    for dataset in (data.get("dataset"), (data.get("eval") or {}).get("dataset"), (data.get("long_eval") or {}).get("books")):
        if dataset and Path(dataset["path"]).exists():
            dataset["path"] = str(Path(dataset["path"]).resolve())
    if cache := (data.get("books") or {}).get("cache_dir"):
        data["books"]["cache_dir"] = str(Path(cache).expanduser().resolve())
    specs = [*data.get("reward_funcs", []), *data.get("tools", []), data.get("environment_factory"), data.get("loop_cls")]
    specs.append((data.get("eval") or {}).get("reward_func"))
    for spec in filter(None, specs):
        file, colon, attribute = spec["path"].rpartition(":")
        if colon and file.endswith(".py"):
            spec["path"] = f"{Path(file).resolve()}:{attribute}"
    uri = config.storage.uri
    if uri is not None and not uri.startswith("file:") and not config.storage.remote:
        data["storage"]["uri"] = str(config.storage.folder())
    return type(config).model_validate(data)


def changed_fields(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Dotted names of the leaves in which two dumped configs differ."""
    names: list[str] = []
    for name in sorted({*old, *new}):
        left, right = old.get(name), new.get(name)
        if isinstance(left, dict) and isinstance(right, dict):
            names.extend(f"{name}.{inner}" for inner in changed_fields(left, right))
        elif left != right:
            names.append(name)
    return names
