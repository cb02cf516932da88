"""One handle's device side: its own regions, the tensors it registered, and by which path it reaches others' memory.

A producer writes device memory only in regions of its own; so its death can leave no copy under way in memory that
lives on. What a consumer cannot open, the owner brings (`fetch`).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from . import driver as drivers
from . import sync
from .driver import CudaError, Device, Driver
from .entries import FREE
from .errors import InvalidArgument, InvalidTensor, ShmkvError, TransportUnavailable
from .fetch import Brought, Fetcher, Service, backend_of
from .handles import Hit
from .keeper import Keeper, Work
from .layout import Lease, Peer
from .regions import IN_PLACE, RegionInfo, RegionKind, RegionState
from .segment import log
from .session import Session
from .store import Grant
from .tensors import Placed, Spec
from .transport import NAMES, Decision, Facts, Path, Transport, decide, nccl
from .transport.cuda_ipc import (
    Allocation,
    CudaTransport,
    Memory,
    Opened,
    SharedEvent,
    copy_pieces,
    device_buffer,
    open_once,
    packed,
    stream_of,
    torch_sees,
    torch_stream,
)
from .transport.host import HostTransport

PUBLISH = ("wait", "event")
LEAVE_TIMEOUT_S = 2.0
MAX_PIECES = 4096
"""a tensor in more pieces than this is copied into a run instead of staying in place"""


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
            if path is not None and NAMES.get(path, Path.HOST) == Path.HOST:
                raise InvalidArgument(f"{what}={path!r} is none of {', '.join(list(NAMES)[1:])}")
        if self.publish not in PUBLISH:
            raise InvalidArgument(f"publish={self.publish!r} is none of {', '.join(map(repr, PUBLISH))}")
        if self.capacity or self.device is not None:
            driver = drivers.find()
            driver.device("cuda" if self.device is None else self.device)
            if not torch_sees(driver):
                raise TransportUnavailable("this torch is built without CUDA: it cannot see device memory",
                                           hint="install the torch that fits your GPU")
        return self


class OwnerGone(TransportUnavailable):
    """The device memory of an entry went with its process: the entry is one of the past."""


class Placement(NamedTuple):
    """Where an entry's tensors go, and who brings them there."""

    placed: list[Placed]
    payload_bytes: int
    region: int
    transport: Transport
    staged: int = 0


class Own(NamedTuple):
    """A region of ours."""

    info: RegionInfo
    memory: Memory
    event: SharedEvent | None


_local: dict[tuple[int, int, int], Own] = {}
"""all regions of this process, by segment instance, index and generation: their memory needs no opening"""


