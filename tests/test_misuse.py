"""What an adversary tried: closing amid others, handlers that call back in, copies of handles, hostile words."""

import copy
import os
import pickle
import random
import signal
import sys
import threading
import time

import pytest
import torch

import shmkv
from shmkv import leases, store
from shmkv.layout import Layout
from shmkv.testing import eventually
from shmkv.transport.host import HostTransport

X = {"x": torch.arange(8)}


def churn(buffer, seen):
    try:
        while True:
            buffer.insert([1, threading.get_ident() % 9], X, on_full="evict", timeout=0)
            with buffer.drop_select([1, 2, 3]):
                pass
    except shmkv.ShmkvError as error:
        seen.append(type(error))
    except BaseException as error:
        seen.append(error)


def test_closing_a_handle_that_other_threads_use_hurts_no_one(kv_create):
    host = kv_create(capacity=256 << 10, slots=16)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(60):
            buffer, seen = shmkv.attach(host.name), []
            threads = [threading.Thread(target=churn, args=(buffer, seen)) for _ in range(4)]
            for thread in threads:
                thread.start()
            before = host.stats().counters["inserts"]
            eventually(lambda: host.stats().counters["inserts"] > before)  # noqa: B023 (asked here and now)
            buffer.close()
            for thread in threads:
                thread.join(20)
            assert seen == [shmkv.ClosedError] * 4
            assert host.problems() == []
    finally:
        sys.setswitchinterval(interval)
    assert host.stats().counters["recoveries"] == 0


def test_close_from_a_handler_in_the_midst_of_a_section_is_put_off(kv_buffer, monkeypatch):
    buffer, taken = shmkv.attach(kv_buffer.name), store.Store._take

    def interrupted(self, slot):
        signal.raise_signal(signal.SIGUSR1)
        taken(self, slot)

    monkeypatch.setattr(store.Store, "_take", interrupted)
    old = signal.signal(signal.SIGUSR1, lambda *_: buffer.close())
    try:
        kv_buffer.insert([1], X)
        with pytest.raises(shmkv.ClosedError):
            buffer.drop_select([1])
            buffer.stats()
    finally:
        signal.signal(signal.SIGUSR1, old)
    monkeypatch.undo()
    assert buffer.closed and kv_buffer.problems() == []
    assert kv_buffer.insert([2], X) and kv_buffer.drop_select([2])


def test_a_look_up_in_a_handler_does_not_disturb_the_wait_it_interrupts(kv_buffer):
    old = signal.signal(signal.SIGALRM, lambda *_: kv_buffer.select([9], timeout=0.02))
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        assert not kv_buffer.drop_select([1], timeout=0.3)
        assert kv_buffer.stats().waiting["entry"] == 0
    finally:
        signal.signal(signal.SIGALRM, old)


def test_a_hit_released_while_it_is_being_mapped_shows_no_other_entry(kv_create, monkeypatch):
    buffer = kv_create(capacity=4096)
    views, mapping, go_on = HostTransport.views, threading.Event(), threading.Event()

    def slowly(self, *arguments):
        mapping.set()
        assert go_on.wait(20)
        return views(self, *arguments)

    monkeypatch.setattr(HostTransport, "views", slowly)
    buffer.insert([1], X)
    hit, outcome = buffer.drop_select([1]), []

    def look():
        try:
            outcome.append(hit["x"].tolist())
        except shmkv.ClosedError:
            outcome.append("closed")

    thread = threading.Thread(target=look)
    thread.start()
    assert mapping.wait(20)
    hit.release()
    with pytest.raises(shmkv.ArenaFull):
        buffer.insert([2], X, timeout=0)
    go_on.set()
    thread.join(20)
    assert outcome == ["closed"]
    buffer.insert([2], X, timeout=5)


@pytest.mark.parametrize("act", [copy.copy, copy.deepcopy, pickle.dumps])
def test_handles_are_neither_copied_nor_pickled(kv_buffer, act):
    kv_buffer.insert([1], X)
    for handle in (kv_buffer, kv_buffer.select([1]), kv_buffer.reserve([2], X)):
        with pytest.raises(shmkv.InvalidArgument, match="neither copied nor pickled"):
            act(handle)


