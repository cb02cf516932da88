"""What an entry is found by: token ids and namespace as one byte string, compared byte by byte and never hashed.

A key is a row of native uint32 words: `[n namespace words][namespace, zero-padded to words][token]...`. The length in
front makes "entry key is a byte prefix of query key" the same as "equal namespaces, and entry tokens a prefix of query
tokens".
"""

import array
import operator
import struct
import sys
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from shmkv.errors import InvalidTokens, SegmentBroken
from shmkv.namespace import head, show

TOKEN_LIMIT = 2**32

_WORD = struct.Struct("=I")
SHORT = 256  # tokens whose types are all looked at; above, NumPy finds those that need it
_EDGE_BYTES = 2048


class Key:
    """Token ids and namespace in canonical form. Immutable; equal and hashed by `data` alone.

    data         the whole key: namespace length, namespace, token words
    n_tokens     number of key tokens, after roi
    token_start  byte offset of the first token word in `data`
    tokens, roi  with a roi mask: all token ids (4 bytes each) and the mask (1 byte each, 0 or 1); else None
    family       32-bit hint: keys with different families are never prefixes of each other
    fingerprint  64-bit hint for event logs, the same in every process; equal fingerprints prove nothing

    Raises SegmentBroken when `data` is no key.
    """

    __slots__ = ("data", "n_tokens", "token_start", "roi", "tokens", "family", "fingerprint")

    def __init__(self, data: bytes, roi: bytes | None = None, tokens: bytes | None = None):
        start = _token_start(data)
        n_tokens = (len(data) - start) // 4
        if n_tokens == 0:
            raise SegmentBroken("a key of no tokens")
        _set_data(self, data)
        _set_n_tokens(self, n_tokens)
        _set_token_start(self, start)
        _set_roi(self, roi)
        _set_tokens(self, tokens)
        _set_family(self, zlib.crc32(data[: start + 4]))
        _set_fingerprint(self, zlib.crc32(data[-_EDGE_BYTES:], len(data)) << 32 | zlib.crc32(data[:_EDGE_BYTES]))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Key is immutable: cannot set {name}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Key is immutable: cannot delete {name}")

    def __eq__(self, other: object) -> bool:
        return self.data == other.data if isinstance(other, Key) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.data)

    def __reduce__(self):
        return Key, (self.data, self.roi, self.tokens)

    def __repr__(self) -> str:
        masked = f" of {len(self.roi)}" if self.roi is not None else ""
        return f"<Key {self.n_tokens}{masked} tokens, fingerprint {self.fingerprint:016x}>"


# The slots' own setters: the one way past __setattr__, and quicker than object.__setattr__.
_set_data, _set_n_tokens, _set_token_start, _set_roi, _set_tokens, _set_family, _set_fingerprint = (
    vars(Key)[name].__set__ for name in Key.__slots__
)


