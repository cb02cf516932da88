"""What: device bytes for a consumer that cannot see the owner's GPU memory, sent over a process group of two ranks.

Map: the two find each other through a `mailbox`. A message is eight words: magic, kind, exchange, ticket, tensors,
bytes, digest of the sizes, 0.

States: unconnected -> connected -> closed, or broken for good by the first failure. One exchange:

    owner (rank 0)      OFFER ->                       payload ->
    consumer (rank 1)             <- ACCEPT or REFUSE             <- DONE

Guarantees: no payload moves before both sides know that tickets and sizes agree: every receive is as long as its send
(in gloo a shorter one aborts the process). A refusal leaves both sides between exchanges, so the link lives on; after
any other failure it is broken and its connection with it, so that nothing late is taken for an answer to a later
exchange. `send` returns when the peer has every byte. A call ends at most about a second after its deadline, whatever
the peer does, and raises only this package's errors. The default group is untouched; two ranks on one GPU are refused
before NCCL is called. A group for NCCL has no watchdog that could end the engine's process.

Not guaranteed: that a failed send was not received in full. That NCCL notices a dead peer before the deadline (`close`
from another thread ends the wait). Groups that other threads create in the very moment a link creates its own read the
same environment. A call of the library that ignores its abort stays behind in a thread, with its tensors. gloo's port
on loopback is open to other users of this host.

If a party dies here: its connection closes and the other side's exchange fails (gloo), or its deadline ends it (NCCL).

Sync points: none.

Why not torch.distributed.init_process_group: the default group is the engine's, needs a common start of all ranks, and
its watchdog takes the process down.
"""

from __future__ import annotations

import hashlib
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as distributed

from ..errors import (
    ClosedError,
    InvalidArgument,
    InvalidTensor,
    SegmentBroken,
    ShmkvError,
    TimedOut,
    TransportUnavailable,
)
from ..sync import passed
from .mailbox import CONSUMER, OWNER

CHUNK_BYTES = 64 << 20
"""counts of NCCL and sizes of gloo overflow with whole entries"""

_LONGEST_S = 30 * 86400.0   # C++ adds a timeout to its clock: for ever would overflow
_GRACE_S, _ABORT_S, _SLICE_S = 0.3, 0.5, 0.1
_MESSAGE, _MAGIC = struct.Struct("=8Q"), int.from_bytes(b"shmkvlnk", "little")
_HELLO = "shmkv-link/1"
_CONTROL, _PAYLOAD, _NEVER = 1, 2, 3   # tags


# ---------------------------------------------------------------- one pair

class Kind(IntEnum):
    HELLO = 1
    OFFER = 2
    ACCEPT = 3
    REFUSE = 4
    DONE = 5


class Message(NamedTuple):
    kind: int
    exchange: int
    ticket: int
    count: int
    nbytes: int
    digest: int

    def about(self) -> tuple[int, int, int, int]:
        return self[2:]


