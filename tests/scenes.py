"""Buffers to look into: of a living pair, of one stopped and of one killed in the middle of a change."""

import os
import signal
import threading
import time

import torch

import shmkv
from shmkv.layout import Header
from shmkv.testing import die_at_store, eventually

NAMES = {"model": "toy", "rank": 0}
SMALL = {"capacity": 256 << 10, "slots": 16, "meta_capacity": 32 << 10, "peers": 4, "leases": 32, "waits": 8,
         "role": "prefill"}
SECRET = 1_234_567  # no other number in a picture looks like this one
PROMPT = [SECRET, SECRET + 1, SECRET + 2]


def kv(n_tokens):
    return {"key": torch.zeros(2, n_tokens, 8), "value": torch.ones(2, n_tokens, 8)}


def filled(kv_create, **options):
    """A buffer of this process with three entries in two namespaces."""
    buffer = kv_create(**{**SMALL, **options})
    buffer.insert(PROMPT, kv(3), namespace=NAMES)
    buffer.insert([*PROMPT, 7], kv(4), namespace=NAMES, ttl=3600)
    buffer.insert(PROMPT, {"hidden": torch.zeros(5, dtype=torch.bfloat16)}, namespace={**NAMES, "rank": "0"})
    return buffer


def take_and_wait(name):
    with shmkv.attach(name, role="decode") as buffer:
        hit = buffer.drop_select(PROMPT, namespace=NAMES, timeout=10)
        buffer.drop_select([SECRET + 5, 1], namespace=NAMES, timeout=60)
        return hit.matched_tokens


def living_pair(kv_create, kv_spawn, **options):
    """The other one has taken an entry, and waits for one that will not come."""
    buffer = filled(kv_create, **options)
    child = kv_spawn(take_and_wait, buffer.name)
    eventually(lambda: buffer.stats().waiting["entry"])
    return buffer, child


class Halfway(die_at_store):
    """Sends a signal to this process before the n-th store that it makes in the middle of a mutation."""

    def __init__(self, words, number, n=4):
        super().__init__()
        self.words, self.number, self.left = words, number, n

    def _trace(self, frame, event, argument):
        before, further = self.stores, super()._trace(frame, event, argument)
        if self.stores > before and self.words[Header.mutation] & 1:
            self.left -= 1
            if not self.left:
                os.kill(os.getpid(), self.number)
        return further


def insert_halfway(name, number):
    with shmkv.attach(name, role="halfway") as buffer:
        buffer.insert([1, 2], kv(2), namespace=NAMES)
        with Halfway(buffer._session.tables.words, number):
            buffer.insert([1, 2, 3], kv(3), namespace=NAMES)


def stopped_pair(kv_create, kv_spawn, **options):
    """The other one is stopped in the middle of an insert, inside the lock."""
    buffer = filled(kv_create, **options)
    child = kv_spawn(insert_halfway, buffer.name, signal.SIGSTOP)
    eventually(lambda: open(f"/proc/{child.pid}/stat").read().rpartition(")")[2].split()[0] == "T")
    return buffer, child


def killed_pair(kv_create, kv_spawn, **options):
    """The other one was killed there, with the lock held."""
    buffer = filled(kv_create, **options)
    child = kv_spawn(insert_halfway, buffer.name, signal.SIGKILL)
    assert child.join() == -signal.SIGKILL
    return buffer, child


SCENES = {"live": living_pair, "stopped": stopped_pair, "killed": killed_pair}


class WaitingForRoom:
    """A thread of this process that waits for room, until its block is left."""

    def __init__(self, buffer, nbytes):
        self.buffer, self.nbytes = buffer, nbytes

    def __enter__(self):
        self.buffer.insert([SECRET + 9], {"x": torch.zeros(self.nbytes, dtype=torch.uint8)})
        self.thread = threading.Thread(target=self._insert)
        self.thread.start()
        eventually(lambda: self.buffer.stats().waiting["room"])

    def _insert(self):
        self.buffer.insert([SECRET + 9, 1], {"x": torch.zeros(self.nbytes, dtype=torch.uint8)}, timeout=30)

    def __exit__(self, *_):
        self.buffer.cancel([SECRET + 9])
        self.thread.join()


def image(name):
    """What lies in the segment, and what lies beside it."""
    with open(f"/dev/shm/shmkv.{name}", "rb") as file:
        return file.read(), sorted(entry for entry in os.listdir("/dev/shm") if name in entry)


def hammer(name, seconds):
    with shmkv.attach(name, role="hammer") as buffer:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            buffer.insert([1, 2], kv(2))
            buffer.drop_select([1, 2], timeout=1, copy=True)
