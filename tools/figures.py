"""What the views of a picture have in common: figures that it implies, and how figures are written."""

from __future__ import annotations

from typing import NamedTuple

from shmkv.entries import EntryState
from shmkv.inspector import Picture
from shmkv.journal import EventKind
from shmkv.layout import Entry

from .text import age

STATES = {int(state): state.name.lower() for state in EntryState if state != EntryState.FREE}


class Arena(NamedTuple):
    """The payload arena in figures; `fragmentation` is the share of the free bytes outside of the largest hole."""

    nbytes: int
    used: int
    n_holes: int
    largest_hole: int

    @property
    def fragmentation(self) -> float:
        free = self.nbytes - self.used
        return 1 - self.largest_hole / free if free else 0.0


class Oldest(NamedTuple):
    """The entry in use with the lowest sequence."""

    sequence: int
    slot: int
    state: str
    n_tokens: int
    nbytes: int
    producer: int
    age_ns: int


def arena(picture: Picture) -> Arena:
    holes = [nbytes for _, nbytes in picture.holes()]
    capacity = picture.layout.arena.nbytes
    # not the sum of the runs: those of a broken picture may overlap or lie outside
    return Arena(capacity, capacity - sum(holes), len(holes), max(holes, default=0))


def columns(picture: Picture, *fields: int) -> list[list[int]]:
    """One list a field, over all slots: quicker than rows where there are thousands of entries."""
    area = picture.layout.entries
    end = area.word + area.count * area.stride
    return [picture.words[area.word + field:end:area.stride].tolist() for field in fields]


def oldest(picture: Picture) -> Oldest | None:
    states, sequences = columns(picture, Entry.state, Entry.sequence)
    slot = min((slot for slot, state in enumerate(states) if state), key=sequences.__getitem__, default=None)
    if slot is None:
        return None
    at, words = picture.layout.entries.word + slot * picture.layout.entries.stride, picture.words
    return Oldest(sequences[slot], slot, STATES.get(states[slot], f"state {states[slot]}"),
                  max(0, words[at + Entry.key_bytes] - words[at + Entry.token_start]) // 4,
                  words[at + Entry.payload_bytes], words[at + Entry.peer],
                  age_of(picture, words[at + Entry.created_ns]))


def handoffs(picture: Picture) -> list[float]:
    """Seconds from READY to the first TAKEN of the same entry, of all entries of which the journal still has both."""
    ready: dict[int, int] = {}
    found = []
    for event in picture.events():
        if event.kind == EventKind.READY:
            ready[event.sequence] = event.time_ns
        elif event.kind == EventKind.TAKEN and event.sequence in ready:
            found.append(max(0, event.time_ns - ready.pop(event.sequence)) / 1e9)
    return found


def percentile(samples: list[float], share: float) -> float:
    ranked = sorted(samples)
    return ranked[round((len(ranked) - 1) * share)]


def age_of(picture: Picture, then_ns: int) -> int:
    """Nanoseconds; a time of the future, in a broken picture, is now."""
    return max(0, picture.now_ns - then_ns)


# ---------------------------------------------------------------- how figures are written

def latency(seconds: float) -> str:
    """0.00012 -> 120 us, 2 -> 2.0 s: an age begins where this ends."""
    for factor, unit, limit in ((1e6, "us", 1e-3), (1e3, "ms", 1)):
        if seconds < limit:
            value = seconds * factor
            return f"{value:.0f} {unit}" if value >= 99.5 else f"{value:.1f} {unit}"
    return age(round(seconds * 1e9))


def count(value: float) -> str:
    """1234 -> 1,234; 1234567 -> 1.23M; at most 7 characters below 10**21."""
    if value < 99_999.5:
        return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"
    for factor, letter in ((1e6, "M"), (1e9, "G"), (1e12, "T"), (1e15, "P"), (1e18, "E")):
        if value < 1000 * factor:
            return f"{value / factor:.3g}{letter}"
    return f"{value:.1e}"
