"""A pytest plugin for tests of code that hands tensors between processes. Installed with the package, used by name:

- `kv_buffer`: a fresh buffer of 16 MiB with a unique name; `kv_create(**options)`: as many as wanted. Closed after the
  test, which fails if `problems()` finds anything.
- `kv_spawn(function, *args)`: run a module-level function in a real process. `.result()` brings home what it returned
  or raised, with the child's traceback (unasked, that fails the test at its end); `.kill()`, `.stop()`, `.resume()`
  send SIGKILL, SIGSTOP, SIGCONT. Whoever is left at the end of the test is killed.
- `kv_leaks`: fails the test if it leaves an object in /dev/shm, a semaphore, a descriptor or a mapping of a segment.
- Every test that uses one of these has a watchdog (60 s, or `@pytest.mark.kv_timeout(seconds)`): it prints all stacks,
  kills the children and fails the test.
- `eventually(condition)`: wait for a condition instead of sleeping.
- `die_at_store(k)`: a context manager that SIGKILLs this process just before its k-th store into a segment.

Children are made by forkserver with torch loaded, in tens of milliseconds; `kv_spawn(..., method="spawn")` starts a
fresh interpreter. Names carry the pid, so that sessions and xdist workers do not meet.
"""

from __future__ import annotations

import dis
import faulthandler
import gc
import multiprocessing
import os
import pickle
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from types import CodeType, FrameType
from typing import Any

import pytest

import shmkv
from shmkv import segment

WATCHDOG_S = 60.0
_PRELOADED = ["pytest", "torch", "shmkv.testing"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "kv_timeout(seconds): how long this test may take before its watchdog ends it")


class Child:
    """A process that runs one function."""

    def __init__(self, function: Callable, args: tuple, kwargs: dict, method: str):
        context = multiprocessing.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload(_PRELOADED)
        self._name = function.__qualname__
        self._pipe, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_run_child, args=(theirs, function, args, kwargs), name=self._name)
        self._process.start()
        theirs.close()
        self._outcome: tuple | None = None
        self._asked = False

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    @property
    def exitcode(self) -> int | None:
        return self._process.exitcode

    def result(self, timeout: float = 30.0) -> Any:
        """What the function returned; raises what it raised, ChildDied if it was killed, TimeoutError if it runs on."""
        if self._outcome is None:
            if not wait([self._pipe, self._process.sentinel], timeout):
                raise TimeoutError(f"{self!r} is still running after {timeout} s")
            self._outcome = self._receive()
        kind, value, text = self._outcome
        if kind == "returned":
            return value
        if isinstance(value, BaseException):
            raise value from ChildTraceback(f"\n{text}")
        raise ChildDied(f"{self!r}: {text}")

    def join(self, timeout: float = 30.0) -> int:
        """Wait for the end of the process; returns its exit code, which is answer enough for who wants no result."""
        self._asked = True
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"{self!r} is still running after {timeout} s")
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """Kill it if it still runs, and free what it took."""
        if self._process.exitcode is None:
            self._process.kill()
        self._process.join()
        self._process.close()
        self._pipe.close()

    def unread_error(self) -> str:
        """The traceback of an exception that nobody has been told of."""
        if self._outcome is None and not self._asked and self._pipe.poll():
            self._outcome = self._receive()
            return self._outcome[2] if self._outcome[0] == "raised" else ""
        return ""

    def _receive(self) -> tuple:
        try:
            if self._pipe.poll():
                return self._pipe.recv()
        except EOFError:
            pass
        self._process.join()
        return "died", None, f"ended with exit code {self._process.exitcode} and no result"

    def __repr__(self) -> str:
        return f"<child {self._name}>"


class ChildDied(Exception):
    """A child ended without returning or raising."""


class ChildTraceback(Exception):
    """Shows the child's own traceback as the cause."""


def _run_child(pipe: Connection, function: Callable, args: tuple, kwargs: dict) -> None:
    try:
        outcome = ("returned", function(*args, **kwargs), "")
    except BaseException as error:
        outcome = ("raised", error, traceback.format_exc())
    try:
        pipe.send(outcome)
    except (pickle.PicklingError, TypeError, AttributeError):
        pipe.send((outcome[0], None, f"{outcome[1]!r} cannot be sent home\n{outcome[2]}"))


@pytest.fixture
def kv_spawn(kv_watchdog: Watchdog) -> Iterator[Callable[..., Child]]:
    """Run module-level functions in real processes."""

    def spawn(function: Callable, *args: Any, method: str = "forkserver", **kwargs: Any) -> Child:
        child = Child(function, args, kwargs, method)
        kv_watchdog.children.append(child)
        return child

    yield spawn
    raised = [text for child in kv_watchdog.children if (text := child.unread_error())]
    for child in kv_watchdog.children:
        child.close()
    assert not raised, "a child raised and nobody asked for its result():\n" + "\n".join(raised)