def test_a_bad_role_costs_nothing(kv_create):
    buffer = kv_create(peers=2)
    for role in (5, None, b"x", "x" * 33, "a\nb"):
        with pytest.raises(shmkv.InvalidArgument, match="role="):
            shmkv.attach(buffer.name, role=role)
    shmkv.attach(buffer.name, role="decode").close()


def die_owning(name):
    buffer = shmkv.create(name, capacity="1MiB", slots=8)
    buffer.insert([1, 2], X)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("guest_is_there", [False, True])
def test_who_takes_a_dead_owners_place_removes_the_name(kv_spawn, guest_is_there):
    name = f"t{os.getpid()}-owner-{guest_is_there}"
    guest = None
    if guest_is_there:
        waiting = threading.Thread(target=lambda: guests.append(shmkv.attach(name, timeout=20)))
        guests = []
        waiting.start()
    child = kv_spawn(die_owning, name)
    assert child.join() == -signal.SIGKILL
    if guest_is_there:
        waiting.join(20)
        guest = guests[0]
        with pytest.raises(shmkv.SegmentExists):
            shmkv.create(name, capacity="1MiB", slots=8)
    heir = shmkv.create(name, exist_ok=True)
    assert heir.select([1, 2, 3]).matched_tokens == 2
    heir.close()
    with pytest.raises(shmkv.NoSuchSegment):
        shmkv.attach(name)
    if guest is not None:
        assert guest.problems() == []
        guest.close()


def test_a_name_of_the_dead_is_free_again(kv_spawn):
    name = f"t{os.getpid()}-dead"
    assert kv_spawn(die_owning, name).join() == -signal.SIGKILL
    with shmkv.create(name, capacity="1MiB", slots=8) as buffer:
        assert buffer.stats().entries["free"] == 8


def create_or_attach(name):
    with shmkv.create(name, capacity="1MiB", slots=8, exist_ok=True) as buffer:
        return buffer.insert([1], X, on_full="evict")


def test_many_may_create_or_attach_at_once(kv_spawn):
    for round_ in range(5):
        children = [kv_spawn(create_or_attach, f"t{os.getpid()}-race{round_}") for _ in range(6)]
        assert all(child.result() > 0 for child in children)


def block(name):
    with shmkv.attach(name) as buffer:
        buffer.insert([2], {"x": torch.zeros(4096, dtype=torch.uint8)})
        buffer.insert([3], {"x": torch.zeros(4096, dtype=torch.uint8)}, timeout=30)


def test_a_consumer_that_once_inserted_does_not_starve(kv_create, kv_spawn):
    buffer = kv_create(capacity=8192)
    buffer.insert([1], X)
    child = kv_spawn(block, buffer.name)
    eventually(lambda: buffer.stats().waiting["room"])
    started = time.monotonic()
    miss = buffer.drop_select([3], timeout=20)
    assert not miss and "full" in miss.reason and time.monotonic() - started < 5
    buffer.drop_select([1]).release()
    child.result()


def test_the_shortest_ttl_is_one(kv_buffer):
    kv_buffer.insert([1], X, ttl=1e-12)
    assert not kv_buffer.select([1])


@pytest.mark.parametrize("target", [[1], None, torch.zeros(8, device="meta", dtype=torch.int64),
                                    torch.zeros(1, dtype=torch.int64).expand(8)], ids=str)
def test_copy_to_names_a_target_that_cannot_be(kv_buffer, target):
    kv_buffer.insert([1], X)
    with kv_buffer.select([1]) as hit, pytest.raises(shmkv.InvalidTensor):
        hit.copy_to({"x": target})


def test_a_miss_and_a_misspelt_tensor_say_what_there_is(kv_buffer):
    with pytest.raises(KeyError, match="no such entry.*if hit"):
        kv_buffer.select([1])["x"]
    kv_buffer.insert([1], X)
    with pytest.raises(KeyError, match="no tensor 'y'.*'x'"):
        kv_buffer.select([1])["y"]


