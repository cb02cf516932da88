"""The lock excludes and dies with its holder; waits keep their deadlines whatever becomes of clocks, bells, signals."""

import functools
import gc
import math
import os
import resource
import signal
import sys
import threading
import time

import posix_ipc
import pytest
import torch

import shmkv
from shmkv import segment, sync
from shmkv.layout import Counter, Header, Wait
from shmkv.peers import Place, WaitState
from shmkv.testing import eventually

SPARE = Counter.words - 1  # a word of the counters that has no name yet: the tests' own shared scalar
X = {"x": torch.zeros(4096, dtype=torch.uint8)}
SLACK_S = 0.5


def spare(shared):
    assert SPARE >= len(Counter.names)
    return shared.layout.counters.word + SPARE


class Locked:
    """A second handle's view of a segment and its lock, without a peer record."""

    def __init__(self, name):
        self.segment = segment.attach(name)
        self.lock, self.words, self.at = sync.Lock(self.segment), self.segment.words, spare(self.segment)

    def run(self, body, timeout=0.0):
        return self.lock.run(body, sync.deadline(timeout))


def started(*threads):
    for thread in threads:
        thread.start()
    return threads


def joined(*threads):
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


# ---------------------------------------------------------------- exclusion

def add(words, at):
    """An increment that is not atomic: what comes between load and store is lost."""
    value = words[at]
    for _ in range(20):
        pass
    words[at] = value + 1


def add_often(name, n, locked):
    """Two threads on each of two handles of one process."""
    sys.setswitchinterval(1e-5)
    handles = [Locked(name), Locked(name)]

    def work(handle):
        for _ in range(n):
            if locked:
                handle.run(lambda: add(handle.words, handle.at), 60)
            else:
                add(handle.words, handle.at)

    joined(*started(*(threading.Thread(target=work, args=(handle,)) for handle in handles for _ in range(2))))


@pytest.mark.parametrize("locked", [True, False])
def test_the_lock_excludes_threads_handles_and_processes(kv_buffer, kv_spawn, locked):
    n = 500 if locked else 5000
    for child in [kv_spawn(add_often, kv_buffer.name, n, locked) for _ in range(2)]:
        child.result()
    shared = kv_buffer._session.segment
    counted = shared.words[spare(shared)]
    assert counted == 8 * n if locked else counted < 8 * n, "the control without a lock lost nothing"


def test_entering_twice_is_refused_at_once(kv_buffer):
    with shmkv.attach(kv_buffer.name) as other:
        def enter():
            for again in (kv_buffer, other):
                with pytest.raises(shmkv.ReentryError):
                    again.stats()
                with pytest.raises(shmkv.ReentryError):
                    again.select([1], timeout=5)
            return "once"

        before = time.monotonic()
        assert kv_buffer._session.run(enter, sync.deadline(5)) == "once"
        assert time.monotonic() - before < 1
        assert other.stats().peers == 2, "the refusal left the section closed"


def enter_from_a_handler(name):
    buffer, other, seen = shmkv.attach(name), shmkv.attach(name), []

    def handler(*_):
        for handle in (buffer, other):
            try:
                seen.append(handle.stats())
            except shmkv.ReentryError as error:
                seen.append(type(error).__name__)

    signal.signal(signal.SIGALRM, handler)

    def body():
        signal.setitimer(signal.ITIMER_REAL, 0.001)
        while not seen:
            pass

    buffer._session.run(body, sync.deadline(5))
    outside = buffer.stats().peers
    buffer.close(), other.close()
    return seen, outside


def test_a_signal_handler_in_the_midst_of_a_section_is_refused(kv_buffer, kv_spawn):
    assert kv_spawn(enter_from_a_handler, kv_buffer.name).result() == (["ReentryError", "ReentryError"], 3)


def test_an_exception_leaves_the_section_open_to_others(kv_buffer):
    handle = Locked(kv_buffer.name)
    for error in (ValueError, KeyboardInterrupt, SystemExit):
        def fail(error=error):
            raise error

        with pytest.raises(error):
            handle.run(fail)
        assert kv_buffer.stats()


def hold_until_told(name, told):
    """Hold the lock from when the spare word becomes 1 until it is `told`."""
    handle = Locked(name)

    def body():
        handle.words[handle.at] = 1
        eventually(lambda: handle.words[handle.at] == told, 60)

    handle.run(body)
    return True


