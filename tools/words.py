"""What the verbs say in the same words: the state of a picture and by whom, peers, entries, waits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import click

from shmkv.inspector import EntryRow, Picture, State, WaitRow

from .text import age, coloured, shortened, size, table, wrapped


def head(picture: Picture) -> list[str]:
    """The first line of every view: nobody should take a torn picture for a sound one."""
    first, *rest = wrapped(f"{picture.name}: {state(picture)}", "  ")
    return [click.style(first[:len(picture.name) + 1], bold=True) + first[len(picture.name) + 1:], *rest]


def state(picture: Picture) -> str:
    """At rest, moving or torn, by whom, and who holds the lock."""
    said = coloured(picture.state.value)
    by = peer(picture, picture.mutator())
    if picture.state == State.TORN:
        said += f": left half changed by {by}"
    elif picture.state == State.MOVING:
        said += f": it changed while it was looked at, last by {by}"
    return f"{said}; {lock(picture)}" if picture.lock_pid is not None else said


def lock(picture: Picture) -> str:
    holders = [row for row in picture.peers() if row.pid == picture.lock_pid]
    if picture.lock_pid is not None and picture.lock_pid <= 0:
        return "the lock is held by a process of another PID namespace"
    return f"pid {picture.lock_pid} holds the lock" + (f" ({coloured(holders[0].life)})" if holders else "")


def peer(picture: Picture, index: int | None) -> str:
    """`1 decode, pid 12, alive`"""
    if index is None:
        return "nobody known"
    row = next((row for row in picture.peers() if row.index == index), None)
    if row is None:
        return f"peer {index}, who is {coloured('gone')}"
    return f"peer {index}{f' {row.role}' if row.role else ''} (pid {row.pid}, {coloured(row.life)})"


def name_of(picture: Picture, index: int) -> str:
    row = next((row for row in picture.peers() if row.index == index), None)
    return f"{index} {row.role}".strip() if row else f"{index}"


def wanted(row: WaitRow) -> str:
    return f"room for {size(row.nbytes)}" if row.kind == "room" else row.text


def tokens(first: list[int], n_tokens: int) -> str:
    return " ".join(map(str, first)) + (" .." if n_tokens > len(first) else "")


def tensors(row: EntryRow) -> str:
    """`2xf32[2,3,64]`: neighbours of one kind together."""
    if row.broken:
        return f"unreadable: {row.broken}"
    kinds = [f"{short(tensor['dtype'])}[{','.join(map(str, tensor['shape']))}]" for tensor in row.tensors]
    counted = ((kind, len(list(alike))) for kind, alike in groupby(kinds))
    return " ".join(f"{n}x{kind}" if n > 1 else kind for kind, n in counted)


def short(dtype: str) -> str:
    """bf16, f32, u8, i64"""
    for long, letters in (("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c")):
        dtype = dtype.replace(long, letters)
    return dtype


def namespace(names: dict) -> str:
    from shmkv.inspector import printable
    return printable(shortened(" ".join(f"{name}={value!r}" if not isinstance(value, int) or not value >> 64 else
                                        f"{name}=.." for name, value in names.items()), 400))


# ---------------------------------------------------------------- tables

def peer_lines(picture: Picture, rows: list) -> Iterator[str]:
    waits: dict[int, list[WaitRow]] = {}
    for row in picture.waiters():
        waits.setdefault(row.peer, []).append(row)
    cells = [(row.index, row.role, row.pid, row.life, " ".join(row.roles) + (" closed" if row.closed else ""),
              age(picture.now_ns - row.attached_ns), row.leases or "", row.signals or "", row.signals_lost or "",
              "; ".join(_waits_for(picture, one) for one in waits.get(row.index, [])))
             for row in rows]
    yield from table("peer> role? pid> life does~ attached>- leases>?- signals>?- lost>? waits_for~?", cells)


def _waits_for(picture: Picture, row: WaitRow) -> str:
    on = f" on {' '.join(map(str, row.on[:8]))}" if row.on else ""
    return f"{wanted(row)}{on}, {age(picture.now_ns - row.since_ns)}"


def entry_lines(picture: Picture, rows: list[EntryRow], with_tokens: bool = True) -> Iterator[str]:
    """One line an entry (slot and generation as `7.1`); namespaces have a letter, and are spelled out below."""
    letters: dict[str, str] = {}
    cells = []
    for row in rows:
        names = namespace(row.namespace)
        letter = letters.setdefault(names, _letter(len(letters))) if names else ""
        cells.append((row.sequence, f"{row.slot}.{row.generation}", row.state, "yes" if row.moving else "",
                      "-" if row.producer is None else row.producer, row.n_tokens,
                      tokens(row.tokens, row.n_tokens) if with_tokens else "", letter, tensors(row),
                      "" if row.where == "host" else row.where, size(row.nbytes), age(picture.now_ns - row.created_ns),
                      "" if row.ttl_left_ns is None else age(row.ttl_left_ns), " ".join(map(str, row.holders))))
    yield from table("entry> slot- state moving? by>- tokens> first~~? ns? tensors~ where? bytes> age> ttl>? "
                     "held~?", cells)
    for names, letter in letters.items():
        yield f"namespace {letter}: {names}"


def _letter(number: int) -> str:
    return chr(ord("a") + number) if number < 26 else str(number)


def event_lines(picture: Picture, events: list[Any]) -> Iterator[str]:
    cells = [(age(picture.now_ns - event.time_ns), event.kind.name.lower(), event.sequence or "",
              f"{event.slot}.{event.generation}" if event.generation else "", event.n_tokens or "", event.peer,
              event.pid) for event in events]
    yield from table("ago> what entry> slot tokens> by> pid>", cells)
