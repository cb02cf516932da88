"""What the sections of the check have in common: rows, children, device tensors, bits, clocks.

Under the emulated driver torch sees device memory by its host alias, and there is no torch.cuda: `on_device` and
`settle` are the two places where that makes a difference.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from shmkv import driver as drivers
from shmkv.transport.cuda_ipc import Allocation
from shmkv.transport.foreign import host_bytes

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
DEVICE = "cuda:0"
SEGMENT = {"capacity": "1MiB", "meta_capacity": "1MiB", "slots": 64, "leases": 64}
ANSWER_S = 25.0
_PR_SET_PDEATHSIG = 1


class Report:
    """Rows go to the frame at once, one JSON text a line: what was found before a hang is not lost."""

    def __init__(self) -> None:
        self._lines = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # whatever a library prints is no row

    def check(self, key: str, question: str, good: bool, result: Any, value: Any = None) -> None:
        self._row(key, question, result, "ok" if good else "FAIL", good if value is None else value)

    def info(self, key: str, question: str, result: Any, value: Any = None) -> None:
        self._row(key, question, result, "info", result if value is None else value)

    def differs(self, key: str, question: str, result: Any, value: Any = None) -> None:
        self._row(key, question, result, "DIFF", result if value is None else value)

    def control(self, key: str, question: str, saw: bool, result: Any) -> None:
        """A control has to see the fault: one that does not says that the check beside it proves nothing."""
        self._row(key, question, f"{'yes' if saw else 'no'}, {result}", "ok" if saw else "DIFF", saw)

    def fact(self, **facts: Any) -> None:
        self._write({"facts": facts})

    def _row(self, key: str, question: str, result: Any, verdict: str, value: Any) -> None:
        self._write({"row": {"key": key, "question": question, "result": str(result), "verdict": verdict,
                             "value": value}})

    def _write(self, line: dict) -> None:
        print(json.dumps(line), file=self._lines, flush=True)


# ---------------------------------------------------------------- children

class ChildFailed(Exception):
    """A child raised, died, or did not answer."""


class Child:
    """A spawned process that runs `function(home, *arguments)`; at the end of the block it is sent home, or killed."""

    def __init__(self, function: Callable, *arguments: Any, **environment: str):
        context = multiprocessing.get_context("spawn")
        self._name = function.__name__
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=live, args=(theirs, function, arguments), daemon=True)
        with environ(environment):
            self.process.start()
        theirs.close()

    def say(self, *words: Any) -> None:
        self._pipe.send(words)

    def hear(self, within_s: float = ANSWER_S) -> Any:
        if not self._pipe.poll(within_s):
            raise ChildFailed(f"{self._name}: no answer within {within_s:.0f} s")
        try:
            kind, value = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(5)
            raise ChildFailed(f"{self._name}: ended with exit code {self.process.exitcode}") from None
        if kind == "raised":
            raise ChildFailed(f"{self._name}: {value.strip()}")
        return value

    def ask(self, *words: Any, within_s: float = ANSWER_S) -> Any:
        self.say(*words)
        return self.hear(within_s)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self.process.join(10)
        if self.process.exitcode is None:
            self.kill()


class Home:
    """What a child speaks to; `hear` ends it with EOFError when the parent has closed the pipe."""

    def __init__(self, pipe: Connection):
        self._pipe = pipe

    def say(self, value: Any) -> None:
        self._pipe.send(("said", value))

    def hear(self) -> tuple:
        return self._pipe.recv()


def live(pipe: Connection, function: Callable, arguments: tuple) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody else ends us if the section's process dies
    try:
        function(Home(pipe), *arguments)
    except EOFError:
        pass
    except BaseException:
        try:
            pipe.send(("raised", traceback.format_exc()))
        except OSError:
            sys.stderr.write(traceback.format_exc())


@contextmanager
def environ(changes: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# ---------------------------------------------------------------- tensors on the device

def emulated() -> bool:
    return drivers.find().emulated


def on_device(host: torch.Tensor) -> torch.Tensor:
    """A copy in device memory of a contiguous uint8 tensor: of torch's caching allocator, where torch has one."""
    if not emulated():
        return host.to(DEVICE)
    driver = drivers.find()
    memory = Allocation(driver, 0, max(1, host.numel())).memory()
    tensor = host_bytes(driver.host_alias(memory.address), max(1, host.numel()), memory)[:host.numel()]
    return tensor.copy_(host)


def settle() -> None:
    """Wait for all work of this process on the device."""
    if not emulated():
        torch.cuda.synchronize()


def free_bytes() -> int:
    return drivers.find().free_bytes(0)


def pattern(nbytes: int, seed: int = 0) -> torch.Tensor:
    """Bytes that two processes can make by themselves."""
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes as integers on the host, contiguous: comparing values would miss NaNs and signs of zeros."""
    if tensor.dtype == torch.complex128:
        tensor = torch.view_as_real(tensor)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integers[tensor.dtype.itemsize]).contiguous().cpu()


def raw(tensor: torch.Tensor) -> bytes:
    """Its bytes, to be sent: a tensor in a pipe would have its storage moved."""
    return bits(tensor).numpy().tobytes()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype) and torch.equal(bits(one), bits(other))


# ---------------------------------------------------------------- clocks

def timed_ms(action: Callable[[], object]) -> float:
    began = time.perf_counter_ns()
    action()
    return (time.perf_counter_ns() - began) / 1e6


def percentile(samples: Sequence[float], share: float) -> float:
    ranked = sorted(samples)
    return ranked[round((len(ranked) - 1) * share)]


def median(samples: Sequence[float]) -> float:
    return percentile(samples, 0.5)


def until_true(condition: Callable[[], object], within_s: float) -> float | None:
    """Seconds until the condition held; None if it did not in time."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > within_s:
            return None
        time.sleep(0.001)
    return time.monotonic() - began


def size_text(nbytes: int) -> str:
    for unit, text in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes // unit} {text}"
    return f"{nbytes} B"


def rate(nbytes: int, ms: float) -> float:
    """GB/s, by the bytes that arrive."""
    return nbytes / ms / 1e6
