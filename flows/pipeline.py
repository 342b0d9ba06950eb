"""The steps every training flow takes, as Prefect tasks, and the order they are taken in.

    preflight ─▶ open run ─▶ lease ─▶ serve ─▶ train ─▶ evaluate ─▶ register ─▶ release
                                └── any failure, kill or cancellation ────────────▶ release

Side effects are never taken from a cache (NO_CACHE). What a retry must not do again is a finished *stage* in the registry:
that holds over processes, flow runs and machines, and survives a kill.
"""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Failed

from flows import artifacts, lineage
from flows.config import DistillationRunConfig, GeneratingRunConfig, RunConfig
from flows.evaluation import evaluate_model
from flows.experiment import Experiment
from flows.failures import RunFailed, stopped_by
from flows.preflight import preflight
from flows.reaping import begin_flow
from flows.runs import named, open_run
from flows.storage import FAILED_WAIT_S, upload_rest
from flows.students import Students
from flows.students_and_teachers import StudentsAndTeachers
from flows.teachers import Teachers
from flows.training import serve as start_servers
from flows.training import train_to_the_end
from infra.patience import patient
from infra.tracking import register_model
from trainers.errors import ConfigError


@task(cache_policy=NO_CACHE, persist_result=False)
def lease(experiment: Experiment) -> None:
    """Devices for server and trainer, for as long as the run takes."""
    config = experiment.config
    if isinstance(config, GeneratingRunConfig):
        place = (experiment.run, experiment.registry, experiment.leases)
        servers = Students(config, *place)
        if isinstance(config, DistillationRunConfig):
            servers = StudentsAndTeachers(servers, Teachers(config, *place))
        experiment.servers = servers
        servers.lease()
    experiment.lease_trainer_gpus()


@task(cache_policy=NO_CACHE, persist_result=False, log_prints=True)
def serve(experiment: Experiment) -> None:
    """Servers up, probed, and listed on the flow run's page. One that does not start is tried again by the retry policy."""
    start_servers(experiment.servers, experiment.config.retry)
    experiment.show_servers()


@task(cache_policy=NO_CACHE, persist_result=False, log_prints=True)
def train(experiment: Experiment) -> dict[str, Any]:
    """The trainer, resumed by policy, until it has finished."""
    train_to_the_end(experiment.job())
    checkpoints = experiment.registry.list_checkpoints(experiment.run.id)
    if not checkpoints:
        raise RunFailed("infrastructure", "the trainer finished without a checkpoint")
    if (why := upload_rest(experiment.config, experiment.folder)) is not None:
        raise RunFailed("infrastructure", f"{why}; `loopwright resume {experiment.run.name}` stores it")
    lineage.note_trained(experiment.registry, experiment.run, experiment.config)
    last = checkpoints[-1]
    return {"step": last.step, "checkpoint": last.path}


@task(cache_policy=NO_CACHE, persist_result=False, log_prints=True)
def evaluate(experiment: Experiment, model: str, step: int, served: bool) -> dict[str, Any]:
    """Greedy accuracy of `model` on the held-out set. `served`: the server holds exactly these weights, so ask it."""
    scores = evaluate_model(experiment, model, step, served)
    print(f"accuracy {scores['accuracy']:.4f} at step {step}, {scores['scored']} problems")
    return scores


@task(cache_policy=NO_CACHE, persist_result=False, log_prints=True)
def register(experiment: Experiment, checkpoint: str, tags: dict[str, Any]) -> dict[str, Any]:
    """The trained model in MLflow's model registry, under the run's name."""
    name = experiment.run.name
    version = register_model(experiment.folder, checkpoint, name, tags=tags, **experiment.tracking_options())
    if version is None:
        print(f"MLflow is out of reach: model {name} is registered when the run's journal is sent")
    lineage.note_registered(experiment.registry, experiment.run, experiment.config, tags["step"], name, version)
    return {"model": name, "version": version}


