"""KeyboardInterrupt at every place of the package where one can arrive: the lock is free, nothing lost, nothing stuck.

CPython delivers an interrupt only where it looks for one: when a function starts (RESUME), when a call of a C function
returns (CALL, CALL_FUNCTION_EX) and at a jump backward. An exception raised from a trace function stands before an
instruction; one that CPython raises itself belongs to the instruction just done. So each place here is one of these:
the start of a function of the package, or the instruction behind a C call or a jump backward if both instructions have
the same exception handlers. The few places that this leaves out (a C call that ends a `try`, a C function that calls
back into Python) are reached by the real signals of the last test.
"""

import contextlib
import dis
import functools
import gc
import itertools
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

import shmkv
from shmkv import leases, recovery, sync
from shmkv.testing import residue, unique_name

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="exception tables and eval breaker as of 3.11")

PACKAGE = os.path.dirname(os.path.abspath(shmkv.__file__)) + os.sep
TESTING_KIT = PACKAGE + "testing.py"
GEOMETRY = {"capacity": 64 << 10, "meta_capacity": 16 << 10, "slots": 16, "leases": 32, "peers": 8, "waits": 8}
ABSENT = [999, 1]
CHECKING = ("CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD")

Contents = dict[tuple[int, ...], list[int]]  # tokens -> tags of the entries, oldest first


# ---------------------------------------------------------------- where an interrupt can arrive

@functools.cache
def places_of(code: CodeType) -> tuple[frozenset[int], dict[int, tuple]]:
    """The offsets of the checking instructions, and for each instruction what handles an exception there."""
    handlers = {}
    entries = dis._parse_exception_table(code)
    checking = set()
    for op in dis.get_instructions(code):
        around = (entry for entry in entries if entry.start <= op.offset < entry.end)
        handlers[op.offset] = next(((entry.target, entry.depth, entry.lasti) for entry in around), None)
        if op.opname in CHECKING:
            checking.add(op.offset)
    return frozenset(checking), handlers


class interrupt_at:
    """Raise KeyboardInterrupt at the n-th place; `fired` tells whether there were so many, `where` which it was.

    In a finaliser the interpreter swallows it; those places are counted, and interrupted, only on request.
    """

    def __init__(self, n: int, in_finalisers: bool = False):
        self.n, self.places, self.fired, self.where, self.in_finalisers = n, 0, False, "", in_finalisers
        self._last: dict[FrameType, int] = {}  # frame -> the checking instruction it has just done, -1 if none

    def __enter__(self) -> "interrupt_at":
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        self._last.clear()

    def _call(self, frame: FrameType, event: str, _: object) -> Callable | None:
        caller = frame.f_back
        if caller in self._last:
            self._last[caller] = -1  # what it called was no C function: nothing is checked when it returns
        if not _is_ours(frame.f_code):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._last[frame] = -1
        self._place(frame)
        return self._local

    def _local(self, frame: FrameType, event: str, _: object) -> Callable:
        if event == "opcode":
            checking, handlers = places_of(frame.f_code)
            last, now = self._last.get(frame, -1), frame.f_lasti
            if last >= 0 and handlers[last] == handlers[now]:
                self._place(frame)
            self._last[frame] = now if now in checking else -1
        elif event == "return":
            self._last.pop(frame, None)
        return self._local

    def _place(self, frame: FrameType) -> None:
        if _in_finaliser(frame) != self.in_finalisers:
            return
        self.places += 1
        if self.places == self.n:
            self.fired = True
            code = frame.f_code
            self.where = f"{code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno} in {code.co_qualname}"
            raise KeyboardInterrupt


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(PACKAGE) and code.co_filename != TESTING_KIT


def _in_finaliser(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        if frame.f_code.co_name in ("__del__", "asked"):  # `asked` is the callback of weak references
            return True
        frame = frame.f_back
    return False


# ---------------------------------------------------------------- what is interrupted

BASE: Contents = {(1,): [1], (1, 2): [2, 3], (5, 6): [5]}
WITH_NEW = {**BASE, (1, 2, 9): [70]}
ONE_TAKEN = {**BASE, (1, 2): [3]}


def kv(tag: int) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor([tag, *((i * 37 + tag) % 251 for i in range(40))], dtype=torch.uint8),
            "y": torch.tensor([tag * 1000, -tag], dtype=torch.int32)}


