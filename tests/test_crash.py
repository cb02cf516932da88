"""A process killed at every store it makes: the others go on, nothing leaks, nothing is torn, nothing else is lost."""

import contextlib
import itertools
import os
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import pytest
import torch

import shmkv
from shmkv import Spec, recovery, store, sync, testing
from shmkv.layout import Peer, Wait
from shmkv.peers import WaitState
from shmkv.testing import die_at_store, unique_name

PAGE = 4096
GEOMETRY = {"meta_capacity": 64 << 10, "slots": 16, "leases": 32, "peers": 8, "waits": 8}
ABSENT = [999, 1]
DONE, FAILED = 7, 8  # exit codes of a child that was not killed
CHILD_S = 20

Contents = dict[tuple[int, ...], list[int]]  # tokens -> tags of the entries, oldest first


class Fault(AssertionError):
    """A survivor found something that must not be."""


# ---------------------------------------------------------------- what dies, doing what

def nothing(buffer: shmkv.KVBuffer, held: Any = None) -> None:
    return None


@dataclass(frozen=True)
class Case:
    """One operation of the process that dies.

    `prepare` and `act` run in it, the kills fall into `act`. `before` and `after` run in the survivor: `after` gets
    what `before` returned. `outcomes`: what the buffer may hold once the dead is buried.
    """

    name: str
    act: Callable[[shmkv.KVBuffer, Any], Any]
    outcomes: tuple[Contents, ...]
    prepare: Callable[[shmkv.KVBuffer], Any] = nothing
    before: Callable[[shmkv.KVBuffer], Any] = nothing
    after: Callable[[shmkv.KVBuffer, Any], Any] = nothing
    base: Contents = field(default_factory=lambda: BASE)
    pages: int = 64


def without(contents: Contents, *gone: tuple[int, ...]) -> Contents:
    """The contents less the oldest entry of each of these tokens."""
    left = {tokens: list(tags) for tokens, tags in contents.items()}
    for tokens in gone:
        left[tokens].pop(0)
    return {tokens: tags for tokens, tags in left.items() if tags}


BASE: Contents = {(1,): [1], (1, 2): [2, 3], (1, 2, 3): [4], (5, 6): [5]}
FULL: Contents = {(n,): [n] for n in range(1, 7)}  # one page each, least recently used first
WITH_NEW = {**BASE, (1, 2, 9): [70]}


def sizes(tag: int) -> tuple[int, int]:
    return (40 + tag, 6) if tag < 80 else (PAGE + tag, 6)


def kv(tag: int) -> dict[str, torch.Tensor]:
    """Tensors that tell which entry they are, bit for bit."""
    n_x, n_y = sizes(tag)
    return {"x": torch.tensor([tag, *((i * 37 + tag) % 251 for i in range(n_x - 1))], dtype=torch.uint8),
            "y": torch.tensor([tag * 1000 + i for i in range(n_y)], dtype=torch.int32)}


