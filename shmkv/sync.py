"""What: the segment's lock, dropped by the kernel when its holder dies; sleeping and waking with a deadline.

Map: nothing of the lock lies in the segment. It is `flock` on an open file description of the segment's file that is
never mapped, one for each thread and handle, so that threads and second handles exclude each other by the same call.
A *bell* is a named POSIX semaphore, one for each waiting thread.

States: a thread is outside or inside a segment's section; entering twice is refused at once, also through a second
handle of the same segment (a signal handler, a finaliser).

Guarantees: the lock is taken and dropped without releasing the GIL (a call that gives it up and then waits to get it
back owns the lock meanwhile: every other process would wait up to 8 ms behind one busy thread). An interrupt at any
bytecode leaves it unlocked: dropping is one unconditional C call in a `finally`, entered before the lock is taken.
A bell is only a hint: whoever waits looks again at least every RECHECK_NS, so a lost, stolen, doubled or interrupted
ring costs time, never a result. Deadlines are CLOCK_MONOTONIC; an interrupted sleep goes on, an idle one uses no CPU.

Not guaranteed: fairness between contenders. A fork by C code that runs no Python hook can keep a dead parent's lock
until that child exits.

If a party dies here: the kernel closes its descriptions and the lock is free; what it left half done is seen by the
next holder (`store`). A stopped holder is waited for, with pauses and a deadline.

Sync points: none; `flock` and the semaphore order everything.

Why not a robust pthread mutex (0.4 against 1.8 us): its owner is a thread id, two containers' equal ids let a death
mark a lock that another holds, and its layout is the libc's.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable
from numbers import Real
from typing import Protocol, TypeVar

import posix_ipc

from .errors import ClosedError, InvalidArgument, ReentryError, TimedOut
from .segment import Segment, log

T = TypeVar("T")
RECHECK_NS = 400_000_000
"""a sleeper looks again after this time, whatever the bells did; also how soon a death is noticed"""
LOCK_GRACE_NS = 1_000_000_000
"""a call whose own deadline is shorter may wait this long for the lock"""
FOREVER_NS = 1 << 63

_SPIN_TRIES = 40
_PAUSE_S, _PAUSE_MOST_S = 20e-6, 1e-3
_SPIN_MOST_NS = 150_000
_POLL_NS = 2_000_000

_held = ctypes.PyDLL(None)   # calls keep the GIL
_free = ctypes.CDLL(None)    # calls give it up
_flock = _held.flock
_flock.argtypes = (ctypes.c_int, ctypes.c_int)
_free.sem_open.restype = ctypes.c_void_p
_free.sem_close.argtypes = _held.sem_trywait.argtypes = (ctypes.c_void_p,)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_clockwait = getattr(_free, "sem_clockwait", None)  # glibc 2.30
HAS_CLOCKWAIT = _clockwait is not None
if _clockwait is not None:
    _clockwait.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Timespec))


class _Thread(threading.local):
    """What one thread is inside of, and what it put off until it is outside."""

    def __init__(self) -> None:
        self.inside: dict[tuple[int, int], bool] = {}
        self.deferred: list[Callable[[], object]] = []


_me = _Thread()


class Lock:
    """The lock of one segment, as seen by one handle."""

    def __init__(self, segment: Segment):
        self._segment = segment
        self._identity = segment.identity
        self._mine = threading.local()

    def run(self, body: Callable[[], T], deadline_ns: int | None) -> T | None:
        """Run `body` inside the lock and return what it returns.

        `deadline_ns` is monotonic; raises TimedOut when the lock could not be had by then (or within LOCK_GRACE_NS, if
        that is later), ReentryError when this thread is inside already. With None it tries once (None: others hold it).
        """
        mine = getattr(self._mine, "description", None) or self._describe()
        inside, identity = _me.inside, self._identity
        if inside.get(identity):
            raise ReentryError(f"this thread is already inside the lock of segment {self._segment.name!r}")
        try:
            inside[identity] = True
            if mine.lock():
                if deadline_ns is None:
                    return None
                self._contend(mine, deadline_ns)
            return body()
        finally:
            try:
                mine.unlock()
            finally:
                inside[identity] = False
                if _me.deferred:
                    _run_deferred()

    def inside(self) -> bool:
        """Whether this thread is inside, by whatever handle of the segment."""
        return _me.inside.get(self._identity, False)

    def close(self) -> None:
        """Close this thread's description. Those of other threads, which may be inside, go with them or this object."""
        description = getattr(self._mine, "description", None)
        if description is not None and not self.inside():
            description.close()

    def _describe(self) -> _Description:
        description = self._mine.description = _Description(self._segment)
        return description

    def _contend(self, mine: _Description, deadline_ns: int) -> None:
        started = time.monotonic_ns()
        deadline_ns = max(deadline_ns, started + LOCK_GRACE_NS)
        tries, pause = _SPIN_TRIES if _cpus() > 1 else 1, _PAUSE_S
        while mine.lock():
            if mine.fd < 0:
                raise ClosedError(f"the handle of segment {self._segment.name!r} is closed")
            tries -= 1
            if tries > 0:
                continue
            if time.monotonic_ns() >= deadline_ns:
                waited = (time.monotonic_ns() - started) / 1e9
                raise TimedOut(f"the lock of segment {self._segment.name!r} was held by others for {waited:.3f} s",
                               hint="a holder may be stopped (SIGSTOP, debugger); it is waited for, not robbed")
            time.sleep(pause)
            pause = min(pause * 2, _PAUSE_MOST_S)


