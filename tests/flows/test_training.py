"""Attempts under a retry policy, against trainers that end in every way a trainer can end."""

from __future__ import annotations

import _thread
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from flows import oom
from flows.config import GRPORunConfig, RetryConfig, SFTRunConfig
from flows.failures import RunFailed, backoff_s
from flows.runs import open_run
from flows.training import NoServers, TrainerJob, environment, serve, train_to_the_end
from infra.errors import ServerStartFailed
from infra.leases import LeaseManager
from infra.process import alive, process_start_time
from infra.registry import Registry

# A trainer that does what the line for its attempt in `plan` says; its whole environment and config are there to use.
FAKE_TRAINER = """
import json, os, signal, sys, time
payload = json.load(open(sys.argv[1]))
run, config = payload["run"], payload["config"]
from infra.registry import Registry
registry = Registry()
def fail(kind, cause):
    registry.end_attempt(run["id"], run["attempt"], "FAILED", kind, cause, "Traceback: here")
    sys.exit(1)
plan = open(os.environ["PLAN"]).read().splitlines()
exec(plan[run["attempt"] - 1])
"""


class OneServer(NoServers):
    """A server that dies when told to, is not replaced while the trainer runs, and comes back when asked."""

    def __init__(self) -> None:
        self.dead, self.starts = False, 0

    def ensure(self) -> None:
        if self.dead or not self.starts:
            self.dead, self.starts = False, self.starts + 1

    def tend(self) -> str | None:
        return self.death()

    def death(self) -> str | None:
        return "vLLM server student died: killed by SIGKILL\nits log" if self.dead else None

    def config_fields(self) -> dict[str, Any]:
        return {"vllm_server_base_url": f"http://127.0.0.1:{self.starts}"}

    def environment(self) -> dict[str, str]:
        return {"VLLM_API_KEY": "secret-key"}


Make = Callable[..., TrainerJob]


@pytest.fixture
def job(home: Path, tmp_path: Path, config: Callable[..., GRPORunConfig], monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    script, plan = tmp_path / "trainer.py", tmp_path / "plan"
    script.write_text(FAKE_TRAINER)
    registry = Registry()
    leases = LeaseManager(registry)

    def make(*lines: str, servers: NoServers | None = None, deadline: float | None = None, **fields: Any) -> TrainerJob:
        plan.write_text("\n".join(lines))
        settings = config(storage={"uri": str(tmp_path / "runs")}, **fields)
        run, _ = open_run(registry, settings, "train-grpo")
        return TrainerJob(
            registry=registry,
            run=run,
            config=settings,
            servers=servers or NoServers(),
            leases=leases,
            fields={"type": "grpo"},
            tracking_uri="sqlite:///nowhere.db",
            environment={"PLAN": str(plan), "PYTHONPATH": os.getcwd()},
            program=(sys.executable, str(script)),
            deadline=deadline,
        )

    yield make
    leases.close()


def attempts(job: TrainerJob) -> list[tuple[str, str | None, str | None]]:
    rows = job.registry.list_attempts(job.run.id)
    return [(row.status, row.failure_class, row.cause.splitlines()[0] if row.cause else None) for row in rows]


def test_a_used_up_limit_stops_the_trainer_and_keeps_the_next_from_starting(job: Make) -> None:
    made = job(
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); registry.progress(run['id'], {'step': 1}); time.sleep(600)",
        "registry.progress(run['id'], {'step': 2})",
    )
    begun: list[int] = []
    made.on_attempt = begun.append
    made.over_limit = lambda: "limits.usd=2 is used up" if made.registry.get_run(made.run.id).progress else None
    for _ in range(2):
        with pytest.raises(RunFailed, match=r"^limits\.usd=2 is used up$") as caught:
            train_to_the_end(made)
        assert caught.value.failure == "user"
    assert begun == [1, 2]
    assert attempts(made) == [("FAILED", "user", "limits.usd=2 is used up")] * 2
    assert made.registry.get_run(made.run.id).progress["step"] == 1
    assert made.registry.list_leases("process") == []


def test_the_trainer_gets_config_and_run_in_a_file_and_the_key_by_environment_only(job: Make) -> None:
    seen: list[dict[str, Any]] = []
    made = job(
        "assert os.environ['VLLM_API_KEY'] == 'secret-key' and config['vllm_server_base_url'] == 'http://127.0.0.1:1'; "
        "registry.progress(run['id'], {'step': 7})",
        servers=OneServer(),
        tags={"a": "b"},
    )
    made.on_progress = seen.append
    train_to_the_end(made)
    assert attempts(made) == [("FINISHED", None, None)]
    assert seen[-1]["step"] == 7
    written = (made.folder / "logs" / "trainer-1.json").read_text()
    assert "secret-key" not in written and made.registry.url not in written and '"a": "b"' in written
    assert made.registry.list_leases("process") == []


