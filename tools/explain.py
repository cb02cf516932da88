"""`shmkv explain`: would this prompt hit, and if not, why."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from . import target
from .target import emit, example
from .text import echo, title, wrapped

if TYPE_CHECKING:
    from shmkv.inspector import Picture, Why

HIT, MISS = 0, 1
MOST_FILE_BYTES = 64 << 20


@click.command("explain", epilog=example(
    'shmkv explain toy --tokens "5 8 13 21" --namespace model=toy',
    "shmkv explain toy --tokens-file prompt.json --match overlap", "", "exits with 0 for a hit, 1 for a miss"))
@target.looks
@click.option("--tokens", metavar="IDS", help="The prompt's token ids, with blanks or commas between them.")
@click.option("--tokens-file", type=click.Path(), metavar="FILE", help="The same in a file (-: stdin).")
@click.option("--namespace", multiple=True, metavar="K=V",
              help="May be given again. A value is read as JSON where it is some (0, true, 1.5, \"0\"), else as text.")
@click.option("--match", type=click.Choice(("prefix", "exact", "overlap")), default="prefix", show_default=True)
@click.option("--min-tokens", type=click.IntRange(min=1), default=1, metavar="N", help="Shorter matches are none.")
@target.NO_TOKENS
def command(name: str | None, file: str | None, as_json: bool, tokens: str | None, tokens_file: str | None,
            namespace: tuple[str, ...], match: str, min_tokens: int, no_tokens: bool) -> int:
    """Would select() of these tokens hit? If not: the nearest entry, and what became of those that matched."""
    from . import facts
    ids, names = wanted_tokens(tokens, tokens_file), dict(map(pair, namespace))
    picture = target.picture(name, file)
    why = picture.explain(ids, names, match, min_tokens)
    if as_json:
        history = [facts.event_of(event, not no_tokens) for event in why.history]
        hidden = {"wanted_token": None, "found_token": None} if no_tokens else {}
        emit({"segment": facts.segment(picture), "explain": {**why._asdict(), **hidden, "history": history}})
    else:
        echo(lines(picture, why, not no_tokens))
    return HIT if why.hit else MISS


def lines(picture: Picture, why: Why, with_tokens: bool) -> Iterator[str]:
    from . import words
    if picture.state.value != "at rest":
        yield from words.head(picture)
    if why.hit:
        yield (click.style("hit", fg="green", bold=True)
               + f": entry {why.sequence} is valid for {why.matched_tokens} of {why.n_tokens} tokens")
    else:
        parts = why.common_tokens and None not in (why.wanted_token, why.found_token)
        told = [*why.reasons, *([nearest(why, with_tokens)] if parts or not why.reasons else [])]
        first, *rest = wrapped(f"miss: {told[0]}", "      ")
        yield from [click.style("miss", fg="red", bold=True) + first.removeprefix("miss"), *rest]
        for reason in told[1:]:
            yield from wrapped(f"      {reason}", "        ")
    if why.history:
        yield from ["", title("events of these tokens"), *words.event_lines(picture, why.history)]


def nearest(why: Why, with_tokens: bool) -> str:
    text = f"entry {why.nearest} has the first {why.common_tokens} of {why.n_tokens} tokens in common"
    if why.found_token is None:
        return f"{text}, and ends there"
    if why.wanted_token is None:
        return f"{text}, and goes on where the prompt ends"
    ids = f": {why.found_token} there, {why.wanted_token} asked for" if with_tokens else ""
    return f"{text}; position {why.common_tokens} differs{ids}"


def wanted_tokens(text: str | None, path: str | None) -> list[int]:
    if (text is None) == (path is None):
        raise click.UsageError("give --tokens or --tokens-file, one of them")
    if path == "-":
        text = sys.stdin.read(MOST_FILE_BYTES)
    elif path is not None:
        with open(path, errors="replace") as file:
            text = file.read(MOST_FILE_BYTES)
    found = re.split(r"[\s,]+", str(text).strip().strip("[]").strip())
    wrong = next((word for word in found if not re.fullmatch(r"[0-9]{1,10}", word)), None)
    if wrong is not None:
        raise click.UsageError(f"{wrong[:40]!r} is no token id" if wrong else "there are no token ids")
    return [int(word) for word in found]


def pair(text: str) -> tuple[str, Any]:
    name, is_pair, value = text.partition("=")
    if not is_pair or not name:
        raise click.UsageError(f"--namespace {text[:40]!r} is not of the form K=V")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value
