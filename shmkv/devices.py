"""One handle's device side: where a producer's tensors go, and by which path a consumer reaches them.

What lies in device memory of ours is `owned`, what others own and this process can open is in `openings`; what it
cannot open, the owner brings (`fetch`). A `keeper` thread ends leases behind the devices' work.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from . import driver as drivers
from . import sync
from .descriptors import IN_RUN, Placed
from .driver import CudaError, Device, Driver
from .errors import InvalidArgument, InvalidTensor, SegmentBroken, TimedOut, TransportUnavailable
from .fetch import Brought, Fetcher, backend_of
from .handles import Hit
from .keeper import Keeper, Work
from .layout import Lease, Peer
from .openings import Openings, OwnerGone
from .owned import Owned, address_of
from .regions import IN_PLACE, RegionInfo, RegionState
from .segment import log
from .session import Session
from .store import Grant
from .tensors import Spec
from .transport import NAMES, Decision, Facts, Path, Transport, decide, nccl
from .transport.cuda_ipc import (
    CudaTransport,
    Memory,
    copy_pieces,
    device_buffer,
    packed,
    stream_of,
    torch_sees,
    torch_stream,
)
from .transport.host import HostTransport

PUBLISH = ("wait", "event")
EXIT_TIMEOUT_S = 5.0
CAPACITY_MOST = 1 << 46
_NONSENSE = (LookupError, ValueError, OverflowError, TypeError, StopIteration)
"""what words of hostile bytes raise where they are used as numbers of something"""


class DeviceOptions(NamedTuple):
    """What `create` and `attach` were told about devices."""

    capacity: int = 0
    device: Any = None
    publish: str = "wait"
    require: str | None = None
    prefer: str | None = None

    def check(self) -> DeviceOptions:
        """Raise before anything is made: InvalidArgument, or TransportUnavailable where there is no driver."""
        for what, path in (("require", self.require), ("prefer", self.prefer)):
            if path is not None and (not isinstance(path, str) or NAMES.get(path, Path.HOST) == Path.HOST):
                raise InvalidArgument(f"{what}={path!r} is none of {', '.join(list(NAMES)[1:])}")
        if not isinstance(self.publish, str) or self.publish not in PUBLISH:
            raise InvalidArgument(f"publish={self.publish!r} is none of {', '.join(map(repr, PUBLISH))}")
        if self.capacity > CAPACITY_MOST:
            raise InvalidArgument(f"device_capacity={self.capacity} B is more than {CAPACITY_MOST}")
        if self.capacity or self.device is not None:
            driver = drivers.find()
            driver.device("cuda" if self.device is None else self.device)
            if not torch_sees(driver):
                raise TransportUnavailable("this torch is built without CUDA: it cannot see device memory",
                                           hint="install the torch that fits your GPU")
        return self


class Placement(NamedTuple):
    """Where an entry's tensors go, and who brings them there."""

    placed: list[Placed]
    payload_bytes: int
    region: int
    transport: Transport
    staged: int = 0
    in_place: tuple[tuple[int, int], ...] = ()


