"""Bytes at an address as a torch tensor that keeps an owner alive: a DLPack capsule made by hand.

The capsule always says uint8 in one dimension: torch then views it as any dtype it has, also those that DLPack has no
code for. Layout of the structs: dlpack.h, version 0 (DLManagedTensor).
"""

from __future__ import annotations

import ctypes

import torch

_UINT = 1


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("ordinal", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device", _Device), ("n_dims", ctypes.c_int32), ("dtype", _DataType),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
                ("byte_offset", ctypes.c_uint64)]


class _Managed(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_Managed._fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_live: dict[int, tuple[_Managed, ctypes.Array, object]] = {}
"""what torch was given and has not let go of yet, by address"""


def byte_tensor(device: tuple[int, int], address: int, nbytes: int, owner: object) -> torch.Tensor:
    """uint8 tensor of `nbytes` > 0 at `address` on (DLPack device type, ordinal); its storage keeps `owner`."""
    shape = (ctypes.c_int64 * 1)(nbytes)
    managed = _Managed()
    managed.tensor.data, managed.tensor.device = address, _Device(*device)
    managed.tensor.n_dims, managed.tensor.dtype = 1, _DataType(_UINT, 8, 1)
    managed.tensor.shape = shape
    managed.deleter = _let_go
    _live[ctypes.addressof(managed)] = managed, shape, owner
    try:
        return torch.from_dlpack(_new_capsule(ctypes.addressof(managed), b"dltensor", None))
    except BaseException:
        _live.pop(ctypes.addressof(managed), None)
        raise


_let_go = _Deleter(_live.pop)
"""a bound C method, so that no interrupt can come between the call and its effect"""
