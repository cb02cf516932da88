"""The canonical bytes of a namespace: all that shaped an entry's payload besides its tokens.

Typed, length-delimited, the same in every process and Python; compared as bytes, never hashed.
"""

import math
import struct
from collections.abc import Mapping
from typing import Any

from shmkv.errors import InvalidNamespace, SegmentBroken

NAMESPACE_MAX_BYTES = 1 << 20
NAMESPACE_MAX_DEPTH = 32

_WORD = struct.Struct("=I")
_FLOAT = struct.Struct("=d")
_NO_NAMESPACE = _WORD.pack(0)


def encode_namespace(namespace: Mapping | None) -> bytes:
    """Canonical bytes of a namespace: the same in every process, and equal only for equal namespaces of equal types.

    Values: str, bytes, int of any size, float (by its bits, so 0.0 and -0.0 differ), bool, None, list, mapping with
    str keys. 1, 1.0, True, "1" and b"1" all differ; a tuple equals a list; the order of keys does not count; None
    equals {}.

    Raises InvalidNamespace naming the value: NaN, another type, deeper than 32 levels, more than 1 MiB in all.
    """
    return head(namespace)[4:]


def decode_namespace(data) -> dict:
    """The namespace of `encode_namespace`'s bytes. Raises SegmentBroken for any other bytes."""
    data = bytes(data)
    if not data:
        return {}
    if len(data) % 4 or len(data) > NAMESPACE_MAX_BYTES:
        raise SegmentBroken(f"a namespace of {len(data)} bytes")
    namespace, end = _decode(data, 0, NAMESPACE_MAX_DEPTH)
    if not namespace or not isinstance(namespace, dict) or data[end:] not in (b"", b"\0", b"\0\0", b"\0\0\0"):
        raise SegmentBroken("a namespace is one mapping, zero-padded to words")
    return namespace


def head(namespace: Mapping | None) -> bytes:
    """The words of a key before its tokens: the namespace's length in words, then its bytes."""
    if namespace is None:
        return _NO_NAMESPACE
    if not isinstance(namespace, Mapping):
        raise InvalidNamespace(f"namespace is {show(namespace)} of type {type(namespace).__name__}, not a mapping")
    if not namespace:
        return _NO_NAMESPACE
    parts: list[bytes] = []
    _encode(namespace, "namespace", NAMESPACE_MAX_DEPTH, parts)
    data = b"".join(parts)
    n_words = (len(data) + 3) // 4
    if 4 * n_words > NAMESPACE_MAX_BYTES:
        raise InvalidNamespace(f"namespace takes {len(data)} bytes, more than {NAMESPACE_MAX_BYTES}")
    return _WORD.pack(n_words) + data.ljust(4 * n_words, b"\0")


def _encode(value: Any, where: str, depth: int, parts: list[bytes]) -> None:
    """Append one value: a letter for its type, then nothing, 8 bytes, or a count and what it counts."""
    if isinstance(value, bool):
        parts.append(b"T" if value else b"F")
    elif value is None:
        parts.append(b"N")
    elif isinstance(value, str):
        _append_counted(b"s", _utf8(value, where), parts)
    elif isinstance(value, int):
        value = int(value)
        _append_counted(b"i", value.to_bytes(_int_bytes(value), "little", signed=True), parts)
    elif isinstance(value, float):
        if math.isnan(value):
            raise InvalidNamespace(f"{where} is NaN, which equals nothing")
        parts.append(b"f" + _FLOAT.pack(value))
    elif isinstance(value, (bytes, bytearray)):
        _append_counted(b"b", bytes(value), parts)
    elif isinstance(value, (list, tuple, Mapping)):
        if depth == 0:
            raise InvalidNamespace(f"{where[:60]} is deeper than {NAMESPACE_MAX_DEPTH} levels")
        append = _append_mapping if isinstance(value, Mapping) else _append_list
        append(value, where, depth - 1, parts)
    else:
        raise InvalidNamespace(f"{where} is {show(value)} of type {type(value).__name__}")


