"""`shmkv check`: does a segment contradict itself; with --fix, and only then, a peer that recovers it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from . import target
from .target import emit, example
from .text import echo, wrapped

if TYPE_CHECKING:
    from shmkv.inspector import Picture

SOUND, PROBLEMS = 0, 1
LOOKS = 5
COUNTED = {"recoveries": "rebuilt what was left half changed", "deaths": "took over what dead peers left",
           "redelivered": "made entries that the dead had taken ready again", "aborted": "gave up half-written entries",
           "expired": "freed expired entries", "lost": "freed entries of device memory that is gone"}


@click.command("check", epilog=example("shmkv check toy", "shmkv check toy --fix", "",
                                       "exits with 0 if sound, 1 if there are problems, 2 if it cannot be looked at"))
@target.looks
@click.option("--fix", is_flag=True, help="Attach like a peer, which recovers, and look again (imports torch).")
def command(name: str | None, file: str | None, as_json: bool, fix: bool) -> int:
    """Each way in which a segment contradicts itself. A dead peer is no contradiction, but it is mentioned."""
    from . import facts
    if fix and not name:
        raise click.UsageError("--fix needs the NAME of a segment")
    picture = at_rest(name, file)
    before = picture.problems()
    done = fixed(str(name)) if fix else {}
    if fix:
        picture = at_rest(name, None)
    problems = picture.problems()
    if as_json:
        emit({"segment": facts.segment(picture), "problems": problems, "before": before, "fixed": done})
    else:
        echo([*(f"did: {COUNTED[counter]} ({n})" for counter, n in done.items()),
              *(["nothing was to be done"] if fix and not done else []), *said(picture, problems)])
    return PROBLEMS if problems else SOUND


def at_rest(name: str | None, file: str | None) -> Picture:
    """A picture in motion may contradict itself without anything being wrong: then look again."""
    for _ in range(LOOKS):
        picture = target.picture(name, file)
        if picture.state.value != "moving":
            return picture
    raise click.ClickException(f"{picture.name} is changed all the time: no picture of it at rest could be had")


def said(picture: Picture, problems: list[str]) -> list[str]:
    from . import words
    dead = [row for row in picture.peers() if row.life == "dead"]
    notes = [f"note: {words.peer(picture, row.index)} has not been cleaned up after: the next who needs the lock does"
             for row in dead]
    count = f"{len(problems)} problem{'s' * (len(problems) > 1)}" if problems else "sound"
    return [*wrapped(f"{picture.name}: {count}; {words.state(picture)}", "  "),
            *(line for problem in problems for line in wrapped(f"  {problem}", "    ")),
            *(line for note in notes for line in wrapped(note, "  "))]


def fixed(name: str) -> dict[str, Any]:
    """What a peer that attached did before it saw anything, by counter."""
    import shmkv
    from shmkv import inspector
    before = inspector.look(name).counters()
    with shmkv.attach(name, role="shmkv check --fix") as buffer:
        after = buffer.stats().counters
    return {counter: after[counter] - before[counter] for counter in COUNTED if after[counter] > before[counter]}
