"""What: a picture of a segment, taken from outside: without the lock, without being a peer, of the living, the stopped
and the dead, or of a file that was kept of one.

Map: everything but the payload arena is read into private memory, by plain reads of a descriptor that was opened
read-only; a picture is that copy. Kept in a file it is: one line of JSON (`CORE` and what the kernel said of the
peers), then the copy.

States: AT_REST (the mutation word was even and the same before and after the copy), MOVING (it changed each time:
entries are compared between two copies, and those that differ marked), TORN (odd, and nobody moved it for a while: its
holder is dead or stopped). What is shown are the bytes as they are; look-ups in a picture that is not at rest go by an
order that is rebuilt, in a copy of its own.

Guarantees: nothing is written, no lock taken, no semaphore posted; a picture's bytes are not followed out of bounds,
whatever they are: what makes no sense raises SegmentBroken or is named in `problems`. No torch is imported, and NumPy
only for `problems` and `explain`: a listing has to start at once.

Not guaranteed: that a MOVING picture was ever true as a whole; each entry that is not marked was.

If a party dies here: nothing is held.

Sync points: none; the mutation word is read as a sequence word.

Why not attach: a peer takes a record, a place in the lock's queue, and counts; a stopped holder would stop us too.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import tempfile
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import Enum, IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from . import descriptors, namespace
from .entries import READY, EntryState
from .errors import InvalidArgument, NoSuchSegment, SegmentBroken, ShmkvError
from .journal import Event as JournalEvent
from .journal import Journal
from .layout import (
    PAGE_BYTES,
    WORD_BYTES,
    Counter,
    Entry,
    Header,
    Ladder,
    Layout,
    Lease,
    Peer,
    Signal,
    Wait,
    read_header,
)
from .leases import LeaseKind
from .peers import ATTACHED, CONSUMER, PRODUCER, WaitKind, WaitState, liveness_held
from .regions import IN_PLACE, RegionKind, Regions, RegionState
from .segment import DIRECTORY, NAME, PREFIX, clean_name, open_checked
from .signals import SignalKind
from .transport import decode_decision

if TYPE_CHECKING:
    from .tables import Tables
    from .why import Why

T = TypeVar("T")
CORE = "shmkv core 1"
MOST_HEAD_BYTES = 1 << 20
LOOKS = 4
TORN_AFTER_S = 0.05
_NONSENSE = (IndexError, ValueError, OverflowError, KeyError, TypeError, MemoryError, RecursionError)
FOREVER = 1 << 63


class State(Enum):
    AT_REST = "at rest"
    MOVING = "moving"
    TORN = "torn"


class PeerRow(NamedTuple):
    """One attached handle. `life`: alive, stopped or dead, as the kernel says; `roles`: producer, consumer."""

    index: int
    generation: int
    role: str
    pid: int
    life: str
    roles: list[str]
    closed: bool
    pid_namespace: int
    attached_ns: int
    leases: int
    signals: int
    signals_lost: int


class EntryRow(NamedTuple):
    """One entry. Times are monotonic nanoseconds; `tokens` are the first few; `ttl_left_ns` None: it never expires;
    `producer` None: gone, its record is free or another's; `broken`: why key or tensors cannot be read.
    """

    slot: int
    generation: int
    sequence: int
    state: str
    moving: bool
    n_tokens: int
    tokens: list[int]
    namespace: dict
    tensors: list[dict]
    nbytes: int
    run_at: int
    run_bytes: int
    where: str
    producer: int | None
    created_ns: int
    used_ns: int
    ttl_left_ns: int | None
    holders: list[int]
    broken: str


class WaitRow(NamedTuple):
    """One waiting thread: what for, since when, until when (None: for ever), and on which peers that depends.
    `tokens`: the first few it waits for; `nbytes`: of payload it wants room for.
    """

    peer: int
    pid: int
    thread: int
    kind: str
    since_ns: int
    deadline_ns: int | None
    text: str
    n_tokens: int
    tokens: list[int]
    nbytes: int
    on: list[int]


class Copy:
    """The bytes of a segment up to its payload arena, where tables find them."""

    def __init__(self, name: str, layout: Layout, data: bytes | bytearray):
        self.name, self.layout = name, layout
        self.memory = memoryview(data)
        self.words = self.memory.cast("Q")
        self.instance = self.words[Header.instance]
        self.fd = -1


class Picture:
    """What a segment looked like. Every method raises SegmentBroken, never anything else, for bytes of no sense.

    `lives`: of each attached peer, alive, stopped or dead; `lock_pid`: who held the lock (None: nobody); `now_ns`,
    `taken_ns`: when it was taken, monotonic and by the wall clock.
    """

    def __init__(self, name: str, layout: Layout, data: bytes, other: bytes | None, state: State, lives: dict[int, str],
                 lock: int | None, now_ns: int, taken_ns: int):
        self.name, self.layout, self.state, self.now_ns, self.taken_ns = name, layout, state, now_ns, taken_ns
        self.raw, self._other, self.lives, self.lock_pid = data, other, lives, lock
        self._copy = Copy(name, layout, data)
        self.words = self._copy.words
        self._parsed: dict[tuple[bytes, int], list[dict]] = {}
        self._names: dict[bytes, dict] = {}

    def header(self) -> dict[str, int]:
        return {name: self.words[index] for index, name in enumerate(Header.names)}

    def counters(self) -> dict[str, int]:
        at = self.layout.counters.word
        return {name: self.words[at + index] for index, name in enumerate(Counter.names)}

    def paths(self) -> dict[str, int]:
        """How many look-ups each path served."""
        at = self.layout.ladder.word
        return {name: self.words[at + index] for index, name in enumerate(Ladder.names) if not name.endswith("_last")}

    def mutator(self) -> int | None:
        """The peer that changed the segment last, or is changing it."""
        index = self.words[Header.mutator] - 1
        return index if 0 <= index < self.layout.peers.count else None

    def pid(self, peer: int | None) -> int:
        """0 if there is no such peer record."""
        return self.words[self._peer(peer) + Peer.pid] if peer is not None and peer < self.layout.peers.count else 0

    def life(self, peer: int | None) -> str:
        """alive, stopped or dead; gone: not attached (any more)."""
        if peer is None or peer >= self.layout.peers.count or self.words[self._peer(peer)] != ATTACHED:
            return "gone"
        return self.lives.get(peer, "unknown")

    def owner(self) -> int | None:
        """The index of the owner's peer record; None if it has left."""
        index = self.words[Header.owner] - 1
        if not 0 <= index < self.layout.peers.count:
            return None
        at = self._peer(index)
        mine = self.words[at + Peer.generation] == self.words[Header.owner_generation]
        return index if self.words[at] == ATTACHED and mine else None

    def used_bytes(self) -> int:
        """Bytes of the payload arena that entries have."""
        return sum(nbytes for _, nbytes in self.runs())

    def meta_used_bytes(self) -> int:
        return sum(self.column(Entry.meta_bytes, in_use=True))

    def states(self) -> dict[str, int]:
        """How many entries are in each state."""
        column = self.column(Entry.state)
        return {state.name.lower(): column.count(state) for state in EntryState}

    def runs(self, region: int = 0) -> list[tuple[int, int]]:
        """(offset, bytes) of the runs in the payload arena (or of an `Entry.region`), in order."""
        columns = zip(self.column(Entry.state), self.column(Entry.region), self.column(Entry.run_at),
                      self.column(Entry.run_bytes), strict=True)
        return sorted((at, nbytes) for state, where, at, nbytes in columns if state and nbytes and where == region)

    def holes(self) -> list[tuple[int, int]]:
        """(offset, bytes) of what the runs leave of the payload arena; overlapping runs count once."""
        found, at, end = [], 0, self.layout.arena.nbytes
        for start, nbytes in self.runs():
            if min(start, end) > at:
                found.append((at, min(start, end) - at))
            at = max(at, min(start + nbytes, end))
        return [*found, (at, end - at)] if at < end else found

    def peers(self) -> list[PeerRow]:
        leases = Tally(self.words[at + Lease.peer] for at in self.held())
        rows = []
        for index in range(self.layout.peers.count):
            at, words = self._peer(index), self.words
            if words[at] != ATTACHED:
                continue
            role = words[at + Peer.role_0:at + Peer.role_3 + 1].tobytes().rstrip(b"\0").decode(errors="replace")
            roles = [name for bit, name in ((PRODUCER, "producer"), (CONSUMER, "consumer"))
                     if words[at + Peer.roles] & bit]
            unread = (words[at + Peer.ring_head] - words[at + Peer.ring_tail]) % (1 << 64)
            rows.append(PeerRow(index, words[at + Peer.generation], printable(role), words[at + Peer.pid],
                                self.lives.get(index, "unknown"), roles, bool(words[at + Peer.closed]),
                                words[at + Peer.pid_namespace], words[at + Peer.attached_ns], leases[index],
                                min(unread, self.layout.geometry.ring), words[at + Peer.ring_dropped]))
        return rows

    def entries(self, n_tokens: int = 8) -> Iterator[EntryRow]:
        """The entries in use, by slot, with the first `n_tokens` of their tokens."""
        holders: dict[int, list[int]] = {}
        for at in self.held():
            slot = self.words[at + Lease.slot]
            if slot < self.layout.entries.count and \
                    self.words[at + Lease.entry_generation] == self.words[self.record(slot) + Entry.generation]:
                holders.setdefault(slot, []).append(self.words[at + Lease.peer])
        for slot in range(self.layout.entries.count):
            if self.words[self.record(slot)]:
                yield self._row(slot, n_tokens, holders.get(slot, []))

    def entry(self, slot: int) -> EntryRow:
        return next(row for row in self.entries() if row.slot == slot)

    def waiters(self) -> list[WaitRow]:
        """Who waits, oldest first."""
        area, rows = self.layout.waits, []
        for at in range(area.word, area.word + area.count * area.stride, area.stride):
            if self.words[at] == WaitState.WAITING:
                rows.append(self._waiter(at))
        return sorted(rows, key=lambda row: row.since_ns)

    def cycle(self) -> list[int]:
        """Peers that wait for each other in a ring, in order; [] if none do. A peer is in one only if all whom it waits
        for wait too: who waits for any of several goes on with the first. Threads that do not wait are not seen.
        """
        edges: dict[int, set[int]] = {}
        for row in self.waiters():
            edges.setdefault(row.peer, set()).update(row.on)
        while free := [peer for peer, on in edges.items() if not on or on - edges.keys()]:
            for peer in free:
                del edges[peer]
        path = [min(edges)] if edges else []
        while path and (follows := min(edges[path[-1]])) not in path:
            path.append(follows)
        return path[path.index(follows):] if path else []

    def events(self) -> list[JournalEvent]:
        """The last events, oldest first."""
        return self._guarded(lambda: list(Journal(self._copy).events()))  # type: ignore[arg-type]  # it only looks

    def signals(self) -> list[dict[str, Any]]:
        """The unread signals of the attached peers, oldest first."""
        ring, rows = self.layout.geometry.ring, []
        for peer in self._attached():
            head = self.words[self._peer(peer) + Peer.ring_head]
            unread = min(ring, (head - self.words[self._peer(peer) + Peer.ring_tail]) % (1 << 64))
            for count in range(head - unread, head):
                at = self.layout.signals.word + (peer * ring + count % ring) * Signal.words
                rows.append({"to": peer, "kind": _named(SignalKind, self.words[at + Signal.kind]),
                             "sequence": self.words[at + Signal.sequence], "sender": self.words[at + Signal.sender],
                             "value": self.words[at + Signal.value], "time_ns": self.words[at + Signal.time_ns]})
        return sorted(rows, key=lambda row: row["time_ns"])

    def regions(self) -> list[dict[str, Any]]:
        """Device memory in use."""
        regions = Regions(self._copy)  # type: ignore[arg-type]
        return self._guarded(lambda: [self._region(regions, index) for index in regions.used()])

    def problems(self) -> list[str]:
        """Each way in which the picture contradicts itself. A MOVING one may, without anything being wrong."""
        from . import recovery
        tables = self.tables()
        try:
            return self._guarded(lambda: list(recovery.problems(tables)))
        except SegmentBroken as broken:
            return [broken.args[0]]

    def explain(self, tokens: Any, names: dict[str, Any] | None = None, match: str = "prefix",
                min_tokens: int = 1) -> Why:
        """Would `select(tokens, namespace=names, ...)` hit? If not, why?"""
        from . import keys, why
        if match not in ("prefix", "exact", "overlap") or min_tokens < 1:
            raise InvalidArgument(f"match={match!r}, min_tokens={min_tokens!r}")
        wanted = keys.key(tokens, namespace=names)
        return self._guarded(lambda: why.Search(self, wanted, match, self.state == State.AT_REST).explain(min_tokens))

    def save(self, path: str) -> None:
        """Keep the picture in a new file of mode 0600."""
        head = {"core": CORE, "name": self.name, "state": self.state.value, "lives": self.lives, "lock": self.lock_pid,
                "now_ns": self.now_ns, "taken_ns": self.taken_ns, "file_bytes": self.layout.file_bytes}
        write_new(path, json.dumps(head).encode() + b"\n" + self.raw)

    # ------------------------------------------------------------ how

    def _guarded(self, body: Callable[[], T]) -> T:
        try:
            return body()
        except _NONSENSE as error:
            raise SegmentBroken(f"the segment's bytes make no sense: {type(error).__name__}: {error}") from None

    def _peer(self, index: int) -> int:
        return self.layout.peers.word + index * self.layout.peers.stride

    def record(self, slot: int) -> int:
        return self.layout.entries.word + slot * self.layout.entries.stride

    def column(self, field: int, in_use: bool = False) -> list[int]:
        """One word of every entry's record, by slot (or of those in use only)."""
        area = self.layout.entries
        stop = area.word + area.count * area.stride
        column = self.words[area.word + field:stop:area.stride].tolist()
        return [word for word, state in zip(column, self.column(0), strict=True) if state] if in_use else column

    def held(self) -> list[int]:
        area = self.layout.leases
        stop = area.word + area.count * area.stride
        column = self.words[area.word:stop:area.stride].tolist()
        return [area.word + index * area.stride for index, held in enumerate(column) if held]

    def _attached(self) -> list[int]:
        area = self.layout.peers
        column = self.words[area.word:area.word + area.count * area.stride:area.stride].tolist()
        return [index for index, state in enumerate(column) if state == ATTACHED]

    def _row(self, slot: int, n_tokens: int, holders: list[int]) -> EntryRow:
        at = self.record(slot)
        record = self.words[at:at + Entry.words].tolist()
        tokens, names, tensors, broken, count = [], {}, [], "", 0
        try:
            tokens, names, tensors, count = self._guarded(lambda: self._contents(record, n_tokens))
        except ShmkvError as error:
            broken = error.args[0]
        expires, region = record[Entry.expires_ns], record[Entry.region]
        left = max(0, expires - self.now_ns) if expires else record[Entry.ttl_left_ns]
        where = "host" if not region else "in place" if region == IN_PLACE else f"region {region - 1}"
        return EntryRow(slot, record[Entry.generation], record[Entry.sequence], _named(EntryState, record[Entry.state]),
                        self._moved(slot), count, tokens, names, tensors, record[Entry.payload_bytes],
                        record[Entry.run_at], record[Entry.run_bytes], where, self._producer(record),
                        record[Entry.created_ns], record[Entry.used_ns], left if record[Entry.ttl_ns] else None,
                        holders, broken)

    def _producer(self, record: list[int]) -> int | None:
        peer = record[Entry.peer]
        if peer >= self.layout.peers.count or self.words[self._peer(peer)] != ATTACHED:
            return None
        return peer if self.words[self._peer(peer) + Peer.generation] == record[Entry.peer_generation] else None

    def _contents(self, record: list[int], n_tokens: int) -> tuple[list[int], dict, list[dict], int]:
        start, nbytes = record[Entry.meta_at], record[Entry.meta_bytes]
        key_bytes, blob_bytes = record[Entry.key_bytes], record[Entry.descriptor_bytes]
        blob_at = -(-(key_bytes + 5 * record[Entry.roi_tokens]) // WORD_BYTES) * WORD_BYTES
        if start + nbytes > self.layout.meta.nbytes or blob_at + blob_bytes > nbytes:
            raise SegmentBroken("its key and descriptors lie outside the meta arena")
        at = self.layout.meta.at + start
        head, ids = _split(self._copy.memory[at:at + key_bytes])
        blob = self.raw[at + blob_at:at + blob_at + blob_bytes]
        first = ids[:4 * n_tokens].cast("I").tolist()
        return first, self.names_of(bytes(head)), self._tensors(blob, record[Entry.run_bytes]), len(ids) // 4

    def names_of(self, head: bytes) -> dict:
        if head not in self._names:
            self._names[head] = namespace.decode_namespace(head)
        return self._names[head]

    def _tensors(self, blob: bytes, run_bytes: int) -> list[dict]:
        """Most entries have the same few blobs, and parsing takes longer than all else."""
        if not blob:
            return []
        if (blob, run_bytes) not in self._parsed:
            self._parsed[blob, run_bytes] = [
                {"name": printable(tensor.name), "dtype": tensor.dtype, "shape": list(tensor.shape),
                 "nbytes": tensor.nbytes, "region": tensor.region - 1 if tensor.region else None}
                for tensor in descriptors.parse(blob, run_bytes)]
        return self._parsed[blob, run_bytes]

    def _moved(self, slot: int) -> bool:
        if self._other is None:
            return False
        at, nbytes = self.record(slot) * WORD_BYTES, Entry.words * WORD_BYTES
        return self.raw[at:at + nbytes] != self._other[at:at + nbytes]

    def _waiter(self, at: int) -> WaitRow:
        record = self.words[at:at + Wait.words].tolist()
        peer, kind, n_tokens, tokens, nbytes, on = record[Wait.peer], record[Wait.kind], 0, [], 0, []
        text = _WAITS_FOR.get(kind, f"kind {kind}")
        if kind == WaitKind.ENTRY:
            n_tokens = record[Wait.n_tokens]
            first = self.words[at + Wait.tokens_0:at + Wait.tokens_3 + 1].cast("B").cast("I").tolist()
            text, tokens, on = f"an entry for {n_tokens} tokens", first[:n_tokens], self._producers
        elif kind == WaitKind.ROOM:
            nbytes, on = record[Wait.wanted_bytes], self._room_holders(record[Wait.wanted_region])
            text = f"room for {nbytes} B"
        elif kind == WaitKind.ANSWER:
            on = self._owners_asked(peer)
        deadline = record[Wait.deadline_ns]
        return WaitRow(peer, self.pid(peer), record[Wait.thread], _named(WaitKind, kind), record[Wait.since_ns],
                       None if deadline >= FOREVER else deadline, text, n_tokens, tokens, nbytes,
                       sorted(set(on) - {peer}))

    @cached_property
    def _producers(self) -> list[int]:
        return self._open_peers(PRODUCER)

    @cached_property
    def _consumers(self) -> list[int]:
        return self._open_peers(CONSUMER)

    def _open_peers(self, role: int) -> list[int]:
        at = {index: self._peer(index) for index in self._attached()}
        return [index for index, word in at.items()
                if not self.words[word + Peer.closed] and self.words[word + Peer.roles] & role]

    def _room_holders(self, region: int) -> list[int]:
        """Who can make room: those who hold entries there, else those who consume."""
        held = [self.words[at + Lease.peer] for at in self.held()
                if self.words[at + Lease.slot] < self.layout.entries.count
                and self.words[self.record(self.words[at + Lease.slot]) + Entry.region] == region]
        return [*held, *self._consumers]

    def _owners_asked(self, peer: int) -> list[int]:
        return [self.words[self.record(self.words[at + Lease.slot]) + Entry.peer] for at in self.held()
                if self.words[at + Lease.peer] == peer and self.words[at + Lease.request]
                and self.words[at + Lease.slot] < self.layout.entries.count]

    def _region(self, regions: Regions, index: int) -> dict[str, Any]:
        info, runs = regions.info(index), self.runs(index + 1)
        mapped = [self.pid(peer) for peer in regions.mapped_by(index)]
        return {"index": index, "state": _named(RegionState, regions.state(index)),
                "kind": _named(RegionKind, info.kind), "owner": info.peer, "device": info.uuid.hex(),
                "nbytes": info.nbytes, "used_bytes": sum(nbytes for _, nbytes in runs), "mapped_by": mapped}

    def tables(self) -> Tables:
        """Tables over a private copy of the picture."""
        from .tables import Tables
        return Tables(Copy(self.name, self.layout, bytearray(self.raw)))  # type: ignore[arg-type]  # of a private copy

    def expired(self) -> list[int]:
        """The READY entries whose time is over, which the next call of anybody will free."""
        columns = zip(self.column(Entry.state), self.column(Entry.expires_ns), strict=True)
        return [slot for slot, (state, expires) in enumerate(columns)
                if state == READY and 0 < expires <= self.now_ns]

    def sequence(self, slot: int) -> int:
        """The number of the entry in a slot."""
        return self.words[self.record(slot) + Entry.sequence]

    # ------------------------------------------------------------ leases

    def decision(self, at: int) -> dict[str, Any]:
        """How the holder of a lease (its word index) gets at the bytes."""
        decision = decode_decision(self.words[at + Lease.path])
        if decision is None:
            return {"path": None, "refused": {}}
        return {"path": decision.path.name.lower(), "refused": decision.describe()}

    def leases(self) -> list[dict[str, Any]]:
        """The held leases: kind, entry, holder, since when, and the path by which it is seen."""
        rows = []
        for at in self.held():
            slot = self.words[at + Lease.slot]
            rows.append({"kind": _named(LeaseKind, self.words[at + Lease.kind]), "slot": slot,
                         "sequence": self.sequence(slot) if slot < self.layout.entries.count else 0,
                         "peer": self.words[at + Lease.peer], "thread": self.words[at + Lease.thread],
                         "since_ns": self.words[at + Lease.since_ns],
                         "released": self.words[at + Lease.released] == self.words[at], **self.decision(at)})
        return rows


_WAITS_FOR = {WaitKind.SIGNAL: "a signal", WaitKind.REQUEST: "requests for its device memory",
              WaitKind.ANSWER: "the owner of device memory"}


# ---------------------------------------------------------------- taking a picture

def names() -> list[str]:
    """The segments of this host (as far as this container sees them)."""
    files = (file.removeprefix(PREFIX) for file in os.listdir(DIRECTORY) if file.startswith(PREFIX))
    return sorted(name for name in files if NAME.fullmatch(name))


def look(name: str) -> Picture:
    """Take a picture. Raises NoSuchSegment, NotOurs, SegmentBroken, FormatMismatch, InvalidName."""
    name = clean_name(name)
    fd = open_checked(name, os.O_RDONLY)
    try:
        layout = _layout(os.pread(fd, PAGE_BYTES, 0), os.fstat(fd).st_size)
        state, data, other = _copied(fd, layout)
        lives = _lives(fd, layout, data)
        return Picture(name, layout, data, other, state, lives, _lock_holder(fd), time.monotonic_ns(), time.time_ns())
    finally:
        os.close(fd)


def load(path: str) -> Picture:
    """A picture that `save` kept, or the bytes of a segment copied by other means (then nobody knows who was alive).
    Raises NoSuchSegment (no such file), SegmentBroken, FormatMismatch.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not stop us
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise NoSuchSegment(f"{path}: {reason}", hint="name a file that dump --core wrote") from None
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise SegmentBroken(f"{path} is no regular file", hint="name a file that dump --core wrote")
    with open(fd, "rb") as file:
        line = file.readline(MOST_HEAD_BYTES)
        head: dict[str, Any] = {}
        if line.startswith(b'{"core": '):
            with suppress(ValueError, RecursionError):
                head = json.loads(line)
        at = len(line) if head else 0
        file.seek(at)
        page = file.read(PAGE_BYTES)
        file_bytes = head.get("file_bytes", status.st_size - at)
        layout = _layout(page, file_bytes if isinstance(file_bytes, int) else -1)
        if status.st_size - at < layout.arena.at:
            raise SegmentBroken(f"{path} has {status.st_size - at} bytes, its segment's tables take {layout.arena.at}")
        raw = page + file.read(layout.arena.at - len(page))
    return _loaded(os.path.basename(path), layout, raw, head, status.st_mtime_ns)


def _loaded(name: str, layout: Layout, raw: bytes, head: dict[str, Any], written_ns: int) -> Picture:
    """What the head lacks or has of another type counts as not known."""
    def known(key: str, kind: type[T], otherwise: T) -> T:
        return head[key] if type(head.get(key)) is kind else otherwise

    odd = int.from_bytes(raw[Header.mutation * WORD_BYTES:(Header.mutation + 1) * WORD_BYTES], sys.byteorder) & 1
    named = next((state for state in State if state.value == head.get("state")), None)
    lives = {int(index): life for index, life in known("lives", dict, {}).items()
             if index.isascii() and index.isdigit() and len(index) < 9 and life in ("alive", "stopped", "dead")}
    return Picture(printable(known("name", str, name))[:180], layout, raw, None,
                   named or (State.TORN if odd else State.AT_REST), lives, known("lock", int, 0) or None,
                   known("now_ns", int, 0) or time.monotonic_ns(), known("taken_ns", int, written_ns))


def _layout(page: bytes, file_bytes: int) -> Layout:
    return read_header(page[:len(page) // WORD_BYTES * WORD_BYTES], file_bytes)


def _copied(fd: int, layout: Layout) -> tuple[State, bytes, bytes | None]:
    """The tables: at rest if they can be had so, else two copies in succession."""
    seen, since = None, time.monotonic()
    data = b""
    for _ in range(LOOKS):
        before = _mutation(fd)
        data = _read(fd, layout)
        after = _mutation(fd)
        if before == after and not before & 1:
            return State.AT_REST, data, None
        if before != seen:
            seen, since = before, time.monotonic()
        if after & 1 and before == after and time.monotonic() - since < TORN_AFTER_S:
            time.sleep(0.002)
    while _mutation(fd) == seen and seen & 1:
        if time.monotonic() - since >= TORN_AFTER_S:
            return State.TORN, _read(fd, layout), None
        time.sleep(0.002)
    return State.MOVING, _read(fd, layout), data


def _read(fd: int, layout: Layout) -> bytes:
    data = os.pread(fd, layout.arena.at, 0)
    if len(data) < layout.arena.at:
        raise SegmentBroken(f"the object shrank to {len(data)} B while it was read")
    return data


def _mutation(fd: int) -> int:
    return int.from_bytes(os.pread(fd, WORD_BYTES, Header.mutation * WORD_BYTES), sys.byteorder)


def write_new(path: str, data: bytes) -> None:
    """Write a whole file of mode 0600, in place of one of that name. Raises InvalidArgument for what is no plain file
    and in the folder of the segments; then nothing was written.
    """
    real = os.path.realpath(path)
    if os.path.dirname(real) == DIRECTORY or os.path.exists(real) and not os.path.isfile(real):
        raise InvalidArgument(f"{path!r} is not written: it is no plain file, or lies in {DIRECTORY}",
                              hint="name a file of your own")
    fd, draft = tempfile.mkstemp(dir=os.path.dirname(real) or ".", prefix=".shmkv-")
    try:
        with open(fd, "wb") as file:
            file.write(data)
        os.replace(draft, real)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(draft)
        raise


def _lives(fd: int, layout: Layout, data: bytes) -> dict[int, str]:
    """Of each attached peer: alive, stopped or dead."""
    words, area, lives = memoryview(data).cast("Q"), layout.peers, {}
    here = os.stat("/proc/self/ns/pid").st_ino
    for index in range(area.count):
        at = area.word + index * area.stride
        if words[at] != ATTACHED:
            continue
        if not liveness_held(fd, at * WORD_BYTES):
            lives[index] = "dead"
        else:
            stopped = words[at + Peer.pid_namespace] == here and _is_stopped(words[at + Peer.pid],
                                                                             words[at + Peer.start_ticks])
            lives[index] = "stopped" if stopped else "alive"
    return lives


def _is_stopped(pid: int, start_ticks: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] in ("T", "t") and int(fields[19]) == start_ticks


def _lock_holder(fd: int) -> int | None:
    """The pid that holds the segment's lock, as the kernel lists it; None if nobody does."""
    status = os.fstat(fd)
    wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with suppress(OSError), open("/proc/locks") as locks:
        for line in locks:
            fields = line.split()
            if len(fields) > 5 and fields[1] == "FLOCK" and fields[5] == wanted:
                return int(fields[4])
    return None


def _split(data: Any) -> tuple[Any, Any]:
    """Namespace and tokens of a key's bytes, as `keys.split`, which would bring NumPy along."""
    if len(data) < 4 or len(data) % 4:
        raise SegmentBroken(f"a key of {len(data)} bytes: not a row of words")
    start = 4 + 4 * int.from_bytes(data[:4], sys.byteorder)
    if start > len(data):
        raise SegmentBroken(f"namespace ends at byte {start} of a key of {len(data)} bytes")
    return data[4:start], data[start:]


def _named(numbers: type[IntEnum], value: int) -> str:
    try:
        return numbers(value).name.lower()
    except ValueError:
        return f"unknown ({value})"


def printable(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)