def test_a_supervised_trainer_s_memory_grows_in_place_unless_the_user_says_otherwise(job: Make, monkeypatch) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    made = job("pass")
    assert "PYTORCH_CUDA_ALLOC_CONF" not in environment(made), "handles of a trainer's memory go to its servers"
    made.config = SFTRunConfig.model_validate({"model": "m", "dataset": {"path": "d"}})
    assert environment(made)["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    assert environment(made)["PYTORCH_CUDA_ALLOC_CONF"] == "backend:cudaMallocAsync"


def test_progress_that_cannot_be_looked_up_does_not_end_the_training(job: Make) -> None:
    made = job("pass")
    looks: list[dict[str, Any]] = []

    def away(progress: dict[str, Any]) -> None:
        looks.append(progress)
        raise OperationalError("SELECT", None, Exception("unable to open database file"))

    made.on_progress = away
    train_to_the_end(made)
    assert looks and attempts(made) == [("FINISHED", None, None)]


def test_a_killed_trainer_is_resumed_by_policy_and_the_last_cause_is_the_runs(job: Make) -> None:
    kill = "os.kill(os.getpid(), signal.SIGKILL)"
    made = job(kill, "sys.exit(0)")
    train_to_the_end(made)
    assert [row[0] for row in attempts(made)] == ["FAILED", "FINISHED"]
    assert attempts(made)[0][1:] == ("infrastructure", "the trainer ended: killed by SIGKILL")


def test_the_policy_gives_up_after_its_tries(job: Make) -> None:
    kill = "os.kill(os.getpid(), signal.SIGKILL)"
    made = job(kill, kill, kill, retry={"infrastructure": 1, "backoff_s": 0})
    with pytest.raises(RunFailed, match="killed by SIGKILL") as caught:
        train_to_the_end(made)
    assert caught.value.failure == "infrastructure"
    assert len(attempts(made)) == 2


def test_a_failure_of_the_users_code_fails_at_once_with_the_trainers_own_account(job: Make) -> None:
    made = job("fail('user', 'KeyError: answer\\nin your reward')")
    with pytest.raises(RunFailed, match=r"^KeyError: answer") as caught:
        train_to_the_end(made)
    assert (caught.value.failure, caught.value.traceback) == ("user", "Traceback: here")
    assert attempts(made) == [("FAILED", "user", "KeyError: answer")]


def test_out_of_memory_is_tried_once_with_half_the_rows_where_it_is_asked_for(job: Make) -> None:
    memory = "fail('memory', 'out of memory: 80 GiB')"
    small = (
        "assert (config['token_budget'], config['gradient_accumulation_steps']) == (512, 2); "
        "assert run['tags']['loopwright.token_budget'] == '512'"
    )
    made = job(memory, small, oom_retry=True)
    made.fields |= {"token_budget": 1024}
    train_to_the_end(made)
    first = made.registry.list_attempts(made.run.id)[0]
    assert str(first.cause).splitlines() == [
        "out of memory: 80 GiB",
        "oom_retry goes on once with token_budget=512, gradient_accumulation_steps=2",
    ]
    assert [row[:2] for row in attempts(made)] == [("FAILED", "memory"), ("FINISHED", None)]


def test_the_second_time_memory_is_a_failure_also_for_a_run_that_is_resumed(job: Make) -> None:
    memory = "fail('memory', 'out of memory')"
    made = job(memory, memory, memory, oom_retry=True)
    made.fields |= {"token_budget": 0, "per_device_train_batch_size": 8}
    for _ in range(2):
        with pytest.raises(RunFailed, match="oom_retry has been used: the attempt had per_device_train_batch_size=4"):
            train_to_the_end(made)
    assert len(attempts(made)) == 3


@pytest.mark.parametrize(
    ("fields", "longest", "change"),
    [
        ({"token_budget": None, "max_length": 64}, 64, {"token_budget": 32, "gradient_accumulation_steps": 2}),
        ({"token_budget": None, "gradient_accumulation_steps": 3}, 100, {"token_budget": 50, "gradient_accumulation_steps": 6}),
        ({"token_budget": None}, None, None),
        ({"token_budget": -1, "per_device_train_batch_size": 1}, 64, None),
        ({"token_budget": None, "max_length": 64, "packing": False}, 64, None),
    ],
)
def test_what_is_made_smaller(fields: dict[str, Any], longest: int | None, change: dict[str, int] | None) -> None:
    assert oom.smaller(fields, longest) == change


def test_a_trainer_that_tells_nothing_is_judged_by_its_log(job: Make) -> None:
    made = job("raise ImportError('no module named x')")
    with pytest.raises(RunFailed) as caught:
        train_to_the_end(made)
    assert caught.value.failure == "user"
    assert str(caught.value).startswith("the trainer ended: exit code 1\n")
    assert "ImportError: no module named x" in str(caught.value)


def test_without_a_server_left_the_trainer_is_stopped_and_all_start_anew(job: Make, tmp_path: Path) -> None:
    servers, started = OneServer(), tmp_path / "started"
    made = job(f"open({str(started)!r}, 'w').write(str(os.getpid())); time.sleep(600)", "sys.exit(0)", servers=servers)
    pids: list[tuple[int, float]] = []

    def death() -> str | None:
        if not pids and started.exists() and (text := started.read_text()):
            pids.append((int(text), process_start_time(int(text)) or 0.0))
            servers.dead = True
        return OneServer.death(servers)

    servers.death = death  # type: ignore[method-assign]
    train_to_the_end(made)
    assert attempts(made)[0] == ("FAILED", "infrastructure", "vLLM server student died: killed by SIGKILL")
    assert servers.starts == 2
    assert not alive(*pids[0])


def test_the_wall_clock_stops_the_trainer_with_a_sigterm(job: Make, tmp_path: Path) -> None:
    noted = tmp_path / "terminated"
    made = job(
        f"signal.signal(signal.SIGTERM, lambda *_: (open({str(noted)!r}, 'w'), sys.exit(143))); "
        "registry.progress(run['id'], {'step': 1}); time.sleep(600)",
        limits={"wall_clock_s": 3},
    )

    def use_up(progress: dict[str, Any]) -> None:
        if progress.get("step") == 1:
            made.deadline = 0.0

    made.on_progress = use_up
    with pytest.raises(RunFailed, match=r"limits\.wall_clock_s=3 is used up; resume to go on"):
        train_to_the_end(made)
    assert noted.exists()


def test_an_interrupted_flow_stops_its_trainer_and_closes_the_attempt(job: Make) -> None:
    made = job("time.sleep(600)")
    interrupts = iter([_thread.interrupt_main])  # once: the watch is in the main thread, progress is shown in another

    def interrupt(progress: dict[str, Any]) -> None:
        next(interrupts, lambda: None)()

    made.on_progress = interrupt
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            train_to_the_end(made)
    finally:
        signal.signal(signal.SIGINT, before)
    assert attempts(made) == [("KILLED", None, "stopped by Ctrl-C")]
    assert made.registry.list_leases("process") == []


def test_a_rank_killed_under_torchrun_counts_as_infrastructure(job: Make) -> None:
    made = job("print('exitcode  : -9 (pid: 1)'); sys.exit(1)", retry={"infrastructure": 0})
    with pytest.raises(RunFailed) as caught:
        train_to_the_end(made)
    assert caught.value.failure == "infrastructure"


def test_servers_that_do_not_start_are_tried_again_by_the_class_of_their_failure() -> None:
    class Stubborn(NoServers):
        def __init__(self, failure: str, times: int) -> None:
            self.failure, self.left, self.tries = failure, times, 0

        def ensure(self) -> None:
            self.tries += 1
            if self.tries <= self.left:
                raise ServerStartFailed("it ended before it was ready", self.failure)

    policy = RetryConfig(infrastructure=2, backoff_s=0)
    flaky = Stubborn("infrastructure", 2)
    serve(flaky, policy)
    assert flaky.tries == 3
    refused = Stubborn("user", 1)
    with pytest.raises(RunFailed, match="it ended before it was ready"):
        serve(refused, policy)
    assert refused.tries == 1


def test_backoff_doubles_up_to_five_minutes_and_ends_with_the_tries() -> None:
    policy = RetryConfig(infrastructure=9, backoff_s=40)
    assert [backoff_s(policy, "infrastructure", n) for n in (1, 2, 3, 4, 9, 10)] == [40, 80, 160, 300, 300, None]
    assert backoff_s(policy, "divergence", 1) is None
