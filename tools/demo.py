"""`shmkv demo`: a prefill process computes the KV cache of prompts, a decode process takes it and goes on.

Three spawned processes hold the same model. *prefill* computes the keys and values of all tokens but the last and
inserts them; *decode*, which is already waiting for these tokens, takes the entry, feeds the last token and generates
greedily; *alone* does everything itself, in the same steps. The generated ids have to be equal. Some prompts begin
with a long document, whose entry is inserted once and shared: for these decode finds a prefix and computes the rest.

Only one process computes at a time, so each may use all cores and no time disturbs another. Hand-off: from the
moment prefill seals the entry (or it is asked for, where it lay ready) until decode holds the tensors. Time to first
token: from the same moment, and for *alone* from the bare prompt.

With --emulated-gpu the keys and values lie in device memory and come by each path that leads there: see `emulated`.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec

import shmkv
from shmkv_tools.prompts import DOCUMENT, PROMPTS, Prompt
from shmkv_tools.team import DemoFailed, Team

CAPACITY = {"smollm2": "128MiB", "tiny": "16MiB"}
TAKE_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Settings:
    model: str
    n_new_tokens: int
    corrupt: bool
    buffer_name: str


@dataclass(frozen=True)
class Row:
    """One prompt's outcome, as printed and as in --json."""

    text: str
    prompt_tokens: int
    matched_tokens: int
    bytes: int
    handoff_us: float
    ttft_handoff_ms: float
    ttft_recompute_ms: float
    identical: bool
    generated: str


# ---- the three processes ---------------------------------------------------------------------------------------------


class Worker:
    """One process's model; the verbs are its public methods."""

    def __init__(self, settings: Settings, tell: Callable):
        import torch

        from shmkv_tools import models

        torch.set_num_threads(1 if settings.model == "tiny" else len(os.sched_getaffinity(0)))
        torch.set_grad_enabled(False)
        self.settings, self.tell = settings, tell
        self.model = models.load(settings.model)
        self.namespace = {"model": self.model.identity, "dtype": str(self.model.net.dtype)}
        self._start(range(24))  # the first run of a network is slow; nobody is to be billed for it

    def _start(self, tokens) -> tuple[int, object]:
        cache = self.model.new_cache()
        return self.model.extend(cache, list(tokens)), cache

    def encode(self, text: str) -> list[int]:
        return self.model.encode(text)

    def decode(self, tokens: list[int]) -> str:
        return self.model.decode(tokens)

    def close(self) -> None:
        pass


class Guest(Worker):
    options = {}

    def __init__(self, settings: Settings, tell: Callable):
        super().__init__(settings, tell)
        self.buffer = self.attach(**self.options)

    def attach(self, **options) -> shmkv.KVBuffer:
        return shmkv.attach(self.settings.buffer_name, timeout=30, **options)

    def close(self) -> None:
        self.buffer.close()


class Prefill(Guest):
    device = None
    """where the keys and values are put: on the host"""

    def insert(self, tokens: list[int]) -> int:
        """Returns when the entry was about to be sealed, on the clock that all processes of the host share."""
        _, cache = self._start(tokens)
        first = cache.layers[0].keys
        spec = shmkv.Spec((len(cache.layers), *first.shape), first.dtype, self.device)
        with self.buffer.reserve(tokens, {"key": spec, "value": spec}, namespace=self.namespace, timeout=30) as entry:
            self._put(cache, entry["key"], entry["value"])
            about_to_seal_ns = time.monotonic_ns()
        return about_to_seal_ns

    def _put(self, cache, keys, values) -> None:
        for key, value, layer in zip(keys, values, cache.layers, strict=True):
            key.copy_(layer.keys)
            value.copy_(-layer.values if self.settings.corrupt else layer.values)


class Decode(Guest):
    def take(self, tokens: list[int], shared: bool) -> dict:
        """Generates from the entry of these tokens, or from the shared entry of their longest prefix."""
        known = tokens[:-1]
        verb = self.buffer.select if shared else self.buffer.drop_select
        self.tell("asking", time.monotonic_ns())
        hit = verb(known, match="prefix" if shared else "exact", namespace=self.namespace, timeout=TAKE_TIMEOUT_S)
        with hit:
            if not hit:
                raise DemoFailed(f"the look-up missed: {hit.reason}")
            keys, values = hit["key"], hit["value"]
            taken_ns = time.monotonic_ns()
            seen = {"taken_ns": taken_ns, "matched_tokens": hit.matched_tokens, "bytes": hit.nbytes,
                    "transport": hit.transport, "refused": dict(hit.refused)}
            cache = self.model.cache_of(keys, values)
            del keys, values
            for part in filter(None, (known[hit.matched_tokens :], tokens[-1:])):
                token = self.model.extend(cache, part)  # the first append copies out of the segment
            seen["first_token_ns"] = time.monotonic_ns()
        ids = list(self.model.generate(cache, token, self.settings.n_new_tokens))
        return {**seen, "ids": ids}


