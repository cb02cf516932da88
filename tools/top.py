"""`shmkv top`: a segment as it lives, a picture an interval, on the whole terminal or as plain text."""

from __future__ import annotations

import os
import sys
import time

import click

from shmkv.errors import NoSuchSegment, ShmkvError
from shmkv.inspector import Picture, look

from .frame import Frame, Line, plain
from .screen import Screen
from .target import NAME, NO_TOKENS, example
from .text import is_unicode

SIGNALS_END = {"SIGINT": 0, "SIGTERM": 143, "SIGHUP": 129}


@click.command(name="top", epilog=example("shmkv top toy --interval 0.5"))
@NAME
@click.option("--interval", type=click.FloatRange(0.05, 3600), default=1.0, show_default=True, metavar="S",
              help="Seconds from picture to picture.")
@click.option("--frames", type=click.IntRange(min=1), metavar="N", help="End after N frames.")
@NO_TOKENS
@click.pass_context
def command(ctx: click.Context, name: str, interval: float, frames: int | None, no_tokens: bool) -> None:
    """Watch the segment NAME live; q and Ctrl-C quit.

    Occupancy, rates and hit rate since the frame before, the oldest entry, who waits for what, and the peers as the
    kernel sees them. The histogram shows how long entries lay sealed before a consumer took them (READY to TAKEN), of
    those that the journal of recent events still has; look-ups that share an entry do not count.

    Nothing is locked and no peer is made of us. Where the output is no terminal, each frame is plain text. Exits with
    1 when the segment is gone.
    """
    if interval != interval:
        raise click.BadParameter("not a number", param_hint="--interval")
    first = look(name)
    try:
        (watch if sys.stdout.isatty() else report)(first, interval, frames, not no_tokens)
    except NoSuchSegment:
        click.echo(f"shmkv: the segment {name} is gone", err=True)
        ctx.exit(1)


def report(picture: Picture, interval: float, frames: int | None, tokens: bool) -> None:
    """Frames as plain text."""
    frame, before, n = Frame(blocks=is_unicode(), tokens=tokens), None, 0
    try:
        while True:
            n += 1
            lines, before = _drawn(frame, picture.name, before, picture if n == 1 else None)
            click.echo("\n".join(plain(line) for line in lines))
            if n == frames:
                return
            click.echo()
            time.sleep(interval)
    except KeyboardInterrupt:
        return


def watch(picture: Picture, interval: float, frames: int | None, tokens: bool) -> None:
    """Frames on the screen, until told to end."""
    before, n = None, 0
    with Screen(colours=not os.environ.get("NO_COLOR")) as screen:
        due = time.monotonic()
        while True:
            n += 1
            frame = Frame(*screen.size(), is_unicode(), tokens)
            note = f"every {interval:g} s   {time.strftime('%H:%M:%S')}   q quits"
            lines, before = _drawn(frame, picture.name, before, picture if n == 1 else None, note)
            screen.show(lines)
            due = max(due + interval, time.monotonic())
            event = _next(screen, due)
            if event == "q" or n == frames:
                return
            if event in SIGNALS_END:
                break
    sys.exit(SIGNALS_END[event])


def _next(screen: Screen, due: float) -> str:
    """Wait for the next frame's time; returns what ended the wait, "" or SIGWINCH if a frame is to follow."""
    while True:
        event = screen.wait(due - time.monotonic())
        if event == "SIGTSTP":
            screen.suspend()
            return ""
        if event != "key":
            return event


def _drawn(frame: Frame, name: str, before: Picture | None, picture: Picture | None,
           note: str = "") -> tuple[list[Line], Picture | None]:
    """The lines of a new picture (or of the given one), and that picture; raises NoSuchSegment and nothing else."""
    try:
        picture = picture or look(name)
        return frame.lines(picture, before, note), picture
    except NoSuchSegment:
        raise
    except ShmkvError as error:  # what is broken may be replaced by its creator: look again next time
        return frame.trouble(name, error.args[0]), before
