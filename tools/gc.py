"""`shmkv gc`: removes the segments and semaphores that dead processes left in /dev/shm, and says why for each."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator

import click

from shmkv import residue, segment, sync
from shmkv.errors import NoSuchSegment, ShmkvError

from . import target
from .target import emit, example


@click.command("gc", epilog=example("shmkv gc --dry-run", "shmkv gc toy"))
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=target.complete_names)
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@target.JSON
def command(names: tuple[str, ...], dry_run: bool, as_json: bool) -> None:
    """Remove what dead processes left in /dev/shm: the segments named (default: all), and without names also the
    semaphores of segments that are gone. Never what a living process is attached to, never foreign files.
    """
    found = []
    for name, goes, why in objects(names, dry_run):
        found.append({"name": name, "removed": goes, "why": why})
        if not as_json:
            click.echo(f"{name}: {verb(dry_run) if goes else 'kept'}, {why}" if why else f"{name}: gone meanwhile")
    if as_json:
        return emit({"dry_run": dry_run, "objects": found})
    click.echo(f"{sum(one['removed'] for one in found)} {verb(dry_run)}")


def verb(dry_run: bool) -> str:
    return "to be removed" if dry_run else "removed"


def objects(names: tuple[str, ...], dry_run: bool) -> Iterator[tuple[str, bool, str]]:
    """Name, whether it goes (unless this is a dry run, it is gone by then), and why."""
    for name in sorted(names or segments()):
        try:
            name = segment.clean_name(name)
            gone = residue.is_abandoned(name) if dry_run else residue.remove_abandoned(name)
            yield name, gone, "all its processes are dead" if gone else "a process that lives is attached"
        except NoSuchSegment:
            if names:
                raise
            yield name, False, ""
        except ShmkvError as error:
            yield name, False, error.args[0]
    for bell in sorted(orphans() if not names else ()):
        unseen = why_unseen()
        if not dry_run and not unseen:
            sync.silence(f"/{bell.removeprefix('sem.')}")
        yield bell, not unseen, unseen or "its segment is gone and no process has it mapped"


BELL = re.compile(rf"sem\.{re.escape(segment.PREFIX)}{segment.NAME.pattern}\.[0-9a-f]{{16}}\.\d+\.\d+", re.ASCII)
SEMAPHORE_BYTES = 32
FIRST_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO of include/linux/proc_ns.h


def segments() -> list[str]:
    names = (file.removeprefix(segment.PREFIX) for file in os.listdir(segment.DIRECTORY)
             if file.startswith(segment.PREFIX))
    return [name for name in names if segment.NAME.fullmatch(name)]


def orphans() -> list[str]:
    """Semaphores of segments without a name that no process of this host's /proc has mapped."""
    files = [file for file in os.listdir(segment.DIRECTORY) if BELL.fullmatch(file) and is_ours(file)]
    living = {f"sem.{segment.PREFIX}{name}." for name in segments()}
    lost = [file for file in files if not any(file.startswith(prefix) for prefix in living)]
    mapped = mapped_inodes() if lost else set()
    return [file for file in lost if os.stat(f"{segment.DIRECTORY}/{file}").st_ino not in mapped]


def is_ours(file: str) -> bool:
    """Whether it is what the C library makes of a semaphore of this user."""
    try:
        status = os.lstat(f"{segment.DIRECTORY}/{file}")
    except FileNotFoundError:
        return False
    return (stat.S_ISREG(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o600
            and status.st_uid == os.geteuid() and status.st_size == SEMAPHORE_BYTES)


def why_unseen() -> str:
    """Why there may be processes that /proc does not show us; "" if it shows all."""
    if os.stat("/proc/self/ns/pid").st_ino != FIRST_PID_NAMESPACE:
        return "processes outside this PID namespace cannot be seen"
    return "" if os.geteuid() == 0 else unreadable()


def unreadable() -> str:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{pid}").st_uid == os.geteuid():
                with open(f"/proc/{pid}/maps"):
                    pass
        except FileNotFoundError:
            continue
        except OSError:
            return f"what process {pid} has mapped cannot be seen"
    return ""


def mapped_inodes() -> set[int]:
    inodes = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/maps") as maps:
                inodes |= {int(line.split()[4]) for line in maps if segment.DIRECTORY in line}
        except OSError:
            continue
    return inodes
