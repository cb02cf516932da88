"""`shmkv entries`: the entries of a segment, sorted and narrowed."""

from __future__ import annotations

import click

from . import target
from .target import emit, example
from .text import echo

SORTS = {"sequence": lambda row: row.sequence, "slot": lambda row: row.slot, "age": lambda row: row.created_ns,
         "used": lambda row: row.used_ns, "bytes": lambda row: -row.nbytes, "tokens": lambda row: -row.n_tokens,
         "ttl": lambda row: row.ttl_left_ns if row.ttl_left_ns is not None else 1 << 64}
STATES = ("reserved", "ready", "taken", "dropped")


@click.command("entries", epilog=example("shmkv entries toy --state ready --sort bytes --limit 10"))
@target.looks
@click.option("--sort", type=click.Choice(list(SORTS)), default="sequence", show_default=True,
              help="age, used: oldest first; bytes, tokens: most first; ttl: soonest first.")
@click.option("--state", type=click.Choice(STATES), multiple=True, help="Only these; may be given again.")
@target.LIMIT
@target.REVERSE
@target.NO_TOKENS
def command(name: str | None, file: str | None, as_json: bool, sort: str, state: tuple[str, ...], limit: int | None,
            reverse: bool, no_tokens: bool) -> None:
    """The entries of a segment: state, tokens, namespace, tensors, age, time left, holders."""
    from . import facts, words
    picture = target.picture(name, file)
    rows = [row for row in picture.entries(0 if no_tokens else facts.FIRST_TOKENS) if not state or row.state in state]
    rows = sorted(rows, key=SORTS[sort], reverse=reverse)[:limit]
    if as_json:
        emit({"segment": facts.segment(picture), "entries": [facts.entry_of(row, not no_tokens) for row in rows]})
        return
    echo([*words.head(picture), *words.entry_lines(picture, rows, not no_tokens)])
