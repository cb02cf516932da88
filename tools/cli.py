"""The `shmkv` command: hands the line to a verb, and whatever goes wrong is one line on stderr and exit code 2."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

WRONG, INTERRUPTED, CLOSED_PIPE = 2, 130, 141  # the last two as shells tell of SIGINT and SIGPIPE
TRACEBACK = "SHMKV_TRACEBACK"


def main(argv: list[str] | None = None) -> int:
    try:
        return run(argv)
    except KeyboardInterrupt:
        return fail("interrupted", INTERRUPTED)


def run(argv: list[str] | None) -> int:
    with suppress(AttributeError):  # a terminal without Unicode must not stop us
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        import click

        from .verbs import ClosedPipe, Interrupted, Missing, shmkv
    except ModuleNotFoundError as missing:
        if missing.name != "click":
            raise
        return fail("the command needs click: pip install 'shmkv[cli]'")
    try:
        return shmkv.main(argv, prog_name="shmkv", standalone_mode=False) or 0
    except (click.Abort, Interrupted):
        return fail("interrupted", INTERRUPTED)
    except ClosedPipe:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still to be flushed
        return CLOSED_PIPE
    except (click.ClickException, Missing) as wrong:
        return fail(wrong.format_message())
    except Exception as error:
        if os.environ.get(TRACEBACK):
            raise
        return fail(explained(error))


def explained(error: Exception) -> str:
    from shmkv.errors import ShmkvError
    if isinstance(error, ShmkvError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"a bug of shmkv: {type(error).__name__}: {error} ({TRACEBACK}=1 shows where)"


def fail(message: str, code: int = WRONG) -> int:
    """One line, whatever a file name or an exception brought along."""
    line = "".join(letter if letter.isprintable() else "?" for letter in " ".join(message.split()))
    print(f"shmkv: {line}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
