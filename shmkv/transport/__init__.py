"""How an entry's bytes get from the producer's tensors to the consumer's: the contract all transports keep, and the
ladder, by which one of them is chosen.

A transport knows nothing of locks, leases or states; the caller holds a lease on the run for as long as anything the
transport gave out is alive, which it learns from `Mapped`.

Guarantees every transport gives: when `write` has returned and its `Mapped` has no work left, all bytes are where the
consumer will see them; what `views` gives is bit-equal to it; `Mapped` is gone when, and only when, the last tensor
derived from what was given out is.

Entries of host tensors lie in the payload arena and are seen there (`host`). For an entry in device memory the paths
are, best first: `local` (our own memory), `cuda_ipc` (the same GPU: a view), `cuda_peer` (a GPU that ours can reach: a
copy between them), `staging` (the owner copies into the payload arena), `nccl` (the owner sends). `decide` says which
from facts, and why not a better one. No torch is imported here: who looks into a buffer decodes decisions too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..errors import TransportUnavailable
from ..segment import unmap

if TYPE_CHECKING:
    import torch

    from ..tensors import Placed

PRIVATE, READONLY = "private", "readonly"
"""how a consumer sees a run of the host: copy-on-write (its writes are its own), or shared and write-protected"""


# ---------------------------------------------------------------- the ladder

class Path(IntEnum):
    HOST = 1
    LOCAL = 2
    CUDA_IPC = 3
    CUDA_PEER = 4
    STAGING = 5
    NCCL = 6


class Reason(IntEnum):
    """Why a path was not taken. The numbers stand in segments."""

    NOT_PREFERRED = 1
    OTHER_PROCESS = 2
    NO_REGION = 3
    NO_DRIVER = 4
    NO_TORCH_CUDA = 5
    NOT_VISIBLE = 6
    OTHER_DEVICE = 7
    SAME_DEVICE = 8
    NO_PEER_ACCESS = 9
    PID_NAMESPACE = 10
    NOT_EXPORTED = 11
    OPEN_FAILED = 12
    NO_ROOM = 13
    NO_NCCL = 14
    NOT_REQUIRED = 15


WHY = {
    Reason.NOT_PREFERRED: "prefer= names another path",
    Reason.OTHER_PROCESS: "the memory belongs to another process",
    Reason.NO_REGION: "this handle has no device memory there: pass device_capacity=, or register() the tensor",
    Reason.NO_DRIVER: "no CUDA driver can be used in this process",
    Reason.NO_TORCH_CUDA: "this process's torch is built without CUDA",
    Reason.NOT_VISIBLE: "the GPU is not visible to this process (CUDA_VISIBLE_DEVICES, container)",
    Reason.OTHER_DEVICE: "the memory lies on another GPU than the one wanted",
    Reason.SAME_DEVICE: "the memory lies on the very GPU that is wanted",
    Reason.NO_PEER_ACCESS: "the two GPUs have no peer access",
    Reason.PID_NAMESPACE: "owner and consumer are in different PID namespaces (containers: --pid=container:NAME)",
    Reason.NOT_EXPORTED: "the driver gave no IPC handle for this memory (MIG, Tegra, or IPC is off)",
    Reason.OPEN_FAILED: "the driver refused to open the IPC handle",
    Reason.NO_ROOM: "the payload arena is smaller than the entry",
    Reason.NO_NCCL: "no NCCL between two GPUs (it needs a GPU of its own on each side)",
    Reason.NOT_REQUIRED: "require= asks for a better path",
}
LADDER = (Path.LOCAL, Path.CUDA_IPC, Path.CUDA_PEER, Path.STAGING, Path.NCCL)
NAMES = {path.name.lower(): path for path in Path}


class Facts(NamedTuple):
    """What the choice depends on, for a process that wants an entry on a device (or, with `has_region` false, brings
    tensors of one).
    """

    has_region: bool = True
    """the bytes lie in device memory that a handle made known"""
    is_ours: bool = False
    """... of this process"""
    has_driver: bool = True
    torch_sees_cuda: bool = True
    is_visible: bool = True
    """their GPU is one of this process's"""
    is_wanted: bool = True
    """their GPU is where the tensors are wanted"""
    peer_access: bool = False
    """between their GPU and the wanted one"""
    same_pid_namespace: bool = True
    exported: bool = True
    open_failed: bool = False
    fits_arena: bool = True
    """the payload arena is large enough for a copy"""
    nccl: bool = False


class Decision(NamedTuple):
    """The path taken, and the reason each better one was refused."""

    path: Path
    refused: Mapping[Path, Reason]

    @property
    def word(self) -> int:
        """As it stands in a lease: the path's code in the lowest byte, the reason against path p in byte p."""
        return self.path | sum(reason << 8 * path for path, reason in self.refused.items())

    def describe(self) -> dict[str, str]:
        return {path.name.lower(): WHY[reason] for path, reason in self.refused.items()}


