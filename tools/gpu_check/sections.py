"""The sections of the check, each a function of (report, small); run by gpu_check.py, one process a section.

In each, this process is the producer or the one who judges, and children are who is on the other side. Controls switch
off the one wait that is on trial (`Driver.wait`) and have to see the fault.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.multiprocessing
from kit import (
    DEVICE,
    GIB,
    KIB,
    MIB,
    SEGMENT,
    Child,
    Home,
    Report,
    bits,
    emulated,
    free_bytes,
    median,
    on_device,
    pattern,
    percentile,
    rate,
    raw,
    same_bits,
    settle,
    size_text,
    timed_ms,
    until_true,
)

import shmkv
from shmkv import driver as drivers
from shmkv.driver import Driver

ROOT = Path(__file__).resolve().parent.parent.parent
DTYPES = sorted({str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)})
QUANTISED = ("qint", "quint")
LATE_S = 0.5


# ---------------------------------------------------------------- the driver

def conformance(report: Report, small: bool) -> None:
    """The questions of the emulated driver's conformance, each difference a row."""
    sys.path.insert(0, str(ROOT / "tests" / "emulated_driver"))
    import conformance as questions

    questions.SECONDS_PER_ANSWER = 10.0
    n_agreed = n_asked = 0
    for answer in questions.ask_all():
        key, question = f"{answer.role}: {answer.question}", f"{answer.role}: {answer.question}"
        if answer.verdict == "DIFF":
            report.differs(key, question, f"{answer.got} (the emulated driver: {answer.want})", answer.got)
        elif answer.verdict == "REC":
            report.info(key, question, answer.got)
        n_asked += answer.verdict != "REC"
        n_agreed += answer.verdict == "OK"
    report.check("agreed", "documented answers that are as expected", n_asked > 0, f"{n_agreed} of {n_asked}",
                 [n_agreed, n_asked])


# ---------------------------------------------------------------- bytes

def roundtrip(report: Report, small: bool) -> None:
    dtypes = [name for name in DTYPES if not name.startswith(QUANTISED)]
    with (shmkv.create(**SEGMENT, device_capacity="16MiB", device=DEVICE) as buffer,
          Child(compare_all, buffer.name, dtypes) as other):
        refused = {}
        for number, name in enumerate(dtypes):
            try:
                buffer.insert([number], sources(name, number, on_device))
            except Exception as error:
                refused[name] = f"insert: {type(error).__name__}: {error}"
        found = other.ask("compare", within_s=40)
    wrong = refused | {name: why for name, why in found.wrong.items() if name not in refused}
    for name, why in wrong.items():
        report.check(f"dtype {name}", f"{name}: what comes out is what went in", False, why, why)
    report.check("bit_equal", f"{len(dtypes)} dtypes, {len(sources('uint8', 0))} shapes each, come out bit-equal",
                 not wrong, f"{len(dtypes) - len(wrong)} of {len(dtypes)}", [len(dtypes) - len(wrong), len(dtypes)])
    report.check("transport", "by which path?", found.transports == {"cuda_ipc"}, ", ".join(sorted(found.transports)))
    if not emulated():
        report.check("on_device", "are the views on the device?", found.devices == {DEVICE}, sorted(found.devices))


def sources(name: str, seed: int, bring: Callable = lambda host: host) -> dict[str, torch.Tensor]:
    """Tensors of a dtype in all kinds of shape, views of 60 elements with the bytes that `seed` says."""
    dtype = getattr(torch, name)
    elements = bring(pattern(60 * dtype.itemsize, seed)).view(dtype)
    matrix = elements.view(6, 10)
    return {"flat": matrix, "scalar": elements[7], "empty": elements[:0].view(0, 3), "turned": matrix.t(),
            "strided": matrix[::2, ::3], "sliced": elements[1:], "broadcast": elements[:6].view(6, 1).expand(6, 4)}


