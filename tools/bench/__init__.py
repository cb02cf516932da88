"""`shmkv bench`: the hand-off and the copy, each beside its limit, and the look-up, measured in one run.

Handoff: microseconds from the producer's seal() of tensors made in place to the waiting consumer holding views, beside
the round trip of two bare posix_ipc semaphores between the same two processes. Copy: insert() of a private tensor,
beside one bare `torch.copy_` of the same bytes into warm shared memory. Lookup: the prefix order by itself. What is
compared takes turns round by round, after warm-up rounds, so that the machine's moods fall on all alike. Medians and
percentiles, never means. Looking (only if asked for: it takes minutes): what looking into a buffer costs its users.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys

from . import copying, handoff, looking, lookup
from .report import machine, table

SECTIONS = {"handoff": handoff.run, "copy": copying.run, "lookup": lookup.run, "looking": looking.run}


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    sections = arguments.sections.split(",")
    unknown = [section for section in sections if section not in SECTIONS]
    if unknown:
        print(f"shmkv: bench: no section {unknown[0]!r}; there are: {', '.join(SECTIONS)}", file=sys.stderr)
        return 2
    print(f"shmkv bench on {machine()}", file=sys.stderr)
    results: dict = {"machine": machine(), "python": platform.python_version()}
    for section in sections:
        for title, headers, rows, figures in SECTIONS[section](arguments.quick):
            print(table(title, headers, rows), flush=True)
            merge(results, figures)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=1)
    return 0


def merge(into: dict, figures: dict) -> None:
    """Merge nested dictionaries, in place."""
    for name, value in figures.items():
        if isinstance(value, dict):
            merge(into.setdefault(name, {}), value)
        else:
            into[name] = value


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="shmkv bench", description=__doc__.partition("\n")[0],
                                     epilog="example: shmkv bench --sections handoff --quick --json figures.json")
    parser.add_argument("--sections", default="handoff,copy,lookup", metavar="A,B", help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, under a minute")
    parser.add_argument("--json", metavar="FILE", help="write all figures to FILE")
    return parser
