"""Laws of tensors: what comes out is bit-equal to what went in, descriptors are never trusted, refusal comes first."""

import math
import struct
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from shmkv import descriptors, tensors
from shmkv.descriptors import DTYPE_CODES, Placed
from shmkv.errors import FormatMismatch, InvalidTensor, SegmentBroken, TransportUnavailable
from shmkv.tensors import Spec, copy_in, decode, encode, place, view

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")

DTYPES = [getattr(torch, name) for name in DTYPE_CODES if hasattr(torch, name)]
dtypes = st.sampled_from(DTYPES)


def random_bits(shape, dtype, seed=0):
    """A contiguous tensor of random bits: NaN payloads, signed zeros, bools that are neither 0 nor 1."""
    generator = torch.Generator().manual_seed(seed)
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.empty(shape, dtype=dtype)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def bits(tensor):
    """The elements' bytes in logical order, by way of NumPy and not of the code under test."""
    tensor = tensor.detach()
    if not tensor.numel():
        return b""
    itemsize = tensor.dtype.itemsize
    strides = [stride * itemsize if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    storage = bytes(tensor.untyped_storage())
    return np.ndarray(tensor.shape, f"V{itemsize}", storage, tensor.storage_offset() * itemsize, strides).tobytes()


def seen(run, tensor):
    """The view of a placed tensor in a run that is a tensor itself."""
    return view(run.numpy(), run.numel(), tensor)


def carried(named):
    """What comes out of a fresh run that is surrounded by guard bytes, by way of the descriptor blob."""
    placed, run_bytes = place(named)
    arena = torch.full((run_bytes + 512,), 0xA5, dtype=torch.uint8)
    run = arena[256 : 256 + run_bytes]
    copy_in(run, placed, named)
    assert (arena[:256] == 0xA5).all() and (arena[256 + run_bytes :] == 0xA5).all()
    return {tensor.name: seen(run, tensor) for tensor in decode(encode(placed), run_bytes)}


def check_equal(out, source):
    assert (out.dtype, out.shape, bits(out)) == (source.dtype, source.shape, bits(source))


# ---------------------------------------------------------------- dtypes

def test_every_dtype_has_a_code_or_is_quantised():
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    quantised = {dtype for dtype in found if str(dtype).startswith(("torch.qint", "torch.quint"))}
    assert found - quantised == set(DTYPES)
    assert len(set(DTYPE_CODES.values())) == len(DTYPE_CODES) and 0 not in DTYPE_CODES.values()


def test_codes_are_never_renumbered():
    lasting = {"bool": 1, "uint8": 2, "int64": 9, "float16": 10, "bfloat16": 11, "float32": 12, "complex128": 16,
               "float8_e4m3fn": 17, "float8_e5m2": 19, "float4_e2m1fn_x2": 22, "bits8": 23, "uint1": 28,
               "int7": 41}  # fmt: skip
    assert lasting.items() <= DTYPE_CODES.items()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4), (2, 3, 4), (0,), (3, 0, 2)], ids=str)
def test_each_dtype_comes_back_bit_for_bit(dtype, shape):
    source = random_bits(shape, dtype)
    named = {"plain": source}
    if len(shape) > 1:
        named |= {"transposed": source.transpose(0, 1), "sliced": source[:, ::2], "expanded": source[:1].expand(shape)}
    for name, out in carried(named).items():
        check_equal(out, named[name])


def test_the_comparison_sees_a_payload_bit_and_the_sign_of_zero():
    quiet, other = (torch.tensor([word], dtype=torch.int32).view(torch.float32) for word in (0x7FC00000, 0x7FC00001))
    assert bits(quiet) != bits(other) and bits(torch.tensor(0.0)) != bits(torch.tensor(-0.0))
    check_equal(carried({"a": other})["a"], other)
    with pytest.raises(AssertionError):
        check_equal(quiet, other)


# ---------------------------------------------------------------- layouts

@st.composite
def sources(draw):
    """A tensor of any dtype, sliced, stepped, offset, permuted, expanded, squeezed out of a bigger one."""
    dtype = draw(dtypes)
    tensor = random_bits(draw(st.lists(st.integers(0, 5), max_size=4)), dtype, draw(st.integers(0, 9)))
    for dim in range(tensor.ndim):
        if draw(st.booleans()):
            tensor = tensor[(slice(None),) * dim + (slice(draw(st.integers(0, 2)), None, draw(st.integers(1, 3))),)]
    if draw(st.booleans()):
        tensor = tensor.permute(draw(st.permutations(range(tensor.ndim))))
    if draw(st.booleans()):
        tensor = tensor.unsqueeze(draw(st.integers(0, tensor.ndim)))
    if draw(st.booleans()):
        tensor = tensor.expand([3 if size == 1 else size for size in tensor.shape])
    return tensor


