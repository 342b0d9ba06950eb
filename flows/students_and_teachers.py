"""Both kinds of servers of a distillation run, as the one set of servers that its trainer needs."""

from __future__ import annotations

from typing import Any

from flows.students import Students
from flows.teachers import Teachers


class StudentsAndTeachers:
    """`flows.training.Servers` of a distillation run."""

    def __init__(self, students: Students, teachers: Teachers) -> None:
        self._students, self._teachers = students, teachers

    def lease(self) -> None:
        """Raises `NotEnoughGPUs`."""
        self._students.lease()
        self._teachers.lease()

    def ensure(self) -> None:
        self._teachers.begin()  # they start beside the students
        self._students.ensure()
        self._teachers.ensure()

    def tend(self) -> str | None:
        gone = self._students.tend(), self._teachers.tend()
        return next(filter(None, gone), None)

    def death(self) -> str | None:
        return self._students.death() or self._teachers.death()

    def serving(self, version: int) -> list[str]:
        return self._students.serving(version)

    def config_fields(self) -> dict[str, Any]:
        return {**self._students.config_fields(), "teacher_server_urls": self._teachers.addresses()}

    def environment(self) -> dict[str, str]:
        return {**self._students.environment(), **self._teachers.environment()}

    def rows(self) -> list[dict[str, Any]]:
        return [*self._students.rows(), *self._teachers.rows()]

    def busy_gpu_s(self) -> dict[str, float]:
        return {**self._students.busy_gpu_s(), **self._teachers.busy_gpu_s()}

    def stop(self) -> None:
        self._students.stop()
        self._teachers.stop()
