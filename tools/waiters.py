"""`shmkv waiters`: who waits for whom, drawn; and the cycle, if they wait for each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from . import target
from .target import emit, example
from .text import age, coloured, echo, is_unicode

if TYPE_CHECKING:
    from shmkv.inspector import Picture, WaitRow

SORTS = {"since": lambda row: row.since_ns, "peer": lambda row: row.peer,
         "deadline": lambda row: row.deadline_ns if row.deadline_ns is not None else 1 << 64}
KINDS = ("entry", "room", "signal", "request", "answer")
MOST_ARROWS = 8


@click.command("waiters", epilog=example("shmkv waiters toy", "shmkv waiters --file toy.core --state room"))
@target.looks
@click.option("--sort", type=click.Choice(list(SORTS)), default="since", show_default=True, help="Earliest first.")
@click.option("--state", type=click.Choice(KINDS), multiple=True, help="Only those who wait for this.")
@target.LIMIT
@target.REVERSE
@target.NO_TOKENS
def command(name: str | None, file: str | None, as_json: bool, sort: str, state: tuple[str, ...], limit: int | None,
            reverse: bool, no_tokens: bool) -> None:
    """Who waits for what, since when and on whom. A peer in a cycle waits for others who all wait too."""
    from . import facts, words
    picture = target.picture(name, file)
    rows = [row for row in picture.waiters() if not state or row.kind in state]
    rows = sorted(rows, key=SORTS[sort], reverse=reverse)[:limit]
    if as_json:
        emit({"segment": facts.segment(picture), "waiters": [facts.waiter_of(row, not no_tokens) for row in rows],
              "cycle": picture.cycle(), "holdouts": facts.holdouts(picture)})
        return
    echo([*words.head(picture), *lines(picture, rows, not no_tokens), *held_up(picture)])


def lines(picture: Picture, rows: list[WaitRow], with_tokens: bool = True) -> Iterator[str]:
    if not rows:
        yield "nobody waits"
        return
    waiting = {row.peer for row in picture.waiters()}
    for row in rows:
        yield from _drawn(picture, row, waiting, with_tokens)
    cycle = picture.cycle()
    if cycle:
        from .words import name_of
        around = f" {_arrow()} ".join(name_of(picture, peer) for peer in [*cycle, cycle[0]])
        yield click.style(f"they wait for each other: {around}", fg="red", bold=True)


def held_up(picture: Picture) -> Iterator[str]:
    """Device memory whose owner is gone, and who still has it mapped."""
    from . import facts
    for row in facts.holdouts(picture):
        pids = ", ".join(map(str, row["mapped_by"]))
        yield f"region {row['region']}: its owner is gone; it waits for pid {pids} to drop its last view"


def _drawn(picture: Picture, row: WaitRow, waiting: set[int], with_tokens: bool) -> Iterator[str]:
    from .words import name_of, tokens, wanted
    left = "no deadline" if row.deadline_ns is None else f"{age(row.deadline_ns - picture.now_ns)} left"
    yield (f"{click.style(name_of(picture, row.peer), bold=True)} (pid {row.pid}, "
           f"{coloured(picture.life(row.peer))}) waits for {wanted(row)}")
    branch, last = ("├─", "└─") if is_unicode() else ("|-", "`-")
    details = [f"for {age(picture.now_ns - row.since_ns)}, {left}"]
    if row.tokens and with_tokens:
        details.append(f"tokens {tokens(row.tokens, row.n_tokens)}")
    details += [f"{_arrow()} {_target(picture, peer, waiting)}" for peer in row.on[:MOST_ARROWS]]
    if len(row.on) > MOST_ARROWS:
        details.append(f"{_arrow()} {len(row.on) - MOST_ARROWS} more")
    for at, text in enumerate(details):
        yield f"  {last if at + 1 == len(details) else branch} {text}"


def _target(picture: Picture, peer: int, waiting: set[int]) -> str:
    from .words import name_of
    return (f"{name_of(picture, peer)} (pid {picture.pid(peer)}, {coloured(picture.life(peer))})"
            f"{', who waits too' if peer in waiting else ''}")


def _arrow() -> str:
    return "→" if is_unicode() else "->"
