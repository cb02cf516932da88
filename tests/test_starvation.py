"""A consumer gets its miss early exactly when nobody can go on without it, or nobody is left who might insert."""

import threading
import time

import pytest
import torch

import shmkv
from shmkv import Spec, sync
from shmkv.starvation import FULL, ORPHANED
from shmkv.testing import eventually

X = {"x": torch.zeros(4096, dtype=torch.uint8)}
LATE = "no such entry within"
PATIENCE_S = sync.RECHECK_NS / 1e9 + 0.25  # longer than any waiter sleeps without looking
NOTICED_S = 2.0


class Waiter(threading.Thread):
    """A thread in the midst of one call."""

    def __init__(self, call, *args, **kwargs):
        super().__init__(daemon=True)
        self.call, self.result = lambda: call(*args, **kwargs), None
        self.start()

    def run(self):
        self.result = self.call()

    def outcome(self, timeout=NOTICED_S):
        self.join(timeout)
        assert not self.is_alive(), "it still waits"
        return getattr(self.result, "reason", self.result)

    def still_waits(self):
        self.join(PATIENCE_S)
        return self.is_alive()


class Scene:
    """A full buffer of two pages, a producer that is blocked, and a consumer that waits for what cannot enter."""

    def __init__(self, kv_create):
        self.buffer = kv_create(capacity=8192)
        self.consumer = shmkv.attach(self.buffer.name)
        for token in (1, 2):
            self.buffer.insert([token], X)

    def waiting(self, kind):
        return self.buffer.stats().waiting[kind]

    def block(self, token=3):
        """A thread of the producer that waits for room."""
        before = self.waiting("room")
        thread = Waiter(self.buffer.insert, [token], X, timeout=20)
        eventually(lambda: self.waiting("room") == before + 1)
        return thread

    def starve(self, token=9, consumer=None):
        """A thread of a consumer that waits for an entry that is not there."""
        before = self.waiting("entry")
        thread = Waiter((consumer or self.consumer).drop_select, [token], timeout=20)
        eventually(lambda: self.waiting("entry") == before + 1 or not thread.is_alive())
        return thread

    def end(self, *threads):
        """Make room until everybody has come home."""
        eventually(lambda: [self.buffer.drop_select([token]) for token in range(1, 12)]
                   and not any(thread.is_alive() for thread in threads), 15)
        self.consumer.close()


@pytest.fixture
def scene(kv_create):
    return Scene(kv_create)


# ---------------------------------------------------------------- the historic deadlock

def produce(name, tokens):
    with shmkv.attach(name) as buffer:
        for token in tokens:
            buffer.insert([token], X, timeout=25)
    return "all inserted"


def consume_until_found(name, token):
    """Ask for one entry; on an early miss make room by taking others, as a decode process would."""
    reasons, took = [], []
    with shmkv.attach(name) as buffer:
        while True:
            started = time.monotonic()
            with buffer.drop_select([token], timeout=25) as hit:
                took.append(time.monotonic() - started)
                if hit:
                    return reasons, max(took)
                reasons.append(hit.reason)
            for other in range(token):
                if buffer.drop_select([other], copy=True):
                    break


@pytest.mark.parametrize("first", ["producer", "consumer"])
def test_a_full_producer_and_a_waiting_consumer_do_not_wait_for_each_other(kv_create, kv_spawn, first):
    buffer = kv_create(capacity=2 * 4096)
    if first == "producer":
        producer = kv_spawn(produce, buffer.name, range(6))
        eventually(lambda: buffer.stats().waiting["room"])
        consumer = kv_spawn(consume_until_found, buffer.name, 5)
    else:
        consumer = kv_spawn(consume_until_found, buffer.name, 5)
        eventually(lambda: buffer.stats().waiting["entry"])
        producer = kv_spawn(produce, buffer.name, range(6))
    reasons, longest = consumer.result()
    assert producer.result() == "all inserted"
    assert reasons and set(reasons) == {FULL} and longest < NOTICED_S
    assert buffer.stats().counters["starved"] == len(reasons)


