"""What a verb looks at: a segment of this host by NAME, or a file that was kept of one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from shmkv.inspector import Picture

SCHEMA = 1
"""of all that --json prints; see `schema`"""


def complete_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from shmkv import inspector
    return [name for name in inspector.names() if name.startswith(incomplete)]


NAME = click.argument("name", shell_complete=complete_names)
JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object (see `shmkv schema`).")
NO_TOKENS = click.option("--no-tokens", is_flag=True, help="Leave token ids out.")
LIMIT = click.option("--limit", type=click.IntRange(min=0), metavar="N", help="At most N of them.")
REVERSE = click.option("--reverse", is_flag=True, help="The other way round.")


def looks(function: Callable) -> Callable:
    """The arguments of a verb that looks at one segment: NAME or --file, and --json."""
    name = click.argument("name", required=False, shell_complete=complete_names)
    file = click.option("--file", type=click.Path(), metavar="FILE", help="Look at a file that `dump --core` wrote.")
    return name(file(JSON(function)))


def picture(name: str | None, file: str | None) -> Picture:
    from shmkv import inspector
    if (name is None) == (file is None):
        raise click.UsageError("give the NAME of a segment (shmkv ls) or --file FILE, one of them")
    return inspector.look(name) if name is not None else inspector.load(str(file))


def emit(document: dict[str, Any]) -> None:
    click.echo(json.dumps({"schema": SCHEMA, **document}, allow_nan=False))


def example(*lines: str) -> str:
    """An epilog that click does not wrap."""
    return "\b\nexample:\n" + "\n".join(f"  {line}" for line in lines)
