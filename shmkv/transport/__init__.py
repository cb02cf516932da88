"""How an entry's bytes get from the producer's tensors to the consumer's: the contract all transports keep.

A transport is made for one attached segment and knows nothing of locks, leases or states; the caller holds a lease on
the run for as long as anything the transport gave out is alive, and `on_gone` tells it when that is no longer so.

Guarantees every transport gives: `write` returns when all bytes are where the consumer will see them; what `views`
gives is bit-equal to it; `on_gone` is called once, when the last tensor derived from what was given out is gone, after
whatever was mapped for it is unmapped, never inside a section of the segment's lock, never in a forked child.

There is one transport today, `host`. Device tensors are refused where they are described (`tensors.place`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from ..tensors import Placed

PRIVATE, READONLY = "private", "readonly"
"""how a consumer sees a run: copy-on-write (its writes are its own), or shared and write-protected"""


class Transport(Protocol):
    name: str

    def write(self, run: tuple[int, int], placed: Sequence[Placed], tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy `tensors` into the run (offset and length in the arena, bytes), one pass each."""
        ...

    def writable(self, run: tuple[int, int], placed: Sequence[Placed],
                 on_gone: Callable[[], object]) -> dict[str, torch.Tensor]:
        """Tensors that lie in the run, for a producer to compute into."""
        ...

    def views(self, run: tuple[int, int], placed: Sequence[Placed], how: str,
              on_gone: Callable[[], object]) -> dict[str, torch.Tensor]:
        """Tensors that show the run's bytes to a consumer, copying nothing."""
        ...
