"""`shmkv map`: a picture of the arena and of the prefix order, for a browser or a report."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import click

from shmkv import keys
from shmkv.errors import SegmentBroken
from shmkv.inspector import EntryRow, Picture, State
from shmkv.layout import Entry
from shmkv.namespace import decode_namespace, show

from . import target
from .figures import age_of, arena, count, oldest
from .svg import AGES, Canvas, clean, kind_class, text_width
from .text import age, size
from .trie import Leaf, Row, grow, visible

WIDTH, MARGIN = 1200, 40
TRACK_AT, BAND, BAND_GAP = 120, 26, 6
TRACK = WIDTH - MARGIN - TRACK_AT
FEWEST_BANDS = 8
"""of the arena's rows; a power of two each, so that their offsets read well"""
NARROWEST = 0.6
"""units; runs that are narrower are drawn together"""
TREE_ROWS, TREE_ROW, INDENT = 90, 20, 18
NAMESPACES = 20
TREE_END, TOKENS_AT, ENTRIES_AT, BAR_AT = 715, 790, 880, 900
BAR = WIDTH - MARGIN - BAR_AT
STATES = ("ready", "taken", "reserved", "dropped")
EXAMPLES = ("shmkv map toy --html toy.html", "shmkv map --file toy.core --svg toy.svg")


@click.command(name="map", epilog=target.example(*EXAMPLES))
@click.argument("name", required=False, shell_complete=target.complete_names)
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write an SVG drawing.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write an HTML page.")
@click.option("--file", "core", type=click.Path(dir_okay=False), metavar="CORE",
              help="Draw a picture that dump --core kept, instead of the segment NAME.")
@target.NO_TOKENS
def command(name: str | None, svg: Path | None, html: Path | None, core: str | None, no_tokens: bool) -> None:
    """Draw the arena and the prefix order of the segment NAME.

    The arena: each run where it lies, coloured by the state of its entry and paler with age; the holes between; how
    fragmented it is. The prefix order: which tokens entries have in common, as a tree for each namespace; where there
    are many, the branches with most entries are drawn and the others counted. Resting the pointer on a run names its
    entry.

    The file needs no network and no script, and follows the reader's light or dark scheme. Namespaces are in it, and
    token ids unless they are left out.
    """
    if (svg is None) == (html is None):
        raise click.UsageError("give one of --svg FILE and --html FILE")
    from shmkv.inspector import write_new
    picture = target.picture(name, core)
    drawing = drawn(picture, tokens=not no_tokens)
    if svg:
        write_new(str(svg), drawing.encode())
    if html:
        write_new(str(html), page(picture.name, drawing).encode())


def page(name: str, drawing: str) -> str:
    """The drawing as a page. It is well-formed XML too."""
    return ('<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
            '<meta name="viewport" content="width=device-width"/><meta name="color-scheme" content="light dark"/>'
            f"<title>shmkv map: {clean(name)}</title>\n<style>body{{margin:0;background:#fff}}"
            "svg{display:block;margin:auto;max-width:100%;height:auto}"
            "@media (prefers-color-scheme:dark){body{background:#0f1318}}</style></head>\n"
            f"<body>{drawing}</body></html>\n")


def drawn(picture: Picture, tokens: bool = True) -> str:
    """The whole drawing."""
    rows = list(picture.entries(n_tokens=0))
    canvas = Canvas(WIDTH)
    _head(canvas, picture, rows)
    _tiles(canvas, picture, rows)
    _arena(canvas, picture, rows)
    _legend(canvas)
    _tree(canvas, picture, rows, tokens)
    canvas.y += MARGIN - 10
    return canvas.svg(f"shmkv map of {picture.name}")


# ---------------------------------------------------------------- head and figures

def _head(canvas: Canvas, picture: Picture, rows: list[EntryRow]) -> None:
    canvas.text(MARGIN, 48, picture.name, 24, "bold", room=WIDTH - 2 * MARGIN)
    kind = "alarm" if picture.state == State.TORN else "soft"
    at = MARGIN + canvas.text(MARGIN, 72, f"shmkv segment, picture {_state_text(picture, rows)}", 13, kind)
    problems = [] if picture.state == State.MOVING else picture.problems()
    if problems:
        text = f"{count(len(problems))} contradictions, the first: {problems[0]}"
        canvas.text(at + 16, 72, text, 13, "alarm", room=WIDTH - MARGIN - at - 16)
    canvas.y = 92


def _state_text(picture: Picture, rows: list[EntryRow]) -> str:
    if picture.state == State.MOVING:
        return f"moving: {count(sum(row.moving for row in rows))} entries changed while it was taken"
    return "torn: its last writer died or stopped in mid-change" if picture.state == State.TORN else picture.state.value


