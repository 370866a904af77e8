"""Isolate a program with the Linux kernel: no network, no other processes, files in one folder only.

The process gives up its rights irrevocably and without privileges, in this order:

1. Landlock limits files to the files that Python reads and one folder that it may write.
2. All capabilities are dropped.
3. A seccomp filter refuses system calls that reach the network, start or touch another process, or change attributes
   that Landlock does not cover.

This module uses the standard library only, because the supervisor loads this file without the package.
"""

import ctypes
import os
import platform
import resource
import struct
import sys

_LIBC = ctypes.CDLL(None, use_errno=True)

# ---- prctl and capabilities

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x20080522


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends, and end it if ``parent`` has ended already."""
    _checked(_LIBC.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Have the kernel make this process the parent of every process below it whose own parent ends."""
    _checked(_LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl(PR_SET_CHILD_SUBREAPER)")


# ---- Landlock: files

# system call numbers, the same on every architecture
_LANDLOCK_CREATE = 444
_LANDLOCK_ADD = 445
_LANDLOCK_RESTRICT = 446
_ACCESS_BITS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""ABI version -> number of file access rights."""
_EXECUTE = 1
_WRITE_FILE = 2
_READ_FILE = 4
_READ_DIR = 8
_IOCTL_DEV = 1 << 15
_NET_BITS = 3  # bind and connect over TCP
_SCOPE_BITS = 3  # abstract Unix sockets and signals


def readable_paths() -> list[str]:
    """Return the paths that an interpreter reads: its installation, system libraries, and time zones."""
    paths = [sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.dirname(os.__file__)]
    paths += ["/usr/lib", "/lib", "/lib64", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/usr/share/zoneinfo"]
    return [path for path in dict.fromkeys(map(os.path.realpath, paths)) if os.path.exists(path) and path != "/"]


def _restrict_files(writable: str) -> None:
    version = _LIBC.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)  # ABI version; 0 or less without Landlock
    if version <= 0:
        raise OSError("the kernel has no Landlock (it needs Linux 5.13 with the security module enabled)")
    every = (1 << _ACCESS_BITS.get(version, 16)) - 1
    # Each version of the interface knows more rights and a longer structure; an older kernel refuses what it does not
    # know.
    attributes = struct.pack("QQQ", every, _NET_BITS if version >= 4 else 0, _SCOPE_BITS if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = _checked(
        _LIBC.syscall(_LANDLOCK_CREATE, attributes[:size], ctypes.c_size_t(size), 0), "landlock_create_ruleset"
    )
    for path in readable_paths():
        _allow(ruleset, path, _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0))
    for device in ("/dev/urandom", "/dev/random", "/dev/zero"):
        _allow(ruleset, device, _READ_FILE)
    _allow(ruleset, "/dev/null", _READ_FILE | _WRITE_FILE)
    _allow(ruleset, writable, every & ~(_EXECUTE | _IOCTL_DEV))
    _checked(_LIBC.syscall(_LANDLOCK_RESTRICT, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    if not os.path.exists(path):
        return
    handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = struct.pack("=Qi", access, handle)
    _checked(_LIBC.syscall(_LANDLOCK_ADD, ruleset, 1, rule, 0), f"landlock_add_rule({path})")
    os.close(handle)


# ---- seccomp: system calls

_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_NUMBERS = {  # name: (x86_64, aarch64); -1 if it does not exist
    # network, and io_uring, which opens sockets without socket()
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202),
    "accept4": (288, 242), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    # other programs and processes
    "fork": (57, -1), "vfork": (58, -1), "execve": (59, 221), "execveat": (322, 281), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "process_madvise": (440, 440), "kcmp": (312, 272),
    "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438),
    "setpriority": (141, 140), "sched_setscheduler": (144, 119), "sched_setattr": (314, 274), "ioprio_set": (251, 30),
    # file attributes, which Landlock does not cover
    "chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, -1),
    "fchown": (93, 55), "lchown": (94, -1), "fchownat": (260, 54), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "setxattrat": (463, 463), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "removexattrat": (466, 466), "utime": (132, -1), "utimes": (235, -1),
    "futimesat": (261, -1), "utimensat": (280, 88), "file_setattr": (469, 469),
    # shared memory and queues between processes
    "shmget": (29, 194), "shmat": (30, 196), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    # the system
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "open_tree_attr": (467, 467), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "keyctl": (250, 219),
    "add_key": (248, 217), "request_key": (249, 218), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "sethostname": (170, 161), "setdomainname": (171, 162),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "quotactl": (179, 60),
    "acct": (163, 89), "syslog": (103, 116), "iopl": (172, -1), "ioperm": (173, -1), "personality": (135, 92),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "memfd_secret": (447, 447),
    "landlock_create_ruleset": (444, 444), "seccomp": (317, 277),
}  # fmt: skip
_CLONE = (56, 220)
_CLONE3 = (435, 435)
_KILL = (62, 129)
_TGKILL = (234, 131)
_PRLIMIT = (302, 261)
_PRCTL = (157, 167)
_CLONE_THREAD = 0x10000
_X32_BIT = 0x40000000
_EPERM = 1
_ENOSYS = 38
# BPF instructions
_LOAD = 0x20
_JUMP_EQUAL = 0x15
_JUMP_AT_LEAST = 0x35
_JUMP_SET = 0x45
_RETURN = 0x06
# results of a filter
_ALLOW = 0x7FFF0000
_KILL_PROCESS = 0x80000000
_ERRNO = 0x00050000
# offsets in the data of a system call
_AT_NUMBER = 0
_AT_ARCHITECTURE = 4
_AT_FIRST_ARGUMENT = 16

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


def _filter(pid: int) -> list[Instruction]:
    """Return the BPF program that the kernel runs on every system call of process ``pid``."""
    if platform.machine() not in _ARCHITECTURES:
        raise OSError(f"no system call filter for {platform.machine()}, only for x86_64 and aarch64")
    architecture, column = _ARCHITECTURES[platform.machine()]
    program: list[Instruction] = [
        (_LOAD, 0, 0, _AT_ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _AT_NUMBER),
    ]
    if column == 0:
        # Calls of the x32 interface have numbers of their own, past those that are listed.
        program += [(_JUMP_AT_LEAST, 0, 1, _X32_BIT), (_RETURN, 0, 0, _KILL_PROCESS)]
    for number in (numbers[column] for numbers in _NUMBERS.values()):
        if number >= 0:
            program += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    # the filter cannot read clone3's flags; on ENOSYS the C library falls back to clone, whose flags it can read
    program += [(_JUMP_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    for number, allowed in (
        (_CLONE[column], (_JUMP_SET, 0, 1, _CLONE_THREAD)),  # threads, not processes
        (_KILL[column], (_JUMP_EQUAL, 0, 1, pid)),
        (_TGKILL[column], (_JUMP_EQUAL, 0, 1, pid)),
        (_PRLIMIT[column], (_JUMP_EQUAL, 0, 1, 0)),  # only its own limits, which it cannot raise
        (_PRCTL[column], (_JUMP_EQUAL, 1, 0, _PR_SET_PDEATHSIG)),  # all but outliving the supervisor
    ):
        program += [
            (_JUMP_EQUAL, 0, 4, number),
            (_LOAD, 0, 0, _AT_FIRST_ARGUMENT),
            allowed,
            (_RETURN, 0, 0, _ALLOW),
            (_RETURN, 0, 0, _ERRNO | _EPERM),
        ]
    return [*program, (_RETURN, 0, 0, _ALLOW)]


def _restrict_system_calls() -> None:
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in _filter(os.getpid()))
    instructions = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(instructions))
    _checked(_LIBC.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0), "prctl(PR_SET_SECCOMP)")


# ---- all of it


def limit_resources(cpu_s: int, memory_bytes: int, file_bytes: int) -> None:
    """Limit the process's resources; once isolated it cannot raise the limits."""
    for kind, limit in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))


def isolate(writable: str) -> None:
    """Give up every right of this process except to compute and to write to one folder.

    Raises: OSError if the kernel does not support it.
    """
    if not sys.platform.startswith("linux"):
        raise OSError(f"isolation needs Linux, not {sys.platform}")
    _checked(_LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl(PR_SET_DUMPABLE)")
    # The kernel lets an unprivileged process restrict itself only after this, so that no setuid program runs
    # restricted.
    _checked(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
    _restrict_files(writable)
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    _checked(_LIBC.capset(header, bytes(24)), "capset")  # drop all capabilities
    # The filter of system calls is last, because it refuses the calls above.
    _restrict_system_calls()