def test_a_killed_holder_drops_the_lock_at_once(kv_buffer, kv_spawn):
    handle = Locked(kv_buffer.name)
    child = kv_spawn(hold_until_told, kv_buffer.name, 2)
    eventually(lambda: handle.words[handle.at] == 1)
    child.kill()
    before = time.monotonic()
    assert kv_buffer.stats() and time.monotonic() - before < 0.2


def test_a_stopped_holder_is_waited_for_and_then_timed_out(kv_buffer, kv_spawn):
    handle = Locked(kv_buffer.name)
    child = kv_spawn(hold_until_told, kv_buffer.name, 2)
    eventually(lambda: handle.words[handle.at] == 1)
    child.stop()
    before, cpu = time.monotonic(), time.process_time()
    with pytest.raises(shmkv.TimedOut, match="stopped"):
        kv_buffer.select([1], timeout=0)
    grace = sync.LOCK_GRACE_NS / 1e9
    assert grace <= time.monotonic() - before < grace + SLACK_S
    assert time.process_time() - cpu < grace / 2, "it was spun on"
    handle.words[handle.at] = 2
    child.resume()
    assert child.result() and not kv_buffer.select([1], timeout=0)


# ---------------------------------------------------------------- deadlines

def test_a_timeout_is_none_or_a_number_from_0(kv_buffer):
    for bad in (-1, -0.001, -math.inf, math.nan, "1", [1], 1j):
        for call in (lambda t: kv_buffer.select([1], timeout=t), lambda t: kv_buffer.drop_select([1], timeout=t),
                     lambda t: kv_buffer.insert([1], X, timeout=t), lambda t: kv_buffer.signals(timeout=t),
                     lambda t: shmkv.attach(kv_buffer.name, timeout=t)):
            with pytest.raises(shmkv.InvalidArgument, match="timeout="):
                call(bad)
    assert sync.deadline(None) == sync.FOREVER_NS and not sync.passed(sync.deadline(None))
    assert sync.passed(sync.deadline(0)) and sync.deadline(math.inf) > time.monotonic_ns() + 10**15
    assert kv_buffer.stats().entries["free"] == 256, "something was changed before the refusal"


def take(name, token, timeout):
    """Wait for one entry; returns how long after its making it was here, and how long the call took."""
    with shmkv.attach(name) as buffer:
        before = time.monotonic_ns()
        with buffer.drop_select([token], timeout=timeout) as hit:
            now = time.monotonic_ns()
            return (now - hit["made"].item()) / 1e9 if hit else None, (now - before) / 1e9


def made_now():
    return {"made": torch.tensor(time.monotonic_ns())}


def waiting(buffer, kind="entry"):
    return buffer.stats().waiting[kind]


def test_none_waits_for_ever(kv_buffer, kv_spawn):
    child = kv_spawn(take, kv_buffer.name, 1, None)
    eventually(lambda: waiting(kv_buffer))
    with pytest.raises(TimeoutError):
        child.result(2 * sync.RECHECK_NS / 1e9)
    kv_buffer.insert([1], made_now())
    assert child.result()[0] < SLACK_S


_ring = sync.Bells.ring


def lost(bells, at, name):
    pass


def doubled(bells, at, name):
    for _ in range(5):
        _ring(bells, at, name)


def stolen(bells, at, name):
    _ring(bells, at, name)
    try:
        bell = posix_ipc.Semaphore(name)
    except posix_ipc.ExistentialError:
        return  # the waiting thread has ended
    try:
        bell.acquire(0)
    except posix_ipc.BusyError:
        pass  # the waiter was faster
    bell.close()


@pytest.mark.parametrize("ring", [lost, doubled, stolen])
def test_what_happens_to_bells_changes_latency_and_never_a_result(kv_create, kv_spawn, monkeypatch, ring):
    monkeypatch.setattr(sync.Bells, "ring", ring)
    buffer = kv_create(capacity=8192)
    children = {token: kv_spawn(take, buffer.name, token, 20) for token in (1, 2)}
    in_vain = kv_spawn(take, buffer.name, 3, 1.0)
    eventually(lambda: waiting(buffer) == 3)
    for token in children:
        buffer.insert([token], made_now())
    for child in children.values():
        late, _ = child.result()
        assert late < sync.RECHECK_NS / 1e9 + SLACK_S
    missed, took = in_vain.result()
    assert missed is None and 1.0 <= took < 1.0 + SLACK_S
    room = threading.Thread(target=lambda: [buffer.insert([token], X, timeout=20) for token in (5, 6, 7)])
    joined(*started(room, threading.Thread(target=lambda: eventually(lambda: buffer.drop_select([5], copy=True)))))
    assert [bool(buffer.select([token])) for token in (5, 6, 7)] == [False, True, True]


