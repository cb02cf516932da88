"""The verbs of the command, imported when they are called: the list of them must not cost what they cost."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any, NamedTuple

import click
from click.shell_completion import CompletionItem

COMPLETION = 'eval "$(_SHMKV_COMPLETE=bash_source shmkv)"'


class Verb(NamedTuple):
    """`module` has a click command named `command`, or its own `main(argv)`; `extra` is what pip has to install."""

    module: str
    about: str
    extra: str = "cli"


VERBS = {
    "ls": Verb("shmkv_tools.ls", "the segments of this host"),
    "dump": Verb("shmkv_tools.dump", "all that is in a segment; keep it in a file"),
    "entries": Verb("shmkv_tools.entries", "the entries of a segment"),
    "peers": Verb("shmkv_tools.peers", "who is attached: alive, stopped or dead, and what they wait for"),
    "waiters": Verb("shmkv_tools.waiters", "who waits for whom, and the cycle if there is one"),
    "explain": Verb("shmkv_tools.explain", "would this prompt hit, and why not"),
    "top": Verb("shmkv_tools.top", "a live view"),
    "map": Verb("shmkv_tools.map", "a picture of the arena and of the prefix tree"),
    "check": Verb("shmkv_tools.check", "does a segment contradict itself; --fix recovers it"),
    "gc": Verb("shmkv_tools.gc", "remove what dead processes left in /dev/shm"),
    "rm": Verb("shmkv_tools.rm", "remove one segment"),
    "export": Verb("shmkv_tools.export", "Prometheus metrics"),
    "schema": Verb("shmkv_tools.schema", "what the fields of --json mean"),
    "doctor": Verb("shmkv_tools.doctor", "what this host can do, and why not"),
    "demo": Verb("shmkv_tools.demo", "hand the KV cache of real prompts from a prefill to a decode process", "hf"),
    "bench": Verb("shmkv_tools.bench", "measure the hand-off", "bench"),
}


class Missing(click.ClickException):
    """A verb that cannot be imported."""


class Interrupted(Exception):
    """Ctrl-C, before click makes an empty line of it."""


class ClosedPipe(Exception):
    """Nobody reads the output any more, before click makes a "no" of it."""


class Verbs(click.Group):
    """Knows its commands by name; help and completion import none of them."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            raise Interrupted from interrupt
        except BrokenPipeError as broken:
            raise ClosedPipe from broken

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return load(cmd_name) if cmd_name in VERBS else None

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] not in VERBS:
            raise click.UsageError(f"unknown verb {args[0]!r}; there are: {', '.join(VERBS)} (shmkv --help)")
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            raise click.UsageError(f"a verb is missing; there are: {', '.join(VERBS)} (shmkv --help)")
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs (each has its own --help)"):
            formatter.write_dl([(name, verb.about) for name, verb in VERBS.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        return [*(CompletionItem(name, help=verb.about) for name, verb in VERBS.items() if name.startswith(incomplete)),
                *click.Command.shell_complete(self, ctx, incomplete)]


class PassedOn(click.Command):
    """A verb that reads its line itself, --help too."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.args = args
        return args

    def invoke(self, ctx: click.Context) -> Any:
        return import_module(VERBS[str(self.name)].module).main(ctx.args)


def load(name: str) -> click.Command:
    verb = VERBS[name]
    try:
        module = import_module(verb.module)
    except ImportError as missing:
        raise Missing(f"{name}: {missing}; is the extra installed? (pip install 'shmkv[{verb.extra}]')") from None
    return getattr(module, "command", None) or PassedOn(name)


def own_version() -> str:
    from importlib.metadata import PackageNotFoundError, version
    try:
        return version("shmkv")
    except PackageNotFoundError:
        return "(not installed)"


def show_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        click.echo(f"shmkv {own_version()}")
        ctx.exit()


@click.group(cls=Verbs, no_args_is_help=False,
             epilog=f"\b\nexample:     shmkv ls\ncompletion:  {COMPLETION}\n"
                    "exit codes:  0 yes or done, 1 no (a miss, problems, refused), 2 an error")
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=show_version,
              help="Show the version.")
@click.pass_context
def shmkv(ctx: click.Context) -> None:
    """KV-cache hand-off between processes of one Linux host: looks into buffers, of the living and of the dead."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        ctx.color = False
