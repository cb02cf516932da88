"""`create` and `attach`: how a handle comes to be."""

from __future__ import annotations

import re
import time
from typing import Any

from . import residue, segment
from .buffer import KVBuffer
from .devices import DeviceOptions
from .errors import InvalidArgument, NoSuchSegment, SegmentExists, ShmkvError
from .layout import PAGE_BYTES, Geometry, Header, Layout
from .recovery import rebuild
from .segment import log
from .sync import deadline, passed
from .tables import Tables

ENTER_TIMEOUT_S = 10.0
_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4,
          "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}


def create(name: str | None = None, *, capacity: int | str = "1GiB", meta_capacity: int | str | None = None,
           slots: int = 4096, leases: int | None = None, peers: int = 64, waits: int = 256, device_arenas: int = 8,
           registrations: int = 256, role: str = "", exist_ok: bool = False, device_capacity: int | str = 0,
           device: Any = None, publish: str = "wait", require: str | None = None,
           prefer: str | None = None) -> KVBuffer:
    """Create a buffer and attach to it, as its owner: its close() and its exit remove the name.

    `name`: 1 to 180 characters of A-Z a-z 0-9 . _ -; None makes a fresh one (read it from `.name`). `capacity`: bytes
    of tensors, an int or a text like "8GiB"; all of it is reserved and touched now, which takes about a second a GiB,
    and only then the name appears. `meta_capacity`: bytes of token ids
    and tensor descriptors (default: 4 MiB and 512 bytes a slot). `slots`: entries at most; `leases`: entries held at
    once; `peers`: handles attached at once; `waits`: threads waiting at once. `role`: a text of 32 bytes for those who
    look into the buffer. `exist_ok`: attach if the name exists already; the sizes are then those that it has, and if
    its owner is dead, this handle becomes the owner.

    `device_capacity`: bytes of memory on `device` ("cuda:0", a torch.device, a GPU's UUID) that this handle owns: the
    device tensors it inserts are copied there, and others on that GPU see them in place. They end with this handle.
    `device` without it: where this handle wants device tensors. `publish`: "wait" until the device work behind an entry
    is done, or "event": publish at once and order consumers' streams behind an interprocess event. `require`: refuse
    paths worse than this one ("local", "cuda_ipc", "cuda_peer", "staging", "nccl"); `prefer`: try this one first.
    `device_arenas`, `registrations`: handles with `device_capacity`, and tensors registered, at most.

    A segment of this name whose peers are all dead is replaced (with `exist_ok`, it is taken over with its entries).

    Raises InvalidName, InvalidArgument, SegmentExists, StorageFull (naming the bytes needed and free),
    TransportUnavailable (there is no CUDA driver for `device_capacity`).
    """
    geometry = _geometry(capacity, meta_capacity, slots, leases, peers, waits, device_arenas, registrations)
    role = _role(role)
    options = _options(device_capacity, device, publish, require, prefer)
    until = deadline(ENTER_TIMEOUT_S)
    if name is None:
        return _make(segment.fresh_name(), geometry, role, until, options)
    name = segment.clean_name(name)
    while True:
        if exist_ok:
            try:
                return _attach(name, role, until, options, own=True)
            except NoSuchSegment:
                pass
        _clear_way(name)
        try:
            return _make(name, geometry, role, until, options)
        except SegmentExists:
            if not exist_ok:
                raise


def attach(name: str, *, role: str = "", timeout: float | None = 0.0, device_capacity: int | str = 0,
           device: Any = None, publish: str = "wait", require: str | None = None,
           prefer: str | None = None) -> KVBuffer:
    """Attach to an existing buffer by name; waits up to `timeout` seconds for it to appear. The rest as in `create`.

    Raises InvalidName, InvalidArgument, NoSuchSegment, NotOurs, FormatMismatch, SegmentBroken, TableFull (no peer
    record is free), TransportUnavailable, StorageFull (of device memory).
    """
    until, role = deadline(timeout), _role(role)
    options = _options(device_capacity, device, publish, require, prefer)
    while True:
        try:
            return _attach(name, role, until, options)
        except NoSuchSegment as missing:
            if passed(until):
                raise NoSuchSegment(f"{missing.args[0]}, {timeout} s after attach() began to look") from None
            time.sleep(0.005)


def _make(name: str, geometry: Geometry, role: str, until: int, options: DeviceOptions) -> KVBuffer:
    shared = segment.create(name, Layout(geometry))
    tables = Tables(shared)
    shared.words[Header.next_sequence] = 1
    rebuild(tables)
    buffer = KVBuffer(shared, role, until, tables, own=True, device=options)
    try:
        segment.publish(shared)
    except SegmentExists:
        shared.owned = False
        buffer.close()
        raise
    return buffer


def _attach(name: str, role: str, until: int, options: DeviceOptions, own: bool = False) -> KVBuffer:
    shared = segment.attach(name)
    buffer = KVBuffer(shared, role, until, own=own, device=options)
    if shared.words[Header.unlinked]:
        buffer.close()
        raise NoSuchSegment(f"segment {name!r} was removed by its owner just now")
    return buffer


def _options(capacity: int | str, device: Any, publish: str, require: str | None,
             prefer: str | None) -> DeviceOptions:
    nbytes = 0 if capacity == 0 and not isinstance(capacity, bool) else _bytes(capacity)
    return DeviceOptions(nbytes, device, publish, require, prefer).check()


def _geometry(capacity: int | str, meta_capacity: int | str | None, slots: int, leases: int | None, peers: int,
              waits: int, device_arenas: int, registrations: int) -> Geometry:
    if not isinstance(slots, int):
        raise InvalidArgument(f"slots={slots!r} is not a whole number")
    return Geometry(
        slots=slots, peers=peers, leases=leases if leases is not None else slots + 64, waits=waits, ring=256,
        journal=1024, meta_bytes=_pages(meta_capacity if meta_capacity is not None else (4 << 20) + 512 * slots),
        arena_bytes=_pages(capacity), device_arenas=device_arenas, registrations=registrations).check()


def _role(role: str) -> str:
    if not isinstance(role, str) or len(role.encode(errors="replace")) > 32 or not role.isprintable():
        raise InvalidArgument(f"role={role!r} is not a printable text of at most 32 bytes")
    return role


def _clear_way(name: str) -> None:
    """Remove a segment of this name that dead processes left; a living one is for `segment.create` to refuse."""
    try:
        if residue.remove_abandoned(name):
            log.info("removed the abandoned segment %r: all its peers are dead", name)
    except ShmkvError:
        pass


def _pages(capacity: int | str) -> int:
    return -(-_bytes(capacity) // PAGE_BYTES) * PAGE_BYTES


def _bytes(capacity: int | str) -> int:
    if isinstance(capacity, int) and not isinstance(capacity, bool) and capacity > 0:
        return capacity
    text = capacity.strip().lower() if isinstance(capacity, str) else ""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text)
    if found is None or found[2] not in _UNITS:
        raise InvalidArgument(f"{capacity!r} is not a number of bytes",
                              hint='write capacity= and meta_capacity= as 8 << 30 or "8GiB"')
    return int(float(found[1]) * _UNITS[found[2]])
