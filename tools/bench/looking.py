"""What being looked at costs: the throughput of a producer and a consumer that hammer a buffer with small entries,
while another process takes pictures 100 times a second, beside one that burns the same CPU time without touching the
segment; both steadily, and killed at random moments and started again.

All in one run: a round has a stretch of each, in random order, so that the machine's moods fall on all alike. A ratio
is that of two stretches of one round, and what counts is the median of the rounds' ratios. The burner burns, 100 times
a second, what a look has taken so far in this run; the table shows what each has really used.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import statistics
import sys
import time
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

import shmkv
from shmkv.inspector import look
from shmkv.segment import DIRECTORY

from .report import machine, table

HERTZ = 100
ROUNDS, QUICK_ROUNDS = 150, 20
SETTLE_S, STRETCH_S = 0.05, 0.25
KILLED_AFTER_S = (0.02, 0.15)
ENTRY_BYTES = 4096
BUFFER = {"capacity": "16MiB", "slots": 1024, "peers": 16, "meta_capacity": "1MiB"}
KINDS = ("nobody", "burning", "looking", "burning, killed", "looking, killed")
HEADERS = ["", "entries/s", "CPU, ms/s", "looks/s", "to burning: p10", "p50", "p90", "p50 lies in"]
"""the last: with 95 %, by the order of the ratios alone"""


class Stretch(NamedTuple):
    """A while of hammering: entries a second, and what the other process used and did in that time."""

    rate: float
    cpu_s: float
    beats: float
    kills: int


def run(quick: bool):
    rounds: list[dict[str, Stretch]] = []
    chance, n_rounds = random.Random(1), QUICK_ROUNDS if quick else ROUNDS
    with Pair() as pair:
        pair.stretch("nobody", 0)
        burn_s = pair.cost_of_a_look(pair.stretch("looking", 0))
        for _ in range(n_rounds):
            kinds = chance.sample(KINDS, len(KINDS))
            rounds.append({kind: pair.stretch(kind, burn_s) for kind in kinds})
            burn_s = statistics.median(pair.cost_of_a_look(each["looking"]) for each in rounds)
        left = pair.left_behind()
    rows, figures = [], {"looking": {"looks_per_s": statistics.median(one["looking"].beats for one in rounds)}}
    for kind in KINDS:
        row, ratio = _row(kind, rounds)
        rows.append(row)
        if kind.startswith("looking"):
            figures["looking"][kind.replace(", ", "_")] = ratio
    n_kills = sum(each["looking, killed"].kills for each in rounds)
    yield (f"throughput of a pair that is looked at ({n_rounds} rounds of {STRETCH_S:g} s each, {n_kills} lookers "
           f"killed, {left})", HEADERS, rows, figures)


def _row(kind: str, rounds: list[dict[str, Stretch]]) -> tuple[list[str], dict[str, float]]:
    mine = [each[kind] for each in rounds]
    beside = kind.replace("looking", "burning") if kind != "nobody" else "burning"
    cells = [kind, f"{statistics.median(one.rate for one in mine):,.0f}",
             f"{statistics.median(one.cpu_s for one in mine) * 1e3:,.0f}",
             f"{statistics.median(one.beats for one in mine):,.0f}" if kind.startswith("looking") else ""]
    ranked = sorted(each[kind].rate / each[beside].rate for each in rounds)
    last = len(ranked) - 1
    p10, p50, p90 = (ranked[round(last * share)] for share in (0.1, 0.5, 0.9))
    away = 0.98 * len(ranked) ** 0.5
    low, high = ranked[max(0, round(last / 2 - away))], ranked[min(last, round(last / 2 + away))]
    shown = [f"{p10:.3f}", f"{p50:.3f}", f"{p90:.3f}", f"{low:.3f} to {high:.3f}"] if kind != beside else [""] * 4
    return [*cells, *shown], {"p10": p10, "p50": p50, "p90": p90, "p50_low": low, "p50_high": high}


class Pair:
    """Producer and consumer, and a nursery of lookers and burners, each a process of its own."""

    def __enter__(self) -> Pair:
        self._files = set(os.listdir(DIRECTORY))
        self._buffer = shmkv.create(**BUFFER)
        name, context = self._buffer.name, multiprocessing.get_context("spawn")
        self._stop, self._done = context.Value("b", 0, lock=False), context.Value("Q", 0, lock=False)
        self._nursery, theirs = context.Pipe()
        self._processes = [context.Process(target=produce, args=(name, self._stop), daemon=True),
                           context.Process(target=consume, args=(name, self._stop, self._done), daemon=True),
                           context.Process(target=nurse, args=(name, theirs))]
        for process in self._processes:
            process.start()
        while self._done.value < 1000:
            if not all(process.is_alive() for process in self._processes):
                raise RuntimeError("a process of the pair died")
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.value = 1
        self._nursery.send(None)
        for process in self._processes:
            process.join(30)
            if process.is_alive():
                process.kill()
                process.join()
        self._buffer.close()

    def stretch(self, kind: str, burn_s: float) -> Stretch:
        self._nursery.send((kind, burn_s, 2 * SETTLE_S + STRETCH_S))
        time.sleep(SETTLE_S)
        before, started = self._done.value, time.monotonic()
        time.sleep(STRETCH_S)
        rate = (self._done.value - before) / (time.monotonic() - started)
        cpu_s, beats, kills = self._nursery.recv()
        seconds = 2 * SETTLE_S + STRETCH_S
        return Stretch(rate, cpu_s / seconds, beats / seconds, kills)

    def cost_of_a_look(self, stretch: Stretch) -> float:
        return stretch.cpu_s / HERTZ

    def left_behind(self) -> str:
        """What lookers, dead ones too, have left in the segment and in /dev/shm."""
        problems, peers = self._buffer.problems(), self._buffer.stats().peers
        mine = f"shmkv.{self._buffer.name}"
        files = {file for file in set(os.listdir(DIRECTORY)) - self._files if file.startswith(mine)}
        clean = not problems and peers == 3 and files == {mine}
        return "no trace of them" if clean else f"TRACES: {problems}, {peers} peers, {sorted(files)}"


# ---------------------------------------------------------------- the pair

def produce(name: str, stop: Any) -> None:
    tensors = {"kv": torch.zeros(ENTRY_BYTES, dtype=torch.uint8)}
    with shmkv.attach(name) as buffer:
        serial = 0
        while not stop.value:
            serial += 1
            try:
                buffer.insert([serial % (1 << 32)], tensors, timeout=1)
            except shmkv.TimedOut:
                serial -= 1


def consume(name: str, stop: Any, done: Any) -> None:
    with shmkv.attach(name) as buffer:
        serial = 1
        while not stop.value:
            with buffer.drop_select([serial % (1 << 32)], timeout=1) as hit:
                if hit:
                    serial += 1
                    done.value += 1


# ---------------------------------------------------------------- lookers and burners

def nurse(name: str, orders: Connection) -> None:
    """Run a looker or burner for a while, as often as told; answers CPU seconds, beats and kills."""
    beats = multiprocessing.Value("Q", 0, lock=False)  # shared with the forked children
    while (order := orders.recv()) is not None:
        kind, burn_s, seconds = order
        beats.value = 0
        if kind == "nobody":
            time.sleep(seconds)
            orders.send((0.0, 0, 0))
            continue
        cpu_s, kills, until = 0.0, 0, time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            pid = _started(name, kind.startswith("looking"), burn_s, until, beats)
            if kind.endswith("killed"):
                time.sleep(min(left, random.uniform(*KILLED_AFTER_S)))
                os.kill(pid, signal.SIGKILL)
                kills += 1
            cpu_s += _cpu_of(pid)
        orders.send((cpu_s, beats.value, kills))


def _started(name: str, looks: bool, burn_s: float, until: float, beats: Any) -> int:
    # forked, so that a new one costs nearly nothing: it would be the start of an interpreter that is measured
    pid = os.fork()
    if pid == 0:
        try:
            _beat(name, looks, burn_s, until, beats)
        finally:
            os._exit(0)
    return pid


def _beat(name: str, looks: bool, burn_s: float, until: float, beats: Any) -> None:
    due = time.monotonic()
    while due < until:
        if looks:
            look(name).counters()
        else:
            end = time.thread_time() + burn_s
            while time.thread_time() < end:
                pass
        beats.value += 1
        due = max(due + 1 / HERTZ, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))


def _cpu_of(pid: int) -> float:
    _, _, usage = os.wait4(pid, 0)
    return usage.ru_utime + usage.ru_stime


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, under a minute")
    arguments = parser.parse_args(argv)
    print(f"{machine()}, load {os.getloadavg()[0]:.1f}")
    for title, headers, rows, _ in run(arguments.quick):
        print(table(title, headers, rows))
    print(f"load at the end {os.getloadavg()[0]:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
