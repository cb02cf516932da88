"""What: birth, attach and end of the shared-memory object.

Map: the object is one file in /dev/shm named `shmkv.<name>`; `python -m shmkv.layout` prints what lies in it.

States: an object is built nameless (O_TMPFILE), its magic word stored last, and then linked under its name in one
step; so whoever can open the name sees a complete segment, and a creator that dies before has left nothing.

Guarantees: creation is exclusive and mode 0600; storage is reserved (posix_fallocate) and touched before the name
exists; attaching checks kind, owner, mode, format and sizes before it maps, and changes neither size nor content; only
the owner of a segment (its creator, or who took it over after the creator's death) unlinks it, and only while the name
still leads to that very object.

Not guaranteed: a name says nothing about identity; `instance` in the header does.

If a party dies here: the kernel drops its descriptors; the named object stays, for others to use or `gc` to remove.

Sync points: segment-born.

Why not multiprocessing.shared_memory: an attaching process could unlink its host's segment (resource tracker), the
size is not reserved, and a guest's failed mmap removes the object.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import re
import secrets
import stat
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

from .errors import (
    ClosedError,
    InheritedHandle,
    InvalidName,
    NoSuchSegment,
    NotOurs,
    SegmentExists,
    ShmkvError,
    StorageFull,
)
from .layout import MAGIC, PAGE_BYTES, Header, Layout, header_words, read_header

log = logging.getLogger("shmkv")
DIRECTORY = "/dev/shm"
PREFIX = "shmkv."
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,179}", re.ASCII)

_ALLOCATE_STEP = 64 << 20
_POPULATE_STEP = 64 << 20
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23
_MAP_NORESERVE = 0x4000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_mmap, _munmap = _libc.mmap, _libc.munmap
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MAP_FAILED = ctypes.c_void_p(-1).value


class Segment:
    """One mapped segment. `words` and `memory` are the shared bytes as 64-bit words and as bytes."""

    def __init__(self, name: str, fd: int, layout: Layout, created: bool):
        self.name, self.layout, self.owned = name, layout, created
        self.inherited = False
        self.lock_fds: set[int] = set()
        self._pid = os.getpid()
        mapped = mmap.mmap(fd, layout.file_bytes)
        self.memory = memoryview(mapped)
        self.words = self.memory.cast("Q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        status = os.fstat(fd)
        self.identity = (status.st_dev, status.st_ino)
        self.instance = self.words[Header.instance]
        self._readonly: Whole | None = None
        self._readonly_once = threading.Lock()
        self.fd = fd  # ours to close from here on
        _live.add(self)

    @property
    def path(self) -> str:
        return path_of(self.name)

    def detach(self) -> None:
        """Let go of the object. A mapping that a view still needs goes with the last such view. Idempotent."""
        fd, self.fd = getattr(self, "fd", -1), -1
        self.words = self.memory = memoryview(b"")
        self._readonly = None
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.detach()

    def unlink(self) -> bool:
        """Remove the name if this process owns the segment and the name still leads to it. Idempotent."""
        if not self.owned or self._pid != os.getpid():
            return False
        if self.words:
            self.words[Header.unlinked] = 1
        try:
            if _identity(os.stat(self.path, follow_symlinks=False)) != self.identity:
                return False
            os.unlink(self.path)
        except FileNotFoundError:
            return False
        return True

    def reopen(self) -> int:
        """A new open file description of the same object, whatever became of its name; close it with `forget`."""
        with _forking, _shortage_explained():
            if self.fd < 0:
                raise ClosedError(f"the handle of segment {self.name!r} was closed meanwhile")
            fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
            self.lock_fds.add(fd)
        return fd

    def forget(self, fd: int) -> None:
        """Close a descriptor of `reopen`, which drops its locks; a forked child closed it at birth."""
        with _forking:
            if fd in self.lock_fds:
                self.lock_fds.discard(fd)
                os.close(fd)

    def private(self, at: int, nbytes: int, addresses: list[int]) -> Window:
        """Map `nbytes` at file offset `at` copy-on-write. The address goes into `addresses` at once, to be unmapped
        by `unmap` when the last view is gone.
        """
        flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
        _map(addresses, self.fd, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, at)
        return Window.at(addresses[-1], nbytes, None)

    def readonly(self, at: int, nbytes: int) -> Window:
        """The bytes at file offset `at` in a lasting read-only mapping of the whole object: a write there faults."""
        with self._readonly_once:
            if self._readonly is None:
                whole = Whole(self.layout.file_bytes)
                _map(whole.addresses, self.fd, whole.nbytes, mmap.PROT_READ, mmap.MAP_SHARED, 0)
                self._readonly = whole
        return Window.at(self._readonly.addresses[0] + at, nbytes, self._readonly)

    def shared(self, at: int, nbytes: int) -> Window:
        """The bytes at file offset `at` in the ordinary shared mapping."""
        return Window.at(self.address + at, nbytes, self.memory)


class Window(ctypes.c_ubyte * (1 << 46)):
    """Mapped bytes as an object with the buffer protocol that lives exactly as long as the last view of it.

    One array type serves all sizes (making a ctypes type costs 20 us): only the first `nbytes` may be looked at.
    """

    address: int
    nbytes: int

    @classmethod
    def at(cls, address: int, nbytes: int, keeps: object) -> Window:
        window = cls.from_address(address)
        window.address, window.nbytes, window._keeps = address, nbytes, keeps
        return window


class Whole:
    """A mapping of the whole object that goes with the last window into it."""

    def __init__(self, nbytes: int):
        self.nbytes = nbytes
        self.addresses: list[int] = []

    def __del__(self) -> None:
        unmap(self.addresses, self.nbytes)


def create(name: str, layout: Layout) -> Segment:
    """Make a new segment with all its storage reserved, and give it its name last.

    Raises InvalidName, SegmentExists, StorageFull; then nothing is left behind.
    """
    name = clean_name(name)
    if os.path.lexists(path_of(name)):
        raise SegmentExists(f"{name!r} exists in {DIRECTORY}")
    _refuse_if_short(layout.file_bytes)
    with _shortage_explained(layout.file_bytes):
        fd = os.open(DIRECTORY, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(fd, 0o600)
            _allocate(fd, layout.file_bytes)
            segment = Segment(name, fd, layout, created=True)
        except BaseException:
            os.close(fd)
            raise
    segment.words[Header.instance] = segment.instance = secrets.randbits(63) | 1
    populate(segment.address, layout.file_bytes)
    return segment


def publish(segment: Segment) -> None:
    """Store the magic word, last of all, and link the finished object under its name."""
    words = segment.words
    for field, value in header_words(segment.layout).items():
        words[getattr(Header, field)] = value
    words[Header.owner_pid] = os.getpid()
    words[Header.born_ns] = time.time_ns()
    words[Header.magic] = MAGIC  # SYNC POINT segment-born (store)
    source = f"/proc/self/fd/{segment.fd}"
    with _shortage_explained():
        directory = os.open(DIRECTORY, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:  # a directory descriptor makes os.link use linkat, which follows the magic link
        os.link(source, path_of(segment.name), src_dir_fd=directory, follow_symlinks=True)
    except FileExistsError:
        raise SegmentExists(f"{segment.name!r} exists in {DIRECTORY}") from None
    finally:
        os.close(directory)


def attach(name: str) -> Segment:
    """Open an existing segment after checking what it is and whose it is.

    Raises InvalidName, NoSuchSegment, NotOurs, SegmentBroken, FormatMismatch.
    """
    name = clean_name(name)
    with _shortage_explained():
        fd = open_checked(name, os.O_RDWR)
        try:
            layout = read_header(os.pread(fd, PAGE_BYTES, 0), os.fstat(fd).st_size)  # SYNC POINT segment-born (load)
            segment = Segment(name, fd, layout, created=False)
        except BaseException:
            os.close(fd)
            raise
    populate(segment.address, layout.file_bytes)
    return segment


def open_checked(name: str, flags: int) -> int:
    """A descriptor of the named object, if it is a plain file of this user that nobody else may open."""
    path = path_of(name)
    try:
        with _shortage_explained():
            fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise NoSuchSegment(f"no segment {name!r} in {DIRECTORY}") from None
    except ShmkvError:
        raise
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENXIO, errno.EISDIR):
            raise NotOurs(f"{path}: {os.strerror(error.errno)}") from None
        raise
    status = os.fstat(fd)
    mode = stat.S_IMODE(status.st_mode)
    wrong = ("not a regular file" if not stat.S_ISREG(status.st_mode) else
             f"owned by uid {status.st_uid}, we are {os.geteuid()}" if status.st_uid != os.geteuid() else
             f"mode {mode:04o}, not 0600" if mode & 0o177 else "")
    if wrong:
        os.close(fd)
        raise NotOurs(f"{path} is {wrong}")
    return fd


def clean_name(name: str) -> str:
    """The canonical name: `abc` and `/abc` are one."""
    bare = name[1:] if isinstance(name, str) and name.startswith("/") else name
    if not isinstance(bare, str) or not NAME.fullmatch(bare):
        raise InvalidName(f"{name!r} is not a segment name")
    return bare


def fresh_name() -> str:
    """A name that two instances on one host do not share: pid for humans, 64 random bits for certainty."""
    return f"kv-{os.getpid()}-{secrets.token_hex(8)}"


def path_of(name: str) -> str:
    return f"{DIRECTORY}/{PREFIX}{name}"


def unmap(addresses: list[int], nbytes: int) -> None:
    """Unmap and forget the mappings at these addresses, without holding the GIL: dropping a large one takes time.

    Taking an address off the list and unmapping it is one call, which no interrupt can part: nothing is unmapped twice.
    """
    with suppress(IndexError):  # another thread was quicker
        while addresses:
            list(map(_munmap, map(list.pop, [addresses]), [nbytes]))


def populate(address: int, nbytes: int) -> None:
    """Touch every page now, content unchanged, so that no first touch (1.3 GB/s on tmpfs) falls into a hand-off."""
    _libc.madvise(address, nbytes, _MADV_HUGEPAGE)  # granted only where the host's shmem_enabled allows
    starts = range(0, nbytes, _POPULATE_STEP)

    def touch(start: int) -> int:
        failed = _libc.madvise(address + start, min(_POPULATE_STEP, nbytes - start), _MADV_POPULATE_WRITE)
        return ctypes.get_errno() if failed else 0

    if len(starts) > 4:
        log.info("touching %d MiB of shared memory", nbytes >> 20)
        with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:
            failures = set(pool.map(touch, starts))
    else:
        failures = {touch(start) for start in starts}
    if failures & {errno.ENOMEM, errno.EFAULT}:
        raise StorageFull(f"could not touch {nbytes} B of shared memory: out of memory")


def _allocate(fd: int, nbytes: int) -> None:
    os.ftruncate(fd, nbytes)
    for start in range(0, nbytes, _ALLOCATE_STEP):
        try:
            os.posix_fallocate(fd, start, min(_ALLOCATE_STEP, nbytes - start))
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                free = start + _free_bytes()
                raise StorageFull(f"need {nbytes} B in {DIRECTORY}, {free} B are free") from None
            raise


@contextmanager
def _shortage_explained(nbytes: int = 0) -> Iterator[None]:
    """Turn the kernel's word for a limit of this process into an error that names the knob."""
    try:
        yield
    except ShmkvError:
        raise
    except OSError as error:
        knob = _KNOBS.get(error.errno or 0)
        if knob is None:
            raise
        raise StorageFull(f"{os.strerror(error.errno or 0)}{f' ({nbytes} B)' if nbytes else ''}", hint=knob) from None


