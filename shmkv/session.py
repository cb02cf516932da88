"""One attached handle's dealings with the segment: entering the section, waiting, releasing, leaving.

Everything above speaks to the tables through `run` (under the lock, then ring whom it concerns) and `wait` (look,
put on record what is waited for, look again, sleep, look again). Everything that ends a lease goes through `Lifeline`.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import util
from typing import NoReturn, Protocol, TypeVar

from . import sync
from .errors import ClosedError, ShmkvError
from .layout import Header
from .leases import Hold, Outcome
from .news import Ring
from .peers import Place, WaitKind
from .segment import Segment, check_ours, log
from .store import Store
from .tables import Tables
from .transport import Mapped

T = TypeVar("T")
LEAVE_TIMEOUT_S = 2.0


class Session:
    """An attached peer. Threads may share it; a forked child may not use it.

    `device_side` is set once the handle has to do with device memory: what it needs before a lease ends, and before
    this peer leaves.
    """

    device_side: DeviceSide | None = None

    def __init__(self, segment: Segment, role: str, deadline_ns: int, tables: Tables | None = None):
        self.segment = segment
        self.closed, self._gone = False, False
        self.tables = tables or Tables(segment)
        self.store, self.lock = Store(self.tables), sync.Lock(segment)
        self._lifelines: set[Lifeline] = set()
        self._here = threading.local()
        self._places: weakref.WeakSet[Place] = weakref.WeakSet()
        claim = functools.partial(self.tables.peers.claim, role)
        self.store.enter(self.enter(lambda: self.store.or_bury(claim), deadline_ns))
        self._left = False
        _end_at_exit(self)

    @property
    def index(self) -> int:
        return self.store.me.index

    def check(self) -> None:
        """Raise InheritedHandle in a forked child, ClosedError after close()."""
        check_ours(self.segment)
        if self.closed:
            raise ClosedError(f"this handle of segment {self.segment.name!r} is closed")

    def run(self, body: Callable[[], T], deadline_ns: int) -> T:
        """Run `body` under the lock, then ring those whom its changes concern."""
        self.check()
        return self.enter(body, deadline_ns)

    def wait(self, look: Callable[[Place | None], T | None], deadline_ns: int,
             announce: Callable[[Place], None]) -> T | None:
        """Look (under the lock) until there is a result; None when the deadline passed.

        `look` gets None the first time and then this thread's place, on which `announce` has put what it waits for.
        """
        result = self.run(lambda: look(None), deadline_ns)
        if result is not None or sync.passed(deadline_ns):
            return result
        self.sweep()
        place = self._place(deadline_ns)
        nested = place.is_waiting()  # we are in a signal handler in the midst of a wait: leave that one's record alone
        if nested:
            place = self._new_place(deadline_ns)
        try:
            announce(place)
            return sync.wait(lambda: self.run(lambda: look(place), deadline_ns), deadline_ns, place, self._next_change)
        finally:
            try:  # an interrupt may hit the first withdrawal; a thread on record as waiting that is not would mislead
                place.withdraw()
            finally:
                place.withdraw()
                if nested:
                    place.retire()

    def lifeline(self, handle: object) -> Lifeline:
        """A lifeline for a lease about to be claimed for this handle."""
        lifeline = Lifeline(self, handle)
        self._lifelines.add(lifeline)
        return lifeline

    def sweep(self) -> None:
        """End the leases whose finalisers were interrupted."""
        for lifeline in list(self._lifelines):
            lifeline.check()

    def released(self, lifeline: Lifeline) -> None:
        """End a lease; from a finaliser, in any thread, outside of sections. Idempotent: struck off when it is done."""
        if not (self._gone or self.segment.inherited) and self.tables.leases.release(lifeline.hold):
            self.tables.waits.ring(WaitKind.ROOM)
            if lifeline.hold.outcome == Outcome.RETURNED:
                self.tables.waits.ring(WaitKind.ENTRY)
        self._lifelines.discard(lifeline)
        if self._left and not self._lifelines:
            self._let_go()

    def settle(self) -> None:
        """Free what was just released, unless others are inside: then they do it."""
        if self.closed or self.segment.inherited:
            return
        with suppress(ShmkvError):  # the release stands; whatever is wrong, the next call of its own meets it too
            entered = self.lock.run(functools.partial(self.store.section, bool), None)
            if entered is not None:
                self._ring(entered[1])

    def close(self) -> None:
        """Leave; leases that views still need stay, and the peer record with them. Idempotent, raises nothing.

        From within a section (a signal handler) it is put off until this thread has left that.
        """
        if self.closed:
            return
        if self.lock.inside():
            return sync.outside(self.close)
        self.closed = True
        if self.segment.inherited:
            return
        self._send_waiters_home()
        self.sweep()
        for place in list(self._places):
            place.retire()
        try:
            try:
                if self.device_side is not None:
                    self.device_side.leave()
            finally:
                self.enter(self.store.leave, sync.deadline(LEAVE_TIMEOUT_S))
        except ShmkvError as error:
            log.warning("closed %r without taking leave, the others will find out: %s", self.segment.name, error)
        finally:
            self.lock.close()
            _lingering.add(self)  # views alone would not keep us, and with us their leases would end
            self._left = True
            if not self._lifelines:
                self._let_go()

    def end_now(self) -> None:
        """At an orderly exit of the process: nothing will look at a view again, so release all, then leave."""
        self.segment.unlink()
        for lifeline in list(self._lifelines):
            if self.device_side is None or self.device_side.finish(lifeline.work()):
                self.released(lifeline)
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_left", True) or self.segment.inherited or sys.is_finalizing():
            return
        with suppress(ShmkvError):  # the kernel tells the others that this peer is gone
            self.close()

    def _let_go(self) -> None:
        """Nothing needs the segment any more: end the claim, unmap."""
        if self._gone:
            return
        self._gone = True
        _lingering.discard(self)
        if self.device_side is not None:
            self.device_side.end()
        self.store.me.end()
        self.tables.waits.bells.close()
        self.tables = self.store = self.lock = self._here = _Closed()
        self.segment.detach()

    def enter(self, body: Callable[[], T], deadline_ns: int) -> T:
        result, rings = self.lock.run(functools.partial(self.store.section, body), deadline_ns)
        if rings:
            self._ring(rings)
        return result

    def _ring(self, rings: list[Ring]) -> None:
        for kind, family, peer in rings:
            self.tables.waits.ring(kind, family=family, peer=peer)

    def _place(self, deadline_ns: int) -> Place:
        place = getattr(self._here, "place", None)
        if place is None:
            place = self._here.place = self._new_place(deadline_ns)
        return place

    def _new_place(self, deadline_ns: int) -> Place:
        claim = functools.partial(self.tables.waits.claim, self.store.me)
        place = self.run(lambda: self.store.or_bury(claim), deadline_ns)
        place.open()
        if self.closed:  # by another thread, which did not know this place
            place.retire()
        self.check()
        self._places.add(place)
        return place

    def _send_waiters_home(self) -> None:
        """Wake our own waiting threads, which then see that the handle is closed, before their bells go."""
        patience, mine = sync.deadline(2), getattr(self._here, "place", None)
        others = [place for place in list(self._places) if place is not mine]
        while any(place.is_waiting() for place in others) and not sync.passed(patience):
            self.tables.waits.ring_peer(self.index)
            time.sleep(0.001)

    def _next_change(self) -> int:
        return self.tables.words[Header.next_expiry_ns]


class DeviceSide(Protocol):
    def drain(self, work: set[tuple[int, int]], then: Callable[[], None]) -> None:
        """Call `then` once the devices have done this work; at once or from another thread."""
        ...

    def finish(self, work: set[tuple[int, int]]) -> bool:
        """Wait a while for this work; whether the devices have done it."""
        ...

    def leave(self) -> None:
        """This peer is about to leave: take its device memory out of use."""
        ...

    def end(self) -> None:
        """The last lease has ended: nothing will be asked any more."""
        ...


class _Closed:
    """Stands where the tables were: a thread that is late finds out that its handle was closed."""

    def __getattr__(self, name: str) -> NoReturn:
        raise ClosedError("this handle was closed by another thread meanwhile")


class Opening:
    """Something to hang a lease on while its bytes are being mapped; goes with the frame that maps them."""

    __slots__ = ("__weakref__",)


class Lifeline:
    """Ends a lease when nothing needs it any more: neither the hit (or reserved entry) nor any view of its bytes.

    Whether these live is asked of weak references. Their callbacks are only the usual occasion to ask: one that an
    interrupt cut short is made up for by the session's next `sweep`.
    """

    __slots__ = ("hold", "_session", "_handle", "_mapped", "_draining", "__weakref__")

    def __init__(self, session: Session, handle: object):
        self.hold = Hold()
        self._session = session
        self._mapped: list[Mapped] = []
        self._draining = False
        self._handle: weakref.ref | None = weakref.ref(handle, self.asked)

    def mapped(self, opening: Opening | None = None) -> Mapped:
        """What a transport records into; the lease lasts as long as what it gives out, and until then as `opening`."""
        mapped = Mapped()
        if opening is not None:
            mapped.watch(opening, self.asked)
        self._mapped.append(mapped)
        return mapped

    def add_work(self, device: int, stream: int) -> None:
        """Device work on this stream may touch the bytes too."""
        for mapped in self._mapped:
            mapped.work.add((device, stream))

    def has_views(self) -> bool:
        return not all([mapped.is_gone() for mapped in self._mapped])

    def work(self) -> set[tuple[int, int]]:
        """(device ordinal, stream) of device work that may still touch the bytes."""
        return set().union(*[mapped.work for mapped in self._mapped])

    def drop_handle(self) -> bool:
        """The handle was released; whether that ended the lease."""
        self._handle = None
        return self.check()

    def settled(self) -> None:
        """The lease was ended under the lock already."""
        self.hold.index = -1
        self.drop_handle()

    def check(self) -> bool:
        """End the lease if nothing needs it; whether that is so. To be called at any time, again after an interrupt."""
        if (self._handle is not None and self._handle() is not None) or self.has_views():
            return False
        sync.outside(self._end)
        return True

    def asked(self, _: weakref.ref) -> None:
        """Called when the handle or what a transport gave out is gone."""
        if not sys.is_finalizing():
            self.check()

    def _end(self) -> None:
        if self._session.segment.inherited or self._draining:
            return
        work, device_side = self.work(), self._session.device_side
        if work and device_side is not None:
            device_side.drain(work, self._finish)  # asked twice, by an interrupt in between, it ends twice
            self._draining = True
        else:
            self._finish()

    def _finish(self) -> None:
        for mapped in self._mapped:
            mapped.unmap()
        self._session.released(self)
        self._handle, self._mapped = None, []  # they refer back to this: leave no cycle for the collector


_lingering: set[Session] = set()
"""closed, but views still hold leases"""
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
_registered_pid = 0


def _end_at_exit(session: Session) -> None:
    """Have the session end with this process, in children of multiprocessing too (they skip atexit)."""
    global _registered_pid
    _sessions.add(session)
    if _registered_pid != os.getpid():
        _registered_pid = os.getpid()
        util.Finalize(None, _end_all, exitpriority=10)


def _end_all() -> None:
    for session in list(_sessions):
        if not session.segment.inherited:
            session.end_now()
