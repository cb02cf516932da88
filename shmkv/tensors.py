"""Tensors as bytes in a run: what may be carried, where each tensor lies, and the copy in and the view out."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from . import descriptors
from .descriptors import (
    ALIGNMENT_BYTES,
    DTYPE_CODES,
    LIMIT,
    MAX_DIMS,
    MAX_NAME_BYTES,
    MAX_TENSORS,
    Placed,
    contiguous,
    is_dense,
    numel,
    parse,
)
from .errors import InvalidTensor, SegmentBroken, TransportUnavailable

_QUANTISED = {getattr(torch, name, None) for name in ("qint8", "quint8", "qint32", "quint4x2", "quint2x4")} - {None}
_CODES = {getattr(torch, name): code for name, code in DTYPE_CODES.items() if hasattr(torch, name)}
_DTYPES = {code: (dtype, dtype.itemsize) for dtype, code in _CODES.items()}  # code -> dtype, bytes per element
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Spec:
    """Shape and dtype of a tensor to come; it will be contiguous, on the host or on `device` ("cuda:0", a UUID).

    Raises InvalidTensor for a negative or non-integer size, more than 64 of them, a dtype that cannot be carried, or
    2**63 bytes and more (a size of 0 counted as 1).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str | None = None

    def __post_init__(self):
        object.__setattr__(self, "shape", _checked_shape(self.shape))
        named = None if self.device is None or str(self.device) == "cpu" else str(self.device)
        object.__setattr__(self, "device", named)
        _check_dtype(self.dtype)
        _checked_contiguous(self.shape, self.dtype)


