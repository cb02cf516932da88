"""All tables of one segment, made of the floor-4 parts; no behaviour of its own."""

from __future__ import annotations

from .arena import Arena
from .entries import Entries
from .journal import Journal
from .layout import META_UNIT_BYTES, PAGE_BYTES, Area, Header
from .leases import Leases
from .peers import Peers, Waits
from .prefix import PrefixOrder
from .segment import Segment
from .signals import Signals


class Tables:
    def __init__(self, segment: Segment):
        layout, words, memory = segment.layout, segment.words, segment.memory
        self.segment, self.layout, self.words, self.memory = segment, layout, words, memory
        self.peers, self.waits = Peers(segment), Waits(segment)
        self.signals, self.journal = Signals(segment), Journal(segment)
        self.entries, self.leases = Entries(segment), Leases(segment)

        def array(area: Area, code: str) -> memoryview:
            return memory[area.at:area.at + area.count * (4 if code == "I" else 8)].cast(code)

        self.arena = Arena(words, Header.arena_holes, array(layout.hole_starts, "Q"), array(layout.hole_lengths, "Q"),
                           layout.arena.nbytes, PAGE_BYTES)
        self.meta = Arena(words, Header.meta_holes, array(layout.meta_hole_starts, "Q"),
                          array(layout.meta_hole_lengths, "Q"), layout.meta.nbytes, META_UNIT_BYTES)
        self.order = PrefixOrder(words, Header.ranked, array(layout.order, "I"), array(layout.parents, "I"), memory,
                                 self.entries.key_span, self.entries.sequence)

    def count(self, counter: int, by: int = 1) -> None:
        """Add to a counter; under the lock."""
        self.words[self.layout.counters.word + counter] += by

    def counter(self, counter: int) -> int:
        return self.words[self.layout.counters.word + counter]