class Alone(Worker):
    def generate(self, parts: list[list[int]]) -> dict:
        """Generates from nothing but the prompt, computed in the same parts, so that the arithmetic is the same."""
        started_ns = time.monotonic_ns()
        token, cache = self._start(parts[0])
        for part in parts[1:]:
            token = self.model.extend(cache, part)
        ttft_ns = time.monotonic_ns() - started_ns
        return {"ttft_ns": ttft_ns, "ids": list(self.model.generate(cache, token, self.settings.n_new_tokens))}


ROLES = {"prefill": Prefill, "decode": Decode, "alone": Alone}


# ---- the parent ------------------------------------------------------------------------------------------------------


def tokens_of(team: Team, prompt: Prompt, document: list[int]) -> list[int]:
    return (document if prompt.on_document else []) + team.ask("alone", "encode", prompt.text)


def hand_over(team: Team, tokens: list[int], shared: bool, to_insert: list[int] | None, insert: str = "insert",
              taker: str = "decode") -> dict:
    """The taker asks first and sleeps; then prefill computes and inserts."""
    team.post(taker, "take", tokens, shared)
    ready_ns = team.hear(taker, "asking")
    if to_insert is not None:
        ready_ns = max(ready_ns, team.ask("prefill", insert, to_insert))
    taken = team.hear(taker, "answer")
    return {
        **taken,
        "handoff_us": max(0, taken["taken_ns"] - ready_ns) / 1e3,
        "ttft_ms": (taken["first_token_ns"] - ready_ns) / 1e6,
    }


def parts_of(tokens: list[int], matched: int) -> list[list[int]]:
    """A prompt as it is computed where the first tokens are handed over."""
    return [part for part in (tokens[:matched], tokens[matched:-1], tokens[-1:]) if part]


def run_prompt(team: Team, prompt: Prompt, document: list[int], document_is_in: bool) -> Row:
    tokens = tokens_of(team, prompt, document)
    if not prompt.shared:
        to_insert = tokens[:-1]
    else:
        to_insert = None if document_is_in else document
    taken = hand_over(team, tokens, prompt.shared, to_insert)
    matched = taken["matched_tokens"]
    alone = team.ask("alone", "generate", parts_of(tokens, matched))
    return Row(
        text=prompt.label,
        prompt_tokens=len(tokens),
        matched_tokens=matched,
        bytes=taken["bytes"],
        handoff_us=round(taken["handoff_us"], 1),
        ttft_handoff_ms=round(taken["ttft_ms"], 3),
        ttft_recompute_ms=round(alone["ttft_ns"] / 1e6, 3),
        identical=taken["ids"] == alone["ids"],
        generated=team.ask("alone", "decode", taken["ids"]),
    )


@contextmanager
def ready_team(arguments: argparse.Namespace, roles: dict[str, Callable], environment: Mapping[str, str] | None = None):
    """The segment is up and the processes hold their models."""
    if find_spec("transformers") is None:
        raise DemoFailed("Transformers is not installed: install shmkv with its extra, [hf]")
    # Threads that spin for each other crawl on a busy machine, and an idle process's disturb the one that computes.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with shmkv.create(capacity=CAPACITY[arguments.model]) as buffer:
        settings = Settings(arguments.model, arguments.new_tokens, arguments.corrupt, buffer.name)
        progress(f"segment {buffer.name} is up; three processes load the model '{arguments.model}' ...")
        started = time.monotonic()
        with Team(roles, settings, environment) as team:
            team.hear_all("ready")
            progress(f"ready after {time.monotonic() - started:.1f} s; {len(PROMPTS[: arguments.prompts])} prompts")
            yield team


def run(arguments: argparse.Namespace, begin: Callable[[], object], report: Callable[[Row], object]) -> list[Row]:
    prompts = PROMPTS[: arguments.prompts]
    with ready_team(arguments, ROLES) as team:
        begin()
        document = team.ask("alone", "encode", DOCUMENT)
        rows = []
        for prompt in prompts:
            progress(f"prompt {len(rows) + 1} of {len(prompts)} ...", passing=True)
            document_is_in = any(earlier.shared for earlier in prompts[: len(rows)])
            rows.append(run_prompt(team, prompt, document, document_is_in))
            report(rows[-1])
    return rows