@settings(max_examples=150, deadline=None)
@given(st.lists(sources(), min_size=1, max_size=4))
def test_any_layout_comes_back_bit_for_bit(given_tensors):
    named = {f"t{at}": tensor for at, tensor in enumerate(given_tensors)}
    before = [bits(tensor) for tensor in given_tensors]
    for name, out in carried(named).items():
        check_equal(out, named[name])
    assert [bits(tensor) for tensor in given_tensors] == before


@settings(max_examples=200, deadline=None)
@given(sources())
def test_the_layout_is_the_one_torch_would_keep(source):
    (placed,), _ = place({"a": source})
    kept = torch.empty_like(torch.empty_strided(source.shape, source.stride(), dtype=torch.uint8))
    steps = [at for at, size in enumerate(source.shape) if size != 1]  # a size of 1 takes no step
    if source.numel() and all(kept.stride(at) == source.stride(at) for at in steps):  # torch calls it dense
        assert [placed.strides[at] for at in steps] == [source.stride(at) for at in steps]
    else:
        assert seen(torch.zeros(placed.nbytes, dtype=torch.uint8), placed).is_contiguous()


def test_channels_last_and_transposed_keep_their_order():
    image = random_bits((2, 3, 4, 5), torch.bfloat16).contiguous(memory_format=torch.channels_last)
    matrix = random_bits((3, 4), torch.float32)
    out = carried({"image": image, "transposed": matrix.t(), "sliced": matrix.t()[::2],
                   "odd": matrix.as_strided((1, 4, 3), (10**15, 1, 4))})  # fmt: skip
    assert out["image"].is_contiguous(memory_format=torch.channels_last)
    assert out["image"].stride() == image.stride() and out["transposed"].stride() == (1, 4)
    assert out["sliced"].is_contiguous() and out["odd"].stride()[1:] == (1, 4)


def test_known_hard_views_come_back():
    base = random_bits((9, 6, 4), torch.float32)
    reversed_array = np.arange(24, dtype=np.float64).reshape(4, 6)[::-1, ::-2]
    named = {
        "view": base[3:7].transpose(0, 1)[:, ::2],
        "padded": base[:, :5, :3],
        "overlapping": base.view(-1).unfold(0, 8, 3),
        "diagonal": base.diagonal(),
        "flipped": base.flip(0, 2),
        "reversed": torch.from_numpy(reversed_array.copy()),
        "one size, odd stride": base.as_strided((1, 6), (10**15, 4)),
        "expanded 0-dim": base[0, 0, 0].expand(3, 2),
        "frozen": base.requires_grad_().clone()[1:],
        "parameter": torch.nn.Parameter(torch.ones(2, 3).t()),
    }
    out = carried(named)
    for name, tensor in out.items():
        check_equal(tensor, named[name])
        assert not tensor.requires_grad
    assert out["reversed"].tolist() == reversed_array.tolist()


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128])
def test_lazy_conjugation_and_negation_are_resolved(dtype):
    base = torch.tensor([[1 + 2j, -0.5j, 3], [4j, -5 + 1j, 0]], dtype=torch.complex64).to(dtype)
    named = {"conj": base.conj(), "conj t": base.t().conj()[::2], "neg": base.conj().imag, "both": base.conj().imag.t()}
    assert named["conj"].is_conj() and named["neg"].is_neg()
    for name, out in carried(named).items():
        assert not out.is_conj() and not out.is_neg()
        check_equal(out, named[name].resolve_conj().resolve_neg().clone())
        if "conj" in name:  # control: the bits as they lie are not the value
            assert bits(out) != bits(named[name])


def test_inference_tensors_and_modes_are_plain_bytes():
    with torch.inference_mode():
        source = torch.arange(6.0).view(2, 3).t()
    check_equal(carried({"a": source})["a"], source)
    with torch.inference_mode():
        check_equal(carried({"a": torch.ones(2, 3)})["a"], torch.ones(2, 3))


def test_a_default_device_does_not_reach_the_views():
    with torch.device("meta"):
        (placed,), _ = place({"a": Spec((0, 3), torch.float32)})
        assert seen(torch.empty(0, dtype=torch.uint8, device="cpu"), placed).device.type == "cpu"


# ---------------------------------------------------------------- placing

