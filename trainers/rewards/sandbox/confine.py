"""Confines the process that calls it, for good: limits, namespaces, Landlock, capabilities, system call filter.

Only the standard library, because it runs in `python -I -S`. Linux alone; elsewhere `confine` says that it cannot.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import sys
from typing import NamedTuple

from .syscalls import forbid

_READ = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_CLONE_NEWNET, _CLONE_NEWIPC, _CLONE_NEWUSER = 0x40000000, 0x08000000, 0x10000000

# Landlock's rights, by the version of its interface that brought them.
_RIGHTS_V1 = (1 << 13) - 1
_READ_FILE, _READ_DIR, _WRITE_FILE, _TRUNCATE = 1 << 2, 1 << 3, 1 << 1, 1 << 14
_FOLDER = _READ_FILE | _READ_DIR | _WRITE_FILE | _TRUNCATE | 1 << 5 | 1 << 8  # also to make and to remove files


class CannotConfine(Exception):
    """The kernel does not permit what confinement needs; the message says what."""


class Limits(NamedTuple):
    cpu_s: int
    memory_bytes: int
    file_bytes: int
    open_files: int = 64

    def set(self) -> None:
        values = {
            resource.RLIMIT_CPU: self.cpu_s,
            resource.RLIMIT_AS: self.memory_bytes,
            resource.RLIMIT_FSIZE: self.file_bytes,
            resource.RLIMIT_NOFILE: self.open_files,
            resource.RLIMIT_CORE: 0,
        }
        for which, value in values.items():
            ceiling = resource.getrlimit(which)[1]
            value = value if ceiling == resource.RLIM_INFINITY else min(value, ceiling)
            resource.setrlimit(which, (value, value))


def confine(folder: str, limits: Limits) -> str:
    """Confine this process to `folder`, which becomes its working folder; returns what is in force, in words.

    Raises:
        CannotConfine: files or system calls cannot be restricted on this machine.
    """
    os.chdir(folder)
    limits.set()
    if sys.platform != "linux":
        raise CannotConfine("confinement is made of Linux features; this is " + sys.platform)
    libc = ctypes.CDLL(None, use_errno=True)
    network = _CLONE_NEWNET | _CLONE_NEWIPC
    # The second form is for users who are not root and may make user namespaces.
    apart = libc.unshare(network) == 0 or libc.unshare(network | _CLONE_NEWUSER) == 0
    libc.prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG: SIGKILL when whoever waits for the answer is gone
    if libc.prctl(38, 1, 0, 0, 0) != 0:
        raise CannotConfine("PR_SET_NO_NEW_PRIVS is refused")
    version = _landlock(libc, folder)
    _drop_capabilities(libc)
    try:
        forbid(libc)
    except OSError as error:
        raise CannotConfine(f"system calls cannot be filtered: {error}") from None
    return f"Landlock {version}, seccomp" + (", network and IPC namespaces" if apart else "")


def _landlock(libc: ctypes.CDLL, folder: str) -> int:
    """Returns the version of Landlock's interface."""
    create, add, restrict = 444, 445, 446
    version = libc.syscall(create, None, 0, 1)
    if version < 1:
        raise CannotConfine(
            "Landlock is not there (Linux 5.13 or newer with `landlock` in /sys/kernel/security/lsm; containers: a seccomp "
            "profile that permits landlock_create_ruleset)"
        )
    rights = _RIGHTS_V1 | sum(1 << bit for bit, since in ((13, 2), (14, 3), (15, 5)) if version >= since)
    # All rights to files, TCP bind and connect (from 4), abstract unix sockets and signals to others (from 6).
    fields = [rights, *([3] if version >= 4 else []), *([3] if version >= 6 else [])]
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    ruleset = libc.syscall(create, attributes, len(attributes), 0)
    if ruleset < 0:
        raise CannotConfine(f"landlock_create_ruleset: {os.strerror(ctypes.get_errno())}")
    stdlib = os.path.dirname(os.__file__)
    allowed = dict.fromkeys((*_READ, stdlib, os.path.join(sys.base_prefix, "lib")), _READ_FILE | _READ_DIR)
    allowed |= dict.fromkeys(_DEVICES, _READ_FILE | _WRITE_FILE) | {folder: _FOLDER}
    for path, wanted in allowed.items():
        if not os.path.exists(path):
            continue
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        if not os.path.isdir(path):
            wanted &= _READ_FILE | _WRITE_FILE | _TRUNCATE  # a file takes no other rights
        rule = struct.pack("=Qi", wanted & rights, fd)
        if libc.syscall(add, ruleset, 1, rule, 0) != 0:
            raise CannotConfine(f"landlock_add_rule for {path}: {os.strerror(ctypes.get_errno())}")
        os.close(fd)
    if libc.syscall(restrict, ruleset, 0) != 0:
        raise CannotConfine(f"landlock_restrict_self: {os.strerror(ctypes.get_errno())}")
    os.close(ruleset)
    return version


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    header = struct.pack("=Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    if libc.capset(header, bytes(24)) != 0:
        raise CannotConfine(f"capset: {os.strerror(ctypes.get_errno())}")
