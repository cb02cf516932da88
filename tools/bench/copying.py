"""insert() of a private tensor, beside one bare copy of the same bytes into warm shared memory."""

from __future__ import annotations

import mmap
import tempfile

import torch

import shmkv

from .report import HEADERS, SIZES, percentiles, row, timed_us

WARM_UP = 3


def run(quick: bool):
    rows, figures = [], {"handoff": {"copy": {}}, "limit": {"copy": {}}, "copy_ratio": {}}
    with shmkv.create(capacity=max(SIZES.values())) as buffer:
        for size, nbytes in SIZES.items():
            rounds = max(8, min(400, (2 << 30) // nbytes) // (4 if quick else 1))
            inserts, copies = measure(buffer, nbytes, rounds)
            ratio = percentiles(inserts)["p50_us"] / percentiles(copies)["p50_us"]
            rows += [[*row(f"{size}, insert", inserts), f"{ratio:.2f}"], [*row(f"{size}, bare copy_", copies), ""]]
            figures["handoff"]["copy"][size] = percentiles(inserts)
            figures["limit"]["copy"][size] = percentiles(copies)
            figures["copy_ratio"][size] = ratio
    yield f"insert of one private tensor, us ({WARM_UP} warm-up rounds)", [*HEADERS, "ratio"], rows, figures


def measure(buffer: shmkv.KVBuffer, nbytes: int, rounds: int) -> tuple[list[float], list[float]]:
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    inserts, copies = [], []
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(nbytes)
        target = torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)
        for _ in range(WARM_UP + rounds):
            copies.append(timed_us(lambda: target.copy_(source)))
            inserts.append(timed_us(lambda: buffer.insert([1], {"kv": source})))
            buffer.drop_select([1]).release()
    return inserts[WARM_UP:], copies[WARM_UP:]
