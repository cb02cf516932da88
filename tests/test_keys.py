"""Laws of keys: exact by value, never by hash; namespaces canonical, typed and the same in every process."""

import array
import ctypes
import enum
import itertools
import os
import pickle
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shmkv.keys
from shmkv.errors import InvalidNamespace, InvalidTokens, SegmentBroken
from shmkv.keys import Key, key, split
from shmkv.namespace import decode_namespace, encode_namespace

TOKENS = [0, 1, 2, 127, 1, 0, 99]
token_ids = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40)

WAYS = {
    "tuple": tuple,
    "numpy scalars": lambda tokens: [np.int64(token) for token in tokens],
    "torch scalars": lambda tokens: [torch.tensor(token) for token in tokens],
    "array.array": lambda tokens: array.array("q", tokens),
    "memoryview": lambda tokens: memoryview(array.array("H", tokens)),
    "bytearray": bytearray,
    "ctypes": lambda tokens: (ctypes.c_uint16 * len(tokens))(*tokens),
    "strided": lambda tokens: np.repeat(np.array(tokens), 3)[::3],
    "negative step": lambda tokens: np.array(tokens[::-1], dtype=np.int32)[::-1],
    "column": lambda tokens: torch.tensor(tokens).repeat(3, 1).t().contiguous()[:, 1],
    "read-only": lambda tokens: np.frombuffer(bytes(tokens), np.uint8),
    "subclass": lambda tokens: np.array(tokens).view(type("Sub", (np.ndarray,), {})),
} | {
    f"numpy {order}{kind}": lambda tokens, dtype=order + kind: np.array(tokens).astype(dtype)
    for order, kind in itertools.product("<>", ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"))
} | {
    f"torch {name}": lambda tokens, name=name: torch.tensor(tokens).to(getattr(torch, name))
    for name in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
}


@pytest.mark.parametrize("way", WAYS)
def test_a_key_depends_on_the_values_and_not_on_their_container(way):
    assert key(WAYS[way](TOKENS)) == key(TOKENS)
    assert key(WAYS[way](TOKENS[:-1])) != key(TOKENS)  # control: the comparison can fail


def test_a_key_is_native_words_behind_the_namespace_length():
    made = key([7, 2**32 - 1])
    assert made.data == struct.pack("=III", 0, 7, 2**32 - 1)
    assert (made.n_tokens, made.token_start, made.roi, made.tokens) == (2, 4, None, None)


@given(token_ids)
def test_tokens_come_back_exactly(tokens):
    for given_tokens in (tokens, np.array(tokens, dtype=np.uint64), torch.tensor(tokens)):
        namespace, words = split(key(given_tokens).data)
        assert (namespace, list(struct.unpack(f"={len(tokens)}I", words))) == (b"", tokens)


@given(st.integers(-3, 2**33), st.integers(-3, 2**33), st.integers(2**20, 2**33) | st.integers(-(2**33), -(2**20)))
def test_a_range_equals_its_list(start, stop, step):
    tokens = range(start, stop, step)
    if tokens and 0 <= min(tokens) and max(tokens) < 2**32:
        assert key(tokens) == key(list(tokens))
    else:
        with pytest.raises(InvalidTokens):
            key(tokens)


def test_a_range_too_far_is_refused_before_anything_is_allocated():
    with pytest.raises(InvalidTokens, match=f"token {10**30 - 1} is {10**30 - 1}"):
        key(range(10**30))
    with pytest.raises(InvalidTokens, match="token 5 is -1"):
        key(range(4, -2, -1))


class Evil:
    def __index__(self):
        raise ZeroDivisionError

    def __repr__(self):
        return "Evil()"


class Small(enum.IntEnum):
    one = 1


REFUSED = [
    (None, "None"), ("12", "'12'"), (5, "5"), (1.0, "1.0"), (True, "True"), ({1, 2}, "set"), (iter([1]), "iterator"),
    ([], "empty"), ((), "empty"), (range(0), "empty"), (np.array([], np.int32), "empty"), (b"", "empty"),
    (torch.tensor([], dtype=torch.int64), "empty"),
    ([3, -1], "token 1 is -1"), ([3, 2**32], "token 1 is 4294967296"), ([2, 10**5000], "token 1 is 0x"),
    ([7, 1.0], r"token 1 is 1\.0"), ([7, True], "token 1 is True"), ([False, 7], "token 0 is False"),
    ([5, np.True_], "token 1 is .*True"), ([5, torch.tensor(True)], "token 1 is .*True"), ((1, "1"), "token 1 is '1'"),
    ([1, torch.tensor(1.0)], "token 1"), ([1, None], "token 1 is None"), ([1, Evil()], r"token 1 is Evil\(\)"),
    ([[1], [2]], r"token 0 is \[1\]"), ([1, np.float32(2)], "token 1"),
    (np.array([1.0]), r"float64.*1\.0"), (np.array([True]), "bool.*True"), (np.array(5), "0 dimensions"),
    (np.int64(5), "0 dimensions"), (np.zeros((2, 2), int), "2 dimensions"), (np.array([1, None]), "object"),
    (np.array(["a"]), "<U1"), (np.array([1], "m8[s]"), "timedelta"), (np.ma.array([1, 2], mask=[0, 1]), "masked"),
    (np.array([4, -2, -3], "i1"), "token 1 is -2"), (np.array([4, -2], ">i2"), "token 1 is -2"),
    (np.array([4, -2], "i4"), "token 1 is -2"), (np.array([4, 2**32, -1], "i8"), "token 1 is 4294967296"),
    (np.array([4, 2**63], ">u8"), "token 1 is 9223372036854775808"), (np.array([9, -2, 8, 4])[::-2], "token 1 is -2"),
    (torch.tensor([4, -2]), "token 1 is -2"), (torch.tensor([1.0]), "float32"), (torch.tensor([True]), "bool"),
    (torch.tensor([1], dtype=torch.bfloat16), "bfloat16"), (torch.tensor(5), "0 dimensions"),
    (torch.tensor([[5]]), "2 dimensions"), (torch.empty(3, dtype=torch.int64, device="meta"), "int64"),
    (torch.tensor([1, 2]).to_sparse(), "int64"), (array.array("d", [1.0]), "float64"),
    (memoryview(b"ab").cast("c"), "S1"), (memoryview(b"\1").cast("?"), "bool"),
]  # fmt: skip


@pytest.mark.parametrize("tokens, named", REFUSED)
def test_what_is_no_token_id_is_refused_by_value_and_position(tokens, named):
    with pytest.raises(InvalidTokens, match=named):
        key(tokens)


def test_an_int_subclass_is_its_value():
    assert key([Small.one, 5]) == key([1, 5])


@given(st.lists(st.one_of(st.integers(-1, 2), st.booleans(), st.floats(0, 1), st.integers(0, 1).map(np.int8)),
                min_size=1, max_size=6))  # fmt: skip
def test_a_list_passes_only_if_every_token_is_an_integer_in_range(tokens):
    fine = all(type(token) in (int, np.int8) and token >= 0 for token in tokens)
    if fine:
        assert key(tokens) == key([int(token) for token in tokens])
    else:
        with pytest.raises(InvalidTokens):
            key(tokens)


# ---------------------------------------------------------------- the prefix law

namespaces = st.none() | st.dictionaries(st.sampled_from("ab"), st.integers(0, 2), max_size=2)
short_ids = st.lists(st.integers(0, 2), min_size=1, max_size=4)


@settings(max_examples=300)
@given(namespaces, short_ids, namespaces, short_ids)
def test_byte_prefix_means_equal_namespace_and_token_prefix(namespace, tokens, other_namespace, other_tokens):
    entry, query = key(tokens, namespace=namespace), key(other_tokens, namespace=other_namespace)
    same = (namespace or {}) == (other_namespace or {})
    is_prefix = same and other_tokens[: len(tokens)] == tokens
    assert query.data.startswith(entry.data) == is_prefix
    assert (entry == query) == (same and tokens == other_tokens)
    if is_prefix:
        assert entry.family == query.family


def test_tokens_cannot_imitate_a_namespace():
    real = key([5], namespace={"a": 1})
    words = list(struct.unpack(f"={len(real.data) // 4}I", real.data))
    assert not key(words).data.startswith(real.data)
    assert not real.data.startswith(key(words).data)
    assert key(words[1:]).data[4:] == real.data[4:]  # control: only the length in front tells them apart


def test_hints_are_stable_numbers():
    made = key([7, 8], namespace={"a": 1})
    data = b"\4\0\0\0" b"m\1\0\0\0" b"\1\0\0\0a" b"i\1\0\0\0\1" b"\7\0\0\0\x08\0\0\0"  # the format, spelt out
    assert made.data == data
    assert made.family == zlib.crc32(data[:-4]) == 0x36EF9A77
    assert made.fingerprint == zlib.crc32(data, len(data)) << 32 | zlib.crc32(data) == 0xE4E7E506F4C0284A
    long = list(range(5000))
    assert key(long).fingerprint != key(long[:-1] + [0]).fingerprint != key(long + [1]).fingerprint


# ---------------------------------------------------------------- roi

MASKS = [list, tuple, lambda mask: np.array(mask), lambda mask: torch.tensor(mask), lambda mask: list(np.array(mask)),
         lambda mask: np.repeat(np.array(mask), 2)[::2], lambda mask: memoryview(bytes(mask)).cast("?")]  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.booleans()), min_size=1, max_size=20), st.sampled_from(MASKS))
