"""Real processes hammer one small buffer: every entry is delivered exactly once, whole, and the books balance."""

import collections
import contextlib
import multiprocessing.connection
import os
import random
import time
import zlib
from typing import Any

import pytest
import torch

import shmkv
from shmkv import sync
from shmkv.testing import Child, unique_name

GEOMETRY = {"capacity": 1 << 20, "meta_capacity": 256 << 10, "slots": 48, "leases": 64, "peers": 16, "waits": 16}
STOP = 0  # the first token of the entries that send a consumer home


def payload(producer: int, serial: int, chance: random.Random) -> dict[str, torch.Tensor]:
    """Who made it, its number, and a checksum over it all; 0 bytes to 60 KB."""
    n_bytes = chance.choice((0, 1, 100, 4000, 5000, chance.randrange(60_000)))
    body = torch.frombuffer(bytearray(chance.randbytes(n_bytes)), dtype=torch.uint8) if n_bytes else \
        torch.empty(0, dtype=torch.uint8)
    return {"body": body, "head": torch.tensor([producer, serial, checksum(producer, serial, body)])}


def checksum(producer: int, serial: int, body: torch.Tensor) -> int:
    return zlib.crc32(body.numpy(), zlib.crc32(f"{producer}/{serial}".encode()))


def verify(hit: shmkv.Hit) -> tuple[int, int]:
    producer, serial, expected = hit["head"].tolist()
    if checksum(producer, serial, hit["body"]) != expected:
        raise WrongBytes(f"entry {hit.sequence}: producer {producer}, serial {serial}: wrong checksum")
    return producer, serial


class WrongBytes(Exception):
    """An entry did not come out as it went in."""


def without_lock() -> None:
    """From now on this process enters the critical section whoever is in it."""
    made = sync._Description.__init__

    def open_door(description: Any, segment: Any) -> None:
        made(description, segment)
        description.lock = description.unlock = lambda: 0

    sync._Description.__init__ = open_door


def produce(name: str, number: int, seconds: float, lock: bool = True) -> dict[str, int]:
    """Insert as fast as the buffer takes it; returns how much was inserted, aborted and refused."""
    if not lock:
        without_lock()
    chance, done = random.Random(number), collections.Counter(inserted=0, aborted=0)
    with shmkv.attach(name) as buffer:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            tokens = [1, *(chance.randrange(3) for _ in range(chance.randrange(12)))]
            tensors = payload(number, done["inserted"], chance)
            way = chance.random()
            if way < 0.7:
                buffer.insert(tokens, tensors, timeout=20)
            else:
                entry = buffer.reserve(tokens, tensors, timeout=20)
                for tensor in tensors:
                    entry[tensor].copy_(tensors[tensor])
                if way > 0.95:
                    entry.abort()
                    done["aborted"] += 1
                    continue
                entry.seal()
            done["inserted"] += 1
    return dict(done)


def consume(name: str, number: int, seconds: float, lock: bool = True) -> dict[str, Any]:
    """Take and share until sent home; returns all that was taken, and how much was given back."""
    if not lock:
        without_lock()
    chance, taken, n_returned, kept = random.Random(-number), [], 0, collections.deque(maxlen=3)
    with shmkv.attach(name) as buffer:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            tokens = [1, *(chance.randrange(3) for _ in range(chance.randrange(12)))]
            way = chance.random()
            if way < 0.15:
                with buffer.select(tokens, match=chance.choice(("prefix", "overlap")), timeout=0) as shared:
                    if shared:
                        verify(shared)
                continue
            hit = buffer.drop_select(tokens, match="overlap", timeout=0.05, readonly=way > 0.8)
            if not hit:
                if buffer.drop_select([STOP]):
                    break
                continue
            found = verify(hit)
            if way < 0.2:
                hit["body"].zero_()  # a private page: the next one must not see it
                hit.release(returned=True)
                n_returned += 1
                continue
            taken.append(found)
            if way > 0.9:
                kept.append(hit["body"])
            hit.release()
            del hit
    return {"taken": taken, "returned": n_returned}