def _tiles(canvas: Canvas, picture: Picture, rows: list[EntryRow]) -> None:
    figures, first = arena(picture), oldest(picture)
    first_age, which = (age(first.age_ns), f"entry {count(first.sequence)}") if first else ("-", "none")
    lives = Counter(picture.lives.values())
    tiles = [
        ("arena used", f"{figures.used / figures.nbytes:.1%}", f"{size(figures.used)} of {size(figures.nbytes)}"),
        ("entries", count(len(rows)), f"of {count(picture.layout.entries.count)} slots"),
        ("holes", count(figures.n_holes), f"largest {size(figures.largest_hole)}"),
        ("fragmentation", f"{figures.fragmentation:.1%}", "of free, not in largest"),
        ("oldest entry", first_age, which),
        ("peers", count(sum(lives.values())), ", ".join(f"{n} {life}" for life, n in sorted(lives.items())) or "none"),
    ]
    gap = 12
    width = (WIDTH - 2 * MARGIN - gap * (len(tiles) - 1)) / len(tiles)
    for index, (what, figure, more) in enumerate(tiles):
        x = MARGIN + index * (width + gap)
        canvas.rect(x, canvas.y, width, 76, "tile", round_by=6)
        canvas.text(x + 12, canvas.y + 20, what, 11, "soft", room=width - 20)
        canvas.text(x + 12, canvas.y + 46, figure, 20, "bold", room=width - 20)
        canvas.text(x + 12, canvas.y + 66, more, 11, "soft", room=width - 20)
    canvas.y += 76


# ---------------------------------------------------------------- the arena

class Piece(NamedTuple):
    """What is drawn of a stretch of the arena: `kind` is its class, `label` what it says where there is room."""

    start: int
    end: int
    kind: str
    label: str
    title: str


