"""What: whether a consumer that found nothing can still hope, decided from the words of the segment.

A full buffer and a consumer that waits for something which cannot enter would wait for each other for ever. Waits and
roles are words, so this is decidable. The consumer gets its miss early only if
- at least one producer is attached and every one of them waits for room, and no entry is RESERVED,
- every other consumer waits for something that was looked for since anything last became READY, and is not there
  (or, being a producer as well, waits for room),
- every held lease was taken by a thread that is itself waiting, and no TTL is running,
- and it has waited longest of all consumers: one miss at a time.
It also gets it early when producers were attached, and now all have closed or died and nobody is left who might yet
insert. With no producer attached so far it waits until its deadline.

States: none of its own.

Guarantees: nobody gets an early miss while any process can go on and change what it waits for.

Not guaranteed: that a blocked producer's other threads are not about to insert something smaller.

If a party dies here: nothing is written but the asking waiter's own record; a dead peer counts until it is buried,
which the caller does first.

Sync points: none (it runs inside the section of `store`).

Why not a timeout: it would be too short for a slow prefill and too long for a stuck one.
"""

from __future__ import annotations

from .layout import Counter, Header, Lease, Peer, Wait
from .peers import CONSUMER, PRODUCER, Place, WaitKind
from .tables import Tables

FULL = "the buffer is full: every producer waits for room and nobody else can make any"
ORPHANED = "every producer that was attached has closed or died"
EARLY = {FULL: Counter.starved, ORPHANED: Counter.orphaned}
"""the reasons of an early miss, and what counts them"""


def verdict(tables: Tables, place: Place) -> str:
    """Why the waiter at `place`, who just found nothing, should get its miss now; "" if somebody can still go on."""
    words = tables.words
    words[place.at + Wait.evaluated] = words[Header.ready_count] + 1
    roles = _open_roles(tables)
    if not any(role & PRODUCER for role in roles.values()):  # who has done nothing yet may become one
        return ORPHANED if words[Header.producers_seen] and all(roles.values()) else ""
    blocked = _blocked(tables)
    producers = {peer for peer, role in roles.items() if role & PRODUCER}
    stuck = (producers <= blocked and not words[Header.next_expiry_ns] and not tables.writing()
             and _consumers_wait_in_vain(tables, roles, place, blocked) and _holders_wait(tables))
    return FULL if stuck else ""


def _open_roles(tables: Tables) -> dict[int, int]:
    """The role bits of each peer whose handle is open."""
    words, records = tables.words, {peer: tables.peers.at(peer) for peer in tables.peers.attached()}
    return {peer: words[at + Peer.roles] for peer, at in records.items() if not words[at + Peer.closed]}


def _blocked(tables: Tables) -> set[int]:
    """The peers that wait for room which is not there (one whose room was made just needs to wake)."""
    words = tables.words
    return {words[at + Wait.peer] for at in tables.waits.waiting(WaitKind.ROOM)
            if not tables.has_room(words[at + Wait.wanted_bytes], words[at + Wait.wanted_meta_bytes])}


def _consumers_wait_in_vain(tables: Tables, roles: dict[int, int], place: Place, blocked: set[int]) -> bool:
    words, waiters = tables.words, tables.waits.waiting(WaitKind.ENTRY)
    if not waiters or waiters[0] != place.at:
        return False
    looked = words[Header.ready_count] + 1
    in_vain = {words[at + Wait.peer] for at in waiters if words[at + Wait.evaluated] == looked}
    return {peer for peer, role in roles.items() if role & CONSUMER} <= in_vain | blocked


def _holders_wait(tables: Tables) -> bool:
    words = tables.words
    waiting = {(words[at + Wait.peer], words[at + Wait.thread]) for at in tables.waits.waiting()}
    leases = [tables.leases.at(index) for index in tables.leases.held()]
    return all((words[at + Lease.peer], words[at + Lease.thread]) in waiting for at in leases)
