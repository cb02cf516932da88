"""What: tensors in device memory: one copy in (or none: `writable`, registered tensors), zero-copy views out.

Map: a region is one allocation of whole 2 MiB (or a stretch of an engine's own); its IPC handle stands in its record
(`regions`), entries are offsets in it, 256-byte aligned. An entry's tensors lie in its run of a device arena, or each
where the engine computed it, in registered regions.

States: none of its own. `Allocation` (ours) and `Opened` (another process's, mapped once a process whoever asks) live
as long as any window into them or any handle that keeps them; then they are freed and unmapped.

Guarantees: bytes are published after the device work that makes them: by default this side waits on the host for an
event behind it; with `publish="event"` the entry is sealed at once and the consumer's stream is ordered behind an
interprocess event. A lease ends after the consumer's own work (`Mapped.work`): an event recorded on its stream when the
last view is gone has to complete first.

Not guaranteed: that views are private: a write to device memory is seen by all who hold the entry. That a consumer's
work on a stream it did not name (`Hit.record_stream`) is waited for. What a view of a dead owner's memory shows.

If a party dies here: the driver frees its memory and unmaps what it had mapped; the records are settled by `store`.

Sync points: none; the entry's state orders the bytes.

Why not torch's own sharing (`_share_cuda_`): it names devices by ordinal, wants exactly one consumer for each share,
and keeps counts in files of its own.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .. import sync
from ..descriptors import ALIGNMENT_BYTES, IN_RUN, Placed
from ..driver import GRANULE_BYTES, CudaError, Driver, after_fork
from ..errors import InvalidArgument, SegmentBroken
from ..segment import log
from ..tensors import bit_copy, check_fits, is_flat, plain
from . import Mapped
from .foreign import device_bytes, host_bytes

FINISH_TIMEOUT_S = 60.0
"""how long sealing a reserved entry may wait for the work that makes it"""
MAX_PIECES = 4096
"""a tensor in more pieces than this is copied into a run instead of staying in place"""


class Memory(NamedTuple):
    """Device memory as this process reaches it; `keeps` it mapped."""

    ordinal: int
    address: int
    nbytes: int
    keeps: Any


class Allocation:
    """Device memory of this process, freed when nothing needs it any more."""

    def __init__(self, driver: Driver, ordinal: int, nbytes: int):
        self._driver, self.ordinal, self.address = driver, ordinal, 0
        self.nbytes = -(-nbytes // GRANULE_BYTES) * GRANULE_BYTES
        self.address = driver.allocate(ordinal, self.nbytes)

    def memory(self) -> Memory:
        return Memory(self.ordinal, self.address, self.nbytes, self)

    def keep_for_good(self) -> None:
        """Others still have it mapped: freeing would be undefined for them, so it goes with this process."""
        _kept.append(self)

    def __del__(self) -> None:
        address, self.address = self.address, 0
        if address and not self._driver.inherited and not sys.is_finalizing():
            sync.outside(functools.partial(_quietly, self._driver.free, self.ordinal, address))


_kept: list[Allocation] = []


class Opened:
    """Another process's allocation mapped into this one, unmapped when nothing needs it any more."""

    def __init__(self, driver: Driver, ordinal: int, handle: bytes):
        self._driver, self.ordinal, self.address = driver, ordinal, 0
        self.address = driver.open(ordinal, handle)
        self.nbytes = driver.allocation(ordinal, self.address)[1]

    def __del__(self) -> None:
        address, self.address = self.address, 0
        if address and not self._driver.inherited and not sys.is_finalizing():
            sync.outside(functools.partial(_quietly, self._driver.close, self.ordinal, address))


def _quietly(undo: Callable[[int, int], None], ordinal: int, address: int) -> None:
    """Never within the segment's lock (`sync.outside`): this takes long."""
    try:
        undo(ordinal, address)
    except CudaError as error:
        log.debug("%s", error)


_opened: dict[tuple[int, int, bytes], weakref.ref[Opened]] = {}
_opening = threading.Lock()


def _forget() -> None:
    global _opening
    _opening = threading.Lock()
    _opened.clear()


after_fork.append(_forget)


def open_once(driver: Driver, ordinal: int, allocation: int, handle: bytes) -> Opened:
    """The mapping of another process's allocation on this device, made on the first call. Raises CudaError."""
    with _opening:
        known = _opened.get((ordinal, allocation, handle), _nothing)()
        if known is None:
            for key in [key for key, opened in _opened.items() if opened() is None]:
                del _opened[key]
            known = Opened(driver, ordinal, handle)
            _opened[ordinal, allocation, handle] = weakref.ref(known)
        return known


def _nothing() -> None:
    return None


