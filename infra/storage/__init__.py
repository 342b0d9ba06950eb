"""Shared storage: files by key, in a folder or in S3, and whole checkpoints on top of them.

open_storage(uri) ─▶ Storage (folder.py, s3.py)      keys and bytes
                        └─ CheckpointStore            checkpoint-<step>/…, manifest last       checkpoints.py
                             ├─ Mirror                the run's folder ─▶ storage, beside training   mirror.py
                             └─ newest_whole          the run's folder ◀─ storage, at a start        resume.py
"""

from infra.storage.base import Options, Storage, Stored, is_remote, open_storage

__all__ = ["Options", "Storage", "Stored", "is_remote", "open_storage"]
