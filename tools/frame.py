"""What one frame of `shmkv top` says, made of one picture and the one before it: lines of (text, style)."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

import click
from rich.cells import cell_len, set_cell_size

from shmkv.errors import SegmentBroken
from shmkv.inspector import PeerRow, Picture, State, WaitRow

from . import words
from .figures import age_of, arena, count, handoffs, latency, oldest, percentile
from .text import COLOURS, age, size

Line = list[tuple[str, str]]
PLAIN_WIDTH = 80
BINS_PER_DECADE = 3
DECADES = ("10us", "100us", "1ms", "10ms", "100ms", "1s", "10s")
BIN_CELLS, BAR_ROWS = 3, 3
FIRST_BIN_S = 1e-5
LIFE_ORDER = ("dead", "stopped")


class Frame:
    """A view of `width` cells and, if `height` is given, that many lines. `blocks`: there are block characters."""

    def __init__(self, width: int = PLAIN_WIDTH, height: int | None = None, blocks: bool = True, tokens: bool = True):
        self.width, self.height, self.tokens = width, height, tokens
        self.levels = " ▁▂▃▄▅▆▇█" if blocks else " .:-=+*##"
        self.full, self.empty = ("█", "░") if blocks else ("#", ".")

    def lines(self, picture: Picture, before: Picture | None, note: str = "") -> list[Line]:
        """All lines, none wider than the frame."""
        lines = [self._title(picture, note), self._owner(picture), [], *self._figures(picture, before), [],
                 *self._histogram(picture)]
        room = None if self.height is None else max(0, self.height - len(lines))
        lines += self._sections(picture, room)
        return [clipped(line, self.width) for line in lines[:self.height]]

    def trouble(self, name: str, message: str) -> list[Line]:
        """The frame while no picture can be taken."""
        return [clipped(line, self.width) for line in
                ([("shmkv top ", "dim"), (name, "bold")], [], [("no picture: ", "red"), (message, "")])][:self.height]

    # ------------------------------------------------------------ the head

    def _title(self, picture: Picture, note: str) -> Line:
        left = [("shmkv top ", "dim"), (picture.name, "bold"), ("  ", ""),
                (picture.state.value, COLOURS[picture.state.value])]
        room = self.width - sum(cell_len(text) for text, _ in left) - cell_len(note)
        return [*left, (" " * room, ""), (note, "dim")] if room > 1 else left

    def _owner(self, picture: Picture) -> Line:
        life, mutator = picture.life(picture.owner()), picture.mutator()
        said: Line = [(f"owner pid {picture.header()['owner_pid']} ", ""), (life, COLOURS.get(life, "yellow"))]
        if picture.lock_pid is not None:
            said.append((f"   {click.unstyle(words.lock(picture))}", ""))
        if picture.state == State.TORN:
            who = "nobody known" if mutator is None else f"pid {picture.pid(mutator)}, {picture.life(mutator)}"
            said.append((f"   left half changed by {who}", "red"))
        return said

    # ------------------------------------------------------------ figures

    def _figures(self, picture: Picture, before: Picture | None) -> list[Line]:
        figures, states, slots = arena(picture), picture.states(), picture.layout.entries.count
        share = figures.used / figures.nbytes
        text = f" {share:4.0%}  {size(figures.used)} of {size(figures.nbytes)}, {plural(figures.n_holes, 'hole')}"
        cells = max(8, self.width - 9 - len(text))
        n_full = min(cells, round(cells * share)) or bool(figures.used)
        return [
            [("arena    ", "dim"), (self.full * n_full, "red" if share > 0.95 else "green"),
             (self.empty * (cells - n_full), "dim"), (text, "")],
            [("entries  ", "dim"), (f"{count(slots - states['free'])} of {count(slots)}   ", ""),
             *((f"{name} {count(states[name])}   ", "yellow" if states[name] and name == "dropped" else "")
               for name in ("ready", "taken", "reserved", "dropped"))],
            self._rates(picture, before),
            self._hits(picture, before),
            self._oldest(picture),
        ]

    def _rates(self, picture: Picture, before: Picture | None) -> Line:
        grown = growth(picture, before)
        if grown is None:
            return [("rates    ", "dim"), ("known from the second frame on", "dim")]
        each = {name: grown[name] / grown["seconds"] for name in grown}
        return [("rates    ", "dim"), (f"inserts {count(each['inserts'])}/s  takes {count(each['takes'])}/s  "
                                       f"shares {count(each['shares'])}/s  in {size(round(each['inserted_bytes']))}/s  "
                                       f"out {size(round(each['taken_bytes']))}/s", "")]

    def _hits(self, picture: Picture, before: Picture | None) -> Line:
        grown, total = growth(picture, before), picture.counters()
        texts = [f"{ratio(one)} of {count(lookups(one))} {what}" for one, what in
                 ((grown, "look-ups since the last frame"), (total, "ever")) if one]
        return [("hits     ", "dim"), (", ".join(texts), "")]

    def _oldest(self, picture: Picture) -> Line:
        entry = oldest(picture)
        if entry is None:
            return [("oldest   ", "dim"), ("no entries", "dim")]
        held = sorted({lease["peer"] for lease in picture.leases() if lease["slot"] == entry.slot})
        by = f", held by peer {' '.join(map(str, held))}" if held else ""
        return [("oldest   ", "dim"), (f"entry {entry.sequence}, {entry.state}, {age(entry.age_ns)} old, "
                                       f"{count(entry.n_tokens)} tokens, {size(entry.nbytes)}, "
                                       f"of peer {entry.producer}{by}", "")]

    # ------------------------------------------------------------ the histogram

    def _histogram(self, picture: Picture) -> list[Line]:
        try:
            samples = handoffs(picture)
        except SegmentBroken as broken:
            return [[("hand-off ", "dim"), (f"the journal is broken: {broken.args[0]}", "red")], [], [], [], []]
        if samples:
            shares = "   ".join(f"p{share} {latency(percentile(samples, share / 100))}" for share in (50, 90, 99))
            title: Line = [("hand-off ", "dim"), (f"sealed to taken, the last {len(samples)}:   {shares}", "")]
        else:
            title = [("hand-off ", "dim"), ("sealed to taken: the journal has none", "dim")]
        bins = binned(samples)
        most = max(bins)
        lines = [title]
        for row in reversed(range(BAR_ROWS)):
            bars = "".join(self._bar(n, most, row) for n in bins)
            lines.append([(f"{most if most and row == BAR_ROWS - 1 else '':>8} ", "dim"), (bars, "cyan")])
        axis = "".join(f"{name:<{BIN_CELLS * BINS_PER_DECADE}}" for name in DECADES)
        return [*lines, [(" " * 9, ""), (axis.rstrip(), "dim")]]

    def _bar(self, n: int, most: int, row: int) -> str:
        if not n:
            return ("_" if row == 0 and self.full == "#" else "▁" if row == 0 else " ") * (BIN_CELLS - 1) + " "
        height = max(2, round(n / most * BAR_ROWS * 8))
        return self.levels[max(0, min(8, height - 8 * row))] * (BIN_CELLS - 1) + " "

    # ------------------------------------------------------------ waiters and peers

    def _sections(self, picture: Picture, room: int | None) -> Iterator[Line]:
        waiters, peers = picture.waiters(), sorted(picture.peers(), key=lambda peer: _urgency(peer))
        if room is None:
            n_waiters, n_peers = len(waiters), len(peers)
        else:
            rows = max(0, room - 2)
            n_peers = min(len(peers), max(rows - len(waiters), rows // 2))
            n_waiters = min(len(waiters), rows - n_peers)
        cycle = picture.cycle()
        ring = f"   in a ring: {' -> '.join(map(str, [*cycle, cycle[0]]))}" if cycle else ""
        yield [(f"waiters  {_hidden(len(waiters), n_waiters)}", "dim"), (ring, "red")]
        yield from (self._waiter(picture, row) for row in waiters[:n_waiters])
        yield [(f"peers    {_hidden(len(peers), n_peers)}", "dim")]
        yield from (self._peer(row) for row in peers[:n_peers])

    def _waiter(self, picture: Picture, row: WaitRow) -> Line:
        since = age(age_of(picture, row.since_ns))
        limit = "" if row.deadline_ns is None else f"of {age(row.deadline_ns - row.since_ns)}"
        on = f"  on {' '.join(map(str, row.on))}" if row.on else ""
        head = f"  peer {row.peer:<3} pid {row.pid:<7} {since:>7} {limit:<10} "
        space = max(12, self.width - cell_len(head) - len(on))
        text = words.wanted(row)
        if self.tokens and row.tokens:
            text += f": {words.tokens(row.tokens, row.n_tokens)}"
        text = text if cell_len(text) <= space else set_cell_size(text, space - 2) + ".."
        return [(head, ""), (text, "yellow"), (on, "")]

    def _peer(self, row: PeerRow) -> Line:
        does = "closed" if row.closed else "+".join(row.roles) or "idle"
        return [(f"  peer {row.index:<3} pid {row.pid:<7} ", ""),
                (f"{row.life:<8}", COLOURS.get(row.life, "yellow")),
                (f"{does:<17}  {plural(row.leases, 'lease')}, {plural(row.signals, 'signal')}  {row.role}", "")]


# ---------------------------------------------------------------- what the figures are

def growth(picture: Picture, before: Picture | None) -> dict[str, float] | None:
    """What each counter grew by since a picture of the same segment, and in how many `seconds`."""
    if before is None or before.header()["instance"] != picture.header()["instance"]:
        return None
    old, seconds = before.counters(), (picture.now_ns - before.now_ns) / 1e9
    grown: dict[str, float] = {name: max(0, value - old[name]) for name, value in picture.counters().items()}
    return {**grown, "seconds": seconds} if seconds > 0 else None


def lookups(counters: dict) -> float:
    return counters["takes"] + counters["shares"] + counters["misses"]


def ratio(counters: dict) -> str:
    n = lookups(counters)
    return f"{(counters['takes'] + counters['shares']) / n:.1%}" if n else "-"


def binned(samples: Sequence[float]) -> list[int]:
    """Samples a bin of a third of a decade; the first and the last have all that lies beyond."""
    bins = [0] * (BINS_PER_DECADE * len(DECADES))
    edges = [FIRST_BIN_S * 10 ** (k / BINS_PER_DECADE) for k in range(1, len(bins))]
    for sample in samples:
        bins[bisect.bisect(edges, sample)] += 1
    return bins


def clipped(line: Line, width: int) -> Line:
    """The line, cut at `width` cells."""
    found, used = [], 0
    for text, style in line:
        fitting = text if used + cell_len(text) <= width else set_cell_size(text, width - used)
        found.append((fitting, style))
        used += cell_len(fitting)
        if used >= width:
            break
    return found


def plural(n: int, noun: str) -> str:
    return f"{count(n)} {noun}{'' if n == 1 else 's'}"


def plain(line: Line) -> str:
    return "".join(text for text, _ in line).rstrip()


def _urgency(peer: PeerRow) -> tuple[int, int]:
    """The dead and the stopped come first: rows may be few."""
    return (LIFE_ORDER.index(peer.life) if peer.life in LIFE_ORDER else len(LIFE_ORDER)), peer.index


def _hidden(n: int, n_shown: int) -> str:
    return f"{n}" if n <= n_shown else f"{n}, of which {n_shown} are shown"
