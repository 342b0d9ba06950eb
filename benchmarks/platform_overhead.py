"""What the platform adds to a bare trainer: time to the first step, time lost by a kill, tracking's share, listing runs.

    python -m benchmarks.platform_overhead [--repeats N] [--json]

    loopwright up ─▶ flow run made through Prefect's API ─▶ worker ─▶ flow ─▶ trainer: first step        flow_overhead_s, less
    the same config in a process that is nothing but the trainer: first step                             what this one takes
    SIGKILL to the trainer ─▶ first step of the next attempt                                             resume_s
    Tracker and registry as a flow's trainer has them, real MLflow: seconds a step of one second gives them  tracking_frac
    `loopwright runs list` with 1,000 runs, as a process                                                 runs_list_s

Everything real, on this machine, in a Loopwright home of its own: a tiny model, supervised, no vLLM server. Medians of
`--repeats`; single values go to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

GOALS = {"flow_overhead_s": 15.0, "resume_s": 20.0, "tracking_frac": 0.01, "runs_list_s": 1.0}
RUNS = 1000
METRICS = 60  # a GRPO step logs about as many
TRACKED_STEPS = 40
PAUSE_S = 0.1  # between tracked steps: the tracking thread works in what would be the rest of the step
DEADLINE_S = 600.0


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {DEADLINE_S:.0f} s for {what}")
        time.sleep(0.02)
    return value


def steps_in(log: Path) -> list[int]:
    return [int(step) for step in re.findall(r"step (\d+)  ", log.read_text())] if log.exists() else []


def make_config(folder: Path) -> dict[str, Any]:
    """A run whose steps take milliseconds and that does not end by itself."""
    task = folder / "task"
    subprocess.run([sys.executable, "-m", "flows.quickstart_task", str(task)], check=True)
    return {
        "type": "sft",
        "model": str(task / "model"),
        "dataset": {"path": str(task / "sft.jsonl")},
        "max_steps": 10**6,
        "num_train_epochs": 10**6,
        "max_length": 64,
        "per_device_train_batch_size": 8,
        "token_budget": 0,
        "gradient_checkpointing": False,
        "save_steps": 20,
    }


def bare_trainer(config: dict[str, Any], folder: Path) -> float:
    """Seconds from the start of a process that is nothing but the trainer to its first step."""
    folder.mkdir()
    path, log = folder / "config.json", folder / "log"
    path.write_text(json.dumps({**config, "output_dir": str(folder / "run"), "max_steps": 2}))
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.platform_overhead", "--bare", str(path)], stdout=output, stderr=output
        )
    try:
        wait_for(lambda: steps_in(log) or process.poll(), "the bare trainer's first step")
        took = time.monotonic() - began
        if process.wait(DEADLINE_S):
            raise RuntimeError(f"the bare trainer failed:\n{log.read_text()[-3000:]}")
    finally:
        process.kill()
        process.wait()
    return took


def train_bare(path: str) -> None:
    from trainers import session
    from trainers.main import read_config

    config = read_config(json.loads(Path(path).read_text()))
    session.build_loop(config, session.join_ranks(config)).run()


class FlowRun:
    """One run of `sft-long-context`, asked for through Prefect's API."""

    def __init__(self, api: httpx.Client, config: dict[str, Any], name: str, home: Path) -> None:
        self.api, self.home, self.folder = api, home, home / "runs" / name
        deployment = api.get("/deployments/name/sft-long-context/local").raise_for_status().json()
        body = {"parameters": {"config": {**config, "name": name}}}
        self.began = time.monotonic()
        self.id = api.post(f"/deployments/{deployment['id']}/create_flow_run", json=body).raise_for_status().json()["id"]

    def wait_for_step(self, attempt: int, at_least: int = 1) -> float:
        """The moment at which the attempt's log shows the step."""
        log = self.folder / "logs" / f"trainer-{attempt}.log"
        wait_for(lambda: max(steps_in(log), default=0) >= at_least, f"step {at_least} of attempt {attempt}")
        return time.monotonic()

    def kill_trainer(self) -> float:
        needle = f"{self.folder}/logs/trainer-".encode()
        killed = 0
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"trainers.main" in command and needle in command and b"supervisor" not in command:
                os.kill(int(entry.name), signal.SIGKILL)
                killed += 1
        assert killed, "there is no trainer to kill"
        return time.monotonic()

    def cancel(self) -> None:
        state = {"state": {"type": "CANCELLING"}}
        self.api.post(f"/flow_runs/{self.id}/set_state", json=state).raise_for_status()
        ended = ("CANCELLED", "CRASHED", "FAILED", "COMPLETED")
        wait_for(lambda: self.api.get(f"/flow_runs/{self.id}").json()["state"]["type"] in ended, "the run to be cancelled")


def through_the_platform(config: dict[str, Any], home: Path, repeats: int) -> tuple[list[float], list[float]]:
    """Seconds from trigger to first step, and from a kill to the first step after it, of `repeats` flow runs."""
    from flows import services

    first, resumed = [], []
    services.start()
    try:
        up = services.running()
        assert up is not None
        with httpx.Client(base_url=up.prefect_url, timeout=60.0, trust_env=False) as api:
            for number in range(repeats):
                run = FlowRun(api, config, f"overhead-{number}", home)
                first.append(run.wait_for_step(1) - run.began)
                run.wait_for_step(1, int(config["save_steps"]) + 5)  # there is a checkpoint to go on from
                killed = run.kill_trainer()
                resumed.append(run.wait_for_step(2) - killed)
                run.cancel()
    finally:
        services.stop()
    return first, resumed


