"""What the tracking thread says to MLflow. Every call may be repeated: none of them changes anything the second time.

- metrics carry stored timestamps, and the SQL store keeps one row per (key, time, step, value); `last_steps` covers the others;
- params, tags, dataset inputs and artefacts of the same content overwrite themselves, as do traces and spans of the same id;
- the run and a model version are looked up by a key tag before they are made.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from infra.outbox import Point
from infra.rollout_traces import mlflow_trace

if TYPE_CHECKING:
    from mlflow import MlflowClient

RUN_KEY = "loopwright.run_key"
MODEL_KEY = "loopwright.model_key"
_LOGGED_TABLES = "mlflow.loggedArtifacts"


class Rejected(Exception):
    """The tracking server answered that it will never take this; sending it again is of no use."""


class Backend(Protocol):
    """The seam between the tracking thread and MLflow. Any exception but `Rejected` means: out of reach, try again later."""

    def open_run(self, run_id: str | None, key: str, start_ms: int, tags: dict[str, str]) -> str:
        """The id of the run: the given one, else the one that carries `key`, else a new one."""
        ...

    def last_steps(self, run_id: str) -> dict[str, int]:
        """Per metric the largest step the run has."""
        ...

    def log_points(self, run_id: str, points: Sequence[Point]) -> None: ...
    def log_params(self, run_id: str, params: dict[str, str]) -> None: ...
    def set_tags(self, run_id: str, tags: dict[str, str]) -> None: ...
    def log_datasets(self, run_id: str, datasets: Sequence[dict[str, Any]]) -> None: ...
    def log_text(self, run_id: str, text: str, artifact: str) -> None: ...
    def log_path(self, run_id: str, path: Path, artifact_dir: str | None, exclude: Sequence[str] = ()) -> None: ...
    def log_table(self, run_id: str, path: Path) -> None: ...
    def log_trace(self, run_id: str, trace: dict[str, Any]) -> None:
        """A record of `infra.rollout_traces`."""
        ...

    def register_model(self, run_id: str, name: str, artifact_dir: str, key: str, tags: dict[str, str]) -> str: ...
    def set_status(self, run_id: str, status: str, end_ms: int | None) -> None: ...


def prepare_environment() -> None:
    """Settings MLflow reads from the environment; what the user has set stays.

    No usage telemetry. Few retries inside the client, since the outbox retries with better knowledge and a bounded close
    must end.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("DO_NOT_TRACK", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # stdout belongs to the commands


class MlflowBackend:
    """`Backend` over `MlflowClient`; constructed in the tracking thread, because importing MLflow takes seconds.

    Args:
        uri: a server's URL, or `sqlite:///…/mlflow.db`, whose artefacts go to the folder `artifacts` beside the file.
        experiment: name; made if it is missing.
    """

    def __init__(self, uri: str, experiment: str) -> None:
        prepare_environment()
        from mlflow import MlflowClient
        from mlflow.tracing.client import TracingClient

        self._experiment = experiment
        self._experiment_ids: dict[str, str] = {}  # of runs
        self._artifacts: Path | None = None
        if uri.startswith("sqlite:///"):
            database = Path(uri.removeprefix("sqlite:///"))
            create_database(database)
            self._artifacts = database.parent / "artifacts"
            # The first client of a newer MLflow migrates the schema; two at once would trip over one another.
            with _file_lock(database.with_name(database.name + ".lock")):
                self._client: MlflowClient = MlflowClient(uri, uri)
                self._client.search_experiments(max_results=1)
        else:
            self._client = MlflowClient(uri, uri)
        # What MLflow's own exporter writes with, without the queue and the threads that lose what is in them at a kill.
        self._traces = TracingClient(uri)

    def open_run(self, run_id: str | None, key: str, start_ms: int, tags: dict[str, str]) -> str:
        if run_id is not None:
            return run_id
        experiment = self._experiment_id()
        found = self._client.search_runs([experiment], f"tags.`{RUN_KEY}` = '{key}'", max_results=1)
        if found:
            return found[0].info.run_id
        run = self._client.create_run(
            experiment, start_time=start_ms, tags={RUN_KEY: key, **tags}, run_name=tags.get("mlflow.runName")
        )
        return run.info.run_id

    def _experiment_id(self) -> str:
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(self._experiment)
        if found is None:
            location = (self._artifacts / self._experiment).as_uri() if self._artifacts else None
            try:
                return self._client.create_experiment(self._experiment, artifact_location=location)
            except MlflowException:
                found = self._client.get_experiment_by_name(self._experiment)  # another run made it at this moment
                if found is None:
                    raise
        if found.lifecycle_stage == "deleted":
            self._client.restore_experiment(found.experiment_id)
        return found.experiment_id

    def last_steps(self, run_id: str) -> dict[str, int]:
        # `metrics` of the public API has no steps; the entities behind it are the newest value of each metric by step.
        return {metric.key: metric.step for metric in self._client.get_run(run_id).data._metric_objs}

    def log_points(self, run_id: str, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        with _rejections():
            self._client.log_batch(run_id, metrics=[Metric(p.name, p.value, p.time_ms, p.step) for p in points])

    def log_params(self, run_id: str, params: dict[str, str]) -> None:
        from mlflow.entities import Param

        items = sorted(params.items())
        for start in range(0, len(items), 100):
            with _rejections():
                self._client.log_batch(run_id, params=[Param(name, value) for name, value in items[start : start + 100]])

    def set_tags(self, run_id: str, tags: dict[str, str]) -> None:
        from mlflow.entities import RunTag

        items = sorted(tags.items())
        for start in range(0, len(items), 100):
            with _rejections():
                self._client.log_batch(run_id, tags=[RunTag(name, value[:5000]) for name, value in items[start : start + 100]])

    def log_datasets(self, run_id: str, datasets: Sequence[dict[str, Any]]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        inputs = []
        for dataset in datasets:
            source = str(dataset["source"])
            local = os.path.exists(source) or source.startswith(("/", "."))
            inputs.append(
                DatasetInput(
                    Dataset(
                        name=str(dataset.get("name") or Path(source).stem)[:500],
                        digest=str(dataset["digest"])[:36],
                        source_type="local" if local else "hugging_face",
                        source=json.dumps({"uri": source} if local else {"path": source, "split": dataset.get("split")}),
                        profile=json.dumps({"num_rows": dataset["rows"]}) if "rows" in dataset else None,
                    ),
                    [InputTag("mlflow.data.context", str(dataset.get("context", "training")))],
                )
            )
        with _rejections():
            self._client.log_inputs(run_id, datasets=inputs)

    def log_text(self, run_id: str, text: str, artifact: str) -> None:
        with tempfile.TemporaryDirectory(prefix="loopwright-") as folder:
            path = Path(folder) / Path(artifact).name
            path.write_text(text, encoding="utf-8")
            parent = str(Path(artifact).parent)
            self.log_path(run_id, path, None if parent == "." else parent)

    def log_path(self, run_id: str, path: Path, artifact_dir: str | None, exclude: Sequence[str] = ()) -> None:
        with _rejections():
            if not path.is_dir():
                self._client.log_artifact(run_id, str(path), artifact_dir)
                return
            with tempfile.TemporaryDirectory(prefix="loopwright-") as folder:
                # MLflow uploads whole folders: give it one of links to what is wanted.
                for file in files_of(path, exclude):
                    link = Path(folder) / file.relative_to(path)
                    link.parent.mkdir(parents=True, exist_ok=True)
                    link.symlink_to(file.absolute())
                self._client.log_artifacts(run_id, folder, artifact_dir)

    def log_table(self, run_id: str, path: Path) -> None:
        self.log_path(run_id, path, None)
        # By this tag MLflow's UI and `mlflow.load_table` find tables.
        self.set_tags(run_id, {_LOGGED_TABLES: json.dumps([{"path": path.name, "type": "table"}])})

    def log_trace(self, run_id: str, trace: dict[str, Any]) -> None:
        if run_id not in self._experiment_ids:
            self._experiment_ids[run_id] = self._client.get_run(run_id).info.experiment_id
        experiment = self._experiment_ids[run_id]
        info, spans = mlflow_trace(trace, run_id, experiment)
        with _rejections():
            try:
                self._traces.log_spans(experiment, spans)
            except NotImplementedError as error:
                # A server's version that was not answered once counts as unknown from then on: ask again for the next trace.
                if (version := getattr(type(self._traces.store), "_get_server_version", None)) is not None:
                    version.cache_clear()
                raise Rejected(f"this MLflow stores no spans: {error}") from error
            self._traces.start_trace(info)

    def register_model(self, run_id: str, name: str, artifact_dir: str, key: str, tags: dict[str, str]) -> str:
        from mlflow.exceptions import MlflowException

        with _rejections():
            try:
                self._client.create_registered_model(name)
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            for version in self._client.search_model_versions(f"name = '{name}' and run_id = '{run_id}'"):
                if version.tags.get(MODEL_KEY) == key:
                    return str(version.version)
            source = f"{self._client.get_run(run_id).info.artifact_uri}/{artifact_dir}"
            return str(self._client.create_model_version(name, source, run_id, tags={**tags, MODEL_KEY: key}).version)

    def set_status(self, run_id: str, status: str, end_ms: int | None) -> None:
        if end_ms is None:
            self._client.update_run(run_id, status=status)
        else:
            self._client.set_terminated(run_id, status, end_ms)


def files_of(folder: Path, exclude: Sequence[str]) -> list[Path]:
    """Files below `folder`, but for those whose path in it matches one of `exclude` (`fnmatch`: `*` matches `/` too)."""
    files = (file for file in sorted(folder.rglob("*")) if file.is_file())
    return [file for file in files if not any(fnmatch(file.relative_to(folder).as_posix(), pattern) for pattern in exclude)]


@contextmanager
def _rejections() -> Iterator[None]:
    """`Rejected` for what the server will never take (400) and for local files that are gone.

    A missing run or a refused key may be mended, so that is tried again.
    """
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if error.error_code in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_ALREADY_EXISTS", "FEATURE_DISABLED"):
            raise Rejected(str(error)) from error
        raise
    except FileNotFoundError as error:
        raise Rejected(str(error)) from error


def create_database(database: Path) -> None:
    """MLflow's tables in a new SQLite file that appears whole; nothing if the file is there.

    MLflow makes its tables one by one and refuses a file that has some of them: a process killed meanwhile would leave a store
    that nobody can open again.
    """
    prepare_environment()
    database.parent.mkdir(parents=True, exist_ok=True)
    with _file_lock(database.with_name(database.name + ".lock")):
        if database.exists():
            return
        from mlflow import MlflowClient

        with tempfile.TemporaryDirectory(dir=database.parent, prefix=".new-") as folder:
            new = Path(folder) / database.name
            MlflowClient(f"sqlite:///{new}", f"sqlite:///{new}").search_experiments(max_results=1)
            with closing(sqlite3.connect(new)) as connection:
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # all of it in the one file that is renamed
            new.rename(database)


@contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    create_database(Path(sys.argv[1]))
