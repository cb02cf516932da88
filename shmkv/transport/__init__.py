"""How an entry's bytes get from the producer's tensors to the consumer's: the contract all transports keep.

A transport is made for one attached segment and knows nothing of locks, leases or states; the caller holds a lease on
the run for as long as anything the transport gave out is alive, which it learns from `Mapped`.

Guarantees every transport gives: `write` returns when all bytes are where the consumer will see them; what `views`
gives is bit-equal to it; `Mapped` is gone when, and only when, the last tensor derived from what was given out is.

There is one transport today, `host`. Device tensors are refused where they are described (`tensors.place`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from ..segment import unmap
from ..tensors import Placed

PRIVATE, READONLY = "private", "readonly"
"""how a consumer sees a run: copy-on-write (its writes are its own), or shared and write-protected"""


class Mapped:
    """What the tensors of one lease hang on: gone when the last of them is.

    Made, and known to the lease, before anything is mapped, so that an interrupt at any point loses nothing.
    """

    __slots__ = ("addresses", "nbytes", "_window")

    def __init__(self) -> None:
        self.addresses: list[int] = []
        self.nbytes = 0
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

    def write(self, run: tuple[int, int], placed: Sequence[Placed], tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy `tensors` into the run (offset and length in the arena, bytes), one pass each."""
        ...

    def writable(self, run: tuple[int, int], placed: Sequence[Placed], mapped: Mapped,
                 when_gone: Callable[[weakref.ref], object]) -> dict[str, torch.Tensor]:
        """Tensors that lie in the run, for a producer to compute into."""
        ...

    def views(self, run: tuple[int, int], placed: Sequence[Placed], how: str, mapped: Mapped,
              when_gone: Callable[[weakref.ref], object]) -> dict[str, torch.Tensor]:
        """Tensors that show the run's bytes to a consumer, copying nothing."""
        ...
