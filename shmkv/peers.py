"""What: who is attached, who is dead, who waits for what, and who may clean up.

Map: a table of peer records (one for each attached handle) and a table of wait records (one for each thread that
ever waited); see `layout`. A peer's liveness is not in these bytes: it is an open-file-description lock on the first
byte of its record in the segment's file, held through a description of its own that is never mapped.

States: peer FREE -> ATTACHED (claim) -> FREE (clear, by itself or by the cleaner of its remains); `closed` = 1 when
the handle is closed but views still hold leases. Wait FREE -> IDLE (claim) -> WAITING (announce) -> IDLE (withdraw)
-> RETIRED (its thread ended) -> FREE. Claims and clears are made under the lock; announce, withdraw and retire are
stores of the owning thread.

Guarantees: the kernel drops the byte on any death, in any PID namespace, for any reuse of the pid; a stopped process
stays alive. A record is claimed byte first, then words; FREE is stored last; leases and bells carry the generation,
so nobody takes a newcomer for the dead. What a thread waits for stands in its record before it looks for the last time.

Not guaranteed: pid and start time are for humans and never decide.

If a party dies here: before ATTACHED, the byte is free and the record is FREE; after, `dead` names it and the upper
floors settle its remains, then `clear` frees the record; killed half-way, the next cleaner does it again.

Sync points: peer-attached, wait-announced, wait-posted.

Why not classic POSIX locks: closing any descriptor of the file drops them. Why not pids: reuse and namespaces.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import threading
import time
from array import array
from collections.abc import Iterator
from enum import IntEnum

from . import sync
from .errors import TableFull
from .layout import WORD_BYTES, Header, Peer, Wait
from .segment import Segment

FREE, ATTACHED = 0, 1
PRODUCER, CONSUMER = 1, 2
"""role bits: has inserted, has looked up"""


class WaitState(IntEnum):
    FREE = 0
    IDLE = 1
    WAITING = 2
    RETIRED = 3


class WaitKind(IntEnum):
    ENTRY = 1
    ROOM = 2
    SIGNAL = 3
    REQUEST = 4
    """the owner of device memory, for peers that cannot reach it"""
    ANSWER = 5
    """such a peer, for the owner's answer"""