_KNOBS = {
    errno.ENOMEM: "free memory, or raise RLIMIT_AS (ulimit -v) or vm.max_map_count",
    errno.EMFILE: "close files, or raise RLIMIT_NOFILE (ulimit -n)",
    errno.ENFILE: "raise fs.file-max",
    errno.EFBIG: "raise RLIMIT_FSIZE (ulimit -f)",
    errno.ENOSPC: StorageFull.hint,
}


def _refuse_if_short(nbytes: int) -> None:
    free = _free_bytes()
    if nbytes > free:
        raise StorageFull(f"need {nbytes} B in {DIRECTORY}, {free} B are free")
    limit = cgroup_room()
    if limit is not None and nbytes > limit:
        raise StorageFull(f"need {nbytes} B, the cgroup's memory limit leaves {limit} B")


def _free_bytes() -> int:
    status = os.statvfs(DIRECTORY)
    return status.f_bavail * status.f_frsize


def cgroup_room() -> int | None:
    """Bytes that the memory limit of this process's cgroup leaves; None without a limit."""
    try:
        with open("/sys/fs/cgroup/memory.max") as most, open("/sys/fs/cgroup/memory.current") as now:
            text = most.read().strip()
            return None if text == "max" else int(text) - int(now.read())
    except (OSError, ValueError):
        return None


