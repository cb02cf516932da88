"""The `shmkv` command: finds the verb and hands the rest of the line to it. Starts without torch."""

import argparse
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

VERBS = {
    "demo": ("shmkv_tools.demo", "hand the KV cache of real prompts from a prefill to a decode process"),
    "gc": ("shmkv_tools.gc", "remove what dead processes left in /dev/shm"),
    "doctor": ("shmkv_tools.doctor", "what this host can do, and why not"),
    "bench": ("shmkv_tools.bench", "measure the hand-off"),
}


def main(argv: list[str] | None = None) -> int:
    words = parser().parse_args(argv).rest
    if not words or words[0] not in VERBS:
        problem = f"unknown verb {words[0]!r}" if words else "a verb is missing"
        return fail(f"{problem}; there are: {', '.join(VERBS)} (shmkv --help)")
    verb, *rest = words
    module_name, _ = VERBS[verb]
    try:
        run = import_module(module_name).main
    except ImportError as missing:
        return fail(f"{verb}: {missing}; is the extra installed? (pip install 'shmkv[hf]')")
    try:
        return run(rest)
    except KeyboardInterrupt:
        fail(f"{verb}: interrupted")
        return 130


def fail(message: str) -> int:
    print(f"shmkv: {message}", file=sys.stderr)
    return 2


class Parser(argparse.ArgumentParser):
    def error(self, message):
        sys.exit(fail(message))


def parser() -> argparse.ArgumentParser:
    verbs = "\n".join(f"  {verb:8} {about}" for verb, (_, about) in VERBS.items())
    parser = Parser(
        prog="shmkv",
        usage="shmkv [--version] VERB ...",
        description="KV-cache hand-off between processes of one Linux host.",
        epilog=f"verbs (each has its own --help):\n{verbs}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"shmkv {own_version()}")
    parser.add_argument("rest", metavar="VERB", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def own_version() -> str:
    try:
        return version("shmkv")
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
