"""Finding a prompt in the prefix order: a hit, the longest prefix, the longest overlap, a miss, an insert, a removal.

N entries of L tokens; three quarters of them share the beginning of one of a few documents and branch off anywhere.
Measured on the structure itself, in memory laid out as in a segment; a look-up through a buffer adds the lock.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import numpy as np

from shmkv.prefix import PrefixOrder

from .report import percentiles, timed_us

TABLES = ((1_000, 128), (100_000, 128), (1_000, 4_096), (20_000, 4_096), (500, 131_072))
QUICK_TOKENS = 5_000_000
NAMESPACE_WORDS = 8
START = 4 * NAMESPACE_WORDS
TRIALS = 300
HEADERS = ["entries x tokens", "exact", "prefix", "overlap", "miss", "insert", "remove", "rebuild, ms"]


def run(quick: bool):
    rows, figures = [], {"lookup": {}}
    for n, length in TABLES:
        if quick and n * length > QUICK_TOKENS:
            continue
        found = measure(n, length)
        rows.append([f"{n:,} x {length:,}", *(f"{found[name]:,.1f}" for name in HEADERS[1:-1]),
                     f"{found['rebuild'] / 1e3:,.0f}"])
        figures["lookup"][f"{n}x{length}"] = {
            "hit_us": found["exact"], "prefix_us": found["prefix"], "overlap_us": found["overlap"],
            "miss_us": found["miss"], "insert_us": found["insert"], "remove_us": found["remove"]}
    yield f"look-up in the prefix order, us (medians of up to {TRIALS} calls)", HEADERS, rows, figures


def measure(n: int, length: int) -> dict[str, float]:
    keys = prompts(n, length)
    order = order_of(keys)
    rebuild = timed_us(lambda: order.rebuild(range(n)))
    chance = np.random.default_rng(5)
    picks = chance.choice(n, min(n, TRIALS), replace=False).tolist()
    strangers = [random_tokens(chance, length) for _ in picks]
    halves = [np.concatenate((keys[pick][:NAMESPACE_WORDS + length // 2], tokens[length // 2:]))
              for pick, tokens in zip(picks, strangers, strict=True)]
    nowhere = [np.concatenate((keys[0][:NAMESPACE_WORDS], tokens)) for tokens in strangers]
    result = {
        "exact": median(find(order, "exact"), (keys[pick].tobytes() for pick in picks)),
        "prefix": median(find(order, "prefix"), (keys[pick].tobytes() + bytes(400) for pick in picks)),
        "overlap": median(find(order, "overlap"), (key.tobytes() for key in halves)),
        "miss": median(find(order, "prefix"), (key.tobytes() for key in nowhere)),
        "remove": median(order.remove, picks),
        "rebuild": rebuild,
    }
    random.Random(3).shuffle(picks)
    result["insert"] = median(order.add, picks)
    return result


def find(order: PrefixOrder, match: str) -> Callable[[bytes], object]:
    return lambda query: order.find(query, match, 0, START)


def median(action: Callable, arguments: Iterable) -> float:
    return percentiles([timed_us(lambda argument=argument: action(argument)) for argument in arguments])["p50_us"]


def prompts(n: int, length: int) -> np.ndarray:
    """One key a row: namespace words, then tokens."""
    chance = np.random.default_rng(1)
    documents = [random_tokens(chance, length) for _ in range(max(4, min(16, n // 50)))]
    keys = np.empty((n, NAMESPACE_WORDS + length), np.uint32)
    keys[:, :NAMESPACE_WORDS] = range(NAMESPACE_WORDS)
    for row in range(n):
        tokens = keys[row, NAMESPACE_WORDS:]
        tokens[:] = random_tokens(chance, length)
        if row % 4:
            cut = chance.integers(1, length)
            tokens[:cut] = documents[chance.integers(len(documents))][:cut]
    return keys


def random_tokens(chance: np.random.Generator, length: int) -> np.ndarray:
    return chance.integers(0, 50_000, length, dtype=np.uint32)


def order_of(keys: np.ndarray) -> PrefixOrder:
    """An order over these keys, whose records (offset, bytes, sequence) are words in one memory, as in a segment."""
    n, width = keys.shape
    words = memoryview(bytearray(8 * (1 + 3 * n))).cast("Q")
    for slot in range(n):
        words[1 + 3 * slot], words[2 + 3 * slot], words[3 + 3 * slot] = 4 * width * slot, 4 * width, slot
    order, parents = (memoryview(bytearray(4 * n)).cast("I") for _ in range(2))
    return PrefixOrder(words, 0, order, parents, memoryview(keys).cast("B"),
                       lambda slot: (words[1 + 3 * slot], words[2 + 3 * slot]), lambda slot: words[3 + 3 * slot])
