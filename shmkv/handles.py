"""What a caller holds: a `Hit` (or `Miss`) of a look-up, a `Reserved` entry of a producer.

Three lifetimes, three things: descriptors in the segment are inert data; the lease (`session.Lifeline`) is the right to
the bytes; tensors are views. The lease ends when the handle is released *and* the last tensor derived from it is gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from . import keys
from . import namespace as namespaces
from .entries import meta_parts
from .errors import Cancelled, ClosedError, InvalidArgument, InvalidTensor
from .leases import Outcome
from .regions import IN_PLACE
from .session import Opening, Session
from .store import Grant
from .sync import deadline
from .tensors import Placed, bit_clone, bit_copy, check_target, decode
from .transport import Decision, Transport

if TYPE_CHECKING:
    import torch


class Miss:
    """No entry was found in time: falsy, usable in `with`, and `reason` says why."""

    __slots__ = ("reason",)

    def __init__(self, reason: str):
        self.reason = reason

    def __bool__(self) -> bool:
        return False

    def __getitem__(self, name: str) -> torch.Tensor:
        raise KeyError(f"{name!r}: this look-up is a miss ({self.reason}); ask `if hit:` first")

    def __enter__(self) -> Miss:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __repr__(self) -> str:
        return f"<shmkv.Miss: {self.reason}>"


class Single:
    """Neither copied nor pickled: a second object would not hold what the first one holds."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InvalidArgument(f"a {type(self).__name__} can be neither copied nor pickled",
                              hint="pass buffer.name to other processes, and hit.copy() for tensors of your own")