NEW = kv(70)


@dataclass(frozen=True)
class Case:
    """`act` is interrupted, with what `prepare` returned. `outcomes`: the contents that there may be then.

    `finished`: what there is when the call returned after all, since a finaliser was interrupted.
    """

    name: str
    act: Callable[[shmkv.KVBuffer, Any], Any]
    outcomes: tuple[Contents, ...]
    prepare: Callable[[shmkv.KVBuffer], Any] = lambda buffer: None
    finished: Contents | None = None


def take(buffer: shmkv.KVBuffer) -> list:
    hit = buffer.drop_select([1, 2])
    return [hit, hit["x"][3:]]


def release(buffer: shmkv.KVBuffer, taken: list) -> None:
    del taken[1:]
    taken[0].release()


def drop_views(buffer: shmkv.KVBuffer, taken: list) -> None:
    taken[0].release()
    taken.clear()


def reserve(buffer: shmkv.KVBuffer) -> shmkv.Reserved:
    entry = buffer.reserve([1, 2, 9], NEW)
    for name, tensor in NEW.items():
        entry[name].copy_(tensor)
    return entry


def reserve_and_seal(buffer: shmkv.KVBuffer, _: Any) -> None:
    with buffer.reserve([1, 2, 9], NEW) as entry:
        entry["x"].copy_(NEW["x"]), entry["y"].copy_(NEW["y"])


def select_and_release(buffer: shmkv.KVBuffer, _: Any) -> None:
    with buffer.select([1, 2, 3]) as hit:
        hit["x"].sum()


def release_unseen(buffer: shmkv.KVBuffer) -> None:
    buffer.select([5, 6]).release()


def wait_in_any_case(buffer: shmkv.KVBuffer) -> None:
    """Have this process put itself on record as waiting, also when tracing made it miss its deadline."""
    sync.passed = lambda deadline_ns: False


CASES = [
    Case("insert", lambda buffer, _: buffer.insert([1, 2, 9], NEW), (BASE, WITH_NEW)),
    Case("reserve and seal", reserve_and_seal, (BASE, WITH_NEW)),
    Case("seal", lambda _, entry: entry.seal(), (BASE, WITH_NEW), prepare=reserve),
    Case("abort", lambda _, entry: entry.abort(), (BASE,), prepare=reserve),
    Case("drop_select", lambda buffer, _: buffer.drop_select([1, 2, 7]), (BASE,)),
    # once all bytes are copied the entry counts as handed over, though the call has yet to let go of it
    Case("drop_select, copy", lambda buffer, _: buffer.drop_select([1, 2, 7], copy=True), (BASE, ONE_TAKEN),
         finished=ONE_TAKEN),
    Case("select and release", select_and_release, (BASE,)),
    Case("release", release, (BASE, ONE_TAKEN), prepare=take),
    Case("drop the views", drop_views, (BASE, ONE_TAKEN), prepare=take),
    Case("cancel", lambda buffer, _: buffer.cancel([1, 2]), (BASE, ONE_TAKEN, {**BASE, (1, 2): []})),
    Case("collect", lambda buffer, _: buffer.stats(), (BASE,), prepare=release_unseen),
    Case("wait", lambda buffer, _: buffer.drop_select(ABSENT, timeout=0.002), (BASE,),
         prepare=wait_in_any_case),
]
BY_NAME = {case.name: case for case in CASES}


# ---------------------------------------------------------------- what must hold then

def check_payload(hit: shmkv.Hit, tag: int) -> None:
    for name, tensor in kv(tag).items():
        assert torch.equal(hit[name], tensor), f"tensor {name!r} of entry {tag} is torn"


def take_all(buffer: shmkv.KVBuffer) -> list[shmkv.Hit]:
    return [hit for tokens in WITH_NEW for hit in _take_equal(buffer, tokens)]


def _take_equal(buffer: shmkv.KVBuffer, tokens: tuple[int, ...]) -> list[shmkv.Hit]:
    hits = []
    while hit := buffer.drop_select(list(tokens), match="exact"):
        hits.append(hit)
    return hits


def contents_of(hits: list[shmkv.Hit]) -> Contents:
    found: Contents = {tokens: [] for tokens in BASE}
    for hit in sorted(hits, key=lambda hit: hit.sequence):
        tag = int(hit["x"][0])
        check_payload(hit, tag)
        found.setdefault(tuple(hit.tokens.tolist()), []).append(tag)
    return found


