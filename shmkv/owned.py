"""Device memory of ours that others see: the arena of a handle, and the engine's own tensors that it registered.

A producer writes device memory only in regions of its own; so its death can leave no copy under way in memory that
lives on.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from . import driver as drivers
from . import sync
from .descriptors import IN_RUN, Placed
from .driver import CudaError, Device, Driver
from .entries import FREE
from .errors import ClosedError, InvalidArgument, InvalidTensor, ShmkvError
from .fetch import Service
from .layout import Peer
from .regions import IN_PLACE, RegionInfo, RegionKind
from .segment import log
from .session import Session
from .transport.cuda_ipc import MAX_PIECES, Allocation, Memory, SharedEvent, n_pieces

LEAVE_TIMEOUT_S = 2.0


class Own(NamedTuple):
    """A region of ours."""

    info: RegionInfo
    memory: Memory
    event: SharedEvent | None


_local: dict[tuple[int, int, int], Own] = {}
"""all regions of this process, by segment instance, index and generation: their memory needs no opening"""
drivers.after_fork.append(_local.clear)


class Owned:
    """`pin` makes copies out of device memory quick, `wake` starts whoever looks after leases."""

    def __init__(self, session: Session, pin: Callable[[Driver, int], None], wake: Callable[[], None]):
        self._session, self._pin, self._wake = session, pin, wake
        self.arena: Own | None = None
        self._registered: dict[int, Registered] = {}
        self._in_place: dict[int, tuple[int, list[torch.Tensor]]] = {}  # sequence: its slot, tensors kept for it
        self._free: list[int] = []  # released, and not yet told
        self._turn = threading.RLock()
        self._service: Service | None = None
        self._told: set[str] = set()

    # ------------------------------------------------------------ regions

    def make_arena(self, driver: Driver, device: Device, capacity: int, publish: str) -> None:
        """Device memory of this many bytes, in which this handle's device entries lie."""
        allocation = Allocation(driver, device.ordinal, capacity)
        event = SharedEvent(driver, device.ordinal) if publish == "event" else None
        try:
            self.arena = self._open(RegionKind.ARENA, driver, device, allocation.memory(), allocation.address, event)
        except BaseException:
            self._close_unknown()
            if event is not None:
                event.destroy()
            raise

    def register(self, tensor: torch.Tensor, ordinal: int | None) -> Registered:
        """See `KVBuffer.register`."""
        if ordinal is None:
            raise InvalidTensor("register() takes a tensor on a CUDA device that has elements")
        driver = drivers.find()
        registered = Registered(self, tensor, address_of(tensor))
        registered.reason = driver.why_not_exportable(ordinal, registered.address)
        if registered.reason:
            self.say_once(f"a registered tensor cannot be shared in place: {registered.reason}; what is inserted of it "
                          f"is copied")
            return registered
        base, _ = driver.allocation(ordinal, registered.address)
        memory = Memory(ordinal, registered.address, registered.nbytes, tensor)
        try:
            own = self._open(RegionKind.TENSOR, driver, driver.devices[ordinal], memory, base, None)
            registered.region, registered.generation = own.info.index, own.info.generation
            self._registered[own.info.index] = registered
        except BaseException:
            self._close_unknown()
            raise
        return registered

    def unregister(self, region: int, generation: int) -> list[int]:
        """End a registration; returns the entries that still lie there instead, if there are any."""
        store = self._session.store
        lying = self._session.run(lambda: store.close_region(region, generation), sync.deadline(10))
        if not lying:
            self._registered.pop(region, None)
            _local.pop(self._key(region, generation), None)
        return lying

    def own(self, index: int, generation: int | None = None) -> Own | None:
        """A region of this process, whichever of its handles owns it; None if it is another's."""
        if generation is None:
            generation = self._session.tables.regions.info(index).generation
        return _local.get(self._key(index, generation))

    def say_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            log.warning("%s", text)

    # ------------------------------------------------------------ entries in place

    def placed_in_place(self, kv: Mapping[str, Any], placed: Sequence[Placed]) -> tuple[
            list[Placed], dict[int, Memory], tuple[tuple[int, int], ...]] | None:
        """The tensors where they are, if each of them lies in a registered one: with the memories by `Placed.region`,
        and the regions and generations that this holds for.
        """
        found, homes = [], {}
        registered = list(self._registered.values())
        for tensor in placed:
            source = kv[tensor.name]
            if not isinstance(source, torch.Tensor):
                return None
            if not tensor.nbytes:
                found.append(tensor)
                continue
            here = tensor._replace(strides=tuple(source.stride()))
            address = address_of(source)
            home = next((one for one in registered if one.holds(address, here.span)), None)
            expanded = any(stride == 0 and size > 1 for size, stride in zip(here.shape, here.strides, strict=True))
            if home is None or expanded or source.is_conj() or source.is_neg() or n_pieces(here) > MAX_PIECES:
                return None
            homes[home.region + 1] = home
            found.append(here._replace(region=home.region + 1, offset=address - home.address))
        if not homes:
            return None
        memories = {region: Memory(home.ordinal, home.address, home.nbytes, home.tensor)
                    for region, home in homes.items()}
        return found, memories, tuple((home.region, home.generation) for home in homes.values())

    def keep(self, sequence: int, slot: int, kv: Mapping[str, torch.Tensor]) -> None:
        """An entry was inserted in place: its tensors are not to be freed before it is."""
        with self._turn:
            self._in_place[sequence] = slot, list(kv.values())

    def released(self) -> list[int]:
        """The entries in place whose bytes are free again, each told once."""
        if self._in_place:
            self._session.run(self.any_released, sync.deadline(10))
        with self._turn:
            told, self._free = self._free, []
        return told

    def any_released(self) -> list[int]:
        """Under the lock: those that the next `released` will give."""
        entries = self._session.tables.entries
        with self._turn:
            for sequence, (slot, _) in list(self._in_place.items()):
                if entries.state(slot) == FREE or entries.sequence(slot) != sequence:
                    del self._in_place[sequence]
                    self._free.append(sequence)
            return list(self._free)

    # ------------------------------------------------------------ the end

    def leave(self) -> None:
        """Take our regions out of use and wait a while for those who have them mapped."""
        session = self._session
        if self._service is not None:
            self._service.end()
        mine = [key for key in list(_local) if key[0] == session.segment.instance and self._is_mine(key)]
        if not mine:
            return
        try:
            session.enter(lambda: session.store.end_regions(session.index), sync.deadline(LEAVE_TIMEOUT_S))
        except ShmkvError as error:
            log.warning("device memory was not taken out of use, its consumers will find out: %s", error)
        sync.fence()
        patience, held = sync.deadline(LEAVE_TIMEOUT_S), self._held(mine)
        while held and not sync.passed(patience):
            time.sleep(0.005)
            held = self._held(mine)
        for key in mine:
            own = _local.pop(key, None)
            if own is None:
                continue
            if key[1] in held and isinstance(own.memory.keeps, Allocation):
                own.memory.keeps.keep_for_good()
            elif own.event is not None:
                own.event.destroy()
        if held:
            words, peers = session.tables.words, session.tables.peers
            pids = sorted({words[peers.at(peer) + Peer.pid] for holders in held.values() for peer in holders})
            log.warning("device memory stays allocated until this process ends: processes %s hold views of it", pids)
        self.arena = None
        self._registered.clear()
        self._in_place.clear()

    # ------------------------------------------------------------ how

    def _open(self, kind: RegionKind, driver: Driver, device: Device, memory: Memory, base: int,
              event: SharedEvent | None) -> Own:
        session, handle = self._session, b""
        try:
            handle = driver.export(memory.ordinal, base)
        except CudaError as error:
            self.say_once(f"device memory cannot be shared by CUDA IPC ({error}): others get copies of it")
        allocation, event_handle = driver.allocation_id(memory.ordinal, base), event.handle if event else b""
        info = RegionInfo(0, 0, kind, 0, 0, device.uuid, memory.nbytes, memory.address - base, allocation, handle,
                          event_handle)
        claim = functools.partial(session.store.open_region, info)
        info = session.run(lambda: session.store.or_bury(claim), sync.deadline(10))
        own = _local[self._key(info.index, info.generation)] = Own(info, memory, event)
        self._wake()
        with self._turn:
            if self._service is None:
                self._service = Service(session, self._source)
        return own

    def _close_unknown(self) -> None:
        """End what an interrupt left: regions of ours that nobody could close."""
        session, me = self._session, self._session.store.me
        known = {*self._registered, *([self.arena.info.index] if self.arena is not None else [])}

        def close() -> None:
            regions = session.tables.regions
            for index in regions.owned_by(me.index, me.generation):
                if index not in known:
                    generation = regions.info(index).generation
                    _local.pop(self._key(index, generation), None)
                    session.store.close_region(index, generation)

        session.run(close, sync.deadline(10))

    def _source(self, slot: int, placed: Sequence[Placed]) -> tuple[Driver, dict[int, Memory], tuple[int, int], Any]:
        """An entry of ours, for the service to copy from."""
        tables, driver = self._session.tables, drivers.find()
        region = tables.entries.region(slot)
        regions = {IN_RUN: region - 1} if region != IN_PLACE else {
            tensor.region: tensor.region - 1 for tensor in placed if tensor.nbytes}
        owns = {number: self.own(index) for number, index in regions.items()}
        memories, event = {}, None
        for number, own in owns.items():
            if own is None:
                raise ClosedError("the entry's device memory is no longer ours")
            memories[number] = own.memory
            event = event or (own.event.event if own.event is not None else None)
            self._pin(driver, own.memory.ordinal)
        return driver, memories, tables.entries.run(slot), event

    def _key(self, index: int, generation: int) -> tuple[int, int, int]:
        return self._session.segment.instance, index, generation

    def _is_mine(self, key: tuple[int, int, int]) -> bool:
        info, me = self._session.tables.regions.info(key[1]), self._session.store.me
        return (info.peer, info.peer_generation, info.generation) == (me.index, me.generation, key[2])

    def _held(self, keys: list[tuple[int, int, int]]) -> dict[int, list[int]]:
        regions, peers = self._session.tables.regions, self._session.tables.peers
        held = {index: [peer for peer in regions.mapped_by(index) if peers.alive(peer)]
                for _, index, generation in keys if regions.info(index).generation == generation}
        return {index: holders for index, holders in held.items() if holders}