def test_roi_selects_the_key_and_all_tokens_travel_with_it(pairs, as_mask):
    tokens, mask = [token for token, _ in pairs], [kept for _, kept in pairs]
    selected = [token for token, kept in pairs if kept]
    if not selected:
        with pytest.raises(InvalidTokens, match="selects no token"):
            key(tokens, roi=as_mask(mask))
        return
    made = key(tokens, roi=as_mask(mask), namespace={"a": 1})
    assert made == key(selected, namespace={"a": 1})
    assert (made.n_tokens, made.roi) == (len(selected), bytes(mask))
    assert made.tokens == struct.pack(f"={len(tokens)}I", *tokens)


def test_a_full_roi_is_no_roi():
    assert key(TOKENS, roi=[True] * len(TOKENS)).data == key(TOKENS).data


def test_a_foreign_bool_in_the_roi_is_a_plain_true():
    assert key([5, 6, 7], roi=np.array([2, 0, 255], np.uint8).view(bool)).roi == b"\1\0\1"


@pytest.mark.parametrize("roi", [
    [0, 1, 2], [True, 1, False], np.array([0, 1, 1]), torch.tensor([1, 0, 1]), [1.0, 0.0, 1.0], "abc", 5, [None] * 3,
    [True, True], [True] * 4, [], np.array([[True, True, True]]), np.True_, slice(0, 2), range(3), b"\1\1\1",
])  # fmt: skip
def test_a_roi_that_is_no_mask_of_this_length_is_refused(roi):
    with pytest.raises(InvalidTokens, match="roi"):
        key([1, 2, 3], roi=roi)