def words_to_spoil(layout: Layout):
    areas = [area for area in layout.areas if area.name not in ("payload arena", "header")]
    return [area.at // 8 + offset for area in areas for offset in range(area.nbytes // 8)]


def test_hostile_words_are_errors_of_ours_or_misses(kv_spawn):
    for seed in range(4):
        assert kv_spawn(meet_hostile_words, seed, 12).result(50) == []


def meet_hostile_words(seed, rounds):
    """Spoil words under a live buffer; returns what was neither a result nor an error of the family."""
    chance, strange = random.Random(seed), []
    for _ in range(rounds):
        buffer = shmkv.create(capacity=64 << 10, slots=8, leases=8, peers=2, waits=2, meta_capacity=8192)
        for token in range(4):
            buffer.insert([1, token], X, ttl=chance.choice([None, 5]))
        hits = [buffer.select([1, 0])]
        words = buffer._session.segment.words
        for at in chance.sample(words_to_spoil(buffer._session.segment.layout), 400):
            words[at] = chance.choice([0, 1, 7, 1 << 20, 1 << 63, 2**64 - 1, words[at] ^ 1 << chance.randrange(64)])
        for call in (lambda b=buffer: b.drop_select([1, 1]), lambda b=buffer: b.insert([1, 9], X, timeout=0),
                     lambda b=buffer: b.select([1, 2], match="overlap", timeout=0.01),
                     lambda b=buffer: b.cancel([1, 3]),
                     lambda b=buffer: b.signals(), lambda b=buffer: b.stats(), lambda b=buffer: b.problems(),
                     lambda h=hits: h.clear(), lambda b=buffer: b.close()):
            try:
                call()
            except shmkv.ShmkvError:
                pass
            except Exception as error:
                strange.append(repr(error))
        os.unlink(buffer._session.segment.path) if os.path.exists(buffer._session.segment.path) else None
        del buffer
    return strange


def test_hostile_words_would_be_noticed(kv_spawn):
    """Control: without the translation in the section, raw errors come out."""
    assert kv_spawn(meet_hostile_words_untranslated).result(50) != []


def meet_hostile_words_untranslated():
    store._NONSENSE = ()
    return meet_hostile_words(0, 30)


def test_a_fork_amid_attaching_threads_leaves_no_claim_in_the_child(kv_create):
    host, stop = kv_create(peers=16), threading.Event()

    def attach():
        while not stop.is_set():
            shmkv.attach(host.name).close()

    threads = [threading.Thread(target=attach) for _ in range(3)]
    for thread in threads:
        thread.start()
    found = []
    try:
        for _ in range(60):
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.write(write, b"x" * locked_descriptors(host.name))
                os._exit(0)
            os.close(write)
            found.append(len(os.read(read, 100)))
            os.close(read)
            os.waitpid(pid, 0)
    finally:
        stop.set()
        for thread in threads:
            thread.join(20)
    assert not any(found)


def locked_descriptors(name):
    """How many descriptors of this process carry a lock on the segment."""
    n_locked = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            if name in os.readlink(f"/proc/self/fd/{fd}"):
                with open(f"/proc/self/fdinfo/{fd}") as file:
                    n_locked += "lock:" in file.read()
        except OSError:
            pass
    return n_locked


def test_a_hold_names_its_lease_only_while_it_is_held(kv_buffer):
    kv_buffer.insert([1], X)
    hit = kv_buffer.drop_select([1])
    assert hit.hold.outcome == leases.Outcome.CONSUMED
    hit.release(returned=True)
    assert kv_buffer.drop_select([1], copy=True)["x"].equal(X["x"])


def test_a_release_is_not_forgotten_when_its_collection_is_cut_short(kv_buffer, monkeypatch):
    kv_buffer.insert([1], {"x": torch.ones(4)})
    hit, held, cut = kv_buffer.drop_select([1]), leases.Leases.held, []

    def interrupted(self):
        if not cut:
            cut.append(1)
            raise KeyboardInterrupt
        return held(self)

    monkeypatch.setattr(leases.Leases, "held", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hit.release()
    stats = kv_buffer.stats()
    assert (stats.held_leases, stats.used_bytes, stats.counters["consumed"]) == (0, 0, 1)