def ring_for_nothing(name, seconds):
    with shmkv.attach(name) as buffer:
        until, n = time.monotonic() + seconds, 0
        while time.monotonic() < until:
            buffer._session.tables.waits.ring(1)
            n += 1
        return n


def test_ringing_without_news_ends_no_wait(kv_buffer, kv_spawn):
    child = kv_spawn(ring_for_nothing, kv_buffer.name, 1.5)
    eventually(lambda: kv_buffer.stats().peers == 2)
    before = time.monotonic()
    assert not kv_buffer.select([1], timeout=0.7)
    assert 0.7 <= time.monotonic() - before < 0.7 + SLACK_S
    assert child.result() > 100


def wait_in_a_storm(name, made_after):
    caught = [0]

    def handler(*_):
        caught[0] += 1

    with shmkv.attach(name) as buffer:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
        before = time.monotonic()
        found = bool(buffer.drop_select([1], timeout=20 if made_after else 1))
        took = time.monotonic() - before
        signal.setitimer(signal.ITIMER_REAL, 0)
        return found, took, caught[0]


def test_a_storm_of_signals_ends_no_wait_early(kv_buffer, kv_create, kv_spawn):
    other = kv_create()
    in_vain, served = kv_spawn(wait_in_a_storm, kv_buffer.name, 0), kv_spawn(wait_in_a_storm, other.name, 0.5)
    eventually(lambda: waiting(other))
    other.insert([1], X)
    found, took, caught = in_vain.result()
    assert not found and 1 <= took < 1 + SLACK_S and caught > 20
    found, took, _ = served.result()
    assert found and took < 1 + SLACK_S


def wait_to_be_interrupted(name):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with shmkv.attach(name) as buffer:
        try:
            buffer.insert([1], X, timeout=None) if name.endswith("-full") else buffer.select([1], timeout=None)
        except KeyboardInterrupt:
            at = time.monotonic()
            stats = buffer.stats()
            return at, stats.waiting, stats.held_leases, buffer.problems()


def test_ctrl_c_ends_a_wait_promptly_and_leaves_nothing(kv_create, kv_spawn):
    empty = kv_create()
    full = kv_create(name=f"{empty.name}-full", capacity=4096)
    full.insert([9], X)
    consumer, producer = kv_spawn(wait_to_be_interrupted, empty.name), kv_spawn(wait_to_be_interrupted, full.name)
    eventually(lambda: waiting(empty) and waiting(full, "room"))
    before = time.monotonic()
    for child in (consumer, producer):
        os.kill(child.pid, signal.SIGINT)
    for child in (consumer, producer):
        at, still_waiting, held, problems = child.result()
        assert at - before < SLACK_S and set(still_waiting.values()) == {0} and held == 0 and problems == []
    assert full.drop_select([9]) and full.stats().entries["reserved"] == 0


def _jump(*_):
    raise AssertionError("a deadline was taken from the wall clock")


@pytest.mark.parametrize("clockwait", [True, False])
def test_deadlines_are_of_the_monotonic_clock(kv_buffer, kv_spawn, monkeypatch, clockwait):
    if not clockwait:
        monkeypatch.setattr(sync, "_clockwait", None)
    elif sync._clockwait is None:
        pytest.skip("this libc has no sem_clockwait (glibc 2.30)")
    with monkeypatch.context() as patch:
        for clock in ("time", "time_ns"):
            patch.setattr(time, clock, _jump)
        before = time.monotonic()
        assert not kv_buffer.select([1], timeout=0.6)
        assert 0.6 <= time.monotonic() - before < 0.6 + SLACK_S
    child = kv_spawn(insert_when_awaited, kv_buffer.name)
    hit = kv_buffer.drop_select([1], timeout=20)
    assert (time.monotonic_ns() - hit["made"].item()) / 1e9 < SLACK_S
    child.result()


