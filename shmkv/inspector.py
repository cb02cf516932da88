"""What: a picture of a segment, taken from outside: without the lock, without being a peer, of the living, the stopped
and the dead, or of a file that was kept of one.

Map: everything but the payload arena is read into private memory, by plain reads of a descriptor that was opened
read-only; a picture is that copy. Kept in a file it is: one line of JSON (`CORE` and what the kernel said of the
peers), then the copy.

States: AT_REST (the mutation word was even and the same before and after the copy), MOVING (it changed each time:
entries are compared between two copies, and those that differ marked), TORN (odd, and nobody moved it for a while: its
holder is dead or stopped; the copy's derived state is rebuilt, privately).

Guarantees: nothing is written, no lock taken, no semaphore posted; a picture's bytes are not followed out of bounds,
whatever they are: what makes no sense raises SegmentBroken or is named in `problems`. No torch is imported.

Not guaranteed: that a MOVING picture was ever true as a whole; each entry that is not marked was.

If a party dies here: nothing is held.

Sync points: none; the mutation word is read as a sequence word.

Why not attach: a peer takes a record, a place in the lock's queue, and counts; a stopped holder would stop us too.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from . import descriptors, keys, namespace, recovery
from .entries import READY, RESERVED, TAKEN, EntryState
from .errors import NoSuchSegment, SegmentBroken, ShmkvError
from .journal import Event as JournalEvent
from .journal import EventKind
from .layout import PAGE_BYTES, WORD_BYTES, Counter, Entry, Header, Layout, Lease, Peer, Wait, read_header
from .leases import LeaseKind
from .peers import ATTACHED, CONSUMER, PRODUCER, WaitKind, WaitState, liveness_held
from .regions import IN_PLACE, RegionKind, RegionState
from .segment import DIRECTORY, NAME, PREFIX, open_checked
from .tables import Tables
from .transport import decode_decision

T = TypeVar("T")
CORE = "shmkv core 1"
LOOKS = 20
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
    attached_ns: int
    leases: int
    signals: int
    signals_lost: int


class EntryRow(NamedTuple):
    """One entry. Times are monotonic nanoseconds; `tokens` are the first few; `ttl_left_ns` None: it never expires."""

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
    producer: int
    created_ns: int
    used_ns: int
    ttl_left_ns: int | None
    holders: list[int]
    broken: str


class WaitRow(NamedTuple):
    """One waiting thread: what for, since when, until when (None: for ever), and on which peers that depends."""

    peer: int
    pid: int
    thread: int
    kind: str
    since_ns: int
    deadline_ns: int | None
    text: str
    on: list[int]


class Why(NamedTuple):
    """Whether a prompt would hit, and if not why. `text` has it in words."""

    hit: bool
    text: str
    sequence: int
    matched_tokens: int
    nearest: int
    common_tokens: int
    differs_at: int
    wanted_token: int | None
    found_token: int | None
    history: list[JournalEvent]


class Copy:
    """The bytes of a segment up to its payload arena, where tables find them."""

    def __init__(self, name: str, layout: Layout, data: bytearray):
        self.name, self.layout = name, layout
        self.memory = memoryview(data)
        self.words = self.memory.cast("Q")
        self.instance = self.words[Header.instance]
        self.fd = -1


class Picture:
    """What a segment looked like. Every method raises SegmentBroken, never anything else, for bytes of no sense."""

    def __init__(self, name: str, layout: Layout, data: bytes, other: bytes | None, state: State, lives: dict[int, str],
                 lock: int | None, now_ns: int):
        self.name, self.layout, self.state, self.now_ns = name, layout, state, now_ns
        self.raw, self._other, self.lives, self.lock_pid = data, other, lives, lock
        self._copy = Copy(name, layout, bytearray(data))
        self.words = self._copy.words

    @cached_property
    def tables(self) -> Tables:
        tables = Tables(self._copy)  # type: ignore[arg-type]  # it only looks
        if self.state != State.AT_REST:
            with suppress(SegmentBroken, *_NONSENSE):
                recovery.rebuild(tables)  # of this copy: look-ups need a sound order
        return tables

    def header(self) -> dict[str, int]:
        return {name: self.words[index] for index, name in enumerate(Header.names)}

    def counters(self) -> dict[str, int]:
        at = self.layout.counters.word
        return {name: self.words[at + index] for index, name in enumerate(Counter.names)}

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

    def states(self) -> dict[str, int]:
        """How many entries are in each state."""
        first, stride = self.layout.entries.word, self.layout.entries.stride
        column = self.words[first:first + self.layout.entries.count * stride:stride].tolist()
        return {state.name.lower(): column.count(state) for state in EntryState}

    def runs(self) -> list[tuple[int, int]]:
        """(offset, bytes) of the runs in the payload arena, in order."""
        area, found = self.layout.entries, []
        for at in range(area.word, area.word + area.count * area.stride, area.stride):
            if self.words[at] and self.words[at + Entry.run_bytes] and not self.words[at + Entry.region]:
                found.append((self.words[at + Entry.run_at], self.words[at + Entry.run_bytes]))
        return sorted(found)

    def holes(self) -> list[tuple[int, int]]:
        """(offset, bytes) of what the runs leave of the payload arena; overlapping runs count once."""
        found, at, end = [], 0, self.layout.arena.nbytes
        for start, nbytes in self.runs():
            if min(start, end) > at:
                found.append((at, min(start, end) - at))
            at = max(at, min(start + nbytes, end))
        return [*found, (at, end - at)] if at < end else found

    def peers(self) -> list[PeerRow]:
        leases = [self.words[at + Lease.peer] for at in self._held()]
        rows = []
        for index in range(self.layout.peers.count):
            at, words = self._peer(index), self.words
            if words[at] != ATTACHED:
                continue
            role = words[at + Peer.role_0:at + Peer.role_3 + 1].tobytes().rstrip(b"\0").decode(errors="replace")
            roles = [name for bit, name in ((PRODUCER, "producer"), (CONSUMER, "consumer"))
                     if words[at + Peer.roles] & bit]
            unread = (words[at + Peer.ring_head] - words[at + Peer.ring_tail]) % (1 << 64)
            rows.append(PeerRow(index, words[at + Peer.generation], _printable(role), words[at + Peer.pid],
                                self.lives.get(index, "unknown"), roles, bool(words[at + Peer.closed]),
                                words[at + Peer.attached_ns], leases.count(index),
                                min(unread, self.layout.geometry.ring), words[at + Peer.ring_dropped]))
        return rows

    def entries(self, n_tokens: int = 8) -> Iterator[EntryRow]:
        """The entries in use, by slot, with the first `n_tokens` of their tokens."""
        holders: dict[int, list[int]] = {}
        for at in self._held():
            slot = self.words[at + Lease.slot]
            if slot < self.layout.entries.count and \
                    self.words[at + Lease.entry_generation] == self.words[self._entry(slot) + Entry.generation]:
                holders.setdefault(slot, []).append(self.words[at + Lease.peer])
        for slot in range(self.layout.entries.count):
            if self.words[self._entry(slot)]:
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
        """Peers that wait for each other in a ring, in order; [] if none do. Who has a thread that does not wait, or
        waits for nobody in particular, is in none.
        """
        edges: dict[int, set[int]] = {}
        for row in self.waiters():
            edges.setdefault(row.peer, set()).update(row.on)
        for start in sorted(edges):
            path = self._walk(start, start, edges, [start])
            if path:
                return path
        return []

    def events(self) -> list[JournalEvent]:
        """The last events, oldest first."""
        return self._guarded(lambda: list(self.tables.journal.events()))

    def regions(self) -> list[dict[str, Any]]:
        return self._guarded(lambda: [self._region(index) for index in self.tables.regions.used()])

    def problems(self) -> list[str]:
        """Each way in which the picture contradicts itself. A MOVING one may, without anything being wrong."""
        raw = Tables(Copy(self.name, self.layout, bytearray(self.raw)))  # type: ignore[arg-type]
        try:
            return self._guarded(lambda: list(recovery.problems(raw)))
        except SegmentBroken as broken:
            return [broken.args[0]]

    def explain(self, tokens: Any, names: dict[str, Any] | None = None) -> Why:
        """Would `select(tokens, namespace=names)` hit? If not, why?"""
        wanted = keys.key(tokens, namespace=names)
        return self._guarded(lambda: self._explained(wanted))

    def save(self, path: str) -> None:
        """Keep the picture in a new file of mode 0600."""
        head = {"core": CORE, "name": self.name, "state": self.state.value, "lives": self.lives, "lock": self.lock_pid,
                "now_ns": self.now_ns, "file_bytes": self.layout.file_bytes}
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(json.dumps(head).encode() + b"\n" + self.raw)

    # ------------------------------------------------------------ how

    def _guarded(self, body: Callable[[], T]) -> T:
        try:
            return body()
        except _NONSENSE as error:
            raise SegmentBroken(f"the segment's bytes make no sense: {type(error).__name__}: {error}") from None

    def _peer(self, index: int) -> int:
        return self.layout.peers.word + index * self.layout.peers.stride

    def _entry(self, slot: int) -> int:
        return self.layout.entries.word + slot * self.layout.entries.stride

    def _held(self) -> list[int]:
        area = self.layout.leases
        return [at for at in range(area.word, area.word + area.count * area.stride, area.stride) if self.words[at]]

    def _row(self, slot: int, n_tokens: int, holders: list[int]) -> EntryRow:
        at, words = self._entry(slot), self.words
        state = words[at]
        name = EntryState(state).name.lower() if state in iter(EntryState) else str(state)
        tokens, names, tensors, broken, count = [], {}, [], "", 0
        try:
            tokens, names, tensors, count = self._guarded(lambda: self._contents(at, n_tokens))
        except ShmkvError as error:
            broken = error.args[0]
        ttl = words[at + Entry.ttl_ns]
        left = max(0, words[at + Entry.expires_ns] - self.now_ns) if words[at + Entry.expires_ns] else \
            words[at + Entry.ttl_left_ns]
        region = words[at + Entry.region]
        where = "host" if not region else "in place" if region == IN_PLACE else f"region {region - 1}"
        return EntryRow(slot, words[at + Entry.generation], words[at + Entry.sequence], name, self._moved(slot), count,
                        tokens, names, tensors, words[at + Entry.payload_bytes], words[at + Entry.run_at],
                        words[at + Entry.run_bytes], where, words[at + Entry.peer], words[at + Entry.created_ns],
                        words[at + Entry.used_ns], left if ttl else None, holders, broken)

    def _contents(self, at: int, n_tokens: int) -> tuple[list[int], dict, list[dict], int]:
        words, layout = self.words, self.layout
        start, nbytes = words[at + Entry.meta_at], words[at + Entry.meta_bytes]
        key_bytes, roi = words[at + Entry.key_bytes], words[at + Entry.roi_tokens]
        descriptor_bytes = words[at + Entry.descriptor_bytes]
        descriptors_at = -(-(key_bytes + 5 * roi) // WORD_BYTES) * WORD_BYTES
        if start + nbytes > layout.meta.nbytes or descriptors_at + descriptor_bytes > nbytes:
            raise SegmentBroken("its key and descriptors lie outside the meta arena")
        data = self._copy.memory[layout.meta.at + start:layout.meta.at + start + nbytes]
        head, ids = keys.split(data[:key_bytes])
        tensors = []
        if descriptor_bytes:
            for tensor in descriptors.parse(data[descriptors_at:descriptors_at + descriptor_bytes],
                                            words[at + Entry.run_bytes]):
                tensors.append({"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape),
                                "nbytes": tensor.nbytes, "region": tensor.region - 1 if tensor.region else None})
        first = memoryview(bytes(ids[:4 * n_tokens])).cast("I").tolist()
        return first, namespace.decode_namespace(bytes(head)), tensors, len(ids) // 4

    def _moved(self, slot: int) -> bool:
        if self._other is None:
            return False
        at, nbytes = self._entry(slot) * WORD_BYTES, Entry.words * WORD_BYTES
        return self.raw[at:at + nbytes] != self._other[at:at + nbytes]

    def _waiter(self, at: int) -> WaitRow:
        words = self.words
        peer, kind = words[at + Wait.peer], words[at + Wait.kind]
        name = WaitKind(kind).name.lower() if kind in iter(WaitKind) else str(kind)
        pid = words[self._peer(peer) + Peer.pid] if peer < self.layout.peers.count else 0
        if kind == WaitKind.ENTRY:
            n_tokens = words[at + Wait.n_tokens]
            first = words[at + Wait.tokens_0:at + Wait.tokens_3 + 1].cast("B").cast("I").tolist()[:min(8, n_tokens)]
            text = f"an entry for {n_tokens} tokens: {' '.join(map(str, first))}{' ...' if n_tokens > 8 else ''}"
            on = self._those(lambda roles: roles & PRODUCER)
        elif kind == WaitKind.ROOM:
            text, on = f"room for {words[at + Wait.wanted_bytes]} B", self._room_holders(words[at + Wait.wanted_region])
        else:
            text, on = {WaitKind.SIGNAL: "a signal", WaitKind.REQUEST: "requests for its device memory",
                        WaitKind.ANSWER: "the owner of device memory"}.get(kind, f"kind {kind}"), []
            if kind == WaitKind.ANSWER:
                on = self._owners_asked(peer)
        deadline = words[at + Wait.deadline_ns]
        return WaitRow(peer, pid, words[at + Wait.thread], name, words[at + Wait.since_ns],
                       None if deadline >= FOREVER else deadline, text, sorted(set(on) - {peer}))

    def _those(self, test: Callable[[int], int]) -> list[int]:
        """The open peers whose role bits pass."""
        return [index for index in range(self.layout.peers.count)
                if self.words[self._peer(index)] == ATTACHED and not self.words[self._peer(index) + Peer.closed]
                and test(self.words[self._peer(index) + Peer.roles])]

    def _room_holders(self, region: int) -> list[int]:
        """Who can make room: those who hold entries there, else those who consume."""
        held = [self.words[at + Lease.peer] for at in self._held()
                if self.words[at + Lease.slot] < self.layout.entries.count
                and self.words[self._entry(self.words[at + Lease.slot]) + Entry.region] == region]
        return [*held, *self._those(lambda roles: roles & CONSUMER)]

    def _owners_asked(self, peer: int) -> list[int]:
        return [self.words[self._entry(self.words[at + Lease.slot]) + Entry.peer] for at in self._held()
                if self.words[at + Lease.peer] == peer and self.words[at + Lease.request]
                and self.words[at + Lease.slot] < self.layout.entries.count]

    def _walk(self, start: int, here: int, edges: dict[int, set[int]], path: list[int]) -> list[int]:
        for peer in sorted(edges.get(here, ())):
            if peer == start:
                return path
            if peer not in path and peer in edges:
                found = self._walk(start, peer, edges, [*path, peer])
                if found:
                    return found
        return []

    def _region(self, index: int) -> dict[str, Any]:
        tables = self.tables
        info, state = tables.regions.info(index), tables.regions.state(index)
        mapped = [self.words[self._peer(peer) + Peer.pid] for peer in tables.regions.mapped_by(index)]
        return {"index": index, "state": RegionState(state).name.lower(), "kind": RegionKind(info.kind).name.lower(),
                "owner": info.peer, "device": info.uuid.hex(), "nbytes": info.nbytes, "mapped_by": mapped}

    def _explained(self, wanted: keys.Key) -> Why:
        found = self.tables.order.find(wanted.data, "prefix", 4, wanted.token_start)
        history = [event for event in self.tables.journal.events() if event.fingerprint == wanted.fingerprint]
        if found is not None:
            slot, matched = found
            n_matched = (matched - wanted.token_start) // 4
            sequence = self.words[self._entry(slot) + Entry.sequence]
            return Why(True, f"hit: entry {sequence} is valid for {n_matched} of {wanted.n_tokens} tokens", sequence,
                       n_matched, sequence, n_matched, n_matched, None, None, history)
        slot, common = self._nearest(wanted)
        reason = self._past(wanted, history)
        if slot is None:
            reason = reason or self._elsewhere(wanted) or "no entry begins like it in this namespace"
            return Why(False, f"miss: {reason}", 0, 0, 0, 0, 0, None, None, history)
        theirs = self._key_of(slot)
        at = common + wanted.token_start
        ours, other = _token(wanted.data, at), _token(theirs, at)
        n_common, sequence = common // 4, self.words[self._entry(slot) + Entry.sequence]
        if ours is None:
            text = f"the nearest entry, {sequence}, is longer: it begins with all {n_common} tokens (match=\"overlap\")"
        else:
            text = (f"the nearest entry, {sequence}, has the first {n_common} tokens in common; at position {n_common} "
                    f"it has {other}, the prompt {ours}")
        text = f"miss: {reason}; {text}" if reason else f"miss: {text}"
        return Why(False, text, 0, 0, sequence, n_common, n_common, ours, other, history)

    def _nearest(self, wanted: keys.Key) -> tuple[int | None, int]:
        """The entry of the same namespace that has most in common, and the bytes of tokens in common."""
        before, left, behind, right = self.tables.order.near(wanted.data, wanted.token_start)
        slot, common = max([(before, left), (behind, right)], key=lambda one: (one[0] is not None, one[1]))
        return slot, max(0, common - wanted.token_start) // 4 * 4

    def _past(self, wanted: keys.Key, history: list[JournalEvent]) -> str:
        """What became of an entry of this very key, so far as anybody remembers."""
        last = next((event for event in reversed(history) if event.kind in _ENDS), None)
        for slot in self.tables.entries.slots(TAKEN, RESERVED):
            if self._key_of(slot) == wanted.data:
                at = self._entry(slot)
                if self.words[at] == RESERVED:
                    return f"an entry of exactly these tokens is being written by peer {self.words[at + Entry.peer]}"
                holder = next((self.words[lease + Lease.peer] for lease in self._held()
                               if self.words[lease + Lease.slot] == slot
                               and self.words[lease + Lease.kind] == LeaseKind.TAKE), None)
                return f"an entry of exactly these tokens is taken by peer {holder}"
        if last is None:
            return ""
        ago = max(0, self.now_ns - last.time_ns) / 1e9
        return f"entry {last.sequence} of these tokens was {_ENDS[last.kind]} {ago:.1f} s ago by pid {last.pid}"

    def _elsewhere(self, wanted: keys.Key) -> str:
        """The same tokens under another namespace, and the fields that differ."""
        tokens = wanted.data[wanted.token_start:]
        for slot in self.tables.entries.slots(READY):
            head, ids = keys.split(self._key_of(slot))
            if tokens[:len(ids)] == bytes(ids) and len(ids):
                ours = namespace.decode_namespace(bytes(keys.split(wanted.data)[0]))
                theirs = namespace.decode_namespace(bytes(head))
                differing = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
                fields = ", ".join(f"{name}: {theirs.get(name)!r} there, {ours.get(name)!r} asked for"
                                   for name in differing)
                sequence = self.words[self._entry(slot) + Entry.sequence]
                return f"entry {sequence} has these tokens under another namespace ({fields})"
        return ""

    def _key_of(self, slot: int) -> bytes:
        start, nbytes = self.tables.entries.key_span(slot)
        return bytes(self._copy.memory[start:start + nbytes])

    def decision(self, at: int) -> dict[str, Any]:
        """How the holder of a lease (its word index) gets at the bytes."""
        decision = decode_decision(self.words[at + Lease.path])
        return {"path": decision.path.name.lower(), "refused": decision.describe()} if decision else {}

    def leases(self) -> list[dict[str, Any]]:
        """The held leases: kind, entry, holder, since when, and the path by which it is seen."""
        rows = []
        for at in self._held():
            kind = self.words[at + Lease.kind]
            rows.append({"kind": LeaseKind(kind).name.lower() if kind in iter(LeaseKind) else str(kind),
                         "slot": self.words[at + Lease.slot], "peer": self.words[at + Lease.peer],
                         "since_ns": self.words[at + Lease.since_ns],
                         "released": self.words[at + Lease.released] == self.words[at], **self.decision(at)})
        return rows


_ENDS = {EventKind.TAKEN: "taken", EventKind.CONSUMED: "consumed", EventKind.EVICTED: "evicted",
         EventKind.EXPIRED: "expired", EventKind.CANCELLED: "cancelled", EventKind.ABORTED: "aborted",
         EventKind.LOST: "lost with its producer's device memory"}


# ---------------------------------------------------------------- taking a picture

def names() -> list[str]:
    """The segments of this host (as far as this container sees them)."""
    files = (file.removeprefix(PREFIX) for file in os.listdir(DIRECTORY) if file.startswith(PREFIX))
    return sorted(name for name in files if NAME.fullmatch(name))


def look(name: str) -> Picture:
    """Take a picture. Raises NoSuchSegment, NotOurs, SegmentBroken, FormatMismatch, InvalidName."""
    fd = open_checked(name, os.O_RDONLY)
    try:
        layout = read_header(os.pread(fd, PAGE_BYTES, 0), os.fstat(fd).st_size)
        state, data, other = _copied(fd, layout)
        lives = _lives(fd, layout, data)
        return Picture(name, layout, data, other, state, lives, _lock_holder(fd), time.monotonic_ns())
    finally:
        os.close(fd)


def load(path: str) -> Picture:
    """A picture that `save` kept, or the bytes of a segment copied by other means. Raises SegmentBroken and such."""
    try:
        with open(path, "rb") as file:
            raw = file.read()
    except OSError as error:
        raise NoSuchSegment(f"{path}: {error.strerror}", hint="name a file that dump --core wrote") from None
    head: dict[str, Any] = {}
    if raw.startswith(b'{"core": '):
        line, _, raw = raw.partition(b"\n")
        with suppress(ValueError):
            head = json.loads(line)
    if raw[:WORD_BYTES * 3] and len(raw) >= 3 * WORD_BYTES and not head:
        head = {"file_bytes": len(raw)}
    return _loaded(path, head, raw)


def _loaded(path: str, head: dict[str, Any], raw: bytes) -> Picture:
    file_bytes, lives = head.get("file_bytes", len(raw)), head.get("lives", {})
    if not isinstance(file_bytes, int) or not isinstance(lives, dict):
        raise SegmentBroken(f"{path} is not a picture of a segment")
    layout = read_header(raw[:PAGE_BYTES], file_bytes)
    if len(raw) < layout.arena.at:
        raise SegmentBroken(f"{path} has {len(raw)} bytes, the tables of its segment take {layout.arena.at}")
    state = next((state for state in State if state.value == head.get("state")), None)
    odd = int.from_bytes(raw[Header.mutation * 8:Header.mutation * 8 + 8], sys.byteorder) & 1
    now = head.get("now_ns") if isinstance(head.get("now_ns"), int) else time.monotonic_ns()
    known = {int(index): str(life) for index, life in lives.items() if str(index).isdigit()}
    return Picture(str(head.get("name", os.path.basename(path)))[:200], layout, bytes(raw[:layout.arena.at]), None,
                   state or (State.TORN if odd else State.AT_REST), known, None, now)


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


def _token(data: bytes, at: int) -> int | None:
    return int.from_bytes(data[at:at + 4], sys.byteorder) if at + 4 <= len(data) else None


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)


