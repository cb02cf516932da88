"""The binary format, declared once.

Every shared scalar is a *word*: a native, 8-byte aligned unsigned integer, stored and loaded in one access. A record
is a list of named words; the class attribute is the word's index in the record. The format word is derived from
these declarations, so that changing one makes older processes refuse the segment instead of misreading it.
`python -m shmkv.layout` prints the memory map.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Annotated, ClassVar, get_type_hints

from .errors import FormatMismatch, InvalidArgument, SegmentBroken

VERSION = 1
MAGIC = int.from_bytes(b"shmkv\x00kv", "little")
WORD_BYTES = 8
PAGE_BYTES = 4096
META_UNIT_BYTES = 64
NONE = 0xFFFF_FFFF
"""'no slot' in arrays of 32-bit slot numbers"""


class Record:
    """Base of the record declarations: turns annotated names into word indices."""

    words: ClassVar[int]
    names: ClassVar[dict[str, str]]

    def __init_subclass__(cls) -> None:
        hints = get_type_hints(cls, include_extras=True)
        cls.names = {name: hints[name].__metadata__[0] for name in cls.__annotations__}
        for index, name in enumerate(cls.names):
            setattr(cls, name, index)
        cls.words = -(-len(cls.names) // 8) * 8


class Header(Record):
    magic: Annotated[int, "stored last at birth"]
    format: Annotated[int, "version and checksum of these declarations"]
    file_bytes: Annotated[int, "size of the whole object"]
    slots: Annotated[int, "geometry: entries at most"]
    peers: Annotated[int, "geometry: attached handles at most"]
    leases: Annotated[int, "geometry: leases at most"]
    waits: Annotated[int, "geometry: waiting threads at most"]
    ring: Annotated[int, "geometry: signals a peer's ring holds"]
    journal: Annotated[int, "geometry: events kept"]
    meta_bytes: Annotated[int, "geometry: arena of keys and descriptors"]
    arena_bytes: Annotated[int, "geometry: arena of payload"]
    device_arenas: Annotated[int, "geometry: device arenas at most"]
    registrations: Annotated[int, "geometry: registered device tensors at most"]
    geometry_check: Annotated[int, "checksum of the words from format to registrations"]
    instance: Annotated[int, "random identity of this segment"]
    owner: Annotated[int, "peer index + 1 of the owner, who removes the name"]
    owner_generation: Annotated[int, "of that peer record"]
    owner_pid: Annotated[int, "creator, for humans"]
    born_ns: Annotated[int, "wall clock at creation, for humans"]
    unlinked: Annotated[int, "1: the owner removed the name"]
    mutation: Annotated[int, "odd: a mutation is under way or was left half done (dirty)"]
    mutator: Annotated[int, "peer index + 1 of the last mutation, for humans"]
    next_sequence: Annotated[int, "sequence of the next entry"]
    next_expiry_ns: Annotated[int, "monotonic; 0: nothing expires (derived)"]
    ready_count: Annotated[int, "how often an entry became READY"]
    producers_seen: Annotated[int, "how many peers have inserted"]
    waits_high: Annotated[int, "wait records used: below this index"]
    leases_high: Annotated[int, "lease records used: below this index (derived)"]
    releases_pending: Annotated[int, "hint: a lease was released since the last collection"]
    free_slots: Annotated[int, "height of the stack of free slots (derived)"]
    free_leases: Annotated[int, "height of the stack of free leases (derived)"]
    ranked: Annotated[int, "entries in the prefix order (derived)"]
    journal_next: Annotated[int, "tickets given out by the journal"]
    arena_holes: Annotated[int, "payload arena (derived)"]
    arena_free: Annotated[int, "payload arena, in units (derived)"]
    arena_recent: Annotated[int, "payload arena (derived)"]
    meta_holes: Annotated[int, "meta arena (derived)"]
    meta_free: Annotated[int, "meta arena, in units (derived)"]
    meta_recent: Annotated[int, "meta arena (derived)"]


class Counter(Record):
    inserts: Annotated[int, "entries sealed"]
    takes: Annotated[int, "entries drop-selected"]
    shares: Annotated[int, "entries selected"]
    consumed: Annotated[int, "taken entries freed after release"]
    redelivered: Annotated[int, "taken entries made READY again"]
    misses: Annotated[int, "look-ups answered with a Miss"]
    starved: Annotated[int, "... of these, early, because nobody could go on"]
    orphaned: Annotated[int, "... of these, early, because no producer was left"]
    timeouts: Annotated[int, "inserts that found no room in time"]
    aborted: Annotated[int, "reserved entries given up"]
    cancelled: Annotated[int, "entries cancelled"]
    evicted: Annotated[int, "entries evicted"]
    expired: Annotated[int, "entries expired"]
    lost: Annotated[int, "entries that went with their producer's device memory"]
    deaths: Annotated[int, "dead peers whose remains were taken over"]
    recoveries: Annotated[int, "rebuilds after a half-done mutation"]
    signals: Annotated[int, "signals posted"]
    signals_dropped: Annotated[int, "signals not posted because a ring was full"]
    inserted_bytes: Annotated[int, "payload bytes sealed"]
    taken_bytes: Annotated[int, "payload bytes handed out, in place or copied"]


class Peer(Record):
    state: Annotated[int, "0 FREE, 1 ATTACHED; FREE is stored last by the cleaner"]
    generation: Annotated[int, "how often this record was claimed"]
    closed: Annotated[int, "1: the handle is closed, views still hold leases"]
    roles: Annotated[int, "bits: 1 has inserted, 2 has looked up"]
    pid: Annotated[int, "in its own PID namespace; for humans"]
    start_ticks: Annotated[int, "start time of the process (/proc/pid/stat); for humans"]
    pid_namespace: Annotated[int, "inode of the PID namespace; for humans"]
    attached_ns: Annotated[int, "monotonic"]
    role_0: Annotated[int, "role text, UTF-8, 32 bytes in four words"]
    role_1: Annotated[int, ""]
    role_2: Annotated[int, ""]
    role_3: Annotated[int, ""]
    ring_head: Annotated[int, "signals written, counted by writers under the lock"]
    ring_tail: Annotated[int, "signals read, counted by the peer"]
    ring_dropped: Annotated[int, "signals lost to a full ring"]


class Wait(Record):
    state: Annotated[int, "0 FREE, 1 IDLE, 2 WAITING, 3 RETIRED (its thread ended)"]
    generation: Annotated[int, "part of the semaphore's name"]
    peer: Annotated[int, "peer index"]
    peer_generation: Annotated[int, ""]
    thread: Annotated[int, "native thread id"]
    kind: Annotated[int, "1 an entry, 2 room, 3 a signal, 4 a request, 5 an answer"]
    since_ns: Annotated[int, "monotonic"]
    deadline_ns: Annotated[int, "monotonic; 2**63: forever"]
    posted: Annotated[int, "non-zero: something happened since the waiter last looked"]
    evaluated: Annotated[int, "ready_count + 1 when last found unavailable; 0: not yet evaluated"]
    family: Annotated[int, "hint: namespace and first token waited for"]
    n_tokens: Annotated[int, "length of the prompt waited for"]
    tokens_0: Annotated[int, "its first eight tokens, two a word"]
    tokens_1: Annotated[int, ""]
    tokens_2: Annotated[int, ""]
    tokens_3: Annotated[int, ""]
    wanted_bytes: Annotated[int, "payload bytes room is wanted for"]
    wanted_meta_bytes: Annotated[int, "key and descriptor bytes room is wanted for"]
    wanted_region: Annotated[int, "region + 1 of the device arena room is wanted in; 0: the payload arena"]


class Lease(Record):
    held: Annotated[int, "generation of the holding; 0: FREE"]
    released: Annotated[int, "equals held: released; the one store a holder makes without the lock"]
    outcome: Annotated[int, "0 none, 1 CONSUMED, 2 RETURNED; stored before released"]
    kind: Annotated[int, "1 WRITE, 2 TAKE, 3 SHARE"]
    slot: Annotated[int, "entry"]
    entry_generation: Annotated[int, "of that entry's slot"]
    peer: Annotated[int, "holder"]
    peer_generation: Annotated[int, ""]
    thread: Annotated[int, "native id of the thread that took it"]
    since_ns: Annotated[int, "monotonic"]
    generation: Annotated[int, "how often this record was held"]
    path: Annotated[int, "how its holder gets at the bytes: a path's code, and a reason a byte for each better one"]
    request: Annotated[int, "0 none, 1 ASKED, 2 SERVING, 3 SERVED, 4 REFUSED: the owner is to bring the bytes"]
    scratch: Annotated[int, "slot + 1 of the holder's own entry that takes part in that"]


class Entry(Record):
    state: Annotated[int, "0 FREE, 1 RESERVED, 2 READY, 3 TAKEN, 4 DROPPED; stored last"]
    generation: Annotated[int, "how often this slot was reserved"]
    sequence: Annotated[int, "age order; never repeats"]
    peer: Annotated[int, "producer"]
    peer_generation: Annotated[int, ""]
    meta_at: Annotated[int, "bytes from the start of the meta arena"]
    meta_bytes: Annotated[int, ""]
    key_bytes: Annotated[int, "namespace and key tokens, at meta_at"]
    token_start: Annotated[int, "bytes of the key before its first token"]
    roi_tokens: Annotated[int, "full tokens and mask follow the key; 0: no roi"]
    descriptor_bytes: Annotated[int, "tensor descriptors, at the end of the meta bytes"]
    run_at: Annotated[int, "bytes from the start of the payload arena"]
    run_bytes: Annotated[int, "whole pages; 0: nothing but zero-size tensors"]
    payload_bytes: Annotated[int, "sum of the tensors' bytes"]
    n_tensors: Annotated[int, ""]
    created_ns: Annotated[int, "monotonic, reserved"]
    ready_ns: Annotated[int, "monotonic, sealed"]
    used_ns: Annotated[int, "monotonic, last handed out or sealed"]
    ttl_ns: Annotated[int, "0: never expires"]
    ttl_left_ns: Annotated[int, "while held"]
    expires_ns: Annotated[int, "monotonic; 0: not running"]
    holders: Annotated[int, "held leases that name it (derived)"]
    taker: Annotated[int, "index + 1 of the lease that took it, while TAKEN; stored before TAKEN"]
    cancelled: Annotated[int, "1: drop it instead of sealing"]
    fingerprint: Annotated[int, "hint for the journal, never trusted"]
    region: Annotated[int, "0: run in the payload arena; region + 1: in that; ~0: in its producer's registered tensors"]


class Region(Record):
    state: Annotated[int, "0 FREE, 1 OPEN, 2 GONE; stored last"]
    generation: Annotated[int, "how often this record was claimed"]
    kind: Annotated[int, "1 ARENA: memory for runs, 2 TENSOR: a registered tensor"]
    peer: Annotated[int, "owner: the memory ends with this peer"]
    peer_generation: Annotated[int, ""]
    uuid_0: Annotated[int, "the device's UUID, 16 bytes"]
    uuid_1: Annotated[int, ""]
    nbytes: Annotated[int, "size"]
    start: Annotated[int, "bytes from the start of the allocation that the handle names"]
    allocation: Annotated[int, "the driver's id of the allocation, which its owner's process never repeats"]
    exported: Annotated[int, "1: the handle is valid"]
    handle_0: Annotated[int, "CUDA IPC memory handle, 64 bytes: a capability"]
    handle_1: Annotated[int, ""]
    handle_2: Annotated[int, ""]
    handle_3: Annotated[int, ""]
    handle_4: Annotated[int, ""]
    handle_5: Annotated[int, ""]
    handle_6: Annotated[int, ""]
    handle_7: Annotated[int, ""]
    published: Annotated[int, "1: entries are sealed before the device work is done, and ordered by the event"]
    event_0: Annotated[int, "CUDA IPC event handle, 64 bytes"]
    event_1: Annotated[int, ""]
    event_2: Annotated[int, ""]
    event_3: Annotated[int, ""]
    event_4: Annotated[int, ""]
    event_5: Annotated[int, ""]
    event_6: Annotated[int, ""]
    event_7: Annotated[int, ""]
    holes: Annotated[int, "device arena (derived)"]
    free: Annotated[int, "device arena, in units (derived)"]
    recent: Annotated[int, "device arena (derived)"]


class Ladder(Record):
    host: Annotated[int, "look-ups served by each path"]
    local: Annotated[int, ""]
    cuda_ipc: Annotated[int, ""]
    cuda_peer: Annotated[int, ""]
    staging: Annotated[int, ""]
    nccl: Annotated[int, ""]
    host_last: Annotated[int, "the last one's word `path` of its lease"]
    local_last: Annotated[int, ""]
    cuda_ipc_last: Annotated[int, ""]
    cuda_peer_last: Annotated[int, ""]
    staging_last: Annotated[int, ""]
    nccl_last: Annotated[int, ""]
    staged_inserts: Annotated[int, "entries of device tensors that were copied into the payload arena"]
    staged_inserts_last: Annotated[int, "why, as in `path` of a lease"]


class Signal(Record):
    kind: Annotated[int, "ready, room, taken, released, cancelled, closed"]
    sequence: Annotated[int, "entry"]
    slot: Annotated[int, ""]
    sender: Annotated[int, "peer index"]
    value: Annotated[int, "by kind"]
    time_ns: Annotated[int, "monotonic"]
    ticket: Annotated[int, "position + 1 in the ring's endless count"]


class Event(Record):
    ticket: Annotated[int, "position + 1 in the journal's endless count; stored last"]
    kind: Annotated[int, ""]
    time_ns: Annotated[int, "monotonic"]
    sequence: Annotated[int, "entry"]
    slot: Annotated[int, ""]
    generation: Annotated[int, ""]
    peer: Annotated[int, "actor"]
    pid: Annotated[int, "actor"]
    fingerprint: Annotated[int, "of the key"]
    n_tokens: Annotated[int, ""]


RECORDS: tuple[type[Record], ...] = (Header, Counter, Ladder, Peer, Wait, Lease, Entry, Region, Signal, Event)
_DECLARED = ";".join(f"{record.__name__}:{','.join(record.names)}" for record in RECORDS)
FORMAT = VERSION << 32 | zlib.crc32(f"{sys.byteorder};{PAGE_BYTES};{META_UNIT_BYTES};{_DECLARED}".encode())


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes chosen at creation; the rest of the layout follows from them."""

    slots: int
    peers: int
    leases: int
    waits: int
    ring: int
    journal: int
    meta_bytes: int
    arena_bytes: int
    device_arenas: int
    registrations: int

    LIMITS: ClassVar[dict[str, tuple[int, int]]] = {
        "slots": (1, 1 << 22), "peers": (1, 4096), "leases": (1, 1 << 22), "waits": (1, 65536),
        "ring": (1, 65536), "journal": (1, 1 << 20), "meta_bytes": (PAGE_BYTES, 1 << 42),
        "arena_bytes": (PAGE_BYTES, 1 << 46), "device_arenas": (0, 64), "registrations": (0, 1 << 16),
    }

    def check(self) -> Geometry:
        for field in fields(self):
            value, (low, high) = getattr(self, field.name), self.LIMITS[field.name]
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise InvalidArgument(f"{field.name}={value!r} is not a whole number from {low} to {high}")
            if field.name.endswith("_bytes") and value % PAGE_BYTES:
                raise InvalidArgument(f"{field.name}={value} is not a multiple of {PAGE_BYTES}")
        if self.ring & (self.ring - 1):
            raise InvalidArgument(f"ring={self.ring} is not a power of two")
        return self


