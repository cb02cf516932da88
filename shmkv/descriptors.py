"""Tensor descriptors as they lie in the segment: which bytes of a run are which tensor. No torch is needed: who looks
into a buffer reads them too.

Descriptor blob, native 8-byte words: `n_tensors, name_bytes`, then for each tensor `code, region, offset, nbytes,
n_dims, name_bytes, shape..., strides...`, then all names in UTF-8, zero-padded to words. Region 0 is the entry's run,
r + 1 is region r, in which the tensor lies with strides of any kind. `parse` trusts none of it.
"""

import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from .errors import FormatMismatch, SegmentBroken

ALIGNMENT_BYTES = 256
IN_RUN = 0

# The format: a number once given is never changed or given again. 0 is no dtype.
DTYPE_CODES = {
    "bool": 1, "uint8": 2, "int8": 3, "uint16": 4, "int16": 5, "uint32": 6, "int32": 7, "uint64": 8, "int64": 9,
    "float16": 10, "bfloat16": 11, "float32": 12, "float64": 13, "complex32": 14, "complex64": 15, "complex128": 16,
    "float8_e4m3fn": 17, "float8_e4m3fnuz": 18, "float8_e5m2": 19, "float8_e5m2fnuz": 20, "float8_e8m0fnu": 21,
    "float4_e2m1fn_x2": 22,
    "bits8": 23, "bits16": 24, "bits1x8": 25, "bits2x4": 26, "bits4x2": 27,
    "uint1": 28, "uint2": 29, "uint3": 30, "uint4": 31, "uint5": 32, "uint6": 33, "uint7": 34,
    "int1": 35, "int2": 36, "int3": 37, "int4": 38, "int5": 39, "int6": 40, "int7": 41,
}  # fmt: skip
_WIDE = {2: ("uint16", "int16", "float16", "bfloat16", "bits16"),
         4: ("uint32", "int32", "float32", "complex32"),
         8: ("uint64", "int64", "float64", "complex64"), 16: ("complex128",)}
_ITEM_BYTES = {name: nbytes for nbytes, names in _WIDE.items() for name in names}
DTYPES = {code: (name, _ITEM_BYTES.get(name, 1)) for name, code in DTYPE_CODES.items()}
"""name and bytes per element by code"""

MAX_TENSORS = 65535
MAX_NAME_BYTES = 255
MAX_DIMS = 64
LIMIT = 2**63  # torch counts in signed 64 bits
_HEAD_WORDS = 2
_RECORD_WORDS = 6


