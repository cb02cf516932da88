"""`shmkv ls`: the segments of this host, with what a glance has to tell: is somebody alive, is it full, who waits."""

from __future__ import annotations

from typing import Any

import click

from .target import JSON, emit, example
from .text import age, echo, size, table, wrapped


@click.command("ls", epilog=example("shmkv ls", "shmkv ls --json | jq '.segments[].name'"))
@JSON
def command(as_json: bool) -> None:
    """List the segments of this host (as far as this container's /dev/shm goes)."""
    segments, unreadable = found()
    if as_json:
        return emit({"segments": segments, "unreadable": unreadable})
    if segments:
        echo(table("owner state used> of>- entries~ peers> waits>? age>- name", map(cells, segments)))
    for one in unreadable:
        echo(wrapped(f"{one['name']}: {one['error']}", "  "))
    if not segments and not unreadable:
        click.echo("no segments", err=True)


def found() -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    from shmkv import inspector
    from shmkv.errors import NoSuchSegment, ShmkvError

    from . import facts
    segments, unreadable = [], []
    for name in inspector.names():
        try:
            segments.append(facts.segment(inspector.look(name)))
        except NoSuchSegment:
            continue  # removed meanwhile
        except ShmkvError as error:
            unreadable.append({"name": name, "error": error.args[0]})
    return segments, unreadable


def cells(one: dict[str, Any]) -> tuple:
    """The name last: it is what one copies, so it is never shortened."""
    entries = " ".join(f"{one['entries'][state]} {state}" for state in ("ready", "taken", "reserved", "dropped")
                       if one["entries"][state])
    return (one["owner_life"], one["state"], f"{100 * one['used_bytes'] // one['arena_bytes']}%",
            size(one["arena_bytes"]), entries or "none", one["peers"], one["waiters"] or "",
            age(one["taken_ns"] - one["born_ns"]), one["name"])