class Trial:
    """A buffer, the handle of it that is interrupted and another one."""

    def __init__(self) -> None:
        self.buffer = shmkv.create(unique_name(), **GEOMETRY)
        self.other = shmkv.attach(self.buffer.name)
        for handle in (self.buffer, self.other):  # what is made once for each handle and thread
            handle.drop_select(ABSENT, timeout=0.001)

    def end(self) -> None:
        """End it also after a fault, with leases that nobody can release any more."""
        for handle in (self.buffer, self.other):
            handle.unlink()
            handle._session.end_now()

    def run(self, case: Case, point: interrupt_at, traceback_lives: bool) -> None:
        for tokens, tags in BASE.items():
            for tag in tags:
                self.other.insert(list(tokens), kv(tag))
        early, result, outcomes = [], None, case.outcomes
        prepared = case.prepare(self.buffer)
        with self._no_unraisable():
            try:
                with point:
                    result = case.act(self.buffer, prepared)
                    outcomes = (case.finished,) if case.finished is not None else outcomes
            except KeyboardInterrupt:
                assert point.fired
                self.check_sound()
                if traceback_lives:  # and with it all that the interrupted frames hold
                    early = take_all(self.other)
                    self.check_sound()
            del prepared, result
            if point.fired:
                self.check(outcomes, early)

    def check_sound(self) -> None:
        assert self.other.problems() == [], "problems seen by the other handle"
        assert self.buffer.problems() == [], "problems seen by the interrupted handle"

    def check(self, outcomes: tuple[Contents, ...], early: list[shmkv.Hit]) -> None:
        """`early` were taken before the interrupted call's frames were gone."""
        self.check_sound()
        late = take_all(self.other)
        self.check_sound()
        sequences = [hit.sequence for hit in early + late]
        assert len(sequences) == len(set(sequences)), f"delivered twice: {sequences}"
        assert contents_of(early + late) in [{**dict.fromkeys(BASE, []), **outcome} for outcome in outcomes]
        early.clear(), late.clear()
        gc.collect()
        self.check_sound()
        stats = self.other.stats()
        in_use = {name: n for name, n in stats.entries.items() if name != "free" and n}
        assert (in_use, stats.held_leases, stats.used_bytes) == ({}, 0, 0), "something is still held"
        assert not any(stats.waiting.values()), stats.waiting

    @contextlib.contextmanager
    def _no_unraisable(self):
        """An interrupt in a finaliser reaches nobody; what it did to the buffer is checked all the same."""
        old, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
        try:
            yield
        finally:
            sys.unraisablehook = old


def interrupt_everywhere(name: str, traceback_lives: bool, in_finalisers: bool) -> tuple[int, list[str]]:
    """Interrupt the case at each of its places; returns how many there are and what went wrong where."""
    case, before, trial, faults = BY_NAME[name], residue(), Trial(), []
    gc.collect()
    gc.freeze()  # so that a collection after each trial costs nothing
    try:
        for n in itertools.count(1):
            point = interrupt_at(n, in_finalisers)
            try:
                trial.run(case, point, traceback_lives)
            except (AssertionError, shmkv.ShmkvError) as error:
                faults.append(f"{n}. {point.where}: {type(error).__name__}: {' '.join(str(error).splitlines()[:2])}")
                traceback.clear_frames(error.__traceback__)
                trial.end()
                trial = Trial()
            if not point.fired:
                break
    finally:
        gc.unfreeze()
        trial.end()
    del trial
    faults += [f"left behind: {what}" for what in residue() - before]
    return n - 1, faults


class real_interrupt:
    """A signal from a timer, `delay` seconds later, that interrupts the package outside its finalisers, or nothing."""

    def __init__(self, delay: float):
        self.delay, self.fired, self.where = delay, False, ""

    def __enter__(self) -> "real_interrupt":
        signal.signal(signal.SIGALRM, self._ring)
        signal.setitimer(signal.ITIMER_REAL, self.delay)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _ring(self, _: int, frame: FrameType | None) -> None:
        while frame is not None and not _is_ours(frame.f_code):
            frame = frame.f_back
        if frame is not None and not self.fired and not _in_finaliser(frame):
            self.fired, self.where = True, f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno}"
            raise KeyboardInterrupt


