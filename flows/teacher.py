"""One teacher that a distillation run starts: it scores what the student generated, and keeps its weights.

It keeps its address over restarts: the trainer knows a teacher by it, and waits for one that is being replaced.
"""

from __future__ import annotations

from flows.config import DistillationRunConfig
from flows.config_servers import TeacherConfig
from flows.convert import resolve_model
from flows.started_server import StartedServer
from infra.leases import LeaseManager
from infra.registry import Registry, RunRow
from infra.vllm import Needs, ServerSpec
from trainers.references import resolve

PREFIX = "teacher-"  # of their names among the run's servers


def needs(config: DistillationRunConfig) -> Needs:
    """What the run asks of a teacher, as far as can be told before the student's server is up: the trainer compares lengths."""
    student = config.servers.student.max_model_len or config.max_completion_length + 1
    return Needs(
        max_model_len=student + 1,
        max_logprobs=config.teacher_tops,
        generate_endpoint=config.exact_reverse_kl,
        frozen=True,
    )


class Teacher(StartedServer):
    """A place for the teacher `teacher` of the config."""

    role = "teacher"
    same_address = True

    def __init__(
        self, config: DistillationRunConfig, run: RunRow, registry: Registry, leases: LeaseManager, teacher: str, key: str
    ) -> None:
        given = config.servers.teachers[teacher]
        super().__init__(given, run, registry, leases, f"{PREFIX}{teacher}", key, config.vllm_server_timeout)
        self._config, self._teacher = config, given

    def _needs(self) -> Needs:
        return needs(self._config)

    def _spec(self) -> ServerSpec:
        config = self._config
        return ServerSpec.teacher(
            model=model_of(self._teacher),
            top_logprobs=config.teacher_tops,
            concurrent=config.teacher_concurrency or config.max_concurrent_rollouts,
            seed=config.seed,
            front_end="python" if config.exact_reverse_kl else "auto",  # chosen ids were never asked of the Rust one
            **self._common_spec() | {"max_model_len": self._teacher.max_model_len or one_more(config)},
        )


def model_of(teacher: TeacherConfig) -> str:
    """Folder or hub id of a teacher that the run serves."""
    assert teacher.model is not None, teacher
    return resolve_model(resolve(teacher.model))


def one_more(config: DistillationRunConfig) -> int | None:
    """Tokens a teacher takes where nobody said how many: one more than the student, if that is known."""
    student = config.servers.student.max_model_len
    return None if student is None else student + 1