@task(cache_policy=NO_CACHE, persist_result=False)
def release(experiment: Experiment) -> None:
    """Servers stopped, leases freed, the run given up."""
    experiment.release()


def run_experiment(config: RunConfig, flow: str) -> dict[str, Any] | State:
    """The body of a training flow: its result, or a Failed state whose message begins with the cause."""
    registry = patient(begin_flow(config))
    flow_run_id = str(flow_run.id)
    try:
        config = named(registry, config, flow_run_id, str(flow_run.name))
        preflight(config)
        run, resumed = open_run(registry, config, flow, flow_run_id)
    except ConfigError as error:
        return Failed(message=str(error), data=error)
    experiment = Experiment(registry, config, run)
    print(f"run {run.name} {'goes on' if resumed else 'starts'} in {run.output_dir}")
    ended = _to_the_end(experiment)
    experiment.show_end(experiment.stage("train"))
    if isinstance(ended, dict):
        artifacts.markdown("result", _summary(experiment, ended), f"Result of {run.name}")
    return ended


def _to_the_end(experiment: Experiment) -> dict[str, Any] | State:
    """All stages, and how they ended in registry and MLflow; everything the run held is released."""
    try:
        result = _stages(experiment)
        experiment.finish()
        return result
    except Exception as error:
        if (why := upload_rest(experiment.config, experiment.folder, FAILED_WAIT_S)) is not None:
            print(f"WARNING: {why}")
        return Failed(message=experiment.fail(error), data=error)
    except BaseException as error:
        experiment.kill(stopped_by(error))
        raise
    finally:
        try:
            release(experiment)
        finally:
            experiment.release()  # Prefect may refuse to run a task when it is away or the run is being ended


def _stages(experiment: Experiment) -> dict[str, Any]:
    """Every stage that is not done yet; all results together."""
    config, result = experiment.config, {"run": experiment.run.name}
    own_server = isinstance(config, GeneratingRunConfig) and not config.servers.student.urls
    lease(experiment)
    trained = experiment.stage("train")
    trained_now = trained is None
    if trained is None:
        serve(experiment)
        if config.eval is not None and experiment.stage("evaluate_before") is None and not experiment.has_checkpoint():
            scores = evaluate(experiment, config.model, 0, served=own_server)
            experiment.done("evaluate_before", {"accuracy_before": scores["accuracy"]})
        trained = experiment.done("train", train(experiment))
    if config.eval is not None:
        result |= experiment.stage("evaluate_before") or {}
        after = experiment.stage("evaluate")
        if after is None:
            # With rarer syncs the server may be some steps behind; after a resume it may hold anything.
            served = trained_now and isinstance(config, GeneratingRunConfig) and config.weight_sync_steps == 1
            scores = evaluate(experiment, trained["checkpoint"], trained["step"], served=served)
            after = experiment.done("evaluate", {name: scores[name] for name in ("accuracy", "scored")})
        result |= after
    experiment.servers.stop()
    registered = experiment.stage("register")
    if registered is None:
        teachers = lineage.teacher_models(experiment.registry, config)
        tags = {"run": experiment.run.name, "base_model": config.model, **trained}
        tags |= {f"teacher.{name}": model for name, model in teachers.items()}
        registered = experiment.done("register", register(experiment, trained["checkpoint"], tags))
    mlflow_run = experiment.registry.get_run(experiment.run.id).mlflow_run_id
    return {**result, **trained, **registered, "mlflow_run": mlflow_run}


def _summary(experiment: Experiment, result: dict[str, Any]) -> str:
    progress = experiment.registry.get_run(experiment.run.id).progress
    lines = [f"# {experiment.run.name}", "", artifacts.describe(progress), "", "| | |", "| --- | --- |"]
    lines += [f"| {name} | {value} |" for name, value in result.items() if value is not None]
    return "\n".join(lines)