def interrupt_by_signals(names: list[str], traceback_lives: bool, seconds: float) -> tuple[int, list[str]]:
    """Interrupt calls at random moments; returns how many were, and what went wrong where."""
    trial, faults, n_fired, chance = Trial(), [], 0, random.Random(1)
    gc.collect()
    gc.freeze()
    until = time.monotonic() + seconds
    while time.monotonic() < until and not faults:
        point = real_interrupt(max(1e-6, chance.uniform(0, 500e-6)))
        try:
            trial.run(BY_NAME[chance.choice(names)], point, traceback_lives)
            if not point.fired:
                take_all(trial.other)
        except (AssertionError, shmkv.ShmkvError) as error:
            faults.append(f"{point.where}: {type(error).__name__}: {error}")
        n_fired += point.fired
    trial.end()
    return n_fired, faults


@pytest.fixture
def check(kv_spawn, capsys):
    """Run the trials in a process of their own: what a fault leaks goes with it."""

    def run(text: str, function: Callable, *args: Any, at_least: int) -> None:
        n_interrupts, faults = kv_spawn(function, *args).result(100)
        with capsys.disabled():
            print(f"\n{text}: {n_interrupts} interrupts", end=" ", flush=True)
        assert not faults, "\n".join(["", *faults])
        assert n_interrupts >= at_least

    return run


EVERYWHERE = [pytest.param(name, lives, id=f"{name}-traceback {'lives' if lives else 'gone'}")
              for name in BY_NAME for lives in (False, True)]


@pytest.mark.kv_timeout(120)
@pytest.mark.parametrize("name, traceback_lives", EVERYWHERE)
def test_an_interrupt_anywhere_leaves_all_sound(check, name, traceback_lives):
    check(name, interrupt_everywhere, BY_NAME[name].name, traceback_lives, False, at_least=3)


@pytest.mark.kv_timeout(120)
@pytest.mark.parametrize("name", ["reserve and seal", "drop_select, copy", "select and release", "release",
                                  "drop the views", "abort"])
def test_an_interrupt_in_a_finaliser_leaves_all_sound(check, name):
    check(f"{name}, finalisers", interrupt_everywhere, name, False, True, at_least=3)


@pytest.mark.parametrize("traceback_lives", [False, True], ids=["traceback gone", "traceback lives"])
def test_real_signals_leave_all_sound(check, traceback_lives):
    names = ["insert", "drop_select", "seal", "abort", "cancel", "collect"]
    check("by timer", interrupt_by_signals, names, traceback_lives, 5.0, at_least=100)


# ---------------------------------------------------------------- the trials find what they look for

def stay_inside() -> None:
    """An interrupted section leaves the mark that this thread is inside."""
    run = sync.Lock.run

    def run_and_stay(self: sync.Lock, body: Callable, deadline_ns: int) -> Any:
        try:
            return run(self, body, deadline_ns)
        except KeyboardInterrupt:
            sync._me.inside[self._identity] = True
            raise

    sync.Lock.run = run_and_stay


def repair_nothing() -> None:
    recovery.rebuild = lambda tables: None


def consume_at_once() -> None:
    """A claim counts as handed over before it is."""

    def made(self: leases.Hold) -> None:
        self.index, self.generation, self.outcome = -1, 0, leases.Outcome.CONSUMED

    leases.Hold.__init__ = made


SABOTAGE = {"stay_inside": (stay_inside, "insert"), "repair_nothing": (repair_nothing, "insert"),
            "consume_at_once": (consume_at_once, "drop_select")}


def first_fault(sabotage: str) -> list[str]:
    break_it, name = SABOTAGE[sabotage]
    trial = Trial()
    break_it()
    gc.collect()
    gc.freeze()
    try:
        for n in itertools.count(1):
            point = interrupt_at(n)
            trial.run(BY_NAME[name], point, traceback_lives=False)
            if not point.fired:
                return []
    except (AssertionError, shmkv.ShmkvError) as error:
        return [f"{point.where}: {type(error).__name__}: {error}"]
    finally:
        for left in os.listdir("/dev/shm"):
            if trial.buffer.name in left:
                os.unlink(f"/dev/shm/{left}")
    raise AssertionError("unreachable")


@pytest.mark.parametrize("sabotage", SABOTAGE)
def test_the_trials_notice(kv_spawn, sabotage):
    assert kv_spawn(first_fault, sabotage).result(50)
