"""What: everything derived, made anew from the truth; and the check that truth and derived state agree.

Map: truth is the states of entries, leases, peers and waits. Derived are: the prefix order, both arenas' holes, the
stacks of free slots and leases, the holder counts, the next expiry.

States: sound, or half changed; `rebuild` leads from the second to the first.

Guarantees: `rebuild` is idempotent; killed anywhere, it runs again from the start. It moves an entry only where its
state promises a lease that no longer exists. `problems` changes nothing.

Not guaranteed: that hostile bytes can be repaired; they raise SegmentBroken.

If a party dies here: the mutation word stays odd and the next holder of the lock rebuilds.

Sync points: none (it runs inside the section of `store`).

Why not undo logs: the tables are small, and what is rebuilt needs no second protocol to be right.
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Iterator

from .entries import DROPPED, FREE, READY, RESERVED, TAKEN
from .errors import SegmentBroken
from .layout import Entry, Header, Lease
from .leases import LeaseKind
from .regions import IN_PLACE, RegionState
from .tables import Tables


def rebuild(tables: Tables) -> None:
    """Repair the derived state; under the lock, with the mutation word odd."""
    entries, words = tables.entries, tables.words
    tables.leases.rebuild_free()
    holders, writers, takers = _holders(tables)
    for slot in entries.slots():
        at, state = entries.at(slot), words[entries.at(slot)]
        if not RESERVED <= state <= DROPPED:
            raise SegmentBroken(f"slot {slot} has state {state}")
        words[at + Entry.holders] = holders[slot]
        if state in (RESERVED, DROPPED) and not (writers[slot] if state == RESERVED else holders[slot]):
            words[at + Entry.state] = DROPPED if holders[slot] else FREE
        elif state == TAKEN and not takers[slot]:
            words[at + Entry.state] = READY
    tables.arena.rebuild(_runs(tables, 0))
    for region in tables.device_arenas():
        tables.arena_of(region).rebuild(_runs(tables, region))
    tables.meta.rebuild(_metas(tables))
    tables.order.rebuild(entries.slots(READY))
    entries.rebuild_free()
    _rebuild_expiry(tables)


def problems(tables: Tables) -> Iterator[str]:
    """Each way in which the segment contradicts itself; under the lock, at rest."""
    words, entries = tables.words, tables.entries
    if words[Header.mutation] & 1:
        yield "mutation: a mutation was left half done"
    holders, writers, takers = _holders(tables)
    for slot in entries.slots():
        yield from _entry_problems(tables, slot, holders[slot], writers[slot], takers[slot])
    yield from (f"arena: {text}" for text in tables.arena.problems(_runs(tables, 0)))
    yield from _region_problems(tables)
    yield from (f"meta arena: {text}" for text in tables.meta.problems(_metas(tables)))
    yield from (f"order: {text}" for text in tables.order.problems(entries.slots(READY)))
    yield from _stack_problems(tables)
    yield from _expiry_problems(tables)
    yield from _lease_problems(tables)


def _holders(tables: Tables) -> tuple[Tally[int], Tally[int], Tally[int]]:
    """How many held leases name each slot: all of them, those that write, those that took."""
    words, all_, writers, takers = tables.words, Tally[int](), Tally[int](), Tally[int]()
    for index in tables.leases.held():
        at = tables.leases.at(index)
        slot, kind = words[at + Lease.slot], words[at + Lease.kind]
        entry = tables.entries.at(slot)
        if words[entry] == FREE or words[entry + Entry.generation] != words[at + Lease.entry_generation]:
            continue
        all_[slot] += 1
        writers[slot] += kind == LeaseKind.WRITE
        takers[slot] += words[entry + Entry.taker] == index + 1
    return all_, writers, takers


def _runs(tables: Tables, region: int) -> list[tuple[int, int]]:
    entries, regions = tables.entries, tables.entries.column(Entry.region)
    runs = (entries.run(slot) for slot in entries.slots() if regions[slot] == region)
    return [(start, nbytes) for start, nbytes in runs if nbytes]


def _metas(tables: Tables) -> list[tuple[int, int]]:
    return [tables.entries.meta(slot) for slot in tables.entries.slots()]


def _rebuild_expiry(tables: Tables) -> None:
    words, now, soonest = tables.words, time.monotonic_ns(), 0
    for slot in tables.entries.slots():
        at = tables.entries.at(slot)
        running = words[at] == READY and not words[at + Entry.holders] and words[at + Entry.ttl_ns]
        if running and not words[at + Entry.expires_ns]:
            words[at + Entry.expires_ns] = now + words[at + Entry.ttl_left_ns]
        elif not running and words[at + Entry.expires_ns]:
            words[at + Entry.ttl_left_ns] = max(0, words[at + Entry.expires_ns] - now)
            words[at + Entry.expires_ns] = 0
        expires = words[at + Entry.expires_ns]
        soonest = min(soonest or expires, expires or soonest)
    words[Header.next_expiry_ns] = soonest


def _entry_problems(tables: Tables, slot: int, holders: int, writers: int, takers: int) -> Iterator[str]:
    words, at = tables.words, tables.entries.at(slot)
    state = words[at]
    if not RESERVED <= state <= DROPPED:
        yield f"slot {slot}: unknown state {state}"
    if words[at + Entry.holders] != holders:
        yield f"slot {slot}: counts {words[at + Entry.holders]} holders, {holders} leases name it"
    if state == RESERVED and not writers:
        yield f"slot {slot}: RESERVED, but nobody writes it"
    if state == TAKEN and takers != 1:
        yield f"slot {slot}: TAKEN by {takers}"
    if state == DROPPED and not holders:
        yield f"slot {slot}: DROPPED, but no lease pins it"
    if not 0 < words[at + Entry.sequence] < words[Header.next_sequence]:
        yield f"slot {slot}: sequence {words[at + Entry.sequence]} was never given out"
    if words[at + Entry.payload_bytes] > words[at + Entry.run_bytes] and words[at + Entry.region] != IN_PLACE:
        yield f"slot {slot}: {words[at + Entry.payload_bytes]} B of tensors in a run of {words[at + Entry.run_bytes]} B"
    if tables.entries.parts(slot)[2] > words[at + Entry.meta_bytes]:
        yield f"slot {slot}: key and descriptors exceed their {words[at + Entry.meta_bytes]} B"


def _region_problems(tables: Tables) -> Iterator[str]:
    words, regions, arenas = tables.words, tables.regions, tables.device_arenas()
    for region in arenas:
        yield from (f"region {region - 1}: {text}"
                    for text in tables.arena_of(region).problems(_runs(tables, region)))
    for index in regions.used(RegionState.OPEN):
        owner = regions.info(index).peer
        if owner >= tables.peers.count or words[tables.peers.at(owner)] == 0:
            yield f"region {index}: owned by peer {owner}, who is not attached"
    for slot in tables.entries.slots():
        region = tables.entries.region(slot)
        if region not in (0, IN_PLACE, *arenas):
            yield f"slot {slot}: lies in region {region - 1}, which is no arena"


def _stack_problems(tables: Tables) -> Iterator[str]:
    n_free = len(tables.entries.slots(FREE))
    if tables.words[Header.free_slots] != n_free:
        yield f"free slots: {tables.words[Header.free_slots]} on the stack, {n_free} in the table"
    n_held = len(tables.leases.held())
    if tables.leases.n_free() + n_held != tables.leases.count:
        yield f"leases: {tables.leases.n_free()} free + {n_held} held != {tables.leases.count}"


def _expiry_problems(tables: Tables) -> Iterator[str]:
    column, next_expiry = tables.entries.column(Entry.expires_ns), tables.words[Header.next_expiry_ns]
    running = [column[slot] for slot in tables.entries.slots(READY) if column[slot]]
    if running and not 0 < next_expiry <= min(running):
        yield f"expiry: next at {next_expiry}, but an entry expires at {min(running)}"


def _lease_problems(tables: Tables) -> Iterator[str]:
    words = tables.words
    for index in tables.leases.held():
        at = tables.leases.at(index)
        peer = words[at + Lease.peer]
        if peer >= tables.peers.count or words[tables.peers.at(peer)] == 0:
            yield f"lease {index}: held by peer {peer}, who is not attached"
