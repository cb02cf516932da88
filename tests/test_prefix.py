"""The sorted order of entries answers each look-up as brute force over all entries does."""

import random
import time
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shmkv import prefix
from shmkv.errors import InvalidArgument, SegmentBroken
from shmkv.prefix import NONE, PrefixOrder

N_SLOTS = 64
NAMESPACES = b"\x00" * 8, b"\x00" * 7 + b"\xff", b"\xff" * 8
START = 8

# Few tokens, all differing late in their bytes or not at all, so that prefixes, equals and branch points abound.
TOKENS = st.sampled_from([b"\x00\x00\x00\x00", b"\x00\x00\x00\x01", b"\x00\x00\x01\x00", b"\xff\xff\xff\xff"])
RUNS = st.lists(st.tuples(TOKENS, st.sampled_from([1, 1, 2, 70])), max_size=4)
KEYS = st.builds(lambda ns, runs: ns + b"".join(t * n for t, n in runs), st.sampled_from(NAMESPACES), RUNS)


class Table:
    """Keys and sequences in plain memory, and the naive answer to each question."""

    def __init__(self, n_slots=N_SLOTS, key_bytes=8192):
        self.words = memoryview(bytearray(8 * (2 + 3 * n_slots))).cast("Q")
        self.ranks = memoryview(bytearray(4 * n_slots)).cast("I")
        self.parents = memoryview(bytearray(4 * n_slots)).cast("I")
        self.memory = memoryview(bytearray(n_slots * key_bytes))
        self.key_bytes, self.keys, self.sequences = key_bytes, {}, {}
        self.order = PrefixOrder(
            self.words, 1, self.ranks, self.parents, self.memory, self._span, lambda slot: self.words[4 + 3 * slot]
        )

    def _span(self, slot):
        return self.words[2 + 3 * slot], self.words[3 + 3 * slot]

    def put(self, slot, key, sequence):
        at = slot * self.key_bytes
        self.memory[at : at + len(key)] = key
        for word, value in enumerate((at, len(key), sequence)):
            self.words[2 + 3 * slot + word] = value
        self.keys[slot], self.sequences[slot] = key, sequence

    def add(self, slot, key, sequence):
        self.put(slot, key, sequence)
        self.order.add(slot)

    def remove(self, slot):
        self.order.remove(slot)
        del self.keys[slot], self.sequences[slot]

    def place(self, slot):
        return self.keys[slot], self.sequences[slot]

    def oldest(self, slots):
        return min(slots, key=self.sequences.__getitem__, default=None)

    def parent(self, slot):
        key, before = self.keys[slot], [s for s in self.keys if self.place(s) < self.place(slot)]
        return max((s for s in before if key.startswith(self.keys[s])), key=self.place, default=NONE)

    def find(self, query, match, min_bytes):
        """(all slots that may be answered, matched bytes) or None."""
        least = START + max(1, min_bytes)
        if match == "exact":
            slot = self.oldest(s for s, key in self.keys.items() if key == query)
            return None if slot is None or len(query) < least else ({slot}, len(query))
        shared = {s: common(key, query) for s, key in self.keys.items()}
        whole = {s: n for s, n in shared.items() if n == len(self.keys[s])}
        longest = max((whole if match == "prefix" else shared).values(), default=0)
        if longest < least:
            return None
        exact = self.oldest(s for s, n in whole.items() if n == longest)
        return {s for s, n in shared.items() if n == longest} if exact is None else {exact}, longest


def common(a, b):
    n = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return n // 4 * 4


def assert_answers_as_brute_force(table, query, min_bytes):
    for match in ("exact", "prefix", "overlap"):
        found, wanted = table.order.find(query, match, min_bytes, START), table.find(query, match, min_bytes)
        assert (found is None) == (wanted is None), match
        if found:
            assert found[0] in wanted[0] and found[1] == wanted[1], match


