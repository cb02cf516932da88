"""What: all that happens under the lock: the critical section, written once, and every move of the buffer in it.

Map: see `layout`; this file owns the header's `mutation` word.

States: at rest (`mutation` even) -> under way (odd, stored before the first change) -> at rest. Whoever enters and
finds it odd, because its holder died or an exception left the block, rebuilds before going on (`recovery`).

Guarantees: order of stores: lease HELD before entry TAKEN or RESERVED, entry FREE before lease FREE, entry READY
after all its bytes; slot and run are free only when no held lease names the entry. An expected refusal (no room, no
such entry) is found before the first change. TTL runs only while nobody holds the entry.

Not guaranteed: that a release is collected before the next section.

If a party dies here: the kernel drops the lock; the next holder finds `mutation` odd, rebuilds, settles what was
released, and takes over the remains of the dead: RESERVED entries are freed, taken ones READY again in their old
sequence with their remaining TTL.

Sync points: mutation.

Why not finer locks: one section costs tens of microseconds and moves no payload; two locks need an order and a proof.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from . import eviction, recovery
from .descriptors import parse
from .entries import DROPPED, FREE, READY, RESERVED, TAKEN, meta_parts
from .errors import ClosedError, InvalidArgument, SegmentBroken, ShmkvError, TableFull
from .journal import EventKind
from .keys import Key
from .layout import Counter, Entry, Header, Ladder, Lease, Peer
from .leases import Hold, LeaseKind, Outcome
from .news import News, Ring
from .peers import CONSUMER, PRODUCER, Attachment
from .regions import IN_PLACE, RegionInfo, RegionKind, RegionState
from .signals import SignalKind
from .starvation import EARLY
from .tables import Tables

T = TypeVar("T")
HOST, N_PATHS = 1, Ladder.host_last
"""codes of `transport.Path`: the first, and how many there are"""
_NONSENSE = (IndexError, ValueError, OverflowError)
"""what words of hostile or torn bytes raise where they are used as an index, an offset, a count or an enum"""


class Request(NamedTuple):
    """What a producer wants to reserve."""

    key: Key
    descriptors: bytes
    n_tensors: int
    payload_bytes: int
    run_bytes: int
    ttl_ns: int
    roi_tokens: int
    meta_bytes: int
    region: int = 0
    """in whose arena the run is to lie, as in `Entry.region`"""
    staged: int = 0
    """why device tensors are copied into the payload arena, as in `Lease.path`"""
    in_place: tuple[tuple[int, int], ...] = ()
    """the registered regions, with their generations, that the tensors lie in"""


class Grant(NamedTuple):
    """What a claim (or a reservation) gives: where the entry lies and how much of it matched."""

    slot: int
    generation: int
    sequence: int
    matched_tokens: int
    n_tokens: int
    run_at: int
    run_bytes: int
    payload_bytes: int
    region: int


class Store:
    """The tables of a segment as one attached handle moves them. All methods but `section` want the lock."""

    def __init__(self, tables: Tables):
        self.tables, self.words = tables, tables.words
        self._entries, self._leases, self._order = tables.entries, tables.leases, tables.order
        self._memory, self._meta_base = tables.memory, tables.layout.meta.at
        self.me = Attachment.none(tables.segment)
        self.news = News(tables)
        self._left = False

    # ------------------------------------------------------------ the section

    def section(self, body: Callable[[], T]) -> tuple[T, list[Ring]]:
        """Run `body` on sound tables; returns its result and whom to ring once outside the lock."""
        if self._left:
            raise ClosedError("this handle was closed by another thread meanwhile")
        try:
            self._tidy()
            result = body()
            self._rest()
        except ShmkvError:
            raise
        except _NONSENSE as error:
            raise SegmentBroken(f"the segment's bytes make no sense: {type(error).__name__}: {error}") from error
        return result, self.news.take_rings()

    def _tidy(self) -> None:
        words = self.words
        if words[Header.mutation] & 1:  # SYNC POINT mutation (load)
            self.recover()
        if words[Header.releases_pending]:
            self.collect()
        expiry = words[Header.next_expiry_ns]
        if expiry and time.monotonic_ns() >= expiry:
            self.expire()

    def recover(self) -> None:
        """Rebuild what is derived, then settle the dead."""
        recovery.rebuild(self.tables)
        self.tables.count(Counter.recoveries)
        self.news.log_of(EventKind.RECOVERED, self._my_index())
        self.collect()
        self.bury_dead()
        self._rest()

    def collect(self) -> None:
        """Settle the leases that were released."""
        self._mutate()  # the hint that there are any is taken back now: cut short from here on, they are looked for
        for index in self._leases.released():
            self._settle(index, self.words[self._leases.at(index) + Lease.outcome])
        self._rest()

    def bury_dead(self) -> bool:
        """Take over the remains of peers that the kernel says are dead; whether there were any."""
        dead = self.tables.peers.dead()
        for peer in dead:
            self.bury(peer)
        self._rest()
        return bool(dead)

    def or_bury(self, attempt: Callable[[], T]) -> T:
        """Try; if a table is full, once more after the dead have given back theirs."""
        try:
            return attempt()
        except TableFull:
            if not self.bury_dead() and not self.reap_regions():
                raise
            return attempt()

    def bury(self, peer: int) -> None:
        """Settle all that a peer left: released leases first, held ones after, then its device memory; its record is
        freed last.
        """
        self._mutate()
        leases, words, peers = self._leases, self.words, self.tables.peers
        mine = [index for index in leases.held() if words[leases.at(index) + Lease.peer] == peer]
        for index in sorted(mine, key=leases.is_released, reverse=True):
            released = leases.is_released(index)
            self._settle(index, words[leases.at(index) + Lease.outcome] if released else Outcome.RETURNED)
        self.tables.regions.clear_peer(peer)
        self.end_regions(peer)
        self.tables.waits.clear_peer(peer)
        if not words[peers.at(peer) + Peer.closed]:
            self.tables.count(Counter.deaths)
            self.news.log_of(EventKind.DIED, peer)
        self.news.left(peer)
        peers.clear(peer)

    def adopt(self) -> bool:
        """Become the owner of the segment if its owner is no more; whether this handle is the owner now."""
        words, peers = self.words, self.tables.peers
        self.bury_dead()
        if words[Header.owner]:
            at = peers.at(words[Header.owner] - 1)
            if words[at + Peer.state] and words[at + Peer.generation] == words[Header.owner_generation]:
                return words[Header.owner] == self._my_index() + 1
        words[Header.owner_generation] = self.me.generation
        words[Header.owner] = self._my_index() + 1
        return True

    def leave(self) -> None:
        """End this handle's attachment; if leases of its views still need it, the end of the last one does that."""
        self.bury_dead()  # who leaves last leaves nothing of the dead behind
        self._mutate()
        peer, words = self._my_index(), self.words
        words[self.tables.peers.at(peer) + Peer.closed] = 1
        self.end_regions(peer)
        self.tables.waits.clear_peer(peer)
        self._left = True
        if any(words[self._leases.at(index) + Lease.peer] == peer for index in self._leases.held()):
            self.news.left(peer)
        else:
            self.bury(peer)

    def _mutate(self) -> None:
        mutation = self.words[Header.mutation]
        if not mutation & 1:
            self.words[Header.mutator] = self._my_index() + 1
            self.words[Header.mutation] = mutation + 1  # SYNC POINT mutation (store)

    def _rest(self) -> None:
        mutation = self.words[Header.mutation]
        if mutation & 1:
            self.words[Header.mutation] = mutation + 1

    # ------------------------------------------------------------ producing

    def reserve(self, request: Request, hold: Hold, evict: bool, scratch: bool = False) -> Grant | None:
        """Give the request a slot and a run and make `hold` its WRITE lease; None if there is no room now.

        `scratch`: the entry is for the peer's own use and never sealed; asking for it does not make a producer.
        """
        regions = self.tables.regions
        if any(regions.state(index) != RegionState.OPEN or regions.info(index).generation != generation
               for index, generation in request.in_place):
            raise InvalidArgument("a registered tensor was closed while its slices were being inserted",
                                  hint="keep it registered until insert() has returned")
        if not scratch:
            self._play(PRODUCER)
        if not self.tables.has_room(request.run_bytes, request.meta_bytes, request.region) and not (
                evict and self._evict_for(request)):
            return None
        self._mutate()
        if request.staged:
            ladder = self.tables.layout.ladder.word
            self.words[ladder + Ladder.staged_inserts] += 1
            self.words[ladder + Ladder.staged_inserts_last] = request.staged
        slot = self._entries.peek_free()
        at = self._entries.at(slot)
        generation = self.words[at + Entry.generation] + 1
        self.words[at + Entry.generation] = generation
        self._hold(hold, LeaseKind.WRITE, slot, generation)
        grant = self._fill(slot, at, generation, request)
        self._entries.move(slot, RESERVED)
        self._entries.pop_free()
        return grant

    def seal(self, grant: Grant, hold: Hold, key: Key, done: bool) -> bool:
        """Make the entry visible; False if it was cancelled meanwhile. `done`: no tensor of it lives on."""
        slot, words = grant.slot, self.words
        at, now = self._entries.at(slot), time.monotonic_ns()
        if words[at + Entry.cancelled]:
            self.abort(grant, hold, done, EventKind.CANCELLED)
            return False
        self._mutate()
        words[at + Entry.ready_ns] = words[at + Entry.used_ns] = now
        self._entries.move(slot, READY)
        if done:
            self._end_lease(hold.index)
        self._enter_order(slot, now)
        self.tables.count(Counter.inserts)
        self.tables.count(Counter.inserted_bytes, grant.payload_bytes)
        self.news.log(EventKind.READY, slot)
        self.news.ready(key.family)
        return True

    def abort(self, grant: Grant, hold: Hold, done: bool, event: EventKind = EventKind.ABORTED) -> None:
        """Give a RESERVED entry up; its bytes are free as soon as no tensor of it lives."""
        at = self._entries.at(grant.slot)
        if (self.words[at], self.words[at + Entry.generation]) != (RESERVED, grant.generation):
            return
        self._mutate()
        self.tables.count(Counter.aborted)
        self.news.log(event, grant.slot)
        if done:
            self._let_go(grant.slot, self.words[at + Entry.holders] - 1)
            self._end_lease(hold.index)
        else:
            self._entries.move(grant.slot, DROPPED)

    def _fill(self, slot: int, at: int, generation: int, request: Request) -> Grant:
        words, tables, key, now = self.words, self.tables, request.key, time.monotonic_ns()
        run_at = tables.arena_of(request.region).allocate(request.run_bytes) if request.run_bytes else 0
        meta_at = tables.meta.allocate(request.meta_bytes)
        sequence = words[Header.next_sequence]
        words[Header.next_sequence] = sequence + 1
        words[at + Entry.sequence] = sequence
        words[at + Entry.peer], words[at + Entry.peer_generation] = self.me.index, self.me.generation
        words[at + Entry.meta_at], words[at + Entry.meta_bytes] = meta_at, request.meta_bytes
        words[at + Entry.key_bytes], words[at + Entry.token_start] = len(key.data), key.token_start
        words[at + Entry.roi_tokens], words[at + Entry.descriptor_bytes] = request.roi_tokens, len(request.descriptors)
        words[at + Entry.run_at], words[at + Entry.run_bytes] = run_at, request.run_bytes
        words[at + Entry.payload_bytes], words[at + Entry.n_tensors] = request.payload_bytes, request.n_tensors
        words[at + Entry.created_ns], words[at + Entry.ready_ns], words[at + Entry.used_ns] = now, 0, now
        words[at + Entry.ttl_ns] = words[at + Entry.ttl_left_ns] = request.ttl_ns
        words[at + Entry.expires_ns], words[at + Entry.holders], words[at + Entry.cancelled] = 0, 1, 0
        words[at + Entry.fingerprint], words[at + Entry.region] = key.fingerprint, request.region
        self._write_meta(self._meta_base + meta_at, request)
        return Grant(slot, generation, sequence, 0, key.n_tokens, run_at, request.run_bytes, request.payload_bytes,
                     request.region)

    def _write_meta(self, at: int, request: Request) -> None:
        key, memory = request.key, self._memory
        roi_at, descriptors_at, end = meta_parts(len(key.data), request.roi_tokens, len(request.descriptors))
        memory[at:at + roi_at] = key.data
        if key.roi is not None:
            mask_at = roi_at + 4 * request.roi_tokens
            memory[at + roi_at:at + mask_at] = key.tokens
            memory[at + mask_at:at + mask_at + request.roi_tokens] = key.roi
        memory[at + descriptors_at:at + end] = request.descriptors

    # ------------------------------------------------------------ consuming

    def claim(self, key: Key, match: str, min_tokens: int, kind: LeaseKind, hold: Hold) -> Grant | None:
        """Find an entry and make `hold` a lease on it; None if there is none now."""
        self._play(CONSUMER)
        found = self._order.find(key.data, match, 4 * min_tokens, key.token_start)
        if found is None:
            return None
        self._leases.check_free()
        slot, matched_bytes = found
        self._mutate()
        words, at, now = self.words, self._entries.at(slot), time.monotonic_ns()
        self._hold(hold, kind, slot, words[at + Entry.generation])
        words[at + Entry.holders] += 1
        words[at + Entry.used_ns] = now
        self._pause_ttl(at, now)
        if kind == LeaseKind.TAKE:
            words[at + Entry.taker] = hold.index + 1
            self._take(slot)
        else:
            self.tables.count(Counter.shares)
        if not words[at + Entry.region]:
            words[self._leases.at(hold.index) + Lease.path] = HOST
        self.tables.count(Counter.taken_bytes, words[at + Entry.payload_bytes])
        return Grant(slot, words[at + Entry.generation], words[at + Entry.sequence],
                     (matched_bytes - key.token_start) // 4,
                     (words[at + Entry.key_bytes] - words[at + Entry.token_start]) // 4,
                     *self._entries.run(slot), words[at + Entry.payload_bytes], words[at + Entry.region])

    def missed(self, reason: str) -> str:
        """Count a look-up that found nothing; returns the reason, worded if there is none."""
        self.tables.count(Counter.misses)
        if reason in EARLY:
            self.tables.count(EARLY[reason])
        return reason or "no such entry"

    def meta_of(self, slot: int) -> memoryview:
        """The entry's key, roi and descriptors; valid while a lease names it."""
        start, nbytes = self._entries.meta(slot)
        return self._memory[self._meta_base + start:self._meta_base + start + nbytes]

    def cancel(self, key: Key) -> int:
        """Drop every entry of exactly this key: ready ones now, reserved ones instead of sealing; returns how many."""
        n_cancelled = 0
        while (found := self._order.find(key.data, "exact", 0, key.token_start)) is not None:
            self._mutate()
            self.news.tell_producer(found[0], SignalKind.CANCELLED)
            self._remove_ready(found[0], EventKind.CANCELLED, Counter.cancelled)
            n_cancelled += 1
        for slot in self.tables.writing():
            start, nbytes = self._entries.key_span(slot)
            at = self._entries.at(slot)
            if not self.words[at + Entry.cancelled] and self._memory[start:start + nbytes] == key.data:
                self._mutate()
                self.words[at + Entry.cancelled] = 1
                self.tables.count(Counter.cancelled)
                self.news.tell_producer(slot, SignalKind.CANCELLED)
                n_cancelled += 1
        return n_cancelled

    def expire(self) -> None:
        """Free the entries whose TTL is over, and find out when the next one's will be."""
        now, words = time.monotonic_ns(), self.words
        self._mutate()
        column = self._entries.column(Entry.expires_ns)
        for slot in [slot for slot, expires in enumerate(column) if 0 < expires <= now]:
            if words[self._entries.at(slot)] == READY:
                self._remove_ready(slot, EventKind.EXPIRED, Counter.expired)
        words[Header.next_expiry_ns] = min((expires for expires in column if expires), default=0)
        self._rest()

    def _take(self, slot: int) -> None:
        self._entries.move(slot, TAKEN)
        self._order.remove(slot)
        self.tables.count(Counter.takes)
        self.news.log(EventKind.TAKEN, slot)
        self.news.tell_producer(slot, SignalKind.TAKEN)

    def _evict_for(self, request: Request) -> bool:
        """Evict least recently used entries that nobody holds until the request fits; False, and none, if it cannot."""
        victims = eviction.victims(self.tables, request.run_bytes, request.meta_bytes, request.region)
        for slot in victims or ():
            self._mutate()
            self._remove_ready(slot, EventKind.EVICTED, Counter.evicted)
        return victims is not None

    # ------------------------------------------------------------ device memory

    def open_region(self, info: RegionInfo) -> RegionInfo:
        """Make device memory of this peer known to the others."""
        mine = info._replace(peer=self.me.index, peer_generation=self.me.generation)
        self._mutate()
        index = self.tables.regions.claim(mine)
        if mine.kind == RegionKind.ARENA:
            self.tables.arena_of(index + 1).rebuild([])
        return self.tables.regions.info(index)

    def close_region(self, index: int, generation: int) -> list[int]:
        """No new entry and no new mapping of this peer's registered tensor from now on; or, if entries still lie in
        it, their sequences.
        """
        lying = [self._entries.sequence(slot) for slot in self._lying_with(self.me.index, self.me.generation)
                 if self._names(slot, index + 1)]
        info = self.tables.regions.info(index)
        if not lying and (info.peer, info.peer_generation, info.generation) == (
                self.me.index, self.me.generation, generation):
            self._mutate()
            self.tables.regions.mark_gone(index)
            self.reap_regions()
        return lying

    def _names(self, slot: int, region: int) -> bool:
        """Whether a tensor of this entry lies in place there."""
        if self._entries.region(slot) != IN_PLACE:
            return False
        _, start, end = self._entries.parts(slot)
        return any(tensor.region == region for tensor in parse(self.meta_of(slot)[start:end], 0))

    def pin(self, slot: int, generation: int, hold: Hold) -> bool:
        """Make `hold` a lease on an entry that others write; False if it is gone. Its run is not reused meanwhile."""
        at = self._entries.at(slot)
        if (self.words[at], self.words[at + Entry.generation]) != (RESERVED, generation):
            return False
        self._leases.check_free()
        self._mutate()
        self._hold(hold, LeaseKind.SHARE, slot, generation)
        self.words[at + Entry.holders] += 1
        return True

    def reap_regions(self) -> bool:
        """Free the records of regions that are gone, which nobody has mapped and no entry names; whether any was."""
        regions, words, reaped = self.tables.regions, self.words, False
        for index in regions.used(RegionState.GONE):
            info = regions.info(index)
            at = self.tables.peers.at(info.peer)
            unregistered = info.kind == RegionKind.TENSOR and not words[at + Peer.closed] and (
                words[at + Peer.state], words[at + Peer.generation]) == (1, info.peer_generation)
            if not regions.mapped_by(index) and (
                    unregistered or not self._lying_with(info.peer, info.peer_generation)):
                self._mutate()
                regions.free(index)
                reaped = True
        return reaped

    def end_regions(self, peer: int) -> None:
        """The device memory of a peer goes: its regions are GONE, and so are the entries that lie there."""
        self._mutate()
        words, generation = self.words, self.words[self.tables.peers.at(peer) + Peer.generation]
        gone = self.tables.regions.owned_by(peer, generation)
        for slot in self._lying_with(peer, generation) if gone else ():
            state = words[self._entries.at(slot)]
            if state == READY:
                self._remove_ready(slot, EventKind.LOST, Counter.lost)
            elif state == TAKEN:
                self.tables.count(Counter.lost)
                self._entries.move(slot, DROPPED)
        for index in gone:  # last: an entry that can be found lies in a region that is OPEN
            self.tables.regions.mark_gone(index)
        self.reap_regions()

    def _lying_with(self, peer: int, generation: int) -> list[int]:
        """The slots whose tensors lie in this peer's device memory."""
        words, regions, found = self.words, self._entries.column(Entry.region), []
        for slot, region in enumerate(regions):
            at = self._entries.at(slot)
            if region and words[at] != FREE and (words[at + Entry.peer], words[at + Entry.peer_generation]) == (
                    peer, generation):
                found.append(slot)
        return found

    # ------------------------------------------------------------ letting go

    def _settle(self, index: int, outcome: int) -> None:
        """Do what the end of a lease asks of its entry, then free its record."""
        self._mutate()
        words, at = self.words, self._leases.at(index)
        slot, kind = words[at + Lease.slot], words[at + Lease.kind]
        entry = self._entries.at(slot)
        if words[entry] == FREE or words[entry + Entry.generation] != words[at + Lease.entry_generation]:
            return self._leases.free(index)  # the claim was cut short, or the entry was settled before
        state, holders = words[entry], words[entry + Entry.holders] - 1
        words[entry + Entry.holders] = holders
        self._note_path(words[at + Lease.path])
        if kind == LeaseKind.WRITE and state == RESERVED:
            if words[entry + Entry.n_tensors]:  # a scratch entry was never meant to be sealed
                self.tables.count(Counter.aborted)
                self.news.log(EventKind.ABORTED, slot)
            self._let_go(slot, holders)
        elif state == TAKEN and words[entry + Entry.taker] == index + 1:
            self._end_taking(slot, holders, outcome)
        elif state == DROPPED and not holders:
            self._free(slot)
        elif state == READY and not holders:
            self._run_ttl(entry, time.monotonic_ns())
        self._leases.free(index)

    def _note_path(self, word: int) -> None:
        """Count how a look-up was served."""
        path, ladder = word & 0xFF, self.tables.layout.ladder.word
        if 0 < path <= N_PATHS:
            self.words[ladder + path - 1] += 1
            self.words[ladder + Ladder.host_last + path - 1] = word

    def _end_taking(self, slot: int, holders: int, outcome: int) -> None:
        if outcome == Outcome.CONSUMED:
            self.tables.count(Counter.consumed)
            self.news.log(EventKind.CONSUMED, slot)
            return self._let_go(slot, holders)
        self.tables.count(Counter.redelivered)
        self.news.log(EventKind.RETURNED, slot)
        self._entries.move(slot, READY)
        self._enter_order(slot, time.monotonic_ns())
        self.news.ready(0)

    def _remove_ready(self, slot: int, event: EventKind, counter: int) -> None:
        self.tables.count(counter)
        self.news.log(event, slot)
        self._order.remove(slot)
        self._let_go(slot, self.words[self._entries.at(slot) + Entry.holders])

    def _let_go(self, slot: int, holders: int) -> None:
        if holders:
            self._entries.move(slot, DROPPED)
        else:
            self._free(slot)

    def _free(self, slot: int) -> None:
        (run_at, run_bytes), region = self._entries.run(slot), self._entries.region(slot)
        self.news.tell_producer(slot, SignalKind.RELEASED)
        self._entries.move(slot, FREE)
        self.words[self._entries.at(slot) + Entry.expires_ns] = 0
        if run_bytes:
            self.tables.arena_of(region).free(run_at, run_bytes)
        self.tables.meta.free(*self._entries.meta(slot))
        self._entries.push_free(slot)
        self.news.room()
        if region:
            self.reap_regions()

    def _hold(self, hold: Hold, kind: LeaseKind, slot: int, entry_generation: int) -> None:
        self._leases.hold(hold, kind, slot, entry_generation, self.me.index, self.me.generation)

    def _end_lease(self, index: int) -> None:
        """Free the record of a lease that no view needs, without waiting for its release."""
        at = self._leases.at(index)
        entry = self._entries.at(self.words[at + Lease.slot])
        if self.words[entry] != FREE:
            self.words[entry + Entry.holders] -= 1
        self._leases.free(index)

    def _enter_order(self, slot: int, now: int) -> None:
        self._order.add(slot)
        at = self._entries.at(slot)
        if not self.words[at + Entry.holders]:
            self._run_ttl(at, now)

    def _run_ttl(self, at: int, now: int) -> None:
        words = self.words
        if words[at + Entry.ttl_ns]:
            expires = words[at + Entry.expires_ns] = now + words[at + Entry.ttl_left_ns]
            words[Header.next_expiry_ns] = min(words[Header.next_expiry_ns] or expires, expires)

    def _pause_ttl(self, at: int, now: int) -> None:
        expires = self.words[at + Entry.expires_ns]
        if expires:
            self.words[at + Entry.ttl_left_ns] = max(0, expires - now)
            self.words[at + Entry.expires_ns] = 0

    def _play(self, role: int) -> None:
        """Note that this peer inserts, or looks up."""
        at = self.tables.peers.at(self._my_index()) + Peer.roles
        roles = self.words[at]
        if not roles & role:
            self.words[at] = roles | role
            if role == PRODUCER:
                self.words[Header.producers_seen] += 1

    def enter(self, me: Attachment) -> None:
        """From now on act as this peer."""
        self.me = me
        self.news.sender = me.index

    def _my_index(self) -> int:
        return self.me.index