def test_it_ends_between_threads_of_one_handle_too(kv_buffer, kv_create, monkeypatch):
    monkeypatch.setattr(sync, "RECHECK_NS", 30_000_000_000)  # the blocked producer itself must wake the consumer
    buffer = kv_create(capacity=4096)
    buffer.insert([1], X)
    consumer = Waiter(buffer.drop_select, [9], timeout=20)
    eventually(lambda: buffer.stats().waiting["entry"])
    producer = Waiter(buffer.insert, [2], X, timeout=20)
    with_miss = consumer.outcome()
    assert with_miss == FULL and not consumer.result
    with consumer.result as miss:
        assert not miss and FULL in repr(miss)
    buffer.drop_select([1]).release()
    assert producer.outcome() > 0


def test_the_oldest_waiter_gets_the_miss_and_the_others_wait_on(scene):
    second = shmkv.attach(scene.buffer.name)
    older, younger = scene.starve(8), scene.starve(9, second)
    producer = scene.block()
    assert older.outcome() == FULL
    assert younger.still_waits(), "two misses at a time"
    again = scene.starve(8)  # now the one that was younger has waited longest
    assert younger.outcome() == FULL
    assert again.still_waits()
    second.close()
    assert again.outcome() == FULL
    scene.end(producer)


# ---------------------------------------------------------------- somebody can still go on

def reserved_entry(scene):
    buffer, ready, go = scene.buffer, threading.Event(), {}

    def reserve_and_block():
        go["entry"] = buffer.reserve([5], {"x": Spec((4096,), torch.uint8)})
        ready.set()
        return buffer.insert([3], X, timeout=20)

    scene.consumer.drop_select([2]).release()
    thread = Waiter(reserve_and_block)
    ready.wait(10)
    eventually(lambda: scene.waiting("room"))
    return thread, lambda: go.pop("entry").seal()


def idle_consumer(scene):
    other = shmkv.attach(scene.buffer.name)
    assert not other.select([9])
    return scene.block(), other.close


def idle_producer(scene):
    other = shmkv.attach(scene.buffer.name)
    scene.consumer.drop_select([2]).release()
    other.insert([2], X)
    return scene.block(), other.close


def lease_of_a_running_thread(scene):
    hit = scene.consumer.select([1])
    assert hit["x"].shape == (4096,)
    return scene.block(), hit.release


def lease_of_a_running_producer(scene):
    """The tensors of a sealed entry, kept by a thread that still runs."""
    scene.consumer.drop_select([2]).release()
    kept = []
    with scene.buffer.reserve([2], {"x": Spec((4096,), torch.uint8)}) as entry:
        kept.append(entry["x"])
    return scene.block(), kept.clear


@pytest.mark.parametrize("obstacle", [
    reserved_entry, idle_consumer, idle_producer, lease_of_a_running_thread, lease_of_a_running_producer])
def test_the_miss_is_not_early_while_somebody_can_go_on(scene, obstacle):
    producer, remove = obstacle(scene)
    consumer = scene.starve()
    assert consumer.still_waits(), "the miss came although somebody could still go on"
    remove()
    del remove
    assert consumer.outcome() == FULL
    scene.end(producer)


def test_a_lease_of_a_thread_that_waits_itself_does_not_count(scene):
    got = []

    def hold_and_wait():
        got.append(scene.consumer.select([1]))
        return scene.consumer.drop_select([9], timeout=20)

    producer = scene.block()
    assert Waiter(hold_and_wait).outcome() == FULL
    got.pop().release()
    scene.end(producer)


def test_a_running_ttl_is_waited_for(scene):
    scene.consumer.drop_select([2]).release()
    scene.buffer.insert([2], X, ttl=1.5)
    producer, consumer = scene.block(), scene.starve()
    assert consumer.still_waits()
    assert producer.outcome(3) > 0, "the expired entry made no room"
    scene.buffer.insert([9], X, on_full="evict")
    assert consumer.outcome()
    scene.end()