def test_places_are_aligned_apart_and_in_order():
    named = {"a": torch.zeros(3), "none": torch.zeros(0), "b": Spec((2, 4), torch.bfloat16), "c": torch.zeros(256)}
    placed, run_bytes = place(named)
    assert [(tensor.name, tensor.offset, tensor.nbytes) for tensor in placed] == [
        ("a", 0, 12), ("none", 0, 0), ("b", 256, 16), ("c", 512, 1024)]  # fmt: skip
    assert run_bytes == 1536
    assert place({"a": torch.zeros(0), "b": Spec((5, 0), torch.int8)})[1] == 0


def test_a_placed_tensor_cannot_be_changed():
    (placed,), _ = place({"a": torch.zeros(3)})
    for name in (*Placed._fields, "other"):
        with pytest.raises(AttributeError):
            setattr(placed, name, 1)


def test_a_view_is_zero_copy():
    placed, run_bytes = place({"a": torch.zeros(2, 3)})
    run = torch.zeros(run_bytes, dtype=torch.uint8)
    seen(run, placed[0]).fill_(1.0)
    assert run.view(torch.float32).tolist() == [1.0] * 6
    assert seen(run, placed[0]).data_ptr() == run.data_ptr()


@pytest.mark.parametrize("shape", [(-1,), (True,), (1.0,), ("1",), 5, None, (1,) * 65, (2**62,), (2**40, 2**40, 0)],
                         ids=str)  # fmt: skip
def test_a_spec_without_meaning_is_refused(shape):
    with pytest.raises(InvalidTensor):
        Spec(shape, torch.float32)


def test_a_spec_takes_what_is_a_shape():
    specs = [Spec(shape, torch.int8) for shape in ([2, 3], torch.Size((2, 3)), (np.int64(2), 3), iter((2, 3)))]
    assert set(specs) == {Spec((2, 3), torch.int8)} and all(type(size) is int for spec in specs for size in spec.shape)
    for dtype in (torch.qint8, "float32", np.float32, None, []):
        with pytest.raises(InvalidTensor):
            Spec((2,), dtype)


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (2, 3))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError

    def __repr__(self):
        return "Wrapper()"


class Thin(torch.Tensor):
    pass


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    REFUSED = {
        "from_numpy": np.zeros(3), "list": [1.0], "NoneType": None, "dtype": torch.float32,
        "torch.sparse_coo": torch.eye(2).to_sparse(), "torch.sparse_csr": torch.eye(2).to_sparse_csr(),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "is nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "quantised": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "torch.quint8": torch.zeros(2, dtype=torch.uint8).view(torch.quint8),
        "meta": torch.empty(3, device="meta"), "Wrapper": Wrapper(),
        "2\\*\\*63": torch.zeros(1, dtype=torch.float64).expand(2**30, 2**30),
    }  # fmt: skip
    if torch.backends.mkldnn.is_available():
        REFUSED["mkldnn"] = torch.ones(2, 3).to_mkldnn()


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_carried_is_refused_by_name_and_reason(reason):
    with pytest.raises(InvalidTensor, match=f"(?s)'bad'.*{reason}|{reason}"):
        place({"fine": torch.ones(3), "bad": REFUSED[reason]})


def test_a_device_tensor_is_refused_as_a_matter_of_transport():
    class Elsewhere(Thin):
        device = torch.device("xpu", 1)

    with pytest.raises(TransportUnavailable, match="'bad'.*xpu:1"):
        place({"bad": torch.ones(2).as_subclass(Elsewhere)})
    assert place({"fine": torch.ones(2).as_subclass(Thin)})[1] == 8  # control: the subclass is not what is refused


@pytest.mark.parametrize("named", [
    {}, [torch.ones(1)], None, torch.ones(1), {"": torch.ones(1)}, {1: torch.ones(1)}, {b"a": torch.ones(1)},
    {"\ud800": torch.ones(1)}, {"x" * 256: torch.ones(1)}, {"é" * 128: torch.ones(1)},
    dict.fromkeys(map(str, range(65536)), Spec((), torch.int8)),
    {"a": Spec((2**62,), torch.int8), "b": Spec((2**62,), torch.int8)},
], ids=range(12))  # fmt: skip
def test_names_and_numbers_of_tensors_are_limited(named):
    with pytest.raises(InvalidTensor):
        place(named)


def test_the_limits_themselves_are_fine():
    for named in (
        {"x" * 255: Spec((), torch.int8), "é\0": Spec((1,) * 64, torch.int8), "big": Spec((2**62,), torch.int8)},
        dict.fromkeys(map(str, range(65535)), Spec((), torch.int8)),
    ):
        placed, run_bytes = place(named)
        assert decode(encode(placed), run_bytes) == placed


