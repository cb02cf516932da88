"""What: the table of regions: device memory in which payload lies, who owns it, and who has it mapped.

Map: one record a region (`layout`), device arenas first, registered tensors after them; for each region a word a peer
that says which generation of the region that peer has mapped.

States: FREE -> OPEN (claim, by the process whose memory it is) -> GONE (its owner closed or died: no new mapping, no
new entry) -> FREE (nobody has it mapped and no entry names it any more).

Guarantees: a region is claimed, marked and freed under the lock, its state stored last. A peer stores that it has a
region mapped before it maps and clears that after it unmapped, without the lock; so an owner that sees no such word of
a living peer may free the memory.

Not guaranteed: that the memory of a GONE region can still be read: it belonged to its owner.

If a party dies here: an owner's regions are marked GONE by the cleaner of its remains; a dead peer's mappings ended
with its process and are cleared with its record.

Sync points: region-open, region-mapped.

Why not a reference count a region: a dead peer's share of it could not be told from a living one's.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from .errors import SegmentBroken, TableFull
from .layout import Peer, Region
from .segment import Segment

HANDLE_BYTES, UUID_BYTES = 64, 16
IN_PLACE = (1 << 64) - 1
"""`Entry.region` of an entry whose tensors lie in its producer's registered regions; 0 is the host, r + 1 an arena"""


class RegionState(IntEnum):
    FREE = 0
    OPEN = 1
    GONE = 2


class RegionKind(IntEnum):
    ARENA = 1
    TENSOR = 2


class RegionInfo(NamedTuple):
    """One region as its record says. Sizes in bytes; `handle` and `event` are empty where there is none."""

    index: int
    generation: int
    kind: int
    peer: int
    peer_generation: int
    uuid: bytes
    nbytes: int
    start: int
    allocation: int
    handle: bytes
    event: bytes


class Regions:
    def __init__(self, segment: Segment):
        layout = segment.layout
        self._words, self._area, self._peers = segment.words, layout.regions, layout.peers
        self.count, self.n_arenas = layout.regions.count, layout.geometry.device_arenas
        self._mappings = layout.mappings.word
        self._n_peers = layout.peers.count

    def at(self, index: int) -> int:
        """The word index of a region's record."""
        if not 0 <= index < self.count:
            raise SegmentBroken(f"region {index} is not one of {self.count}")
        return self._area.word + index * self._area.stride

    def claim(self, info: RegionInfo) -> int:
        """Give a peer's memory a record; under the lock. `info.index` and `.generation` do not count."""
        arena = info.kind == RegionKind.ARENA
        for index in range(0, self.n_arenas) if arena else range(self.n_arenas, self.count):
            if self._words[self.at(index)] == RegionState.FREE:
                self._fill(self.at(index), info)
                return index
        limit = self.n_arenas if arena else self.count - self.n_arenas
        raise TableFull(f"all {limit} records for {'device arenas' if arena else 'registered tensors'} are taken",
                        hint=f"raise {'device_arenas' if arena else 'registrations'}= in shmkv.create()")

    def info(self, index: int) -> RegionInfo:
        words, at = self._words, self.at(index)
        if words[at + Region.peer] >= self._n_peers:
            raise SegmentBroken(f"region {index} is owned by peer {words[at + Region.peer]} of {self._n_peers}")
        handle = _bytes(words, at + Region.handle_0, 8) if words[at + Region.exported] else b""
        event = _bytes(words, at + Region.event_0, 8) if words[at + Region.published] else b""
        return RegionInfo(index, words[at + Region.generation], words[at + Region.kind], words[at + Region.peer],
                          words[at + Region.peer_generation], _bytes(words, at + Region.uuid_0, 2),
                          words[at + Region.nbytes], words[at + Region.start], words[at + Region.allocation],
                          handle, event)

    def state(self, index: int) -> int:
        return self._words[self.at(index)]  # SYNC POINT region-open (load)

    def used(self, *states: int) -> list[int]:
        """The regions in the given states (in any but FREE if none is given)."""
        first, stride = self._area.word, self._area.stride
        column = enumerate(self._words[first:first + self.count * stride:stride])
        return [index for index, state in column if (state in states if states else state)]

    def owned_by(self, peer: int, generation: int) -> list[int]:
        """The regions, GONE ones included, of a peer."""
        words, found = self._words, []
        for index in self.used():
            at = self.at(index)
            if (words[at + Region.peer], words[at + Region.peer_generation]) == (peer, generation):
                found.append(index)
        return found

    def mark_gone(self, index: int) -> None:
        self._words[self.at(index)] = RegionState.GONE

    def free(self, index: int) -> None:
        """Give the record back; under the lock, when the region is GONE and nothing names it."""
        self._words[self.at(index)] = RegionState.FREE

    # ------------------------------------------------------------ who has it mapped

    def set_mapped(self, index: int, peer: int, generation: int) -> None:
        """Note that this peer is about to map this generation of the region (0: has unmapped it); without the lock."""
        self._words[self._mapping(index, peer)] = generation  # SYNC POINT region-mapped (store)

    def mapped_by(self, index: int) -> list[int]:
        """The attached peers that have the region mapped."""
        words, generation = self._words, self._words[self.at(index) + Region.generation]
        first = self._mapping(index, 0)
        column = words[first:first + self._n_peers]  # SYNC POINT region-mapped (load)
        return [peer for peer, mapped in enumerate(column) if mapped == generation and self._is_attached(peer)]

    def clear_peer(self, peer: int) -> None:
        """Forget what a peer had mapped; under the lock, when its process is gone. Idempotent."""
        for index in self.used():
            if self._words[self._mapping(index, peer)]:
                self._words[self._mapping(index, peer)] = 0

    def _mapping(self, index: int, peer: int) -> int:
        return self._mappings + index * self._n_peers + peer

    def _is_attached(self, peer: int) -> bool:
        return self._words[self._peers.word + peer * self._peers.stride + Peer.state] != 0

    def _fill(self, at: int, info: RegionInfo) -> None:
        words = self._words
        words[at + Region.generation] += 1
        words[at + Region.kind], words[at + Region.peer] = info.kind, info.peer
        words[at + Region.peer_generation] = info.peer_generation
        words[at + Region.uuid_0:at + Region.uuid_0 + 2] = _words(info.uuid, UUID_BYTES)
        words[at + Region.nbytes], words[at + Region.start] = info.nbytes, info.start
        words[at + Region.allocation] = info.allocation
        words[at + Region.exported], words[at + Region.published] = bool(info.handle), bool(info.event)
        words[at + Region.handle_0:at + Region.handle_0 + 8] = _words(info.handle, HANDLE_BYTES)
        words[at + Region.event_0:at + Region.event_0 + 8] = _words(info.event, HANDLE_BYTES)
        words[at + Region.holes] = words[at + Region.free] = words[at + Region.recent] = 0
        words[at + Region.state] = RegionState.OPEN  # SYNC POINT region-open (store)


def _words(data: bytes, nbytes: int) -> memoryview:
    return memoryview(data.ljust(nbytes, b"\0")).cast("Q")


def _bytes(words: memoryview, at: int, n_words: int) -> bytes:
    return words[at:at + n_words].tobytes()