def place(tensors: Mapping[str, "torch.Tensor | Spec"]) -> tuple[list[Placed], int]:
    """Where each tensor goes in a run, in the mapping's order, 256-byte aligned; and the run's size in bytes.

    A dense tensor keeps the order of its strides (transposed, channels_last); all others become contiguous.

    Raises InvalidTensor naming the tensor and why it cannot be carried; TransportUnavailable for a tensor on a device
    that is neither the host nor a CUDA device.
    """
    if not isinstance(tensors, Mapping):
        raise InvalidTensor(f"kv is a {type(tensors).__name__}, not a mapping of names to tensors",
                            hint='write {"key": key, "value": value}')
    if not 1 <= len(tensors) <= MAX_TENSORS:
        raise InvalidTensor(f"{len(tensors)} tensors: an entry holds 1 to {MAX_TENSORS}")
    placed = []
    run_bytes = 0
    for name, source in tensors.items():
        _check_name(name)
        dtype, shape, strides = _described(name, source)
        nbytes = numel(shape) * dtype.itemsize
        offset = -(-run_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES if nbytes else 0
        placed.append(Placed(name, dtype, shape, strides, offset, nbytes))
        run_bytes = offset + nbytes if nbytes else run_bytes
    if run_bytes >= LIMIT:
        raise InvalidTensor(f"the tensors take {run_bytes} bytes together, 2**63 or more")
    return placed, run_bytes


def encode(placed: list[Placed]) -> bytes:
    """The descriptor blob of tensors that `place` returned."""
    return descriptors.encode(placed, _CODES)


def decode(data: "bytes | memoryview", run_bytes: int) -> list[Placed]:
    """The tensors of a blob, as `descriptors.parse` gives them, with torch's dtypes."""
    return parse(data, run_bytes, _DTYPES)


def copy_in(destination: torch.Tensor, placed: list[Placed], tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy each tensor straight into its place in the run `destination` (uint8, 1-D, 16-byte aligned storage offset).

    One pass and bit for bit: NaN payloads, signed zeros and foreign bools arrive as they are; lazy conjugation is
    resolved. Other Python threads run meanwhile.

    Before any copy, raises InvalidTensor when a tensor is no longer what was placed, SegmentBroken when
    the run is too short.
    """
    sources = [plain(tensors.get(tensor.name), tensor) for tensor in placed]
    for tensor in placed:
        check_fits(destination.numel(), tensor)
    for tensor, source in zip(placed, sources, strict=True):
        if tensor.nbytes:
            _copy(destination[tensor.offset : tensor.offset + tensor.nbytes], tensor, source)


def view(run: Any, run_bytes: int, placed: Placed) -> torch.Tensor:
    """The tensor that lies in a run of `run_bytes`, which has the buffer protocol: zero-copy, keeps `run` alive.

    Raises SegmentBroken when the run is too short. A tensor of no bytes is a new, empty one.
    """
    if not placed.nbytes:
        return torch.empty(placed.shape, dtype=placed.dtype, device="cpu")
    check_fits(run_bytes, placed)
    flat = torch.frombuffer(run, dtype=placed.dtype, count=placed.nbytes // placed.dtype.itemsize, offset=placed.offset)
    return flat if len(placed.shape) == 1 else flat.as_strided(placed.shape, placed.strides)


def bit_clone(source: torch.Tensor) -> torch.Tensor:
    """A copy, bit for bit, whatever its dtype: with the same strides if the tensor is dense, else contiguous."""
    if not source.is_contiguous() and not is_dense(tuple(source.shape), tuple(source.stride())):
        clone = torch.empty(source.shape, dtype=source.dtype, device=source.device)
        bit_copy(clone, source)
        return clone
    flat = source.as_strided((source.numel(),), (1,)).view(torch.uint8)
    return flat.clone().view(source.dtype).as_strided(source.shape, source.stride())


def bit_copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy into a tensor of the same shape and dtype, bit for bit, whatever its strides."""
    if source.dtype == torch.complex128:  # no integer is as wide
        torch.view_as_real(target).view(torch.int64).copy_(torch.view_as_real(source).view(torch.int64))
    else:
        integer = _INTEGERS[source.dtype.itemsize]
        target.detach().view(integer).copy_(source.view(integer))


def plain(source: Any, tensor: Placed) -> torch.Tensor:
    """The source without autograd and subclass. Raises InvalidTensor unless it still is what was placed."""
    _check_tensor(tensor.name, source)
    if source.dtype != tensor.dtype or tuple(source.shape) != tensor.shape:
        raise InvalidTensor(
            f"tensor {tensor.name!r} is {source.dtype} {tuple(source.shape)}, placed as {tensor.dtype} {tensor.shape}"
        )
    if type(source) is torch.Tensor and not source.requires_grad:
        return source
    return source.detach().as_subclass(torch.Tensor)


def is_flat(source: torch.Tensor, tensor: Placed) -> bool:
    """Whether a copy of `tensor.nbytes` from where its data starts is a copy of the tensor as it was placed."""
    return not (source.is_conj() or source.is_neg()) and _same_layout(tensor, source.stride())


def check_fits(run_bytes: int, placed: Placed) -> None:
    """Raise SegmentBroken unless the tensor ends within a run of `run_bytes`."""
    # the exporter of the buffer, or its storage, may be longer than the run
    if placed.offset + placed.nbytes > run_bytes:
        end = placed.offset + placed.nbytes
        raise SegmentBroken(f"tensor {placed.name!r} ends at byte {end} of a run of {run_bytes}")


def check_target(name: str, target: Any) -> None:
    """Raise InvalidTensor unless `target` is a tensor whose elements all lie at places of their own."""
    _check_tensor(name, target)
    if any(stride == 0 and size > 1 for size, stride in zip(target.shape, target.stride(), strict=True)):
        raise InvalidTensor(f"target {name!r} is expanded: its elements share their places", hint="clone() it")


# ---------------------------------------------------------------- copying

def _copy(destination: torch.Tensor, tensor: Placed, source: torch.Tensor) -> None:
    if source.is_conj() or source.is_neg():
        destination.view(tensor.dtype).as_strided(tensor.shape, tensor.strides).copy_(source)
    elif _same_layout(tensor, source.stride()):
        n_elements = tensor.nbytes // tensor.dtype.itemsize
        flat, widest = source.as_strided((n_elements,), (1,)), _widest(source, tensor.nbytes)
        destination.view(widest).copy_(flat.view(widest))
    else:
        bit_copy(destination.view(tensor.dtype).as_strided(tensor.shape, tensor.strides), source)


def _widest(source: torch.Tensor, nbytes: int) -> torch.dtype:
    """The widest integer that the bytes are a whole row of: torch starts threads by the number of elements."""
    offset = source.storage_offset() * source.dtype.itemsize
    return torch.int64 if not (offset | nbytes) & 7 else torch.uint8


def _same_layout(tensor: Placed, strides: tuple[int, ...]) -> bool:
    """Same order in memory: a size of 1 takes no step, so its stride does not count."""
    return all(ours == theirs or n == 1 for n, ours, theirs in zip(tensor.shape, tensor.strides, strides, strict=True))


# ---------------------------------------------------------------- what may be carried

def _described(name: str, source: Any) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]:
    if isinstance(source, Spec):
        return source.dtype, source.shape, contiguous(source.shape)[0]
    _check_tensor(name, source)
    shape = tuple(source.shape)
    in_order = _checked_contiguous(shape, source.dtype)
    if source.is_contiguous():
        return source.dtype, shape, in_order
    strides = tuple(source.stride())
    if not is_dense(shape, strides):
        return source.dtype, shape, in_order
    most = source.numel()
    return source.dtype, shape, tuple(min(stride, most) for stride in strides)  # only a size of 1 can have more


def _check_tensor(name: str, source: Any) -> None:
    if not isinstance(source, torch.Tensor):
        hint = "torch.from_numpy(array)" if type(source).__module__ == "numpy" else "pass a torch.Tensor or shmkv.Spec"
        raise InvalidTensor(f"tensor {name!r} is a {type(source).__module__}.{type(source).__name__}", hint=hint)
    if type(source) is torch.Tensor and source.is_cpu and source.layout is torch.strided and not source.is_nested:
        if source.dtype in _CODES:
            return  # what nearly all are, told in few steps
    reason, hint = _why_not(source)
    if reason:
        raise InvalidTensor(f"tensor {name!r} {reason}", hint=hint)
    if source.device.type not in ("cpu", "cuda"):
        raise TransportUnavailable(f"tensor {name!r} is on {source.device}: only the host's and CUDA devices' can be "
                                   f"carried", hint="tensor.cpu()")


def _why_not(source: torch.Tensor) -> tuple[str, str]:
    """(reason, knob) why a tensor is not a plain array of bytes; ("", "") if it is."""
    if source.is_nested:
        return "is nested", "insert its parts, or its values() and offsets()"
    if source.layout != torch.strided:
        return f"has the layout {source.layout}", "to_dense(), or insert its parts"
    if source.is_quantized or source.dtype in _QUANTISED:
        return f"is quantised ({source.dtype})", "insert int_repr() and the scales, or dequantize()"
    if source.is_meta:
        return "is a meta tensor: it has no bytes", "Spec(tensor.shape, tensor.dtype) describes it"
    if type(source).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"is a {type(source).__name__}, whose values lie elsewhere", "insert the plain tensors inside it"
    if source.dtype not in _CODES:
        return f"has a dtype without a code ({source.dtype})", "view(torch.uint8)"
    return "", ""


def _check_dtype(dtype: Any) -> None:
    if not isinstance(dtype, torch.dtype):
        raise InvalidTensor(f"{dtype!r} is no torch.dtype")
    if dtype in _QUANTISED:
        raise InvalidTensor(f"{dtype} is a quantised dtype", hint="use its integer dtype, and carry the scales")
    if dtype not in _CODES:
        raise InvalidTensor(f"{dtype} has no code", hint="use torch.uint8")


def _checked_shape(shape: Any) -> tuple[int, ...]:
    try:
        shape = tuple(shape)
        sizes = tuple(map(operator.index, shape))
    except TypeError:
        raise InvalidTensor(f"shape {shape!r} is not a row of integers") from None
    if any(size < 0 for size in sizes) or any(isinstance(size, bool) for size in shape):
        raise InvalidTensor(f"shape {shape!r} has a size that is negative or a bool")
    if len(sizes) > MAX_DIMS:
        raise InvalidTensor(f"a shape of {len(sizes)} dimensions, more than {MAX_DIMS}")
    return sizes


def _check_name(name: Any) -> None:
    try:
        n_bytes = len(str.encode(name))
    except (TypeError, UnicodeEncodeError):
        raise InvalidTensor(f"tensor name {name!r} is no valid str") from None
    if not 1 <= n_bytes <= MAX_NAME_BYTES:
        raise InvalidTensor(f"tensor name {name[:40]!r} of {n_bytes} bytes: 1 to {MAX_NAME_BYTES} are possible")


# ---------------------------------------------------------------- shapes

def _checked_contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    strides, span = contiguous(shape)
    if span * dtype.itemsize >= LIMIT:
        raise InvalidTensor(f"shape {shape} of {dtype} takes 2**63 bytes or more")
    return strides
