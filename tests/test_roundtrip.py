"""What comes out of a buffer is bit for bit what went in: every dtype, shape, stride, offset, NaN."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shmkv
from shmkv.descriptors import DTYPE_CODES

DTYPES = [getattr(torch, name) for name in DTYPE_CODES if hasattr(torch, name)]
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WAYS = {"private": {}, "readonly": {"readonly": True}, "copy": {"copy": True}}
SUB_BYTE = [f"{sign}int{n}" for sign in ("", "u") for n in range(1, 8)]


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as integers of the same width (complex128: pairs of them)."""
    if tensor.dtype == torch.complex128:
        return torch.view_as_real(tensor).view(torch.int64)
    return tensor.view(INTEGERS[tensor.dtype.itemsize])


def patterned(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Any bits at all: NaNs with payloads, infinities, signed zeros, bools that are neither 0 nor 1."""
    numel = math.prod(shape)
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (max(1, numel) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)[:numel].reshape(shape)


def same(out: torch.Tensor, original: torch.Tensor) -> bool:
    return (out.dtype == original.dtype and out.shape == original.shape
            and torch.equal(bits_of(out), bits_of(original)))


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy bit for bit (a clone of bools makes 1 of every other bit pattern; some dtypes have none)."""
    bits = bits_of(tensor).clone()
    return torch.view_as_complex(bits.view(torch.float64)) if tensor.is_complex() and tensor.dtype.itemsize == 16 \
        else bits.view(tensor.dtype)


def through(buffer: shmkv.KVBuffer, tensors: dict[str, torch.Tensor], **how: bool) -> dict[str, torch.Tensor]:
    """Insert, take out, and copy."""
    buffer.insert([1, 2, 3], tensors)
    with buffer.drop_select([1, 2, 3], **how) as hit:
        return {name: copy_of(tensor) for name, tensor in hit.items()}


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


SHAPES = {"none": (0,), "none of many": (3, 0, 2), "scalar": (), "one": (1,), "odd": (7,), "cube": (3, 5, 7)}


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_every_dtype_comes_out_bit_for_bit(kv_buffer, dtype):
    tensors = {name: patterned(dtype, shape, seed=len(name)) for name, shape in SHAPES.items()}
    for way in ("private", "readonly"):
        out = through(kv_buffer, tensors, **WAYS[way])
        assert list(out) == list(tensors)
        for name, tensor in tensors.items():
            assert same(out[name], tensor), (way, name)
    kv_buffer.insert([1], {name: tensors[name] for name in ("none", "none of many")})
    assert kv_buffer.stats().used_bytes == 0
    with kv_buffer.select([1]) as shared, kv_buffer.drop_select([1]) as hit:
        for name in hit:
            assert same(hit[name], tensors[name]) and same(shared[name], tensors[name])
    assert kv_buffer.stats().entries["free"] == 256


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_copies_of_every_dtype_are_bit_for_bit(kv_buffer, dtype):
    tensors = {name: patterned(dtype, shape, seed=len(name)) for name, shape in SHAPES.items()}
    out = through(kv_buffer, tensors, copy=True)
    target = patterned(dtype, (3, 5, 7), 2)
    kv_buffer.insert([1], {"x": tensors["cube"]})
    with kv_buffer.select([1]) as hit:
        hit.copy_to({"x": target})
    assert same(target, tensors["cube"]) and all(same(out[name], tensors[name]) for name in tensors)


NANS = {torch.float16: (torch.int16, [0x7E00, 0x7C01, -0x03FF, 0x7FFF]),
        torch.bfloat16: (torch.int16, [0x7FC0, 0x7F81, -0x007F, 0x7FFF]),
        torch.float32: (torch.int32, [0x7FC00000, 0x7F800001, -0x007FFFFF, 0x7FFFFFFF]),
        torch.float64: (torch.int64, [0x7FF8 << 48, (0x7FF0 << 48) + 1, -(0x0010 << 48) + 1, (1 << 63) - 1])}


@pytest.mark.parametrize("dtype", NANS, ids=str)
def test_quiet_and_signalling_nans_keep_sign_and_payload(kv_buffer, dtype):
    integer, patterns = NANS[dtype]
    nans = torch.tensor(patterns, dtype=integer).view(dtype)
    assert nans.isnan().all()
    strided = torch.stack([nans, nans.flip(0)], dim=1)[:, 0]
    out = through(kv_buffer, {"dense": nans, "strided": strided})
    assert out["dense"].view(integer).tolist() == patterns and out["strided"].view(integer).tolist() == patterns


# ---------------------------------------------------------------- any view of any storage

@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """A tensor made by slicing, stepping, permuting and expanding a contiguous one, at any storage offset."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=5)))
    tensor = patterned(dtype, shape, draw(st.integers(0, 1000)))
    if draw(st.booleans()):  # somewhere in a larger storage
        offset = draw(st.integers(1, 9))
        storage = patterned(dtype, (offset + math.prod(shape) + 3,), draw(st.integers(0, 1000)))
        tensor = storage[offset:offset + math.prod(shape)].view(shape)
    for dim in range(tensor.dim()):
        start = draw(st.integers(0, tensor.shape[dim]))
        if draw(st.integers(0, 3)) == 0:
            tensor = tensor.narrow(dim, start, draw(st.integers(0, tensor.shape[dim] - start)))
        step = draw(st.integers(1, 3))
        tensor = tensor[(slice(None),) * dim + (slice(None, None, step),)]
    tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
    if draw(st.integers(0, 3)) == 0:
        tensor = tensor.unsqueeze(draw(st.integers(0, tensor.dim())))
        sizes = [draw(st.integers(1, 4)) if size == 1 else size for size in tensor.shape]
        tensor = tensor.expand(sizes)
    return tensor


@pytest.mark.kv_timeout(120)
@pytest.mark.parametrize("way", ["private", "readonly", "copy"])
@settings(max_examples=80, deadline=None, database=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(tensors=st.lists(views(), min_size=1, max_size=4))
def test_any_shape_stride_offset_and_expansion_comes_out_bit_for_bit(kv_buffer, tensors, way):
    named = {f"tensor {i}": tensor for i, tensor in enumerate(tensors)}
    originals = {name: copy_of(tensor) for name, tensor in named.items()}
    out = through(kv_buffer, named, **WAYS[way])
    for name, original in originals.items():
        assert same(out[name], original), name
        assert same(named[name], original), f"inserting changed {name}"
    assert kv_buffer.stats().used_bytes == 0 and kv_buffer.problems() == []


def test_a_lazy_conjugate_comes_out_as_its_values(kv_buffer):
    tensor = torch.tensor([1 + 2j, -3 - 0j], dtype=torch.complex64)
    out = through(kv_buffer, {"conjugate": tensor.conj(), "imaginary": tensor.conj().imag})
    assert torch.equal(out["conjugate"], tensor.conj().resolve_conj())
    assert torch.equal(out["imaginary"], tensor.conj().imag.resolve_neg())