def decide(facts: Facts, require: str | None = None, prefer: str | None = None) -> Decision:
    """The best path these facts allow: `prefer` first where it can be had, never one worse than `require`.

    Raises TransportUnavailable with the reason against every path.
    """
    refused: dict[Path, Reason] = {}
    order = sorted(LADDER, key=lambda path: path != NAMES.get(prefer or ""))
    worst = NAMES[require] if require else Path.NCCL
    for path in order:
        reason = _why_not(path, facts) or (Reason.NOT_REQUIRED if path > worst else None)
        if reason is None:
            passed_over = {better: Reason.NOT_PREFERRED for better in LADDER if better < path and better not in refused}
            return Decision(path, {better: why for better, why in {**refused, **passed_over}.items() if better < path})
        refused[path] = reason
    against = "; ".join(f"{path.name.lower()}: {WHY[refused[path]]}" for path in LADDER)
    raise TransportUnavailable(f"no path leads to this entry: {against}. It was left as it is",
                               hint="require= can be left out" if require else "see `shmkv doctor`")


def decode_decision(word: int) -> Decision | None:
    """The decision in a lease's word; None if it holds none."""
    path = word & 0xFF
    if path not in _PATHS:
        return None
    reasons = {other: word >> 8 * other & 0xFF for other in LADDER}
    return Decision(Path(path), {other: Reason(why) for other, why in reasons.items() if why in _REASONS})


def _why_not(path: Path, facts: Facts) -> Reason | None:
    checks = {
        Path.LOCAL: [(facts.has_region, Reason.NO_REGION), (facts.is_ours, Reason.OTHER_PROCESS),
                     (facts.is_wanted, Reason.OTHER_DEVICE)],
        Path.CUDA_IPC: [(facts.has_region, Reason.NO_REGION), *_to_open(facts), (facts.is_wanted, Reason.OTHER_DEVICE)],
        Path.CUDA_PEER: [(facts.has_region, Reason.NO_REGION), *_to_open(facts),
                         (not facts.is_wanted, Reason.SAME_DEVICE), (facts.peer_access, Reason.NO_PEER_ACCESS)],
        Path.STAGING: [(facts.fits_arena, Reason.NO_ROOM)],
        Path.NCCL: [(facts.has_region, Reason.NO_REGION), (facts.nccl, Reason.NO_NCCL)],
    }
    return next((reason for holds, reason in checks[path] if not holds), None)


def _to_open(facts: Facts) -> list[tuple[bool, Reason]]:
    return [(facts.has_driver, Reason.NO_DRIVER), (facts.torch_sees_cuda, Reason.NO_TORCH_CUDA),
            (facts.is_visible, Reason.NOT_VISIBLE), (facts.exported or facts.is_ours, Reason.NOT_EXPORTED),
            (facts.same_pid_namespace or facts.is_ours, Reason.PID_NAMESPACE),
            (not facts.open_failed, Reason.OPEN_FAILED)]


_PATHS, _REASONS = frozenset(Path), frozenset(Reason)


# ---------------------------------------------------------------- the contract

class Mapped:
    """What the tensors of one lease hang on: gone when the last of them is.

    Made, and known to the lease, before anything is mapped, so that an interrupt at any point loses nothing.
    """

    __slots__ = ("addresses", "nbytes", "work", "_window")

    def __init__(self) -> None:
        self.addresses: list[int] = []
        self.nbytes = 0
        self.work: set[tuple[int, int]] = set()
        """(device ordinal, stream) of work that may still touch these bytes: the lease outlives it"""
        self._window: weakref.ref | None = None

    def watch(self, window: object, when_gone: Callable[[weakref.ref], object]) -> None:
        """The tensors keep `window`; `when_gone` is called when it is gone: anywhere, by any thread."""
        self._window = weakref.ref(window, when_gone)

    def is_gone(self) -> bool:
        return self._window is None or self._window() is None

    def unmap(self) -> None:
        """Undo what was mapped for these tensors alone; when they are gone, before the lease ends. Idempotent."""
        unmap(self.addresses, self.nbytes)


class Transport(Protocol):
    name: str

    def write(self, run: tuple[int, int], placed: Sequence[Placed], tensors: Mapping[str, torch.Tensor],
              mapped: Mapped) -> None:
        """Copy `tensors` into the run (offset and length in the arena, bytes), one pass each."""
        ...

    def writable(self, run: tuple[int, int], placed: Sequence[Placed], mapped: Mapped,
                 when_gone: Callable[[weakref.ref], object]) -> dict[str, torch.Tensor]:
        """Tensors that lie in the run, for a producer to compute into."""
        ...

    def finish(self) -> bool:
        """Called before the entry is sealed: the bytes of a `writable` run are there now, or (then it returns False)
        are sure to be there before any consumer's device looks.
        """
        ...

    def views(self, run: tuple[int, int], placed: Sequence[Placed], how: str, mapped: Mapped,
              when_gone: Callable[[weakref.ref], object]) -> dict[str, torch.Tensor]:
        """Tensors that show the run's bytes to a consumer, copying nothing."""
        ...
