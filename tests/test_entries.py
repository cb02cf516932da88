"""An entry makes only legal moves, a lease ends exactly once, and a full table says which knob to turn."""

import os
import threading

import pytest
import torch

import shmkv
from shmkv import segment
from shmkv.entries import DROPPED, FREE, MOVES, READY, RESERVED, TAKEN, Entries, EntryState
from shmkv.layout import PAGE_BYTES, Entry, Geometry, Header, Layout, Lease
from shmkv.leases import Hold, LeaseKind, Leases, Outcome
from shmkv.testing import eventually, unique_name

X = {"x": torch.arange(4096, dtype=torch.int64).to(torch.uint8)}
STATES = [int(state) for state in EntryState]


def nameless(slots=4, leases=4):
    geometry = Geometry(slots=slots, peers=2, leases=leases, waits=2, ring=2, journal=2, meta_bytes=PAGE_BYTES,
                        arena_bytes=PAGE_BYTES, device_arenas=0, registrations=0)
    return segment.create(unique_name(), Layout(geometry))


# ---------------------------------------------------------------- moves

def test_the_table_of_moves_is_the_life_of_an_entry():
    assert STATES == [FREE, RESERVED, READY, TAKEN, DROPPED] == [0, 1, 2, 3, 4]
    assert set(MOVES) == {(FREE, RESERVED), (RESERVED, READY), (RESERVED, FREE), (RESERVED, DROPPED), (READY, TAKEN),
                          (READY, FREE), (READY, DROPPED), (TAKEN, FREE), (TAKEN, DROPPED), (TAKEN, READY),
                          (DROPPED, FREE)}
    assert all(MOVES.values())


def test_every_legal_move_works_and_every_other_changes_nothing():
    shared = nameless()
    entries = Entries(shared, lambda region: PAGE_BYTES)
    for now in (*STATES, 5, 1 << 63):
        for to in (*STATES, 5):
            shared.words[entries.at(2) + Entry.state] = now
            before = bytes(shared.memory)
            if (now, to) in MOVES:
                entries.move(2, to)
                assert entries.state(2) == to
                shared.words[entries.at(2) + Entry.state] = now
            else:
                with pytest.raises(shmkv.SegmentBroken, match=f"slot 2: no move leads from state {now} to {to}"):
                    entries.move(2, to)
            assert bytes(shared.memory) == before, (now, to)


def test_slots_out_of_bounds_are_refused():
    entries = Entries(nameless(), lambda region: PAGE_BYTES)
    for slot in (-1, 4, 1 << 40):
        for call in (entries.at, entries.state, entries.run, entries.meta, lambda slot: entries.move(slot, RESERVED)):
            with pytest.raises(shmkv.SegmentBroken, match="slot"):
                call(slot)


@pytest.mark.parametrize("at, nbytes", [("run_at", "run_bytes"), ("meta_at", "meta_bytes"), ("meta_at", "key_bytes")])
def test_offsets_out_of_bounds_are_refused(at, nbytes):
    shared = nameless()
    entries = Entries(shared, lambda region: PAGE_BYTES)
    look = {"run_bytes": entries.run, "meta_bytes": entries.meta, "key_bytes": entries.key_span}[nbytes]
    for start, length in ((0, PAGE_BYTES + 1), (PAGE_BYTES, 1), ((1 << 64) - 1, 2), (2, (1 << 64) - 1)):
        shared.words[entries.at(1) + getattr(Entry, at)] = start
        shared.words[entries.at(1) + getattr(Entry, nbytes)] = length
        with pytest.raises(shmkv.SegmentBroken, match="outside"):
            look(1)


def test_the_stack_of_free_slots_is_rebuilt_from_the_states():
    shared = nameless()
    entries = Entries(shared, lambda region: PAGE_BYTES)
    for slot, state in enumerate((FREE, READY, FREE, DROPPED)):
        shared.words[entries.at(slot)] = state
    entries.rebuild_free()
    assert entries.peek_free() == 0 and entries.free_count() == 2
    entries.pop_free()
    assert entries.peek_free() == 2
    entries.pop_free()
    assert entries.peek_free() is None
    assert entries.slots() == [1, 3] and entries.slots(FREE) == [0, 2] and entries.slots(READY, DROPPED) == [1, 3]
    for _ in range(4):
        entries.push_free(0)
    with pytest.raises(shmkv.SegmentBroken, match="full"):
        entries.push_free(0)