# ---------------------------------------------------------------- the object

def test_a_key_passes_through_unchanged_and_takes_nothing_more():
    made = key([1, 2])
    assert key(made) is made
    for more in ({"roi": [True, True]}, {"namespace": {}}):
        with pytest.raises(InvalidTokens, match="Key already"):
            key(made, **more)


def test_a_key_is_immutable_and_hashed_by_its_data():
    made = key([1, 2, 3], roi=[True, True, False])
    with pytest.raises(AttributeError):
        made.data = b""
    with pytest.raises(AttributeError):
        del made.data
    with pytest.raises(AttributeError):
        made.other = 1
    assert len({made, key([1, 2]), Key(made.data)}) == 1 and made != made.data
    copy = pickle.loads(pickle.dumps(made))
    assert all(getattr(copy, name) == getattr(made, name) for name in Key.__slots__)


@given(st.binary(max_size=40))
def test_hostile_key_bytes_are_split_within_bounds_or_refused(data):
    try:
        namespace, tokens = split(data)
    except SegmentBroken:
        assert len(data) < 4 or len(data) % 4 or 4 + 4 * int.from_bytes(data[:4], sys.byteorder) > len(data)
    else:
        assert data == data[:4] + namespace + tokens and len(namespace) == 4 * int.from_bytes(data[:4], sys.byteorder)


