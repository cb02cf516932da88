"""One attached handle's dealings with the segment: entering the section, waiting, releasing, leaving.

Everything above speaks to the tables through `run` (under the lock, then ring whom it concerns) and `wait` (look,
put on record what is waited for, look again, sleep, look again). Everything that ends a lease goes through `Lifeline`.
"""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import util
from typing import TypeVar

from . import sync
from .errors import ClosedError, ShmkvError
from .layout import Header
from .leases import Hold, Outcome
from .news import Ring
from .peers import Place, WaitKind
from .segment import Segment, check_ours
from .store import Store
from .tables import Tables

T = TypeVar("T")


class Session:
    """An attached peer. Threads may share it; a forked child may not use it."""

    def __init__(self, segment: Segment, role: str, tables: Tables | None = None):
        self.segment, self.closed, self._gone = segment, False, False
        self.tables = tables or Tables(segment)
        self.store, self.lock = Store(self.tables), sync.Lock(segment)
        self._lifelines: set[Lifeline] = set()
        self._here = threading.local()
        self._places: weakref.WeakSet[Place] = weakref.WeakSet()
        claim = functools.partial(self.tables.peers.claim, role)
        self.store.enter(self._enter(lambda: self.store.or_bury(claim), sync.deadline(10)))
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
        return self._enter(body, deadline_ns)

    def wait(self, look: Callable[[Place | None], T | None], deadline_ns: int,
             announce: Callable[[Place], None]) -> T | None:
        """Look (under the lock) until there is a result; None when the deadline passed.

        `look` gets None the first time and then this thread's place, on which `announce` has put what it waits for.
        """
        result = self.run(lambda: look(None), deadline_ns)
        if result is not None or sync.passed(deadline_ns):
            return result
        place = self._place(deadline_ns)
        try:
            announce(place)
            return sync.wait(lambda: self.run(lambda: look(place), deadline_ns), deadline_ns, place, self._next_change)
        finally:
            try:  # an interrupt may hit the first withdrawal; a thread on record as waiting that is not would mislead
                place.withdraw()
            finally:
                place.withdraw()

    def lifeline(self) -> Lifeline:
        """A lifeline for a lease about to be claimed."""
        lifeline = Lifeline(self)
        self._lifelines.add(lifeline)
        return lifeline

    def released(self, lifeline: Lifeline) -> None:
        """End a lease; from a finaliser, in any thread, inside or outside a section."""
        self._lifelines.discard(lifeline)
        if self.segment.inherited:
            return
        if self._gone:
            return
        if self.tables.leases.release(lifeline.hold):
            self.tables.waits.ring(WaitKind.ROOM)
            if lifeline.hold.outcome == Outcome.RETURNED:
                self.tables.waits.ring(WaitKind.ENTRY)
        if self.closed and not self._lifelines:
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
        """Leave; leases that views still need stay, and the peer record with them. Idempotent."""
        if self.closed:
            return
        self.closed = True
        if self.segment.inherited:
            return
        self._send_waiters_home()
        for place in list(self._places):
            place.retire()
        try:
            self._enter(self.store.leave, sync.deadline(10))
        finally:  # if the lock could not be had, the kernel tells the others that this peer is gone
            self.lock.close()
            if not self._lifelines:
                self._let_go()

    def end_now(self) -> None:
        """At an orderly exit of the process: nothing will look at a view again, so release all, then leave."""
        self.segment.unlink()
        for lifeline in list(self._lifelines):
            lifeline.cut()
        self.close()

    def _let_go(self) -> None:
        """Nothing needs the segment any more: end the claim, unmap."""
        self._gone = True
        self.store.me.end()
        self.tables.waits.bells.close()
        del self.tables, self.store, self._here
        self.segment.detach()

    def _enter(self, body: Callable[[], T], deadline_ns: int) -> T:
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
            claim = functools.partial(self.tables.waits.claim, self.store.me)
            place = self._here.place = self.run(lambda: self.store.or_bury(claim), deadline_ns)
            self._places.add(place)
            place.open()
        return place

    def _send_waiters_home(self) -> None:
        """Wake our own waiting threads, which then see that the handle is closed, before their bells go."""
        patience = sync.deadline(2)
        while any(place.is_waiting() for place in list(self._places)) and not sync.passed(patience):
            self.tables.waits.ring_peer(self.index)
            time.sleep(0.001)

    def _next_change(self) -> int:
        return self.tables.words[Header.next_expiry_ns]


class Lifeline:
    """Ends a lease when nothing needs it any more: neither the hit (or reserved entry) nor any view of its bytes."""

    __slots__ = ("hold", "_session", "_needs")

    def __init__(self, session: Session):
        self.hold = Hold()
        self._session = session
        self._needs = {"handle"}

    def add_views(self) -> None:
        self._needs.add("views")

    def has_views(self) -> bool:
        return "views" in self._needs

    def drop_views(self) -> None:
        self._drop("views")

    def drop_handle(self) -> bool:
        """Whether that was the last need: the lease has ended."""
        self._drop("handle")
        return not self._needs

    def settled(self) -> None:
        """The lease was ended under the lock already."""
        self.hold.index = -1
        self.drop_handle()

    def cut(self) -> None:
        self._needs.clear()
        sync.outside(functools.partial(self._session.released, self))

    def _drop(self, need: str) -> None:
        if need in self._needs:
            self._needs.discard(need)
            if not self._needs:
                self.cut()


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
