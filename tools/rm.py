"""`shmkv rm`: removes one segment, that of living peers only by force."""

from __future__ import annotations

import os

import click

from . import target
from .target import emit, example

REFUSED = 1


@click.command("rm", epilog=example("shmkv rm toy", "", "exits with 0 if it is removed, 1 if somebody lives there"))
@target.NAME
@click.option("--force", is_flag=True, help="Also if peers live (they go on with what they have mapped), or if it is "
                                            "broken. Never what is not yours.")
@target.JSON
def command(name: str, force: bool, as_json: bool) -> int:
    """Remove a segment whose processes are all dead."""
    from shmkv import segment
    name = segment.clean_name(name)
    why = refusal(name, force)
    if as_json:
        emit({"name": name, "removed": not why, "why": why or "removed"})
    elif why:
        click.echo(f"shmkv: {name} is kept: {why}", err=True)
    else:
        click.echo(f"{name}: removed")
    return REFUSED if why else 0


def refusal(name: str, force: bool) -> str:
    """Remove it; returns why not, "" if it is gone."""
    from shmkv import residue, segment
    from shmkv.errors import FormatMismatch, SegmentBroken
    try:
        if residue.remove_abandoned(name):
            return ""
    except (SegmentBroken, FormatMismatch) as error:
        if not force:
            return f"{error.args[0]} (--force removes it all the same)"
    if not force:
        return f"{living(name)} (--force removes the name all the same)"
    os.close(segment.open_checked(name, os.O_RDONLY))  # never what is not ours
    os.unlink(segment.path_of(name))
    return ""


def living(name: str) -> str:
    from shmkv import inspector
    picture = inspector.look(name)
    pids = sorted({row.pid for row in picture.peers() if row.life in ("alive", "stopped")})
    if pids:
        return f"attached is pid {', '.join(map(str, pids))}"
    return f"pid {picture.lock_pid} holds its lock" if picture.lock_pid else "a process that lives is attached"