class Devices:
    def __init__(self, session: Session, host: HostTransport, options: DeviceOptions):
        self._session, self._host = session, host
        self._require, self._prefer = options.require, options.prefer
        self._wanted: Device | None = drivers.find().device(options.device) if options.device is not None else None
        self._turn = threading.RLock()
        self._keeper: Keeper | None = None
        self._pinned: tuple[int, int] | None = None  # ordinal, address
        self._fetcher = Fetcher(session, self._keep)
        self._openings = Openings(session, self._keep)
        self.owned = Owned(session, self._pin, self._keep)
        if options.capacity:
            driver = drivers.find()
            self.owned.make_arena(driver, self._wanted or driver.device("cuda"), options.capacity, options.publish)

    # ------------------------------------------------------------ producing

    def place(self, kv: Mapping[str, Spec | torch.Tensor], placed: list[Placed], payload_bytes: int, copy: bool,
              stream: Any, until: int) -> Placement:
        """Where the tensors go: to the payload arena, in place, to our region, or staged through the payload arena."""
        ordinal = self._ordinal_of(kv)
        if ordinal is None:
            return Placement(placed, payload_bytes, 0, self._host)
        driver = drivers.find()
        number = stream_of(driver, ordinal, stream)
        in_place = self.owned.placed_in_place(kv, placed) if copy else None
        if in_place is not None:
            found, memories, regions = in_place
            return Placement(found, 0, IN_PLACE, CudaTransport(driver, memories, number, until=until), 0, regions)
        arena = self.owned.arena
        if arena is not None and arena.memory.ordinal == ordinal:
            transport = CudaTransport(driver, {IN_RUN: arena.memory}, number, arena.event, until)
            return Placement(placed, payload_bytes, arena.info.index + 1, transport)
        facts = Facts(has_region=False, fits_arena=payload_bytes <= self._session.tables.layout.arena.nbytes)
        decision = decide(facts, self._require, self._prefer)
        if not copy:
            raise TransportUnavailable(f"reserve() on cuda:{ordinal}: this handle owns no device memory there",
                                       hint="pass device_capacity= and device= in create() or attach()")
        self._pin(driver, ordinal)
        staged = _Staged(self._host, driver, ordinal, number, until)
        return Placement(placed, payload_bytes, 0, staged, decision.word)

    def arena_bytes(self) -> int:
        """Of our own device memory."""
        return self.owned.arena.memory.nbytes if self.owned.arena is not None else 0

    def ordinal_of(self, tensor: Any) -> int | None:
        """The CUDA device that a tensor lies on; None for the host, and for what has no bytes or is no tensor."""
        if not isinstance(tensor, torch.Tensor) or not tensor.numel():
            return None
        if tensor.is_cuda:
            return drivers.find().ordinal_of(tensor.data_ptr())
        known = drivers.loaded()
        if known is None or not known.emulated or known.inherited:
            return None
        address = address_of(tensor)
        return known.ordinal_of(address) if address else None

    def _ordinal_of(self, kv: Mapping[str, Spec | torch.Tensor]) -> int | None:
        """The device that the tensors lie on, None for the host. Raises InvalidTensor if they are of several."""
        places: dict[int | None, str] = {}
        for name, source in kv.items():
            if isinstance(source, Spec):
                places.setdefault(drivers.find().device(source.device).ordinal if source.device else None, name)
            elif source.numel():
                places.setdefault(self.ordinal_of(source), name)
        if len(places) > 1:
            (one, name), (other, second) = list(places.items())[:2]
            raise InvalidTensor(f"tensor {name!r} lies on {_place(one)}, {second!r} on {_place(other)}: the tensors of "
                                f"an entry lie on one device", hint="move them to one, or insert two entries")
        return next(iter(places), None)

    # ------------------------------------------------------------ consuming

    def serve(self, hit: Hit, grant: Grant, stream: Any, until: int) -> None:
        """Reach the bytes of an entry in device memory by the best path.

        Raises OwnerGone if they are no more, TransportUnavailable, TimedOut, SegmentBroken.
        """
        try:
            self._serve(hit, grant, stream, until)
        except _NONSENSE as error:
            raise SegmentBroken(f"the segment's bytes make no sense: {type(error).__name__}: {error}") from error

    def on_stream(self, hit: Hit, stream: Any) -> Any:
        """A context in which torch reads a hit's views behind what makes them and before they are let go of."""
        ordinal, driver = hit.ordinal, drivers.loaded()
        if ordinal is None or driver is None:
            return nullcontext()
        return torch_stream(driver, ordinal, stream_of(driver, ordinal, stream))

    def _serve(self, hit: Hit, grant: Grant, stream: Any, until: int) -> None:
        session = self._session
        placed = hit.described()
        infos = self._regions_of(grant, placed)
        while True:
            decision = decide(self._facts(infos, placed, grant), self._require, self._prefer)
            session.tables.words[session.tables.leases.at(hit.hold.index) + Lease.path] = decision.word
            try:
                hit.come_by(decision, *self._by(decision, infos, grant, placed, hit, stream, until))
                return
            except CudaError as error:
                if decision.path not in (Path.CUDA_IPC, Path.CUDA_PEER):
                    raise
                self._note_refusal(infos, error)

    def _by(self, decision: Decision, infos: dict[int, RegionInfo], grant: Grant, placed: list[Placed], hit: Hit,
            stream: Any, until: int) -> tuple[Transport, tuple[int, int], list[Placed]]:
        run = grant.run_at, grant.run_bytes
        if decision.path in (Path.STAGING, Path.NCCL):
            return self._fetched(decision.path, infos, grant, placed, hit, stream, until)
        driver = drivers.find()
        theirs = driver.ordinal(next(iter(infos.values())).uuid)
        assert theirs is not None  # `decide` chose a path for visible devices
        peer_copy = decision.path == Path.CUDA_PEER and self._wanted is not None
        ordinal = self._wanted.ordinal if peer_copy and self._wanted else theirs
        memories, number = {}, stream_of(driver, ordinal, stream)
        for region, info in infos.items():
            own = self.owned.own(info.index, info.generation)
            memories[region] = own.memory if own is not None else self._openings.reach(driver, info, ordinal)
            if info.event:
                event = own.event.event if own is not None and own.event is not None else \
                    self._openings.event(driver, info, ordinal)
                driver.order_behind(ordinal, number, event)
        self._keep()
        if not peer_copy:
            return CudaTransport(driver, memories, number), run, placed
        copies, nbytes = packed(placed, grant.run_bytes)
        buffer = device_buffer(driver, ordinal, max(1, nbytes), number)
        try:
            for source, copy in zip(placed, copies, strict=True):
                copy_pieces(driver, ordinal, memories, run, source, copy, buffer.address, number)
        finally:
            driver.wait(ordinal, number, max(until, sync.deadline(EXIT_TIMEOUT_S)))
        return CudaTransport(driver, {IN_RUN: buffer}, number), (0, nbytes), copies

    def _fetched(self, path: Path, infos: dict[int, RegionInfo], grant: Grant, placed: list[Placed], hit: Hit,
                 stream: Any, until: int) -> tuple[Transport, tuple[int, int], list[Placed]]:
        """Have the owner bring the bytes."""
        info = next(iter(infos.values()))
        owner = info.peer, info.peer_generation
        copies, nbytes = packed(placed, grant.run_bytes)
        self._keep()
        if path == Path.STAGING:
            brought = self._fetcher.staged(hit.hold, owner, nbytes, until)
        else:
            backend = backend_of(drivers.find())
            where = f"cuda:{self._wanted.ordinal}" if backend == "nccl" and self._wanted else "cpu"
            received = torch.empty(max(1, nbytes), dtype=torch.uint8, device=where)
            self._fetcher.sent(hit.hold, owner, nbytes, until, backend, received[:nbytes])
            if received.is_cuda and self._wanted:
                number = stream_of(drivers.find(), self._wanted.ordinal, stream)
                memory = Memory(self._wanted.ordinal, received.data_ptr(), received.numel(), received)
                return CudaTransport(drivers.find(), {IN_RUN: memory}, number), (0, nbytes), copies
            brought = Brought(received.data_ptr(), nbytes, received)
        if self._wanted is None:
            return brought, brought.run, copies
        driver, ordinal = drivers.find(), self._wanted.ordinal
        number = stream_of(driver, ordinal, stream)
        self._pin(driver, ordinal)
        buffer = device_buffer(driver, ordinal, max(1, nbytes), number)
        if nbytes:
            driver.copy(ordinal, buffer.address, brought.address, nbytes, number)
            driver.wait(ordinal, number, max(until, sync.deadline(EXIT_TIMEOUT_S)))
        return CudaTransport(driver, {IN_RUN: buffer}, number), (0, nbytes), copies

    def _facts(self, infos: dict[int, RegionInfo], placed: list[Placed], grant: Grant) -> Facts:
        session, tables = self._session, self._session.tables
        info = next(iter(infos.values()))
        ours = all(self.owned.own(one.index, one.generation) is not None for one in infos.values())
        driver, seen = _usable_driver()
        theirs = driver.ordinal(info.uuid) if driver is not None else None
        wanted = self._wanted.ordinal if self._wanted is not None else theirs
        peer_access = bool(driver and theirs is not None and wanted not in (None, theirs)
                           and driver.can_access_peer(wanted, theirs))
        here = tables.words[tables.peers.at(session.index) + Peer.pid_namespace]
        there = tables.words[tables.peers.at(info.peer) + Peer.pid_namespace]
        return Facts(
            is_ours=ours, has_driver=driver is not None, torch_sees_cuda=seen, is_visible=theirs is not None,
            is_wanted=wanted == theirs, peer_access=peer_access, same_pid_namespace=here == there,
            exported=all(one.handle for one in infos.values()),
            open_failed=any(self._openings.is_refused(one, wanted) for one in infos.values()),
            fits_arena=packed(placed, grant.run_bytes)[1] <= tables.layout.arena.nbytes,
            nccl=driver is not None and (driver.emulated or self._wanted is not None and wanted != theirs
                                         and not nccl.missing("nccl")))

    def _regions_of(self, grant: Grant, placed: Sequence[Placed]) -> dict[int, RegionInfo]:
        """By `Placed.region`; the owner of all of them is the entry's producer. Raises OwnerGone."""
        tables, named = self._session.tables, {tensor.region for tensor in placed if tensor.nbytes}
        if (grant.region == IN_PLACE) == (IN_RUN in named) or grant.region != IN_PLACE and named != {IN_RUN}:
            raise SegmentBroken(f"entry {grant.sequence} lies in region word {grant.region:#x}, and its tensors in "
                                f"{sorted(named)}")
        infos = {region: tables.regions.info(region - 1 if region else grant.region - 1) for region in named}
        for info in infos.values():
            ours = self.owned.own(info.index, info.generation) is not None
            alive = info.peer < tables.peers.count and tables.peers.alive(info.peer)
            if tables.regions.state(info.index) != RegionState.OPEN or not (ours or alive):
                raise OwnerGone(f"entry {grant.sequence} lay in device memory of a process that is gone",
                                hint="compute it again")
        return infos

    def _note_refusal(self, infos: dict[int, RegionInfo], error: CudaError) -> None:
        self.owned.say_once(f"device memory of another process could not be opened: {error}")
        for info in infos.values():
            for device in drivers.find().devices:
                self._openings.refuse(info, device.ordinal)

    # ------------------------------------------------------------ the session's device side

    def drain(self, work: Work, then: Any) -> None:
        """Call `then` behind this work: now if the devices are done, else from the keeper's thread."""
        driver = drivers.loaded()
        try:
            idle = driver is None or all(driver.is_idle(ordinal, stream) for ordinal, stream in work)
        except CudaError:
            idle = True  # a lost device does nothing any more
        keeper = self._keeper
        if idle or keeper is None:
            then()
            return

        def settled() -> None:
            then()
            self._session.settle()

        keeper.drain(set(work), settled)

    def finish(self, work: Work) -> bool:
        """Wait a while for this work; whether it is done."""
        driver, until = drivers.loaded(), sync.deadline(EXIT_TIMEOUT_S)
        try:
            for ordinal, stream in work if driver is not None and not driver.inherited else ():
                driver.wait(ordinal, stream, until)
        except TimedOut:
            return False
        except CudaError as error:
            log.debug("%s", error)
        return True

    def leave(self) -> None:
        self._openings.close()
        self.owned.leave()

    def end(self) -> None:
        self._openings.close()
        self._fetcher.close()
        with self._turn:
            keeper, self._keeper = self._keeper, None
            pinned, self._pinned = self._pinned, None
        if keeper is not None:
            keeper.stop()
        driver = drivers.loaded()
        if pinned is not None and driver is not None and not driver.inherited:
            try:
                driver.unpin(*pinned)
            except CudaError as error:
                log.debug("%s", error)

    def _keep(self) -> None:
        """There is something to look after."""
        with self._turn:
            if self._keeper is not None:
                self._keeper.wake()  # it sleeps without end when there was nothing
            elif not self._session.closed:
                self._session.device_side = self
                self._keeper = Keeper(_begun, _are_done, self._look, lambda: bool(self._openings or self._fetcher))

    def _look(self) -> None:
        if not self._session.closed and not self._session.segment.inherited:
            self._openings.look()
            self._fetcher.sweep()

    def _pin(self, driver: Driver, ordinal: int) -> None:
        """Page-lock the payload arena once, for full-speed copies; without it they are only slower."""
        with self._turn:
            if self._pinned is not None:
                return
            area = self._session.tables.layout.arena
            self._pinned = ordinal, self._session.segment.address + area.at
            try:
                driver.pin(*self._pinned, area.nbytes)
            except CudaError as error:
                self._pinned = None
                self.owned.say_once(f"the payload arena could not be page-locked ({error}): copies to and from devices "
                                    f"are slower")
        self._keep()