def compare_all(home: Home, name: str, dtypes: list[str]) -> None:
    with shmkv.attach(name) as buffer:
        home.hear()
        found = SimpleNamespace(wrong={}, transports=set(), devices=set())
        for number, dtype in enumerate(dtypes):
            try:
                with buffer.select([number], match="exact") as hit:
                    found.transports.add(hit.transport if hit else "none: a miss")
                    wanted = sources(dtype, number)
                    wrong = [kind for kind, tensor in wanted.items() if not same_bits(hit[kind], tensor)]
                    found.devices |= {str(view.device) for view in hit.values()}
            except Exception as error:
                wrong = [f"{type(error).__name__}: {error}"]
            if wrong:
                found.wrong[dtype] = ", ".join(wrong)
        home.say(found)


# ---------------------------------------------------------------- an engine's own tensors

def register(report: Report, small: bool) -> None:
    neighbour = on_device(pattern(512))  # so that a small tensor does not lie at the start of its block
    with shmkv.create(**SEGMENT, device=DEVICE) as buffer, Child(holder, buffer.name) as other:
        for name, nbytes in (("small", 8 * KIB), ("large", 24 * MIB)):
            register_one(report, buffer, other, name, on_device(pattern(nbytes)).view(8, -1))
        if emulated():
            report.info("expandable", "expandable segments", "not run: emulated driver")
        else:
            register_expandable(report, buffer)
        report.check("problems", "is the segment sound?", buffer.problems() == [], buffer.problems() or "yes")
    del neighbour


def register_one(report: Report, buffer: shmkv.KVBuffer, other: Child, name: str, kv: torch.Tensor) -> None:
    wanted = raw(kv[2:4])
    mine = buffer.register(kv)
    report.check(f"{name}_in_place", f"{name}: can it be seen in place?", mine.in_place, mine.reason or "yes")
    driver = drivers.find()
    base, nbytes = driver.allocation(0, mine.address)
    report.info(f"{name}_offset", f"{name}: where in its allocation?", f"at {mine.address - base} of {nbytes} B",
                [mine.address - base, nbytes])
    began = time.perf_counter()
    sequence = buffer.insert([1], {"kv": kv[2:4]})
    insert_us = (time.perf_counter() - began) * 1e6
    transport, seen = other.ask("take", [1])
    report.check(f"{name}_bytes", f"{name}: does a second process see its bytes?",
                 transport == "cuda_ipc" and seen == wanted, f"{transport}, inserted in {insert_us:.0f} us")
    kv[2:4].fill_(7)
    settle()
    same = other.ask("look again")[1] == bytes([7]) * len(wanted)
    report.check(f"{name}_same_memory", f"{name}: is it the tensor's own memory, no copy?", same,
                 "yes" if same else "no: a later write is not seen")
    early = buffer.released()
    other.ask("release")
    late = buffer.released(timeout=10)
    report.check(f"{name}_released", f"{name}: is it named by released(), after the release?",
                 early == [] and late == [sequence], f"before: {early}, after: {late}, inserted: {sequence}")
    mine.close()


def holder(home: Home, name: str) -> None:
    with shmkv.attach(name) as buffer:
        hit = None
        while order := home.hear():
            if order[0] == "take":
                hit = buffer.drop_select(order[1], timeout=10)
            if order[0] == "release":
                hit.release()
                home.say(None)
            else:
                home.say((hit.transport, raw(hit["kv"])))


def register_expandable(report: Report, buffer: shmkv.KVBuffer) -> None:
    """Such memory has no IPC handle of the kind that is used here: it has to be copied, and to say so."""
    setting = "expandable_segments:True"
    with Child(insert_expandable, buffer.name, PYTORCH_CUDA_ALLOC_CONF=setting, PYTORCH_ALLOC_CONF=setting) as other:
        in_place, reason = other.hear()
        report.check("expandable_reason", "expandable segments: does the registration say why not?",
                     not in_place and bool(reason), reason or "in place")
        with buffer.select([9], timeout=10) as hit:
            good = bool(hit) and same_bits(hit["kv"], pattern(8 * MIB, 9).view(8, -1)[2:4])
            report.check("expandable_copy", "expandable segments: does the insert work, by a copy?", good,
                         hit.transport if hit else hit.reason)