# ---------------------------------------------------------------- leases

def fresh_leases():
    found = Leases(nameless(leases=3))
    found.rebuild_free()
    return found


def held(leases, slot=1, kind=LeaseKind.TAKE):
    hold = Hold()
    leases.hold(hold, kind, slot, 7, 1, 2)
    return hold


def words_of(leases, index):
    at = leases.at(index)
    return {name: leases._words[at + i] for i, name in enumerate(Lease.names)}


def test_a_lease_is_held_released_collected_and_free():
    leases = fresh_leases()
    hold = held(leases)
    assert leases.held() == [hold.index] and leases.n_free() == 2
    assert not leases.is_released(hold.index) and leases.released() == []
    record = words_of(leases, hold.index)
    assert (record["held"], record["released"], record["kind"], record["slot"]) == (hold.generation, 0, 2, 1)
    assert (record["entry_generation"], record["peer"], record["peer_generation"]) == (7, 1, 2)
    assert record["thread"] == threading.get_native_id()
    hold.outcome = Outcome.CONSUMED
    assert leases.release(hold)
    assert leases._words[Header.releases_pending] == 1
    assert leases.released() == [hold.index] and leases._words[Header.releases_pending] == 0
    assert words_of(leases, hold.index)["outcome"] == Outcome.CONSUMED
    assert leases.n_free() == 2, "a released lease was free before it was collected"
    leases.free(hold.index)
    assert leases.held() == [] and leases.n_free() == 3 and leases._words[Header.leases_high] == 0


def test_releasing_twice_or_late_has_no_effect():
    leases = fresh_leases()
    hold = held(leases)
    assert leases.release(hold)
    before = bytes(leases._words)
    hold.outcome = Outcome.CONSUMED
    assert not leases.release(hold) and bytes(leases._words) == before, "the second release changed the outcome"
    leases.free(hold.index)
    assert not leases.release(hold)
    heir = held(leases, slot=3)
    assert heir.index == hold.index and heir.generation == hold.generation + 1
    before = bytes(leases._words)
    assert not leases.release(hold) and bytes(leases._words) == before, "a late release ended another's lease"
    assert not leases.is_released(heir.index) and leases.release(heir)
    assert not leases.release(Hold()), "a hold without a lease ended one"


def test_freeing_too_often_and_a_count_out_of_bounds_are_refused():
    leases = fresh_leases()
    hold = held(leases)
    leases.free(hold.index)
    with pytest.raises(shmkv.SegmentBroken, match="full"):
        leases.free(hold.index)
    leases._words[Header.leases_high] = 4
    with pytest.raises(shmkv.SegmentBroken, match="4 leases in use of 3"):
        leases.held()


def test_free_leases_are_rebuilt_from_the_records():
    leases = fresh_leases()
    first, second = held(leases), held(leases)
    leases._words[Header.free_leases] = leases._words[Header.leases_high] = 0
    leases.rebuild_free()
    assert sorted(leases.held()) == sorted([first.index, second.index]) and leases.n_free() == 1
    assert held(leases).index not in (first.index, second.index) and leases.n_free() == 0


def test_a_hit_is_released_once_however_often_it_is_told(kv_buffer):
    kv_buffer.insert([1], X)
    kv_buffer.insert([1], X)
    hit = kv_buffer.drop_select([1])
    hit.release(), hit.release(), hit.release(returned=True)
    heir = kv_buffer.drop_select([1])
    hit.release(returned=True)
    del hit
    assert kv_buffer.stats().held_leases == 1
    assert not kv_buffer.select([1]), "a late release put an entry back that somebody else holds"
    assert heir["x"].equal(X["x"])
    assert kv_buffer.stats().counters["consumed"] == 1