class Link:
    """The connection of one owner (rank 0, sends) and one consumer (rank 1, receives). Deadlines as of `sync.deadline`.

    `store` is a zeroed `Mailbox` of its own, or any store of torch.distributed that both reach.
    """

    def __init__(self, store: Any, rank: int, backend: str, device: torch.device | str | int | None = None, *,
                 chunk_bytes: int = CHUNK_BYTES):
        if rank not in (OWNER, CONSUMER) or backend not in _MISSING or chunk_bytes < 1:
            raise InvalidArgument(f"rank={rank!r}, backend={backend!r}, chunk_bytes={chunk_bytes!r}: a link has the "
                                  "ranks 0 and 1, one of the backends nccl and gloo, and chunks of at least a byte")
        self._store, self._rank, self._backend, self._chunk = store, rank, backend, chunk_bytes
        self._device = _device(backend, device)
        self._turn, self._wire, self._exchange = threading.Lock(), None, 0
        self._broken, self._closed, self._doing = "", False, ""

    @property
    def broken(self) -> str:
        """Why this link can never be used again; empty while it can."""
        return self._broken

    def connect(self, until_ns: int) -> None:
        """Meet the peer, which does the same, and exchange a first message."""
        with self._alone(until_ns):
            if self._wire is not None:
                raise InvalidArgument("this link is connected already")
            why = _MISSING[self._backend]()
            if why:
                raise TransportUnavailable(why)
            if self._device.type == "cuda":
                self._device = _gpu(self._device)
            self._bounded(lambda: self._meet(until_ns), until_ns)

    def send(self, ticket: int, tensors: Sequence[torch.Tensor], until_ns: int) -> None:
        """Send 1-D contiguous uint8 tensors to the peer that receives this ticket in the same sizes."""
        self._exchanged(OWNER, self._offer, ticket, tensors, until_ns)

    def receive(self, ticket: int, tensors: Sequence[torch.Tensor], until_ns: int) -> None:
        """Fill 1-D contiguous uint8 tensors; if this fails, what they hold is undefined."""
        self._exchanged(CONSUMER, self._answer, ticket, tensors, until_ns)

    def close(self) -> None:
        """Idempotent, from any thread; ends an exchange in flight."""
        self._closed = True
        self._break("closed")

    # -------------------------------- both sides of an exchange

    def _exchanged(self, rank: int, side: Callable[..., str], ticket: int, tensors: Sequence[torch.Tensor],
                   until_ns: int) -> None:
        if self._rank != rank:
            raise InvalidArgument("rank 0 of a link sends, rank 1 receives")
        if not 0 <= ticket < 1 << 64:
            raise InvalidArgument(f"ticket={ticket!r} is not a number of 64 bits")
        tensors = list(tensors)
        sizes = [self._checked(tensor) for tensor in tensors]
        mine = Message(Kind.OFFER, 0, ticket, len(sizes), sum(sizes), _digest(sizes))
        with self._alone(until_ns):
            wire = self._wire
            if wire is None:
                raise InvalidArgument("this link was not connected")
            self._exchange += 1
            mine = mine._replace(exchange=self._exchange)
            after = wire.mark()
            refused = self._bounded(lambda: wire.ordered(after, lambda: side(wire, mine, tensors, until_ns)), until_ns,
                                    tensors)
        if refused:
            raise TransportUnavailable(refused, hint="the link is intact: both sides name the same entry and sizes")

    def _offer(self, wire: _Wire, mine: Message, tensors: list[torch.Tensor], until_ns: int) -> str:
        self._doing = f"accept ticket {mine.ticket}"
        wire.say(mine, until_ns)
        answer = self._heard(wire, (Kind.ACCEPT, Kind.REFUSE), until_ns)
        if answer.kind == Kind.REFUSE or answer.about() != mine.about():
            return f"the peer expects {_described(answer)} and was offered {_described(mine)}"
        self._doing = f"take {mine.nbytes} B of ticket {mine.ticket}"
        for chunk in self._chunks(tensors):
            wire.send(chunk, until_ns)
        self._heard(wire, (Kind.DONE,), until_ns)
        return ""

    def _answer(self, wire: _Wire, mine: Message, tensors: list[torch.Tensor], until_ns: int) -> str:
        self._doing = f"offer ticket {mine.ticket}"
        offer = self._heard(wire, (Kind.OFFER,), until_ns)
        if offer.about() != mine.about():
            wire.say(mine._replace(kind=Kind.REFUSE), until_ns)
            return f"the peer offered {_described(offer)} and was to send {_described(mine)}"
        wire.say(mine._replace(kind=Kind.ACCEPT), until_ns)
        self._doing = f"send {mine.nbytes} B of ticket {mine.ticket}"
        for chunk in self._chunks(tensors):
            wire.receive(chunk, until_ns)
        try:
            wire.say(mine._replace(kind=Kind.DONE), until_ns)
        except Exception as error:   # every byte is here: only the next exchange is impossible
            self._break(_line(error))
        return ""

    def _heard(self, wire: _Wire, kinds: tuple[Kind, ...], until_ns: int) -> Message:
        message = wire.hear(until_ns)
        if message.kind not in kinds or message.exchange != self._exchange:
            raise TransportUnavailable(f"the peer is out of step: message {message.kind} of exchange "
                                       f"{message.exchange} in exchange {self._exchange}")
        return message

    def _chunks(self, tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        return (chunk for tensor in tensors for chunk in tensor.split(self._chunk) if chunk.numel())

    def _checked(self, tensor: torch.Tensor) -> int:
        if not isinstance(tensor, torch.Tensor):
            raise InvalidTensor(f"a {type(tensor).__name__} is no tensor")
        if (tensor.dtype, tensor.dim(), tensor.is_contiguous()) != (torch.uint8, 1, True) or \
                tensor.device != self._device:
            raise InvalidTensor(f"a link on {self._device} moves 1-D contiguous uint8 tensors, not {tensor.dtype} of "
                                f"shape {tuple(tensor.shape)} on {tensor.device}")
        return tensor.numel()

    # -------------------------------- meeting

    def _meet(self, until_ns: int) -> None:
        self._doing = "come to the meeting place"
        mine = f"{_HELLO} {self._backend} {self._chunk} {_version(self._backend)} {_uuid(self._device)}".split(" ")
        self._compare(mine, self._swapped(mine, until_ns))
        self._doing = "connect"
        wire = self._wire = _Wire(self._store, self._rank, self._backend, self._device, until_ns)
        if self._broken:   # while the group was made
            return self._break(self._broken)
        hello = Message(Kind.HELLO, 0, 0, 0, 0, 0)
        wire.ordered(None, lambda: self._greet(wire, hello, until_ns))

    def _greet(self, wire: _Wire, hello: Message, until_ns: int) -> None:
        if self._rank == OWNER:
            wire.say(hello, until_ns)
        self._heard(wire, (Kind.HELLO,), until_ns)
        if self._rank == CONSUMER:
            wire.say(hello, until_ns)

    def _swapped(self, mine: list[str], until_ns: int) -> list[str]:
        """The peer's hello for ours; no library is called before the two agree."""
        own, theirs = f"hello/{self._rank}", f"hello/{1 - self._rank}"
        if self._store.check([own]):
            raise InvalidArgument("this mailbox served a link before; zero it, or make a new one")
        self._store.set_timeout(_left(until_ns))
        self._store.set(own, " ".join(mine))
        self._store.wait([theirs], _left(until_ns))
        text = self._store.get(theirs)
        parts = bytes(text).decode("ascii", "replace").split(" ")
        if len(parts) != len(mine):
            raise SegmentBroken(f"a mailbox holds {text[:80]!r} for a greeting")
        return parts

    def _compare(self, mine: list[str], theirs: list[str]) -> None:
        for what, ours, other in zip(("protocol", "backend", "chunk_bytes", "version"), mine, theirs, strict=False):
            if ours != other:
                raise TransportUnavailable(f"{what} is {ours[:80]} here and {other[:80]!r} at the peer")
        if self._backend == "nccl" and mine[-1] == theirs[-1]:
            raise TransportUnavailable(f"both ranks are on the GPU {mine[-1]}, which NCCL does not support",
                                       hint="on one GPU use a transport that maps its memory")

    # -------------------------------- bounds and failures

    @contextmanager
    def _alone(self, until_ns: int) -> Iterator[None]:
        if not self._turn.acquire(timeout=_left(until_ns).total_seconds()):
            raise TimedOut("waited for another exchange of this link; nothing was sent")
        try:
            if self._closed:
                raise ClosedError("this link was closed")
            if self._broken:
                raise TransportUnavailable(f"this link is broken: {self._broken}", hint="make a new one")
            yield
        except ShmkvError:
            raise
        except Exception as error:
            raise TransportUnavailable(f"{self._backend} on {self._device}: {_line(error)}") from error
        finally:
            self._turn.release()

    def _bounded(self, body: Callable[[], Any], until_ns: int, keep: object = None) -> Any:
        """Run body in a thread that is left behind if it outlasts the deadline. Any failure breaks the link."""
        began, outcome = time.monotonic(), _Outcome(body)
        try:
            while not outcome.done.wait(min(_SLICE_S, _left(until_ns).total_seconds() + 1e-3)):
                if self._closed or passed(until_ns):
                    outcome.done.wait(_GRACE_S)   # it should be at its own end now
                    break
            return self._judged(outcome, time.monotonic() - began)
        except BaseException as error:
            self._break(_line(error), keep)
            outcome.done.wait(_GRACE_S)
            raise

    def _judged(self, outcome: _Outcome, seconds: float) -> Any:
        error, ended = outcome.error, outcome.done.is_set()
        if ended and error is None:
            return outcome.value
        if self._closed:
            raise ClosedError("this link was closed meanwhile")
        if isinstance(error, ShmkvError) and not isinstance(error, TimedOut):
            raise error
        if not ended or isinstance(error, TimedOut) or "imed out" in str(error) or "timeout" in str(error).lower():
            raise TimedOut(f"the peer was silent: waited {seconds:.1f} s for it to {self._doing}") from error
        raise TransportUnavailable(f"the peer died or closed the link when it was to {self._doing}: "
                                   f"{_line(error)}") from error

    def _break(self, reason: str, keep: object = None) -> None:
        """Never use the connection again; `keep` lives until the library has let go of it."""
        self._broken = self._broken or reason
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.over = self._broken
            aborted = _Outcome(lambda: (wire.abort(), keep))
            del wire
            aborted.done.wait(_ABORT_S)


class _Outcome:
    """What a body returned or raised in a thread of its own, which nobody has to wait for."""

    def __init__(self, body: Callable[[], Any]):
        self.done, self.value, self.error = threading.Event(), None, None
        threading.Thread(target=self._run, args=(body,), name="shmkv-link", daemon=True).start()

    def _run(self, body: Callable[[], Any]) -> None:
        try:
            self.value = body()
        except BaseException as error:
            self.error = error
        finally:
            del body   # what it holds is gone before anyone goes on
            self.done.set()


def _left(until_ns: int) -> timedelta:
    return timedelta(seconds=min(_LONGEST_S, max(1e-3, (until_ns - time.monotonic_ns()) / 1e9)))


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _digest(sizes: Iterable[int]) -> int:
    return int.from_bytes(hashlib.blake2b(",".join(map(str, sizes)).encode(), digest_size=8).digest(), "little")


def _described(message: Message) -> str:
    return (f"ticket {message.ticket} with {message.count} tensors of {message.nbytes} B "
            f"(sizes {message.digest:016x})")


# ---------------------------------------------------------------- the library behind it

class _Wire:
    """One process group of two ranks. Every wait has a deadline."""

    def __init__(self, store: Any, rank: int, backend: str, device: torch.device, until_ns: int):
        self._group = _GROUPS[backend](distributed.PrefixStore("link", store), rank, until_ns)
        self._store = store   # a group holds only the C++ half of a store, and may ask it until its own end
        self._peer, self._device, self.over = 1 - rank, device, ""
        self._stream = torch.cuda.Stream(device) if backend == "nccl" else None

    def send(self, tensor: torch.Tensor, until_ns: int, tag: int = _PAYLOAD) -> None:
        self._wait(self._group.send([tensor], self._peer, tag), until_ns)

    def receive(self, tensor: torch.Tensor, until_ns: int, tag: int = _PAYLOAD) -> None:
        self._wait(self._group.recv([tensor], self._peer, tag), until_ns)

    def say(self, message: Message, until_ns: int) -> None:
        words = torch.frombuffer(bytearray(_MESSAGE.pack(_MAGIC, *message, 0)), dtype=torch.uint8)
        self.send(words.to(self._device), until_ns, _CONTROL)

    def hear(self, until_ns: int) -> Message:
        words = torch.empty(_MESSAGE.size, dtype=torch.uint8, device=self._device)
        self.receive(words, until_ns, _CONTROL)
        magic, *fields, _ = _MESSAGE.unpack(bytes(words.tolist()))
        if magic != _MAGIC:
            raise TransportUnavailable(f"the peer sent {magic:#x} for a message")
        return Message(*fields)

    def mark(self) -> Any:
        """What the caller's stream has done so far."""
        return torch.cuda.current_stream(self._device).record_event() if self._stream else None

    def ordered(self, after: Any, body: Callable[[], Any]) -> Any:
        """Run body on a stream of our own, after what the caller's stream had done at the mark."""
        if self._stream is None:
            return body()
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            return body()

    def abort(self) -> None:
        group, self._group = self._group, None
        if self._stream is not None:
            name = next((name for name in ("abort", "_abort", "_shutdown", "shutdown") if hasattr(group, name)), "")
            if name:   # of several versions
                getattr(group, name)()
            return
        try:   # gloo closes a group's connections when one of its waits times out, and at nothing else
            group.recv([torch.empty(1, dtype=torch.uint8)], self._peer, _NEVER).wait(timedelta(milliseconds=1))
        except RuntimeError:
            pass

    def _wait(self, work: Any, until_ns: int) -> None:
        work.wait(_left(until_ns))
        if self.over:   # an aborted receive of NCCL looks complete
            raise ClosedError(f"this link is over: {self.over}")


def _gloo(store: Any, rank: int, until_ns: int) -> Any:
    options = distributed.ProcessGroupGloo._Options()
    options._timeout, options._threads = _left(until_ns), 1
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return distributed.ProcessGroupGloo(store, rank, 2, options)


def _nccl(store: Any, rank: int, until_ns: int) -> Any:
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = _left(until_ns)
    with _environment(_NO_WATCHDOG):
        return distributed.ProcessGroupNCCL(store, rank, 2, options)


_GROUPS: Mapping[str, Callable[[Any, int, int], Any]] = {"gloo": _gloo, "nccl": _nccl}

_NO_WATCHDOG = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",          # waits end with an error; newer versions have no watchdog then
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",   # and in older ones it only looks on
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",
}
_setting = threading.Lock()


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set while a group is made, and as before afterwards: the engine's own groups keep their watchdogs."""
    with _setting:
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def backends() -> dict[str, str]:
    """What this torch can move bytes with: NCCL's version, or why a backend is missing. Starts nothing on a GPU."""
    return {name: _MISSING[name]() or _version(name) for name in ("nccl", "gloo")}


