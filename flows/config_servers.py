"""The servers of a run, in its config: how each is started, or where it is."""

from __future__ import annotations

import re
from itertools import pairwise
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from trainers.config import DType, StrictModel
from trainers.references import is_reference
from trainers.roster import plain_url

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}\Z")  # of a run or a server
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|CREDENTIAL", re.IGNORECASE)


def http_address(url: str | None) -> str | None:
    if url is not None and url.startswith("name:") and NAME.match(url.removeprefix("name:")):
        return url
    if url is not None and not is_reference(url) and urlsplit(url).scheme not in ("http", "https"):
        raise ValueError("a server's address starts with http:// or https://, or is name:X for a server that is kept by a name")
    return plain_url(url) if url else url


class ServerConfig(StrictModel):
    """One vLLM server: started for the run, or one that is already up (`url`)."""

    url: str | None = Field(default=None, description="Base URL of a server already up. Default none: the run starts its own.")
    api_key_env: str = Field(
        default="VLLM_API_KEY",
        description="With `url`: name of the environment variable that holds the server's key. Default VLLM_API_KEY.",
    )
    gpus: int | None = Field(
        default=None,
        ge=0,
        description="GPUs to lease for a server. None: as many as it computes on, where there are any; 0: CPU. Default none.",
    )
    tensor_parallel_size: int = Field(default=1, ge=1, description="GPUs one model copy is split over. Default 1.")
    max_model_len: int | None = Field(
        default=None, ge=2, description="Longest sequence in tokens the server takes. Default: the model's own."
    )
    dtype: DType | None = Field(
        default=None, description="Type the server computes in. Default: bfloat16 on a GPU, float32 on CPU."
    )
    extra_args: list[str] = Field(default_factory=list, description="Further arguments of vLLM's command line. Default none.")
    python: str | None = Field(
        default=None, description="Interpreter that has vLLM installed. Default: the one that runs Loopwright."
    )
    env: dict[str, str] = Field(
        default_factory=dict,
        description="Further environment variables of the server; secrets as ${oc.env:NAME}. Default none.",
    )

    @field_validator("env")
    @classmethod
    def _no_plain_secrets(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if _SECRET_NAME.search(name) and value and not is_reference(value):
                raise ValueError(f"{name} looks like a secret: write ${{oc.env:{name}}} and set it in the environment")
        return env

    @field_validator("url")
    @classmethod
    def _http(cls, url: str | None) -> str | None:
        return http_address(url)

    @property
    def gpus_needed(self) -> int:
        """Of one server: the copies in its data-parallel group (`--data-parallel-size` in extra_args) × GPUs of a copy."""
        copies = 1
        for argument, following in pairwise([*self.extra_args, ""]):
            name, equals, value = argument.partition("=")
            if name in ("--data-parallel-size", "-dp") and (value if equals else following).isdigit():
                copies = int(value if equals else following)
        return copies * self.tensor_parallel_size

    def gpus_leased(self, there: bool) -> int:
        """GPUs that one server leases, on a machine where `there` are any or not."""
        if self.gpus is not None:
            return self.gpus
        return self.gpus_needed if there else 0

    @model_validator(mode="after")
    def _gpus_fit(self) -> ServerConfig:
        if self.gpus not in (None, 0) and self.gpus < self.gpus_needed:  # type: ignore[operator]
            copies = self.gpus_needed // self.tensor_parallel_size
            group = f" × --data-parallel-size {copies}" if copies > 1 else ""
            raise ValueError(f"gpus={self.gpus} is fewer than tensor_parallel_size={self.tensor_parallel_size}{group}")
        return self


class StudentsConfig(ServerConfig):
    """The servers of the policy that is trained: `count` alike ones started for the run, or those at `url`."""

    url: str | list[str] | None = Field(  # type: ignore[assignment]
        default=None,
        description="Base URL of a server already up, name:X for one kept by a name, or a list of several. Default none: the "
        "run starts its own.",
    )
    count: int = Field(default=1, ge=1, description="Servers to start, each with GPUs and a port of its own. Default 1.")

    @property
    def urls(self) -> list[str]:
        """Of the servers already up."""
        return [self.url] if isinstance(self.url, str) else self.url or []

    @field_validator("url")
    @classmethod
    def _http(cls, url: str | list[str] | None) -> str | list[str] | None:
        if not isinstance(url, list):
            return http_address(url)
        if not url:
            raise ValueError("the list of servers is empty: name at least one, or leave `url` out")
        urls = [str(http_address(one)) for one in url]
        if twice := [one for one in urls if urls.count(one) > 1]:
            raise ValueError(f"{twice[0]} is named twice: name every server once")
        return urls

    @model_validator(mode="after")
    def _started_or_given(self) -> StudentsConfig:
        if self.url is not None and self.count != 1:
            raise ValueError(f"count={self.count} is for servers that the run starts: with `url`, list as many addresses")
        return self


class TeacherConfig(ServerConfig):
    """One teacher of a distillation run: a server started for the run, or one that is already up and may have other users."""

    model: str | None = Field(
        default=None, description="Folder with a Hugging Face model, or a hub id: what the run serves. Not with `url`."
    )
    url: str | None = Field(
        default=None,
        description="Base URL of a server already up, or name:X for one kept by a name; runs may share it. Default none: the "
        "run starts its own, of `model`.",
    )

    @model_validator(mode="after")
    def _started_or_given(self) -> TeacherConfig:
        if (self.model is None) == (self.url is None):
            what = "neither `model` nor `url` is set" if self.model is None else "both `model` and `url` are set"
            raise ValueError(f"{what}: write `model` for a teacher that the run serves, or `url` for one that is up")
        return self


class ServersConfig(StrictModel):
    """The servers of a run."""

    student: StudentsConfig = Field(default_factory=StudentsConfig, description="Serve the policy that is trained.")


class DistillationServersConfig(ServersConfig):
    """The servers of a distillation run."""

    teachers: dict[str, TeacherConfig] = Field(
        description="Teachers by name, as the column `teacher_id` has them; a single one scores every row. Each has `model` or "
        "`url`, and the fields of a server."
    )

    @field_validator("teachers")
    @classmethod
    def _told_apart(cls, teachers: dict[str, TeacherConfig]) -> dict[str, TeacherConfig]:
        if not teachers:
            raise ValueError("no teacher is given: name at least one, as in {math: {model: org/math-specialist}}")
        urls = [teacher.url for teacher in teachers.values() if teacher.url is not None]
        if twice := [url for url in urls if urls.count(url) > 1]:
            raise ValueError(f"{twice[0]} is named twice: give its rows one `teacher_id`")
        return teachers

    @model_validator(mode="after")
    def _teachers_are_longer(self) -> DistillationServersConfig:
        """A teacher is asked for one token after the student's longest sequence."""
        longest = self.student.max_model_len
        for name, teacher in self.teachers.items():
            if longest is not None and teacher.max_model_len is not None and teacher.max_model_len <= longest:
                raise ValueError(
                    f"teachers.{name}.max_model_len={teacher.max_model_len} must be greater than the student's {longest}: a "
                    f"teacher is asked for one token more; write {longest + 1}, or leave it out"
                )
        return self