class Registered:
    """An engine's tensor whose slices are inserted in place. `close()` it (or the buffer) before its memory is reused
    for anything else; entries in place keep the tensor alive.
    """

    def __init__(self, owned: Owned, tensor: torch.Tensor, address: int):
        self._owned, self.tensor, self.address = owned, tensor, address
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self.nbytes = span * tensor.dtype.itemsize
        self.ordinal = drivers.find().ordinal_of(address)
        self.region, self.generation = -1, 0
        self.reason = ""
        """why it cannot be shared in place; "" if it can"""

    @property
    def in_place(self) -> bool:
        return not self.reason

    def holds(self, address: int, nbytes: int = 1) -> bool:
        return self.address <= address and address + nbytes <= self.address + self.nbytes

    def close(self) -> None:
        """End the registration. Raises InvalidArgument while entries in place still lie in the tensor. Idempotent."""
        if self.region < 0:
            return
        try:
            lying = self._owned.unregister(self.region, self.generation)
        except ClosedError:
            lying = []  # the buffer's close() has ended it
        if lying:
            raise InvalidArgument(f"entries {lying[:8]} still lie in this tensor", hint="wait for buffer.released()")
        self.region = -1


def address_of(tensor: torch.Tensor) -> int:
    """Where a tensor's data starts in device memory; 0 if it lies on the host."""
    return drivers.find().device_address(tensor.data_ptr(), tensor.is_cuda)
