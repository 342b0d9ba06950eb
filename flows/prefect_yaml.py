"""prefect.yaml, for those who deploy with `prefect deploy --all`: `python -m flows.prefect_yaml` writes it.

It says what `flows.deployments` says, made from the same code; a test holds the committed file to it. What such a file
cannot say (the pool's limits, automations, schedules that are kept) only `loopwright deploy` does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from flows.deployments import Target, standard_targets, wanted_fields
from flows.services import POOL

PATH = Path(__file__).resolve().parent.parent / "prefect.yaml"
HEAD = """\
# Made by `python -m flows.prefect_yaml`; do not edit. For `prefect deploy --all`, run in this folder, once the work pool is
# there (`prefect work-pool create loopwright --type process`). `loopwright deploy` does the same and more: the pool, its
# limits, automations, schedules; and it needs no checkout.
"""


def text() -> str:
    """The whole file."""
    # Flows are imported by module, from what is installed; without a pull step Prefect looks for a file in the entrypoint.
    pull = [{"prefect.deployments.steps.set_working_directory": {"directory": "."}}]
    content = {"name": "loopwright", "pull": pull, "deployments": [_entry(target) for target in standard_targets()]}
    return HEAD + yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120)


def _entry(target: Target) -> dict[str, Any]:
    fields = wanted_fields(target, POOL)
    return {
        "name": target.name,
        "entrypoint": fields["entrypoint"],
        "description": fields["description"],
        "parameters": fields.get("parameters", {}),
        "tags": fields["tags"],
        "enforce_parameter_schema": fields["enforce_parameter_schema"],
        "work_pool": {
            "name": fields["work_pool_name"],
            "work_queue_name": fields["work_queue_name"],
            "job_variables": fields["job_variables"],
        },
    }


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