def tracking_seconds(folder: Path) -> float:
    """Seconds a step gives to tracking: in the training thread's own calls, and of the interpreter by the threads behind."""
    from infra.leases import LeaseManager
    from infra.mlflow_server import MLflowServer
    from infra.registry import Registry
    from infra.registry_writer import RegistryWriter
    from infra.tracking import Tracker

    folder.mkdir()
    registry = Registry(folder / "registry.db")
    with LeaseManager(registry) as leases:
        server = MLflowServer.start(leases.lease_port().port, folder / "mlflow")
    try:
        server.wait_ready()
        writer = RegistryWriter(registry, registry.create_run("tracked", "benchmark").id)
        tracker = Tracker(folder / "run", server.url, "benchmark", "tracked")
        tracker.start({"a": 1}, resume_step=0)
        tracker.commit(0)
        wait_for(lambda: tracker.run_id, "MLflow's run")
        trace = {"began_s": 0.0, "ended_s": 1.0, "inputs": "x" * 2000, "outputs": "y" * 2000, "spans": []}
        in_calls, process_cpu, own_cpu = 0.0, time.process_time(), time.thread_time()
        for step in range(1, TRACKED_STEPS + 1):
            began = time.perf_counter()
            tracker.log(step, {f"rewards/r{number}": 0.5 + number for number in range(METRICS)})
            tracker.set_tags({"bottleneck": "generation-bound" if step % 2 else "balanced"})
            writer.progress({"step": step, "max_steps": TRACKED_STEPS, "reward": 0.5, "eta_s": 1.0})
            if step % 10 == 0:
                tracker.log_rollouts(step, [{"completion": "z" * 2000, "reward": 0.5, "trace": trace}])
                tracker.commit(step)
            in_calls += time.perf_counter() - began
            time.sleep(PAUSE_S)
        behind = (time.process_time() - process_cpu) - (time.thread_time() - own_cpu)
        tracker.close("FINISHED", timeout_s=60.0)
        writer.close()
    finally:
        server.stop()
    note("in the training thread", in_calls / TRACKED_STEPS)
    note("in the threads behind, CPU", behind / TRACKED_STEPS)
    return (in_calls + behind) / TRACKED_STEPS


def list_seconds(home: Path, repeats: int) -> list[float]:
    """Of `loopwright runs list` as a whole process, with `RUNS` runs in the registry."""
    from infra.registry import Registry

    home.mkdir()
    registry = Registry(home / "registry.db")
    config = {f"field_{number}": "value" * 10 for number in range(80)}
    for number in range(RUNS):
        run = registry.create_run(f"run-{number}", "train-grpo", config)
        registry.progress(run.id, {"step": number, "max_steps": RUNS})
    registry.close()
    command = [sys.executable, "-c", "from flows.cli import main; main()", "runs", "list"]
    seconds = []
    for _ in range(repeats):
        began = time.monotonic()
        environment = {**os.environ, "LOOPWRIGHT_HOME": str(home)}
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        seconds.append(time.monotonic() - began)
        assert done.stdout.count("run-") == RUNS, done.stdout[:1000]
    return seconds


def note(what: str, value: Any) -> None:
    shown = [round(item, 4) for item in value] if isinstance(value, list) else round(value, 5)
    print(f"{what}: {shown}", file=sys.stderr, flush=True)


def measure(folder: Path, repeats: int) -> dict[str, float]:
    home = folder / "home"
    home.mkdir()
    os.environ["LOOPWRIGHT_HOME"] = str(home)
    for name in ("PREFECT_API_URL", "LOOPWRIGHT_REGISTRY_URL", "MLFLOW_TRACKING_URI"):
        os.environ.pop(name, None)
    listing = list_seconds(folder / "listed", max(repeats, 3))
    note("runs list, s", listing)
    tracking = tracking_seconds(folder / "tracking")
    config = make_config(folder)
    bare = [bare_trainer(config, folder / f"bare-{number}") for number in range(repeats)]
    note("bare trainer, process start to first step, s", bare)
    first, resumed = through_the_platform(config, home, repeats)
    note("trigger to first step, s", first)
    note("kill to first step, s", resumed)
    return {
        "flow_overhead_s": round(statistics.median(first) - statistics.median(bare), 3),
        "resume_s": round(statistics.median(resumed), 3),
        "tracking_frac": round(tracking, 5),
        "runs_list_s": round(statistics.median(listing), 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="flow runs, bare runs and listings. Default 3")
    parser.add_argument("--json", action="store_true", help="one JSON line on standard output instead of a table")
    parser.add_argument("--bare", metavar="CONFIG", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.bare:
        train_bare(args.bare)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the services outlive their starter: never leave them behind
    with tempfile.TemporaryDirectory(prefix="loopwright-overhead-", ignore_cleanup_errors=True) as folder:
        figures = measure(Path(folder), args.repeats)
    if args.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:16} {value:8.3f}   goal {GOALS[name]:g}{'' if value <= GOALS[name] else '   MISSED'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
