"""Bytes at an address as a torch tensor whose storage keeps an owner alive.

Both ways let go of the owner in C, whatever is going on just then. (A DLPack capsule made by hand needs a deleter of
ours; as a Python callback that runs while an exception is unwinding, which ends the process.)
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import TransportUnavailable
from ..segment import Window


def host_bytes(address: int, nbytes: int, owner: object) -> torch.Tensor:
    """uint8 tensor of `nbytes` > 0 in host memory."""
    return torch.frombuffer(Window.at(address, nbytes, owner), dtype=torch.uint8, count=nbytes)


def device_bytes(ordinal: int, address: int, nbytes: int, owner: object) -> torch.Tensor:
    """uint8 tensor of `nbytes` > 0 in the memory of a CUDA device."""
    tensor = torch.as_tensor(_Exporter(address, nbytes, owner), device=f"cuda:{ordinal}")
    if tensor.data_ptr() != address:
        raise TransportUnavailable(f"torch made a copy of device memory at {address:#x} instead of a view of it")
    return tensor


class _Exporter:
    """An array of bytes by the CUDA array interface, version 3."""

    def __init__(self, address: int, nbytes: int, owner: object):
        self._owner = owner
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3}