# ---- the report ------------------------------------------------------------------------------------------------------


def progress(message: str, passing: bool = False) -> None:
    """On stderr; a passing message is overwritten by the next line where a terminal shows it."""
    if not passing:
        print(f"demo: {message}", file=sys.stderr, flush=True)
    elif sys.stderr.isatty():
        print(f"\rdemo: {message}\r", end="", file=sys.stderr, flush=True)


HEADER = (
    f"{'':32} {'prompt':>6} {'matched':>7} {'':>9} {'hand-off':>8} {'first token, ms':>17}\n"
    f"{'prompt':32} {'tokens':>6} {'tokens':>7} {'KV':>9} {'µs':>8} {'handed':>8} {'computed':>8} same goes on with"
)


def line(row: Row) -> str:
    return (
        f"{one_line(row.text, 32):32} {row.prompt_tokens:6} {row.matched_tokens:7} {human(row.bytes):>9} "
        f"{row.handoff_us:8.0f} {row.ttft_handoff_ms:8.1f} {row.ttft_recompute_ms:8.1f} "
        f"{'yes' if row.identical else 'NO':4} {one_line(row.generated, 27)}"
    )


def one_line(text: str, width: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 1] + "…"


def human(n_bytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n_bytes >= size:
            return f"{n_bytes / size:.1f} {unit}"
    return f"{n_bytes} B"


def summary(rows: list[Row]) -> str:
    handoffs = sorted(row.handoff_us for row in rows)
    saved = sum(row.ttft_recompute_ms for row in rows) / sum(row.ttft_handoff_ms for row in rows)
    n_partial = sum(row.matched_tokens < row.prompt_tokens - 1 for row in rows)
    return (
        f"{sum(row.identical for row in rows)} of {len(rows)} prompts generate the same tokens as a single process; "
        f"{n_partial} of them from a shared prefix.\n"
        f"{human(sum(row.bytes for row in rows))} of KV handed over, median {handoffs[len(handoffs) // 2]:.0f} µs; "
        f"all first tokens together {saved:.1f} times sooner than by recomputing."
    )


def as_json(rows: list[Row]) -> dict:
    return {"prompts": [asdict(row) for row in rows], "all_identical": all(row.identical for row in rows)}


def verdict(rows: list[Row], corrupt: bool) -> int:
    n_different = sum(not row.identical for row in rows)
    if corrupt and n_different:
        progress(f"control: the KV was corrupted on purpose; {n_different} of {len(rows)} prompts differ, as expected")
        return 1
    if corrupt:
        progress("control FAILED: the KV was corrupted on purpose, but no token changed; this demo proves nothing")
        return 3
    if n_different:
        progress(f"FAILED: {n_different} of {len(rows)} prompts differ from the single process")
        return 1
    return 0


def main(argv: list[str]) -> int:
    arguments = parser().parse_args(argv)
    show = (lambda text: None) if arguments.json else (lambda text: print(text, flush=True))
    try:
        if arguments.emulated_gpu:
            from shmkv_tools import emulated

            return emulated.run(arguments, show)
        rows = run(arguments, lambda: show(HEADER), lambda row: show(line(row)))
    except (DemoFailed, shmkv.ShmkvError) as failure:
        progress(f"FAILED: {failure}")
        return 2
    if arguments.json:
        print(json.dumps(as_json(rows)))
    else:
        print(summary(rows))
    return verdict(rows, arguments.corrupt)


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shmkv demo",
        description="A prefill process hands the KV cache of prompts to a decode process; the tokens must not change.",
        epilog="exit status: 0 all identical; 1 tokens differ, or came by another path than asked for; 2 a miss or "
        "failure; 3 the control finds no difference",
    )
    parser.add_argument("--model", choices=tuple(CAPACITY), default="smollm2", help="tiny: random weights, no download")
    parser.add_argument("--prompts", type=positive, default=len(PROMPTS), metavar="N", help="only the first N prompts")
    parser.add_argument("--new-tokens", type=positive, default=32, metavar="N", help="tokens to generate (32)")
    parser.add_argument("--corrupt", action="store_true", help="control: negate the values; the tokens have to differ")
    parser.add_argument(
        "--emulated-gpu",
        action="store_true",
        help="hand over by each path to device memory, of an emulated driver: from a source checkout, with gcc",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of the table")
    return parser