def missing(backend: str) -> str:
    """Why this torch lacks a backend; "" if it has it."""
    return _MISSING[backend]()


def _no_gloo() -> str:
    there = distributed.is_available() and distributed.is_gloo_available()
    return "" if there else "gloo is not built into this torch"


def _no_nccl() -> str:
    there = distributed.is_available() and distributed.is_nccl_available()
    return "" if there else "NCCL is not built into this torch"


_MISSING: Mapping[str, Callable[[], str]] = {"nccl": _no_nccl, "gloo": _no_gloo}


def _version(backend: str) -> str:
    if backend == "gloo":
        return "built-in"
    found = torch.cuda.nccl.version()
    return ".".join(map(str, found)) if isinstance(found, tuple) else str(found)


def _device(backend: str, wanted: torch.device | str | int | None) -> torch.device:
    kind = "cpu" if backend == "gloo" else "cuda"
    try:
        device = torch.device(kind if wanted is None else wanted)
    except (RuntimeError, TypeError) as error:
        raise InvalidArgument(f"device={wanted!r} is no device: {_line(error)}") from None
    if device.type != kind:
        raise InvalidArgument(f"{backend} does not move tensors on {device}")
    return device


def _gpu(device: torch.device) -> torch.device:
    if not torch.cuda.is_available():
        raise TransportUnavailable("NCCL moves bytes between GPUs, and this process sees none")
    index = torch.cuda.current_device() if device.index is None else device.index
    if not 0 <= index < torch.cuda.device_count():
        raise TransportUnavailable(f"this process sees {torch.cuda.device_count()} GPUs, and not {device}")
    return torch.device("cuda", index)


def _uuid(device: torch.device) -> str:
    if device.type == "cpu":
        return "-"
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if uuid is None:
        raise TransportUnavailable(f"torch {torch.__version__} does not tell a GPU's UUID, and two ranks on one GPU "
                                   "would not be noticed", hint="torch 2.5 and newer do")
    return str(uuid)