_IDLE, _WAITING = int(WaitState.IDLE), int(WaitState.WAITING)
_fcntl = ctypes.PyDLL(None).fcntl
_FLOCK = struct.Struct("hh4xqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid


class Peers:
    """The table of peer records."""

    def __init__(self, segment: Segment):
        area = segment.layout.peers
        self._segment, self._words, self.count = segment, segment.words, area.count
        self._records = range(area.word, area.word + area.count * area.stride, area.stride)

    def claim(self, role: str) -> Attachment:
        """Take a free record for a new handle; under the lock."""
        claim = Attachment(self._segment, 0, 0, self._segment.reopen())  # ends itself if nothing comes of it
        for index, at in enumerate(self._records):
            if self._words[at + Peer.state] == FREE and _ofd_lock(claim.fd, self._byte(index), fcntl.F_OFD_SETLK):
                self._fill(at, role)
                claim.index, claim.generation = index, self._words[at + Peer.generation]
                return claim
        raise TableFull(f"all {self.count} peer records are taken", hint="raise peers= in shmkv.create()")

    def at(self, index: int) -> int:
        """The word index of a peer's record."""
        return self._records[index]

    def attached(self) -> Iterator[int]:
        states = self._words[self._records.start:self._records.stop:self._records.step]
        for index, state in enumerate(states):
            if state == ATTACHED:  # SYNC POINT peer-attached (load)
                yield index

    def alive(self, index: int) -> bool:
        """What the kernel says of the holder of this record. (Asked through a description that holds nothing.)"""
        return liveness_held(self._segment.fd, self._byte(index))

    def dead(self) -> list[int]:
        """Records whose holder is gone."""
        return [index for index in self.attached() if not self.alive(index)]

    def clear(self, index: int) -> None:
        """Free a record; under the lock, when nothing is left of the peer. Idempotent."""
        at = self._records[index]
        self._words[at + Peer.closed] = 0
        self._words[at + Peer.state] = FREE

    def role(self, index: int) -> str:
        at = self._records[index] + Peer.role_0
        return self._words[at:at + 4].tobytes().rstrip(b"\0").decode(errors="replace")

    def _byte(self, index: int) -> int:
        return self._records[index] * WORD_BYTES

    def _fill(self, at: int, role: str) -> None:
        words = self._words
        words[at + Peer.generation] += 1
        words[at + Peer.closed] = words[at + Peer.roles] = 0
        words[at + Peer.pid], words[at + Peer.start_ticks] = os.getpid(), _start_ticks()
        words[at + Peer.pid_namespace] = os.stat("/proc/self/ns/pid").st_ino
        words[at + Peer.attached_ns] = time.monotonic_ns()
        text = memoryview(role.encode()[:32].ljust(32, b"\0")).cast("Q")
        words[at + Peer.role_0:at + Peer.role_0 + 4] = text
        words[at + Peer.ring_head] = words[at + Peer.ring_tail] = words[at + Peer.ring_dropped] = 0
        words[at + Peer.state] = ATTACHED  # SYNC POINT peer-attached (store)


class Attachment:
    """One handle's claim to its peer record; the claim lasts until `end` or the last lease that needs it."""

    def __init__(self, segment: Segment, index: int, generation: int, fd: int):
        self.segment, self.index, self.generation, self.fd = segment, index, generation, fd

    @classmethod
    def none(cls, segment: Segment) -> Attachment:
        """Of a handle that is about to claim its record."""
        return cls(segment, 0, 0, -1)

    def end(self) -> None:
        """Drop the liveness byte: from now on the record counts as a dead peer's."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            self.segment.forget(fd)

    def __del__(self) -> None:
        self.end()


class Waits:
    """The table of wait records, and the bells that belong to them."""

    def __init__(self, segment: Segment):
        area = segment.layout.waits
        self._segment, self._words, self._area = segment, segment.words, area
        self._records = range(area.word, area.word + area.count * area.stride, area.stride)
        self.bells = sync.Bells()

    def claim(self, me: Attachment) -> Place:
        """Take a record for the calling thread; under the lock."""
        words = self._words
        for index, at in enumerate(self._records):
            if words[at + Wait.state] in (WaitState.FREE, WaitState.RETIRED):
                words[at + Wait.generation] += 1
                words[at + Wait.peer], words[at + Wait.peer_generation] = me.index, me.generation
                words[at + Wait.thread] = threading.get_native_id()
                words[Header.waits_high] = max(words[Header.waits_high], index + 1)  # the cleaner looks no higher
                words[at + Wait.state] = _IDLE
                return Place(self._segment, self, index)
        raise TableFull(f"all {self._area.count} wait records are taken", hint="raise waits= in shmkv.create()")

    def waiting(self, kind: int = 0) -> list[int]:
        """Word indices of the records of waiting threads, oldest first."""
        words = self._words
        found = [at for at in self._used()  # SYNC POINT wait-announced (load)
                 if words[at + Wait.state] == _WAITING and kind in (0, words[at + Wait.kind])]
        return sorted(found, key=lambda at: words[at + Wait.since_ns])

    def ring_peer(self, peer: int) -> None:
        """Wake all waiting threads of a peer; outside the lock."""
        for kind in WaitKind:
            self.ring(kind, peer=peer)

    def ring(self, kind: int, *, family: int = 0, peer: int = -1) -> None:
        """Tell the waiting threads of a kind (of a key family, of a peer) to look again; outside the lock."""
        words = self._words
        for at in self._used():
            if words[at + Wait.state] != _WAITING or words[at + Wait.kind] != kind:
                continue
            if family and words[at + Wait.family] not in (0, family):
                continue
            if peer in (-1, words[at + Wait.peer]):
                words[at + Wait.posted] = 1  # SYNC POINT wait-posted (store)
                self.bells.ring(at, self.bell_name(at))

    def clear_peer(self, peer: int) -> None:
        """Free the records of a peer that is gone; under the lock. Idempotent."""
        words = self._words
        for at in self._used():
            if words[at + Wait.state] != WaitState.FREE and words[at + Wait.peer] == peer:
                sync.silence(self.bell_name(at))
                words[at + Wait.state] = WaitState.FREE

    def bell_name(self, at: int) -> str:
        index = (at - self._area.word) // self._area.stride
        generation = self._words[at + Wait.generation]
        return f"/shmkv.{self._segment.name}.{self._segment.instance:016x}.{index}.{generation}"

    def _used(self) -> range:
        return self._records[:self._words[Header.waits_high]]


class Place:
    """One thread's wait record and bell."""

    def __init__(self, segment: Segment, waits: Waits, index: int):
        self._segment, self._words = segment, segment.words
        self.at = waits._records[index]
        self._posted = self.at + Wait.posted
        self._generation = self._words[self.at + Wait.generation]
        self.spin = sync.Spin()
        self._bell_name = waits.bell_name(self.at)

    def open(self) -> None:
        """Make the bell; outside the lock."""
        self.bell = sync.Bell(self._bell_name)

    def announce(self, kind: WaitKind, deadline_ns: int, *, tokens: bytes = b"", family: int = 0,
                 wanted: tuple[int, int, int] = (0, 0, 0)) -> None:
        """Put on record what this thread waits for, before it looks for the last time."""
        words, at = self._words, self.at
        if not self._is_mine() or words[at + Wait.state] != _IDLE:
            return  # closed by another thread meanwhile: the caller finds out when it looks
        words[at + Wait.kind], words[at + Wait.deadline_ns] = kind, deadline_ns
        words[at + Wait.since_ns], words[at + Wait.evaluated] = time.monotonic_ns(), 0
        words[at + Wait.family], words[at + Wait.n_tokens] = family, len(tokens) // 4
        words[at + Wait.tokens_0:at + Wait.tokens_0 + 4] = memoryview(tokens[:32].ljust(32, b"\0")).cast("Q")
        words[at + Wait.wanted_bytes:at + Wait.wanted_region + 1] = array("Q", wanted)
        words[at + Wait.state] = _WAITING  # SYNC POINT wait-announced (store)

    def withdraw(self) -> None:
        if self.is_waiting():
            self._words[self.at + Wait.state] = _IDLE

    def is_waiting(self) -> bool:
        return self._is_mine() and self._words[self.at + Wait.state] == _WAITING

    def clear(self) -> None:
        self._words[self._posted] = 0

    def posted(self) -> int:
        return self._words[self._posted]  # SYNC POINT wait-posted (load)

    def retire(self) -> None:
        """Give the record back (one store, no lock needed) and remove the bell."""
        if self._segment.inherited:
            return
        if hasattr(self, "bell"):
            self.bell.close()
        if self._is_mine() and self._words[self.at + Wait.state] in (WaitState.IDLE, WaitState.WAITING):
            self._words[self.at + Wait.state] = WaitState.RETIRED

    def _is_mine(self) -> bool:
        return self._words[self.at + Wait.generation] == self._generation

    def __del__(self) -> None:
        if hasattr(self, "_bell_name"):
            self.retire()


def liveness_held(fd: int, byte: int) -> bool:
    """Whether anybody holds this byte of the file, asked through a description that holds nothing."""
    return not _ofd_lock(fd, byte, fcntl.F_OFD_GETLK)


def _ofd_lock(fd: int, byte: int, command: int) -> bool:
    """F_OFD_SETLK: take the byte, True if taken. F_OFD_GETLK: True if nobody holds it. Keeps the GIL."""
    request = ctypes.create_string_buffer(_FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    failed = _fcntl(fd, command, request)
    if command == fcntl.F_OFD_GETLK:
        return not failed and _FLOCK.unpack_from(request)[0] == fcntl.F_UNLCK
    return not failed


def _start_ticks() -> int:
    """For humans; 0 where it cannot be read."""
    try:
        with open("/proc/self/stat") as file:
            return int(file.read().rpartition(")")[2].split()[19])
    except OSError:
        return 0
