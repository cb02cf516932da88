"""`KVBuffer`: what a prefill and a decode process say to the buffer."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from types import TracebackType
from typing import TYPE_CHECKING, Any

from . import recovery, segment, starvation, sync, tensors
from .devices import DeviceOptions, Devices, Placement
from .driver import uuid_text
from .entries import EntryState, meta_parts
from .errors import ArenaFull, InvalidArgument, ShmkvError, TimedOut, TooLarge
from .handles import Hit, Miss, Reserved, Single
from .keys import Key, key
from .layout import META_UNIT_BYTES, PAGE_BYTES, Counter, Entry, Ladder, Lease, Peer
from .leases import LeaseKind, Outcome
from .openings import OwnerGone
from .owned import Registered
from .peers import Place, WaitKind
from .regions import IN_PLACE, RegionKind, RegionState
from .session import Session
from .signals import Signal
from .store import Grant, Request
from .tables import Tables
from .tensors import Spec
from .transport import PRIVATE, READONLY, Path, decode_decision
from .transport.host import HostTransport

if TYPE_CHECKING:
    import torch

MATCHES = ("exact", "prefix", "overlap")
ON_FULL = ("wait", "evict", "error")
INSERT_TIMEOUT_S = 10.0
GONE_OWNERS_MOST = 16
"""how many owners of device memory may turn out to be gone in one look-up"""


class KVBuffer(Single):
    """A handle of a look-up buffer in shared memory. Made by `shmkv.create` and `shmkv.attach`.

    Threads may share a handle; a forked child must attach anew. Every call that can wait takes `timeout` in seconds:
    0 looks once, None waits for ever.
    """

    def __init__(self, shared: segment.Segment, role: str, until: int, tables: Tables | None = None, own: bool = False,
                 device: DeviceOptions = DeviceOptions()):  # noqa: B008 (immutable)
        self._session = Session(shared, role, until, tables)
        if own:
            shared.owned = self._session.run(self._session.store.adopt, until)
        self._transport = HostTransport(shared)
        try:
            self._devices = Devices(self._session, self._transport, device)
        except BaseException:
            self._session.close()
            raise
        self._reading = threading.Lock()
        self.name = shared.name

    # ------------------------------------------------------------ producing

    def insert(self, tokens: Any, kv: Mapping[str, torch.Tensor], *, roi: Any = None, namespace: Mapping | None = None,
               ttl: float | None = None, timeout: float | None = INSERT_TIMEOUT_S, on_full: str = "wait",
               stream: Any = None) -> int:
        """Copy tensors into the buffer under a prompt's token ids; returns the entry's sequence number.

        `tokens`: 1-D token ids (list, NumPy, torch, or a `shmkv.key`); with `roi`, a bool mask of the same length, the
        entry is found by `tokens[roi]`. `kv`: named tensors of any dtype, shape and stride, all on the host or all on
        one CUDA device. Device tensors stay where they are if they lie in registered ones (`register`), else are copied
        into this handle's device memory (`device_capacity=`), else into the host's arena. `namespace`: all else
        that shaped the KV (model, dtype, adapter, ...); different ones never meet. `ttl`: seconds after which an entry
        that nobody holds is freed. `on_full`: "wait" for room until `timeout`, "evict" the least recently used entries
        that nobody holds (and wait if that is not enough), or "error". `stream`: what makes device tensors (a
        torch.cuda.Stream or the driver's number; torch's current one if not given): the entry is published behind it.

        Raises InvalidTokens, InvalidNamespace, InvalidTensor, TooLarge (can never fit), ArenaFull ("error"), TimedOut
        (no room in time), Cancelled, TransportUnavailable (`require=`). Nothing is inserted then.
        """
        reserved = self._reserve(tokens, kv, roi, namespace, ttl, timeout, on_full, stream, copy=True)
        slot = reserved.slot_in_place
        if slot is not None:
            self._devices.owned.keep(reserved.sequence, slot, kv)
        return reserved.seal()

    def reserve(self, tokens: Any, kv: Mapping[str, Spec | torch.Tensor], *, roi: Any = None,
                namespace: Mapping | None = None, ttl: float | None = None,
                timeout: float | None = INSERT_TIMEOUT_S, on_full: str = "wait", stream: Any = None) -> Reserved:
        """Reserve an entry and give its tensors to write into: no copy is ever made.

        `kv` maps names to `shmkv.Spec(shape, dtype)` (or to tensors of that shape and dtype); with `device="cuda:0"` in
        the specs they lie in this handle's device memory. Used in `with`, the entry is sealed when the block is left,
        and aborted if it raises. Otherwise as `insert`; `stream` is the one that will write the tensors.
        """
        return self._reserve(tokens, kv, roi, namespace, ttl, timeout, on_full, stream, copy=False)

    def register(self, tensor: torch.Tensor) -> Registered:
        """Make an engine's own device tensor a region: what `insert` gets of it is not copied but seen in place.

        The bytes of such an entry are in use until `released()` names it; keep the tensor registered (`close()` of the
        result ends that) and do not free or overwrite the slice before. Consumers map the whole allocation that the
        tensor lies in, its neighbours included. A tensor that cannot be shared (`in_place` is false, `reason` says why:
        memory pools, expandable segments) is copied on insert like any other.

        Raises InvalidTensor if it is no CUDA tensor, TableFull if `registrations=` are used up.
        """
        self._session.check()
        return self._devices.owned.register(tensor, self._devices.ordinal_of(tensor))

    def released(self, timeout: float | None = 0.0) -> list[int]:
        """The entries inserted in place whose bytes may be reused, since the last call, by `sequence`.

        Waits up to `timeout` seconds for the first. Unlike `signals` it loses none.
        """
        self._session.check()
        until = sync.deadline(timeout)
        while not (free := self._devices.owned.released()) and not sync.passed(until):
            self._session.wait(lambda place: self._devices.owned.any_released() or None, until,
                               lambda place: place.announce(WaitKind.SIGNAL, until))
        return free

    def cancel(self, tokens: Any, *, roi: Any = None, namespace: Mapping | None = None) -> int:
        """Drop all entries of exactly these tokens, also those still being written; returns how many."""
        wanted = key(tokens, roi=roi, namespace=namespace)
        return self._session.run(lambda: self._session.store.cancel(wanted), sync.deadline(INSERT_TIMEOUT_S))

    # ------------------------------------------------------------ consuming

    def drop_select(self, tokens: Any, *, roi: Any = None, namespace: Mapping | None = None, match: str = "prefix",
                    min_tokens: int = 1, timeout: float | None = 0.0, readonly: bool = False,
                    copy: bool = False, stream: Any = None) -> Hit | Miss:
        """Take an entry out of the buffer: exactly one consumer gets it. Returns a falsy Miss if there is none in time.

        `match`: "exact" (the entry's tokens are these), "prefix" (the longest entry that is a prefix of these),
        "overlap" (the entry with the longest common prefix: its first `matched_tokens` tokens' KV are valid). Equal
        keys: the oldest first. `min_tokens`: a shorter match is none. `readonly`: views of the shared bytes, warm and
        write-protected, instead of copy-on-write ones. `copy`: private copies, and the entry is let go of at once.
        `stream`: where device tensors will be read (torch's current one if not given): it is released behind that.

        An entry in device memory comes by the best path that leads there; `hit.transport` names it and `hit.refused`
        says why none better. One that the owner has to bring may take up to 10 s more.

        A Miss may come before the deadline: when the buffer is full and nobody can go on but by a miss, or when every
        producer that was there is gone; its `reason` says so. If this process dies before it released the entry,
        another consumer gets it. Raises TimedOut if a stopped process holds the lock, TableFull if all leases are held,
        TransportUnavailable if no path (or none as good as `require=`) leads to the entry's device memory: it stays.
        """
        return self._select(LeaseKind.TAKE, tokens, roi, namespace, match, min_tokens, timeout, readonly, copy, stream)

    def select(self, tokens: Any, *, roi: Any = None, namespace: Mapping | None = None, match: str = "prefix",
               min_tokens: int = 1, timeout: float | None = 0.0, readonly: bool = False,
               copy: bool = False, stream: Any = None) -> Hit | Miss:
        """Share an entry: as `drop_select`, but it stays for others, and cannot be evicted or expire while held."""
        return self._select(LeaseKind.SHARE, tokens, roi, namespace, match, min_tokens, timeout, readonly, copy, stream)

    def signals(self, timeout: float | None = 0.0) -> list[Signal]:
        """News for this handle since the last call (its entries were taken, released, cancelled; a peer closed, ...).

        Waits up to `timeout` seconds for the first. News is a hint: a full ring loses some and counts them in `stats`.
        """
        session, until = self._session, sync.deadline(timeout)
        session.check()
        ring = session.tables.signals
        if not ring.pending(session.index) and timeout != 0:
            session.wait(lambda place: ring.pending(session.index) or None, until,
                         lambda place: place.announce(WaitKind.SIGNAL, until))
        with self._reading:
            return ring.read(session.index)

    # ------------------------------------------------------------ looking after it

    def stats(self) -> Stats:
        """Sizes, occupancy and counters, consistent with each other."""
        self._session.sweep()

        def look() -> Stats:
            self._session.store.bury_dead()
            return _stats(self._session.tables)

        return self._session.run(look, sync.deadline(INSERT_TIMEOUT_S))

    def problems(self) -> list[str]:
        """Each way in which the segment contradicts itself; [] when it is sound."""
        self._session.sweep()
        return self._session.run(lambda: list(recovery.problems(self._session.tables)), sync.deadline(INSERT_TIMEOUT_S))

    @property
    def closed(self) -> bool:
        return self._session.closed

    def unlink(self) -> bool:
        """Remove the segment's name, if this handle owns it; attached processes go on. True if it was removed now."""
        return self._session.segment.unlink()

    def close(self) -> None:
        """Detach; the owner also removes the name. Views that still live stay readable. Idempotent."""
        self._session.segment.unlink()
        self._session.close()

    def __enter__(self) -> KVBuffer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_session") and not self._session.closed and not self._session.segment.inherited:
            try:
                self.close()
            except ShmkvError:
                pass  # the peer record is then cleaned by whoever comes next

    def __repr__(self) -> str:
        return f"<shmkv.KVBuffer {self.name!r}{', closed' if self.closed else ''}>"

    # ------------------------------------------------------------ how

    def _reserve(self, tokens: Any, kv: Mapping, roi: Any, namespace: Mapping | None, ttl: float | None,
                 timeout: float | None, on_full: str, stream: Any, copy: bool) -> Reserved:
        self._session.check()
        _check_choice("on_full", on_full, ON_FULL)
        until = sync.deadline(timeout)
        placement = self._devices.place(kv, *tensors.place(kv), copy, stream, until)
        placed = placement.placed
        request = _request(key(tokens, roi=roi, namespace=namespace), placement, ttl)
        self._refuse_oversized(request)
        reserved = Reserved(self._session, placement.transport, request.key)
        grant = self._wait_for_room(request, reserved, until, timeout, on_full)
        try:
            reserved.fill(grant, placed, kv if copy else None)
        except BaseException:
            reserved.abort()
            raise
        return reserved

    def _wait_for_room(self, request: Request, reserved: Reserved, until: int, timeout: float | None,
                       on_full: str) -> Grant:
        session, store = self._session, self._session.store
        evict, at_once = on_full == "evict", on_full == "error" or timeout == 0

        def look(place: Place | None) -> Grant | None:
            grant = store.reserve(request, reserved.hold, evict)
            if grant is None and (place is not None or at_once) and store.bury_dead():
                grant = store.reserve(request, reserved.hold, evict)
            return grant

        def announce(place: Place) -> None:
            place.announce(WaitKind.ROOM, until, family=request.key.family,
                           wanted=(request.run_bytes, request.meta_bytes, request.region))
            session.tables.waits.ring(WaitKind.ENTRY)  # whether a consumer starves may depend on us

        grant = session.run(lambda: look(None), until) if at_once else session.wait(look, until, announce)
        if grant is None:
            raise session.run(lambda: _no_room(session.tables, request, timeout, at_once), until)
        return grant

    def _refuse_oversized(self, request: Request) -> None:
        geometry = self._session.tables.layout.geometry
        meta_bytes = -(-request.meta_bytes // META_UNIT_BYTES) * META_UNIT_BYTES
        capacity = self._devices.arena_bytes() if request.region else geometry.arena_bytes
        if request.run_bytes > capacity:
            raise TooLarge(f"the tensors need a run of {request.run_bytes} B, the arena has {capacity} B",
                           hint=f"raise {'device_capacity' if request.region else 'capacity'}= in shmkv.create()")
        if meta_bytes > geometry.meta_bytes:
            raise TooLarge(f"tokens and tensor descriptors need {meta_bytes} B, the meta arena has "
                           f"{geometry.meta_bytes} B", hint="raise meta_capacity= in shmkv.create()")

    def _select(self, kind: LeaseKind, tokens: Any, roi: Any, namespace: Mapping | None, match: str, min_tokens: int,
                timeout: float | None, readonly: bool, copy: bool, stream: Any) -> Hit | Miss:
        session, until = self._session, sync.deadline(timeout)
        session.check()
        _check_choice("match", match, MATCHES)
        if isinstance(min_tokens, bool) or not isinstance(min_tokens, int) or min_tokens < 1:
            raise InvalidArgument(f"min_tokens={min_tokens!r} is not a whole number >= 1")
        wanted = key(tokens, roi=roi, namespace=namespace)
        for _ in range(GONE_OWNERS_MOST):
            try:
                return self._look_up(kind, wanted, match, min_tokens, timeout, until, readonly, copy, stream)
            except OwnerGone as gone:  # its entries go when it is buried; then there may be another, or none
                reason = gone.args[0]
                session.run(session.store.bury_dead, sync.deadline(INSERT_TIMEOUT_S))
        return Miss(reason)

    def _look_up(self, kind: LeaseKind, wanted: Key, match: str, min_tokens: int, timeout: float | None, until: int,
                 readonly: bool, copy: bool, stream: Any) -> Hit | Miss:
        session, store = self._session, self._session.store
        hit = Hit(session, self._transport, READONLY if readonly or copy else PRIVATE)

        def claim() -> Grant | None:
            return store.claim(wanted, match, min_tokens, kind, hit.hold)

        def look(place: Place | None) -> Grant | str | None:
            grant = store.or_bury(claim)
            if grant is None and (place is not None or timeout == 0) and store.bury_dead():
                grant = claim()
            if grant is not None:
                return grant
            reason = starvation.verdict(session.tables, place) if place is not None else ""
            return store.missed(reason) if reason or timeout == 0 else None

        def announce(place: Place) -> None:
            place.announce(WaitKind.ENTRY, until, tokens=wanted.data[wanted.token_start:], family=wanted.family)

        found = session.wait(look, until, announce)
        if not isinstance(found, Grant):
            return Miss(found or session.run(lambda: store.missed(f"no such entry within {timeout} s"), until))
        return self._handed_over(hit, found, copy, stream, until)

    def _handed_over(self, hit: Hit, grant: Grant, copy: bool, stream: Any, until: int) -> Hit:
        entries = self._session.tables.entries
        hit.fill(grant, self._session.store.meta_of(grant.slot).tobytes(), entries.sizes(grant.slot))
        if grant.region:
            try:
                self._devices.serve(hit, grant, stream, until)
            except BaseException:
                hit.release(returned=True)
                raise
        if copy:
            with self._devices.on_stream(hit, stream):
                hit.copy_out()
        hit.hold.outcome = Outcome.CONSUMED  # handed over: until here an interrupt gives the entry back
        if copy:
            hit.detach()
        return hit


@dataclass(frozen=True, slots=True)
class Stats:
    """One consistent look at a buffer. Bytes are bytes; `entries` counts by state name; counters since creation."""

    name: str
    capacity_bytes: int
    used_bytes: int
    free_bytes: int
    largest_free_bytes: int
    meta_capacity_bytes: int
    meta_used_bytes: int
    entries: dict[str, int]
    held_leases: int
    peers: int
    waiting: dict[str, int]
    counters: dict[str, int]
    paths: dict[str, int]
    """look-ups by path, those still held included; "staged_inserts": entries of device tensors that went to the host"""
    refused: dict[str, dict[str, str]]
    """for each path that was taken instead of a better one: why, the last time"""
    regions: list[RegionStats]


@dataclass(frozen=True, slots=True)
class RegionStats:
    """Device memory that a handle made known. `held_by`: pids of processes that have it mapped or hold entries in it,
    which is what a region that is "gone" waits for.
    """

    index: int
    state: str
    kind: str
    owner_pid: int
    device: str
    nbytes: int
    used_bytes: int
    held_by: list[int]


def _stats(tables: Tables) -> Stats:
    geometry, entries = tables.layout.geometry, tables.entries
    words, waits = tables.words, tables.waits
    open_peers = [peer for peer in tables.peers.attached() if not words[tables.peers.at(peer) + Peer.closed]]
    return Stats(
        name=tables.segment.name, capacity_bytes=geometry.arena_bytes, used_bytes=tables.arena.used_bytes,
        free_bytes=tables.arena.free_bytes, largest_free_bytes=tables.arena.largest_bytes,
        meta_capacity_bytes=geometry.meta_bytes, meta_used_bytes=tables.meta.used_bytes,
        entries={state.name.lower(): len(entries.slots(state)) for state in EntryState},
        held_leases=len(tables.leases.held()), peers=len(open_peers),
        waiting={kind.name.lower(): len(waits.waiting(kind)) for kind in WaitKind},
        counters={name: tables.counter(index) for index, name in enumerate(Counter.names)},
        paths=_paths(tables), refused=_refused(tables),
        regions=[_region(tables, index) for index in tables.regions.used()])


def _paths(tables: Tables) -> dict[str, int]:
    words, ladder = tables.words, tables.layout.ladder.word
    counts = {path.name.lower(): words[ladder + path - 1] for path in Path}
    for index in tables.leases.held():
        decision = decode_decision(words[tables.leases.at(index) + Lease.path])
        if decision is not None:
            counts[decision.path.name.lower()] += 1
    return {**counts, "staged_inserts": words[ladder + Ladder.staged_inserts]}


def _refused(tables: Tables) -> dict[str, dict[str, str]]:
    words, ladder = tables.words, tables.layout.ladder.word
    last = {path.name.lower(): words[ladder + Ladder.host_last + path - 1] for path in Path}
    for index in tables.leases.held():
        word = words[tables.leases.at(index) + Lease.path]
        decision = decode_decision(word)
        if decision is not None:
            last[decision.path.name.lower()] = word
    last["staged_inserts"] = words[ladder + Ladder.staged_inserts_last]
    decisions = {name: decode_decision(word) for name, word in last.items()}
    return {name: decision.describe() for name, decision in decisions.items() if decision and decision.refused}


def _region(tables: Tables, index: int) -> RegionStats:
    words, regions, info = tables.words, tables.regions, tables.regions.info(index)
    holders = set(regions.mapped_by(index))
    for lease in tables.leases.held():
        at = tables.leases.at(lease)
        entry = tables.entries.at(words[at + Lease.slot])
        lies_here = words[entry + Entry.region] == index + 1 or words[entry + Entry.region] == IN_PLACE and (
            words[entry + Entry.peer], words[entry + Entry.peer_generation]) == (info.peer, info.peer_generation)
        if words[entry] and lies_here:
            holders.add(words[at + Lease.peer])
    used = tables.arena_of(index + 1).used_bytes if info.kind == RegionKind.ARENA else info.nbytes
    return RegionStats(
        index=index, state=RegionState(regions.state(index)).name.lower(), kind=RegionKind(info.kind).name.lower(),
        owner_pid=words[tables.peers.at(info.peer) + Peer.pid], device=uuid_text(info.uuid), nbytes=info.nbytes,
        used_bytes=used, held_by=sorted({words[tables.peers.at(peer) + Peer.pid] for peer in holders}))


def _no_room(tables: Tables, request: Request, timeout: float | None, at_once: bool) -> ShmkvError:
    """What is short, in the words of create(): the error an insert raises. Nothing was changed."""
    tables.count(Counter.timeouts)
    meta, leases = tables.meta, tables.leases
    if not tables.entries.free_count():
        text, hint = f"all {tables.entries.count} slots hold entries", "raise slots= in shmkv.create()"
    elif not leases.n_free():
        text, hint = f"all {leases.count} leases are held", "release hits sooner, or raise leases= in shmkv.create()"
    elif not meta.fits(request.meta_bytes):
        text = (f"token ids and descriptors need {request.meta_bytes} B, {meta.free_bytes} B are free, "
                f"{meta.largest_bytes} B of them in one piece")
        hint = "raise meta_capacity= in shmkv.create()"
    else:
        arena = tables.arena_of(request.region)
        text = (f"the tensors need {request.run_bytes} B, {arena.free_bytes} B are free, "
                f"{arena.largest_bytes} B of them in one piece")
        knob = "device_capacity" if request.region else "capacity"
        hint = f'raise {knob}= in shmkv.create(), release hits sooner, or pass on_full="evict"'
    held = len(leases.held())
    text = f"no room: {text}; {held} leases hold entries, which cannot be evicted. Nothing was changed"
    if at_once:
        return ArenaFull(text, hint=f"{hint}; timeout= waits")
    return TimedOut(f"{text}, {timeout} s after the call", hint=f"{hint}; raise timeout=")


def _request(wanted: Key, placement: Placement, ttl: float | None) -> Request:
    if ttl is not None and not (isinstance(ttl, Real) and 0 < ttl < 1e9):
        raise InvalidArgument(f"ttl={ttl!r} is neither None (never) nor a number of seconds > 0")
    placed, run_bytes = placement.placed, -(-placement.payload_bytes // PAGE_BYTES) * PAGE_BYTES
    descriptors = tensors.encode(placed)
    roi_tokens = len(wanted.roi) if wanted.roi is not None else 0
    meta_bytes = meta_parts(len(wanted.data), roi_tokens, len(descriptors))[2]
    return Request(wanted, descriptors, len(placed), sum([tensor.nbytes for tensor in placed]), run_bytes,
                   max(1, round(ttl * 1e9)) if ttl is not None else 0, roi_tokens, meta_bytes, placement.region,
                   placement.staged, placement.in_place)


def _check_choice(what: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidArgument(f"{what}={value!r} is none of {', '.join(map(repr, choices))}")
