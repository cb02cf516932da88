"""What: whether a consumer that found nothing can still hope, decided from the words of the segment.

A full buffer and a consumer that waits for something which cannot enter would wait for each other for ever. Waits and
roles are words, so this is decidable. The consumer gets its miss early only if
- at least one producer waits for room that is not there, and no entry is RESERVED,
- everybody else who ever inserted or looked up waits too: for such room, or for an entry that was looked for since
  anything last became READY and is not there,
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
from .peers import PRODUCER, Place, WaitKind
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
    blocked, active = _blocked(tables), {peer for peer, role in roles.items() if role}
    stuck = (blocked and active <= blocked | _looking_in_vain(tables) and _is_oldest(tables, place)
             and not words[Header.next_expiry_ns] and not tables.writing() and _holders_wait(tables))
    return FULL if stuck else ""


def _open_roles(tables: Tables) -> dict[int, int]:
    """The role bits of each peer whose handle is open."""
    words, records = tables.words, {peer: tables.peers.at(peer) for peer in tables.peers.attached()}
    return {peer: words[at + Peer.roles] for peer, at in records.items() if not words[at + Peer.closed]}


def _blocked(tables: Tables) -> set[int]:
    """The peers that wait for room which is not there (one whose room was made just needs to wake)."""
    words = tables.words
    return {words[at + Wait.peer] for at in tables.waits.waiting(WaitKind.ROOM)
            if not tables.has_room(words[at + Wait.wanted_bytes], words[at + Wait.wanted_meta_bytes],
                                   words[at + Wait.wanted_region])}


def _looking_in_vain(tables: Tables) -> set[int]:
    """The peers that wait for an entry which was looked for since anything last became READY, and is not there."""
    words = tables.words
    looked = words[Header.ready_count] + 1
    waiters = tables.waits.waiting(WaitKind.ENTRY)
    return {words[at + Wait.peer] for at in waiters if words[at + Wait.evaluated] == looked}


def _is_oldest(tables: Tables, place: Place) -> bool:
    return tables.waits.waiting(WaitKind.ENTRY)[:1] == [place.at]


def _holders_wait(tables: Tables) -> bool:
    words = tables.words
    waiting = {(words[at + Wait.peer], words[at + Wait.thread]) for at in tables.waits.waiting()}
    leases = [tables.leases.at(index) for index in tables.leases.held()]
    return all((words[at + Lease.peer], words[at + Lease.thread]) in waiting for at in leases)
