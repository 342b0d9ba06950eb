"""The system call filter: classic BPF for seccomp, made for one process of one architecture.

Refused calls fail with EPERM (unknown, newer ones with ENOSYS, for which libraries have fallbacks), so that a program meets an
error and not its end. Numbers are those of the kernel's ABI, which never change.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_COLUMN = {"x86_64": 0, "aarch64": 1}

# name: numbers on x86_64 and aarch64, None where the architecture lacks the call.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # network
    "socket": (41, 198), "connect": (42, 203), "accept": (43, 202), "accept4": (288, 242), "bind": (49, 200),
    "listen": (50, 201),
    # processes
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272), "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "setpriority": (141, 140),
    "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "sched_setattr": (314, 274), "ioprio_set": (251, 30), "migrate_pages": (256, 238), "move_pages": (279, 239),
    # what Landlock does not cover
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, None), "fchown": (93, 55),
    "lchown": (94, None), "fchownat": (260, 54), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "utime": (132, None),
    "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88), "truncate": (76, 45), "mknod": (133, None),
    "mknodat": (259, 33), "memfd_create": (319, 279), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "inotify_add_watch": (254, 27), "fanotify_init": (300, 262), "lookup_dcookie": (212, 18),
    # System V and POSIX message passing
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "semop": (65, 193),
    "semctl": (66, 191), "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188),
    "msgctl": (71, 187), "mq_open": (240, 180), "mq_unlink": (241, 181),
    # the kernel and the machine
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142), "sethostname": (170, 161),
    "setdomainname": (171, 162), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "acct": (163, 89), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266), "quotactl": (179, 60),
    "iopl": (172, None), "ioperm": (173, None), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "io_setup": (206, 0), "syslog": (103, 116), "personality": (135, 92), "modify_ldt": (154, None),
    "uselib": (134, None), "vhangup": (153, 58),
}  # fmt: skip
# From here on only the named ones pass: close_range, faccessat2, epoll_pwait2, futex_waitv.
_FIRST_NEW, _NEW_ALLOWED = 424, (436, 439, 441, 449)
_CONDITIONAL = {
    "socketpair": (53, 199), "clone": (56, 220), "kill": (62, 129), "tgkill": (234, 131), "prlimit64": (302, 261),
    "open": (2, None), "openat": (257, 56), "fcntl": (72, 25), "ioctl": (16, 29),
}  # fmt: skip

_LOAD, _AND, _JEQ, _JGE, _JSET, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
_NUMBER, _ARCH = 0, 4

Instruction = tuple[int, int, int, int]  # operation, jump if true, jump if false, operand


def _argument(index: int) -> int:
    """Offset of the low half of a system call's argument (both architectures are little-endian)."""
    return 16 + 8 * index


def _only(index: int, allowed: tuple[int, ...]) -> list[Instruction]:
    """Allow if the argument is one of `allowed`."""
    tests: list[Instruction] = [(_JEQ, len(allowed) - i, 0, value) for i, value in enumerate(allowed)]
    return [(_LOAD, 0, 0, _argument(index)), *tests, (_RETURN, 0, 0, _EPERM), (_RETURN, 0, 0, _ALLOW)]


def _never(index: int, refused: tuple[int, ...], mask: int = 0xFFFFFFFF) -> list[Instruction]:
    """Refuse if the argument under `mask` is one of `refused`."""
    tests: list[Instruction] = [(_JEQ, len(refused) - i, 0, value) for i, value in enumerate(refused)]
    head: list[Instruction] = [(_LOAD, 0, 0, _argument(index)), (_AND, 0, 0, mask)]
    return [*head, *tests, (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _EPERM)]


def _conditions(pid: int) -> dict[str, list[Instruction]]:
    own_or_zero = (0, pid)
    truncating = {"mask": 0x203, "refused": (0x200, 0x203)}  # O_TRUNC without an access mode that writes
    return {
        # AF_UNIX (1) and, under the type's mask, SOCK_STREAM (1): a datagram pair could send to any named socket.
        "socketpair": [
            (_LOAD, 0, 0, _argument(0)), (_JEQ, 0, 3, 1),
            (_LOAD, 0, 0, _argument(1)), (_AND, 0, 0, 0xF), (_JEQ, 1, 0, 1),
            (_RETURN, 0, 0, _EPERM), (_RETURN, 0, 0, _ALLOW),
        ],
        # CLONE_THREAD: threads, but no processes.
        "clone": [
            (_LOAD, 0, 0, _argument(0)), (_JSET, 1, 0, 0x10000), (_RETURN, 0, 0, _EPERM), (_RETURN, 0, 0, _ALLOW),
        ],
        "kill": _only(0, (pid,)),
        "tgkill": _only(0, (pid,)),
        "prlimit64": _only(0, own_or_zero),
        "open": _never(1, **truncating),
        "openat": _never(2, **truncating),
        "fcntl": _never(1, (8, 10, 15)),  # F_SETOWN, F_SETSIG, F_SETOWN_EX: signals to others
        "ioctl": _never(1, (0x8901, 0x8902, 0x5412)),  # FIOSETOWN, SIOCSPGRP, TIOCSTI
    }  # fmt: skip


def program(machine: str, pid: int) -> list[Instruction]:
    """The filter for process `pid`.

    Raises:
        KeyError: the architecture's numbers are not known.
    """
    column = _COLUMN[machine]
    code: list[Instruction] = [(_LOAD, 0, 0, _ARCH), (_JEQ, 1, 0, _AUDIT_ARCH[machine]), (_RETURN, 0, 0, _KILL)]
    code.append((_LOAD, 0, 0, _NUMBER))
    if machine == "x86_64":
        code += [(_JGE, 0, 1, 0x40000000), (_RETURN, 0, 0, _KILL)]  # x32: the same calls under other numbers
    for name, block in _conditions(pid).items():
        number = _CONDITIONAL[name][column]
        if number is not None:
            code += [(_JEQ, 0, len(block), number), *block]  # a block always returns
    for number in _NEW_ALLOWED:
        code += [(_JEQ, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    code += [(_JGE, 0, 1, _FIRST_NEW), (_RETURN, 0, 0, _ENOSYS)]
    for numbers in _REFUSED.values():
        if (number := numbers[column]) is not None:
            code += [(_JEQ, 0, 1, number), (_RETURN, 0, 0, _EPERM)]
    return [*code, (_RETURN, 0, 0, _ALLOW)]


def forbid(libc: ctypes.CDLL) -> None:
    """Put the filter on this process, for good. `PR_SET_NO_NEW_PRIVS` must be set.

    Raises:
        OSError: the kernel or the architecture does not permit it.
    """
    machine = platform.machine()
    if machine not in _COLUMN:
        raise OSError(f"no table of system calls for {machine}")
    code = b"".join(struct.pack("=HBBI", *step) for step in program(machine, os.getpid()))
    buffer = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer)))
    if libc.prctl(22, 2, header, 0, 0) != 0:  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp filter: {os.strerror(number)}")
