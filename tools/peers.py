"""`shmkv peers`: who is attached, and how the kernel says they are."""

from __future__ import annotations

import click

from . import target
from .target import emit, example
from .text import echo

SORTS = {"peer": lambda row: row.index, "pid": lambda row: row.pid, "role": lambda row: row.role,
         "age": lambda row: row.attached_ns, "leases": lambda row: -row.leases, "signals": lambda row: -row.signals}


@click.command("peers", epilog=example("shmkv peers toy", "shmkv peers toy --state dead --state stopped"))
@target.looks
@click.option("--sort", type=click.Choice(list(SORTS)), default="peer", show_default=True,
              help="age: oldest first; leases, signals: most first.")
@click.option("--state", type=click.Choice(("alive", "stopped", "dead", "unknown")), multiple=True,
              help="Only these; may be given again.")
@target.LIMIT
@target.REVERSE
def command(name: str | None, file: str | None, as_json: bool, sort: str, state: tuple[str, ...], limit: int | None,
            reverse: bool) -> None:
    """The peers of a segment: role, pid, alive, stopped or dead, what they hold and what they wait for."""
    from . import facts, words
    picture = target.picture(name, file)
    rows = [row for row in picture.peers() if not state or row.life in state]
    rows = sorted(rows, key=SORTS[sort], reverse=reverse)[:limit]
    if as_json:
        emit({"segment": facts.segment(picture), "peers": [row._asdict() for row in rows]})
        return
    echo([*words.head(picture), *words.peer_lines(picture, rows)])
