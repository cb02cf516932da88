"""What: where two processes find each other for a process group: a key-value store in shared memory.

Map: one half for each rank:

      0  used    bytes of the records that follow
      8  record  four words: kind, stamp, key bytes, value bytes; then key and value, padded to whole words

States: zeroed -> records appended, each seen when `used` covers it.

Guarantees: each rank writes only its own half, so no lock is needed and none can be left held. What a mailbox shows is
the same for both ranks once both have read the same records: they are ordered by (stamp, rank), a stamp is above every
stamp its writer had seen. Bytes found in the memory are data, bounds are checked.

Not guaranteed: `add` returns the sum of both ranks' contributions it sees: two at once can get equal answers;
`compare_set` is not atomic between ranks.

If a party dies here: a record in the making is not seen.

Sync points: mailbox-posted.

Why not torch's own stores: a TCPStore listens on a port that any user of the host may speak to, a FileStore leaves a
file behind.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as distributed

from ..errors import ClosedError, InvalidArgument, SegmentBroken, TableFull, TimedOut
from ..sync import deadline, passed

OWNER, CONSUMER = 0, 1
MAILBOX_BYTES = 64 << 10

_Store: Any = distributed.Store if distributed.is_available() else object
_RECORD_BYTES, _STAMP_MOST, _NUMBER_MOST = 32, 1 << 62, 1 << 63
_PAUSE_S, _PAUSE_MOST_S = 50e-6, 2e-3


class _RecordKind(IntEnum):
    SET = 1
    ADD = 2
    DELETE = 3


class _Record(NamedTuple):
    stamp: int
    rank: int
    kind: int
    key: bytes
    value: bytes


class _Seen(NamedTuple):
    """What was read so far, replaced as a whole."""

    used: tuple[int, int]
    stamps: tuple[int, int]
    records: tuple[_Record, ...]
    values: dict[bytes, bytes]


class Mailbox(_Store):
    """A store of torch.distributed in zeroed memory that two processes map: each writes its half and reads both.

    `memory` is writable and starts at a whole word; MAILBOX_BYTES are plenty for one link. Any thread may call.
    """

    def __init__(self, memory: memoryview, rank: int):
        super().__init__()
        if rank not in (OWNER, CONSUMER):
            raise InvalidArgument(f"rank={rank!r}: a mailbox has the ranks 0 and 1")
        if memory.readonly or memory.nbytes < 256 or not memory.c_contiguous or \
                torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % 8:
            raise InvalidArgument("a mailbox takes writable contiguous memory of at least 256 B, at a whole word")
        self._rank, self._half = rank, memory.nbytes // 16 * 8
        self._room = self._half - 8
        self._bytes = memory.cast("B")[:2 * self._half]
        self._words = self._bytes.cast("Q")
        self._lock, self._closed = threading.Lock(), False
        self._seen = _Seen((0, 0), (0, 0), (), {})

    def close(self) -> None:
        """Let go of the memory; waits in other threads end."""
        with self._lock:
            self._closed = True
            self._words.release()
            self._bytes.release()

    def set(self, key: str, value: str | bytes) -> None:
        self._post(_RecordKind.SET, key, _encoded(value))

    def get(self, key: str) -> bytes:
        return self._waited([key], self.timeout)[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._waited(keys, self.timeout if timeout is None else timeout)

    def check(self, keys: list[str]) -> bool:
        values = self._read()
        return all(key.encode() in values for key in keys)

    def add(self, key: str, value: int) -> int:
        """The sum of what both ranks added, as far as seen: for counting up to a number, not for numbering."""
        before = _number(self._read().get(key.encode(), b"0"))
        if before is None or not -_NUMBER_MOST <= before + value < _NUMBER_MOST:
            raise InvalidArgument(f"{key!r} is no number of 64 bits, or would be none with {value!r}")
        return _number(self._post(_RecordKind.ADD, key, str(value).encode()).get(key.encode(), b"0")) or 0

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Not atomic between ranks."""
        found = self._read().get(key.encode())
        if (found or b"") != _encoded(expected):
            return _encoded(expected) if found is None else found
        self.set(key, desired)
        return _encoded(desired)

    def delete_key(self, key: str) -> bool:
        there = self.check([key])
        if there:
            self._post(_RecordKind.DELETE, key, b"")
        return there

    def num_keys(self) -> int:
        return len(self._read())

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._waited(keys, self.timeout)

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return False

    deleteKey, getNumKeys = delete_key, num_keys   # the names by which C++ calls them

    def _waited(self, keys: list[str], timeout: timedelta) -> list[bytes]:
        """Their values once all are there; a timeout of zero or less looks once."""
        until, pause = deadline(max(0.0, timeout.total_seconds())), _PAUSE_S
        while True:
            values = self._read()
            missing = [key for key in keys if key.encode() not in values]
            if not missing:
                return [values[key.encode()] for key in keys]
            if passed(until):
                raise TimedOut(f"waited {timeout.total_seconds():.1f} s for the peer to set {', '.join(missing)}")
            time.sleep(min(pause, max(0.0, (until - time.monotonic_ns()) / 1e9)))
            pause = min(2 * pause, _PAUSE_MOST_S)

    # -------------------------------- the records

    def _read(self) -> dict[bytes, bytes]:
        with self._lock:
            return self._refreshed().values

    def _post(self, kind: _RecordKind, key: str, value: bytes) -> dict[bytes, bytes]:
        name = key.encode()
        size = _RECORD_BYTES + _padded(len(name) + len(value))
        with self._lock:
            seen, start = self._refreshed(), self._rank * self._half
            used = seen.used[self._rank]
            if used + size > self._room:
                raise TableFull(f"a mailbox has {self._room - used} B left for rank {self._rank}, and {key!r} needs "
                                f"{size} B", hint="make a new mailbox for each link")
            self._write(start + 8 + used, (kind, 1 + max(seen.stamps), len(name), len(value)), name + value)
            self._words[start // 8] = used + size  # SYNC POINT mailbox-posted (store)
            return self._refreshed().values

    def _write(self, at: int, words: tuple[int, ...], content: bytes) -> None:
        for number, word in enumerate(words, at // 8):
            self._words[number] = word
        self._bytes[at + _RECORD_BYTES:at + _RECORD_BYTES + len(content)] = content

    def _refreshed(self) -> _Seen:
        if self._closed:
            raise ClosedError("this mailbox was closed")
        seen = self._seen
        fresh = [self._fresh(rank, seen.used[rank], seen.stamps[rank]) for rank in (OWNER, CONSUMER)]
        if any(records for _, records in fresh):
            records = sorted([*seen.records, *fresh[0][1], *fresh[1][1]], key=lambda record: record[:2])
            stamps = [records_[-1].stamp if records_ else seen.stamps[rank]
                      for rank, (_, records_) in enumerate(fresh)]
            self._seen = _Seen((fresh[0][0], fresh[1][0]), (stamps[0], stamps[1]), tuple(records), _replayed(records))
        return self._seen

    def _fresh(self, rank: int, seen: int, stamp: int) -> tuple[int, list[_Record]]:
        """How much of a half is used, and the records beyond what was seen."""
        start, records = rank * self._half, []
        used = self._words[start // 8]  # SYNC POINT mailbox-posted (load)
        if used % 8 or not seen <= used <= self._room:
            raise SegmentBroken(f"a mailbox says that {used} B of {self._room} are used, after {seen}")
        while seen < used:
            record, size = self._parsed(rank, start + 8 + seen, used - seen, stamp)
            records.append(record)
            stamp, seen = record.stamp, seen + size
        return used, records

    def _parsed(self, rank: int, at: int, left: int, after: int) -> tuple[_Record, int]:
        kind, stamp, n_key, n_value = self._words[at // 8:at // 8 + 4].tolist() if left >= _RECORD_BYTES else [0] * 4
        size = _RECORD_BYTES + _padded(n_key + n_value)
        if kind not in _KINDS or not after < stamp < _STAMP_MOST or size > left:
            raise SegmentBroken(f"a mailbox record of kind {kind}, stamp {stamp}, {n_key} + {n_value} B in {left} B")
        at += _RECORD_BYTES
        key, value = bytes(self._bytes[at:at + n_key]), bytes(self._bytes[at + n_key:at + n_key + n_value])
        return _Record(stamp, rank, kind, key, value), size


def _replayed(records: Iterable[_Record]) -> dict[bytes, bytes]:
    values: dict[bytes, bytes] = {}
    for record in records:
        if record.kind == _RecordKind.SET:
            values[record.key] = record.value
        elif record.kind == _RecordKind.DELETE:
            values.pop(record.key, None)
        else:
            numbers = _number(values.get(record.key, b"0")), _number(record.value)
            if None in numbers or not -_NUMBER_MOST <= sum(numbers) < _NUMBER_MOST:
                raise SegmentBroken(f"a mailbox adds {record.value[:40]!r} to what is no number of 64 bits with it")
            values[record.key] = str(sum(numbers)).encode()
    return values


def _number(text: bytes) -> int | None:
    digits = text.removeprefix(b"-")
    return int(text) if digits.isdigit() and len(digits) <= 19 else None


_KINDS = frozenset(_RecordKind)


def _encoded(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _padded(nbytes: int) -> int:
    return (nbytes + 7) // 8 * 8