def insert_expandable(home: Home, name: str) -> None:
    with shmkv.attach(name, device_capacity="4MiB", device=DEVICE) as buffer:
        kv = on_device(pattern(8 * MIB, 9)).view(8, -1)
        mine = buffer.register(kv)
        buffer.insert([9], {"kv": kv[2:4]})
        home.say((mine.in_place, mine.reason))
        home.hear()


# ---------------------------------------------------------------- order

def order(report: Report, small: bool) -> None:
    """Each entry is made late, by a kernel that has to wait behind one that only spins. Dense tensors are copied by the
    driver, strided ones by torch; one is made on the default stream, whose number is 0.
    """
    cycles = cycles_for(LATE_S)
    ways = {"reserve": ("reserve", True), "insert": ("insert", True), "strided": ("strided", True),
            "insert, default stream": ("insert", False), "strided, default stream": ("strided", False)}
    with Child(reader) as other:
        for publish in ("wait", "event"):
            with shmkv.create(**SEGMENT, device_capacity="8MiB", device=DEVICE, publish=publish) as buffer:
                late = Late(buffer, other, cycles)
                for name, (how, aside) in ways.items():
                    fresh, text, seal_s = late.hand_over(how, aside)
                    title, early = f'publish="{publish}", {name}', seal_s < LATE_S / 2
                    report.check(f"{publish} {name}", f"{title}: are the bytes fresh?", fresh, text)
                    if publish == "event":
                        report.info(f"{publish} {name} early", f"{title}: published before the work was done?",
                                    "yes" if early else "no", early)
                if publish == "wait":
                    for how in ("reserve", "insert"):
                        with no_wait():
                            fresh, text, _ = late.hand_over(how, True)
                        report.control(f"control {how}", f"control saw stale, without the wait, {how}", not fresh, text)


class Late:
    """Hands over entries of one buffer's only run; each with a value of its own, so that the last one's is stale."""

    NBYTES = 8 * MIB

    def __init__(self, buffer: shmkv.KVBuffer, other: Child, cycles: int):
        self._buffer, self._other, self._cycles, self._value = buffer, other, cycles, 1
        other.ask("open", buffer.name)
        dense = torch.zeros(2 * self.NBYTES, dtype=torch.uint8, device=DEVICE)
        strided = dense.view(-1, 2)[:, 0]
        for tensor in (dense[:self.NBYTES], strided):  # open the region and load the kernels, which may wait for others
            tensor.fill_(1)
            buffer.insert([1], {"kv": tensor})
            other.ask("look", 1)

    def hand_over(self, how: str, aside: bool) -> tuple[bool, str, float]:
        self._value += 1
        value, tokens = self._value, [self._value]
        stream = torch.cuda.Stream() if aside else None
        entry, source = None, torch.zeros(2 * self.NBYTES, dtype=torch.uint8, device=DEVICE)
        if how == "reserve":
            spec = shmkv.Spec((self.NBYTES,), torch.uint8, DEVICE)
            entry = self._buffer.reserve(tokens, {"kv": spec}, stream=stream)
            source = entry["kv"]
        elif how == "strided":
            source = source.view(-1, 2)[:, 0]
        else:
            source = source[:self.NBYTES]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):  # None: the current one
            torch.cuda._sleep(self._cycles)
            source.fill_(value)
        self._other.say("look", value)
        began = time.monotonic()
        if entry is not None:
            del source
            entry.seal()
        else:
            self._buffer.insert(tokens, {"kv": source}, stream=stream)
        seal_s = time.monotonic() - began
        low, high, seen_at = self._other.hear()
        torch.cuda.synchronize()
        text = (f"made {value}, seen {span(low, high)}; published after {seal_s * 1e3:.0f} ms, read after "
                f"{(seen_at - began) * 1e3:.0f} ms")
        return low == high == value, text, seal_s


def span(low: int, high: int) -> str:
    return f"{low}" if low == high else f"{low} to {high}"


def reader(home: Home) -> None:
    buffer = None
    while order := home.hear():
        if order[0] == "open":
            if buffer is not None:
                buffer.close()
            buffer = shmkv.attach(order[1])
            home.say(None)
            continue
        with buffer.drop_select([order[1]], timeout=20) as hit:
            view = hit["kv"]
            low, high = int(view.min()), int(view.max())
            seen_at = time.monotonic()
            del view
        home.say((low, high, seen_at))


