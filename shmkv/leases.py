"""What: the lease records: who may touch which entry's bytes, ended by one store from anywhere.

Map: one record a lease (`layout`); a stack of free records is derived.

States: FREE (`held` = 0) -> HELD (`held` = its generation, stored last, under the lock) -> RELEASED (`released` =
the same, stored by the holder without the lock) -> FREE (collected under the lock, after the entry was settled).
Kinds: WRITE (a producer's reserved entry and its tensors), TAKE (drop-selected), SHARE (selected). Outcomes: CONSUMED,
RETURNED (never handed over: an abort, an interrupt between claim and return).

Guarantees: ending a lease is one aligned store after a fence, so a finaliser may make it anywhere, also in the midst
of a critical section of its own thread; a record is collected only under the lock and only where both generations
agree; a run is recycled only when no held record names its entry.

Not guaranteed: when a release is noticed: by the next holder of the lock, or by the waiter whose bell is rung.

If a party dies here: a HELD record of a dead peer is settled by the cleaner: a released one as its holder said, any
other as if it had been returned.

Sync points: lease-held, lease-released.

Why not a reader count or mask in the entry: a dead reader's count cannot be told from a living one's.
"""

from __future__ import annotations

import threading
import time
from array import array
from enum import IntEnum

from .errors import SegmentBroken, TableFull
from .layout import Header, Lease
from .segment import Segment
from .sync import fence


class LeaseKind(IntEnum):
    WRITE = 1
    TAKE = 2
    SHARE = 3


class Outcome(IntEnum):
    NONE = 0
    CONSUMED = 1
    RETURNED = 2


class Hold:
    """A process's own side of one lease: made before the claim, so that no interrupt can lose it."""

    __slots__ = ("index", "generation", "outcome", "__weakref__")

    def __init__(self) -> None:
        self.index, self.generation, self.outcome = -1, 0, Outcome.RETURNED


class Leases:
    def __init__(self, segment: Segment):
        layout = segment.layout
        self._words, self._area = segment.words, layout.leases
        self._free = segment.memory[layout.free_leases.at:layout.free_leases.at + 4 * layout.leases.count].cast("I")
        self.count = layout.leases.count

    def at(self, index: int) -> int:
        return self._area.word + index * self._area.stride

    def n_free(self) -> int:
        return self._words[Header.free_leases]

    def check_free(self) -> None:
        """Raise TableFull if no record is free."""
        if not self.n_free():
            raise TableFull(f"all {self.count} lease records are held",
                            hint="release hits sooner, or raise leases= in shmkv.create()")

    def hold(self, hold: Hold, kind: int, slot: int, entry_generation: int, peer: int, peer_generation: int) -> None:
        """Make `hold` a lease on an entry; under the lock, with `n_free()` > 0."""
        words = self._words
        height = words[Header.free_leases]
        index = self._free[height - 1]
        at = self._area.word + index * self._area.stride
        generation = words[at + Lease.generation] + 1
        words[at + Lease.generation] = generation
        words[at + Lease.released] = words[at + Lease.outcome] = 0
        words[at + Lease.path] = words[at + Lease.request] = words[at + Lease.scratch] = 0
        words[at + Lease.kind], words[at + Lease.slot] = kind, slot
        words[at + Lease.entry_generation] = entry_generation
        words[at + Lease.peer], words[at + Lease.peer_generation] = peer, peer_generation
        words[at + Lease.thread], words[at + Lease.since_ns] = threading.get_native_id(), time.monotonic_ns()
        hold.generation, hold.index = generation, index
        words[at + Lease.held] = generation  # SYNC POINT lease-held (store)
        words[Header.free_leases] = height - 1
        if index >= words[Header.leases_high]:
            words[Header.leases_high] = index + 1

    def release(self, hold: Hold) -> bool:
        """End a lease, without the lock; whether it was held until now. Called again, it makes up for an interrupt."""
        words = self._words
        if hold.index < 0:
            return False
        at = self._area.word + hold.index * self._area.stride
        if words[at + Lease.held] != hold.generation:
            return False
        first = words[at + Lease.released] != hold.generation
        if first:
            words[at + Lease.outcome] = hold.outcome
            fence()
            words[at + Lease.released] = hold.generation  # SYNC POINT lease-released (store)
        words[Header.releases_pending] = 1
        fence()
        return first

    def released(self) -> list[int]:
        """The records to collect; under the lock."""
        words = self._words
        words[Header.releases_pending] = 0
        fence()
        return [index for index in self.held() if self.is_released(index)]

    def is_released(self, index: int) -> bool:
        at = self.at(index)
        return self._words[at + Lease.held] == self._words[at + Lease.released]  # SYNC POINT lease-released (load)

    def held(self) -> list[int]:
        """The records that are held, released ones included."""
        high = self._words[Header.leases_high]
        if high > self.count:
            raise SegmentBroken(f"{high} leases in use of {self.count}")
        heads = self._words[self._area.word:self._area.word + high * self._area.stride:self._area.stride]
        return [index for index, held in enumerate(heads) if held]  # SYNC POINT lease-held (load)

    def free(self, index: int) -> None:
        """Collect a record, after its entry was settled; under the lock."""
        words, height = self._words, self._words[Header.free_leases]
        if height >= self.count:
            raise SegmentBroken("the stack of free leases is full")
        words[self.at(index) + Lease.held] = 0
        self._free[height] = index
        words[Header.free_leases] = height + 1
        while words[Header.leases_high] and not words[self.at(words[Header.leases_high] - 1)]:
            words[Header.leases_high] -= 1

    def rebuild_free(self) -> None:
        """Make the stack of free records anew, lowest on top."""
        self._words[Header.leases_high] = self.count
        held = self.held()
        free = array("I", sorted(set(range(self.count)).difference(held), reverse=True))
        self._free[:len(free)] = memoryview(free)
        self._words[Header.free_leases], self._words[Header.leases_high] = len(free), max(held, default=-1) + 1
