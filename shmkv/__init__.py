"""shmkv: KV-cache tensors from prefill to decode processes on one host, through shared memory.

`create` a buffer in one process, `attach` to it by name in others, `insert` or `reserve` under a prompt's token ids,
`drop_select` or `select` by them. See README.md.

Names are loaded on first use: looking into a segment must not cost the import of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import (
    ArenaFull,
    Cancelled,
    ClosedError,
    FormatMismatch,
    InheritedHandle,
    InvalidArgument,
    InvalidName,
    InvalidNamespace,
    InvalidTensor,
    InvalidTokens,
    NoSuchSegment,
    NotOurs,
    ReentryError,
    SegmentBroken,
    SegmentExists,
    ShmkvError,
    StorageFull,
    TableFull,
    TimedOut,
    TooLarge,
    TransportUnavailable,
)

if TYPE_CHECKING:
    from .buffer import KVBuffer, Stats
    from .handles import Hit, Miss, Reserved
    from .keys import Key, key
    from .opening import attach, create
    from .signals import Signal, SignalKind
    from .tensors import Spec

__version__ = "0.1.0"
__all__ = [
    "ArenaFull", "Cancelled", "ClosedError", "FormatMismatch", "Hit", "InheritedHandle", "InvalidArgument",
    "InvalidName", "InvalidNamespace", "InvalidTensor", "InvalidTokens", "KVBuffer", "Key", "Miss", "NoSuchSegment",
    "NotOurs", "ReentryError", "Reserved", "SegmentBroken", "SegmentExists", "ShmkvError", "Signal", "SignalKind",
    "Spec", "Stats", "StorageFull", "TableFull", "TimedOut", "TooLarge", "TransportUnavailable", "attach", "create",
    "key",
]

_HOMES = {
    "KVBuffer": "buffer", "Stats": "buffer", "Hit": "handles", "Miss": "handles", "Reserved": "handles",
    "Key": "keys", "key": "keys", "attach": "opening", "create": "opening", "Signal": "signals",
    "SignalKind": "signals", "Spec": "tensors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return __all__