def key(tokens: Any, *, roi: Any = None, namespace: Mapping | None = None) -> Key:
    """Convert token ids once, to pass the result wherever tokens are wanted.

    tokens     1-D and not empty, each from 0 to 4294967295, exact by value: list, tuple, range, NumPy or torch integers
               of any width, byte order and stride, or a buffer of integers. A Key is returned as it is.
    roi        boolean mask of the tokens' length; the key is the selected tokens, and all tokens travel with it
    namespace  mapping of all else that shaped the payload (see `namespace.encode_namespace`); None equals {}

    Raises InvalidTokens naming the first bad token and its position (or the bad roi), InvalidNamespace.
    """
    if isinstance(tokens, Key):
        if roi is not None or namespace is not None:
            raise InvalidTokens("tokens is a Key already: give roi and namespace where it is made", hint="shmkv.key()")
        return tokens
    words = _token_words(tokens)
    start = head(namespace)
    if roi is None:
        return Key(start + words)
    mask = _mask(roi, len(words) // 4)
    selected = np.frombuffer(words, np.uint32)[mask].tobytes()
    if not selected:
        raise InvalidTokens("roi selects no token", hint="select at least one token")
    return Key(start + selected, mask.tobytes(), words)


def split(data):
    """(namespace bytes, token bytes) of a key read from the segment, of the type of `data`. Raises SegmentBroken."""
    start = _token_start(data)
    return data[4:start], data[start:]


def _token_start(data) -> int:
    if len(data) < 4 or len(data) % 4:
        raise SegmentBroken(f"a key of {len(data)} bytes: not a row of words")
    start = 4 + 4 * _WORD.unpack_from(data)[0]
    if start > len(data):
        raise SegmentBroken(f"namespace ends at byte {start} of a key of {len(data)} bytes")
    return start


# ---------------------------------------------------------------- token ids

def _token_words(tokens: Any) -> bytes:
    if isinstance(tokens, (list, tuple)):
        return _words_of_sequence(tokens)
    if isinstance(tokens, range):
        return _words_of_range(tokens)
    return _words_of_array(_as_array(tokens, "tokens"))


def _words_of_sequence(tokens: list | tuple) -> bytes:
    if not tokens:
        raise _no_tokens()
    try:
        words = array.array("I", tokens)  # takes whatever has __index__, so no floats
    except Exception:  # a foreign __index__ raises what it likes
        raise _first_bad_token(enumerate(tokens)) or InvalidTokens("tokens changed while they were read") from None
    if len(tokens) <= SHORT and set(map(type, tokens)) == {int}:
        return words.tobytes()
    # bool has __index__ too, but is 0 or 1: only these need a look at the type
    suspects = np.flatnonzero(np.frombuffer(words, np.uint32) <= 1).tolist()
    looked_at = tokens if 4 * len(suspects) > len(tokens) else map(tokens.__getitem__, suspects)
    if not set(map(type, looked_at)) <= {int}:
        bad = _first_bad_token((at, tokens[at]) for at in suspects)
        if bad:
            raise bad
    return words.tobytes()


def _words_of_range(tokens: range) -> bytes:
    if not tokens:
        raise _no_tokens()
    # all others lie between the ends: checked before anything is allocated
    first, last, step = tokens[0], tokens[-1], tokens.step
    bad = _first_bad_token([(0, first), ((last - first) // step, last)])
    if bad:
        raise bad
    return np.arange(first, tokens.stop, step, dtype=np.int64).astype(np.uint32).tobytes()


def _words_of_array(tokens: np.ndarray) -> bytes:
    dtype = tokens.dtype
    if tokens.ndim != 1:
        raise InvalidTokens(f"tokens has {tokens.ndim} dimensions, not 1 (shape {tokens.shape})")
    if dtype.kind not in "iu":
        first = f", token 0 is {show(tokens[0])}" if len(tokens) else ""
        raise InvalidTokens(f"tokens is of type {dtype}, not of an integer type{first}")
    if not len(tokens):
        raise _no_tokens()
    if not dtype.isnative:
        tokens = tokens.astype(dtype.newbyteorder("="))
    # read as unsigned, a negative value is at or above half the range
    limit = min(1 << (8 * dtype.itemsize - (dtype.kind == "i")), TOKEN_LIMIT)
    if limit < 1 << 8 * dtype.itemsize:
        unsigned = tokens.view(f"u{dtype.itemsize}")
        if unsigned.max() >= limit:
            at = int(np.argmax(unsigned >= limit))
            raise _first_bad_token([(at, int(tokens[at]))])
    return tokens.astype(np.uint32, copy=False).tobytes()


def _as_array(value: Any, what: str) -> np.ndarray:
    if type(value) is np.ndarray:
        return value
    torch = sys.modules.get("torch")  # a tensor can only exist where torch is already imported
    if torch is not None and isinstance(value, getattr(torch, "Tensor", ())):
        return _tensor_as_array(value, what)
    if isinstance(value, np.ma.MaskedArray):
        raise InvalidTokens(f"{what} is a masked array: its mask would be lost")
    if isinstance(value, np.ndarray):
        return np.asarray(value)
    try:
        return np.asarray(memoryview(value))
    except (TypeError, ValueError, BufferError):
        raise InvalidTokens(f"{what} is {show(value)} of type {type(value).__name__}") from None


def _tensor_as_array(tensor: Any, what: str) -> np.ndarray:
    try:
        return tensor.detach().cpu().numpy()
    except Exception as error:  # torch raises various types: sparse, meta, bfloat16, subclasses
        raise InvalidTokens(f"{what} is a tensor of {tensor.dtype} that has no array of integers: {error}") from None


def _first_bad_token(numbered_tokens: Iterable[tuple[int, Any]]) -> InvalidTokens | None:
    """The error for the first bad one of (position, token) pairs."""
    for at, token in numbered_tokens:
        try:
            value = operator.index(token)
        except Exception:
            return InvalidTokens(f"token {at} is {show(token)} of type {type(token).__name__}, not an integer")
        if isinstance(token, bool) or "bool" in str(getattr(token, "dtype", "")):
            return InvalidTokens(f"token {at} is {show(token)}, a bool and not an integer")
        if not 0 <= value < TOKEN_LIMIT:
            return InvalidTokens(f"token {at} is {show(value)}, {'negative' if value < 0 else 'above 4294967295'}")
    return None


def _no_tokens() -> InvalidTokens:
    return InvalidTokens("tokens is empty", hint="an entry needs at least one token id")


# ---------------------------------------------------------------- roi

def _mask(roi: Any, n_tokens: int) -> np.ndarray:
    if isinstance(roi, (list, tuple)):
        mask = _mask_of_sequence(roi)
    else:
        mask = _as_array(roi, "roi")
    if mask.ndim != 1 or len(mask) != n_tokens:
        raise InvalidTokens(f"roi has shape {mask.shape} for {n_tokens} tokens", hint="give one bool for each token")
    if mask.dtype.kind != "b":
        raise InvalidTokens(f"roi is of type {mask.dtype}, not a boolean mask", hint="roi is a mask, not positions")
    return mask.view(np.uint8) != 0  # a foreign bool may hold any byte


def _mask_of_sequence(roi: list | tuple) -> np.ndarray:
    if not set(map(type, roi)) <= {bool, np.bool_}:
        at, value = next((at, value) for at, value in enumerate(roi) if type(value) not in (bool, np.bool_))
        raise InvalidTokens(f"roi {at} is {show(value)}, not a bool", hint="roi is a mask, not positions")
    return np.array(roi, dtype=bool)
