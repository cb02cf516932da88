"""`shmkv gc`: removes the segments and semaphores that dead processes left in /dev/shm, and says why for each."""

import argparse
import os

from shmkv import residue, segment, sync
from shmkv.errors import NoSuchSegment, ShmkvError


def main(argv: list[str]) -> int:
    arguments = parser().parse_args(argv)
    n_removed = 0
    for name in sorted(arguments.names or segments()):
        try:
            gone = residue.is_abandoned(name) if arguments.dry_run else residue.remove_abandoned(name)
            n_removed += gone
            print(f"{name}: {verb(arguments, 'removed') if gone else 'kept'}, "
                  f"{'all its processes are dead' if gone else 'a process that lives is attached'}")
        except NoSuchSegment:
            print(f"{name}: gone meanwhile")
        except ShmkvError as error:
            print(f"{name}: kept, {error.args[0]}")
    for bell in sorted(orphans() if not arguments.names else ()):
        n_removed += 1
        print(f"{bell}: {verb(arguments, 'removed')}, its segment is gone and no process has it mapped")
        if not arguments.dry_run:
            sync.silence(f"/{bell.removeprefix('sem.')}")
    print(f"{n_removed} {verb(arguments, 'removed')}")
    return 0


def verb(arguments: argparse.Namespace, word: str) -> str:
    return f"to be {word}" if arguments.dry_run else word


def segments() -> list[str]:
    names = (file.removeprefix(segment.PREFIX) for file in os.listdir(segment.DIRECTORY)
             if file.startswith(segment.PREFIX))
    return [name for name in names if segment.NAME.fullmatch(name)]


def orphans() -> list[str]:
    """Semaphores of segments without a name that no process of this host's /proc has mapped."""
    files = [file for file in os.listdir(segment.DIRECTORY) if file.startswith(f"sem.{segment.PREFIX}")]
    living = {f"sem.{segment.PREFIX}{name}." for name in segments()}
    lost = [file for file in files if not any(file.startswith(prefix) for prefix in living)]
    mapped = mapped_inodes() if lost else set()
    return [file for file in lost if os.stat(f"{segment.DIRECTORY}/{file}").st_ino not in mapped]


def mapped_inodes() -> set[int]:
    inodes = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/maps") as maps:
                inodes |= {int(line.split()[4]) for line in maps if segment.DIRECTORY in line}
        except OSError:
            continue
    return inodes


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="shmkv gc", description=__doc__.partition(": ")[2],
                                     epilog="example: shmkv gc --dry-run")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these (default: all, and lost semaphores)")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    return parser