class Placed(NamedTuple):
    """One tensor of an entry: in its run (`region` 0) dense, its dimensions in any order; in place in region
    `region - 1` with any strides that are not negative.

    shape and strides count elements; offset and nbytes count bytes, offset from the start of the run or region. A
    tensor of no bytes has offset 0.
    """

    name: str
    dtype: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    nbytes: int
    region: int = IN_RUN

    @property
    def span(self) -> int:
        """Bytes from its first to its last: more than `nbytes` where the strides leave gaps."""
        if not self.nbytes:
            return 0
        return span(self.shape, self.strides) * (self.nbytes // numel(self.shape))


def encode(placed: list[Placed], codes: Mapping[Any, int]) -> bytes:
    """The descriptor blob of placed tensors; `codes`: by dtype."""
    names = [tensor.name.encode() for tensor in placed]
    name_bytes = b"".join(names)
    words = [len(placed), len(name_bytes)]
    for tensor, name in zip(placed, names, strict=True):
        words += codes[tensor.dtype], tensor.region, tensor.offset, tensor.nbytes, len(tensor.shape), len(name)
        words += tensor.shape
        words += tensor.strides
    return struct.pack(f"={len(words)}Q", *words) + name_bytes.ljust(_padded(len(name_bytes)), b"\0")


def parse(data: bytes | memoryview, run_bytes: int, dtypes: Mapping[int, tuple[Any, int]] = DTYPES) -> list[Placed]:
    """The tensors of a blob, `data` being just its bytes, all within a run of `run_bytes`. `dtypes`: by code, what is
    to stand for the dtype, and its bytes per element.

    Where the region is not 0, the caller compares offset and span with the region's size.
    Raises SegmentBroken for bytes that `encode` cannot have written, FormatMismatch for a dtype that `dtypes` lacks.
    """
    blob = bytes(data)  # a copy of our own: what was checked cannot change under us
    if len(blob) < 8 * _HEAD_WORDS or len(blob) % 8:
        raise SegmentBroken(f"a descriptor of {len(blob)} bytes")
    words = struct.unpack(f"={len(blob) // 8}Q", blob)
    n_tensors, n_name_bytes = words[:_HEAD_WORDS]
    names_at = len(words) - (n_name_bytes + 7) // 8  # word index; negative for nonsense
    if not 1 <= n_tensors <= MAX_TENSORS or names_at < _HEAD_WORDS + _RECORD_WORDS * n_tensors:
        raise SegmentBroken(f"a descriptor of {len(blob)} bytes claims {n_tensors} tensors, {n_name_bytes} name bytes")
    placed = []
    at, name_at, end = _HEAD_WORDS, 8 * names_at, 0
    for _ in range(n_tensors):
        if at + _RECORD_WORDS > names_at:
            raise SegmentBroken("a descriptor's tensors run into its names")
        code, region, offset, nbytes, n_dims, name_bytes = words[at : at + _RECORD_WORDS]
        shape_at = at + _RECORD_WORDS
        at = shape_at + 2 * n_dims
        if n_dims > MAX_DIMS or at > names_at or not 1 <= name_bytes <= MAX_NAME_BYTES:
            raise SegmentBroken(f"a descriptor's tensor with {n_dims} dimensions and a name of {name_bytes} bytes")
        shape, strides = words[shape_at : shape_at + n_dims], words[shape_at + n_dims : at]
        dtype = _checked_layout(dtypes.get(code) or _lacking(code), shape, strides, nbytes, region)
        if region == IN_RUN and nbytes:
            if offset < end or offset % ALIGNMENT_BYTES or offset + nbytes > run_bytes:
                raise SegmentBroken(f"a tensor at {offset} of {nbytes} bytes, after {end}, in a run of {run_bytes}")
            end = offset + nbytes
        elif offset + nbytes >= LIMIT or (offset and not nbytes):
            raise SegmentBroken(f"a tensor at {offset} of {nbytes} bytes")
        name = _decoded_name(blob, name_at, name_bytes)
        name_at += name_bytes
        placed.append(Placed(name, dtype, shape, strides, offset, nbytes, region))
    if at != names_at or name_at != 8 * names_at + n_name_bytes or any(blob[name_at:]):
        raise SegmentBroken("a descriptor's names do not fill the rest of it")
    if len({tensor.name for tensor in placed}) != n_tensors:
        raise SegmentBroken("a descriptor with two tensors of one name")
    return placed


def contiguous(shape: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Contiguous strides as torch gives them, and the elements spanned, a size of 0 counted as 1."""
    strides = []
    span = 1
    for size in reversed(shape):
        strides.append(span)
        span *= size or 1
    return tuple(reversed(strides)), span


def is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """True if the elements fill their span without gap or overlap, the dimensions taken in some order."""
    span = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1):
        if stride != span:
            return False
        span *= size
    return True


def numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _padded(n_bytes: int) -> int:
    return -(-n_bytes // 8) * 8


def span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to the last of a tensor that has any."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _checked_layout(kind: tuple[Any, int], shape: tuple[int, ...], strides: tuple[int, ...], nbytes: int,
                    region: int) -> Any:
    """The dtype of a decoded tensor whose shape, strides and bytes agree."""
    dtype, itemsize = kind
    in_order, n_spanned = contiguous(shape)
    n_elements = 0 if 0 in shape else n_spanned
    if n_spanned * itemsize >= LIMIT or nbytes != n_elements * itemsize:
        raise SegmentBroken(f"a tensor of shape {shape} and {itemsize}-byte elements claims {nbytes} bytes")
    if region != IN_RUN and n_elements:
        if any(size > 1 and not stride for size, stride in zip(shape, strides, strict=True)):
            raise SegmentBroken(f"a tensor of shape {shape} with strides {strides}, whose elements share their places")
        if span(shape, strides) * itemsize >= LIMIT:
            raise SegmentBroken(f"a tensor of shape {shape} with strides {strides}, which spans 2**63 bytes or more")
    elif strides != in_order and not (n_elements and max(strides) <= n_elements and is_dense(shape, strides)):
        raise SegmentBroken(f"a tensor of shape {shape} with strides {strides}, which is not dense")
    return dtype


def _lacking(code: int) -> tuple[Any, int]:
    if code in DTYPES:
        hint = "run the same torch in all processes of one segment"
        raise FormatMismatch(f"this torch has no {DTYPES[code][0]}", hint=hint)
    raise SegmentBroken(f"dtype code {code} is unknown")


def _decoded_name(blob: bytes, at: int, n_bytes: int) -> str:
    try:
        return blob[at : at + n_bytes].decode()
    except UnicodeDecodeError:
        raise SegmentBroken("a tensor name that is no UTF-8") from None
