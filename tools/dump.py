"""`shmkv dump`: all of a segment, for people and for programs; kept in a file, to be looked at elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from . import target
from .target import emit, example
from .text import age, echo, fields, grid, size, table, title

if TYPE_CHECKING:
    from shmkv.inspector import Picture

FIRST_EVENTS = 20


@click.command("dump", epilog=example("shmkv dump toy", "shmkv dump toy --core toy.core", "shmkv dump --file toy.core"))
@target.looks
@click.option("--core", type=click.Path(), metavar="FILE",
              help="Keep the picture in FILE (mode 0600: it has all token ids, but no tensors) and show nothing.")
@target.NO_TOKENS
def command(name: str | None, file: str | None, as_json: bool, core: str | None, no_tokens: bool) -> None:
    """All of a segment: header, peers, waits, entries, leases, arena, signals, counters, regions, events."""
    from . import facts
    if core and no_tokens:
        raise click.UsageError("--core keeps the token ids: it cannot be had with --no-tokens")
    if core and as_json:
        raise click.UsageError("--core writes a file: it cannot be had with --json")
    picture = target.picture(name, file)
    if core:
        picture.save(core)
        click.echo(f"{core}: {picture.name} as it was, {picture.state.value}; shmkv dump --file {core}")
        return
    if as_json:
        read, unreadable = facts.sections(picture, not no_tokens)
        emit({**read, "unreadable": unreadable})
        return
    echo(lines(picture, not no_tokens))


def lines(picture: Picture, with_tokens: bool) -> Iterator[str]:
    """Section by section; what is broken is named in its place, and the rest is shown."""
    from shmkv.errors import ShmkvError

    from . import waiters, words
    rows = list(picture.entries(8 if with_tokens else 0))
    parts = {
        "": lambda: header_lines(picture), "peers": lambda: words.peer_lines(picture, picture.peers()),
        "waiters": lambda: waiters.lines(picture, picture.waiters(), with_tokens),
        "entries": lambda: words.entry_lines(picture, rows, with_tokens) if rows else (),
        "leases": lambda: lease_lines(picture), "payload arena": lambda: arena_lines(picture, rows),
        "regions": lambda: region_lines(picture), "unread signals": lambda: signal_lines(picture),
        "counters": lambda: counter_lines(picture), "last events": lambda: event_lines(picture),
    }
    for name, part in parts.items():
        try:
            found = list(part())
        except ShmkvError as error:
            found = [click.style(f"cannot be read: {error.args[0]}", fg="red")]
        if found:
            yield from ["", title(name), *found] if name else found


def header_lines(picture: Picture) -> list[str]:
    from . import facts, words
    one = facts.segment(picture)
    largest = max((nbytes for _, nbytes in picture.holes()), default=0)
    owner = words.peer(picture, one["owner"]) if one["owner"] is not None else "has left"
    entries = ", ".join(f"{n} {state}" for state, n in one["entries"].items() if n and state != "free")
    return [*words.head(picture), *fields([
        ("owner", f"{owner}; created by pid {one['owner_pid']}, {age(one['taken_ns'] - one['born_ns'])} ago"
                  f"{', its name was removed' if one['unlinked'] else ''}"),
        ("payload", f"{size(one['used_bytes'])} of {size(one['arena_bytes'])} in {len(picture.runs())} runs, "
                    f"largest hole {size(largest)}"),
        ("meta", f"{size(one['meta_used_bytes'])} of {size(one['meta_bytes'])} (token ids, tensor descriptors)"),
        ("entries", f"{entries or 'none'}; {one['entries']['free']} of {one['slots']} slots are free"),
        ("tables", f"{one['peers']} of {one['peers_max']} peers, {one['waiters']} waiting (at most "
                   f"{one['waits_max']}), {one['leases']} of {one['leases_max']} leases"),
        ("changes", f"{picture.header()['mutation'] // 2}, the last by {words.peer(picture, picture.mutator())}"),
    ])]


def lease_lines(picture: Picture) -> list[str]:
    cells = [(row["kind"], row["sequence"], row["slot"], row["peer"], picture.life(row["peer"]),
              age(picture.now_ns - row["since_ns"]), "yes" if row["released"] else "", row["path"] or "",
              "; ".join(f"not {path}: {why}" for path, why in row["refused"].items())) for row in picture.leases()]
    return table("kind entry> slot> by> life since> released? path? why~?", cells) if cells else []


def arena_lines(picture: Picture, rows: list[Any]) -> list[str]:
    """The runs and the holes between them, by address."""
    pieces = [(row.run_at, row.run_bytes, f"entry {row.sequence}", row.state) for row in rows
              if row.where == "host" and row.run_bytes]
    pieces += [(at, nbytes, "hole", "") for at, nbytes in picture.holes()]
    return table("at> bytes> what state", [(hex(at), size(nbytes), what, state)
                                           for at, nbytes, what, state in sorted(pieces)])


def region_lines(picture: Picture) -> list[str]:
    cells = [(row["index"], row["state"], row["kind"], row["owner"], row["device"], size(row["nbytes"]),
              size(row["used_bytes"]), " ".join(map(str, row["mapped_by"]))) for row in picture.regions()]
    return table("region> state kind owner> device~ bytes> used> mapped_by~?", cells) if cells else []


def signal_lines(picture: Picture) -> list[str]:
    cells = [(row["to"], row["kind"], row["sequence"] or "", row["sender"], row["value"],
              age(picture.now_ns - row["time_ns"])) for row in picture.signals()]
    return table("to> what entry> from> value> ago>", cells) if cells else []


def counter_lines(picture: Picture) -> list[str]:
    found = {**picture.counters(), **{f"by {path}": n for path, n in picture.paths().items()}}
    return grid([f"{name.replace('_', ' ')} {n}" for name, n in found.items() if n])


def event_lines(picture: Picture) -> list[str]:
    from . import words
    events = picture.events()
    more = [f"({len(events) - FIRST_EVENTS} before these: --json has them)"] if len(events) > FIRST_EVENTS else []
    return [*more, *words.event_lines(picture, events[-FIRST_EVENTS:])] if events else []