def _arena(canvas: Canvas, picture: Picture, rows: list[EntryRow]) -> None:
    nbytes = picture.layout.arena.nbytes
    _section(canvas, "Payload arena", f"{size(nbytes)}, from its start at the top left to its end")
    band_bytes = 1 << max(0, (nbytes // FEWEST_BANDS).bit_length() - 1)
    top = canvas.y
    for at in range(0, nbytes, band_bytes):
        length = min(band_bytes, nbytes - at) / band_bytes * TRACK
        canvas.text(TRACK_AT - 10, canvas.y + 17, size(at), 11, "soft", "end")
        canvas.rect(TRACK_AT, canvas.y, length, BAND, "hole")
        canvas.y += BAND + BAND_GAP
    for piece in _together(_pieces(picture, rows), band_bytes / TRACK * NARROWEST):
        _draw_piece(canvas, piece, top, band_bytes)
    others = sum(row.where != "host" or not row.run_bytes for row in rows)
    if others:
        text = f"{plural(others, 'entry is', 'entries are')} not here: in device memory, or of no bytes"
        canvas.text(TRACK_AT, canvas.y + 12, text, 11, "soft", room=TRACK)
        canvas.y += 18


def _pieces(picture: Picture, rows: list[EntryRow]) -> list[Piece]:
    """Runs and holes in order. Where runs of a broken picture overlap, the first one is drawn."""
    found, nbytes, at = [], picture.layout.arena.nbytes, 0
    for row in sorted((row for row in rows if row.where == "host" and row.run_bytes), key=lambda row: row.run_at):
        start, end = max(at, row.run_at), min(row.run_at + row.run_bytes, nbytes)
        if start >= end:
            continue
        if start > at:
            found.append(_hole(at, start))
        age_ns, by = age_of(picture, row.created_ns), "nobody" if row.producer is None else f"peer {row.producer}"
        title = (f"entry {row.sequence}, {row.state}, {age(age_ns)} old, {count(row.n_tokens)} tokens, "
                 f"{size(row.nbytes)} in a run of {size(row.run_bytes)} at {row.run_at}, of {by}"
                 f"{', changing' if row.moving else ''}")
        found.append(Piece(start, end, kind_class(row.state, age_ns), f"{row.sequence}", title))
        at = end
    return [*found, _hole(at, nbytes)] if at < nbytes else found


def _hole(start: int, end: int) -> Piece:
    return Piece(start, end, "hole", f"hole {size(end - start)}", f"hole of {size(end - start)} at {start}")


def _together(pieces: list[Piece], least: float) -> list[Piece]:
    """The pieces, the narrow ones in groups, each of the class that has most bytes in it."""
    found: list[Piece] = []
    group: list[Piece] = []
    for piece in pieces:
        if piece.end - piece.start >= least:
            found += _grouped(group)
            found.append(piece)
            group = []
            continue
        group.append(piece)
        if piece.end - group[0].start >= least:
            found += _grouped(group)
            group = []
    return [*found, *_grouped(group)]


def _grouped(group: list[Piece]) -> list[Piece]:
    if len(group) < 2:
        return group
    kinds: Counter[str] = Counter()
    for piece in group:
        kinds[piece.kind] += piece.end - piece.start
    start, end = group[0].start, group[-1].end
    return [Piece(start, end, kinds.most_common(1)[0][0], "", f"{len(group)} runs and holes at {start}")]


def _draw_piece(canvas: Canvas, piece: Piece, top: float, band_bytes: int) -> None:
    """One rectangle a band that it touches; its label in the widest of them."""
    parts = []
    for band in range(piece.start // band_bytes, (piece.end - 1) // band_bytes + 1):
        start, end = max(piece.start, band * band_bytes), min(piece.end, (band + 1) * band_bytes)
        x = TRACK_AT + (start - band * band_bytes) / band_bytes * TRACK
        width = (end - start) / band_bytes * TRACK
        # a gap tells neighbours of the same colour apart, as long as it leaves most of them
        parts.append((width - (1 if width > 4 else 0.3 if width > 1 else 0), x, top + band * (BAND + BAND_GAP)))
    if piece.kind != "hole":
        for width, x, y in parts:
            canvas.rect(x, y, width, BAND, piece.kind, piece.title)
    width, x, y = max(parts, key=lambda part: part[0])
    if piece.label and text_width(piece.label, 11) <= width - 8:
        canvas.text(x + width / 2, y + 17, piece.label, 11, "soft" if piece.kind == "hole" else "ink", "middle")


def _legend(canvas: Canvas) -> None:
    canvas.y += 12
    x = float(TRACK_AT)
    for state in STATES:
        for step in range(len(AGES)):
            canvas.rect(x, canvas.y, 16, 14, f"{state}{step}")
            x += 17
        x += 6 + canvas.text(x + 4, canvas.y + 11, state, 11, "ink") + 14
    canvas.rect(x, canvas.y, 16, 14, "hole")
    x += 20 + canvas.text(x + 20, canvas.y + 11, "hole", 11, "ink") + 14
    text = (f"Shades by age: {', '.join(text for _, text in AGES)}. Numbers: sequences of entries. "
            "Fragmentation: free bytes outside of the largest hole.")
    canvas.text(TRACK_AT, canvas.y + 32, text, 11, "soft", room=TRACK)
    canvas.y += 40


def _section(canvas: Canvas, title: str, text: str) -> None:
    canvas.y += 36
    width = canvas.text(MARGIN, canvas.y, title, 16, "bold")
    canvas.text(MARGIN + width + 16, canvas.y, text, 12, "soft", room=WIDTH - 2 * MARGIN - width - 16)
    canvas.y += 14


# ---------------------------------------------------------------- the tree

def _tree(canvas: Canvas, picture: Picture, rows: list[EntryRow], tokens: bool) -> None:
    groups, n_unreadable = grouped_leaves(picture, rows)
    n_entries = sum(map(len, groups.values()))
    _section(canvas, "Prefix order", f"{plural(n_entries, 'entry', 'entries')} in "
             f"{plural(len(groups), 'namespace', 'namespaces')}: what their tokens have in common")
    names = sorted(groups, key=lambda name: -len(groups[name]))
    trees = [grow(groups[name]) for name in names[:NAMESPACES]]
    if trees:
        _column_heads(canvas)
    parents: dict[int, float] = {}
    heads = iter(names)
    for row in visible(trees, TREE_ROWS):
        middle = canvas.y + TREE_ROW / 2
        x = MARGIN + 6 + row.depth * INDENT
        if row.depth:
            above = x - INDENT
            canvas.line((above, parents[row.depth - 1] + 5), (above, middle), (x - 5, middle))
        parents[row.depth] = middle
        label, said = _label(row, tokens, TREE_END - x) if row.depth else (namespace_text(next(heads)), "")
        _tree_row(canvas, row, x, middle, label, said, n_entries)
        canvas.y += TREE_ROW
    rest = names[NAMESPACES:]
    for n, text in ((len(rest), f"and {count(len(rest))} more namespaces with "
                                f"{count(sum(len(groups[name]) for name in rest))} entries"),
                    (n_unreadable, f"{count(n_unreadable)} entries whose keys cannot be read"),
                    (not n_entries and not n_unreadable, "no entries")):
        if n:
            canvas.text(MARGIN, canvas.y + 15, text, 12, "soft")
            canvas.y += TREE_ROW


def _column_heads(canvas: Canvas) -> None:
    heads = ((TOKENS_AT, "tokens", "end"), (ENTRIES_AT, "entries", "end"), (BAR_AT, "by state", "start"))
    for x, text, anchor in heads:
        canvas.text(x, canvas.y + 13, text, 11, "soft", anchor)
    canvas.y += TREE_ROW


def _tree_row(canvas: Canvas, row: Row, x: float, middle: float, label: str, said: str,
              n_entries: int) -> None:
    node, base = row.node, middle + 4
    if node is None:
        canvas.text(x + 10, base, label, 12, "soft")
        canvas.text(ENTRIES_AT, base, count(row.n_entries), 12, "soft", "end")
        return
    ends = node.leaves[0].state if node.leaves else ""
    canvas.dot(x, middle, 4, kind_class(ends, 0) if ends else "branch")
    width = canvas.text(x + 10, base, label, 12, "ink" if row.depth else "bold", room=TREE_END - x - 10)
    if said:
        canvas.text(x + 22 + width, base, said, 12, "soft", room=TREE_END - x - 22 - width)
    if row.depth:
        canvas.text(TOKENS_AT, base, count(node.end), 12, "soft", "end")
    canvas.text(ENTRIES_AT, base, count(row.n_entries), 12, "ink", "end")
    at = float(BAR_AT)
    for state in (*STATES, *sorted(set(node.states) - set(STATES))):
        width = node.states[state] / n_entries * BAR
        if width:
            canvas.rect(at, middle - 6, max(width, 1), 12, kind_class(state, 0), f"{count(node.states[state])} {state}")
            at += width


def _label(row: Row, tokens: bool, room: float) -> tuple[str, str]:
    """The tokens of a node, so far as there is room, and what ends or is hidden there."""
    node = row.node
    if node is None:
        return f"and {plural(row.n_hidden, 'more branch', 'more branches')}", ""
    own, n_below = node.end - node.start, node.count - len(node.leaves)
    said = [f"entry {node.leaves[0].sequence}"] if len(node.leaves) == 1 else \
        [f"{count(len(node.leaves))} equal entries"] if node.leaves else []
    if n_below and not row.is_open:
        said.append(f"and {count(n_below)} longer")
    behind = " ".join(said)
    if not tokens:
        return plural(own, "token", "tokens"), behind
    ids = [str(token) for token in node.edge(64)]
    for n_shown in range(len(ids), 0, -1):
        text = " ".join(ids[:n_shown]) + (f" .. +{count(own - n_shown)}" if n_shown < own else "")
        if text_width(text + behind, 12) <= room - 30:
            break
    return text, behind


def grouped_leaves(picture: Picture, rows: list[EntryRow]) -> tuple[dict[bytes, list[Leaf]], int]:
    """The entries with their tokens, by the bytes of their namespace; and how many cannot be read."""
    groups: dict[bytes, list[Leaf]] = {}
    # keys of a sound picture lie side by side: what claims more bytes than there are is not copied
    n_unreadable, left = 0, picture.layout.meta.nbytes
    for row in rows:
        key = _key_of(picture, row)
        left -= len(key)
        try:
            if row.broken or left < 0:
                raise SegmentBroken(row.broken)
            head, tokens = keys.split(key)
            groups.setdefault(bytes(head), []).append(Leaf(bytes(tokens), row.sequence, row.state))
        except SegmentBroken:
            n_unreadable += 1
    return groups, n_unreadable


def _key_of(picture: Picture, row: EntryRow) -> memoryview:
    area, meta, words = picture.layout.entries, picture.layout.meta, picture.words
    at = area.word + row.slot * area.stride
    start, nbytes = words[at + Entry.meta_at], words[at + Entry.key_bytes]
    sound = start + nbytes <= meta.nbytes
    return memoryview(picture.raw)[meta.at + start:meta.at + start + nbytes] if sound else memoryview(b"")


def namespace_text(head: bytes) -> str:
    try:
        names = decode_namespace(head)
    except SegmentBroken:
        return "a namespace of no sense"
    return "  ".join(f"{name[:60]}={_shown(value)}" for name, value in names.items()) or "no namespace"


def _shown(value: Any) -> str:
    try:
        return show(value)
    except ValueError:  # a list of numbers of thousands of digits
        return f"a {type(value).__name__}"


def plural(n: int, one: str, many: str) -> str:
    return f"{count(n)} {one if n == 1 else many}"