def test_more_than_four_gib_are_counted_exactly():
    placed, run_bytes = place({"a": Spec((2**31 + 1,), torch.int8), "b": Spec((2**32 + 4096,), torch.int16)})
    assert (placed[1].offset, run_bytes) == (2**31 + 256, 2**31 + 256 + 2**33 + 8192)
    assert decode(encode(placed), run_bytes) == placed


# ---------------------------------------------------------------- copying: one pass, all or nothing

class Operations(TorchDispatchMode):
    """Notes which operations run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex64, torch.complex128])
def test_each_tensor_is_copied_once_without_a_temporary(dtype):
    base = random_bits((4, 6, 2), dtype)
    named = {"plain": base, "transposed": base.transpose(0, 1), "sliced": base[:, ::2]}
    named["expanded"] = base[:1].expand(3, 6, 2)
    placed, run_bytes = place(named)
    run = torch.zeros(run_bytes, dtype=torch.uint8)
    with Operations() as operations:
        copy_in(run, placed, named)
    assert operations.names.count("copy_") == len(named)
    assert set(operations.names) <= {"copy_", "detach", "alias", "slice", "view", "as_strided", "view_as_real"}
    with Operations() as operations:
        base.transpose(0, 1).contiguous()
    assert "clone" in operations.names  # control: a temporary is noticed


@pytest.mark.parametrize("changed", [torch.ones(4), torch.ones(3, dtype=torch.int32), torch.ones(3, 1), [1, 2, 3],
                                     torch.empty(3, device="meta")], ids=str)  # fmt: skip
def test_a_tensor_that_changed_after_placing_is_refused_before_any_copy(changed):
    placed, run_bytes = place({"a": torch.ones(3), "b": torch.ones(3)})
    run = torch.zeros(run_bytes, dtype=torch.uint8)
    with pytest.raises(InvalidTensor, match="'b'"):
        copy_in(run, placed, {"a": torch.ones(3), "b": changed})
    with pytest.raises(InvalidTensor, match="'b'"):
        copy_in(run, placed, {"a": torch.ones(3)})
    assert not run.any()
    copy_in(run, placed, {"a": torch.ones(3), "b": torch.ones(3)})
    assert run.any()  # control


def test_a_short_run_is_never_left():
    placed, run_bytes = place({"a": torch.ones(3), "b": torch.ones(3)})
    arena = torch.zeros(1024, dtype=torch.uint8)
    with pytest.raises(SegmentBroken):
        copy_in(arena[: run_bytes - 1], placed, {"a": torch.ones(3), "b": torch.ones(3)})
    with pytest.raises(SegmentBroken):
        seen(arena[: run_bytes - 1], placed[1])
    assert not arena.any() and seen(arena[:run_bytes], placed[1]).shape == (3,)


# ---------------------------------------------------------------- descriptors

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)


@settings(deadline=None)
@given(st.dictionaries(names, sources() | st.builds(Spec, st.lists(st.integers(0, 9), max_size=4), dtypes),
                       min_size=1, max_size=5))  # fmt: skip
def test_a_descriptor_comes_back(named):
    placed, run_bytes = place(named)
    blob = encode(placed)
    assert decode(blob, run_bytes) == decode(memoryview(blob), run_bytes) == placed
    assert len(blob) % 8 == 0
    if run_bytes:
        with pytest.raises(SegmentBroken):
            decode(blob, run_bytes - 1)


def test_a_descriptor_is_the_declared_words():
    (placed,), _ = place({"key": torch.zeros(2, 4, dtype=torch.bfloat16)})
    words = (1, 3) + (DTYPE_CODES["bfloat16"], 0, 0, 16, 2, 3) + (2, 4) + (4, 1)
    assert encode([placed]) == struct.pack("=12Q", *words) + b"key\0\0\0\0\0"
    other = placed._replace(region=7, offset=12345)
    assert decode(encode([other]), 0) == [other]  # another region's bounds are not the run's


SOUND = place({"a": torch.zeros(2, 3, 4).permute(2, 0, 1), "bc": torch.zeros(4, 0), "d": Spec((), torch.int8)})
ODD = [0, 1, 2, 3, 7, 8, 64, 65, 255, 256, 512, 2**31, 2**32, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 256, 2**64 - 1]


def check_within(placed, run_bytes):
    """Whatever a decoder lets pass lies in the run and can be seen as a tensor."""
    taken = []
    for tensor in placed:
        assert tensor.dtype in DTYPES and 1 <= len(tensor.name.encode()) <= 255
        assert tensor.nbytes == math.prod(tensor.shape) * tensor.dtype.itemsize
        if tensor.nbytes and tensor.region == 0:
            reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))
            assert (reach + 1) * tensor.dtype.itemsize <= tensor.nbytes
            assert tensor.offset % 256 == 0 and tensor.offset + tensor.nbytes <= run_bytes
            taken.append((tensor.offset, tensor.offset + tensor.nbytes))
            seen(torch.zeros(run_bytes, dtype=torch.uint8), tensor)
    assert all(one[1] <= other[0] for one, other in zip(sorted(taken), sorted(taken)[1:], strict=False))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_descriptors_are_refused_or_stay_within_the_run(data):
    placed, run_bytes = SOUND
    blob = bytearray(encode(placed))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(blob) // 8 - 1))
        struct.pack_into("=Q", blob, 8 * at, data.draw(st.sampled_from(ODD) | st.integers(0, 48)))
    blob = blob[: data.draw(st.sampled_from([len(blob), len(blob), len(blob) - 8, len(blob) - 1]))]
    try:
        out = decode(bytes(blob), run_bytes)
    except SegmentBroken:
        return
    check_within(out, run_bytes)
    assert encode(out) == blob


@settings(max_examples=300)
@given(st.binary(max_size=200)
       | st.lists(st.sampled_from(ODD), max_size=24).map(lambda w: struct.pack(f"={len(w)}Q", *w)))  # fmt: skip
def test_hostile_descriptors_are_refused_or_stay_within_the_run(blob):
    try:
        check_within(decode(blob, 4096), 4096)
    except SegmentBroken:
        pass


def damaged(**changes):
    return encode([Placed("a", torch.float32, (2, 3), (3, 1), 0, 24)._replace(**changes)])


@pytest.mark.parametrize("blob", [
    damaged(offset=128), damaged(offset=256), damaged(nbytes=28), damaged(nbytes=0), damaged(shape=(2, 4)),
    damaged(strides=(1, 1)), damaged(strides=(0, 1)), damaged(strides=(4, 1)), damaged(strides=(2**63, 1)),
    damaged(strides=(3, 1), shape=(2**62, 2**62), nbytes=0), damaged(shape=(1, 6), strides=(25, 1)),
    damaged(shape=(2**40, 2**40, 0), strides=(0, 0, 1), nbytes=0),
    damaged(shape=(2**40, 2**40, 0), strides=(2**40, 1, 1), nbytes=0),
    damaged(shape=(0,), strides=(1,), nbytes=0, offset=256),
    damaged(name=""), damaged(name="a" * 256), damaged(region=1, offset=2**63 - 24),
    damaged() + bytes(8), damaged()[:-8],
    damaged()[:-1] + b"x", damaged().replace(b"a\0", b"\xff\0"), b"", bytes(16), bytes(64),
    struct.pack("=2Q", 2**64 - 1, 0) + bytes(100 * 8), struct.pack("=2Q", 1, 2**64 - 1) + bytes(100 * 8),
    encode([Placed("a", torch.int8, (1,), (1,), 0, 1), Placed("a", torch.int8, (1,), (1,), 256, 1)]),
    encode([Placed("a", torch.int8, (1,), (1,), 256, 1), Placed("b", torch.int8, (1,), (1,), 0, 1)]),
    encode([Placed("a", torch.int8, (300,), (1,), 0, 300), Placed("b", torch.int8, (1,), (1,), 256, 1)]),
], ids=range(29))  # fmt: skip
def test_each_inconsistency_is_found(blob):
    with pytest.raises(SegmentBroken):
        decode(blob, 279 if len(blob) < 128 else 4096)
    decode(damaged(), 279)  # control: undamaged, it passes


def test_a_dtype_of_a_newer_torch_is_named(monkeypatch):
    code = DTYPE_CODES["float4_e2m1fn_x2"]
    blob = bytearray(damaged())
    struct.pack_into("=Q", blob, 16, code)
    monkeypatch.delitem(tensors._DTYPES, code, raising=False)
    with pytest.raises(FormatMismatch, match="float4_e2m1fn_x2"):
        decode(bytes(blob), 279)
    struct.pack_into("=Q", blob, 16, 10**6)
    with pytest.raises(SegmentBroken, match="1000000"):
        decode(bytes(blob), 279)


def test_the_bytes_per_element_that_are_known_without_torch_are_torchs():
    for name, nbytes in descriptors.DTYPES.values():
        assert nbytes == getattr(torch, name).itemsize if hasattr(torch, name) else nbytes >= 1, name
