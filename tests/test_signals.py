"""A ring of signals keeps order, loses only the newest, counts what it loses, and stays readable whoever dies in it."""

import os
import threading
import time

import pytest
import torch

import shmkv
from shmkv import segment, sync
from shmkv.layout import PAGE_BYTES, Counter, Geometry, Layout, Peer
from shmkv.signals import SignalKind, Signals
from shmkv.testing import die_at_store, eventually, unique_name

ENDLESS = 1 << 64
X = {"x": torch.zeros(4096, dtype=torch.uint8)}
NEAR_WRAP = [0, 1, ENDLESS - 1, ENDLESS - 2, ENDLESS - 5]


class Ring:
    """The rings of a nameless segment, with head and tail where we want them."""

    def __init__(self, size, start=0, peers=2):
        geometry = Geometry(slots=1, peers=peers, leases=1, waits=1, ring=size, journal=1, meta_bytes=PAGE_BYTES,
                            arena_bytes=PAGE_BYTES, device_arenas=0, registrations=0)
        self.segment = segment.create(unique_name(), Layout(geometry))
        self.signals, self.words = Signals(self.segment), self.segment.words
        area = self.segment.layout.peers
        self.at = [area.word + peer * area.stride for peer in range(peers)]
        for at in self.at:
            self.words[at + Peer.ring_head] = self.words[at + Peer.ring_tail] = start

    def post(self, sequence, peer=0):
        return self.signals.post(peer, SignalKind.TAKEN, 1, sequence, 2 * sequence, 3 * sequence)

    def read(self, peer=0):
        found = self.signals.read(peer)
        assert all((s.kind, s.sender, s.slot, s.value) == (SignalKind.TAKEN, 1, 2 * s.sequence, 3 * s.sequence)
                   for s in found), "a torn signal"
        assert [s.time_ns for s in found] == sorted(s.time_ns for s in found)
        return [signal.sequence for signal in found]

    def counter(self, index):
        return self.words[self.segment.layout.counters.word + index]


@pytest.mark.parametrize("size", [1, 2, 8])
def test_order_and_each_signal_once_across_the_wrap_of_ring_and_counter(size):
    for start in NEAR_WRAP:
        ring, sequence = Ring(size, start), 0
        for burst in (*range(size + 1), *range(size, 0, -1)):
            posted = list(range(sequence, sequence + burst))
            assert all(ring.post(i) for i in posted)
            assert ring.signals.pending(0) == burst and ring.signals.pending(1) == 0
            assert ring.read() == posted and ring.read() == []
            sequence += burst
        assert ring.words[ring.at[0] + Peer.ring_head] == (start + sequence) % ENDLESS
        assert ring.counter(Counter.signals) == sequence and ring.counter(Counter.signals_dropped) == 0


@pytest.mark.parametrize("size", [1, 2, 8])
def test_a_full_ring_loses_the_newest_and_counts_them(size):
    for start in NEAR_WRAP:
        ring = Ring(size, start)
        assert [ring.post(i) for i in range(size + 3)] == [True] * size + [False] * 3
        assert ring.post(7, peer=1), "one peer's full ring stopped another's"
        assert ring.read() == list(range(size)) and ring.read(1) == [7]
        assert ring.words[ring.at[0] + Peer.ring_dropped] == ring.counter(Counter.signals_dropped) == 3
        assert ring.post(99) and ring.read() == [99]


def test_rings_of_neighbours_do_not_touch():
    ring = Ring(4, peers=5)
    for i in range(4):
        for peer in range(5):
            assert ring.post(10 * peer + i, peer)
    assert [ring.read(peer) for peer in range(5)] == [[10 * peer + i for i in range(4)] for peer in range(5)]


def test_a_head_out_of_bounds_is_read_as_a_full_ring_at_most():
    ring = Ring(4)
    for i in range(4):
        ring.post(i)
    ring.words[ring.at[0] + Peer.ring_head] = 1 << 40
    assert len(ring.read()) <= 4 and ring.read() == []


def stores_of_a_post(ring):
    with die_at_store() as count:
        ring.post(0)
    assert ring.read() == [0]
    return count.stores


@pytest.mark.parametrize("size, start", [(1, 0), (4, 0), (4, ENDLESS - 2)])
def test_a_writer_killed_at_any_store_leaves_a_readable_ring(size, start):
    ring, seen = Ring(size, start), set()
    n_stores = stores_of_a_post(ring)
    assert n_stores >= 9, "the hook sees no stores"
    for k in range(1, n_stores + 2):
        before = [10 * k + i for i in range(size - 1)]
        assert all(ring.post(i) for i in before)
        pid = os.fork()
        if pid == 0:
            with die_at_store(k):
                ring.post(10 * k + 5)
            os._exit(0)
        died = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert died == (-9 if k <= n_stores else 0)
        found = ring.read()
        assert found in (before, [*before, 10 * k + 5])
        seen.add(len(found) - len(before))
        assert ring.post(10 * k + 6) and ring.read() == [10 * k + 6], "the ring did not go on"
    assert seen == {0, 1}


def test_a_reader_killed_before_the_tail_moved_reads_again():
    ring = Ring(4)
    assert ring.post(1) and ring.post(2)
    pid = os.fork()
    if pid == 0:
        with die_at_store(1):
            ring.read()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9
    assert ring.read() == [1, 2]


# ---------------------------------------------------------------- news through the public face

