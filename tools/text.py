"""How things are written on a terminal: aligned tables that fit, ages, bytes, colours. No rich: it takes too long."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence

import click

NARROWEST = 6
ROOMY = 100
MARKS = ">?-~"
GAP = "  "
COLOURS = {"dead": "red", "gone": "red", "torn": "red", "stopped": "yellow", "moving": "yellow", "taken": "yellow",
           "reserved": "cyan", "alive": "green", "ready": "green", "at rest": "green", "dropped": "magenta"}


def width() -> int:
    """Columns of the terminal; what is no terminal has 100."""
    return max(40, shutil.get_terminal_size((100, 24)).columns)


def is_unicode() -> bool:
    return (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "") == "utf8"


def table(headers: str, rows: Iterable[Sequence[object]], indent: str = "") -> list[str]:
    """Lines of an aligned table. Behind a header's name, `>` aligns it right, `?` leaves the column out where all its
    cells are empty, `-` where the terminal is narrow, `~` lets it be shortened to fit, `~~` before others.
    """
    marks = [header[len(header.rstrip(MARKS)):] for header in headers.split()]
    names = [header.rstrip(MARKS).replace("_", " ") for header in headers.split()]
    columns = [list(column) for column in zip(names, *([str(cell) for cell in row] for row in rows), strict=True)]
    kept = [at for at, column in enumerate(columns) if ("?" not in marks[at] or any(column[1:]))
            and not ("-" in marks[at] and width() < ROOMY)]
    columns, marks = [columns[at] for at in kept], [marks[at] for at in kept]
    widths = _fitted([max(map(len, column)) for column in columns], marks, width() - len(indent))
    padded = [_padded(column, room, mark) for column, room, mark in zip(columns, widths, marks, strict=True)]
    if ">" not in marks[-1]:
        padded[-1] = [click.style(word, fg=COLOURS[word]) if word in COLOURS else cell.rstrip()
                      for word, cell in zip(columns[-1], padded[-1], strict=True)]
    first, *rest = (GAP.join(cells).rstrip() for cells in zip(*padded, strict=True))
    return [indent + click.style(first, bold=True), *(indent + line for line in rest)]


def _fitted(widths: list[int], marks: list[str], room: int) -> list[int]:
    """Take from the widest column that may be shortened until all fit, or none can give any more."""
    over = sum(widths) + len(GAP) * (len(widths) - 1) - room
    for first in ("~~", "~"):
        givers = [at for at, mark in enumerate(marks) if first in mark and widths[at] > NARROWEST]
        while over > 0 and givers:
            widest = max(givers, key=widths.__getitem__)
            if widths[widest] <= NARROWEST:
                break
            widths[widest] -= 1
            over -= 1
    return widths


def _padded(column: list[str], room: int, mark: str) -> list[str]:
    """A whole column at once: a table may have thousands of lines."""
    pad = str.rjust if ">" in mark else str.ljust
    cells = [pad(cell if len(cell) <= room else shortened(cell, room), room) for cell in column]
    if COLOURS.keys().isdisjoint(column):
        return cells
    return [click.style(cell, fg=COLOURS[word]) if word in COLOURS else cell
            for word, cell in zip(column, cells, strict=True)]


def shortened(text: str, room: int) -> str:
    return text if len(text) <= room else text[:max(0, room - 2)] + ".."


def wrapped(text: str, indent: str) -> list[str]:
    """Broken at blanks; colours take no room, which is what textwrap does not know."""
    lines, room = [""], 0
    for word in text.split(" "):
        n = len(click.unstyle(word))
        if room + n > width() and lines[-1].strip():
            lines.append(indent)
            room = len(indent)
        lines[-1] += word + " "
        room += n + 1
    return [line.rstrip() for line in lines]


def coloured(word: str) -> str:
    return click.style(word, fg=COLOURS[word]) if word in COLOURS else word


def title(text: str, n: int | None = None) -> str:
    return click.style(text if n is None else f"{text} ({n})", bold=True)


def fields(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Names and values, the values below each other."""
    pairs = list(pairs)
    room = max(len(name) for name, _ in pairs)
    return [line for name, value in pairs for line in wrapped(f"{name:<{room}}  {value}", " " * (room + len(GAP)))]


def grid(cells: Sequence[str]) -> list[str]:
    """Cells in as many columns as fit."""
    if not cells:
        return []
    each = max(map(len, cells)) + len(GAP)
    across = max(1, (width() + len(GAP)) // each)
    rows = (cells[at:at + across] for at in range(0, len(cells), across))
    return ["".join(cell.ljust(each) for cell in row).rstrip() for row in rows]


def age(ns: int) -> str:
    """A duration with two or three digits that count."""
    seconds = max(0, ns) / 1e9
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    for most, big, small, names in ((3600, 60, 1, "ms"), (86400, 3600, 60, "hm"), (1 << 63, 86400, 3600, "dh")):
        if seconds < most:
            return f"{int(seconds // big)}{names[0]}{int(seconds % big // small):02}{names[1]}"
    return "ages"


def size(nbytes: int) -> str:
    if nbytes < 1 << 10:
        return f"{nbytes} B"
    for shift, unit in ((10, "KiB"), (20, "MiB"), (30, "GiB"), (40, "TiB")):
        if nbytes < 1000 << shift or unit == "TiB":
            return f"{nbytes / (1 << shift):.1f} {unit}"
    return ""


def echo(lines: Iterable[str]) -> None:
    click.echo("\n".join(lines))
