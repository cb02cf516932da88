"""What: the table of entries, the one truth of the buffer, and the legal moves of an entry's life.

Map: one record a slot (`layout`); an entry's key, roi and tensor descriptors lie in the meta arena, its tensors in
its run of the payload arena. A stack of free slots is derived.

States: FREE -> RESERVED (reserve, by a producer) -> READY (seal, visible) -> TAKEN (take, by one consumer) -> FREE
(consumed); TAKEN -> READY (redeliver); RESERVED, READY or TAKEN -> DROPPED while a lease still pins it, -> FREE when
none does. `MOVES` names each; any other move raises SegmentBroken and changes nothing.

Guarantees: the state is one word, stored after everything it promises. Slot, generation and sequence never repeat
together; `sequence` alone names an entry for ever.

Not guaranteed: who may make a move when (the caller holds the lock and the leases: `store`).

If a party dies here: before the state's store the move has not happened, after it it has; whatever is derived is
rebuilt from this table (`recovery`).

Sync points: entry-state.

Why not a queue of messages: readers look for a prefix, not for the next one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from enum import IntEnum

from .errors import SegmentBroken
from .layout import Entry, Header
from .segment import Segment


class EntryState(IntEnum):
    FREE = 0
    RESERVED = 1
    READY = 2
    TAKEN = 3
    DROPPED = 4


FREE, RESERVED, READY, TAKEN, DROPPED = (int(state) for state in EntryState)
MOVES: dict[tuple[int, int], str] = {
    (FREE, RESERVED): "reserve",
    (RESERVED, READY): "seal",
    (RESERVED, FREE): "abort",
    (RESERVED, DROPPED): "abort, its tensors still live",
    (READY, TAKEN): "take",
    (READY, FREE): "evict, expire, cancel, or its device memory is gone",
    (READY, DROPPED): "cancel, a reader or its producer's tensors still live",
    (TAKEN, FREE): "consume",
    (TAKEN, DROPPED): "consume, another lease still pins it; or its device memory is gone",
    (TAKEN, READY): "redeliver",
    (DROPPED, FREE): "let go of, the last lease is gone",
}


class Entries:
    def __init__(self, segment: Segment, capacity_of: Callable[[int], int]):
        """`capacity_of`: the bytes in which runs of an `Entry.region` may lie."""
        layout = segment.layout
        self._words, self._area = segment.words, layout.entries
        self._free = segment.memory[layout.free_slots.at:layout.free_slots.at + 4 * layout.entries.count].cast("I")
        self.count = layout.entries.count
        self._meta_at, self._capacity_of = layout.meta.at, capacity_of
        self._meta_bytes = layout.meta.nbytes

    def at(self, slot: int) -> int:
        """The word index of an entry's record."""
        if not 0 <= slot < self.count:
            raise SegmentBroken(f"slot {slot} is not one of {self.count}")
        return self._area.word + slot * self._area.stride

    def state(self, slot: int) -> int:
        return self._words[self.at(slot) + Entry.state]  # SYNC POINT entry-state (load)

    def move(self, slot: int, to: int) -> None:
        """Store a new state, if that move is legal."""
        at = self.at(slot)
        now = self._words[at + Entry.state]
        if (now, to) not in MOVES:
            raise SegmentBroken(f"slot {slot}: no move leads from state {now} to {to}")
        self._words[at + Entry.state] = to  # SYNC POINT entry-state (store)

    def peek_free(self) -> int | None:
        """The slot that the next reserve will take."""
        height = self._words[Header.free_slots]
        return self._free[height - 1] if height else None

    def pop_free(self) -> None:
        self._words[Header.free_slots] -= 1

    def push_free(self, slot: int) -> None:
        height = self._words[Header.free_slots]
        if height >= self.count:
            raise SegmentBroken("the stack of free slots is full")
        self._free[height] = slot
        self._words[Header.free_slots] = height + 1

    def column(self, field: int) -> memoryview:
        """One word of every record, indexed by slot."""
        first, stride = self._area.word, self._area.stride
        return self._words[first + field:first + self.count * stride:stride]

    def slots(self, *states: int) -> list[int]:
        """The slots in the given states (in any but FREE if none is given)."""
        column = enumerate(self.column(Entry.state))
        return [slot for slot, state in column if state in states] if states else [s for s, state in column if state]

    def rebuild_free(self) -> None:
        """Make the stack of free slots anew, lowest slot on top."""
        free = array("I", reversed(self.slots(FREE)))
        self._free[:len(free)] = memoryview(free)
        self._words[Header.free_slots] = len(free)

    def key_span(self, slot: int) -> tuple[int, int]:
        """Where the key lies: offset in the segment, and length, in bytes."""
        at = self._area.word + slot * self._area.stride
        start, nbytes = self._words[at + Entry.meta_at], self._words[at + Entry.key_bytes]
        if start + nbytes > self._meta_bytes:
            raise SegmentBroken(f"slot {slot}: key of {nbytes} B at {start} lies outside the meta arena")
        return self._meta_at + start, nbytes

    def region(self, slot: int) -> int:
        """Where the run lies: 0 the payload arena, r + 1 the arena of region r, IN_PLACE registered tensors."""
        return self._words[self.at(slot) + Entry.region]

    def sequence(self, slot: int) -> int:
        return self._words[self._area.word + slot * self._area.stride + Entry.sequence]

    def run(self, slot: int) -> tuple[int, int]:
        """The entry's run: offset in its arena, and length, in bytes."""
        at = self.at(slot)
        start, nbytes = self._words[at + Entry.run_at], self._words[at + Entry.run_bytes]
        if start + nbytes > self._capacity_of(self._words[at + Entry.region]):
            raise SegmentBroken(f"slot {slot}: run of {nbytes} B at {start} lies outside its arena")
        return start, nbytes

    def meta(self, slot: int) -> tuple[int, int]:
        """The entry's bytes in the meta arena: offset and length."""
        at = self.at(slot)
        start, nbytes = self._words[at + Entry.meta_at], self._words[at + Entry.meta_bytes]
        if start + nbytes > self._meta_bytes:
            raise SegmentBroken(f"slot {slot}: meta bytes {nbytes} at {start} lie outside the meta arena")
        return start, nbytes

    def free_count(self) -> int:
        return self._words[Header.free_slots]

    def sizes(self, slot: int) -> tuple[int, int, int]:
        """Key bytes, roi tokens and descriptor bytes: what `meta_parts` takes."""
        at = self.at(slot)
        words = self._words
        return words[at + Entry.key_bytes], words[at + Entry.roi_tokens], words[at + Entry.descriptor_bytes]

    def parts(self, slot: int) -> tuple[int, int, int]:
        """Offsets in the entry's meta bytes: of the roi part, of the descriptors, of the end."""
        return meta_parts(*self.sizes(slot))


def meta_parts(key_bytes: int, roi_tokens: int, descriptor_bytes: int) -> tuple[int, int, int]:
    """Key, then (with a roi) full tokens and mask, then descriptors on a word boundary."""
    descriptors_at = -(-(key_bytes + 5 * roi_tokens) // 8) * 8
    return key_bytes, descriptors_at, descriptors_at + descriptor_bytes