class PrefixOrderMachine(RuleBasedStateMachine):
    """Any sequence of add, remove and rebuild leaves the order right and each answer equal to brute force."""

    def __init__(self):
        super().__init__()
        self.table, self.clock = Table(), 1000

    @precondition(lambda self: len(self.table.keys) < N_SLOTS)
    @rule(data=st.data(), key=KEYS, near=st.booleans(), back=st.booleans())
    def add(self, data, key, near, back):
        if near and self.table.keys:  # an equal key, an extension or a prefix of one that is there
            base = data.draw(st.sampled_from(sorted(self.table.keys.values())))
            key = (base + key[START:])[: max(START, len(base) + data.draw(st.sampled_from([-280, -4, 0, 0, 4, 400])))]
        self.clock += 1  # a redelivered entry returns with an old sequence
        free = min(set(range(N_SLOTS)) - set(self.table.keys))
        self.table.add(free, key, 2000 - self.clock if back else self.clock)

    @precondition(lambda self: self.table.keys)
    @rule(data=st.data())
    def remove(self, data):
        self.table.remove(data.draw(st.sampled_from(sorted(self.table.keys))))

    @precondition(lambda self: self.table.keys)
    @rule(data=st.data(), match=st.sampled_from(["exact", "prefix", "overlap"]))
    def drop_select(self, data, match):
        query = data.draw(st.sampled_from(sorted(self.table.keys.values())))
        found = self.table.order.find(query, match, 0, START)
        if found:
            self.table.remove(found[0])

    @rule()
    def rebuild_after_a_crash(self):
        self.table.words[1] = 7
        self.table.parents[:] = memoryview(bytes(4 * N_SLOTS)).cast("I")
        self.table.order.rebuild(list(self.table.keys))

    @rule(data=st.data(), query=KEYS, near=st.booleans(), min_bytes=st.sampled_from([0, 0, 4, 8, 300]))
    def find(self, data, query, near, min_bytes):
        if near and self.table.keys:
            base = data.draw(st.sampled_from(sorted(self.table.keys.values())))
            query = base[: max(START, len(base) - 4)] + query[START:]
        assert_answers_as_brute_force(self.table, query, min_bytes)

    @invariant()
    def order_is_sound(self):
        table = self.table
        assert list(table.order.problems(table.keys)) == []
        assert list(table.order.ranked()) == sorted(table.keys, key=table.place)
        assert {s: table.parents[s] for s in table.keys} == {s: table.parent(s) for s in table.keys}


TestPrefixOrderMachine = PrefixOrderMachine.TestCase
TestPrefixOrderMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([1, 4, 256]),
    st.lists(KEYS, max_size=30),
    st.lists(KEYS, min_size=1, max_size=8),
    st.randoms(use_true_random=False),
)
def test_rebuild_and_one_by_one_give_the_same_order(window, keys, queries, rng):
    with mock.patch.multiple(prefix, WINDOW=window, LONGEST_STEP=16 * window, SHORT_RANGE=2):
        assert_rebuild_and_one_by_one_agree(keys, queries, rng)


def assert_rebuild_and_one_by_one_agree(keys, queries, rng):
    table, again = Table(), Table()
    for slot, key in enumerate(keys):
        table.put(slot, key, slot)
    table.order.rebuild(range(len(keys)))
    for slot in rng.sample(range(len(keys)), len(keys)):
        again.add(slot, keys[slot], slot)
    assert table.ranks.tolist() == again.ranks.tolist() and table.parents.tolist() == again.parents.tolist()
    for query in queries + keys[:4]:
        assert_answers_as_brute_force(table, query, 0)