def sampled(buffer: shmkv.KVBuffer, children: list[Child]) -> int:
    """Look at the buffer until all the children have ended; returns how often."""
    n_looks, left = 0, {child._process.sentinel for child in children}
    while left:
        assert buffer.problems() == []
        n_looks += 1
        left -= set(multiprocessing.connection.wait(left, 0.02))
    return n_looks


@pytest.mark.kv_timeout(100)
def test_every_entry_is_delivered_exactly_once(kv_create, kv_spawn, capsys):
    seconds, buffer = 20.0, kv_create(**GEOMETRY)
    consumers = [kv_spawn(consume, buffer.name, number, 60.0) for number in range(4)]
    producers = [kv_spawn(produce, buffer.name, number, seconds) for number in range(4)]
    n_looks = sampled(buffer, producers)
    made = [producer.result() for producer in producers]
    for _ in consumers:
        buffer.insert([STOP], {"x": torch.zeros(1)}, timeout=20)
    n_looks += sampled(buffer, consumers)
    results = [consumer.result() for consumer in consumers]
    taken = collections.Counter(found for result in results for found in result["taken"])
    while hit := buffer.drop_select([1], match="overlap"):
        taken[verify(hit)] += 1
    del hit

    assert set(taken.values()) == {1}, [found for found, times in taken.items() if times > 1][:5]
    expected = {(number, serial) for number, done in enumerate(made) for serial in range(done["inserted"])}
    assert taken.keys() == expected
    stats = buffer.stats()
    counters = stats.counters
    assert counters["inserts"] == counters["consumed"] == len(expected) + len(consumers)
    assert counters["redelivered"] == sum(result["returned"] for result in results)
    assert counters["takes"] == counters["consumed"] + counters["redelivered"]
    assert counters["aborted"] == sum(done["aborted"] for done in made)
    assert counters["deaths"] == counters["recoveries"] == counters["timeouts"] == 0
    assert (stats.used_bytes, stats.meta_used_bytes, stats.held_leases, stats.peers) == (0, 0, 0, 1)
    assert stats.entries["free"] == GEOMETRY["slots"] and buffer.problems() == []
    with capsys.disabled():
        print(f"\n{len(expected)} entries in {seconds} s, {n_looks} looks", end=" ", flush=True)
    assert len(expected) > 200 and all(result["taken"] for result in results) and n_looks > 50


# ---------------------------------------------------------------- the hammer would notice

def fault_of_hammering(seconds: float, lock: bool) -> str:
    """Hammer with the lock or without it; returns what went wrong, "" if nothing did."""
    buffer = shmkv.create(unique_name(), **GEOMETRY)
    children = [Child(function, (buffer.name, number, duration, lock), {}, "forkserver")
                for function, duration in ((consume, seconds + 2), (produce, seconds)) for number in range(4)]
    made, taken = [], collections.Counter()
    try:
        for child in children:
            result = child.result(2 * seconds + 10)
            if "taken" in result:
                taken.update(result["taken"])
            else:
                made.append(result["inserted"])
        twice = [found for found, times in taken.items() if times > 1]
        problems = buffer.problems()
        if twice or problems:
            return f"delivered twice: {twice[:5]}; problems: {problems}"
        while hit := buffer.drop_select([1], match="overlap"):
            taken[verify(hit)] += 1
            hit.release()
        return "" if sum(taken.values()) == sum(made) else f"{sum(made)} inserted, {sum(taken.values())} delivered"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        for child in children:
            child.close()
        for left in os.listdir("/dev/shm"):
            if buffer.name in left:
                os.unlink(f"/dev/shm/{left}")
        with contextlib.suppress(Exception):
            buffer.close()


@pytest.mark.parametrize("lock", [True, False], ids=["locked", "unlocked"])
def test_the_hammer_notices_when_the_lock_is_gone(kv_spawn, capsys, lock):
    fault = kv_spawn(fault_of_hammering, 3.0, lock).result(50)
    with capsys.disabled():
        print(f"\nlock {'on' if lock else 'off'}: {fault[:150]}", end=" ", flush=True)
    assert bool(fault) is not lock