def _map(addresses: list[int], fd: int, nbytes: int, protection: int, flags: int, at: int) -> None:
    """Map and append the address in one call, which no interrupt can part."""
    addresses.extend(map(_mmap, [None], [nbytes], [protection], [flags], [fd], [at]))
    if addresses[-1] in (None, _MAP_FAILED):
        addresses.pop()
        code = ctypes.get_errno()
        raise StorageFull(f"cannot map {nbytes} B: {os.strerror(code)}",
                          hint="release hits sooner, or raise vm.max_map_count / RLIMIT_AS")


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def check_ours(segment: Segment) -> None:
    """Raise InheritedHandle in a forked child."""
    if segment.inherited:
        raise InheritedHandle(f"segment {segment.name!r} belongs to the parent process {segment._pid}")


_live: weakref.WeakSet[Segment] = weakref.WeakSet()
_forking = threading.RLock()
"""held during a fork, and while a description is made or closed: a child must know all that it inherits"""


def _disown_in_child() -> None:
    """A forked child holds no claim: it closes every description that carries a lock and never unlocks one."""
    global _forking
    _forking = threading.RLock()
    for segment in list(_live):
        segment.inherited = True
        for fd in list(segment.lock_fds):
            os.close(fd)
        segment.lock_fds.clear()


os.register_at_fork(before=lambda: _forking.acquire(), after_in_parent=lambda: _forking.release(),
                    after_in_child=_disown_in_child)
