"""`create` and `attach`: how a handle comes to be."""

from __future__ import annotations

import re
import time

from . import residue, segment
from .buffer import KVBuffer
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
           slots: int = 4096, leases: int | None = None, peers: int = 64, waits: int = 256, role: str = "",
           exist_ok: bool = False) -> KVBuffer:
    """Create a buffer and attach to it, as its owner: its close() and its exit remove the name.

    `name`: 1 to 180 characters of A-Z a-z 0-9 . _ -; None makes a fresh one (read it from `.name`). `capacity`: bytes
    of tensors, an int or a text like "8GiB"; all of it is reserved and touched now, which takes about a second a GiB,
    and only then the name appears. `meta_capacity`: bytes of token ids
    and tensor descriptors (default: 4 MiB and 512 bytes a slot). `slots`: entries at most; `leases`: entries held at
    once; `peers`: handles attached at once; `waits`: threads waiting at once. `role`: a text of 32 bytes for those who
    look into the buffer. `exist_ok`: attach if the name exists already; the sizes are then those that it has, and if
    its owner is dead, this handle becomes the owner.

    A segment of this name whose peers are all dead is replaced (with `exist_ok`, it is taken over with its entries).

    Raises InvalidName, InvalidArgument, SegmentExists, StorageFull (naming the bytes needed and free).
    """
    geometry, role = _geometry(capacity, meta_capacity, slots, leases, peers, waits), _role(role)
    until = deadline(ENTER_TIMEOUT_S)
    if name is None:
        return _make(segment.fresh_name(), geometry, role, until)
    name = segment.clean_name(name)
    while True:
        if exist_ok:
            try:
                return _attach(name, role, until, own=True)
            except NoSuchSegment:
                pass
        _clear_way(name)
        try:
            return _make(name, geometry, role, until)
        except SegmentExists:
            if not exist_ok:
                raise


def attach(name: str, *, role: str = "", timeout: float | None = 0.0) -> KVBuffer:
    """Attach to an existing buffer by name; waits up to `timeout` seconds for it to appear.

    Raises InvalidName, NoSuchSegment, NotOurs, FormatMismatch, SegmentBroken, TableFull (no peer record is free).
    """
    until, role = deadline(timeout), _role(role)
    while True:
        try:
            return _attach(name, role, until)
        except NoSuchSegment as missing:
            if passed(until):
                raise NoSuchSegment(f"{missing.args[0]}, {timeout} s after attach() began to look") from None
            time.sleep(0.005)


def _make(name: str, geometry: Geometry, role: str, until: int) -> KVBuffer:
    shared = segment.create(name, Layout(geometry))
    tables = Tables(shared)
    shared.words[Header.next_sequence] = 1
    rebuild(tables)
    buffer = KVBuffer(shared, role, until, tables, own=True)
    try:
        segment.publish(shared)
    except SegmentExists:
        shared.owned = False
        buffer.close()
        raise
    return buffer


def _attach(name: str, role: str, until: int, own: bool = False) -> KVBuffer:
    shared = segment.attach(name)
    buffer = KVBuffer(shared, role, until, own=own)
    if shared.words[Header.unlinked]:
        buffer.close()
        raise NoSuchSegment(f"segment {name!r} was removed by its owner just now")
    return buffer


def _geometry(capacity: int | str, meta_capacity: int | str | None, slots: int, leases: int | None, peers: int,
              waits: int) -> Geometry:
    if not isinstance(slots, int):
        raise InvalidArgument(f"slots={slots!r} is not a whole number")
    return Geometry(
        slots=slots, peers=peers, leases=leases if leases is not None else slots + 64, waits=waits, ring=256,
        journal=1024, meta_bytes=_pages(meta_capacity if meta_capacity is not None else (4 << 20) + 512 * slots),
        arena_bytes=_pages(capacity)).check()


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
