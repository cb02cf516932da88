"""A picture as plain data: what --json prints, field by field as `schema` describes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from shmkv.errors import ShmkvError
from shmkv.inspector import EntryRow, Picture, WaitRow

FIRST_TOKENS = 8


def segment(picture: Picture) -> dict[str, Any]:
    header, mutator, owner = picture.header(), picture.mutator(), picture.owner()
    geometry = picture.layout.geometry
    return {
        "name": picture.name, "state": picture.state.value, "mutator": mutator, "mutator_pid": picture.pid(mutator),
        "mutator_life": picture.life(mutator), "lock_pid": picture.lock_pid, "owner": owner,
        "owner_pid": header["owner_pid"], "owner_life": picture.life(owner), "unlinked": bool(header["unlinked"]),
        "born_ns": header["born_ns"], "taken_ns": picture.taken_ns, "now_ns": picture.now_ns,
        "instance": f"{header['instance']:016x}", "file_bytes": header["file_bytes"],
        "arena_bytes": geometry.arena_bytes, "used_bytes": picture.used_bytes(),
        "meta_bytes": geometry.meta_bytes, "meta_used_bytes": picture.meta_used_bytes(),
        "entries": picture.states(), "slots": geometry.slots,
        "peers": len(picture.peers()), "peers_max": geometry.peers,
        "waiters": len(picture.waiters()), "waits_max": geometry.waits,
        "leases": len(picture.leases()), "leases_max": geometry.leases,
    }


def peers(picture: Picture) -> list[dict[str, Any]]:
    return [row._asdict() for row in picture.peers()]


def entries(picture: Picture, with_tokens: bool = True) -> list[dict[str, Any]]:
    return [entry_of(row, with_tokens) for row in picture.entries(FIRST_TOKENS if with_tokens else 0)]


def entry_of(row: EntryRow, with_tokens: bool = True) -> dict[str, Any]:
    return {**row._asdict(), "namespace": plain(row.namespace), "tokens": row.tokens if with_tokens else None}


def holdouts(picture: Picture) -> list[dict[str, Any]]:
    """Regions whose owner is gone and that others still have mapped."""
    return [{"region": region["index"], "mapped_by": region["mapped_by"]} for region in picture.regions()
            if region["state"] == "gone" and region["mapped_by"]]


def waiters(picture: Picture, with_tokens: bool = True) -> list[dict[str, Any]]:
    return [waiter_of(row, with_tokens) for row in picture.waiters()]


def waiter_of(row: WaitRow, with_tokens: bool = True) -> dict[str, Any]:
    return {**row._asdict(), "tokens": row.tokens if with_tokens else None}


def runs(picture: Picture) -> list[dict[str, Any]]:
    return [{"at": at, "nbytes": nbytes} for at, nbytes in picture.runs()]


def holes(picture: Picture) -> list[dict[str, Any]]:
    return [{"at": at, "nbytes": nbytes} for at, nbytes in picture.holes()]


def events(picture: Picture, with_tokens: bool = True) -> list[dict[str, Any]]:
    """A fingerprint is a checksum of the key, from which few tokens can be guessed: it goes with them."""
    return [event_of(event, with_tokens) for event in picture.events()]


def event_of(event: Any, with_tokens: bool = True) -> dict[str, Any]:
    return {**event._asdict(), "kind": event.kind.name.lower(),
            "fingerprint": f"{event.fingerprint:016x}" if with_tokens else None}


def sections(picture: Picture, with_tokens: bool = True) -> tuple[dict[str, Any], dict[str, str]]:
    """All of a picture, and of what could not be read, why not: what is broken must not hide the rest."""
    parts: dict[str, Callable[[], Any]] = {
        "segment": lambda: segment(picture), "peers": lambda: peers(picture),
        "entries": lambda: entries(picture, with_tokens), "waiters": lambda: waiters(picture, with_tokens),
        "cycle": picture.cycle, "runs": lambda: runs(picture), "holes": lambda: holes(picture),
        "signals": picture.signals, "counters": picture.counters, "paths": picture.paths,
        "regions": picture.regions, "leases": picture.leases, "events": lambda: events(picture, with_tokens),
    }
    read: dict[str, Any] = {}
    unreadable: dict[str, str] = {}
    for name, part in parts.items():
        try:
            read[name] = part()
        except ShmkvError as error:
            read[name] = {} if name in ("segment", "counters", "paths") else []
            unreadable[name] = error.args[0]
    return read, unreadable


def plain(value: Any) -> Any:
    """A value of a namespace as JSON has it: bytes as hex, what JSON has no number for as text."""
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and abs(value) >> 64:
        return hex(value)
    return value
