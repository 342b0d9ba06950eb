"""A trainer that kills itself: `python -m tests.infra.killed_trainer DIR URI ATTEMPT RESUME LAST WHERE`.

It logs `loss` = attempt × 1000 + step, saves every 5 steps, and sends itself SIGKILL
- `step:N`      right after logging step N, once what was committed has reached MLflow,
- `checkpoint`  between a whole checkpoint and its commit,
- `sent`        in the tracking thread, after MLflow took a batch and before that is noted,
- `never`       not at all: it ends as FINISHED.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from infra.outbox import Point
from infra.tracking import Tracker
from infra.tracking_mlflow import MlflowBackend


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DiesAfterSending(MlflowBackend):
    def log_points(self, run_id: str, points: Sequence[Point]) -> None:
        super().log_points(run_id, points)
        die()


def main() -> None:
    folder, uri, where = Path(sys.argv[1]), sys.argv[2], sys.argv[6]
    attempt, resume, last = map(int, sys.argv[3:6])
    backend = DiesAfterSending if where == "sent" else MlflowBackend
    tracker = Tracker(folder, uri, "killed", "killed", system_metrics_s=0, backend=backend)
    tracker.start({"attempt_independent": 1}, {"source": "/data/x.jsonl", "digest": "d1", "rows": 3}, resume)
    for step in range(resume + 1, last + 1):
        tracker.log(step, {"loss": attempt * 1000 + step, "reward": 0.5})
        trace = {"began_s": time.time(), "ended_s": time.time(), "inputs": None, "outputs": None, "spans": []}
        tracker.log_rollouts(step, [{"completion": f"attempt {attempt}", "reward": 0.5, "trace": trace}])
        if where == f"step:{step}":
            while tracker._outbox.offset == 0:
                time.sleep(0.05)
            die()
        if step % 5 == 0:
            (folder / f"checkpoint-{step}").mkdir(exist_ok=True)
            if where == "checkpoint":
                die()
            tracker.commit(step, folder / f"checkpoint-{step}")
    if where == "sent":
        time.sleep(120)
        sys.exit("MLflow was never reached")
    sys.exit(0 if tracker.close("FINISHED") else 1)


if __name__ == "__main__":
    main()
