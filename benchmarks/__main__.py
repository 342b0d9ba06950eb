"""`python -m benchmarks`: every benchmark in turn, with the settings for this machine, one JSON line each."""

from __future__ import annotations

import subprocess
import sys

MODULES = ("trainer_step", "rollout_engine", "teacher_scoring", "generation", "weight_sync", "grpo_run", "platform_overhead")


def main() -> int:
    failed = []
    for name in MODULES:
        print(f"== {name}", file=sys.stderr, flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}", "--json"], check=False).returncode:
            failed.append(name)
    for name in failed:
        print(f"benchmark {name} failed", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