@dataclass(frozen=True, slots=True)
class Area:
    """One stretch of the segment: `at` and `nbytes` in bytes, `word` the same as `at` in words; `stride` words a record
    (0: an array or raw bytes)."""

    name: str
    at: int
    nbytes: int
    count: int
    stride: int
    record: type[Record] | None
    word: int


class Layout:
    """Where everything lies in a segment of the given geometry."""

    def __init__(self, geometry: Geometry):
        g = self.geometry = geometry.check()
        self.areas: list[Area] = []
        self.header = self._records(Header, 1)
        self.counters = self._records(Counter, 1)
        self.ladder = self._records(Ladder, 1)
        self.peers = self._records(Peer, g.peers)
        self.waits = self._records(Wait, g.waits)
        self.leases = self._records(Lease, g.leases)
        self.entries = self._records(Entry, g.slots)
        self.regions = self._records(Region, g.device_arenas + g.registrations)
        self.signals = self._records(Signal, g.peers * g.ring)
        self.journal = self._records(Event, g.journal)
        self.free_slots = self._array("free slots", g.slots, 4)
        self.free_leases = self._array("free leases", g.leases, 4)
        self.order = self._array("prefix order", g.slots, 4)
        self.parents = self._array("prefix parents", g.slots, 4)
        self.hole_starts = self._array("arena hole starts", g.slots + 1, 8)
        self.hole_lengths = self._array("arena hole lengths", g.slots + 1, 8)
        self.meta_hole_starts = self._array("meta hole starts", g.slots + 1, 8)
        self.meta_hole_lengths = self._array("meta hole lengths", g.slots + 1, 8)
        n_holes = g.device_arenas * (g.slots + 1)
        self.device_hole_starts = self._array("device hole starts", n_holes, 8)
        self.device_hole_lengths = self._array("device hole lengths", n_holes, 8)
        self.mappings = self._array("region mappings", self.regions.count * g.peers, 8)
        self.meta = self._add("meta arena", g.meta_bytes, 0, 0, None)
        self.arena = self._add("payload arena", g.arena_bytes, 0, 0, None)
        self.file_bytes = self.arena.at + self.arena.nbytes

    def _add(self, name: str, nbytes: int, count: int, stride: int, record: type[Record] | None) -> Area:
        at = self.areas[-1].at + self.areas[-1].nbytes if self.areas else 0
        area = Area(name, at, -(-nbytes // PAGE_BYTES) * PAGE_BYTES, count, stride, record, at // WORD_BYTES)
        self.areas.append(area)
        return area

    def _records(self, record: type[Record], count: int) -> Area:
        return self._add(record.__name__.lower(), count * record.words * WORD_BYTES, count, record.words, record)

    def _array(self, name: str, count: int, item_bytes: int) -> Area:
        return self._add(name, count * item_bytes, count, 0, None)

    def memory_map(self) -> str:
        """The map that the documentation shows: one line an area, then one line a word."""
        lines = [f"{'offset':>12} {'bytes':>12} {'count':>8} {'each':>6}  area"]
        for area in self.areas:
            each = area.stride * WORD_BYTES or (area.nbytes // area.count if area.count else 0)
            lines.append(f"{area.at:>12} {area.nbytes:>12} {area.count or '':>8} {each or '':>6}  {area.name}")
        for record in RECORDS:
            lines += ["", f"{record.__name__.lower()} ({record.words * WORD_BYTES} bytes)"]
            lines += [f"  {index * WORD_BYTES:>5}  {name:<18} {text}"
                      for index, (name, text) in enumerate(record.names.items())]
        return "\n".join(lines)


GEOMETRY_FIELDS = tuple(field.name for field in fields(Geometry))


def header_words(layout: Layout) -> dict[str, int]:
    """What birth writes into the header besides identity; `magic` is stored last, by `segment`."""
    geometry = {name: getattr(layout.geometry, name) for name in GEOMETRY_FIELDS}
    words = {"format": FORMAT, "file_bytes": layout.file_bytes, **geometry}
    return {**words, "geometry_check": _geometry_check(words.values())}


def read_header(data: bytes, file_bytes: int) -> Layout:
    """Check the first bytes of a segment of `file_bytes` and return its layout; reads nothing else.

    Raises SegmentBroken (not a segment, or contradicting itself) or FormatMismatch.
    """
    if len(data) < Header.words * WORD_BYTES:
        raise SegmentBroken(f"the object has {len(data)} bytes, a header needs {Header.words * WORD_BYTES}")
    words = memoryview(data[:len(data) // WORD_BYTES * WORD_BYTES]).cast("Q")
    if words[Header.magic] != MAGIC:
        raise SegmentBroken(f"no shmkv segment: magic word is {words[Header.magic]:#018x}, expected {MAGIC:#018x}")
    if words[Header.format] != FORMAT:
        found, expected = words[Header.format], FORMAT
        raise FormatMismatch(f"segment has format {found >> 32}/{found & NONE:08x}, "
                             f"this library writes {expected >> 32}/{expected & NONE:08x}")
    if words[Header.geometry_check] != _geometry_check(words[Header.format:Header.registrations + 1]):
        raise SegmentBroken("the words of the header do not agree with their checksum")
    try:
        layout = Layout(Geometry(**{name: words[getattr(Header, name)] for name in GEOMETRY_FIELDS}))
    except InvalidArgument as error:
        raise SegmentBroken(f"impossible geometry: {error.args[0]}") from None
    if not words[Header.file_bytes] == layout.file_bytes == file_bytes:
        raise SegmentBroken(f"sizes disagree: object {file_bytes} B, header {words[Header.file_bytes]} B, "
                            f"geometry {layout.file_bytes} B")
    return layout


def _geometry_check(words: Iterable[int]) -> int:
    return zlib.crc32(b"".join(word.to_bytes(WORD_BYTES, sys.byteorder) for word in words))


if __name__ == "__main__":
    print(Layout(Geometry(slots=4096, peers=64, leases=4096, waits=256, ring=256, journal=1024,
                          meta_bytes=8 << 20, arena_bytes=1 << 30, device_arenas=8, registrations=256)).memory_map())
