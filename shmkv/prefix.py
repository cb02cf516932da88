"""One sorted order of the entries by key; the longest prefix by bisection.

A key is a byte string of whole 4-byte units: namespace bytes, then uint32 tokens. The order is by (key as raw bytes,
sequence). Raw bytes give no numeric order of tokens and need not: every total order in which the extensions of a key
follow it without a gap answers the same questions, and raw bytes are compared by memcmp.

Two facts carry every look-up. The longest common prefix with *any* entry is that with one of the two neighbours of
the insertion point. And the longest entry that is a prefix of the query is the left neighbour or one of its parents.

`parents[slot]` is the longest other entry that is a prefix of the slot's key, where an older equal key counts:
child -> newest of an equal group -> ... -> oldest -> a shorter key. It is kept right by each `add` and `remove`.

All state lies in the memory handed in; `_hint` alone is private, and it is verified at each use. The callers exclude
each other. After a crash in the middle of `add` or `remove`, `rebuild` makes everything anew. A reader without the
lock may see any bytes at all: it ends after log n steps, stays inside the bounds and may raise `SegmentBroken`.
"""

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from shmkv.errors import InvalidArgument, SegmentBroken

NONE = 0xFFFFFFFF  # no parent
NEWEST = 1 << 64  # a sequence above all: bisects behind the equal keys; -1 bisects in front of them
WINDOW = 256  # bytes looked at first, and the width to which a difference is narrowed while bisecting
LONGEST_STEP = 1 << 16  # bytes compared in one step, so that narrowing re-reads little
SHORT_RANGE = 32  # entries re-pointed by a plain loop; above, NumPy's fixed cost pays off


