"""What --json prints, as data: `shmkv schema` shows it, and a test holds every verb to it.

One object a call, in one line. `schema` goes up when a field goes away or changes its meaning; fields may be added
without. Unless said otherwise: `*_ns` are nanoseconds of this boot's monotonic clock (take `segment.now_ns` less them
for an age), `*_bytes`, `nbytes` and `at` are bytes, `peer`s are indices of peer records, null is "not known" or "none".
"""

from __future__ import annotations

import click

from .target import JSON, SCHEMA, emit, example
from .text import echo, title

_STATES = "reserved, ready, taken, dropped"
RECORDS: dict[str, dict[str, str]] = {
    "segment": {
        "name": "str",
        "state": "str: at rest; moving (it changed during each look: rows may not fit each other); torn (left half "
                 "changed by a dead or stopped process)",
        "mutator": "int|null: the peer that changed it last, or is changing it", "mutator_pid": "int: 0 if not known",
        "mutator_life": "str: see peer.life, or gone", "lock_pid": "int|null: who holds the lock",
        "owner": "int|null: the peer that removes the name", "owner_pid": "int: the creator",
        "owner_life": "str: see peer.life; gone: it has left", "unlinked": "bool: the owner removed the name",
        "born_ns": "int: wall clock (ns since 1970) at creation", "taken_ns": "int: wall clock of this picture",
        "now_ns": "int: monotonic clock of this picture", "instance": "str: identity, 16 hex digits",
        "file_bytes": "int: the whole object", "arena_bytes": "int: payload arena", "used_bytes": "int: of it, in runs",
        "meta_bytes": "int: arena of token ids and tensor descriptors", "meta_used_bytes": "int",
        "entries": f"object: how many entries are free, {_STATES}", "slots": "int: entries at most",
        "peers": "int: attached handles", "peers_max": "int", "waiters": "int: waiting threads", "waits_max": "int",
        "leases": "int: held leases", "leases_max": "int",
    },
    "peer": {
        "index": "int", "generation": "int: how often this record was claimed",
        "role": "str: as given to create or attach",
        "pid": "int: in its own PID namespace", "life": "str: alive, stopped, dead (as the kernel says), unknown",
        "roles": "list of str: producer, consumer: what it has done so far",
        "closed": "bool: its handle is closed, views still hold leases",
        "pid_namespace": "int: inode of its PID namespace", "attached_ns": "int",
        "leases": "int: held by it", "signals": "int: unread", "signals_lost": "int: to a full ring",
    },
    "entry": {
        "slot": "int", "generation": "int: how often this slot was used", "sequence": "int: names the entry for ever",
        "state": f"str: {_STATES}", "moving": "bool: it changed while it was looked at",
        "n_tokens": "int: of its key", "tokens": "list of int|null: the first 8; null with --no-tokens",
        "namespace": "object: as inserted; bytes as hex text, integers beyond 64 bits and infinities as text",
        "tensors": "list of tensor", "nbytes": "int: of its tensors", "run_at": "int: where its run starts",
        "run_bytes": "int: whole pages", "where": "str: host, region N, in place (in registered tensors)",
        "producer": "int|null: null if it has gone", "created_ns": "int", "used_ns": "int: last handed out or sealed",
        "ttl_left_ns": "int|null: null if it never expires", "holders": "list of int: peers that hold it",
        "broken": "str: why key or tensors cannot be read; else empty",
    },
    "tensor": {"name": "str", "dtype": "str", "shape": "list of int: elements", "nbytes": "int",
               "region": "int|null: null if it lies in the entry's run"},
    "waiter": {
        "peer": "int", "pid": "int", "thread": "int: native id", "kind": "str: entry, room, signal, request, answer",
        "since_ns": "int", "deadline_ns": "int|null: null: for ever", "text": "str: what for, in words",
        "n_tokens": "int: of the prompt it waits for", "tokens": "list of int|null: the first; null with --no-tokens",
        "nbytes": "int: of payload that it wants room for", "on": "list of int: the peers that can end the wait",
    },
    "holdout": {"region": "int", "mapped_by": "list of int: pids"},
    "run": {"at": "int", "nbytes": "int"},
    "signal": {"to": "int: peer", "kind": "str: ready, room, taken, released, cancelled, closed",
               "sequence": "int: entry; 0: none", "sender": "int: peer", "value": "int: closed: who is gone",
               "time_ns": "int"},
    "region": {"index": "int", "state": "str: open, gone", "kind": "str: arena, tensor", "owner": "int: peer",
               "device": "str: UUID, hex", "nbytes": "int", "used_bytes": "int: in runs",
               "mapped_by": "list of int: pids"},
    "lease": {"kind": "str: write, take, share", "slot": "int", "sequence": "int: entry", "peer": "int: holder",
              "thread": "int: native id", "since_ns": "int", "released": "bool: over, not yet collected",
              "path": "str|null: how the holder sees the bytes: host, local, cuda_ipc, cuda_peer, staging, nccl",
              "refused": "object: why each better path was not taken, by path"},
    "event": {"ticket": "int: number of the event", "kind": "str: ready, taken, consumed, returned, evicted, expired, "
              "cancelled, aborted, died, recovered, lost", "time_ns": "int", "sequence": "int: entry; 0: none",
              "slot": "int", "generation": "int: of the slot", "peer": "int: whose doing", "pid": "int: whose doing",
              "fingerprint": "str|null: checksum of the key, 16 hex digits; null with --no-tokens", "n_tokens": "int"},
    "explanation": {
        "hit": "bool", "sequence": "int: the entry; 0: none", "matched_tokens": "int", "n_tokens": "int: of the prompt",
        "reasons": "list of str: of a miss, the most telling first", "nearest": "int: entry of the same namespace with "
        "most tokens in common; 0: none", "common_tokens": "int: with that one",
        "wanted_token": "int|null: id at the first position that differs; null if the prompt ends there, or "
                        "--no-tokens",
        "found_token": "int|null: the nearest entry's id there",
        "history": "list of event: of entries that the prompt begins with",
    },
    "removal": {"name": "str: of a segment or semaphore", "removed": "bool: (to be) removed", "why": "str"},
    "finding": {"name": "str: what was looked at", "state": "str: ok, note, no", "text": "str",
                "remedy": "str: the knob to turn"},
    "failure": {"name": "str: of a segment", "error": "str"},
}
_SEGMENT = {"segment": "segment"}
DOCUMENTS: dict[str, dict[str, str]] = {
    "ls": {"segments": "list of segment", "unreadable": "list of failure"},
    "dump": {**_SEGMENT, "peers": "list of peer", "entries": "list of entry", "waiters": "list of waiter",
             "cycle": "list of int: peers that wait for each other, in order",
             "runs": "list of run: of the payload arena", "holes": "list of run: what they leave",
             "signals": "list of signal: unread",
             "counters": "object: see `python -m shmkv.layout`, counter",
             "paths": "object: look-ups served by each path, and staged_inserts", "regions": "list of region",
             "leases": "list of lease", "events": "list of event: the last, oldest first",
             "unreadable": "object: why a section cannot be read, by its name"},
    "entries": {**_SEGMENT, "entries": "list of entry"},
    "peers": {**_SEGMENT, "peers": "list of peer"},
    "waiters": {**_SEGMENT, "waiters": "list of waiter", "cycle": "list of int: peers that wait for each other",
                "holdouts": "list of holdout: device memory whose owner is gone, and who still has it mapped"},
    "explain": {**_SEGMENT, "explain": "explanation"},
    "check": {**_SEGMENT, "problems": "list of str", "before": "list of str: before --fix",
              "fixed": "object: what --fix did, by counter"},
    "rm": {"name": "str", "removed": "bool", "why": "str"},
    "gc": {"dry_run": "bool", "objects": "list of removal"},
    "doctor": {"findings": "list of finding"},
}


@click.command("schema", epilog=example("shmkv schema", "shmkv schema --json"))
@JSON
def command(as_json: bool) -> None:
    """What --json prints: the object of each verb, and the records in it."""
    if as_json:
        return emit({"documents": DOCUMENTS, "records": RECORDS})
    echo([(__doc__ or "").partition("\n\n")[2].strip(), "", f"schema {SCHEMA}"])
    for kind, parts in (("shmkv {} --json", DOCUMENTS), ("{}", RECORDS)):
        for name, fields in parts.items():
            echo(["", title(kind.format(name)), *(f"  {field}: {text}"
                                                  for field, text in fields.items())])