def release(report: Report, small: bool) -> None:
    """A kernel reads late what its hit no longer holds; the producer wants the same run."""
    cycles = cycles_for(LATE_S)
    with (shmkv.create(**SEGMENT, device_capacity=Late.NBYTES, device=DEVICE) as buffer,
          Child(slow_reader, buffer.name) as other):
        value = 1
        slow_read(buffer, other, value, 0, False)
        for control in (False, True):
            value += 2
            low, high, waited_s, released_s = slow_read(buffer, other, value, cycles, control)
            unharmed = low == high == value
            text = (f"held {value}, read {span(low, high)}; released at {released_s * 1e3:.0f} ms, room for the next "
                    f"after {waited_s * 1e3:.0f} ms")
            if control:
                report.control("control", "control saw overwritten bytes, without the wait", not unharmed, text)
            else:
                report.check("unharmed", "does a reading kernel see its entry to the end?", unharmed, text)
                report.check("waited", "did the next insert wait for it?", waited_s > LATE_S / 2, f"{waited_s:.3f} s",
                             round(waited_s, 4))


def slow_read(buffer: shmkv.KVBuffer, other: Child, value: int, cycles: int, control: bool) -> tuple:
    now, later = (torch.full((Late.NBYTES,), value + add, dtype=torch.uint8, device=DEVICE) for add in (0, 1))
    torch.cuda.synchronize()
    buffer.insert([value], {"kv": now})
    released_s = other.ask("read", value, cycles, control)
    began = time.monotonic()
    buffer.insert([value + 1], {"kv": later}, timeout=20)
    waited_s = time.monotonic() - began
    low, high = other.ask("what was read?")
    buffer.cancel([value + 1])
    return low, high, waited_s, released_s


def slow_reader(home: Home, name: str) -> None:
    with shmkv.attach(name) as buffer:
        side = torch.cuda.Stream()
        out = torch.zeros(Late.NBYTES, dtype=torch.uint8, device=DEVICE)
        int(out.min()), int(out.max())
        while order := home.hear():
            _, value, cycles, control = order
            hit = buffer.drop_select([value], timeout=20, stream=side)
            view = hit["kv"]
            out.zero_()
            torch.cuda.synchronize()
            began = time.monotonic()
            with torch.cuda.stream(side):
                torch.cuda._sleep(cycles)
                out.copy_(view)
            with no_wait(control):
                hit.release()
                del hit, view
                home.say(time.monotonic() - began)
                home.hear()
                torch.cuda.synchronize()
            home.say((int(out.min()), int(out.max())))


@contextmanager
def no_wait(control: bool = True) -> Iterator[None]:
    if not control:
        yield
        return
    with mock.patch.object(Driver, "wait", lambda *_: None):
        yield


def cycles_for(seconds: float) -> int:
    """How many clock cycles a kernel has to spin, at the clock that spinning brings about."""
    torch.cuda._sleep(200_000_000)
    torch.cuda.synchronize()
    trial = 100_000_000
    ms = timed_ms(lambda: (torch.cuda._sleep(trial), torch.cuda.synchronize()))
    return int(trial * seconds * 1e3 / ms)


# ---------------------------------------------------------------- a dead owner

