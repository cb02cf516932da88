"""The prefix order as a tree: a compressed trie of the entries' tokens, and what of it is worth showing."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

WIDEST = 12
"""children shown of one node"""
DEEPEST = 16


class Leaf(NamedTuple):
    """An entry: its tokens (4 bytes each), its sequence and its state."""

    tokens: bytes
    sequence: int
    state: str


class Node:
    """Tokens `start` to `end` that all entries below have in common, behind those of its parent."""

    __slots__ = ("tokens", "start", "end", "children", "leaves", "states")

    def __init__(self, tokens: bytes, end: int):
        self.tokens, self.start, self.end = tokens, 0, end
        self.children: list[Node] = []
        self.leaves: list[Leaf] = []
        """entries of exactly these tokens"""
        self.states: Counter[str] = Counter()
        """of all entries here and below"""

    @property
    def count(self) -> int:
        return self.states.total()

    def adopt(self, child: Node) -> None:
        child.start = self.end
        self.children.append(child)
        self.states += child.states

    def edge(self, limit: int) -> list[int]:
        """The first `limit` of its own tokens."""
        return np.frombuffer(self.tokens, np.uint32)[self.start:min(self.end, self.start + limit)].tolist()


class Row(NamedTuple):
    """One line of the tree. `node` None: `n_hidden` siblings that are not shown, with `n_entries`."""

    depth: int
    node: Node | None
    n_hidden: int
    n_entries: int
    is_open: bool


def grow(leaves: Iterable[Leaf]) -> Node:
    """The trie; its root has no tokens."""
    stack, previous = [Node(b"", 0)], b""
    # sorted by raw bytes, entries with a common beginning are neighbours; any total order of tokens would do
    for leaf in sorted(leaves):
        common = shared_tokens(previous, leaf.tokens)
        while stack[-1].end > common:
            node = stack.pop()
            if stack[-1].end < common:
                stack.append(Node(node.tokens, common))
            stack[-1].adopt(node)
        if stack[-1].end < len(leaf.tokens) // 4:
            stack.append(Node(leaf.tokens, len(leaf.tokens) // 4))
        stack[-1].leaves.append(leaf)
        stack[-1].states[leaf.state] += 1
        previous = leaf.tokens
    while len(stack) > 1:
        node = stack.pop()
        stack[-1].adopt(node)
    return stack[0]


def shared_tokens(one: bytes, other: bytes) -> int:
    n = min(len(one), len(other)) // 4
    differ = np.frombuffer(one, np.uint32, n) != np.frombuffer(other, np.uint32, n)
    at = int(differ.argmax()) if n else 0
    return at if n and differ[at] else n


def visible(roots: Sequence[Node], n_rows: int) -> Iterator[Row]:
    """About `n_rows` rows of the trees: nodes with most entries are opened first, and of their children most."""
    opened: set[int] = set()
    budget = n_rows - len(roots)
    waiting = [(-root.count, order, 0, root) for order, root in enumerate(roots)]
    heapq.heapify(waiting)
    order = len(waiting)
    while waiting:
        _, _, depth, node = heapq.heappop(waiting)
        cost = min(len(node.children), WIDEST + 1)
        if not cost or cost > budget or depth >= DEEPEST:
            continue
        budget -= cost
        opened.add(id(node))
        for child in _shown(node):
            order += 1
            heapq.heappush(waiting, (-child.count, order, depth + 1, child))
    for root in roots:
        yield from _rows(root, 0, opened)


def _rows(node: Node, depth: int, opened: set[int]) -> Iterator[Row]:
    is_open = id(node) in opened
    yield Row(depth, node, 0, node.count, is_open)
    if not is_open:
        return
    shown = _shown(node)
    for child in shown:
        yield from _rows(child, depth + 1, opened)
    n_hidden = len(node.children) - len(shown)
    if n_hidden:
        yield Row(depth + 1, None, n_hidden, node.count - len(node.leaves) - sum(child.count for child in shown), False)


def _shown(node: Node) -> list[Node]:
    return heapq.nlargest(WIDEST, node.children, key=lambda child: child.count)