def run_bytes(tag: int) -> int:
    n_x, n_y = sizes(tag)
    return -(-(-(-n_x // 256) * 256 + 4 * n_y) // PAGE) * PAGE


def insert(buffer: shmkv.KVBuffer, _: Any) -> None:
    buffer.insert([1, 2, 9], NEW)


def reserve_and_seal(buffer: shmkv.KVBuffer, _: Any) -> None:
    with buffer.reserve([1, 2, 9], {name: Spec(t.shape, t.dtype) for name, t in NEW.items()}) as entry:
        for name, tensor in NEW.items():
            entry[name].copy_(tensor)


def seal_and_keep(buffer: shmkv.KVBuffer, _: Any) -> Any:
    entry = buffer.reserve([1, 2, 9], NEW)
    kept = entry["x"].copy_(NEW["x"]), entry["y"].copy_(NEW["y"])
    entry.seal()
    return kept


def abort(buffer: shmkv.KVBuffer, _: Any) -> None:
    entry = buffer.reserve([1, 2, 9], NEW)
    kept = entry["x"]
    entry.abort()
    del kept
    buffer.stats()


def drop_select(buffer: shmkv.KVBuffer, _: Any) -> Any:
    hit = buffer.drop_select([1, 2, 7], timeout=0)
    check_payload(hit, 2)
    return hit


def take(buffer: shmkv.KVBuffer) -> list:
    hit = buffer.drop_select([1, 2, 7], timeout=0)
    check_payload(hit, 2)
    return [hit, hit["x"][3:], hit["y"]]


def release(buffer: shmkv.KVBuffer, taken: list) -> None:
    taken.pop(0).release()
    taken.clear()
    buffer.stats()


def give_back(buffer: shmkv.KVBuffer, taken: list) -> None:
    taken.pop(0).release(returned=True)
    taken.clear()
    buffer.stats()


def select_and_release(buffer: shmkv.KVBuffer, _: Any) -> None:
    with buffer.select([1, 2, 3, 4], timeout=0) as hit:
        check_payload(hit, 4)
    del hit
    buffer.stats()


def drop_select_copy(buffer: shmkv.KVBuffer, _: Any) -> None:
    check_payload(buffer.drop_select([5, 6], timeout=0, copy=True), 5)


def insert_with_evict(buffer: shmkv.KVBuffer, _: Any) -> None:
    buffer.insert([1, 2, 9], BIG, on_full="evict", timeout=0)


def cancel(buffer: shmkv.KVBuffer, _: Any) -> None:
    buffer.cancel([1, 2])


def close(buffer: shmkv.KVBuffer, _: Any) -> None:
    buffer.close()


def wait_in_any_case(buffer: shmkv.KVBuffer) -> None:
    """Have this process put itself on record as waiting, also when tracing made it miss its deadline."""
    sync.passed = lambda deadline_ns: False


def wait_in_vain(buffer: shmkv.KVBuffer, _: Any) -> None:
    buffer.drop_select(ABSENT, timeout=0.002)
    buffer.close()


def wait_for_room(buffer: shmkv.KVBuffer, _: Any) -> None:
    with contextlib.suppress(shmkv.TimedOut):
        buffer.insert([1, 2, 9], BIG, timeout=0.002)


def insert_expiring(buffer: shmkv.KVBuffer) -> None:
    buffer.insert([5, 6], kv(60), ttl=1e-9)


def look(buffer: shmkv.KVBuffer, _: Any) -> None:
    buffer.stats()
    buffer.signals()


def attach_and_close(buffer: shmkv.KVBuffer, _: Any) -> None:
    shmkv.attach(buffer.name, role="second").close()


def hold_all(buffer: shmkv.KVBuffer) -> list:
    """A taken entry with views, one taken without, one shared, one being written, one released but not collected."""
    held = [take(buffer), buffer.drop_select([1, 2], timeout=0), buffer.select([1], timeout=0),
            buffer.reserve([1, 2, 9], NEW), buffer.select([5, 6], timeout=0)]
    held.pop().release()
    return held


def end_now(buffer: shmkv.KVBuffer, _: Any) -> None:
    """What an orderly exit of the process does."""
    buffer._session.end_now()


def survivor_reserves(buffer: shmkv.KVBuffer) -> shmkv.Reserved:
    entry = buffer.reserve([1, 2], kv(9))
    entry["x"].copy_(kv(9)["x"]), entry["y"].copy_(kv(9)["y"])
    return entry


def survivor_seals(buffer: shmkv.KVBuffer, entry: shmkv.Reserved) -> None:
    with contextlib.suppress(shmkv.Cancelled):
        entry.seal()


NEW, BIG = kv(70), kv(90)
TWO = (1, 2)
CANCELLED = [without(BASE, *[TWO] * n) for n in range(3)]
EVICTED = [without(FULL, *[(tag,) for tag in range(1, 1 + n)]) for n in range(3)]

CASES = [
    Case("insert", insert, (BASE, WITH_NEW)),
    Case("reserve and seal", reserve_and_seal, (BASE, WITH_NEW)),
    Case("seal, tensors kept", seal_and_keep, (BASE, WITH_NEW)),
    Case("abort", abort, (BASE,)),
    Case("drop_select", drop_select, (BASE,)),
    Case("drop_select, copy", drop_select_copy, (BASE, without(BASE, (5, 6)))),
    Case("release", release, (BASE, without(BASE, TWO)), prepare=take),
    Case("release, returned", give_back, (BASE,), prepare=take),
    Case("select and release", select_and_release, (BASE,)),
    Case("insert with evict", insert_with_evict, (*EVICTED, {**EVICTED[2], (1, 2, 9): [90]}), base=FULL, pages=6),
    Case("cancel", cancel, tuple(CANCELLED)),
    Case("cancel one in flight", cancel, (*CANCELLED, *({**rest, TWO: [*rest.get(TWO, []), 9]} for rest in CANCELLED)),
         before=survivor_reserves, after=survivor_seals),
    Case("close with leases", close, (BASE,), prepare=hold_all),
    Case("exit with leases", end_now, (BASE, {**BASE, TWO: [3]}, {**BASE, TWO: [2]}, without(BASE, TWO, TWO)),
         prepare=hold_all),
    Case("wait in vain, close", wait_in_vain, (BASE,), prepare=wait_in_any_case),
    Case("wait for room", wait_for_room, (FULL,), prepare=wait_in_any_case, base=FULL, pages=6),
    Case("expiry", look, (BASE,), prepare=insert_expiring),
    Case("attach and close", attach_and_close, (BASE,)),
]
BY_NAME = {case.name: case for case in CASES}


# ---------------------------------------------------------------- the process that dies

def forked(body: Callable[[], Any]) -> tuple[int, int]:
    """Run `body` in a forked child: (exit code or minus the signal that ended it, pid)."""
    pid = os.fork()
    if not pid:
        _in_child(body)
    return _ended(pid), pid


def _in_child(body: Callable[[], Any]) -> NoReturn:
    signal.alarm(CHILD_S)
    try:
        kept = body()
        os._exit(DONE if kept else FAILED)  # with all that is kept still alive
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
        os._exit(FAILED)


def _ended(pid: int) -> int:
    status = None
    try:
        _, status = os.waitpid(pid, 0)
    finally:
        if status is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def killed_at(name: str, case: Case, k: int | None) -> bool:
    """Have a child do `case` and die at its k-th store; False if it had finished before."""

    def body() -> Any:
        buffer = shmkv.attach(name)
        prepared = case.prepare(buffer)
        with die_at_store(k):
            return [buffer, prepared, case.act(buffer, prepared)]

    code, _ = forked(body)
    if code not in (-signal.SIGKILL, DONE):
        raise Fault(f"{case.name}: the child to be killed at store {k} ended with {code}")
    return code != DONE


# ---------------------------------------------------------------- the survivor

def check_payload(tensors: Any, tag: int) -> None:
    for name, tensor in kv(tag).items():
        if not torch.equal(tensors[name], tensor):
            raise Fault(f"tensor {name!r} of entry {tag} is torn: {tensors[name].tolist()}")


def fill(buffer: shmkv.KVBuffer, contents: Contents) -> None:
    for tokens, tags in contents.items():
        for tag in tags:
            buffer.insert(list(tokens), kv(tag), on_full="error")


def drain(buffer: shmkv.KVBuffer, keys: list[tuple[int, ...]]) -> Contents:
    """Take out all there is, checked bit for bit."""
    found: Contents = {}
    for tokens in keys:
        while hit := buffer.drop_select(list(tokens), match="exact", timeout=0, copy=True):
            tag = int(hit["x"][0])
            check_payload(hit, tag)
            found.setdefault(tokens, []).append(tag)
    return found


def expect(condition: bool, text: str) -> None:
    if not condition:
        raise Fault(text)


def check_survival(buffer: shmkv.KVBuffer, case: Case, held: Any, patience: float) -> None:
    """Go on as the survivor of a death in `case`, and leave the buffer empty."""
    started = time.monotonic()
    expect(not buffer.drop_select(ABSENT, timeout=patience), "an absent key was found")
    case.after(buffer, held)
    del held
    expect(buffer.problems() == [], f"problems: {buffer.problems()}")
    buffer.insert([8, 8], kv(8), on_full="evict" if case.base is FULL else "error", timeout=0)
    expect(bool(buffer.drop_select([8, 8, 8], copy=True)), "what the survivor inserted is not there")
    took = time.monotonic() - started
    expect(took < 1, f"the survivor needed {took:.3f} s")

    stats = buffer.stats()
    found = drain(buffer, sorted({tokens for outcome in case.outcomes for tokens in outcome} | set(case.base)))
    n_found = sum(map(len, found.values()))
    in_use = {name: n for name, n in stats.entries.items() if n and name != "free"}
    expect(in_use == ({"ready": n_found} if n_found else {}), f"{in_use}, but {found} could be had")
    expect(stats.held_leases == 0 and stats.peers == 1, f"{stats.held_leases} leases, {stats.peers} peers")
    used = sum(run_bytes(tag) for tags in found.values() for tag in tags)
    expect(stats.used_bytes == used, f"{stats.used_bytes} B in use, of {found} it should be {used}")
    if case.base is FULL:  # the survivor's own insert may have evicted one more
        left = [left for outcome in case.outcomes for left in (outcome, without(outcome, next(iter(outcome))))]
        expect(found in left, f"left: {found}")
    else:
        expect(found in case.outcomes, f"left: {found}")
    stats = buffer.stats()
    expect((stats.used_bytes, stats.meta_used_bytes, stats.entries["free"]) == (0, 0, GEOMETRY["slots"]), f"{stats}")
    check_nothing_left(buffer)


def check_nothing_left(buffer: shmkv.KVBuffer) -> None:
    """No semaphore, wait record or peer record of the dead."""
    session = buffer._session
    tables, words = session.tables, session.tables.words
    own = {place._bell_name.replace("/", "sem.", 1) for place in session._places}
    left = {entry for entry in os.listdir("/dev/shm") if entry.startswith(f"sem.shmkv.{buffer.name}.")} - own
    expect(not left, f"semaphores left: {left}")
    expect(list(tables.peers.attached()) == [session.index], f"peers left: {list(tables.peers.attached())}")
    generation = words[tables.peers.at(session.index) + Peer.generation]
    for at in tables.waits._records:
        if words[at + Wait.state] in (WaitState.IDLE, WaitState.WAITING):
            holder = words[at + Wait.peer], words[at + Wait.peer_generation]
            expect(holder == (session.index, generation), f"a wait record of the dead peer {holder} is left")


def kill_everywhere(buffer: shmkv.KVBuffer, case: Case) -> int:
    """Kill at every store of the case, one after the other; returns how often."""
    for k in itertools.count(1):
        try:
            fill(buffer, case.base)
            held = case.before(buffer)
            killed = killed_at(buffer.name, case, k)
            check_survival(buffer, case, held, patience=0.002 if k % 16 == 0 else 0)
        except (Fault, shmkv.ShmkvError) as error:
            raise Fault(f"{case.name}: after a kill at store {k}: {type(error).__name__}: {error}") from error
        if not killed:
            return k - 1
    raise AssertionError("unreachable")


@pytest.fixture
def survivor(kv_create):
    return lambda case: kv_create(capacity=case.pages * PAGE, **GEOMETRY)


@pytest.fixture
def report(capsys, record_property):
    def say(what: str, n_kills: int) -> None:
        record_property("kills", n_kills)
        with capsys.disabled():
            print(f"\n{what}: {n_kills} kills", end=" ", flush=True)

    return say


@pytest.mark.kv_timeout(120)
@pytest.mark.parametrize("name", list(BY_NAME))
def test_a_kill_at_every_store_harms_nobody(survivor, report, name):
    n_kills = kill_everywhere(survivor(BY_NAME[name]), BY_NAME[name])
    report(name, n_kills)
    assert n_kills > 5


# ---------------------------------------------------------------- the harness finds what it looks for

def fault_of_a_survivor_without(what: str) -> str:
    """Switch a part of the recovery off, in a process of its own; returns the first fault found, "" if none."""
    case, name = BY_NAME["insert with evict"], unique_name()
    buffer = shmkv.create(name, capacity=case.pages * PAGE, **GEOMETRY)
    if what == "rebuild":
        recovery.rebuild = nothing
    else:
        store.Store.bury_dead = lambda self: False
    try:
        kill_everywhere(buffer, case)
    except Fault as fault:
        return str(fault)
    finally:
        for left in os.listdir("/dev/shm"):
            if name in left:
                os.unlink(f"/dev/shm/{left}")
        with contextlib.suppress(Exception):
            buffer.close()
    return ""


@pytest.mark.parametrize("what", ["rebuild", "bury_dead"])
def test_the_harness_notices_when_the_recovery_is_switched_off(kv_spawn, what):
    fault = kv_spawn(fault_of_a_survivor_without, what).result(50)
    assert "after a kill at store" in fault


# ---------------------------------------------------------------- two deaths in a row

def stores_of(name: str, case: Case) -> int:
    """How many stores the case makes when nobody kills it."""
    ours, theirs = os.pipe()

    def body() -> Any:
        buffer = shmkv.attach(name)
        prepared = case.prepare(buffer)
        with die_at_store() as counted:
            kept = case.act(buffer, prepared)
        return [os.write(theirs, counted.stores.to_bytes(8, "little")), kept]

    try:
        code, _ = forked(body)
        expect(code == DONE, f"{case.name}: ended with {code}")
        return int.from_bytes(os.read(ours, 8), "little")
    finally:
        os.close(ours), os.close(theirs)


def unharmed_stores(buffer: shmkv.KVBuffer, case: Case) -> int:
    fill(buffer, case.base)
    held = case.before(buffer)
    n_stores = stores_of(buffer.name, case)
    check_survival(buffer, case, held, 0)
    return n_stores


def attach_and_look(buffer_name: str, k: int) -> Callable[[], Any]:
    def body() -> Any:
        with die_at_store(k):
            buffer = shmkv.attach(buffer_name)
            return [buffer, buffer.drop_select(ABSENT, timeout=0)]

    return body


@pytest.mark.kv_timeout(120)
@pytest.mark.parametrize("name", ["insert with evict", "drop_select", "release"])
def test_a_second_kill_at_every_store_of_the_recovery_harms_nobody(survivor, report, name):
    case, n_kills = BY_NAME[name], 0
    buffer = survivor(case)
    n_stores = unharmed_stores(buffer, case)
    for first in (n_stores // 3, 2 * n_stores // 3):
        for second in itertools.count(1):
            fill(buffer, case.base)
            assert killed_at(buffer.name, case, first)
            code, _ = forked(attach_and_look(buffer.name, second))
            assert code in (DONE, -signal.SIGKILL)
            n_kills += 2 if code != DONE else 1
            try:
                check_survival(buffer, case, None, 0)
            except (Fault, shmkv.ShmkvError) as error:
                raise Fault(f"{name}: after kills at stores {first} and {second}: {error}") from error
            if code == DONE:
                break
    report(f"{name}, then its recovery", n_kills)


# ---------------------------------------------------------------- deaths that somebody waits for

def dying_when_waited_for(name: str, kind: str, act: Callable[[shmkv.KVBuffer], Any], ready: int) -> Callable[[], Any]:
    def body() -> Any:
        buffer = shmkv.attach(name)
        held = act(buffer)
        os.write(ready, b"!")
        while not buffer.stats().waiting[kind]:
            os.sched_yield()
        os.write(ready, time.monotonic_ns().to_bytes(8, "little"))
        os.kill(os.getpid(), signal.SIGKILL)
        return held

    return body


@pytest.mark.parametrize("kind", ["entry", "room"])
def test_who_waits_for_what_the_dead_had_gets_it_within_a_second(kv_create, kind):
    buffer = kv_create(capacity=PAGE, **GEOMETRY)
    ours, theirs = os.pipe()
    if kind == "entry":
        buffer.insert([1, 2], kv(2))
    act = take if kind == "entry" else (lambda buffer: buffer.reserve([5], NEW))
    pid = os.fork()
    if not pid:
        _in_child(dying_when_waited_for(buffer.name, kind, act, theirs))
    try:
        assert os.read(ours, 1) == b"!"
        if kind == "entry":
            with buffer.drop_select([1, 2], timeout=10) as hit:
                took_ns = time.monotonic_ns() - int.from_bytes(os.read(ours, 8), "little")
                check_payload(hit, 2)
        else:
            buffer.insert([1, 2], kv(2), timeout=10)
            took_ns = time.monotonic_ns() - int.from_bytes(os.read(ours, 8), "little")
            assert drain(buffer, [(1, 2)]) == {(1, 2): [2]}
        assert took_ns < 1e9
    finally:
        assert _ended(pid) == -signal.SIGKILL
        os.close(ours), os.close(theirs)


# ---------------------------------------------------------------- stopped is not dead

class Stopped:
    """A child that does `case` and stops itself (SIGSTOP) just before its k-th store."""

    def __init__(self, name: str, case: Case, k: int):
        self.pid, self._code = os.fork(), None
        if not self.pid:
            testing.signal = types.SimpleNamespace(SIGKILL=signal.SIGSTOP)  # what die_at_store sends, here only
            _in_child(lambda: self._body(name, case, k))
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            self._code = os.waitstatus_to_exitcode(status)
        expect(self._code is None, f"{case.name}: the child to be stopped at store {k} ended with {self._code}")

    def _body(self, name: str, case: Case, k: int) -> Any:
        buffer = shmkv.attach(name)
        prepared = case.prepare(buffer)
        with die_at_store(k):
            return [buffer, prepared, case.act(buffer, prepared)]

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> int:
        if self._code is None:
            self.resume()
            self._code = _ended(self.pid)
        return self._code


def state_of(buffer: shmkv.KVBuffer) -> bytes:
    return bytes(buffer._session.segment.memory)


def is_waited_for(buffer: shmkv.KVBuffer, child: Stopped) -> bool:
    """Check that the stopped child is not robbed, then let it go on; returns whether it held the lock."""
    before, started = state_of(buffer), time.monotonic_ns()
    try:
        buffer.drop_select(ABSENT, timeout=0)
    except shmkv.TimedOut:
        took = time.monotonic_ns() - started
        expect(sync.LOCK_GRACE_NS <= took < sync.LOCK_GRACE_NS + 5e8, f"gave the lock up after {took} ns")
        expect(state_of(buffer) == before, "the segment changed while a stopped process held its lock")
        patient = threading.Thread(target=buffer.stats)
        patient.start()
        child.resume()
        patient.join(10)
        expect(not patient.is_alive(), "the lock was not free when its holder went on")
        return True
    expect(buffer.problems() == [], f"problems beside a stopped process: {buffer.problems()}")
    stats = buffer.stats()
    expect(stats.peers == 2 and stats.counters["deaths"] == 0, f"the stopped process was buried: {stats}")
    child.resume()
    return False


@pytest.mark.parametrize("name", ["insert", "drop_select", "release"])
def test_a_stopped_process_is_waited_for_and_never_robbed(survivor, name, monkeypatch):
    monkeypatch.setattr(sync, "LOCK_GRACE_NS", 100_000_000)
    case = BY_NAME[name]
    n_stores = unharmed_stores(survivor(case), case)
    held_the_lock = []
    for k in range(1, n_stores, max(1, n_stores // 12)):
        buffer = survivor(case)
        fill(buffer, case.base)
        child = Stopped(buffer.name, case, k)
        try:
            held_the_lock.append(is_waited_for(buffer, child))
            assert child.end() == DONE
            check_survival(buffer, case, None, 0)
        except (Fault, shmkv.ShmkvError) as error:
            raise Fault(f"{name}: stopped at store {k}: {error}") from error
        finally:
            child.end()
            buffer.close()
    assert True in held_the_lock and (False in held_the_lock or name == "drop_select")


# ---------------------------------------------------------------- tables full of the dead

def killed_after(buffer: shmkv.KVBuffer, act: Callable[[shmkv.KVBuffer], Any], n_children: int = 1) -> None:
    """Kill children when all of them have attached and done `act`."""
    ours, theirs = os.pipe()

    def body() -> Any:
        handle = shmkv.attach(buffer.name)
        kept = act(handle)
        os.write(theirs, b"!")
        signal.pause()
        return [handle, kept]

    pids = []
    try:
        for _ in range(n_children):
            pid = os.fork()
            if not pid:
                _in_child(body)
            pids.append(pid)
            assert os.read(ours, 1) == b"!"
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            assert _ended(pid) == -signal.SIGKILL
        os.close(ours), os.close(theirs)


@pytest.fixture
def small(kv_create):
    buffer = kv_create(capacity=16 * PAGE, slots=8, meta_capacity=16 << 10, leases=4, peers=4, waits=2)
    for token in range(4):
        buffer.insert([token], kv(token))
    return buffer


def test_peer_records_of_the_dead_are_free_for_who_attaches(small):
    killed_after(small, nothing, n_children=3)
    with shmkv.attach(small.name) as newcomer:
        assert newcomer.stats().peers == 2


@pytest.mark.parametrize("timeout", [0, 1])
def test_lease_records_of_the_dead_are_free_for_who_takes(small, timeout):
    killed_after(small, lambda handle: [handle.select([token]) for token in range(4)])
    with small.drop_select([1], timeout=timeout) as hit:
        check_payload(hit, 1)


def test_lease_records_of_the_dead_are_free_for_who_inserts(small):
    killed_after(small, lambda handle: [handle.select([token]) for token in range(4)])
    small.insert([7], kv(7), timeout=0)
    killed_after(small, lambda handle: [handle.select([token]) for token in range(4)])
    small.insert([8], kv(8), timeout=1)


def test_wait_records_of_the_dead_are_free_for_who_waits(small):
    killed_after(small, lambda handle: handle.drop_select(ABSENT, timeout=0.01), n_children=2)
    assert not small.drop_select(ABSENT, timeout=0.05)
