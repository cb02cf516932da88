"""What: finding and removing what dead owners left in /dev/shm.

Map: the segment `shmkv.<name>`, and the bells `sem.shmkv.<name>.<instance>.*` of its peers.

States: a segment is abandoned when no attached peer's liveness byte is held. It is removed under its own lock, its
`unlinked` word stored first.

Guarantees: a segment with a living peer (also a stopped one) is never removed; neither is a foreign file, nor one whose
bytes are no sound segment of this user. Whoever opens an abandoned segment just before it is removed finds the
`unlinked` word after claiming its record and reports that there is no such segment.

Not guaranteed: that unread entries in an abandoned segment are wanted by nobody.

If a party dies here: the segment is still there, or gone with some bells left, which are removed with the next one of
that name.

Sync points: none (the lock orders all).

Why not by pid: reuse and namespaces; the kernel's locks cannot be mistaken.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from . import sync
from .layout import PAGE_BYTES, WORD_BYTES, Header, Layout, Peer, read_header
from .peers import ATTACHED, liveness_held
from .segment import DIRECTORY, PREFIX, open_checked, path_of


def remove_abandoned(name: str) -> bool:
    """Remove the segment of this (canonical) name if all its peers are dead; whether it was removed.

    Raises NoSuchSegment, NotOurs, SegmentBroken, FormatMismatch: then it was not touched.
    """
    with _opened(name) as (fd, layout):
        if not _all_dead(fd, layout):
            return False
        os.pwrite(fd, (1).to_bytes(WORD_BYTES, sys.byteorder), Header.unlinked * WORD_BYTES)
        if not _same(fd, path_of(name)):
            return False
        os.unlink(path_of(name))
    for bell in bells_of(name):
        sync.silence(bell)
    return True


def is_abandoned(name: str) -> bool:
    """Whether `remove_abandoned` would remove it; raises as that does."""
    with _opened(name) as (fd, layout):
        return _all_dead(fd, layout)


@contextmanager
def _opened(name: str) -> Iterator[tuple[int, Layout]]:
    fd = open_checked(name, os.O_RDWR)
    try:
        yield fd, read_header(os.pread(fd, PAGE_BYTES, 0), os.fstat(fd).st_size)
    finally:
        os.close(fd)


def _all_dead(fd: int, layout: Layout) -> bool:
    """Whether nobody is inside the lock, which is ours until `fd` is closed then, and no peer lives."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    records = range(layout.peers.at, layout.peers.at + layout.peers.nbytes, layout.peers.stride * WORD_BYTES)
    return not any(_is_alive(fd, at) for at in records[:layout.peers.count])


def bells_of(name: str) -> list[str]:
    """The names of the bells of a segment, as semaphores are named."""
    prefix = f"sem.{PREFIX}{name}."
    rest = ((file, file.removeprefix(prefix).split(".")) for file in os.listdir(DIRECTORY) if file.startswith(prefix))
    return [f"/{file.removeprefix('sem.')}" for file, parts in rest if len(parts) == 3]


def _is_alive(fd: int, at: int) -> bool:
    attached = int.from_bytes(os.pread(fd, WORD_BYTES, at + Peer.state * WORD_BYTES), sys.byteorder) == ATTACHED
    return attached and liveness_held(fd, at)


def _same(fd: int, path: str) -> bool:
    try:
        found, ours = os.stat(path, follow_symlinks=False), os.fstat(fd)
    except FileNotFoundError:
        return False
    return (found.st_dev, found.st_ino) == (ours.st_dev, ours.st_ino)
