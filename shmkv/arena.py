"""Allocator of runs: the free stretches (holes) of a memory, sorted, in fixed tables of words.

Counted in units of `unit` bytes. Laws: holes and used runs together are exactly the capacity; no two holes touch.
n used runs leave at most n + 1 holes, so tables of n_slots + 1 records always suffice.

Policy: where the run freed last is (warm in cache), else the smallest hole that fits. Each refusal changes nothing.
Memory of zeros is an arena with nothing free: `rebuild([])` makes all of it free. The callers exclude each other;
after a crash in the middle of a change, `rebuild` makes everything anew from the runs in use.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator

import numpy as np

from shmkv.errors import InvalidArgument, SegmentBroken

N_HOLES, FREE_UNITS, RECENT = 0, 1, 2  # the words from `at` on; RECENT is 0 for none, see _keep_warm
N_WORDS = 3
FEW_HOLES = 16  # scanned by a plain loop; above, NumPy's fixed cost pays off


class Arena:
    """The holes of `capacity` bytes: `starts[i]`, `lengths[i]` in units, ascending; counts at `words[at]`."""

    def __init__(self, words: memoryview, at: int, starts: memoryview, lengths: memoryview, capacity: int, unit: int):
        if unit < 1 or capacity < unit or capacity % unit:
            raise InvalidArgument(f"arena: capacity {capacity} B is not a whole number of units of {unit} B")
        self._words, self._at = words, at
        self._starts, self._lengths = starts, lengths
        self._n_units, self._unit = capacity // unit, unit

    def allocate(self, nbytes: int) -> int | None:
        """The offset in bytes of a run for `nbytes`, or None if no hole is long enough."""
        need = self._units(nbytes)
        hole, from_end = self._warm_hole(need)
        if hole is None:
            hole = self._best_fit(need)
            if hole is None:
                return None
        start, length, free = self._starts[hole], self._lengths[hole], self._words[self._at + FREE_UNITS]
        if start + length > self._n_units or free < length:
            raise SegmentBroken(f"arena: a hole of units {start}+{length}; {free} of {self._n_units} are free")
        self._words[self._at + FREE_UNITS] = free - need
        if length == need:
            self._close(hole)
            return start * self._unit
        self._lengths[hole] = length - need
        if from_end:
            return (start + length - need) * self._unit
        self._starts[hole] = start + need
        if self._words[self._at + RECENT] == start + 1:
            self._words[self._at + RECENT] = start + need + 1  # the rest of a warm run is as warm
        return start * self._unit

    def free(self, offset: int, nbytes: int) -> None:
        """Give a run back; it becomes one hole with the holes that it touches, and the first choice for the next."""
        start, length = offset // self._unit, self._units(nbytes)
        stop = start + length
        if offset % self._unit or not 0 <= start < stop <= self._n_units:
            raise SegmentBroken(f"arena: free {nbytes} B at {offset} is no run of 0-{self._n_units * self._unit} B")
        n, starts, lengths = self.n_holes, self._starts, self._lengths
        hole = bisect_right(starts, start, 0, n)  # the first hole behind the run
        left_stop = starts[hole - 1] + lengths[hole - 1] if hole else -1
        right_start = starts[hole] if hole < n else self._n_units + 1
        if left_stop > start or right_start < stop:
            raise SegmentBroken(f"arena: free {nbytes} B at {offset} overlaps free bytes: freed twice?")
        if left_stop == start and right_start == stop:
            lengths[hole - 1] += length + lengths[hole]
            self._close(hole)
        elif left_stop == start:
            lengths[hole - 1] += length
        elif right_start == stop:
            starts[hole] = start
            lengths[hole] += length
        else:
            self._open(hole, start, length)
        self._words[self._at + FREE_UNITS] += length
        self._keep_warm(start, left_stop == start and right_start == stop)

    def fits(self, nbytes: int) -> bool:
        """Whether `allocate(nbytes)` would succeed now."""
        return self._units(nbytes) * self._unit <= self.largest_bytes

    def rebuild(self, used: Iterable[tuple[int, int]]) -> None:
        """Make the holes exactly what these (offset, nbytes) leave free, whatever was there before."""
        holes = self._complement(used)
        if len(holes) > len(self._starts):
            raise SegmentBroken(f"arena: {len(holes)} holes in a table of {len(self._starts)}")
        for i, (start, length) in enumerate(holes):
            self._starts[i], self._lengths[i] = start, length
        self._words[self._at + N_HOLES] = len(holes)
        self._words[self._at + FREE_UNITS] = sum(length for _, length in holes)
        self._words[self._at + RECENT] = 0

    def problems(self, used: Iterable[tuple[int, int]]) -> Iterator[str]:
        """What contradicts the law that these runs and the holes are exactly the capacity."""
        try:
            found = [(offset // self._unit, nbytes // self._unit) for offset, nbytes in self.holes()]
            wanted = self._complement(used)
        except SegmentBroken as broken:
            yield f"{broken.args[0]}"
            return
        for start, length in sorted(set(found) ^ set(wanted)):
            claim = "is listed as free but is not a hole" if (start, length) in found else "is free but not listed"
            yield f"arena: {length * self._unit} B at {start * self._unit} {claim}"
        if found != sorted(set(found)):
            yield "arena: the holes are not in ascending order"
        free, counted = sum(length for _, length in wanted), self._words[self._at + FREE_UNITS]
        if free != counted:
            yield f"arena: {free} units are free, counted are {counted}"

    def holes(self) -> Iterator[tuple[int, int]]:
        """(offset, nbytes) of each hole, ascending."""
        for i in range(self.n_holes):
            yield self._starts[i] * self._unit, self._lengths[i] * self._unit

    @property
    def n_holes(self) -> int:
        n = self._words[self._at + N_HOLES]
        if n > len(self._starts):
            raise SegmentBroken(f"arena: {n} holes in a table of {len(self._starts)}")
        return n

    @property
    def free_bytes(self) -> int:
        return self._words[self._at + FREE_UNITS] * self._unit

    @property
    def used_bytes(self) -> int:
        return self._n_units * self._unit - self.free_bytes

    @property
    def largest_bytes(self) -> int:
        """The length of the longest hole."""
        n = self.n_holes
        if n > FEW_HOLES:
            return int(self._lengths_array(n).max()) * self._unit
        return max(self._lengths[:n], default=0) * self._unit

    # ------------------------------------------------------------ choosing a hole

    def _warm_hole(self, need: int) -> tuple[int | None, bool]:
        """(the hole in which the run freed last lies, whether it lies at that hole's end); (None, _) if too short."""
        recent = self._words[self._at + RECENT] - 1
        if recent < 0:
            return None, False
        hole = bisect_right(self._starts, recent, 0, self.n_holes) - 1
        if hole < 0 or recent >= self._starts[hole] + self._lengths[hole] or self._lengths[hole] < need:
            return None, False
        return hole, recent != self._starts[hole]

    def _keep_warm(self, start: int, amid: bool) -> None:
        """Name the run just freed: by its first unit, which tells at which end of its hole it lies.

        A run amid free neighbours is named by its hole's first unit: cutting it out would split the hole.
        """
        if amid:
            start = self._starts[bisect_right(self._starts, start, 0, self.n_holes) - 1]
        self._words[self._at + RECENT] = start + 1

    def _best_fit(self, need: int) -> int | None:
        """The shortest hole that fits, the first of equals."""
        n, lengths = self.n_holes, self._lengths
        if n > FEW_HOLES:
            # Unsigned: what is too short wraps around to a huge surplus.
            best = int((self._lengths_array(n) - np.uint64(need)).argmin())
            return best if lengths[best] >= need else None
        return min((i for i in range(n) if lengths[i] >= need), key=lengths.__getitem__, default=None)

    def _lengths_array(self, n: int) -> np.ndarray:
        return np.frombuffer(self._lengths, np.uint64, n)  # made anew: a lasting one would pin the mapping

    # ------------------------------------------------------------ the tables

    def _open(self, hole: int, start: int, length: int) -> None:
        n, starts, lengths = self.n_holes, self._starts, self._lengths
        if n == len(starts):
            raise SegmentBroken(f"arena: no record for hole {n + 1}: more runs are in use than slots exist")
        starts[hole + 1 : n + 1] = starts[hole:n]
        lengths[hole + 1 : n + 1] = lengths[hole:n]
        starts[hole], lengths[hole] = start, length
        self._words[self._at + N_HOLES] = n + 1

    def _close(self, hole: int) -> None:
        n, starts, lengths = self.n_holes, self._starts, self._lengths
        starts[hole : n - 1] = starts[hole + 1 : n]
        lengths[hole : n - 1] = lengths[hole + 1 : n]
        self._words[self._at + N_HOLES] = n - 1

    def _units(self, nbytes: int) -> int:
        if nbytes < 1:
            raise InvalidArgument(f"arena: a run of {nbytes} B")
        return -(-nbytes // self._unit)

    def _complement(self, used: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """(start, length) in units of all that these runs leave; runs that overlap or lie outside are named."""
        holes, at, last = [], 0, (0, 0)
        for offset, nbytes in sorted(used):
            start, length = offset // self._unit, -(-nbytes // self._unit)
            if offset % self._unit or length < 1 or start < 0 or start + length > self._n_units:
                raise SegmentBroken(f"arena: {nbytes} B at {offset} is no run of 0-{self._n_units * self._unit} B")
            if start < at:
                raise SegmentBroken(f"arena: {nbytes} B at {offset} overlaps {last[1]} B at {last[0]}")
            if start > at:
                holes.append((at, start - at))
            at, last = start + length, (offset, nbytes)
        if at < self._n_units:
            holes.append((at, self._n_units - at))
        return holes
