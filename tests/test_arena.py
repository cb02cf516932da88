"""The arena hands out runs that never overlap, and gets all of its capacity back."""

import random
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shmkv.arena import FEW_HOLES, FREE_UNITS, N_HOLES, N_WORDS, RECENT, Arena
from shmkv.errors import InvalidArgument, SegmentBroken

AT = 2
UNITS = pytest.mark.parametrize("unit", [64, 4096])


class Memory:
    """The words and tables of an arena, to look at and to corrupt."""

    def __init__(self, capacity, unit, max_holes=64):
        self.words = memoryview(bytearray(8 * (AT + N_WORDS))).cast("Q")
        self.starts = memoryview(bytearray(8 * max_holes)).cast("Q")
        self.lengths = memoryview(bytearray(8 * max_holes)).cast("Q")
        self.capacity, self.unit = capacity, unit

    def arena(self):
        return Arena(self.words, AT, self.starts, self.lengths, self.capacity, self.unit)


def empty_arena(n_units=100, unit=64, max_holes=64):
    arena = Memory(n_units * unit, unit, max_holes).arena()
    arena.rebuild([])
    return arena


def rounded(nbytes, unit):
    return -(-nbytes // unit) * unit


class ArenaMachine(RuleBasedStateMachine):
    """Free + used = capacity, no two runs share a byte, and allocation fails only if no hole is long enough."""

    @initialize(unit=st.sampled_from([64, 4096]), n_units=st.sampled_from([1, 7, 60]))
    def create(self, unit, n_units):
        self.memory = Memory(n_units * unit, unit)
        self.arena, self.used = self.memory.arena(), {}
        self.arena.rebuild([])

    @rule(data=st.data(), whole_units=st.booleans())
    def allocate(self, data, whole_units):
        most = self.memory.capacity // 4 if data.draw(st.booleans()) else self.memory.capacity
        nbytes = data.draw(st.integers(1, max(1, most)))
        nbytes = rounded(nbytes, self.memory.unit) if whole_units else nbytes
        longest, fits = max((n for _, n in self.gaps()), default=0), self.arena.fits(nbytes)
        offset = self.arena.allocate(nbytes)
        assert (offset is not None) == fits == (nbytes <= longest)
        if offset is not None:
            self.used[offset] = nbytes

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def free(self, data):
        offset = data.draw(st.sampled_from(sorted(self.used)))
        nbytes = self.used.pop(offset)
        self.arena.free(offset, nbytes)
        with pytest.raises(SegmentBroken):
            self.arena.free(offset, nbytes)

    @rule(data=st.data())
    def free_what_is_not_used(self, data):
        holes = list(self.arena.holes())
        if holes:
            offset, nbytes = data.draw(st.sampled_from(holes))
            first, stop, end = (n // self.memory.unit for n in (offset, offset + nbytes, self.memory.capacity))
            start = data.draw(st.integers(max(0, first - 2), stop - 1))
            length = data.draw(st.integers(max(first, start) + 1, end + 2)) - start
            with pytest.raises(SegmentBroken):
                self.arena.free(start * self.memory.unit, length * self.memory.unit)

    @rule()
    def rebuild_after_a_crash(self):
        self.memory.words[AT + N_HOLES] = self.memory.words[AT + RECENT] = 5
        self.arena.rebuild(self.used.items())

    def gaps(self):
        at = 0
        for offset, nbytes in [*sorted(self.used.items()), (self.memory.capacity, 1)]:
            if offset > at:
                yield at, offset - at
            at = offset + rounded(nbytes, self.memory.unit)

    @invariant()
    def holes_are_the_complement(self):
        assert list(self.arena.problems(self.used.items())) == []
        assert list(self.arena.holes()) == list(self.gaps())
        used = sum(rounded(nbytes, self.memory.unit) for nbytes in self.used.values())
        assert (self.arena.used_bytes, self.arena.free_bytes) == (used, self.memory.capacity - used)
        assert self.arena.largest_bytes == max((n for _, n in self.gaps()), default=0)


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


@UNITS
@pytest.mark.parametrize("n_units", [300, 1 << 18])
def test_runs_never_overlap_and_all_of_the_capacity_comes_back(unit, n_units):
    rng, capacity = random.Random(n_units), n_units * unit
    arena, owner, used = empty_arena(n_units, unit, 20_001), bytearray(n_units), {}
    for _ in range(20_000):
        nbytes = rng.choice([rng.randint(1, capacity), rng.randint(1, 40 * unit)])
        offset = arena.allocate(nbytes) if rng.random() < 0.55 else None
        if offset is not None:
            first, last = offset // unit, (offset + rounded(nbytes, unit)) // unit
            assert last <= n_units and not owner.count(1, first, last), "overlap"
            owner[first:last] = b"\1" * (last - first)
            used[offset] = nbytes
        elif used:
            offset = rng.choice(list(used)[-50:])
            nbytes = used.pop(offset)
            arena.free(offset, nbytes)
            first, last = offset // unit, (offset + rounded(nbytes, unit)) // unit
            owner[first:last] = bytes(last - first)
    assert list(arena.problems(used.items())) == []
    assert arena.used_bytes == owner.count(1) * unit
    for offset, nbytes in used.items():
        arena.free(offset, nbytes)
    assert arena.allocate(capacity) == 0


@UNITS
def test_capacities_up_to_2_48_bytes(unit):
    capacity = 1 << 48
    arena = empty_arena(capacity // unit, unit)
    assert arena.allocate(capacity + 1) is None
    half = arena.allocate(capacity // 2)
    rest = arena.allocate(capacity // 2 - unit + 1)
    assert sorted((half, rest)) == [0, capacity // 2] and arena.free_bytes == 0
    arena.free(half, capacity // 2)
    arena.free(rest, capacity // 2)
    assert arena.allocate(capacity) == 0


def in_use(arena, n, nbytes):
    return [arena.allocate(nbytes) for _ in range(n)]


def test_the_run_freed_last_is_used_first():
    arena = empty_arena()
    runs = in_use(arena, 10, 64)
    arena.free(runs[2], 64)
    arena.free(runs[7], 64)
    assert arena.allocate(64) == runs[7]
    assert arena.allocate(64) == runs[2]


@pytest.mark.parametrize("neighbour", [4, 6])
def test_the_warm_end_of_a_hole_is_used_first_then_the_best_fit(neighbour):
    arena = empty_arena()
    runs = in_use(arena, 10, 640)
    arena.free(runs[0], 64)  # one unit: the best fit for all that follows
    arena.free(runs[neighbour], 640)
    arena.free(runs[5], 640)
    warm = [arena.allocate(64) for _ in range(10)]
    assert sorted(warm) == list(range(runs[5], runs[6], 64)), "the rest of a warm run is as warm"
    if neighbour == 4:  # the warm run is used up; what is left of its hole is as cold as any other
        assert arena.allocate(64) == runs[0]


def test_a_run_amid_free_neighbours_does_not_split_their_hole():
    arena = empty_arena()
    runs = in_use(arena, 10, 640)
    for i in (4, 6, 5):
        arena.free(runs[i], 640)
    assert arena.allocate(64) == runs[4] and arena.n_holes == 1
    assert arena.allocate(64) == runs[4] + 64


@pytest.mark.parametrize("n", [FEW_HOLES - 5, FEW_HOLES + 15])
def test_otherwise_the_smallest_hole_that_fits(n):
    arena = empty_arena(1000)
    sizes = [(2 + i * 7 % 23) * 64 for i in range(n)]
    runs = [(arena.allocate(size), arena.allocate(64), size) for size in sizes]
    arena.allocate(arena.free_bytes)
    for offset, _, size in runs:
        arena.free(offset, size)
    arena.free(arena.allocate(sizes[-1]), 64)  # the run freed last is one unit short: no need below fits there
    for need in sorted(sizes[:-1], reverse=True):
        before = dict(arena.holes())
        smallest = min(nbytes for nbytes in before.values() if nbytes >= need)
        assert before[arena.allocate(need)] == smallest


def test_a_dead_hint_is_ignored():
    memory = Memory(6400, 64)
    arena = memory.arena()
    arena.rebuild([])
    arena.allocate(640)
    for hint in (1, 5, 11, 100, 101, 1 << 63):
        memory.words[AT + RECENT] = hint
        offset = arena.allocate(64)
        assert 640 <= offset < 6400
        arena.free(offset, 64)
    assert list(arena.problems([(0, 640)])) == []


def test_what_is_no_run_is_refused_and_nothing_changes():
    arena = empty_arena(10)
    arena.allocate(320)
    before = list(arena.holes()), arena.free_bytes
    for offset, nbytes in ((0, 321), (320, 64), (256, 128), (1, 63), (-64, 64), (576, 128), (640, 64), (0, 6400)):
        with pytest.raises(SegmentBroken, match="arena: free"):
            arena.free(offset, nbytes)
    for nbytes in (0, -1):
        for call in (arena.allocate, arena.fits, lambda n: arena.free(0, n)):
            with pytest.raises(InvalidArgument):
                call(nbytes)
    assert (list(arena.holes()), arena.free_bytes) == before
    with pytest.raises(InvalidArgument, match="whole number"):
        Memory(100, 64).arena()


def test_full_hole_table_is_refused_and_nothing_changes():
    arena = empty_arena(10, max_holes=2)
    runs = in_use(arena, 10, 64)
    arena.free(runs[1], 64)
    arena.free(runs[3], 64)
    with pytest.raises(SegmentBroken, match="no record"):
        arena.free(runs[5], 64)
    assert list(arena.holes()) == [(64, 64), (192, 64)] and arena.free_bytes == 128


def test_rebuild_names_the_runs_that_contradict_each_other():
    arena = empty_arena(10)
    for used in ([(0, 128), (64, 64)], [(64, 64), (0, 65)]):
        with pytest.raises(SegmentBroken, match="64 B at 64 overlaps .* B at 0"):
            arena.rebuild(used)
    for used in ([(576, 65)], [(3, 64)], [(0, 0)], [(640, 64)]):
        with pytest.raises(SegmentBroken, match="no run of 0-640 B"):
            arena.rebuild(used)
    assert list(arena.problems([])) == []
    arena = empty_arena(10, max_holes=2)
    with pytest.raises(SegmentBroken, match="3 holes in a table of 2"):
        arena.rebuild([(64, 64), (192, 64)])


def test_problems_reports_each_corruption():
    def swap(memory):
        for table in (memory.starts, memory.lengths):
            table[0], table[1] = table[1], table[0]

    corruptions = {
        "64 B at 64 is free but not listed": lambda m: m.starts.__setitem__(0, 2),
        "128 B at 64 is listed as free but is not a hole": lambda m: m.lengths.__setitem__(0, 2),
        "6 units are free, counted are 5": lambda m: m.words.__setitem__(AT + FREE_UNITS, 5),
        "320 B at 256 is free but not listed": lambda m: m.words.__setitem__(AT + N_HOLES, 1),
        "65 holes in a table of 64": lambda m: m.words.__setitem__(AT + N_HOLES, 65),
        "ascending": swap,
    }
    for text, corrupt in corruptions.items():
        memory, used = Memory(640, 64), [(0, 64), (128, 128), (576, 64)]
        arena = memory.arena()
        arena.rebuild(used)
        assert list(arena.problems(used)) == []
        corrupt(memory)
        assert any(text in problem for problem in arena.problems(used)), text
    assert any("overlaps" in problem for problem in empty_arena(10).problems([(0, 128), (64, 64)]))


def test_a_hole_beyond_the_capacity_is_never_handed_out():
    memory = Memory(640, 64)
    arena = memory.arena()
    arena.rebuild([])
    for start, length, free in ((5, 10, 10), (1 << 60, 1, 10), (0, 11, 11), (0, 10, 9)):
        memory.starts[0], memory.lengths[0], memory.words[AT + FREE_UNITS] = start, length, free
        with pytest.raises(SegmentBroken):
            arena.allocate(64)


def test_the_arena_lies_in_the_memory_alone():
    memory = Memory(640, 64)
    one, other = memory.arena(), memory.arena()
    one.rebuild([])
    offset = one.allocate(64)
    other.free(offset, 64)
    assert one.allocate(640) == 0 and other.free_bytes == 0


def test_ten_thousand_holes_are_no_burden():
    arena = empty_arena(40_000, 64, 20_001)
    runs = in_use(arena, 20_000, 128)
    for run in runs[::2]:
        arena.free(run, 128)
    assert arena.n_holes == 10_000 and arena.largest_bytes == 128
    started = time.perf_counter()
    for _ in range(1000):
        offset = arena.allocate(100)
        assert arena.allocate(1 << 20) is None and not arena.fits(1 << 20)
        arena.free(offset, 100)
    assert time.perf_counter() - started < 1, "twenty times what is measured"
