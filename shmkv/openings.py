"""Device memory of other processes, as one handle has it mapped: opened once, let go of when its owner is gone.

The segment says of each region which peers have it mapped, so that an owner knows when it may free the memory. The
word is stored before the mapping is made, and cleared when neither this handle nor any view needs the region.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from . import sync
from .driver import CudaError, Driver
from .errors import SegmentBroken, TransportUnavailable
from .regions import RegionInfo, RegionState
from .segment import log
from .session import Session
from .transport.cuda_ipc import Memory, Opened, open_once

Key = tuple[int, int, int]
"""device ordinal in whose context it is mapped, region, its generation"""


class OwnerGone(TransportUnavailable):
    """The device memory of an entry went with its process: the entry is one of the past."""


class Opening:
    """One region as one handle has it mapped; several may share the mapping of an allocation."""

    def __init__(self, opened: Opened, when_gone: Callable[[], None]):
        self._opened: Opened | None = opened
        self._when_gone = when_gone
        self.nbytes = opened.nbytes
        self.event: Any = None

    def __del__(self) -> None:
        self._opened = None  # unmapped first, said afterwards
        self._when_gone()


class Openings:
    def __init__(self, session: Session, wake: Callable[[], None]):
        self._session, self._wake = session, wake
        self._kept: dict[Key, Opening] = {}
        self._live: dict[tuple[int, int], int] = {}  # region, generation: openings that live
        self._turn = threading.RLock()
        self._refused: set[Key] = set()
        self._unmapped = False

    def __bool__(self) -> bool:
        return bool(self._kept)

    def reach(self, driver: Driver, info: RegionInfo, ordinal: int) -> Memory:
        """The region's memory in this process. Raises CudaError, OwnerGone."""
        opening = self._opening(driver, info, ordinal)
        if info.start + info.nbytes > opening.nbytes:
            raise SegmentBroken(f"region {info.index} claims {info.nbytes} B at {info.start} of an allocation of "
                                f"{opening.nbytes} B")
        assert opening._opened is not None
        return Memory(ordinal, opening._opened.address + info.start, info.nbytes, opening)

    def event(self, driver: Driver, info: RegionInfo, ordinal: int) -> Any:
        """The event behind which the region's entries are complete."""
        opening = self._opening(driver, info, ordinal)
        with self._turn:
            if opening.event is None:
                opening.event = driver.open_event(ordinal, info.event)
                weakref.finalize(opening, _destroy, driver, ordinal, opening.event).atexit = False
        return opening.event

    def refuse(self, info: RegionInfo, ordinal: int) -> None:
        """The driver did not open it: do not ask again."""
        self._refused.add((ordinal, info.index, info.generation))

    def is_refused(self, info: RegionInfo, ordinal: int | None) -> bool:
        return (ordinal, info.index, info.generation) in self._refused

    def look(self) -> None:
        """Let go of the regions whose owner has left or died; called now and then, outside the lock."""
        session, tables, gone = self._session, self._session.tables, []
        for key in list(self._kept):
            info = tables.regions.info(key[1])
            if tables.regions.state(key[1]) == RegionState.OPEN and info.generation == key[2]:
                if tables.peers.alive(info.peer):
                    continue
                session.run(session.store.bury_dead, sync.deadline(1))
            gone.append(key)
        dropped = [opening for opening in (self._kept.pop(key, None) for key in gone) if opening is not None]
        if dropped:
            log.info("letting go of %d B of device memory: its owner is gone",
                     sum(opening.nbytes for opening in dropped))
        del dropped
        if gone or self._unmapped:
            self._unmapped = False
            session.run(session.store.reap_regions, sync.deadline(1))

    def close(self) -> None:
        """Keep nothing any more; what views need stays."""
        while self._kept:
            self._kept.popitem()

    def _opening(self, driver: Driver, info: RegionInfo, ordinal: int) -> Opening:
        key = ordinal, info.index, info.generation
        with self._turn:
            opening = self._kept.get(key)
            if opening is None:
                opening = self._kept[key] = self._open(driver, info, ordinal)
        return opening

    def _open(self, driver: Driver, info: RegionInfo, ordinal: int) -> Opening:
        regions, known = self._session.tables.regions, (info.index, info.generation)
        self._live[known] = self._live.get(known, 0) + 1
        regions.set_mapped(info.index, self._session.index, info.generation)
        sync.fence()
        try:
            if regions.state(info.index) != RegionState.OPEN or regions.info(info.index).generation != info.generation:
                raise OwnerGone("the owner of the entry's device memory is leaving", hint="compute it again")
            opened = open_once(driver, ordinal, info.allocation, info.handle)
        except BaseException:
            self._gone(known)
            raise
        me = weakref.ref(self)
        return Opening(opened, lambda: _tell(me, known))

    def _gone(self, known: tuple[int, int]) -> None:
        """An opening is no more: say so in the segment if it was the region's last here."""
        session = self._session
        left = self._live[known] = self._live.get(known, 1) - 1
        if left > 0:
            return
        self._live.pop(known, None)
        if not session.segment.inherited and session.segment.words:
            regions = session.tables.regions
            if regions.info(known[0]).generation == known[1]:
                regions.set_mapped(known[0], session.index, 0)
                self._unmapped = True
                self._wake()


def _tell(openings: weakref.ref[Openings], known: tuple[int, int]) -> None:
    mine = openings()
    if mine is not None:
        mine._gone(known)


def _destroy(driver: Driver, ordinal: int, event: Any) -> None:
    if not driver.inherited:
        try:
            driver.destroy_event(ordinal, event)
        except CudaError as error:
            log.debug("%s", error)
