"""All tables of one segment, made of the floor-4 parts; it moves nothing but counters."""

from __future__ import annotations

from .arena import Arena
from .entries import RESERVED, Entries
from .errors import SegmentBroken
from .journal import Journal
from .layout import META_UNIT_BYTES, PAGE_BYTES, Area, Header, Lease, Region
from .leases import LeaseKind, Leases
from .peers import Peers, Waits
from .prefix import PrefixOrder
from .regions import IN_PLACE, RegionKind, Regions
from .segment import Segment
from .signals import Signals


class Tables:
    def __init__(self, segment: Segment):
        layout, words, memory = segment.layout, segment.words, segment.memory
        self.segment, self.layout, self.words, self.memory = segment, layout, words, memory
        self.peers, self.waits = Peers(segment), Waits(segment)
        self.signals, self.journal = Signals(segment), Journal(segment)
        self.regions, self.leases = Regions(segment), Leases(segment)
        self.entries = Entries(segment, self._capacity_of)

        def array(area: Area, code: str) -> memoryview:
            return memory[area.at:area.at + area.count * (4 if code == "I" else 8)].cast(code)

        self._device_holes = (array(layout.device_hole_starts, "Q"), array(layout.device_hole_lengths, "Q"))
        self._device_arenas: dict[int, tuple[int, Arena]] = {}  # by region: its generation, and its arena
        self.arena = Arena(words, Header.arena_holes, array(layout.hole_starts, "Q"), array(layout.hole_lengths, "Q"),
                           layout.arena.nbytes, PAGE_BYTES)
        self.meta = Arena(words, Header.meta_holes, array(layout.meta_hole_starts, "Q"),
                          array(layout.meta_hole_lengths, "Q"), layout.meta.nbytes, META_UNIT_BYTES)
        self.order = PrefixOrder(words, Header.ranked, array(layout.order, "I"), array(layout.parents, "I"), memory,
                                 self.entries.key_span, self.entries.sequence)

    def arena_of(self, region: int) -> Arena:
        """The allocator of the runs of an `Entry.region`."""
        if region == 0:
            return self.arena
        at = self.regions.at(region - 1)
        generation = self.words[at + Region.generation]
        known = self._device_arenas.get(region)
        if known is None or known[0] != generation:
            known = self._device_arenas[region] = generation, self._device_arena(region - 1, at)
        return known[1]

    def device_arenas(self) -> list[int]:
        """The `Entry.region` of each device arena, those whose owner is gone included."""
        kinds = {index: self.words[self.regions.at(index) + Region.kind] for index in self.regions.used()}
        return [index + 1 for index, kind in kinds.items() if kind == RegionKind.ARENA]

    def _device_arena(self, index: int, at: int) -> Arena:
        if index >= self.regions.n_arenas:
            raise SegmentBroken(f"region {index} has no arena")
        n_holes, nbytes = self.layout.geometry.slots + 1, self.words[at + Region.nbytes]
        if not nbytes or nbytes % PAGE_BYTES:
            raise SegmentBroken(f"region {index} claims to have {nbytes} B")
        starts, lengths = (holes[index * n_holes:(index + 1) * n_holes] for holes in self._device_holes)
        return Arena(self.words, at + Region.holes, starts, lengths, nbytes, PAGE_BYTES)

    def _capacity_of(self, region: int) -> int:
        if region == 0:
            return self.layout.arena.nbytes
        return 0 if region == IN_PLACE else self.words[self.regions.at(region - 1) + Region.nbytes]

    def writing(self) -> list[int]:
        """The RESERVED entries: each is named by a WRITE lease, so the leases in use are all there is to look at."""
        words, leases = self.words, [self.leases.at(index) for index in self.leases.held()]
        slots = {words[at + Lease.slot] for at in leases if words[at + Lease.kind] == LeaseKind.WRITE}
        return [slot for slot in slots if self.entries.state(slot) == RESERVED]

    def has_room(self, run_bytes: int, meta_bytes: int, region: int) -> bool:
        """Whether an entry of these sizes could be reserved now."""
        return (self.entries.peek_free() is not None and self.leases.n_free() > 0
                and (not run_bytes or self.arena_of(region).fits(run_bytes)) and self.meta.fits(meta_bytes))

    def count(self, counter: int, by: int = 1) -> None:
        """Add to a counter; under the lock."""
        self.words[self.layout.counters.word + counter] += by

    def counter(self, counter: int) -> int:
        return self.words[self.layout.counters.word + counter]