@pytest.fixture
def kv_create(kv_watchdog: Watchdog) -> Iterator[Callable[..., shmkv.KVBuffer]]:
    """Make buffers with unique names; options as for `shmkv.create`, capacity 16 MiB unless given."""
    buffers: list[shmkv.KVBuffer] = []

    def create(**options: Any) -> shmkv.KVBuffer:
        options = {"name": unique_name(), "capacity": 16 << 20, "slots": 256, "meta_capacity": 1 << 20, **options}
        buffers.append(shmkv.create(**options))
        return buffers[-1]

    yield create
    problems = [problem for buffer in buffers if not buffer.closed for problem in buffer.problems()]
    for buffer in buffers:
        buffer.close()
    assert not problems, problems


@pytest.fixture
def kv_buffer(kv_create: Callable[..., shmkv.KVBuffer]) -> shmkv.KVBuffer:
    """A fresh buffer of 16 MiB with a unique name."""
    return kv_create()


@pytest.fixture
def kv_leaks() -> Iterator[None]:
    """Fail the test if it leaves anything of a segment behind."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)
    if not gc.get_freeze_count():
        gc.freeze()  # what is here before the first test is never garbage: the collections below need not walk it
    before = residue()
    yield
    left = residue() - before
    assert not left, f"left behind: {sorted(left)}"


def eventually(condition: Callable[[], object], timeout: float = 10.0) -> float:
    """Wait until the condition holds, instead of sleeping for a guessed time; returns how many seconds that took."""
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > timeout:
            raise TimeoutError(f"the condition did not come true within {timeout} s")
        time.sleep(0.002)
    return time.monotonic() - started


def unique_name() -> str:
    """A segment name no other test, worker or session uses."""
    return f"t{os.getpid()}-{secrets.token_hex(6)}"


def residue() -> set[str]:
    """What of segments this process has now: names in /dev/shm that it made, descriptors, mappings."""
    gc.collect()
    marks = (f"shmkv.t{os.getpid()}-", f"shmkv.kv-{os.getpid()}-")
    names = {name for name in os.listdir(segment.DIRECTORY) if name.removeprefix("sem.").startswith(marks)}
    return {f"{segment.DIRECTORY}/{name}" for name in names} | _descriptors() | _mappings()


def _descriptors() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue
        if _is_segment(target):
            found.add(f"fd {fd} -> {target}")
    return found


def _mappings() -> set[str]:
    with open("/proc/self/maps") as maps:
        return {f"mapping {line.split()[0]} {line.split(maxsplit=5)[5].strip()}" for line in maps
                if len(line.split()) > 5 and _is_segment(line.split(maxsplit=5)[5])}


def _is_segment(path: str) -> bool:
    return path.startswith("/dev/shm/") and ("shmkv." in path or "/#" in path or "deleted" in path)


# ---------------------------------------------------------------- the watchdog

class WatchdogExpired(Exception):
    """The test took longer than its watchdog allows."""


class Watchdog:
    """Ends a test that hangs: stacks on stderr, children killed, the main thread interrupted."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.children: list[Child] = []
        self._timer = threading.Timer(seconds, self._expire)
        self._timer.daemon = True
        self._old = signal.signal(signal.SIGUSR2, self._raise)
        self._timer.start()

    def end(self) -> None:
        self._timer.cancel()
        signal.signal(signal.SIGUSR2, self._old)

    def _expire(self) -> None:
        faulthandler.dump_traceback(file=sys.__stderr__)
        for child in self.children:
            try:
                os.kill(child.pid, signal.SIGKILL)
            except (ProcessLookupError, ValueError):
                pass
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)

    def _raise(self, *_: object) -> None:
        raise WatchdogExpired(f"the test took longer than {self.seconds} s")


@pytest.fixture
def kv_watchdog(request: pytest.FixtureRequest) -> Iterator[Watchdog]:
    """The outer watchdog of a test."""
    mark = request.node.get_closest_marker("kv_timeout")
    watchdog = Watchdog(mark.args[0] if mark else WATCHDOG_S)
    yield watchdog
    watchdog.end()


# ---------------------------------------------------------------- crashes

class die_at_store:
    """SIGKILL this process just before its k-th store into a segment (with k=None only count them in `stores`).

    Every subscript assignment in the package counts, a superset of the stores into shared memory: whatever the package
    does between two of them cannot be seen by another process.
    """

    def __init__(self, k: int | None = None):
        self.k, self.stores = k, 0
        self._store_at: dict[CodeType, frozenset[int]] = {}

    def __enter__(self) -> die_at_store:
        self._old = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._old)

    def _trace(self, frame: FrameType, event: str, _: object) -> Callable | None:
        if event == "call":
            if not frame.f_code.co_filename.startswith(_PACKAGE) or frame.f_code.co_filename == __file__:
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode" and frame.f_lasti in self._stores_of(frame.f_code):
            self.stores += 1
            if self.stores == self.k:
                os.kill(os.getpid(), signal.SIGKILL)
        return self._trace

    def _stores_of(self, code: CodeType) -> frozenset[int]:
        found = self._store_at.get(code)
        if found is None:
            stores = (op.offset for op in dis.get_instructions(code) if op.opname in ("STORE_SUBSCR", "STORE_SLICE"))
            found = self._store_at[code] = frozenset(stores)
        return found


_PACKAGE = os.path.dirname(os.path.abspath(shmkv.__file__)) + os.sep
