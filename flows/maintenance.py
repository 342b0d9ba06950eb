"""`reap`: the reaper as a flow, which an automation starts when a flow run crashed, and anybody may start or schedule."""

from __future__ import annotations

from prefect import flow

from flows.reaping import reap_all


@flow(name="reap", log_prints=True, persist_result=False)
def reap() -> str:
    """Stop processes and free leases whose owner on the worker's machine is gone, and mark its runs as failed."""
    done = reap_all()
    print(done)
    return done
