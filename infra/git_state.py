"""The git state of a folder: commit, branch, and what was not committed, bounded and without secrets."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path
from typing import Any

from infra.redaction import redact

MAX_DIFF_CHARS = 256 * 1024
MAX_UNTRACKED = 200
TIMEOUT_S = 20.0
# Files that hold secrets by custom: their contents are no part of what reproduces a run.
_NOT_SHOWN = (".env", ".env.*", "*.pem", "*.key", "*secret*", "*credential*", ".netrc", ".pgpass", "id_rsa*", "id_ed25519*")


def top_level(folder: Path) -> Path | None:
    """Of the checkout that holds `folder`; None: it is in none, or there is no git."""
    top = _git(folder, "rev-parse", "--show-toplevel")
    return Path(top.strip()) if top else None


def git_state(root: Path) -> dict[str, Any]:
    """Of a checkout's top level: `commit`, `branch`, `diff` against the commit with its digest, names of `untracked` files."""
    hidden = [f":(exclude,glob,icase)**/{pattern}" for pattern in _NOT_SHOWN]
    diff = _git(root, "diff", "HEAD", "--no-color", "--no-ext-diff", "--", ".", *hidden) or ""
    untracked = (_git(root, "ls-files", "--others", "--exclude-standard") or "").splitlines()
    clean = redact(diff)
    return {
        "commit": (_git(root, "rev-parse", "HEAD") or "").strip() or None,
        "branch": (_git(root, "rev-parse", "--abbrev-ref", "HEAD") or "").strip() or None,
        "diff": clean if len(clean) <= MAX_DIFF_CHARS else clean[:MAX_DIFF_CHARS] + f"\n… cut: {len(clean)} characters\n",
        "diff_digest": hashlib.sha256(diff.encode(errors="replace")).hexdigest()[:16] if diff else None,
        "untracked": untracked[:MAX_UNTRACKED],
    }


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints; None: it failed, was too slow, or is not there."""
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], env=environment, capture_output=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None