class SharedEvent:
    """An interprocess event behind which all entries of a region are complete that were sealed so far, whatever streams
    they were made on: each recording takes the one before along.
    """

    def __init__(self, driver: Driver, ordinal: int):
        self._driver, self._ordinal, self._turn = driver, ordinal, threading.Lock()
        self.event, self.handle = driver.shared_event(ordinal)

    def record(self, stream: int) -> None:
        with self._turn:
            self._driver.order_behind(self._ordinal, stream, self.event)
            self._driver.record(self._ordinal, self.event, stream)

    def destroy(self) -> None:
        """When nobody can have it open any more."""
        self._driver.destroy_event(self._ordinal, self.event)


class Window:
    """What the tensors of one lease keep; it keeps the memory they lie in."""

    __slots__ = ("keeps", "__weakref__")

    def __init__(self, keeps: Any):
        self.keeps = keeps


class CudaTransport:
    """`memories`: by `Placed.region`, 0 being the arena that the run lies in."""

    name = "cuda_ipc"

    def __init__(self, driver: Driver, memories: Mapping[int, Memory], stream: int,
                 event: SharedEvent | None = None, until: int | None = None):
        self._driver, self._memories, self._stream, self._event = driver, memories, stream, event
        self._until = until
        self.ordinal = next(iter(memories.values())).ordinal
        self._work = (self.ordinal, stream)

    def write(self, run: tuple[int, int], placed: Sequence[Placed], tensors: Mapping[str, torch.Tensor],
              mapped: Mapped) -> None:
        mapped.work.add(self._work)
        strided = []
        for tensor in placed:
            if tensor.region != IN_RUN or not tensor.nbytes:
                continue  # in place: nothing to copy
            source = plain(tensors.get(tensor.name), tensor)
            check_fits(run[1], tensor)
            if is_flat(source, tensor):
                address = self._driver.device_address(source.data_ptr(), source.is_cuda)
                self._driver.copy(self.ordinal, self._address(run, tensor), address, tensor.nbytes, self._stream)
            else:
                strided.append((tensor, source))
        if strided:
            self._copy_strided(run, strided)
        if self.finish():
            mapped.work.discard(self._work)

    def _copy_strided(self, run: tuple[int, int], strided: Sequence[tuple[Placed, torch.Tensor]]) -> None:
        """By torch, which has the kernels for it."""
        with torch_stream(self._driver, self.ordinal, self._stream):
            for tensor, source in strided:
                target = self._tensor(run, tensor, Window(self._memories[IN_RUN].keeps))
                if source.is_conj() or source.is_neg():
                    target.copy_(source)
                else:
                    bit_copy(target, source)

    def writable(self, run: tuple[int, int], placed: Sequence[Placed], mapped: Mapped,
                 when_gone: Callable[[weakref.ref], object]) -> dict[str, torch.Tensor]:
        return self._tensors(run, placed, mapped, when_gone)

    def finish(self) -> bool:
        if self._event is None:
            until = self._until if self._until is not None else sync.deadline(FINISH_TIMEOUT_S)
            self._driver.wait(self.ordinal, self._stream, until)
            self._until = None  # of the insert; what is sealed later has its own time
            return True
        self._event.record(self._stream)
        return False

    def views(self, run: tuple[int, int], placed: Sequence[Placed], how: str, mapped: Mapped,
              when_gone: Callable[[weakref.ref], object]) -> dict[str, torch.Tensor]:
        return self._tensors(run, placed, mapped, when_gone)

    def _tensors(self, run: tuple[int, int], placed: Sequence[Placed], mapped: Mapped,
                 when_gone: Callable[[weakref.ref], object]) -> dict[str, torch.Tensor]:
        window = Window([memory.keeps for memory in self._memories.values()])
        mapped.watch(window, when_gone)
        mapped.work.add(self._work)
        return {tensor.name: self._tensor(run, tensor, window) for tensor in placed}

    def _tensor(self, run: tuple[int, int], tensor: Placed, window: Window) -> torch.Tensor:
        if not tensor.nbytes:
            where = "cpu" if self._driver.emulated else f"cuda:{self.ordinal}"
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=where)
        address, alias = self._address(run, tensor), self._driver.host_alias
        flat = host_bytes(alias(address), tensor.span, window) if self._driver.emulated else \
            device_bytes(self.ordinal, address, tensor.span, window)
        return flat.view(tensor.dtype).as_strided(tensor.shape, tensor.strides)

    def _address(self, run: tuple[int, int], tensor: Placed) -> int:
        return address_in(self._memories, run, tensor)


def address_in(memories: Mapping[int, Memory], run: tuple[int, int], tensor: Placed) -> int:
    """Where a tensor lies in device memory. Raises SegmentBroken if it would lie outside."""
    memory = memories[tensor.region]
    offset = tensor.offset + (run[0] if tensor.region == IN_RUN else 0)
    if offset + tensor.span > memory.nbytes:
        end = offset + tensor.span
        raise SegmentBroken(f"tensor {tensor.name!r} ends at byte {end} of a region of {memory.nbytes}")
    return memory.address + offset


