"""What: host tensors in the shared-memory arena: one copy in (or none, `writable`), zero-copy views out.

Map: a run is whole pages of the payload arena; the tensors in it are 256-byte aligned.

States: none of its own. A view's window lives as long as the last tensor derived from it; then what was mapped for
this lease alone is unmapped, and after that the lease ends (`session.Lifeline`).

Guarantees: by default each lease maps its own run copy-on-write, so that an in-place write by one reader goes to its
own pages and reaches neither another reader nor a redelivered entry. `readonly` shows the lasting shared mapping: warm
from the start, a write faults. (One private mapping of the whole arena would not do: a second lease would read the
first one's writes, and a page once written would hide the next entry's bytes.)

Not guaranteed: that a producer keeps its hands off tensors it got from `writable` after sealing.

If a party dies here: the kernel unmaps; nothing is recorded here.

Sync points: none; the entry's state orders the bytes.

Why not one tensor over the whole arena for all views: its storage would live for ever, and nobody could tell when the
last view of an entry is gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

import torch

from ..segment import Segment, Window
from ..tensors import Placed, copy_in, view
from . import PRIVATE, Mapped


class HostTransport:
    name = "host"

    def __init__(self, segment: Segment):
        self._segment = segment
        self._arena_at = segment.layout.arena.at

    def write(self, run: tuple[int, int], placed: Sequence[Placed], tensors: Mapping[str, torch.Tensor],
              mapped: Mapped) -> None:
        if run[1]:
            copy_in(_bytes_of(self._shared(run)), placed, tensors)

    def writable(self, run: tuple[int, int], placed: Sequence[Placed], mapped: Mapped,
                 when_gone: Callable[[weakref.ref], object]) -> dict[str, torch.Tensor]:
        if not run[1]:
            return _tensors(None, placed)
        window = self._shared(run)
        mapped.watch(window, when_gone)
        return _tensors(window, placed)

    def finish(self) -> bool:
        return True  # what the host wrote is there

    def views(self, run: tuple[int, int], placed: Sequence[Placed], how: str, mapped: Mapped,
              when_gone: Callable[[weakref.ref], object]) -> dict[str, torch.Tensor]:
        if not run[1]:
            return _tensors(None, placed)
        at = self._arena_at + run[0]
        if how == PRIVATE:
            mapped.nbytes = run[1]
            window = self._segment.private(at, run[1], mapped.addresses)
        else:
            window = self._segment.readonly(at, run[1])
        mapped.watch(window, when_gone)
        return _tensors(window, placed)

    def _shared(self, run: tuple[int, int]) -> Window:
        return self._segment.shared(self._arena_at + run[0], run[1])


def _tensors(window: Window | None, placed: Sequence[Placed]) -> dict[str, torch.Tensor]:
    run_bytes = window.nbytes if window is not None else 0
    return {tensor.name: view(window, run_bytes, tensor) for tensor in placed}


def _bytes_of(window: Window) -> torch.Tensor:
    return torch.frombuffer(window, dtype=torch.uint8, count=window.nbytes)