# ---------------------------------------------------------------- full tables

def test_all_leases_held_is_said_and_passes(kv_create):
    buffer = kv_create(leases=2)
    for token in (1, 2, 3):
        buffer.insert([token], X)
    hits = [buffer.select([1]), buffer.drop_select([2])]
    for look in (buffer.select, buffer.drop_select):
        with pytest.raises(shmkv.TableFull, match="all 2 lease records are held.*leases="):
            look([3])
    assert not buffer.select([9]), "a miss needs no lease"
    with pytest.raises(shmkv.ArenaFull, match="all 2 leases are held"):
        buffer.insert([4], X, on_full="error")
    assert buffer.problems() == []
    hits[0].release()
    assert buffer.drop_select([3], copy=True)["x"].equal(X["x"])
    buffer.insert([4], X)


def test_all_slots_in_use_is_said_and_passes(kv_create):
    buffer = kv_create(slots=2)
    for token in (1, 2):
        buffer.insert([token], X)
    with pytest.raises(shmkv.ArenaFull, match="all 2 slots hold entries"):
        buffer.insert([3], X, on_full="error")
    with pytest.raises(shmkv.TimedOut, match="all 2 slots hold entries"):
        buffer.insert([3], X, timeout=0.05)
    buffer.drop_select([1]).release()
    buffer.insert([3], X)
    buffer.insert([4], X, on_full="evict")
    assert [bool(buffer.select([token])) for token in (1, 2, 3, 4)] == [False, False, True, True]


def test_all_peer_records_taken_is_said_and_passes(kv_create):
    buffer = kv_create(peers=2)
    other = shmkv.attach(buffer.name)
    with pytest.raises(shmkv.TableFull, match="all 2 peer records are taken.*peers="):
        shmkv.attach(buffer.name)
    buffer.insert([1], X)
    assert other.drop_select([1], copy=True)
    other.close()
    with shmkv.attach(buffer.name) as third:
        assert third.stats().peers == 2


def die_holding(name, what):
    """Leave one record of a kind behind: of a peer, a lease, a wait."""
    buffer = shmkv.attach(name)
    if what == "leases":
        hit = buffer.select([1])
        assert hit
    elif what == "waits":
        threading.Thread(target=buffer.select, args=([2],), kwargs={"timeout": 30}, daemon=True).start()
        eventually(lambda: buffer.stats().waiting["entry"])
    os._exit(0)


def what_the_dead_hold(buffer, what):
    """Ask for the record that a dead process holds: "" if it is given, else what was said."""
    try:
        if what == "peers":
            shmkv.attach(buffer.name).close()
        elif what == "leases":
            assert buffer.select([1], timeout=1)
        else:
            assert not buffer.select([2], timeout=0.05)
    except shmkv.TableFull as full:
        return str(full)
    return ""


@pytest.mark.parametrize("what", ["peers", "leases", "waits"])
def test_a_table_filled_by_the_dead_is_not_full(kv_create, kv_spawn, what):
    buffer = kv_create(**{"peers": 2, what: 2 if what == "peers" else 1})
    buffer.insert([1], X)
    child = kv_spawn(die_holding, buffer.name, what)
    child.join()
    said = what_the_dead_hold(buffer, what)
    assert not buffer.select([9]), "a look that does not wait looks for the dead"
    assert buffer.stats().peers == 1 and said == ""


def test_all_wait_records_taken_is_said_and_passes(kv_create):
    buffer = kv_create(waits=1)
    waiter = threading.Thread(target=buffer.select, args=([1],), kwargs={"timeout": 20})
    waiter.start()
    eventually(lambda: buffer.stats().waiting["entry"])
    for wait in (lambda: buffer.select([2], timeout=1), lambda: buffer.signals(timeout=1)):
        with pytest.raises(shmkv.TableFull, match="all 1 wait records are taken.*waits="):
            wait()
    assert not buffer.select([2]), "a look that does not wait needs no record"
    buffer.insert([1], X)
    waiter.join(20)
    assert not waiter.is_alive() and not buffer.select([2], timeout=0.02)
