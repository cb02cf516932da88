"""What: host tensors in the shared-memory arena: one copy in (or none, `writable`), zero-copy views out.

Map: a run is whole pages of the payload arena; the tensors in it are 256-byte aligned.

States: none of its own. A view's window lives as long as the last tensor derived from it; then it is unmapped (if it
was mapped for this lease alone) and `on_gone` is called.

Guarantees: by default each lease maps its own run copy-on-write, so that an in-place write by one reader goes to its
own pages and reaches neither another reader nor a redelivered entry. `readonly` shows the lasting shared mapping: warm
from the start, a write faults. (One private mapping of the whole arena would not do: a second lease would read the
first one's writes, and a page once written would hide the next entry's bytes.)

Not guaranteed: that a producer keeps its hands off tensors it got from `writable` after sealing.

If a party dies here: the kernel unmaps; nothing is recorded here.

Sync points: none; the entry's state orders the bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch

from ..segment import Segment, Window, unmap
from ..sync import outside
from ..tensors import Placed, copy_in, view
from . import PRIVATE


class HostTransport:
    name = "host"

    def __init__(self, segment: Segment):
        self._segment = segment
        self._arena_at = segment.layout.arena.at

    def write(self, run: tuple[int, int], placed: Sequence[Placed], tensors: Mapping[str, torch.Tensor]) -> None:
        if run[1]:
            copy_in(_bytes_of(self._shared(run)), placed, tensors)

    def writable(self, run: tuple[int, int], placed: Sequence[Placed],
                 on_gone: Callable[[], object]) -> dict[str, torch.Tensor]:
        return self._tensors(run, placed, self._shared, on_gone)

    def views(self, run: tuple[int, int], placed: Sequence[Placed], how: str,
              on_gone: Callable[[], object]) -> dict[str, torch.Tensor]:
        return self._tensors(run, placed, self._private if how == PRIVATE else self._readonly, on_gone)

    def _tensors(self, run: tuple[int, int], placed: Sequence[Placed], window_of: Callable[[tuple[int, int]], Window],
                 on_gone: Callable[[], object]) -> dict[str, torch.Tensor]:
        if not run[1]:
            outside(on_gone)
            return {tensor.name: torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in placed}
        window = window_of(run)
        window.on_gone = functools.partial(self._end, window.on_gone, on_gone)
        base = _bytes_of(window)
        return {tensor.name: view(base, tensor) for tensor in placed}

    def _end(self, unmap_window: Callable[[], object] | None, on_gone: Callable[[], object]) -> None:
        if self._segment.inherited:
            return
        if unmap_window is not None:
            outside(unmap_window)
        outside(on_gone)

    def _private(self, run: tuple[int, int]) -> Window:
        window = self._segment.private(self._arena_at + run[0], run[1])
        window.on_gone = functools.partial(unmap, window.address, window.nbytes)
        return window

    def _readonly(self, run: tuple[int, int]) -> Window:
        return self._segment.readonly(self._arena_at + run[0], run[1])

    def _shared(self, run: tuple[int, int]) -> Window:
        return self._segment.shared(self._arena_at + run[0], run[1])


def _bytes_of(window: Window) -> torch.Tensor:
    return torch.frombuffer(window, dtype=torch.uint8, count=window.nbytes)