class Devices:
    def __init__(self, session: Session, host: HostTransport, options: DeviceOptions):
        self._session, self._host = session, host
        self._require, self._prefer = options.require, options.prefer
        self._wanted: Device | None = drivers.find().device(options.device) if options.device is not None else None
        self._arena: Own | None = None
        self._registered: dict[int, Registered] = {}
        self._openings: dict[tuple[int, int, int], Opened] = {}  # ordinal, region, generation
        self._events: dict[tuple[int, int, int], Any] = {}  # others', opened, by the same
        self._mapped: dict[tuple[int, int], list[weakref.ref[Opened]]] = {}  # region, generation: what is open of it
        self._refused: set[tuple[int, int, int]] = set()
        self._in_place: dict[int, tuple[int, list[torch.Tensor]]] = {}  # sequence: its slot, tensors kept for it
        self._told: set[str] = set()
        self._keeper: Keeper | None = None
        self._service: Service | None = None
        self._fetcher = Fetcher(session)
        self._pinned = 0
        self._unmapped = False
        if options.capacity:
            self._make_arena(options.capacity, options.publish)

    # ------------------------------------------------------------ memory of ours

    def _make_arena(self, capacity: int, publish: str) -> None:
        """Own device memory of this many bytes, in which this handle's device entries lie."""
        driver = drivers.find()
        device = self._wanted or driver.device("cuda")
        allocation = Allocation(driver, device.ordinal, capacity)
        event = SharedEvent(driver, device.ordinal) if publish == "event" else None
        self._arena = self._open_region(RegionKind.ARENA, device, allocation.memory(), allocation.address, event)

    def register(self, tensor: torch.Tensor) -> Registered:
        """See `KVBuffer.register`."""
        driver, ordinal, address = self._located(tensor)
        reason = driver.why_not_exportable(ordinal, address)
        registered = Registered(self, tensor, address)
        if reason:
            registered.reason = reason
            self._say_once(f"a registered tensor cannot be shared in place: {reason}; what is inserted of it is copied")
            return registered
        base, _ = driver.allocation(ordinal, address)
        memory = Memory(ordinal, address, registered.nbytes, tensor)
        own = self._open_region(RegionKind.TENSOR, driver.devices[ordinal], memory, base, None)
        registered.region = own.info.index
        self._registered[own.info.index] = registered
        return registered

    def unregister(self, registered: Registered) -> None:
        self._registered.pop(registered.region, None)
        own = _local.pop(self._key(registered.region, self._session.tables.regions.info(registered.region).generation))
        self._session.run(lambda: self._session.store.close_region(own.info.index), sync.deadline(10))

    def released(self) -> list[int]:
        """The entries in place whose bytes are free again since the last call."""
        free = self._session.run(self.any_released, sync.deadline(10)) if self._in_place else []
        for sequence in free:
            del self._in_place[sequence]
        return free

    def any_released(self) -> list[int]:
        """Under the lock: those that the next `released` will give."""
        entries = self._session.tables.entries
        return [sequence for sequence, (slot, _) in list(self._in_place.items())
                if entries.state(slot) == FREE or entries.sequence(slot) != sequence]

    def keep(self, sequence: int, slot: int, kv: Mapping[str, torch.Tensor]) -> None:
        """An entry was inserted in place: its tensors are not to be freed before it is."""
        self._in_place[sequence] = slot, list(kv.values())

    def names_region(self, region: int) -> list[int]:
        """Sequences of the entries in place that keep a tensor of this registered region."""
        registered = self._registered.get(region)
        return [sequence for sequence, (_, kept) in self._in_place.items()
                if registered is not None and any(registered.holds(self._address(tensor)) for tensor in kept)]

    def on_stream(self, hit: Hit, stream: Any) -> Any:
        """A context in which torch reads a hit's views behind what makes them and before they are let go of."""
        ordinal = hit.ordinal
        driver = drivers.loaded()
        if ordinal is None or driver is None:
            return nullcontext()
        return torch_stream(driver, ordinal, stream_of(driver, ordinal, stream))

    # ------------------------------------------------------------ producing

    def place(self, kv: Mapping[str, Spec | torch.Tensor], placed: list[Placed], payload_bytes: int, copy: bool,
              stream: Any) -> Placement:
        """Where the tensors go: to the payload arena, in place, to our region, or staged through the payload arena."""
        ordinal = self._ordinal_of(kv)
        if ordinal is None:
            return Placement(placed, payload_bytes, 0, self._host)
        driver = drivers.find()
        number = stream_of(driver, ordinal, stream)
        in_place = self._placed_in_place(kv, placed) if copy and self._registered else None
        if in_place is not None:
            memories = {region: self._own(region - 1).memory for region in {tensor.region for tensor in in_place}}
            return Placement(in_place, 0, IN_PLACE, CudaTransport(driver, memories, number))
        arena = self._arena
        if arena is not None and arena.memory.ordinal == ordinal:
            transport = CudaTransport(driver, {0: arena.memory}, number, arena.event)
            return Placement(placed, payload_bytes, arena.info.index + 1, transport)
        facts = Facts(has_region=False, fits_arena=payload_bytes <= self._session.tables.layout.arena.nbytes)
        decision = decide(facts, self._require, self._prefer)
        if not copy:
            raise TransportUnavailable(f"reserve() on cuda:{ordinal}: this handle owns no device memory there",
                                       hint="pass device_capacity= and device= in create() or attach()")
        self._pin(driver, ordinal)
        return Placement(placed, payload_bytes, 0, _Staged(self._host, driver, ordinal, number), decision.word)

    def arena_bytes(self, region: int) -> int:
        return self._arena.memory.nbytes if region and self._arena else 0

    # ------------------------------------------------------------ consuming

    def serve(self, hit: Hit, grant: Grant, stream: Any, until: int) -> None:
        """Reach the bytes of an entry in device memory by the best path. Raises TransportUnavailable or TimedOut."""
        session = self._session
        placed = hit.described()
        infos = self._regions_of(grant, placed)
        while True:
            decision = decide(self._facts(infos, placed, grant), self._require, self._prefer)
            session.tables.words[session.tables.leases.at(hit.hold.index) + Lease.path] = decision.word
            try:
                come_by = self._by(decision, infos, grant, placed, hit, stream, until)
            except CudaError as error:
                if decision.path not in (Path.CUDA_IPC, Path.CUDA_PEER):
                    raise
                self._note_refusal(infos, error)
                continue
            hit.come_by(decision, *come_by)
            return

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
        memories = {region: self._reach(driver, info, ordinal) for region, info in infos.items()}
        number = stream_of(driver, ordinal, stream)
        for info in infos.values():
            if info.event:
                driver.order_behind(ordinal, number, self._event(driver, ordinal, info))
        self._keep()
        if not peer_copy:
            return CudaTransport(driver, memories, number), run, placed
        copies, nbytes = packed(placed, grant.run_bytes)
        buffer = device_buffer(driver, ordinal, max(1, nbytes), number)
        for source, copy in zip(placed, copies, strict=True):
            copy_pieces(driver, ordinal, memories, run, source, copy, buffer.address, number)
        driver.wait(ordinal, number)
        return CudaTransport(driver, {0: buffer}, number), (0, nbytes), copies

    def _fetched(self, path: Path, infos: dict[int, RegionInfo], grant: Grant, placed: list[Placed], hit: Hit,
                 stream: Any, until: int) -> tuple[Transport, tuple[int, int], list[Placed]]:
        """Have the owner bring the bytes."""
        owner = next(iter(infos.values()))
        copies, nbytes = packed(placed, grant.run_bytes)
        if path == Path.STAGING:
            brought = self._fetcher.staged(hit.hold, (owner.peer, owner.peer_generation), nbytes, until)
        else:
            backend = backend_of(drivers.find())
            where = f"cuda:{self._wanted.ordinal}" if backend == "nccl" and self._wanted else "cpu"
            bytes_ = torch.empty(max(1, nbytes), dtype=torch.uint8, device=where)
            self._fetcher.sent(hit.hold, (owner.peer, owner.peer_generation), nbytes, until, backend, bytes_[:nbytes])
            if bytes_.is_cuda and self._wanted:
                self._keep()
                number = stream_of(drivers.find(), self._wanted.ordinal, stream)
                memory = Memory(self._wanted.ordinal, bytes_.data_ptr(), bytes_.numel(), bytes_)
                return CudaTransport(drivers.find(), {0: memory}, number), (0, nbytes), copies
            brought = Brought(bytes_.data_ptr(), nbytes, bytes_)
        if self._wanted is None:
            return brought, brought.run, copies
        driver, ordinal = drivers.find(), self._wanted.ordinal
        number = stream_of(driver, ordinal, stream)
        self._pin(driver, ordinal)
        self._keep()
        buffer = device_buffer(driver, ordinal, max(1, nbytes), number)
        if nbytes:
            driver.copy(ordinal, buffer.address, brought.address, nbytes, number)
            driver.wait(ordinal, number)
        brought.let_go()
        return CudaTransport(driver, {0: buffer}, number), (0, nbytes), copies

    def _facts(self, infos: dict[int, RegionInfo], placed: list[Placed], grant: Grant) -> Facts:
        session, tables = self._session, self._session.tables
        info = next(iter(infos.values()))
        ours = all(self._key(one.index, one.generation) in _local for one in infos.values())
        driver, seen = _usable_driver()
        theirs = driver.ordinal(info.uuid) if driver is not None else None
        wanted = self._wanted.ordinal if self._wanted is not None else theirs
        peer_access = bool(driver and theirs is not None and wanted not in (None, theirs)
                           and driver.can_access_peer(wanted, theirs))
        ordinal = theirs if wanted == theirs else wanted
        here = tables.words[tables.peers.at(session.index) + Peer.pid_namespace]
        there = tables.words[tables.peers.at(info.peer) + Peer.pid_namespace]
        return Facts(
            is_ours=ours, has_driver=driver is not None, torch_sees_cuda=seen, is_visible=theirs is not None,
            is_wanted=wanted == theirs, peer_access=peer_access, same_pid_namespace=here == there,
            exported=all(one.handle for one in infos.values()),
            open_failed=any((ordinal, one.index, one.generation) in self._refused for one in infos.values()),
            fits_arena=packed(placed, grant.run_bytes)[1] <= tables.layout.arena.nbytes,
            nccl=driver is not None and (driver.emulated or self._wanted is not None and wanted != theirs
                                         and "nccl" in nccl.backends()))

    def _regions_of(self, grant: Grant, placed: Sequence[Placed]) -> dict[int, RegionInfo]:
        """By `Placed.region`; the owner of all of them is the entry's producer. Raises if their memory is gone."""
        regions = self._session.tables.regions
        wanted = {0: grant.region - 1} if grant.region != IN_PLACE else {
            tensor.region: tensor.region - 1 for tensor in placed if tensor.nbytes}
        infos = {region: regions.info(index) for region, index in wanted.items()}
        for info in infos.values():
            ours = self._key(info.index, info.generation) in _local
            if regions.state(info.index) != RegionState.OPEN or not (ours or self._lives(info.peer)):
                raise OwnerGone(f"entry {grant.sequence} lay in device memory of a process that is gone",
                                hint="compute it again")
        return infos

    def _lives(self, peer: int) -> bool:
        return peer < self._session.tables.peers.count and self._session.tables.peers.alive(peer)

    def _reach(self, driver: Driver, info: RegionInfo, ordinal: int) -> Memory:
        own = _local.get(self._key(info.index, info.generation))
        if own is not None:
            return own.memory
        key = ordinal, info.index, info.generation
        opened = self._openings.get(key)
        if opened is None:
            opened = self._openings[key] = self._open(driver, info, ordinal)
        if info.start + info.nbytes > opened.nbytes:
            raise TransportUnavailable(f"region {info.index} claims {info.nbytes} B at {info.start} of an allocation "
                                       f"of {opened.nbytes} B")
        return Memory(ordinal, opened.address + info.start, info.nbytes, opened)

    def _open(self, driver: Driver, info: RegionInfo, ordinal: int) -> Opened:
        regions, peer = self._session.tables.regions, self._session.index
        regions.set_mapped(info.index, peer, info.generation)
        try:
            opened = open_once(driver, ordinal, info.allocation, info.handle)
        except BaseException:
            self._note_unmapped(info.index, info.generation)
            raise
        self._mapped.setdefault((info.index, info.generation), []).append(weakref.ref(opened))
        me = weakref.ref(self)
        opened.when_closed.append(lambda: _unmapped(me, driver, (ordinal, info.index, info.generation)))
        return opened

    def _note_unmapped(self, index: int, generation: int) -> None:
        """Say so in the segment, if nothing is open of that region any more."""
        session = self._session
        if session.segment.inherited or not session.segment.words:
            return
        known = [opened() for opened in self._mapped.get((index, generation), ())]
        if not any(opened is not None and opened.address for opened in known):
            self._mapped.pop((index, generation), None)
            if session.tables.regions.info(index).generation == generation:
                session.tables.regions.set_mapped(index, session.index, 0)
                if self._keeper is not None:
                    self._unmapped = True
                    self._keeper.wake()

    # ------------------------------------------------------------ how

    def _open_region(self, kind: RegionKind, device: Device, memory: Memory, base: int,
                     event: SharedEvent | None) -> Own:
        driver, session = drivers.find(), self._session
        try:
            handle = driver.export(memory.ordinal, base)
        except CudaError as error:
            handle = b""
            self._say_once(f"device memory cannot be shared by CUDA IPC ({error}): others get copies of it")
        allocation, event_handle = driver.allocation_id(memory.ordinal, base), event.handle if event else b""
        info = RegionInfo(0, 0, kind, 0, 0, device.uuid, memory.nbytes, memory.address - base, allocation, handle,
                          event_handle)
        info = session.run(lambda: session.store.or_bury(lambda: session.store.open_region(info)), sync.deadline(10))
        own = _local[self._key(info.index, info.generation)] = Own(info, memory, event)
        self._keep()
        if self._service is None:
            self._service = Service(session, self._source)
        return own

    def _own(self, index: int) -> Own:
        return _local[self._key(index, self._session.tables.regions.info(index).generation)]

    def _source(self, slot: int, placed: Sequence[Placed]) -> tuple[Driver, dict[int, Memory], tuple[int, int], Any]:
        """An entry of ours, for the service to copy from."""
        tables = self._session.tables
        region = tables.entries.region(slot)
        regions = {0: region - 1} if region != IN_PLACE else {
            tensor.region: tensor.region - 1 for tensor in placed if tensor.nbytes}
        owns = {number: self._own(index) for number, index in regions.items()}
        for own in owns.values():
            self._pin(drivers.find(), own.memory.ordinal)
        event = next((own.event.event for own in owns.values() if own.event is not None), None)
        return drivers.find(), {number: own.memory for number, own in owns.items()}, tables.entries.run(slot), event

    def _event(self, driver: Driver, ordinal: int, info: RegionInfo) -> Any:
        own = _local.get(self._key(info.index, info.generation))
        if own is not None and own.event is not None:
            return own.event.event
        key = ordinal, info.index, info.generation
        if key not in self._events:
            self._events[key] = driver.open_event(ordinal, info.event)
        return self._events[key]

    def _key(self, index: int, generation: int) -> tuple[int, int, int]:
        return self._session.segment.instance, index, generation

    def _keep(self) -> None:
        """From now on there is something to look after."""
        if self._keeper is None:
            self._session.device_side = self
            self._keeper = Keeper(self.finish, self._look, lambda: bool(self._openings))
        else:
            self._keeper.wake()  # it sleeps without end when there was nothing

    def _look(self) -> None:
        """Let go of the regions whose owner has left or died."""
        if self._session.closed or self._session.segment.inherited:
            return self._openings.clear()
        tables, gone = self._session.tables, []
        for ordinal, index, generation in list(self._openings):
            info = tables.regions.info(index)
            if tables.regions.state(index) == RegionState.OPEN and info.generation == generation:
                if self._lives(info.peer):
                    continue
                self._session.run(self._session.store.bury_dead, sync.deadline(1))
            gone.append((ordinal, index, generation))
        dropped = [self._openings.pop(key, None) for key in gone]
        if dropped:
            freed = sum(opened.nbytes for opened in dropped if opened is not None)
            log.info("letting go of %d B of device memory: its owner is gone", freed)
        dropped.clear()
        if gone or self._unmapped:
            self._unmapped = False
            self._session.run(self._session.store.reap_regions, sync.deadline(1))

    def _note_refusal(self, infos: dict[int, RegionInfo], error: CudaError) -> None:
        self._say_once(f"device memory of another process could not be opened: {error}")
        driver = drivers.find()
        for info in infos.values():
            for device in driver.devices:
                self._refused.add((device.ordinal, info.index, info.generation))

    def _say_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            log.warning("%s", text)

    def _pin(self, driver: Driver, ordinal: int) -> None:
        """Page-lock the payload arena once, for full-speed copies; without it they are only slower."""
        if self._pinned:
            return
        area, segment = self._session.tables.layout.arena, self._session.segment
        self._pinned = segment.address + area.at
        try:
            driver.pin(ordinal, self._pinned, area.nbytes)
        except CudaError as error:
            self._pinned = -1
            log.info("the payload arena could not be page-locked (%s): copies to and from devices are slower", error)
        self._keep()

    # ------------------------------------------------------------ whose tensors

    def _ordinal_of(self, kv: Mapping[str, Spec | torch.Tensor]) -> int | None:
        """The device that the tensors lie on, None for the host. Raises InvalidTensor if they are of several."""
        places: dict[int | None, str] = {}
        for name, source in kv.items():
            if isinstance(source, Spec):
                places.setdefault(drivers.find().device(source.device).ordinal if source.device else None, name)
            elif source.numel():
                places.setdefault(self._tensor_ordinal(source), name)
        if len(places) > 1:
            (one, name), (other, second) = list(places.items())[:2]
            raise InvalidTensor(f"tensor {name!r} lies on {_place(one)}, {second!r} on {_place(other)}: the tensors of "
                                f"an entry lie on one device", hint="move them to one, or insert two entries")
        return next(iter(places), None)

    def _tensor_ordinal(self, tensor: torch.Tensor) -> int | None:
        if tensor.is_cuda:
            driver = drivers.find()
            return driver.ordinal_of(tensor.data_ptr())
        known = drivers.loaded()
        if known is None or not known.emulated:
            return None
        address = known.device_address(tensor.data_ptr(), False)
        return known.ordinal_of(address) if address else None

    def _located(self, tensor: torch.Tensor) -> tuple[Driver, int, int]:
        ordinal = self._tensor_ordinal(tensor) if isinstance(tensor, torch.Tensor) and tensor.numel() else None
        if ordinal is None:
            raise InvalidTensor("register() takes a tensor on a CUDA device that has elements")
        driver = drivers.find()
        return driver, ordinal, self._address(tensor)

    def _address(self, tensor: torch.Tensor) -> int:
        return drivers.find().device_address(tensor.data_ptr(), tensor.is_cuda)

    def _placed_in_place(self, kv: Mapping[str, torch.Tensor], placed: Sequence[Placed]) -> list[Placed] | None:
        """The tensors where they are, if each of them lies in a registered one."""
        found = []
        for tensor in placed:
            source = kv[tensor.name]
            if not tensor.nbytes:
                found.append(tensor)
                continue
            if source.is_conj() or source.is_neg():
                return None
            address = self._address(source)
            here = tensor._replace(strides=tuple(source.stride()))
            home = next((registered for registered in self._registered.values()
                         if registered.holds(address, here.span)), None)
            if home is None or _n_pieces(here) > MAX_PIECES:
                return None
            found.append(here._replace(region=home.region + 1, offset=address - home.address))
        return found if any(tensor.region for tensor in found) else None

    # ------------------------------------------------------------ the session's device side

    def drain(self, work: Work, then: Callable[[], None]) -> None:
        def settled() -> None:
            then()
            self._session.settle()

        if self._keeper is not None:
            self._keeper.drain(set(work), settled)
        else:
            self.finish(work)
            settled()

    def finish(self, work: Work) -> None:
        driver = drivers.loaded()
        for ordinal, stream in work if driver is not None else ():
            driver.wait(ordinal, stream)

    def leave(self) -> None:
        """Take our regions out of use and wait a while for those who have them mapped."""
        session = self._session
        if self._service is not None:
            self._service.end()
        mine = [key for key in _local if key[0] == session.segment.instance and self._is_mine(key)]
        self._openings.clear()
        if not mine:
            return
        try:
            session.enter(lambda: session.store.end_regions(session.index), sync.deadline(LEAVE_TIMEOUT_S))
        except ShmkvError as error:
            log.warning("device memory was not taken out of use, its consumers will find out: %s", error)
        patience = sync.deadline(LEAVE_TIMEOUT_S)
        held = self._held(mine)
        while held and not sync.passed(patience):
            time.sleep(0.005)
            held = self._held(mine)
        for key in mine:
            own = _local.pop(key)
            if key[1] in held and isinstance(own.memory.keeps, Allocation):
                own.memory.keeps.keep_for_good()
            elif own.event is not None:
                own.event.destroy()
        if held:
            pids = sorted({self._pid(peer) for peers in held.values() for peer in peers})
            log.warning("device memory stays allocated until this process ends: processes %s hold views of it", pids)
        self._arena = None
        self._registered.clear()
        self._in_place.clear()

    def end(self) -> None:
        self._openings.clear()
        self._fetcher.close()
        if self._keeper is not None:
            self._keeper.stop()
        driver = drivers.loaded()
        if self._pinned > 0 and driver is not None and not driver.inherited:
            try:
                driver.unpin(0, self._pinned)
            except CudaError as error:
                log.debug("%s", error)
        self._pinned = 0

    def _is_mine(self, key: tuple[int, int, int]) -> bool:
        info = self._session.tables.regions.info(key[1])
        me = self._session.store.me
        return (info.peer, info.peer_generation, info.generation) == (me.index, me.generation, key[2])

    def _held(self, keys: list[tuple[int, int, int]]) -> dict[int, list[int]]:
        regions = self._session.tables.regions
        held = {index: [peer for peer in regions.mapped_by(index) if self._session.tables.peers.alive(peer)]
                for _, index, generation in keys if regions.info(index).generation == generation}
        return {index: peers for index, peers in held.items() if peers}

    def _pid(self, peer: int) -> int:
        return self._session.tables.words[self._session.tables.peers.at(peer) + Peer.pid]