def dead(report: Report, small: bool) -> None:
    """The reads may be errors that stick to the context: what must still work is asked after them."""
    unraisable: list[str] = []
    sys.unraisablehook = lambda caught: unraisable.append(f"{caught.exc_value} in {caught.object}")
    nbytes = 4 * MIB
    with shmkv.create(**SEGMENT) as buffer:
        with Child(own, buffer.name, nbytes) as owner:
            owner.hear()
            hit = buffer.select([1, 2, 3], timeout=10)
            view = hit["kv"]
            report.check("alive", "before: are the bytes seen?", torch.equal(bits(view), pattern(nbytes, 1)),
                         hit.transport)
            owner.kill()
            gone_s = until_true(lambda: any(region.state == "gone" for region in buffer.stats().regions), 15)
        report.check("gone", "seconds until stats() says that its region is gone", gone_s is not None,
                     f"{gone_s:.3f}" if gone_s is not None else "not within 15 s", gone_s)
        for which, tokens in (("the entry that is held", [1, 2, 3]), ("another entry", [4, 5])):
            report.check(f"miss {len(tokens)}", f"does a new look-up of {which} miss?", *missed(buffer, tokens))
        report.info("read", "what does the view show that is still held?", what_is_read(view, nbytes))
        time.sleep(1.0)
        report.info("read_later", "and a second later?", what_is_read(view, nbytes))
        holders = [pid for region in buffer.stats().regions for pid in region.held_by]
        report.check("mapped", "does stats() say who has it mapped?", holders == [os.getpid()],
                     "this process" if holders == [os.getpid()] else holders)
        hit.release()
        del hit, view
        gc.collect()
        closed_s = until_true(lambda: not any(region.held_by for region in buffer.stats().regions), 10)
        after = f"after {closed_s:.3f} s" if closed_s is not None else "not within 10 s"
        report.check("unmapped", "is the mapping let go of?", closed_s is not None and not unraisable,
                     "; ".join(unraisable) or after, closed_s)
        freed_s = until_true(lambda: not buffer.stats().regions, 1)
        report.info("freed", "is the region's record free then?", "yes" if freed_s is not None else "not within 1 s",
                    freed_s)
        report.check("lives_on", "does this process compute on the device?", *computes())
        with Child(own, buffer.name, nbytes) as heir:
            heir.hear()
            with buffer.select([1, 2, 3], timeout=10) as hit:
                good = bool(hit) and torch.equal(bits(hit["kv"]), pattern(nbytes, 1))
                report.check("next_owner", "is another owner's entry seen?", good, hit.transport if hit else hit.reason)
        report.check("problems", "is the segment sound?", buffer.problems() == [], buffer.problems() or "yes")


def own(home: Home, name: str, nbytes: int) -> None:
    with shmkv.attach(name, device_capacity=2 * nbytes, device=DEVICE) as buffer:
        buffer.insert([1, 2, 3], {"kv": on_device(pattern(nbytes, 1))})
        buffer.insert([4, 5], {"kv": on_device(pattern(KIB, 2))})
        home.say(os.getpid())
        home.hear()


def missed(buffer: shmkv.KVBuffer, tokens: list[int]) -> tuple[bool, str]:
    try:
        with buffer.select(tokens) as hit:
            return not hit, "a hit" if hit else hit.reason
    except shmkv.ShmkvError as error:
        return False, f"{type(error).__name__}: {error}"


def what_is_read(view: torch.Tensor, nbytes: int) -> str:
    try:
        seen, wanted = bits(view), pattern(nbytes, 1)
    except RuntimeError as error:
        return f"error: {str(error).splitlines()[0]}"
    if torch.equal(seen, wanted):
        return "the same bytes"
    return f"other bytes, {int((seen != wanted).sum())} of {nbytes}, first {bytes(seen[:8].tolist()).hex()}"


def computes() -> tuple[bool, str]:
    try:
        good = torch.equal(bits(on_device(pattern(MIB)) + 1), pattern(MIB) + 1)
        return good, "yes" if good else "wrong bytes"
    except RuntimeError as error:
        return False, str(error).splitlines()[0]


# ---------------------------------------------------------------- time to open