def kinds(buffer, timeout=10.0):
    return [(signal.kind.name, signal.sequence) for signal in buffer.signals(timeout=timeout)]


def use(name, kind):
    """A second process does what the first is told of; returns its own news."""
    with shmkv.attach(name) as buffer:
        if kind == "READY":
            hit = buffer.drop_select([1], timeout=20)
            assert hit
        elif kind == "ROOM":
            buffer.insert([2], X, timeout=20)
        elif kind == "RELEASED":
            buffer.drop_select([1]).release()
            buffer.stats()
        elif kind == "TAKEN":
            assert buffer.drop_select([1])["x"].shape == (4096,)
        elif kind == "CANCELLED":
            assert buffer.cancel([1]) == 1
        return kinds(buffer, 0), buffer._session.index


def test_a_consumer_is_told_ready(kv_buffer, kv_spawn):
    child = kv_spawn(use, kv_buffer.name, "READY")
    eventually(lambda: kv_buffer.stats().waiting["entry"])
    kv_buffer.insert([1], X)
    assert "READY" in [kind for kind, _ in child.result()[0]]


def test_a_producer_is_told_room(kv_create, kv_spawn):
    buffer = kv_create(capacity=4096)
    buffer.insert([1], X)
    child = kv_spawn(use, buffer.name, "ROOM")
    eventually(lambda: buffer.stats().waiting["room"])
    buffer.drop_select([1]).release()
    buffer.stats()
    assert "ROOM" in [kind for kind, _ in child.result()[0]]
    assert buffer.drop_select([2])


def test_a_producer_is_told_what_became_of_its_entry(kv_buffer, kv_spawn):
    expected = {"TAKEN": ["TAKEN", "RELEASED", "CLOSED"], "RELEASED": ["TAKEN", "RELEASED", "CLOSED"],
                "CANCELLED": ["CANCELLED", "RELEASED", "CLOSED"], "": ["CLOSED"]}
    for kind, told in expected.items():
        sequence = kv_buffer.insert([1], X)
        child = kv_spawn(use, kv_buffer.name, kind)
        peer = child.result()[1]
        child.join()
        news = kv_buffer.signals(timeout=10)
        assert [signal.kind.name for signal in news] == told
        assert {signal.sequence for signal in news if signal.kind != SignalKind.CLOSED} <= {sequence}
        assert (news[-1].sender, news[-1].value) == (peer, peer)
        assert kinds(kv_buffer, 0) == []
    assert kv_buffer.drop_select([1])


def stay(name):
    buffer = shmkv.attach(name)
    buffer.insert([5], X)
    time.sleep(60)


def test_a_killed_peer_is_told_as_closed(kv_buffer, kv_spawn):
    child = kv_spawn(stay, kv_buffer.name)
    assert kv_buffer.select([5], timeout=20)
    kv_buffer.signals()
    child.kill()
    before = time.monotonic()
    eventually(lambda: not kv_buffer.select([9]) and kv_buffer.stats().peers == 1)
    assert kinds(kv_buffer, 5) == [("CLOSED", 0)] and time.monotonic() - before < 1


def take_soon(name):
    with shmkv.attach(name) as buffer:
        eventually(lambda: buffer.stats().waiting["signal"])
        hit = buffer.drop_select([1])
        at = time.monotonic()
        hit.release()
        eventually(lambda: not buffer.stats().waiting["signal"])
        return at


def test_waiting_for_signals_ends_with_news_and_not_before(kv_buffer, kv_spawn, monkeypatch):
    monkeypatch.setattr(sync, "RECHECK_NS", 30_000_000_000)  # nothing but its bell will wake it
    before = time.monotonic()
    assert kv_buffer.signals(timeout=0.3) == [] and 0.3 <= time.monotonic() - before < 1
    assert kv_buffer.signals() == [] and kv_buffer.signals(timeout=0) == []
    kv_buffer.insert([1], X)
    child = kv_spawn(take_soon, kv_buffer.name)
    told = kinds(kv_buffer, 25)
    woken = time.monotonic()
    assert told and told[0][0] == "TAKEN"
    assert woken - child.result() < 0.5


def test_news_that_is_not_read_is_lost_newest_first_and_counted(kv_buffer):
    first = kv_buffer.insert([1], X)
    size = kv_buffer._session.segment.layout.geometry.ring
    with shmkv.attach(kv_buffer.name) as other:
        sequences = [first]
        for _ in range(size):
            other.drop_select([1]).release()
            sequences.append(kv_buffer.insert([1], X))
    news = kv_buffer.signals()
    assert len(news) == size
    told = [signal.sequence for signal in news if signal.kind == SignalKind.TAKEN]
    assert told == sequences[:len(told)]
    assert kv_buffer.stats().counters["signals_dropped"] >= size
    kv_buffer.drop_select([1]).release()
    assert [signal.kind.name for signal in kv_buffer.signals()][0] == "TAKEN"


def test_threads_of_one_handle_get_each_signal_once(kv_buffer, monkeypatch):
    got, meet, look = [], threading.Barrier(2), Signals._signal

    def look_together(signals, record):
        try:
            meet.wait(0.3)
        except threading.BrokenBarrierError:
            pass  # the other thread is kept out
        return look(signals, record)

    shmkv.attach(kv_buffer.name).close()
    monkeypatch.setattr(Signals, "_signal", look_together)
    threads = [threading.Thread(target=lambda: got.extend(kv_buffer.signals())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [signal.kind.name for signal in got] == ["CLOSED"]
