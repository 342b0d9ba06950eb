"""The work pool `loopwright` and a deployment of each flow, so that the Prefect UI, its API and schedules can start them.

`python -m flows.deployments` with `PREFECT_API_URL` set; doing it again changes nothing but what has changed.
"""

from __future__ import annotations

from contextlib import suppress

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectAlreadyExists
from prefect.types.entrypoint import EntrypointType
from prefect.workers.process import ProcessWorker

from flows.grpo import train_grpo
from flows.services import POOL
from flows.sft import train_sft


def deploy() -> list[str]:
    """Create or update pool and deployments; names of the deployments."""
    with get_client(sync_client=True) as client:
        template = ProcessWorker.get_default_base_job_template()
        with suppress(ObjectAlreadyExists):
            client.create_work_pool(WorkPoolCreate(name=POOL, type="process", base_job_template=template))
    names = []
    for flow in (train_grpo, train_sft):
        # By module, not by file: the worker runs the installed code, whatever folder it was started in.
        deployment = flow.to_deployment("local", work_pool_name=POOL, entrypoint_type=EntrypointType.MODULE_PATH)
        deployment.apply()  # type: ignore[union-attr]
        names.append(f"{flow.name}/local")
    return names


if __name__ == "__main__":
    print("deployments:", ", ".join(deploy()))