@pytest.mark.parametrize("n_tokens", [1, 63, 64, 65, 511, 513, 20_000, 100_000])
def test_difference_is_found_at_each_byte_of_a_long_key(n_tokens):
    rng, n = random.Random(n_tokens), 4 * n_tokens
    document = NAMESPACES[0] + rng.randbytes(n)
    table = Table(9, START + n)
    for slot in range(8):
        cut = rng.randrange(START, len(document))
        table.add(slot, document[:cut] + bytes([document[cut] ^ (1 << slot)]) + document[cut + 1 :], slot)
    at = rng.randrange(START, len(document))
    changed = document[:at] + bytes([document[at] ^ 255]) + document[at + 1 :]
    for query in [document, document[: at // 4 * 4], changed, *table.keys.values()]:
        slot, matched = table.order.find(query, "overlap", 0, START) or (None, 0)
        longest = max(lcp(key, query) for key in table.keys.values())
        assert matched == (longest if longest > START else 0)
        assert slot is None or table.keys[slot][:matched] == query[:matched]
    assert list(table.order.problems(table.keys)) == []


def lcp(a, b):
    """As `common`, in log n steps for long keys."""
    lo, hi = 0, min(len(a), len(b)) + 1
    while hi - lo > 1:
        middle = (lo + hi) // 2
        lo, hi = (middle, hi) if a[:middle] == b[:middle] else (lo, middle)
    return lo // 4 * 4


def test_sharing_only_the_namespace_is_no_match():
    table = Table()
    table.add(0, NAMESPACES[0] + b"aaaabbbb", 1)
    assert table.order.find(NAMESPACES[0] + b"cccc", "overlap", 0, START) is None
    assert table.order.find(NAMESPACES[1] + b"aaaabbbb", "overlap", 0, START) is None
    assert table.order.find(NAMESPACES[0] + b"aaaacccc", "overlap", 4, START) == (0, START + 4)
    assert table.order.find(NAMESPACES[0] + b"aaaacccc", "overlap", 5, START) is None
    assert table.order.find(NAMESPACES[0] + b"aaaabbbbcccc", "prefix", 8, START) == (0, START + 8)
    assert table.order.find(NAMESPACES[0] + b"aaaabbbbcccc", "prefix", 12, START) is None


@pytest.mark.parametrize("older", [0, 1])
def test_overlap_takes_the_older_neighbour(older):
    table = Table()
    for slot, key in enumerate((b"aaaabbbb", b"aaaadddd")):
        table.add(slot, NAMESPACES[0] + key, slot != older)
    assert table.order.find(NAMESPACES[0] + b"aaaacccc", "overlap", 0, START) == (older, START + 4)
    table.add(2, NAMESPACES[0] + b"aaaa", 9)  # nothing but the shared prefix
    assert table.order.find(NAMESPACES[0] + b"aaaacccc", "overlap", 0, START) == (2, START + 4)


def test_near_names_the_neighbours_within_the_namespace():
    table = Table()
    assert table.order.near(NAMESPACES[0], START) == (None, 0, None, 0)
    table.add(5, NAMESPACES[0] + b"aaaa", 1)
    table.add(6, NAMESPACES[0] + b"aabb", 2)
    assert table.order.near(NAMESPACES[0] + b"aaab", START) == (5, START + 3, 6, START + 2)
    assert table.order.near(NAMESPACES[0] + b"aabb", START) == (5, START + 2, 6, START + 4)
    assert table.order.near(NAMESPACES[0] + b"bbbb", START) == (6, START, None, 0)
    assert table.order.near(NAMESPACES[0], START) == (None, 0, 5, START)
    assert table.order.near(NAMESPACES[2] + b"aaab", START) == (None, 0, None, 0)


def test_unknown_match_is_refused():
    with pytest.raises(InvalidArgument, match="fuzzy"):
        Table().order.find(b"", "fuzzy", 0, 0)


def filled(keys):
    table = Table(len(keys), max(map(len, keys)))
    for slot, key in enumerate(keys):
        table.put(slot, key, slot)
    return table


def assert_quick(seconds, what, calls):
    """Twenty times what is measured: fails for work that grows with the number of entries, not for a busy machine."""
    started = time.perf_counter()
    for call in calls:
        call()
    took = time.perf_counter() - started
    assert took < seconds, f"{what}: {took:.2f} s"


def test_many_equal_keys_are_as_cheap_as_different_ones():
    n, key = 5000, NAMESPACES[0] + b"abcd" * 64
    table = filled([key] * n)
    order = table.order
    assert_quick(3, "add", (lambda s=s: order.add(s) for s in random.Random(1).sample(range(n), n)))
    assert list(order.problems(range(n))) == []
    assert table.parents.tolist() == [NONE, *range(n - 1)]
    longer, branch = key + b"more", key[:-4] + b"abce"
    for query in (key, longer):
        assert_quick(2, "find", (lambda q=query: order.find(q, "prefix", 0, START) for _ in range(2000)))
        assert order.find(query, "prefix", 0, START) == (0, len(key))
    assert order.find(branch, "prefix", 0, START) is None
    assert order.find(branch, "overlap", 0, START)[1] == len(key) - 4
    assert_quick(3, "remove", (lambda s=s: order.remove(s) for s in random.Random(2).sample(range(n), n - 1)))
    assert len(order) == 1 and list(order.problems(order.ranked())) == []


def test_chain_of_prefixes_is_found_at_each_length():
    n, token = 2000, b"\x07\x00\x00\x00"
    table = filled([NAMESPACES[1] + token * (1 + i) for i in range(n)])
    order = table.order
    assert_quick(3, "add", (lambda s=s: order.add(s) for s in random.Random(3).sample(range(n), n)))
    assert table.parents.tolist() == [NONE, *range(n - 1)]
    for i in random.Random(4).sample(range(n), 200):  # the left neighbour is the whole chain, all of it too long
        query = table.keys[i] + b"\x08\x00\x00\x00"
        assert order.find(query, "prefix", 0, START) == (i, len(table.keys[i]))
        assert order.find(query, "overlap", 0, START) == (i, len(table.keys[i]))
    assert_quick(3, "remove", (lambda s=s: order.remove(s) for s in random.Random(5).sample(range(n), n // 2)))
    assert list(order.problems(order.ranked())) == []


def test_short_prefix_that_comes_and_goes_adopts_and_returns_its_extensions():
    n, prompt = 500, NAMESPACES[2] + b"\xff" * 8
    table = filled([prompt + i.to_bytes(4, "big") for i in range(n)] + [prompt, prompt, prompt[:-4]])
    table.order.rebuild(range(n))
    for slot, parent in ((n + 2, NONE), (n, n + 2), (n + 1, n)):
        table.order.add(slot)
        assert table.parents[slot] == parent and set(table.parents[:n]) == {slot}
        assert list(table.order.problems(table.order.ranked())) == []
    for slot in (n, n + 1, n + 2):
        table.order.remove(slot)
        assert list(table.order.problems(table.order.ranked())) == []
    assert set(table.parents.tolist()[:n]) == {NONE}


def test_a_slot_is_added_once_and_removed_once():
    table = Table()
    table.add(3, NAMESPACES[0] + b"aaaa", 1)
    table.put(4, NAMESPACES[0] + b"aaaa", 2)
    with pytest.raises(SegmentBroken, match="slot 3"):
        table.order.add(3)
    with pytest.raises(SegmentBroken, match="slot 4"):
        table.order.remove(4)
    table.order.remove(3)
    with pytest.raises(SegmentBroken, match="slot 3"):
        table.order.remove(3)


def sound_table():
    table = filled([NAMESPACES[0] + key for key in (b"aaaa", b"aaaabbbb", b"aaaacccc", b"dddd", b"dddd")])
    table.order.rebuild(range(5))
    assert list(table.order.problems(range(5))) == []
    return table


def test_problems_reports_each_corruption():
    def swap(table):
        table.ranks[1], table.ranks[2] = table.ranks[2], table.ranks[1]

    corruptions = {
        "slot 2 has parent 1, not 0": lambda table: table.parents.__setitem__(2, 1),
        "stands behind": swap,
        "missing": lambda table: table.words.__setitem__(1, 4),
        "more than once": lambda table: table.ranks.__setitem__(0, 4),
        "5 of 5": lambda table: table.ranks.__setitem__(0, 5),
        "in a table of 5": lambda table: table.words.__setitem__(1, 6),
        "ends at": lambda table: table.words.__setitem__(3, 1 << 63),
        "not an entry": lambda table: None,
    }
    for text, corrupt in corruptions.items():
        table = sound_table()
        corrupt(table)
        claimed = range(4) if text == "not an entry" else range(5)
        assert any(text in problem for problem in table.order.problems(claimed)), text


def test_a_wrong_order_never_hands_out_other_tokens():
    keys = [NAMESPACES[0] + b"aaaa" + tail for tail in (b"0", b"1", b"2", b"6", b"7", b"8", b"9")]
    keys[2] = NAMESPACES[0] + b"zzzz2222"  # its place claims that it shares what both of its neighbours share
    table = filled(keys)
    table.words[1] = len(keys)
    table.ranks[:] = memoryview(bytearray(b"".join(i.to_bytes(4, "little") for i in range(7)))).cast("I")
    table.parents[:] = memoryview(b"\xff" * 28).cast("I")
    with mock.patch.object(prefix, "WINDOW", 1):
        assert table.order.find(NAMESPACES[0] + b"aaaa2222", "exact", 0, START) is None
        for match in ("prefix", "overlap"):
            with pytest.raises(SegmentBroken, match="slot 2 does not share 16 B"):
                table.order.find(NAMESPACES[0] + b"aaaa22225555", match, 0, START)


def test_a_key_out_of_bounds_is_never_compared():
    table = sound_table()
    table.words[3 + 3 * table.ranks[2]] = 1 << 40  # looked at on the way to every place
    for key in table.keys.values():
        with pytest.raises(SegmentBroken, match="ends at"):
            table.order.find(key, "exact", 0, START)


def garbage(rng):
    """A table whose every word may be anything, though often something that nearly makes sense."""
    table = Table(16, 64)
    table.memory[:] = rng.randbytes(len(table.memory))
    for slot in range(16):
        table.ranks[slot] = rng.choice([rng.randrange(16), rng.randrange(16), rng.randrange(1 << 32)])
        table.parents[slot] = rng.choice([NONE, rng.randrange(16), rng.randrange(1 << 32)])
        table.words[2 + 3 * slot] = rng.choice([rng.randrange(900), rng.randrange(900), rng.randrange(1 << 64)])
        table.words[3 + 3 * slot] = rng.choice([0, rng.randrange(64), rng.randrange(64), rng.randrange(1 << 64)])
    table.words[1] = rng.choice([16, rng.randrange(17), rng.randrange(1 << 64)])
    return table


@pytest.mark.parametrize("seed", range(4))
def test_garbage_ends_in_an_answer_or_segment_broken(seed):
    rng, broken = random.Random(seed), 0
    for _ in range(150):
        order = (table := garbage(rng)).order
        query = rng.choice([rng.randbytes(24), bytes(table.memory[:40])])
        looks = [(order.find, query, match, 0, 4) for match in ("exact", "prefix", "overlap")]
        for look, *args in [*looks, (order.near, query, 4), (lambda o: list(o.problems(range(16))), order)]:
            try:
                look(*args)
            except SegmentBroken:
                broken += 1
    assert broken


def test_the_order_lies_in_the_memory_alone():
    table = sound_table()
    other = PrefixOrder(
        table.words, 1, table.ranks, table.parents, table.memory, table._span, lambda slot: table.words[4 + 3 * slot]
    )
    table.order.find(table.keys[1], "exact", 0, START)
    other.remove(1)
    other.add(1)
    other.remove(0)
    assert list(table.order.problems(range(1, 5))) == []
    assert table.order.find(table.keys[1], "exact", 0, START) == (1, START + 8)
    table.order.remove(1)
    assert list(other.problems(range(2, 5))) == []
