"""`shmkv export`: the segments of this host as Prometheus metrics, each scrape a picture.

A scrape takes no lock and is no peer: engines do not notice it. No metric carries token ids or a namespace. A segment
that is gone or broken has `shmkv_up` 0 and nothing else.
"""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import click
from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from shmkv.errors import ShmkvError
from shmkv.inspector import Picture, State, look, names

from .figures import age_of, arena, handoffs, oldest, percentile
from .target import complete_names, example

LIVES = ("alive", "stopped", "dead", "unknown")
WAITS = ("entry", "room", "signal", "request", "answer")
QUANTILES = (0.5, 0.9, 0.99)
ENDS = {signal.SIGINT, signal.SIGTERM}


class Family(NamedTuple):
    """A metric: a counter if its name ends in _total; `label` besides segment, if it has one."""

    name: str
    about: str
    label: str = ""

    def metric(self) -> CounterMetricFamily | GaugeMetricFamily:
        kind = CounterMetricFamily if self.name.endswith("_total") else GaugeMetricFamily
        return kind(self.name, self.about, labels=["segment", *([self.label] if self.label else [])])


COUNTERS = {
    "inserts": "Entries sealed.",
    "takes": "Entries drop-selected.",
    "shares": "Entries selected.",
    "consumed": "Taken entries freed after release.",
    "redelivered": "Taken entries made ready again.",
    "misses": "Look-ups answered with a miss.",
    "starved": "Misses that came early because nobody could go on.",
    "orphaned": "Misses that came early because no producer was left.",
    "timeouts": "Inserts that found no room in time.",
    "aborted": "Reserved entries given up.",
    "cancelled": "Entries cancelled.",
    "evicted": "Entries evicted.",
    "expired": "Entries expired.",
    "lost": "Entries that went with their producer's device memory.",
    "deaths": "Dead peers whose remains were taken over.",
    "recoveries": "Rebuilds after a half-done mutation.",
    "signals": "Signals posted.",
    "signals_dropped": "Signals not posted because a ring was full.",
    "inserted_bytes": "Payload bytes sealed.",
    "taken_bytes": "Payload bytes handed out, in place or copied.",
}
FAMILIES = {family.name: family for family in (
    Family("shmkv_up", "1 if a picture of the segment could be taken, else 0."),
    Family("shmkv_picture", "1 for what the picture is: at_rest, moving, torn (its last writer died or stopped in "
           "mid-change).", "state"),
    Family("shmkv_created_timestamp_seconds", "When the segment was created, in seconds since the epoch."),
    Family("shmkv_owner_alive", "1 if the process that owns the segment's name is alive, else 0."),
    Family("shmkv_arena_capacity_bytes", "Size of the payload arena."),
    Family("shmkv_arena_used_bytes", "Bytes of the payload arena that entries have."),
    Family("shmkv_arena_holes", "Holes in the payload arena."),
    Family("shmkv_arena_largest_hole_bytes", "The largest hole in the payload arena."),
    Family("shmkv_slots", "Entries there can be at most."),
    Family("shmkv_entries", "Entries in each state: reserved, ready, taken, dropped.", "state"),
    Family("shmkv_oldest_entry_age_seconds", "Age of the oldest entry; absent if there is none."),
    Family("shmkv_peers", "Attached peers, by what the kernel says: alive, stopped, dead, unknown.", "life"),
    Family("shmkv_waiters", "Waiting threads, by what they wait for: entry, room, signal, request, answer.", "kind"),
    Family("shmkv_longest_wait_seconds", "How long the longest waiting thread has waited; absent if none waits."),
    Family("shmkv_wait_cycle_peers", "Peers that wait for each other in a ring; 0 if none do."),
    Family("shmkv_handoff_recent_seconds", "From sealed to taken, of the entries that the journal of recent events "
           "still has; absent if it has none.", "quantile"),
    Family("shmkv_handouts_total", "Look-ups served, by the path the bytes took: host, local, cuda_ipc, cuda_peer, "
           "staging, nccl.", "path"),
    Family("shmkv_staged_inserts_total", "Entries of device tensors that were copied into the payload arena."),
    *(Family(f"shmkv_{name}_total", about) for name, about in COUNTERS.items()),
)}


class Collector:
    """Takes pictures when asked; without names of all the segments there are."""

    def __init__(self, wanted: Sequence[str] = ()):
        self._wanted = tuple(dict.fromkeys(wanted))
        self._one_at_a_time = threading.Lock()  # scrapers in a hurry must not multiply the memory of the pictures

    def collect(self) -> Iterator[Metric]:
        metrics = {name: family.metric() for name, family in FAMILIES.items()}
        with self._one_at_a_time:
            for segment in self._wanted or names():
                try:
                    found = list(samples(look(segment)))
                except ShmkvError:
                    found = []
                metrics["shmkv_up"].add_metric([segment], float(bool(found)))
                for name, label, value in found:
                    metrics[name].add_metric([segment, *([label] if label else [])], float(value))
        yield from metrics.values()

    def describe(self) -> list[Metric]:
        return [family.metric() for family in FAMILIES.values()]