def show(value: Any) -> str:
    """A value as an error shows it."""
    # hex where decimal could be long: str() of an int refuses more than 4300 digits
    text = hex(value) if isinstance(value, int) and abs(value) >> 128 else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _append_counted(tag: bytes, payload: bytes, parts: list[bytes]) -> None:
    if len(payload) > NAMESPACE_MAX_BYTES:
        raise InvalidNamespace(f"a namespace value of {len(payload)} bytes, more than {NAMESPACE_MAX_BYTES}")
    parts += tag, _WORD.pack(len(payload)), payload


def _append_list(values: list | tuple, where: str, depth: int, parts: list[bytes]) -> None:
    parts += b"l", _WORD.pack(len(values))
    for at, value in enumerate(values):
        _encode(value, f"{where}[{at}]", depth, parts)


def _append_mapping(mapping: Mapping, where: str, depth: int, parts: list[bytes]) -> None:
    for name in mapping:
        if not isinstance(name, str):
            raise InvalidNamespace(f"{where} has the key {show(name)} of type {type(name).__name__}, not a str")
    items = sorted((_utf8(name, where), name) for name in mapping)
    parts += b"m", _WORD.pack(len(items))
    for encoded, name in items:
        parts += _WORD.pack(len(encoded)), encoded
        _encode(mapping[name], f"{where}[{name!r}]", depth, parts)


def _utf8(text: str, where: str) -> bytes:
    try:
        return str.encode(text)
    except UnicodeEncodeError:
        raise InvalidNamespace(f"{where} holds {show(text)}, which is no valid Unicode") from None


def _decode(data: bytes, at: int, depth: int) -> tuple[Any, int]:
    """(value, where it ends) of the value that `_encode` wrote at `at`; only the canonical form passes."""
    tag, at = data[at : at + 1], at + 1
    if tag in _CONSTANTS:
        return _CONSTANTS[tag], at
    if tag in (b"l", b"m") and depth > 0:
        return (_decode_list if tag == b"l" else _decode_mapping)(data, at, depth - 1)
    if tag == b"f":
        payload, at = _taken(data, at, 8)
        value = _FLOAT.unpack(payload)[0]
        canonical = not math.isnan(value)
    elif tag in (b"s", b"b", b"i"):
        payload, at = _taken(data, at + 4, _count(data, at))
        value = _COUNTED[tag](payload)
        canonical = tag != b"i" or len(payload) == _int_bytes(value)
    else:
        raise SegmentBroken(f"namespace byte {at - 1} is {tag!r}: no type, or too deep, or past the end")
    if not canonical:
        raise SegmentBroken(f"a namespace value that ends at byte {at} is not in canonical form")
    return value, at


def _decode_list(data: bytes, at: int, depth: int) -> tuple[list, int]:
    values = []
    n_values, at = _count(data, at), at + 4
    for _ in range(n_values):  # each takes a byte or raises, so the data's length bounds this
        value, at = _decode(data, at, depth)
        values.append(value)
    return values, at


def _decode_mapping(data: bytes, at: int, depth: int) -> tuple[dict, int]:
    mapping: dict = {}
    n_items, at, last = _count(data, at), at + 4, None
    for _ in range(n_items):
        encoded, at = _taken(data, at + 4, _count(data, at))
        if last is not None and encoded <= last:
            raise SegmentBroken(f"namespace keys out of order before byte {at}")
        last = encoded
        mapping[_text(encoded)], at = _decode(data, at, depth)
    return mapping, at


def _taken(data: bytes, at: int, n_bytes: int) -> tuple[bytes, int]:
    if n_bytes > len(data) - at:
        raise SegmentBroken(f"namespace ends within the {n_bytes} bytes at {at}")
    return data[at : at + n_bytes], at + n_bytes


def _count(data: bytes, at: int) -> int:
    return _WORD.unpack(_taken(data, at, 4)[0])[0]


def _text(encoded: bytes) -> str:
    try:
        return encoded.decode()
    except UnicodeDecodeError:
        raise SegmentBroken("a namespace text that is no UTF-8") from None


def _int_bytes(value: int) -> int:
    """Fewest bytes of two's complement that hold `value`."""
    return (value if value >= 0 else ~value).bit_length() // 8 + 1


_CONSTANTS = {b"N": None, b"T": True, b"F": False}
_COUNTED = {b"s": _text, b"b": bytes, b"i": lambda payload: int.from_bytes(payload, "little", signed=True)}
