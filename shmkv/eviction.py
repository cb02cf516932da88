"""Whom to evict so that a new entry fits: decided before anything is changed, so that nobody is evicted in vain."""

from __future__ import annotations

from collections.abc import Iterable

from .entries import READY
from .layout import META_UNIT_BYTES, Entry
from .tables import Tables


def victims(tables: Tables, run_bytes: int, meta_bytes: int, region: int) -> list[int] | None:
    """The slots to evict for an entry of these sizes, longest unused first; None if not even all would do.

    While bytes of the run's arena are short, entries that lie elsewhere are spared.
    """
    if not tables.leases.n_free():
        return None
    entries, chosen = tables.entries, []
    holders, used_ns, regions = (entries.column(field) for field in (Entry.holders, Entry.used_ns, Entry.region))
    payload, meta = Gaps(tables.arena_of(region).holes() if run_bytes else ()), Gaps(tables.meta.holes())
    unused = sorted((slot for slot in entries.slots(READY) if not holders[slot]), key=used_ns.__getitem__)
    here, elsewhere = [], []
    for slot in unused:
        (here if regions[slot] == region else elsewhere).append(slot)
    for slot in here + elsewhere if payload.longest < run_bytes else unused:
        chosen.append(slot)
        if regions[slot] == region:
            payload.add(*entries.run(slot))
        start, nbytes = entries.meta(slot)
        meta.add(start, -(-nbytes // META_UNIT_BYTES) * META_UNIT_BYTES)
        if payload.longest >= run_bytes and meta.longest >= meta_bytes:
            return chosen
    return None


class Gaps:
    """What would be free if runs were given back: the stretches and the longest of them; changes nothing."""

    def __init__(self, holes: Iterable[tuple[int, int]]):
        self._length_at, self._start_to, self.longest = {}, {}, 0
        for start, nbytes in holes:
            self.add(start, nbytes)

    def add(self, start: int, nbytes: int) -> None:
        """Join a run (in bytes, whole units) with the stretches that it touches."""
        if not nbytes:
            return
        stop = start + nbytes
        start = self._start_to.pop(start, start)
        stop += self._length_at.pop(stop, 0)
        self._length_at[start], self._start_to[stop] = stop - start, start
        self.longest = max(self.longest, stop - start)
