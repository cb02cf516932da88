"""Whether a prompt would hit, and if not why: reasoning over a picture of a segment. Wants NumPy, and so is apart."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from . import keys, namespace, recovery
from .entries import READY, RESERVED, TAKEN
from .errors import SegmentBroken
from .journal import Event, EventKind
from .layout import Entry, Lease
from .leases import LeaseKind


class Why(NamedTuple):
    """Whether a prompt would hit, and if not, each reason that can be told, the most telling first.

    `nearest`: sequence of the entry of the same namespace with most tokens in common (0: none), `common_tokens` how
    many, and the ids at the first position that differs (None: the prompt, or the entry, ends there). `history`: what
    became of entries that the prompt begins with.
    """

    hit: bool
    sequence: int
    matched_tokens: int
    n_tokens: int
    reasons: list[str]
    nearest: int
    common_tokens: int
    wanted_token: int | None
    found_token: int | None
    history: list[Event]


class Search:
    """One prompt looked for in one `inspector.Picture`."""

    def __init__(self, picture: Any, wanted: keys.Key, match: str, at_rest: bool):
        self._picture, self._wanted, self._match = picture, wanted, match
        self._words, self._start = picture.words, wanted.token_start
        tables, self._expired = picture.tables(), set(picture.expired())
        if not at_rest:
            recovery.rebuild(tables)
        if self._expired:
            tables.order.rebuild(set(tables.entries.slots(READY)) - self._expired)
        self._order = tables.order

    def explain(self, min_tokens: int) -> Why:
        picture, wanted = self._picture, self._wanted
        found = self._order.find(wanted.data, self._match, 4 * min_tokens, self._start)
        history = self._history()
        if found is not None:
            sequence, n_matched = picture.sequence(found[0]), (found[1] - self._start) // 4
            return Why(True, sequence, n_matched, wanted.n_tokens, [], sequence, n_matched, None, None, history)
        slot, common = self._nearest()
        past = [*self._out_of_reach(), *self._past(history), *self._unfit(min_tokens)]
        if slot is None:
            reasons = [*past, *self._elsewhere()] or ["no entry begins like it in this namespace"]
            return Why(False, 0, 0, wanted.n_tokens, reasons, 0, 0, None, None, history)
        sequence, at = picture.sequence(slot), self._start + common
        ours, theirs = _token(wanted.data, at), _token(self._key_of(slot), at)
        if ours is None and not past:
            past = [f'entry {sequence} begins with all {common // 4} tokens and is longer '
                    f'(match="overlap" would take it)']
        reasons = [*past, *(self._elsewhere() if not common else [])]
        return Why(False, 0, 0, wanted.n_tokens, reasons, sequence, common // 4, ours, theirs, history)

    def _nearest(self) -> tuple[int | None, int]:
        """The entry of the same namespace that has most in common, and the bytes of tokens in common."""
        before, left, behind, right = self._order.near(self._wanted.data, self._start)
        slot, common = max([(before, left), (behind, right)], key=lambda one: (one[0] is not None, one[1]))
        return slot, max(0, common - self._start) // 4 * 4

    def _unfit(self, min_tokens: int) -> list[str]:
        """Entries that other options would have found."""
        match = "prefix" if self._match == "exact" else self._match
        found = self._order.find(self._wanted.data, match, 4, self._start)
        if found is None:
            return []
        n_matched, sequence = (found[1] - self._start) // 4, self._picture.sequence(found[0])
        if self._match == "exact" and n_matched < self._wanted.n_tokens:
            return [f'entry {sequence} has the first {n_matched} tokens (match="prefix" would take it)']
        return [f"entry {sequence} matches {n_matched} tokens, fewer than min_tokens={min_tokens}"]

    def _out_of_reach(self) -> list[str]:
        """Entries that would match, were they not expired, taken or still being written."""
        found = []
        for slot, state in enumerate(self._picture.column(Entry.state)):
            if (slot in self._expired or state in (TAKEN, RESERVED)) and self._would_match(self._key_of(slot)):
                n_tokens = (len(self._key_of(slot)) - self._start) // 4
                text = f"entry {self._picture.sequence(slot)} of {n_tokens} tokens {self._why_out(slot)}"
                found.append((n_tokens, text))
        return [text for _, text in sorted(found, reverse=True)[:3]]

    def _would_match(self, key: bytes) -> bool:
        return key == self._wanted.data if self._match == "exact" else self._wanted.data.startswith(key)

    def _why_out(self, slot: int) -> str:
        words, at = self._words, self._picture.record(slot)
        if words[at] == READY:
            return f"expired {self._ago(words[at + Entry.expires_ns])} ago; the next call of anybody frees it"
        if words[at] == RESERVED:
            who = self._who(words[at + Entry.peer])
            return f"is still being written by {who}, since {self._ago(words[at + Entry.created_ns])}"
        leases = [lease for lease in self._picture.held() if words[lease + Lease.slot] == slot
                  and words[lease + Lease.kind] == LeaseKind.TAKE]
        if not leases:
            return "is taken"
        since = self._ago(words[leases[0] + Lease.since_ns])
        return f"was taken {since} ago by {self._who(words[leases[0] + Lease.peer])}, who holds it"

    def _who(self, peer: int) -> str:
        return f"peer {peer} (pid {self._picture.pid(peer)}, {self._picture.life(peer)})"

    def _history(self) -> list[Event]:
        """The events of entries whose key the prompt begins with, as far as the journal and its hints go."""
        prints: dict[int, int] = {}
        events = self._picture.events()
        for event in events:
            if 0 < event.n_tokens <= self._wanted.n_tokens and event.n_tokens not in prints:
                cut = self._wanted.data[:self._start + 4 * event.n_tokens]
                prints[event.n_tokens] = keys.Key(cut).fingerprint
        return [event for event in events if prints.get(event.n_tokens) == event.fingerprint]

    def _past(self, history: list[Event]) -> list[str]:
        """What became of the last such entry that is no more."""
        there = set(self._picture.column(Entry.sequence, in_use=True))
        ended = [event for event in history if event.kind in _ENDS and event.sequence not in there
                 and (self._match != "exact" or event.n_tokens == self._wanted.n_tokens)]
        if not ended:
            return []
        last = max(ended, key=lambda event: (event.n_tokens, event.ticket))
        return [f"entry {last.sequence} of {last.n_tokens} tokens was {_ENDS[last.kind]} "
                f"{self._ago(last.time_ns)} ago by pid {last.pid}"]

    def _elsewhere(self) -> list[str]:
        """The same tokens under another namespace, and the fields that differ."""
        tokens, names_of, found = self._wanted.data[self._start:], self._picture.names_of, []
        for slot, state in enumerate(self._picture.column(Entry.state)):
            if state != READY:
                continue
            head, ids = keys.split(self._key_of(slot))
            if len(ids) and tokens.startswith(ids):
                ours, theirs = names_of(self._wanted.data[4:self._start]), names_of(bytes(head))
                differing = sorted(name for name in {*ours, *theirs} if repr(ours.get(name)) != repr(theirs.get(name)))
                fields = ", ".join(f"{_printable(name)}: {_shown(theirs, name)} there, "
                                   f"{_shown(ours, name)} asked for" for name in differing)
                text = f"entry {self._picture.sequence(slot)} has these tokens under another namespace ({fields})"
                found.append((len(differing), -len(ids), text))
        return [text for _, _, text in sorted(found)[:1]]

    def _ago(self, then_ns: int) -> str:
        return f"{max(0, self._picture.now_ns - then_ns) / 1e9:.1f} s"

    def _key_of(self, slot: int) -> bytes:
        meta, at = self._picture.layout.meta, self._picture.record(slot)
        start, nbytes = self._words[at + Entry.meta_at], self._words[at + Entry.key_bytes]
        if start + nbytes > meta.nbytes:
            raise SegmentBroken(f"slot {slot}: its key lies outside the meta arena")
        return self._picture.raw[meta.at + start:meta.at + start + nbytes]


_ENDS = {EventKind.TAKEN: "taken", EventKind.CONSUMED: "consumed", EventKind.EVICTED: "evicted",
         EventKind.EXPIRED: "expired", EventKind.CANCELLED: "cancelled", EventKind.ABORTED: "aborted",
         EventKind.LOST: "lost with its producer's device memory"}


def _token(data: bytes, at: int) -> int | None:
    return int.from_bytes(data[at:at + 4], sys.byteorder) if at + 4 <= len(data) else None


def _shown(names: dict, name: str) -> str:
    return _printable(namespace.show(names[name])) if name in names else "nothing"


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)
