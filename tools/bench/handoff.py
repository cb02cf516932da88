"""seal() to views in another process, beside two bare semaphores."""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.connection import Connection

import posix_ipc
import torch

import shmkv

from .report import HEADERS, SIZES, percentiles, row

WARM_UP = 10


def run(quick: bool):
    rounds = 60 if quick else 400
    handoffs = {(size, view): [] for size in SIZES for view in ("readonly", "private")}
    trips: list[float] = []
    with Pair() as pair:
        for turn in range(WARM_UP + rounds):
            for (size, view), samples in handoffs.items():
                samples.append(pair.hand_off(SIZES[size], view == "readonly"))
            trips.append(pair.round_trip())
            if turn == WARM_UP - 1:
                for samples in (*handoffs.values(), trips):
                    samples.clear()
    rows = [row(f"{size}, {view} views", samples) for (size, view), samples in handoffs.items()]
    rows.append(row("two bare posix_ipc semaphores, there and back", trips))
    figures: dict = {"limit": {"semaphore_round_trip_us": percentiles(trips)["p50_us"]},
                     "handoff": {"zero_copy": {}, "zero_copy_private": {}}}
    for (size, view), samples in handoffs.items():
        figures["handoff"]["zero_copy" if view == "readonly" else "zero_copy_private"][size] = percentiles(samples)
    yield f"hand-off of tensors made in place, us ({WARM_UP} warm-up rounds)", HEADERS, rows, figures


class Pair:
    """This process as the producer, a spawned one as the consumer, and the bare semaphores between them."""

    def __enter__(self) -> Pair:
        self.buffer = shmkv.create(capacity=2 * max(SIZES.values()))
        names = [f"/shmkv-bench-{os.getpid()}-{end}" for end in ("there", "back")]
        self.there, self.back = (posix_ipc.Semaphore(name, posix_ipc.O_CREX, mode=0o600) for name in names)
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.consumer = context.Process(target=consume, args=(theirs, self.buffer.name, *names), daemon=True)
        self.consumer.start()
        self.turn = 0
        return self

    def __exit__(self, *_: object) -> None:
        self.pipe.send(("end",))
        self.consumer.join(10)
        for semaphore in (self.there, self.back):
            semaphore.unlink()
        self.buffer.close()

    def hand_off(self, nbytes: int, readonly: bool) -> float:
        """Microseconds from calling seal() to the consumer holding the view."""
        self.turn += 1
        entry = self.buffer.reserve([self.turn], {"kv": shmkv.Spec((nbytes,), torch.uint8)})
        entry["kv"][0] = entry["kv"][-1] = self.turn % 251
        self.pipe.send(("take", self.turn, readonly))
        while not self.buffer.stats().waiting["entry"]:
            time.sleep(0.0002)
        time.sleep(0.0005)  # a producer computes before it seals: the consumer has waited a little
        started = time.monotonic_ns()
        entry.seal()
        return (self.pipe.recv() - started) / 1e3

    def round_trip(self) -> float:
        self.pipe.send(("echo",))
        self.back.acquire(10)
        time.sleep(0.0005)
        started = time.monotonic_ns()
        self.there.release()
        self.back.acquire(10)
        return (time.monotonic_ns() - started) / 1e3


def consume(pipe: Connection, name: str, there: str, back: str) -> None:
    buffer = shmkv.attach(name)
    acquire, release = posix_ipc.Semaphore(there).acquire, posix_ipc.Semaphore(back).release
    while (order := pipe.recv())[0] != "end":
        if order[0] == "echo":
            release()
            acquire(10)
            release()
            continue
        _, turn, readonly = order
        with buffer.drop_select([turn], timeout=30, readonly=readonly) as hit:
            view = hit["kv"]
            held = time.monotonic_ns()
            if view[0] != turn % 251 or view[-1] != turn % 251:
                raise RuntimeError(f"turn {turn}: wrong bytes arrived")
            del view
        pipe.send(held)
    buffer.close()