def opening(report: Report, small: bool) -> None:
    sizes = [2 * MIB, 2 * MIB, 64 * MIB] if small else [64 * MIB, 64 * MIB, GIB, 8 * GIB]
    opens: list[float] = []
    bare = Driver.open

    def timed(*arguments: object) -> int:
        began = time.perf_counter_ns()
        address = bare(*arguments)
        opens.append((time.perf_counter_ns() - began) / 1e6)
        return address

    on_device(pattern(KIB))  # the context is made before it counts
    with (shmkv.create(**SEGMENT) as buffer, Child(own_more, buffer.name) as owner,
          mock.patch.object(Driver, "open", timed)):
        for number, nbytes in enumerate(sizes):
            name = size_text(nbytes) + (", the first of the process" if not number else "")
            answer = owner.ask(number, nbytes)
            if isinstance(answer, str):
                report.info(name, f"{name}: first look", f"not run: {answer}")
                continue
            del opens[:]
            first = timed_ms(lambda number=number: buffer.select([number])["kv"])
            again = [timed_ms(lambda number=number: buffer.select([number])["kv"]) for _ in range(5)]
            value = {"select_ms": round(first, 3), "open_ms": [round(ms, 3) for ms in opens],
                     "again_ms": round(median(again), 3), "allocate_ms": round(answer, 3)}
            report.info(name, f"{name}: first look, of it cuIpcOpenMemHandle; next look; owner's cuMemAlloc, ms",
                        f"{first:.2f}, {sum(opens):.2f}; {median(again):.3f}; {answer:.2f}", value)
            report.check(f"{name} once", f"{name}: opened once?", len(opens) == 1, len(opens))


def own_more(home: Home, name: str) -> None:
    """Each order a handle with device memory of its own; answers how many milliseconds that took, or why not."""
    buffers = []
    on_device(pattern(KIB))
    while order := home.hear():
        number, nbytes = order
        try:
            ms = timed_ms(lambda: buffers.append(shmkv.attach(name, device_capacity=nbytes, device=DEVICE)))  # noqa: B023
        except shmkv.ShmkvError as error:
            home.say(str(error))
            continue
        buffers[-1].insert([number], {"kv": on_device(pattern(KIB))})
        home.say(ms)


# ---------------------------------------------------------------- speed