class _Staged:
    """Device tensors copied into the payload arena."""

    name = "staging"

    def __init__(self, host: HostTransport, driver: Driver, ordinal: int, stream: int, until: int):
        self._host, self._settle = host, lambda: driver.wait(ordinal, stream, until)
        self.writable, self.views, self.finish = host.writable, host.views, host.finish

    def write(self, run: tuple[int, int], placed: Sequence[Placed], tensors: Mapping[str, torch.Tensor],
              mapped: Any) -> None:
        self._settle()
        self._host.write(run, placed, tensors, mapped)


def _usable_driver() -> tuple[Driver | None, bool]:
    """(the driver, whether torch can see its memory); (None, False) where there is none."""
    try:
        driver = drivers.find()
    except TransportUnavailable:
        return None, False
    return (None, False) if driver.inherited else (driver, torch_sees(driver))


def _begun(work: Work) -> list[tuple[int, Any]]:
    """Marks behind which this work is done, by device."""
    driver = drivers.find()
    return [(ordinal, driver.mark(ordinal, stream)) for ordinal, stream in work]


def _are_done(marks: list[tuple[int, Any]]) -> bool:
    driver = drivers.find()
    while marks:
        if not driver.is_past(*marks[-1]):
            return False
        marks.pop()
    return True


def _place(ordinal: int | None) -> str:
    return "the host" if ordinal is None else f"cuda:{ordinal}"