class PrefixOrder:
    """The sorted order. `words[at]` counts its entries, `order[rank]` is a slot, `parents[slot]` a slot or NONE."""

    def __init__(
        self,
        words: memoryview,
        at: int,
        order: memoryview,
        parents: memoryview,
        memory: memoryview,
        spans: Callable[[int], tuple[int, int]],
        sequence_of: Callable[[int], int],
    ):
        self._words, self._at = words, at
        self._order, self._parents = order, parents
        self._memory, self._spans, self._sequence_of = memory, spans, sequence_of
        self._hint = 0  # the rank found last: a drop_select removes next what it has just found

    def find(self, query: bytes, match: str, min_bytes: int, start: int) -> tuple[int, int] | None:
        """The best entry for `query` as (slot, matched bytes), or None. `start` is the length of the namespace part.

        "exact": the entry whose key equals the query. "prefix": the longest entry that is a prefix of the query.
        "overlap": an entry that has the longest common prefix with the query, in whole units. All match more than
        `start` and at least `start + min_bytes` bytes. Among equal keys the oldest.

        If several entries share that longest prefix, "overlap" takes the one that is nothing but it; if there is
        none, the older of the two neighbours of the query's place, which need not be the oldest of all that share it.
        """
        if match not in ("exact", "prefix", "overlap"):
            raise InvalidArgument(f'match is "exact", "prefix" or "overlap", not {match!r}')
        least = start + max(min_bytes, 1)
        rank, left, right = self._bisect(query, -1)
        if self._equals(rank, query):
            return (self._slot(rank), len(query)) if len(query) >= least else None
        if match == "exact":
            return None
        left = self._common(rank - 1, query, left)
        if match == "prefix":
            found = self._longest_prefix(query, rank, left, least)
        else:
            found = self._longest_overlap(query, rank, left & ~3, self._common(rank, query, right) & ~3, least)
        return found and self._verified(found, query)

    def near(self, query: bytes, start: int) -> tuple[int | None, int, int | None, int]:
        """For explaining a miss: the neighbours as (slot before, bytes in common, slot at or behind, bytes in common).

        A neighbour of another namespace (it shares fewer than `start` bytes) is given as (None, 0).
        """
        rank, left, right = self._bisect(query, -1)
        left, right = self._common(rank - 1, query, left), self._common(rank, query, right)
        before = (self._order[rank - 1], left) if rank and left >= start else (None, 0)
        behind = (self._order[rank], right) if rank < len(self) and right >= start else (None, 0)
        return *before, *behind

    def add(self, slot: int) -> None:
        """Put the slot in by its key and sequence, and make it the parent of its extensions."""
        order, parents, n = self._order, self._parents, len(self)
        key = self._key(slot)
        rank, left, right = self._bisect(key, self._sequence_of(slot))
        if n == len(order) or (rank < n and order[rank] == slot):
            raise SegmentBroken(f"prefix order: slot {slot} cannot be added to {n} of {len(order)} entries")
        parent = self._parent(key, rank, self._common(rank - 1, key, left))
        if rank < n and self._common(rank, key, right) == len(key):
            self._repoint(rank, key, parent, slot)
        order[rank + 1 : n + 1] = order[rank:n]
        order[rank] = slot
        parents[slot] = parent
        self._words[self._at] = n + 1

    def remove(self, slot: int) -> None:
        """Take the slot out; its children go to its parent."""
        order, parents, n = self._order, self._parents, len(self)
        rank = self._rank(slot)
        if rank + 1 < n and parents[self._slot(rank + 1)] == slot:
            self._repoint(rank + 1, self._key(slot), slot, parents[slot])
        order[rank : n - 1] = order[rank + 1 : n]
        self._words[self._at] = n - 1

    def rebuild(self, slots: Iterable[int]) -> None:
        """Make the order of exactly these slots, whatever was there before. Holds a copy of all keys meanwhile."""
        keys = {slot: self._key(slot) for slot in slots}
        if len(keys) > len(self._order):
            raise SegmentBroken(f"prefix order: {len(keys)} entries in a table of {len(self._order)}")
        ranked = sorted(keys, key=self._sequence_of)
        ranked.sort(key=keys.__getitem__)  # stable: equal keys stay in their sequence
        for rank, (slot, _, parent) in enumerate(_with_parents((slot, keys[slot]) for slot in ranked)):
            self._order[rank] = slot
            self._parents[slot] = parent
        self._words[self._at] = len(ranked)

    def __len__(self) -> int:
        n = self._words[self._at]
        if n > len(self._order):
            raise SegmentBroken(f"prefix order: {n} entries in a table of {len(self._order)}")
        return n

    def ranked(self) -> Iterator[int]:
        """The slots in their order."""
        for rank in range(len(self)):
            yield self._order[rank]

    def problems(self, slots: Iterable[int]) -> Iterator[str]:
        """What contradicts the claim that exactly these slots are here, in order, each with its parent."""
        try:
            ranked = list(self.ranked())
            seen, wanted = set(ranked), set(slots)
            if len(seen) < len(ranked):
                yield f"prefix order: {len(ranked) - len(seen)} slots are listed more than once"
            for slot in sorted(seen ^ wanted):
                yield f"prefix order: slot {slot} is {'not an entry' if slot in seen else 'missing'}"
            previous = None
            for slot, key, parent in _with_parents((slot, self._key(slot)) for slot in ranked):
                place = key, self._sequence_of(slot)
                if previous and not previous < place:
                    yield f"prefix order: slot {slot} stands behind a slot that it should precede"
                if self._parents[slot] != parent:
                    yield f"prefix order: slot {slot} has parent {self._parents[slot]}, not {parent}"
                previous = place
        except SegmentBroken as broken:
            yield f"{broken.args[0]}"

    # ------------------------------------------------------------ bisection

    def _bisect(self, query: bytes, sequence: int) -> tuple[int, int, int]:
        """(rank where (query, sequence) belongs, bytes surely shared with the entry before, with the one there).

        All entries between two entries that share `lo` bytes with the query share them too, so each comparison
        starts there. The lengths carried are lower bounds, up to a WINDOW short: that saves finding the very byte.
        """
        order, spans, memory = self._order, self._spans, self._memory
        n_slots, n_bytes, window = len(self._parents), len(memory), WINDOW
        low, high = 0, len(self)
        left = right = 0
        while low < high:
            middle = (low + high) >> 1
            slot = order[middle]
            if slot >= n_slots:
                raise SegmentBroken(f"prefix order: slot {slot} of {n_slots}")
            at, nbytes = spans(slot)
            end = at + nbytes
            if end > n_bytes:
                raise SegmentBroken(f"prefix order: the key of slot {slot} ends at {end} of {n_bytes} B")
            lo = left if left < right else right
            stop = at + lo + window
            theirs = memory[at + lo : stop if stop < end else end].tobytes()
            ours = query[lo : lo + window]
            if theirs == ours:
                lo = self._agreed(query, lo + len(ours), at, nbytes, left if left > right else right)
                theirs = memory[at + lo : min(at + lo + window, end)].tobytes()
                ours = query[lo : lo + window]
            if theirs < ours or (theirs == ours and self._sequence_of(slot) < sequence):
                low, left = middle + 1, lo
            else:
                high, right = middle, lo
        return low, left, right

    def _agreed(self, query: bytes, lo: int, at: int, nbytes: int, probe: int = 0) -> int:
        """How far the key at `at` surely agrees with the query, given that it does up to `lo`: at most a WINDOW short.

        `probe` is where the other neighbour parts from the query, which is the likeliest place to reach.
        """
        memory, same = self._memory, query.startswith  # memcmp in place: neither side is copied
        end = nbytes if nbytes < len(query) else len(query)
        step = max(2 * WINDOW, min(probe - lo, LONGEST_STEP))
        while lo < end:
            hi = min(lo + step, end)
            if not same(memory[at + lo : at + hi], lo):
                break
            lo, step = hi, min(8 * step, LONGEST_STEP)
        else:
            return lo
        while hi - lo > WINDOW:
            middle = (lo + hi) >> 1
            if same(memory[at + lo : at + middle], lo):
                lo = middle
            else:
                hi = middle
        return lo

    def _common(self, rank: int, query: bytes, lo: int) -> int:
        """Bytes that the query and the entry of this rank have in common, given that they agree up to `lo`."""
        if not 0 <= rank < len(self):
            return 0
        at, nbytes = self._span(self._order[rank])
        while True:
            theirs = self._memory[at + lo : at + min(lo + WINDOW, nbytes)].tobytes()
            ours = query[lo : lo + WINDOW]
            if theirs != ours or not ours:
                return lo + _common_bytes(ours, theirs)
            lo = self._agreed(query, lo + len(ours), at, nbytes)

    def _equals(self, rank: int, query: bytes) -> bool:
        """Whether the entry of this rank is the query: all bytes are compared, whatever the bisection says."""
        if rank >= len(self):
            return False
        at, nbytes = self._span(self._order[rank])
        return nbytes == len(query) and query.startswith(self._memory[at : at + nbytes])

    # ------------------------------------------------------------ choosing

    def _longest_prefix(self, query: bytes, rank: int, left: int, least: int) -> tuple[int, int] | None:
        """The oldest of the longest entries before `rank` that are a prefix of the query, if it has `least` bytes."""
        if left < least:
            return None
        slot = self._parent(query, rank, left)
        if slot == NONE:
            return None
        length, parent = self._span(slot)[1], self._parents[slot]
        if length < least:
            return None
        if parent != NONE and self._span(parent)[1] == length:  # one of a group of equals
            rank, _, _ = self._bisect(query[:length], -1)
            slot = self._slot(rank) if rank < len(self) else slot
        return slot, length

    def _longest_overlap(self, query: bytes, rank: int, left: int, right: int, least: int) -> tuple[int, int] | None:
        """The overlap rule, where the neighbours share `left` and `right` bytes with the query."""
        longest = max(left, right)
        if longest < least:
            return None
        exact = self._longest_prefix(query, rank, left, longest)  # it would stand before the query
        if exact:
            return exact
        ranks = [at for at, shared in ((rank - 1, left), (rank, right)) if shared == longest]
        return self._slot(min(ranks, key=lambda at: self._sequence_of(self._order[at]))), longest

    def _parent(self, query: bytes, rank: int, left: int) -> int:
        """The newest of the longest entries that stand before `rank` and are a prefix of the query, or NONE.

        The entry before `rank` shares `left` bytes with the query, so its prefixes up to there are the query's too.
        """
        if not rank:
            return NONE
        before = self._slot(rank - 1)
        if self._span(before)[1] <= left:
            return before
        parent = self._parents[before]
        if parent == NONE or self._span(parent)[1] <= left:
            return parent
        # Its parent is too long as well; more such may follow, a whole chain or group. Cut the query instead: the first
        # entry that goes beyond the cut has no prefix of its own there, so its parent is the one that we look for.
        rank, _, _ = self._bisect(query[:left], NEWEST)
        return self._parents[self._slot(rank)] if rank < len(self) else NONE

    def _verified(self, found: tuple[int, int], query: bytes) -> tuple[int, int]:
        """Nobody gets an entry for tokens that it does not hold, even if the order were wrong."""
        slot, matched = found
        at, nbytes = self._span(slot)
        if matched > nbytes or not query.startswith(self._memory[at : at + matched]):
            raise SegmentBroken(f"prefix order: slot {slot} does not share {matched} B with the query")
        return found

    # ------------------------------------------------------------ keeping parents right

    def _repoint(self, rank: int, key: bytes, old: int, new: int) -> None:
        """From `rank` on stand extensions of `key`: give those whose parent is `old` the parent `new`."""
        order, parents = self._order, self._parents
        first = order[rank]
        if self._span(first)[1] == len(key):  # an equal key: it is the parent of whatever follows
            parents[first] = new
            return
        above = _above_extensions(key)
        stop = self._bisect(above, -1)[0] if above else len(self)
        if stop - rank > SHORT_RANGE:
            slots, table = np.frombuffer(order[rank:stop], np.uint32), np.frombuffer(parents, np.uint32)
            table[slots[table[slots] == old]] = new
            return
        for slot in order[rank:stop]:
            if parents[slot] == old:
                parents[slot] = new

    # ------------------------------------------------------------ reading with bounds

    def _span(self, slot: int) -> tuple[int, int]:
        if slot >= len(self._parents):
            raise SegmentBroken(f"prefix order: slot {slot} of {len(self._parents)}")
        at, nbytes = self._spans(slot)
        if at + nbytes > len(self._memory):
            raise SegmentBroken(f"prefix order: the key of slot {slot} ends at {at + nbytes} of {len(self._memory)} B")
        return at, nbytes

    def _key(self, slot: int) -> bytes:
        at, nbytes = self._span(slot)
        return bytes(self._memory[at : at + nbytes])

    def _slot(self, rank: int) -> int:
        slot = self._order[rank]
        if slot >= len(self._parents):
            raise SegmentBroken(f"prefix order: slot {slot} of {len(self._parents)}")
        self._hint = rank
        return slot

    def _rank(self, slot: int) -> int:
        """The rank of a slot that is in the order."""
        order, n, rank = self._order, len(self), self._hint
        if rank < n and order[rank] == slot:
            return rank
        rank, _, _ = self._bisect(self._key(slot), self._sequence_of(slot))
        if rank < n and order[rank] == slot:
            return rank
        raise SegmentBroken(f"prefix order: slot {slot} is not where its key belongs")


def _above_extensions(key: bytes) -> bytes:
    """The smallest byte string above all that start with `key`; empty if there is none."""
    cut = key.rstrip(b"\xff")
    return cut and cut[:-1] + bytes([cut[-1] + 1])


def _common_bytes(ours: bytes, theirs: bytes) -> int:
    """The length of the longest common prefix: little-endian, the first byte that differs holds the lowest bit set."""
    size = min(len(ours), len(theirs))
    differ = int.from_bytes(ours[:size], "little") ^ int.from_bytes(theirs[:size], "little")
    return (differ & -differ).bit_length() - 1 >> 3 if differ else size


def _with_parents(ranked: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes, int]]:
    """(slot, key, parent) of sorted (slot, key): the stack holds the keys that may still be extended."""
    stack: list[tuple[int, bytes]] = []
    for slot, key in ranked:
        while stack and not key.startswith(stack[-1][1]):
            stack.pop()
        yield slot, key, stack[-1][0] if stack else NONE
        stack.append((slot, key))