class _Description:
    """One thread's open file description of the segment's file."""

    def __init__(self, segment: Segment):
        self._segment = segment
        self.fd = fd = segment.reopen()
        self.lock = functools.partial(_flock, fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.unlock = functools.partial(_flock, fd, fcntl.LOCK_UN)
        _descriptions.add(self)

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        self.lock = functools.partial(_flock, -1, 0)  # fails, and closing dropped the lock
        self.unlock = functools.partial(_flock, -1, 0)
        if fd >= 0:
            self._segment.forget(fd)

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            self.close()


_descriptions: weakref.WeakSet[_Description] = weakref.WeakSet()


def _leave_in_child() -> None:
    """A forked child never unlocks what its parent holds; segment's hook closes the descriptors."""
    global _fence
    _fence = threading.Lock()  # another thread of the parent may have held it
    for description in list(_descriptions):
        description.close()
    _me.inside.clear()
    _me.deferred.clear()


os.register_at_fork(after_in_child=_leave_in_child)


def outside(action: Callable[[], object]) -> None:
    """Run `action` now, or, if this thread is inside a section, as soon as it has left it (for finalisers)."""
    if any(_me.inside.values()):
        _me.deferred.append(action)
    else:
        action()


def _run_deferred() -> None:
    while _me.deferred and not any(_me.inside.values()):
        _me.deferred.pop(0)()


def fence() -> None:
    """A full memory barrier: stores before it are seen by whoever sees a store after it, and loads stay behind."""
    with _fence:
        pass


_fence = threading.Lock()


class Bell:
    """One waiting thread's own semaphore; others ring it by name. Where none can be made, its thread polls."""

    def __init__(self, name: str):
        self.name = name
        self._address, self._until = None, _Timespec()
        try:
            self._semaphore = posix_ipc.Semaphore(name, posix_ipc.O_CREX, mode=0o600, initial_value=0)
        except (posix_ipc.Error, OSError) as error:  # /dev/shm full, no descriptors, name taken
            log.warning("no semaphore for a waiting thread (%s): it polls every %d ms", error, _POLL_NS // 1_000_000)
            self._semaphore = None
            return
        if _clockwait is not None:
            self._address = _free.sem_open(name.encode(), 0)

    def sleep(self, until_ns: int) -> None:
        """Sleep until rung, interrupted, or the monotonic time `until_ns`."""
        if self._address:
            self._until.seconds, self._until.nanoseconds = divmod(until_ns, 1_000_000_000)
            _clockwait(self._address, time.CLOCK_MONOTONIC, ctypes.byref(self._until))
        else:
            self._sleep_portably(max(0, until_ns - time.monotonic_ns()))

    def _sleep_portably(self, for_ns: int) -> None:
        if self._semaphore is None:
            return time.sleep(min(for_ns, _POLL_NS) / 1e9)
        try:  # CLOCK_REALTIME: a clock step may stretch or cut this one sleep
            self._semaphore.acquire(min(for_ns, RECHECK_NS) / 1e9)
        except (posix_ipc.BusyError, posix_ipc.SignalError):
            pass

    def hush(self) -> None:
        """Take back rings that were meant for a look already made."""
        while self._address and _held.sem_trywait(self._address) == 0:
            pass

    def close(self) -> None:
        """Remove the semaphore. Idempotent."""
        semaphore, self._semaphore = self._semaphore, None
        address, self._address = self._address, None
        if semaphore is not None:
            silence(self.name)
            semaphore.close()
        if address:
            _free.sem_close(address)


class Bells:
    """The bells this process has rung, open for the next time; one for each place `at`."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[str, posix_ipc.Semaphore]] = {}

    def ring(self, at: int, name: str) -> None:
        """Ring the bell of this name at this place. A bell that is gone needs no ringing."""
        known = self._open.get(at)
        if known is None or known[0] != name:
            self._forget(at)
            try:
                known = self._open[at] = (name, posix_ipc.Semaphore(name))
            except (posix_ipc.Error, OSError):
                return
        try:
            known[1].release()
        except (posix_ipc.Error, OSError, ValueError):
            self._forget(at)

    def close(self) -> None:
        for at in list(self._open):
            self._forget(at)

    def _forget(self, at: int) -> None:
        known = self._open.pop(at, None)
        if known is not None:
            known[1].close()


def silence(name: str) -> None:
    """Remove a bell's name; idempotent."""
    try:
        posix_ipc.unlink_semaphore(name)
    except (posix_ipc.ExistentialError, posix_ipc.PermissionsError):
        pass


class Place(Protocol):
    """Where a thread waits: its own wait record and bell (`peers`)."""

    bell: Bell
    spin: Spin

    def clear(self) -> None: ...
    def posted(self) -> int: ...


def wait(evaluate: Callable[[], T | None], deadline_ns: int, place: Place,
         next_change_ns: Callable[[], int]) -> T | None:
    """Evaluate until there is a result or the deadline is past (then None). What is waited for is on record already.

    `next_change_ns()` is when something changes by time alone (0: nothing will).
    """
    while True:
        place.clear()
        result = evaluate()
        if result is not None:
            return result
        now = time.monotonic_ns()
        if now >= deadline_ns:
            return None
        until = min(deadline_ns, now + RECHECK_NS, next_change_ns() or FOREVER_NS)
        place.spin.pass_time(place, now, until)


class Spin:
    """A short bounded spin before sleeping, adapted to how soon answers came lately.

    Waking a sleeper costs 25-30 us, seeing a near answer 1 us; but an idle waiter must use no CPU. After answers that
    came within _SPIN_MOST_NS the next wait spins a little longer than they took; after others it spins less, soon not
    at all, and tries again every 16th time. Where only one CPU is allowed it never spins.
    """

    def __init__(self) -> None:
        self._most_ns = _SPIN_MOST_NS if _cpus() > 1 else 0
        self._budget_ns = self._most_ns
        self._since_try = 0

    def pass_time(self, place: Place, now: int, until_ns: int) -> None:
        posted, clock = place.posted, time.monotonic_ns
        stop = min(now + self._allowance(), until_ns)
        while clock() < stop:
            if posted():
                place.bell.hush()
                return self._learn(clock() - now)
        if not posted():
            place.bell.sleep(until_ns)
        self._learn(clock() - now)

    def _allowance(self) -> int:
        if self._budget_ns == 0 and self._most_ns:
            self._since_try += 1
            if self._since_try >= 16:
                self._since_try = 0
                return self._most_ns // 2
        return self._budget_ns

    def _learn(self, took_ns: int) -> None:
        if took_ns < self._most_ns:
            self._budget_ns = min(self._most_ns, 2 * took_ns + 20_000)
        else:
            self._budget_ns = self._budget_ns // 2 if self._budget_ns > 4_000 else 0


def _cpus() -> int:
    return len(os.sched_getaffinity(0))


def deadline(timeout: float | None) -> int:
    """The monotonic time in ns at which `timeout` seconds are over; None means forever."""
    if timeout is None:
        return FOREVER_NS
    if not (isinstance(timeout, (float, int)) or isinstance(timeout, Real)) or not timeout >= 0:
        raise InvalidArgument(f"timeout={timeout!r} is neither None (forever) nor a number of seconds >= 0")
    return min(FOREVER_NS, time.monotonic_ns() + round(min(timeout, 1e9) * 1e9))


def passed(deadline_ns: int) -> bool:
    return time.monotonic_ns() >= deadline_ns