# ---------------------------------------------------------------- copies of a whole entry

def packed(placed: Sequence[Placed], run_bytes: int) -> tuple[list[Placed], int]:
    """The tensors as they lie in a copy of the entry that is one run, and that run's bytes."""
    if all(tensor.region == IN_RUN for tensor in placed):
        return list(placed), run_bytes
    copies, end = [], 0
    for tensor in placed:
        strides, stride = [], 1
        for size in reversed(tensor.shape):
            strides.append(stride)
            stride *= size or 1
        offset = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES if tensor.nbytes else 0
        copies.append(tensor._replace(region=IN_RUN, offset=offset, strides=tuple(reversed(strides))))
        end = offset + tensor.nbytes if tensor.nbytes else end
    return copies, end


def pieces(source: Placed, copy: Placed) -> Iterator[tuple[int, int, int]]:
    """The contiguous pieces of a tensor: (bytes from its start, bytes from its copy's start, length)."""
    if source.strides == copy.strides:
        yield 0, 0, source.nbytes
        return
    if n_pieces(source) > MAX_PIECES:
        raise SegmentBroken(f"tensor {source.name!r} in place lies in {n_pieces(source)} pieces")
    itemsize, length, dims = source.dtype.itemsize, source.dtype.itemsize, []
    for size, stride in reversed(list(zip(source.shape, source.strides, strict=True))):
        if not dims and (stride * itemsize == length or size == 1):
            length *= size
        else:
            dims.append((size, stride * itemsize))
    dims.reverse()

    def walk(level: int, at: int) -> Iterator[int]:
        if level == len(dims):
            yield at
            return
        size, step = dims[level]
        for index in range(size):
            yield from walk(level + 1, at + index * step)

    for number, at in enumerate(walk(0, 0)):
        yield at, number * length, length


def n_pieces(tensor: Placed) -> int:
    """In how many contiguous pieces a tensor lies."""
    count, length = 1, 1
    for size, stride in reversed(list(zip(tensor.shape, tensor.strides, strict=True))):
        if count == 1 and (stride == length or size == 1):
            length *= size
        else:
            count *= size
    return count


def copy_pieces(driver: Driver, ordinal: int, memories: Mapping[int, Memory], run: tuple[int, int], source: Placed,
                 copy: Placed, target: int, stream: int) -> None:
    """Enqueue copies of a tensor's bytes to where its copy lies behind `target`."""
    if not source.nbytes:
        return
    at = address_in(memories, run, source)
    for start, copy_start, nbytes in pieces(source, copy):
        driver.copy(ordinal, target + copy.offset + copy_start, at + start, nbytes, stream)


def device_buffer(driver: Driver, ordinal: int, nbytes: int, stream: int) -> Memory:
    """Memory of this process for a copy made on this stream: from torch's allocator, where torch can see the device."""
    if driver.emulated:
        return Allocation(driver, ordinal, nbytes).memory()
    with torch_stream(driver, ordinal, stream):  # what was freed on another stream may still be in use there
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{ordinal}")
    return Memory(ordinal, tensor.data_ptr(), nbytes, tensor)


# ---------------------------------------------------------------- torch and streams

def torch_sees(driver: Driver) -> bool:
    """Whether this process's torch can make tensors of what the driver gives."""
    return driver.emulated or torch.cuda.is_available()


def stream_of(driver: Driver, ordinal: int, stream: Any) -> int:
    """A stream as the driver's number: an int, a torch.cuda.Stream, or None for torch's current one."""
    if stream is None:
        return 0 if driver.emulated else torch.cuda.current_stream(ordinal).cuda_stream
    number = getattr(stream, "cuda_stream", stream)
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 1 << 64:
        raise InvalidArgument(f"stream={stream!r} is neither a torch.cuda.Stream nor the driver's number of one")
    return number


def torch_stream(driver: Driver, ordinal: int, stream: int) -> Any:
    """A context in which torch works behind what is on the stream."""
    if driver.emulated:
        return _Settled(driver, ordinal, stream)
    if not stream:  # ExternalStream(0) is another stream than the default one
        return torch.cuda.stream(torch.cuda.default_stream(ordinal))
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, device=ordinal))


class _Settled:
    """For a torch that works on the host: the stream has done its work before, and there is none after."""

    def __init__(self, driver: Driver, ordinal: int, stream: int):
        self._settle = lambda: driver.wait(ordinal, stream, sync.deadline(FINISH_TIMEOUT_S))

    def __enter__(self) -> None:
        self._settle()

    def __exit__(self, *_: object) -> None:
        return None