def samples(picture: Picture) -> Iterator[tuple[str, str, Any]]:
    """(name, label or "", value) of all that a picture shows but `shmkv_up`."""
    for state in State:
        yield "shmkv_picture", state.value.replace(" ", "_"), picture.state == state
    figures = arena(picture)
    yield "shmkv_created_timestamp_seconds", "", picture.header()["born_ns"] / 1e9
    yield "shmkv_owner_alive", "", picture.life(picture.owner()) == "alive"
    yield "shmkv_arena_capacity_bytes", "", figures.nbytes
    yield "shmkv_arena_used_bytes", "", figures.used
    yield "shmkv_arena_holes", "", figures.n_holes
    yield "shmkv_arena_largest_hole_bytes", "", figures.largest_hole
    yield from _entries(picture)
    yield from _peers(picture)
    times = handoffs(picture)
    for quantile in QUANTILES if times else ():
        yield "shmkv_handoff_recent_seconds", str(quantile), percentile(times, quantile)
    paths = picture.paths()
    yield "shmkv_staged_inserts_total", "", paths.pop("staged_inserts")
    for path, n in paths.items():
        yield "shmkv_handouts_total", path, n
    for name, value in picture.counters().items():
        yield f"shmkv_{name}_total", "", value


def _entries(picture: Picture) -> Iterator[tuple[str, str, Any]]:
    yield "shmkv_slots", "", picture.layout.entries.count
    for state, n in picture.states().items():
        if state != "free":
            yield "shmkv_entries", state, n
    first = oldest(picture)
    if first:
        yield "shmkv_oldest_entry_age_seconds", "", first.age_ns / 1e9


def _peers(picture: Picture) -> Iterator[tuple[str, str, Any]]:
    lives, waiters = Counter(picture.lives.values()), picture.waiters()
    for life in LIVES:
        yield "shmkv_peers", life, lives[life]
    kinds = Counter(row.kind for row in waiters)
    for kind in WAITS:
        yield "shmkv_waiters", kind, kinds[kind]
    if waiters:
        yield "shmkv_longest_wait_seconds", "", age_of(picture, waiters[0].since_ns) / 1e9
    yield "shmkv_wait_cycle_peers", "", len(picture.cycle())


@click.command(name="export", epilog=example("shmkv export --port 9464", "shmkv export toy --once"))
@click.argument("segments", nargs=-1, metavar="[NAME]...", shell_complete=complete_names)
@click.option("--port", type=click.IntRange(0, 65535), metavar="N", help="Serve on this port; 0 takes a free one.")
@click.option("--address", default="127.0.0.1", show_default=True, help="Serve on this address.")
@click.option("--once", is_flag=True, help="Print the metrics to standard output instead.")
@click.option("--list", "listed", is_flag=True, help="Print the names of the metrics and what they mean.")
def command(segments: tuple[str, ...], port: int | None, address: str, once: bool, listed: bool) -> None:
    """Serve Prometheus metrics of the segments NAME, or of all there are at each scrape.

    Each scrape takes a picture: nothing is locked and no peer is made of us. A segment that is gone or broken has
    shmkv_up 0. No metric carries token ids or a namespace. tools/grafana.json is a dashboard for them.
    """
    if (port is not None) + once + listed != 1:
        raise click.UsageError("give one of --port N, --once and --list")
    if listed:
        click.echo("\n".join(f"{family.name}{f'{{{family.label}=}}' if family.label else ''}  {family.about}"
                             for family in FAMILIES.values()))
        return
    registry = CollectorRegistry()
    registry.register(Collector(segments))
    if once:
        click.echo(generate_latest(registry).decode(), nl=False)
        return
    try:
        serve(registry, port or 0, address)
    except OSError as error:
        raise click.ClickException(f"cannot serve on {address}, port {port}: {error.strerror or error}") from None


def serve(registry: CollectorRegistry, port: int, address: str) -> None:
    """Serve until SIGINT or SIGTERM, which end it in good order."""
    # blocked before the server's threads are made, which inherit that: the signals are left for sigwait
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
    try:
        server, thread = start_http_server(port, address, registry)
        host = f"[{address}]" if ":" in address else address
        click.echo(f"http://{host}:{server.server_port}/metrics")
        signal.sigwait(ENDS)
        server.shutdown()
        server.server_close()
        thread.join()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