def test_without_any_producer_so_far_the_deadline_is_kept(kv_buffer):
    with shmkv.attach(kv_buffer.name) as other:
        assert not other.select([1])
        started = time.monotonic()
        miss = kv_buffer.select([1], timeout=PATIENCE_S)
        assert PATIENCE_S <= time.monotonic() - started and miss.reason.startswith(LATE)


def test_a_producer_that_is_not_blocked_is_waited_for(scene):
    started = time.monotonic()
    assert scene.consumer.drop_select([9], timeout=PATIENCE_S).reason.startswith(LATE)
    assert PATIENCE_S <= time.monotonic() - started
    scene.end()


def test_a_producer_for_which_room_was_made_is_not_blocked(kv_create, kv_spawn):
    buffer = kv_create(capacity=4096)
    producer = kv_spawn(produce, buffer.name, (1, 2))
    eventually(lambda: buffer.stats().waiting["room"])
    producer.stop()
    assert buffer.drop_select([1], copy=True)
    reason = buffer.drop_select([2], timeout=PATIENCE_S).reason
    producer.resume()
    assert producer.result() == "all inserted"
    assert reason.startswith(LATE)


def look_then_produce(name):
    """As a prefill process does that reuses prefixes: one thread that looks up, then inserts."""
    with shmkv.attach(name) as buffer:
        assert not buffer.select([2])
        buffer.insert([1], X)
        with pytest.raises(shmkv.TimedOut):
            buffer.insert([2], X, timeout=2.5)


def test_a_producer_that_looks_up_first_is_as_blocked_as_any_other(kv_create, kv_spawn):
    buffer = kv_create(capacity=4096)
    producer = kv_spawn(look_then_produce, buffer.name)
    eventually(lambda: buffer.stats().waiting["room"])
    reason = buffer.drop_select([9], timeout=1.5).reason
    producer.result()
    assert reason == FULL


# ---------------------------------------------------------------- orphans

def insert_and_stay(name, how):
    buffer = shmkv.attach(name)
    buffer.insert([1], X)
    eventually(lambda: buffer.stats().waiting["entry"])
    if how == "close":
        buffer.close()
    elif how != "exit":
        time.sleep(60)


@pytest.mark.parametrize("how", ["close", "exit", "kill"])
def test_a_consumer_whose_producers_are_all_gone_is_told(kv_buffer, kv_spawn, how):
    child = kv_spawn(insert_and_stay, kv_buffer.name, how)
    assert kv_buffer.drop_select([1], timeout=20)
    consumer = Waiter(kv_buffer.select, [2], timeout=20)
    if how == "kill":
        assert consumer.still_waits()
        child.kill()
    else:
        child.join()
    assert consumer.outcome(1.0) == ORPHANED
    assert kv_buffer.stats().counters["orphaned"] == 1
    started = time.monotonic()
    assert kv_buffer.select([2], timeout=20).reason == ORPHANED and time.monotonic() - started < 0.3


def test_who_has_done_nothing_yet_may_become_a_producer(kv_buffer):
    producer = shmkv.attach(kv_buffer.name)
    producer.insert([1], X)
    newcomer = shmkv.attach(kv_buffer.name)
    producer.close()
    consumer = Waiter(kv_buffer.select, [2], timeout=20)
    assert consumer.still_waits()
    newcomer.close()
    assert consumer.outcome() == ORPHANED


def test_what_is_there_is_found_whoever_is_gone(kv_buffer):
    with shmkv.attach(kv_buffer.name) as producer:
        producer.insert([1], X)
    assert kv_buffer.drop_select([1], timeout=20)
    assert kv_buffer.drop_select([1], timeout=20).reason == ORPHANED
    assert "no such entry" in kv_buffer.drop_select([1]).reason