def insert_when_awaited(name):
    with shmkv.attach(name) as buffer:
        eventually(lambda: waiting(buffer))
        buffer.insert([1], made_now())


def idle(name, role):
    with shmkv.attach(name) as buffer:
        def wait(seconds):
            if role == "consumer":
                assert not buffer.select([1], timeout=seconds)
            else:
                with pytest.raises(shmkv.TimedOut):
                    buffer.insert([1], X, timeout=seconds)

        for _ in range(8):
            wait(0.02)
        used = resource.getrusage(resource.RUSAGE_SELF)
        wait(2)
        now = resource.getrusage(resource.RUSAGE_SELF)
        return now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime


def test_an_idle_waiter_uses_no_cpu(kv_create, kv_spawn):
    empty, full = kv_create(), kv_create(capacity=4096)
    full.insert([9], X)
    children = [kv_spawn(idle, empty.name, "consumer"), kv_spawn(idle, full.name, "producer")]
    for child in children:
        assert child.result() < 0.01 * 2


# ---------------------------------------------------------------- threads

def test_each_of_many_waiting_threads_is_woken_for_its_own_entry(kv_buffer, monkeypatch):
    monkeypatch.setattr(sync, "RECHECK_NS", 30_000_000_000)  # nothing but its bell will wake a thread
    got = {}

    def consume(token):
        with kv_buffer.drop_select([token], timeout=25) as hit:
            got[token] = hit["x"].item() if hit else hit.reason

    threads = started(*(threading.Thread(target=consume, args=(token,)) for token in range(8)))
    eventually(lambda: waiting(kv_buffer) == 8)
    before = time.monotonic()
    for token in range(8):
        kv_buffer.insert([token], {"x": torch.tensor(100 + token)})
    joined(*threads)
    assert time.monotonic() - before < 5
    assert got == {token: 100 + token for token in range(8)}


def test_room_for_several_blocked_producers_lets_all_go_on(kv_create, monkeypatch):
    monkeypatch.setattr(sync, "RECHECK_NS", 30_000_000_000)
    buffer = kv_create(capacity=3 * 4096)
    buffer.insert([0], {"x": torch.zeros(3 * 4096, dtype=torch.uint8)})
    threads = started(*(threading.Thread(target=buffer.insert, args=([token], X), kwargs={"timeout": 25})
                        for token in (1, 2, 3)))
    eventually(lambda: waiting(buffer, "room") == 3)
    before = time.monotonic()
    buffer.drop_select([0]).release()
    joined(*threads)
    assert time.monotonic() - before < 1
    assert all(buffer.select([token]) for token in (1, 2, 3))


def bells_of(name):
    return [bell for bell in os.listdir(segment.DIRECTORY) if bell.startswith(f"sem.shmkv.{name}.")]


def troubles_of(scenario):
    """Run a scenario in a process of its own; the scenario returns what went wrong, and so do its finalisers."""
    troubles = []
    sys.unraisablehook = lambda told: troubles.append(f"ignored: {told.exc_value!r}")
    threading.excepthook = lambda told: troubles.append(f"thread: {told.exc_value!r}")
    with shmkv.create(capacity=1 << 20, slots=16) as buffer:
        troubles += scenario(buffer)
        gc.collect()
        tables, own = buffer._session.tables, getattr(buffer._session._here, "place", None)
        states = {tables.words[at + Wait.state] for at in tables.waits._used() if own is None or at != own.at}
        troubles += [f"a wait record is {WaitState(state).name}" for state in states - {0, WaitState.RETIRED}]
        troubles += buffer.problems()
    for bell in bells_of(buffer.name):
        os.unlink(f"{segment.DIRECTORY}/{bell}")
        troubles.append("a semaphore was left behind")
    return troubles