class Registered:
    """An engine's tensor whose slices are inserted in place. `close()` it (or the buffer) before its memory is reused
    for anything else; entries in place keep the tensor alive.
    """

    def __init__(self, devices: Devices, tensor: torch.Tensor, address: int):
        self._devices, self.tensor, self.address = devices, tensor, address
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self.nbytes = span * tensor.dtype.itemsize
        self.region = -1
        self.reason = ""
        """why it cannot be shared in place; "" if it can"""

    @property
    def in_place(self) -> bool:
        return not self.reason

    def holds(self, address: int, nbytes: int = 1) -> bool:
        return self.address <= address and address + nbytes <= self.address + self.nbytes

    def close(self) -> None:
        """End the registration. Raises InvalidArgument while entries in place still lie in the tensor."""
        if self.region < 0:
            return
        self._devices.released()
        lying = self._devices.names_region(self.region)
        if lying:
            raise InvalidArgument(f"entries {lying[:8]} still lie in this tensor", hint="wait for buffer.released()")
        self._devices.unregister(self)
        self.region = -1


class _Staged:
    """Device tensors copied into the payload arena."""

    name = "staging"

    def __init__(self, host: HostTransport, driver: Driver, ordinal: int, stream: int):
        self._host, self._settle = host, lambda: driver.wait(ordinal, stream)
        self.writable, self.views, self.finish = host.writable, host.views, host.finish

    def write(self, run: tuple[int, int], placed: Sequence[Placed], tensors: Mapping[str, torch.Tensor],
              mapped: Any) -> None:
        self._settle()
        self._host.write(run, placed, tensors, mapped)


def _n_pieces(tensor: Placed) -> int:
    count, length = 1, 1
    for size, stride in reversed(list(zip(tensor.shape, tensor.strides, strict=True))):
        if count == 1 and (stride == length or size == 1):
            length *= size
        else:
            count *= size
    return count


def _usable_driver() -> tuple[Driver | None, bool]:
    """(the driver, whether torch can see its memory); (None, False) where there is none."""
    try:
        driver = drivers.find()
    except TransportUnavailable:
        return None, False
    return driver, torch_sees(driver)


def _unmapped(devices: weakref.ref[Devices], driver: Driver, key: tuple[int, int, int]) -> None:
    """A mapping of another process's memory was undone; its event goes with it."""
    mine = devices()
    if mine is None:
        return
    event = mine._events.pop(key, None)
    if event is not None:
        driver.destroy_event(key[0], event)
    mine._note_unmapped(*key[1:])


def _place(ordinal: int | None) -> str:
    return "the host" if ordinal is None else f"cuda:{ordinal}"