def copy(report: Report, small: bool) -> None:
    """insert() of a tensor of torch's, and copy_ of the same bytes into another such tensor, turn by turn."""
    sizes = [64 * KIB, MIB] if small else [MIB, 16 * MIB, 256 * MIB, GIB]
    sizes = [nbytes for nbytes in sizes if 4 * nbytes < free_bytes()]
    with shmkv.create(**SEGMENT, device_capacity=max(sizes), device=DEVICE) as buffer:
        for nbytes in sizes:
            source = on_device(pattern(min(nbytes, MIB)).repeat(max(1, nbytes // MIB)))
            target = on_device(torch.zeros(nbytes, dtype=torch.uint8))
            inserts, copies = [], []
            for _ in range(5 if small else 40):
                copies.append(timed_ms(lambda: (target.copy_(source), settle())))  # noqa: B023
                inserts.append(timed_ms(lambda: buffer.insert([1], {"kv": source})))  # noqa: B023
                buffer.cancel([1])
            inserted, copied = median(inserts[2:]), median(copies[2:])
            value = {"insert_ms": round(inserted, 4), "copy_ms": round(copied, 4), "ratio": round(inserted / copied, 3),
                     "insert_GBps": round(rate(nbytes, inserted), 2), "copy_GBps": round(rate(nbytes, copied), 2)}
            report.info(size_text(nbytes), f"{size_text(nbytes)}: insert, bare copy_, GB/s; time of insert / copy_",
                        f"{value['insert_GBps']:.1f}, {value['copy_GBps']:.1f}; {value['ratio']:.2f}", value)


def handoff(report: Report, small: bool) -> None:
    """From the call that publishes tensors that are there, to a process that waits for them holding them.

    Beside it torch.multiprocessing: a new tensor each time through a Queue, which the consumer drops (torch then closes
    memory of which nothing is kept, and opens it anew the next time); and its best case, the same tensor each time
    through a SimpleQueue, which the consumer keeps.
    """
    sizes = [64 * KIB, MIB] if small else [64 * KIB, MIB, 64 * MIB, GIB, 4 * GIB]
    sizes = [nbytes for nbytes in sizes if 5 * nbytes < free_bytes()]
    ways = ("shmkv",) if emulated() else ("shmkv", "queue", "kept")
    samples: dict[tuple[int, str], list[float]] = {(nbytes, way): [] for nbytes in sizes for way in ways}
    context = torch.multiprocessing.get_context("spawn")
    queues = (context.Queue(), context.SimpleQueue())
    warm_up, rounds = 3, 20 if small else 200
    with (shmkv.create(**SEGMENT, device_capacity=max(sizes), device=DEVICE) as buffer,
          Child(receiver, buffer.name, queues) as other):
        kept = {nbytes: torch.zeros(nbytes, dtype=torch.uint8, device=DEVICE) for nbytes in sizes if "kept" in ways}
        other.ask("forget")  # it is there
        turns, wrong, until = 0, 0, time.monotonic() + (3 if small else 40)
        while turns < warm_up + rounds and time.monotonic() < until:
            for (nbytes, way), found in samples.items():
                us, right = hand_over(buffer, other, queues, kept, way, nbytes, turns % 250 + 1)
                wrong += not right
                found.append(us)
            turns += 1
        other.ask("forget")
        kept.clear()
    report.check("bytes", f"{turns} turns: do all views show the bytes of their turn?", not wrong, f"{wrong} wrong")
    for nbytes in sizes:
        mine = {way: samples[nbytes, way][min(warm_up, turns - 1):] for way in ways}
        value = {way: {"p50_us": round(median(us), 1), "p99_us": round(percentile(us, 0.99), 1), "runs": len(us)}
                 for way, us in mine.items()}
        names = {"shmkv": "shmkv", "queue": "torch Queue", "kept": "torch SimpleQueue, kept"}
        text = "; ".join(f"{names[way]} {found['p50_us']:.0f} / {found['p99_us']:.0f}" for way, found in value.items())
        report.info(size_text(nbytes), f"{size_text(nbytes)}: p50 / p99, us", text, value)
    if emulated():
        report.info("torch", "torch.multiprocessing", "not run: emulated driver")


def hand_over(buffer: shmkv.KVBuffer, other: Child, queues: tuple, kept: dict, way: str, nbytes: int,
              value: int) -> tuple[float, bool]:
    """Microseconds until the consumer held the tensor, and whether it had the bytes of this turn."""
    entry = None
    if way == "shmkv":
        entry = buffer.reserve([value], {"kv": shmkv.Spec((nbytes,), torch.uint8, DEVICE)})
        tensor = entry["kv"]
    else:
        tensor = kept[nbytes] if way == "kept" else torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
    tensor[0] = tensor[-1] = value
    settle()
    other.say(way, nbytes, value)
    time.sleep(0.002)  # a producer computes before it publishes: the consumer has waited a little
    if entry is not None:
        del tensor
        began = time.monotonic_ns()
        entry.seal()
    else:
        began = time.monotonic_ns()
        queues[way == "kept"].put(tensor)
    held, right = other.hear()
    return (held - began) / 1e3, right


def receiver(home: Home, name: str, queues: tuple) -> None:
    kept: dict[int, torch.Tensor] = {}
    with shmkv.attach(name) as buffer:
        while order := home.hear():
            if order[0] == "forget":
                kept.clear()
                gc.collect()
                home.say(None)
                continue
            way, nbytes, value = order
            hit = buffer.drop_select([value], timeout=20) if way == "shmkv" else None
            tensor = hit["kv"] if hit is not None else queues[way == "kept"].get()
            held = time.monotonic_ns()
            right = int(tensor[0]) == int(tensor[-1]) == value and tensor.numel() == nbytes
            if way == "kept":
                kept[nbytes] = tensor
            del tensor
            if hit is not None:
                hit.release()
            hit = None
            home.say((held, right))


# ---------------------------------------------------------------- by the host

def staging(report: Report, small: bool) -> None:
    nbytes = 4 * MIB if small else 256 * MIB
    stat = os.statvfs("/dev/shm")
    while nbytes > MIB and 3 * nbytes > stat.f_bavail * stat.f_frsize:
        nbytes //= 2
    options = {**SEGMENT, "capacity": 2 * nbytes + MIB}
    with (shmkv.create(**options, device_capacity=nbytes, device=DEVICE) as buffer,
          Child(fetch, buffer.name, nbytes, [("to the host", {"prefer": "staging"}),
                                             ("to the device", {"prefer": "staging", "device": DEVICE})]) as able,
          Child(fetch, buffer.name, nbytes, [("without a driver", {})], CUDA_VISIBLE_DEVICES="") as unable):
        source = on_device(pattern(MIB, 3).repeat(nbytes // MIB))
        buffer.insert([1], {"kv": source})
        for other in (able, unable):
            other.say("go")
            for _ in range(2 if other is able else 1):
                name, transport, where, right, cold, warm, why = other.hear(40)
                report.check(name, f"{name}: bit-equal, by staging?", right and transport == "staging",
                             f"{transport}, on {where}{f' ({why})' if why else ''}")
                report.info(f"{name} speed", f"{name}, {size_text(nbytes)}: GB/s of the first look, of later ones",
                            f"{rate(nbytes, cold):.2f}, {rate(nbytes, warm):.2f}",
                            {"first_ms": round(cold, 3), "p50_ms": round(warm, 3),
                             "GBps": round(rate(nbytes, warm), 3)})
        if not emulated():
            pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            ms = median([timed_ms(lambda: (pinned.copy_(source), settle())) for _ in range(5)])
            report.info("bare copy", "a bare copy to page-locked host memory, GB/s", f"{rate(nbytes, ms):.2f}",
                        round(rate(nbytes, ms), 3))


def fetch(home: Home, name: str, nbytes: int, ways: list[tuple[str, dict]]) -> None:
    wanted = pattern(MIB, 3).repeat(nbytes // MIB)
    home.hear()
    for way, options in ways:
        with shmkv.attach(name, **options) as buffer:
            times = []
            for _ in range(4):
                began = time.perf_counter_ns()
                hit = buffer.select([1], timeout=20)
                view = hit["kv"]
                settle_if(view)
                times.append((time.perf_counter_ns() - began) / 1e6)
                right, transport, where = torch.equal(bits(view), wanted), hit.transport, str(view.device)
                why = hit.refused.get("cuda_ipc", "")
                hit.release()
                del hit, view
        home.say((way, transport, where, right, times[0], median(times[1:]), why))
    home.hear()


def settle_if(view: torch.Tensor) -> None:
    if view.is_cuda:
        torch.cuda.synchronize()


# ---------------------------------------------------------------- two devices

def nccl(report: Report, small: bool) -> None:
    nbytes = MIB if small else 256 * MIB
    ways = [("cuda_peer", {"device": "cuda:1"}), ("nccl", {"device": "cuda:1", "prefer": "nccl"})]
    with (shmkv.create(**SEGMENT, device_capacity=nbytes, device=DEVICE) as buffer,
          Child(fetch, buffer.name, nbytes, ways) as other):
        buffer.insert([1], {"kv": on_device(pattern(MIB, 3).repeat(nbytes // MIB))})
        peer_access = drivers.find().can_access_peer(1, 0)
        report.info("peer_access", "can cuda:1 reach cuda:0?", "yes" if peer_access else "no", peer_access)
        other.say("go")
        for wanted, _ in ways:
            _, transport, where, right, first, later, _ = other.hear(40)
            by = " (by gloo: the driver is emulated)" if emulated() and transport == "nccl" else ""
            expected = wanted if peer_access or wanted == "nccl" else transport
            report.check(wanted, f"{wanted}: bit-equal on cuda:1?", right and transport == expected,
                         f"{transport}, on {where}{by}")
            report.info(f"{wanted} speed", f"{wanted}, {size_text(nbytes)}: ms of the first look, of later ones",
                        f"{first:.2f}, {later:.2f}", [round(first, 3), round(later, 3)])


SECTIONS = {section.__name__: section for section in (
    conformance, roundtrip, register, order, release, dead, opening, copy, handoff, staging, nccl)}


def main() -> int:
    name, *flags = sys.argv[1:]
    report = Report()
    report.fact(torch=torch.__version__, torch_cuda=torch.version.cuda)
    try:
        if name != "conformance" and not emulated() and not torch.cuda.is_available():
            raise RuntimeError(f"this torch ({torch.__version__}) does not see the GPU")
        small = "--quick" in flags or (name != "conformance" and emulated())
        SECTIONS[name](report, small)
    except Exception:
        report.check("error", "does this section come to its end?", False, traceback.format_exc(), "error")
    return 0


if __name__ == "__main__":
    sys.exit(main())