def close_under_waiting_threads(buffer):
    """Ten times over: the closing thread and those that go home meet in every order."""
    troubles = []

    def wait(call):
        try:
            call()
            troubles.append("a wait ended without a word")
        except shmkv.ClosedError:
            ended.append(time.monotonic())

    def close(handle):
        try:
            handle.close()
        except AttributeError as error:
            troubles.append(f"close: {error!r}")

    for _ in range(10):
        reader, full, ended = shmkv.attach(buffer.name), shmkv.create(capacity=4096, slots=4), []
        full.insert([9], X)
        calls = [lambda h=reader: h.select([1], timeout=None), lambda h=reader: h.drop_select([2], timeout=None),
                 lambda h=reader: h.signals(timeout=None), lambda h=full: h.insert([3], X, timeout=None)]
        threads = started(*(threading.Thread(target=wait, args=(call,)) for call in calls))
        eventually(lambda: waiting(buffer) + waiting(buffer, "signal") == 3)
        eventually(lambda full=full: waiting(full, "room"))
        before = time.monotonic()
        close(full), close(reader)
        joined(*threads)
        if len(ended) < 4 or max(ended) - before > SLACK_S:
            troubles.append("a waiting thread went home late")
        if troubles:
            break
    return troubles


def close_before(step, buffer):
    """The closing thread comes just before the waiting one takes this step on its way to sleep."""
    other = shmkv.attach(buffer.name)
    go_on = getattr(Place, step)

    def closed_before(place, *args, **kwargs):
        joined(*started(threading.Thread(target=other.close)))
        return go_on(place, *args, **kwargs)

    setattr(Place, step, closed_before)
    try:
        other.select([1], timeout=5)
    except shmkv.ClosedError:
        return []
    finally:
        setattr(Place, step, go_on)
    return ["the wait ended without a word"]


def fail_to_make_a_bell(buffer):
    make = sync.Bell

    def interrupted(*_):
        raise KeyboardInterrupt

    sync.Bell = interrupted
    try:
        buffer.select([1], timeout=0.1)
    except KeyboardInterrupt:
        pass
    sync.Bell = make
    try:
        return ["a hit of nothing"] if buffer.select([1], timeout=0.1) else []
    except AttributeError as error:
        return [repr(error)]


@pytest.mark.parametrize("scenario", [
    pytest.param(close_under_waiting_threads, id="close"),
    pytest.param(functools.partial(close_before, "open"), id="close before open"),
    pytest.param(functools.partial(close_before, "announce"), id="close before announce"),
    pytest.param(fail_to_make_a_bell, id="no bell"),
])
def test_closing_and_failing_in_the_midst_of_a_wait_is_clean(kv_spawn, scenario):
    assert kv_spawn(troubles_of, scenario).result() == []


def test_a_thread_that_ends_retires_its_record_and_its_semaphore(kv_buffer):
    for _ in range(10):
        joined(*started(threading.Thread(target=kv_buffer.select, args=([1],), kwargs={"timeout": 0.01})))
        assert bells_of(kv_buffer.name) == []
    tables = kv_buffer._session.tables
    assert tables.words[Header.waits_high] == 1
    assert tables.words[tables.layout.waits.word + Wait.state] == WaitState.RETIRED


def test_the_semaphore_of_a_killed_waiter_goes_with_the_last_handle(kv_create, kv_spawn):
    buffer = kv_create()
    child = kv_spawn(take, buffer.name, 1, None)
    eventually(lambda: waiting(buffer))
    assert len(bells_of(buffer.name)) == 1
    child.kill()
    buffer.close()
    left = bells_of(buffer.name)
    for bell in left:
        os.unlink(f"{segment.DIRECTORY}/{bell}")
    assert left == []


def test_what_is_put_off_in_a_section_runs_once_it_is_left(kv_buffer):
    done = []

    def body():
        for i in range(3):
            sync.outside(lambda i=i: done.append(i))
        return list(done)

    assert kv_buffer._session.run(body, 0) == [] and done == [0, 1, 2]
    sync.outside(lambda: done.append(3))
    assert done == [0, 1, 2, 3]

    def fail():
        sync.outside(lambda: done.append(4))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        kv_buffer._session.run(fail, 0)
    assert done[-1] == 4


def test_a_hit_that_is_dropped_inside_a_section_is_released_after_it(kv_buffer):
    kv_buffer.insert([1], X)
    hits = [kv_buffer.drop_select([1])]
    assert hits[0]["x"].shape == (4096,)
    leases = kv_buffer._session.tables.leases

    def body():
        hits.clear()
        return [leases.is_released(index) for index in leases.held()]

    assert kv_buffer._session.run(body, 0) == [False], "a view was unmapped or a lease ended inside the section"
    assert [leases.is_released(index) for index in leases.held()] == [True]
    assert kv_buffer.stats().used_bytes == 0