class Hit(Single, Mapping[str, "torch.Tensor"]):
    """An entry that was found: a mapping of tensor names to tensors, truthy, usable in `with`.

    The tensors are views of the entry's bytes. By default writes to them stay in this process; with `readonly=True` a
    write faults. They stay valid as long as any tensor derived from them lives, whatever is released, closed or
    unlinked meanwhile; the entry's bytes are not reused before.
    """

    matched_tokens: int
    """how many of the asked tokens this entry's KV is valid for"""
    n_tokens: int
    """how many tokens (after roi) the entry was inserted under; more than `matched_tokens` in an overlap"""
    nbytes: int
    """bytes of all its tensors"""
    sequence: int
    """the entry's number: what insert() returned for it"""
    transport: str
    """the path by which the bytes are seen: "host", or for an entry in device memory "local", "cuda_ipc", "cuda_peer",
    "staging", "nccl" """
    refused: Mapping[str, str]
    """why each better path than `transport` was not taken"""

    def __init__(self, session: Session, transport: Transport, how: str):
        self._session, self._how = session, how
        self._transport: Transport | None = transport
        self._lifeline = session.lifeline(self)
        self._tensors: dict[str, torch.Tensor] | None = None
        self._meta = b""
        self._released = False
        self._placed: list[Placed] | None = None
        self.transport, self.refused = transport.name, {}

    @property
    def hold(self):
        return self._lifeline.hold

    def fill(self, grant: Grant, meta: bytes, header: tuple[int, int, int]) -> None:
        """Called once by the buffer, with the lease held: what was found."""
        self.matched_tokens, self.n_tokens = grant.matched_tokens, grant.n_tokens
        self.nbytes, self.sequence = grant.payload_bytes, grant.sequence
        self._run, self._meta, self._header = (grant.run_at, grant.run_bytes), meta, header

    def come_by(self, decision: Decision, transport: Transport, run: tuple[int, int], placed: list[Placed]) -> None:
        """Called once by the buffer for an entry in device memory: how its bytes are reached."""
        self.transport, self.refused = decision.path.name.lower(), decision.describe()
        self._transport, self._run, self._placed = transport, run, placed

    @property
    def ordinal(self) -> int | None:
        """The device on which the tensors lie; None for the host."""
        return getattr(self._transport, "ordinal", None)

    def record_stream(self, stream: Any) -> None:
        """Device work on this stream (a torch.cuda.Stream or the driver's number) reads the tensors too: the entry's
        bytes are not reused before it is done. Call it before `release`, for streams other than the one that was
        current at the look-up.
        """
        self._views()
        number = getattr(stream, "cuda_stream", stream)
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 1 << 64:
            raise InvalidArgument(f"stream={stream!r} is neither a torch.cuda.Stream nor the driver's number of one")
        for device, _ in self._lifeline.work():
            self._lifeline.add_work(device, number)

    def release(self, *, returned: bool = False) -> None:
        """Let go of the entry. Its bytes are reused when the last tensor derived from it is gone too. Idempotent.

        `returned=True` puts a drop-selected entry back for another consumer, unchanged and in its old place. Leaving a
        `with` block, by an exception too, is a plain release: what was taken counts as consumed.
        """
        if returned and not self._released:
            self._lifeline.hold.outcome = Outcome.RETURNED
        self._released, self._tensors, self._transport = True, None, None
        if self._lifeline.drop_handle():
            self._session.settle()

    @property
    def tokens(self) -> np.ndarray:
        """The full token ids the entry was inserted with (uint32), before roi."""
        key_bytes, roi_tokens, _ = self._header
        raw = self._meta[key_bytes:key_bytes + 4 * roi_tokens] if roi_tokens else keys.split(self._meta[:key_bytes])[1]
        return np.frombuffer(bytes(raw), dtype=np.uint32)

    @property
    def roi(self) -> np.ndarray | None:
        """The mask the entry was inserted with (bool), or None."""
        key_bytes, roi_tokens, _ = self._header
        if not roi_tokens:
            return None
        mask_at = key_bytes + 4 * roi_tokens
        return np.frombuffer(self._meta[mask_at:mask_at + roi_tokens], dtype=np.uint8) != 0

    @property
    def namespace(self) -> dict:
        """The namespace the entry was inserted under."""
        return namespaces.decode_namespace(bytes(keys.split(self._meta[:self._header[0]])[0]))

    def copy(self) -> dict[str, torch.Tensor]:
        """Private copies of all tensors, bit for bit; they keep nothing in the segment."""
        return {name: bit_clone(tensor) for name, tensor in self.items()}

    def copy_to(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors into the given ones, by name; refused before a byte moves if a shape or dtype differs."""
        for name, target in targets.items():
            source = self[name]
            check_target(name, target)
            if (source.shape, source.dtype) != (target.shape, target.dtype):
                raise InvalidTensor(f"tensor {name!r} is {source.dtype} {tuple(source.shape)}, "
                                    f"the target {target.dtype} {tuple(target.shape)}")
        for name, target in targets.items():
            bit_copy(target, self[name])

    def __getitem__(self, name: str) -> torch.Tensor:
        return _named(self._views(), name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._views())

    def __len__(self) -> int:
        return len(self._views())

    def __bool__(self) -> bool:
        return True

    def __enter__(self) -> Hit:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "released" if self._released else f"{self.nbytes} B by {self.transport}"
        return f"<shmkv.Hit {self.sequence}: {self.matched_tokens} of {self.n_tokens} tokens, {state}>"

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def _views(self) -> dict[str, torch.Tensor]:
        transport = self._transport
        if self._released:
            raise ClosedError("this hit was released", hint="use it inside the with block, or keep its tensors")
        if self._tensors is None and transport is not None:
            placed = self._placed or self.described()
            lifeline, opening = self._lifeline, Opening()
            views = transport.views(self._run, placed, self._how, lifeline.mapped(opening), lifeline.asked)
            if self._released:
                raise ClosedError("this hit was released by another thread meanwhile")
            self._tensors, self._transport = views, None  # the tensors keep what they need
        return self._tensors or {}

    def described(self) -> list[Placed]:
        """The entry's tensors as its producer placed them."""
        _, start, end = meta_parts(*self._header)
        return decode(self._meta[start:end], self._run[1])

    def copy_out(self) -> None:
        """Replace the views by private copies (`copy=True`)."""
        self._tensors = self.copy()
        self._transport = None  # it may keep memory

    def detach(self) -> None:
        """End the lease; only copies are left to look at."""
        if self._lifeline.drop_handle():
            self._session.settle()


class Reserved(Single, Mapping[str, "torch.Tensor"]):
    """A producer's entry in the making: tensors to write into, sealed on leaving the block, aborted on an exception.

    Do not write to the tensors after sealing: consumers see the same bytes. The entry's bytes stay in use as long as
    a tensor of it lives in this process.
    """

    def __init__(self, session: Session, transport: Transport, key: keys.Key):
        self._session, self._transport, self._key = session, transport, key
        self._lifeline = session.lifeline(self)
        self._grant: Grant | None = None
        self._tensors: dict[str, torch.Tensor] = {}

    @property
    def hold(self):
        return self._lifeline.hold

    @property
    def sequence(self) -> int:
        """The entry's number, as in signals about it."""
        return self._entry().sequence

    @property
    def slot_in_place(self) -> int | None:
        """The slot of an entry whose tensors stay where they are; None for one that has a run."""
        grant = self._entry()
        return grant.slot if grant.region == IN_PLACE else None

    def fill(self, grant: Grant, placed: list[Placed], sources: Mapping[str, torch.Tensor] | None) -> None:
        """Called once by the buffer, with the lease held: copy the sources in, or offer tensors to write into."""
        self._grant, run = grant, (grant.run_at, grant.run_bytes)
        lifeline = self._lifeline
        if sources is not None:
            self._transport.write(run, placed, sources, lifeline.mapped())
        else:
            opening = Opening()
            self._tensors = self._transport.writable(run, placed, lifeline.mapped(opening), lifeline.asked)

    def seal(self) -> int:
        """Make the entry visible and return its sequence. Raises Cancelled if somebody cancelled it meanwhile."""
        grant = self._entry()
        finished = not self._lifeline.work() or self._transport.finish()
        self._tensors = {}
        done = finished and not self._lifeline.has_views()
        sealed = self._session.run(lambda: self._session.store.seal(grant, self.hold, self._key, done), deadline(10))
        self._end(done)
        if not sealed:
            raise Cancelled(f"entry {grant.sequence} was cancelled before it was sealed")
        return grant.sequence

    def abort(self) -> None:
        """Give the entry up; nobody will have seen it. Idempotent, and without effect after seal()."""
        grant, self._tensors = self._grant, {}
        if grant is None:
            return
        done = not self._lifeline.has_views() and not self._lifeline.work()
        self._session.run(lambda: self._session.store.abort(grant, self.hold, done), deadline(10))
        self._end(done)

    def __getitem__(self, name: str) -> torch.Tensor:
        self._entry()
        return _named(self._tensors, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        if self._grant is None:
            return "<shmkv.Reserved: sealed or aborted>"
        return f"<shmkv.Reserved {self._grant.sequence}: {self._grant.n_tokens} tokens, {self._grant.payload_bytes} B>"

    def __enter__(self) -> Reserved:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self._grant is None:
            return
        if kind is None:
            self.seal()
        else:
            self.abort()

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def _entry(self) -> Grant:
        if self._grant is None:
            raise ClosedError("this reserved entry was sealed or aborted")
        return self._grant

    def _end(self, done: bool) -> None:
        self._grant = None
        if done:
            self._lifeline.settled()
        else:
            self._lifeline.drop_handle()


def _named(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    try:
        return tensors[name]
    except KeyError:
        raise KeyError(f"no tensor {name!r} in this entry; there are: {', '.join(map(repr, tensors))}") from None