def test_split_keeps_a_memoryview_a_view():
    data = key([1, 2], namespace={"a": 1}).data
    assert [bytes(part) for part in split(memoryview(data))] == list(split(data))
    assert split(memoryview(data))[1].obj is data


# ---------------------------------------------------------------- namespaces

scalars = (st.none() | st.booleans() | st.integers() | st.integers(-(2**600), 2**600) | st.floats(allow_nan=False)
           | st.text(max_size=5) | st.binary(max_size=5))  # fmt: skip
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3)
                      | st.dictionaries(st.text(max_size=3), inner, max_size=3), max_leaves=8)  # fmt: skip
mappings = st.dictionaries(st.text(max_size=5), values, max_size=4)


def typed(value):
    """Equality of Python values that also tells 1, 1.0, True and the zeros apart."""
    if isinstance(value, dict):
        return {name: typed(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [typed(inner) for inner in value]
    return type(value).__name__, repr(value)


@given(mappings)
def test_a_namespace_comes_back_with_its_types(namespace):
    data = encode_namespace(namespace)
    assert typed(decode_namespace(data)) == typed(namespace)
    assert split(key([1], namespace=namespace).data)[0] == data
    assert encode_namespace(dict(reversed(namespace.items()))) == data


@settings(max_examples=200)
@given(mappings, mappings)
def test_namespaces_are_equal_only_if_values_and_types_are(one, other):
    assert (encode_namespace(one) == encode_namespace(other)) == (typed(one) == typed(other))


def test_values_that_look_alike_differ():
    alike = [1, 1.0, True, "1", b"1", [1], {"1": 1}, None, 0, 0.0, -0.0, False, "", b"", [], {}, "None", [[1]], 257, -1,
             2**64 + 1, 255, [1, 1]]  # fmt: skip
    assert len({key([7], namespace={"a": value}) for value in alike}) == len(alike)
    low = [{"image": (n << bits) + 5} for bits in (16, 32, 63) for n in range(1, 3)]
    assert len({key([7], namespace=value) for value in low}) == len(low)
    assert len({encode_namespace(value) for value in ({"a": "bc"}, {"ab": "c"}, {"a": "b", "c": ""})}) == 3


def test_none_is_the_empty_namespace_and_a_tuple_is_a_list():
    assert encode_namespace(None) == encode_namespace({}) == b"" and decode_namespace(b"") == {}
    assert key([1], namespace={}) == key([1], namespace=None) == key([1])
    assert encode_namespace({"a": (1, (2,))}) == encode_namespace({"a": [1, [2]]})
    assert encode_namespace({"a": np.float64(1)}) == encode_namespace({"a": 1.0})


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def endless():
    loop = []
    loop.append(loop)
    return loop


@pytest.mark.parametrize("namespace", [
    5, "a", [1], b"x", 0, "", [], {1: 2}, {None: 1}, {"a": float("nan")}, {"a": [1, {"b": float("nan")}]},
    {"a": object()}, {"a": {1, 2}}, {"a": torch.bfloat16}, {"a": np.int64(1)}, {"\ud800": 1}, {"a": "\ud800"},
    {"a": 1j}, {"a": {b"b": 1}}, {"a": nested(31)}, {"a": endless()}, {"a": b"x" * (1 << 20)},
    {"a": [None] * (1 << 20)},
])  # fmt: skip
def test_a_namespace_without_canonical_form_is_refused(namespace):
    with pytest.raises(InvalidNamespace):
        key([1], namespace=namespace)


def test_the_deepest_and_longest_namespaces_come_back():
    for namespace in ({"a": nested(30)}, {"a": b"x" * ((1 << 20) - 20)}):
        assert decode_namespace(encode_namespace(namespace)) == namespace


def test_namespaces_do_not_depend_on_the_process():
    code = (
        "import sys, types\n"
        "package = sys.modules['shmkv'] = types.ModuleType('shmkv')  # the module alone, without the package's face\n"
        f"package.__path__ = [{os.path.dirname(shmkv.keys.__file__)!r}]\n"
        "from shmkv.keys import key\n"
        "assert 'torch' not in sys.modules\n"
        "names = {'model', 'adapter', 'salt', 'rank', 'layout'}\n"
        "print(list(names), file=sys.stderr)\n"
        "made = key([1, 2], namespace={name: [name, 1, None, 2.5, {'z': b'z', 'y': True}] for name in names})\n"
        "print(made.data.hex(), made.family, made.fingerprint)"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
                       capture_output=True, text=True, check=True, timeout=60)
        for seed in ("1", "2", "3")
    ]  # fmt: skip
    assert len({run.stdout for run in runs}) == 1
    assert len({run.stderr for run in runs}) > 1  # control: the order of a set did change


@settings(max_examples=300)
@given(mappings.map(encode_namespace), st.data())
def test_damaged_namespace_bytes_are_refused_or_canonical(data, draw):
    damaged = bytearray(data)
    for _ in range(draw.draw(st.integers(0, 3))):
        if damaged:
            damaged[draw.draw(st.integers(0, len(damaged) - 1))] = draw.draw(st.sampled_from(b"\0\1\xff\x7fNTFsibflm"))
    damaged = bytes(damaged[: draw.draw(st.integers(0, len(damaged) + 1))])
    try:
        namespace = decode_namespace(damaged)
    except SegmentBroken:
        assert damaged != data
    else:
        assert encode_namespace(namespace) == damaged  # so nothing but canonical bytes is ever read


@settings(max_examples=300)
@given(st.binary(max_size=60)
       | st.lists(st.sampled_from([b"m", b"l", b"s", b"i", b"N", b"\1\0\0\0", b"\0\0\0\0", b"a"]), max_size=20)
       .map(b"".join))  # fmt: skip
def test_hostile_namespace_bytes_are_refused_or_canonical(data):
    try:
        namespace = decode_namespace(data)
    except SegmentBroken:
        return
    assert encode_namespace(namespace) == data


def test_hostile_counts_depths_and_second_forms_are_refused_at_once():
    one_key = b"m\1\0\0\0\1\0\0\0a"
    for data in (
        one_key + b"l\xff\xff\xff\xff" + b"N" * 5,
        one_key + b"s\xff\xff\xff\x7fab",
        one_key + b"l\1\0\0\0" * 10_000 + b"N\0\0",
        b"m\xff\xff\xff\xff\0\0\0",
        b"N\0\0\0",
        one_key + b"N\0\0\0\0\0\0\0\0\0",
        b"m\0\0\0\0\0\0\0",
        one_key + b"i\2\0\0\0\1\0",  # 1, but longer than need be
        one_key + b"i\0\0\0\0",
        one_key + b"f" + struct.pack("=d", float("nan")),
        b"m\2\0\0\0" + b"\1\0\0\0aN" * 2,  # the same name twice
        b"\0" * (2 << 20),
    ):
        with pytest.raises(SegmentBroken):
            decode_namespace(data + b"\0" * (-len(data) % 4))
    assert decode_namespace(one_key + b"i\1\0\0\0\1") == {"a": 1}  # control
