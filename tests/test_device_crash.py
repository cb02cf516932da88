"""A process killed at every store it makes on its way to, in and out of device memory: the others go on, nothing leaks,
host entries and those of living owners stay as they were.

The survivor has no driver; a second process owns device memory and lives. The process that dies has threads of its own
(service, keeper), and the kills fall into these too.
"""

import contextlib
import ctypes
import gc
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import emulated
import pytest
import torch
from emulated_driver.build import build
from test_crash import ABSENT, DONE, FAILED, PAGE, Fault, check_payload, expect, forked, kv, run_bytes
from test_interrupts import interrupt_at

import shmkv
from shmkv import Spec, driver, fetch, keeper, owned, regions, store, sync, testing
from shmkv.errors import TransportUnavailable
from shmkv.layout import Counter, Lease, Wait
from shmkv.peers import WaitState
from shmkv.testing import die_at_store, eventually, unique_name
from shmkv.transport.mailbox import MAILBOX_BYTES

GEOMETRY = {"capacity": 128 * PAGE, "meta_capacity": 64 << 10, "slots": 24, "leases": 48, "peers": 8, "waits": 24,
            "device_arenas": 4, "registrations": 4}
PACKAGE = os.path.dirname(os.path.abspath(shmkv.__file__)) + os.sep
GPU = {"device": "cuda:0"}
OWNER = {**GPU, "device_capacity": "2MiB"}
CHILD_S = 30
SOON_S = 1.0

Contents = dict[tuple[int, ...], int]  # tokens -> tag of the entry
ON_HOST: Contents = {(1,): 1, (1, 2): 2, (5, 6): 5}
ON_DEVICE: Contents = {(20,): 20, (20, 21): 21}
BASE = {**ON_HOST, **ON_DEVICE}
NEW_TAG = 70
WITH_NEW = {**BASE, (40,): NEW_TAG}
TAKEN = {tokens: tag for tokens, tag in BASE.items() if tokens != (20, 21)}


# ---------------------------------------------------------------- processes

class die_in_threads(die_at_store):
    """Count, and kill at, the stores of this process's threads of these names (of all of them if none is given), also
    of those that were started before, if they were after `watch`.
    """

    def __init__(self, k: int | None = None, *names: str):
        super().__init__(k)
        self._names, self._armed = names, False

    def watch(self) -> "die_in_threads":
        threading.settrace(self._of_thread)
        return self

    def __enter__(self) -> "die_in_threads":
        self._armed = True
        super().__enter__()
        sys.settrace(self._of_thread)
        return self

    def __exit__(self, *_: object) -> None:
        self._armed = False
        super().__exit__()

    def _of_thread(self, frame: FrameType, event: str, arg: object) -> Callable | None:
        code = frame.f_code
        if not self._armed or not code.co_filename.startswith(PACKAGE) or not self._stores_of(code):
            return None  # to be told of each instruction of a function without stores only takes time
        if self._names and threading.current_thread().name not in self._names:
            return None
        return self._trace(frame, event, arg)

    def _stores_of(self, code: CodeType) -> frozenset[int]:
        known = STORES.get(id(code))
        return super()._stores_of(code) if known is None else known


def functions_of(thing: Any) -> Iterator[Any]:
    """The functions of a module or class of the package."""
    for value in vars(thing).values():
        if isinstance(value, type) and value.__module__.startswith("shmkv.") and value is not thing:
            yield from functions_of(value)
        for name in ("", "__wrapped__", "__func__", "fget"):
            function = getattr(value, name, None) if name else value
            if isinstance(function, types.FunctionType):
                yield function


def codes_of(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_of(constant)


def stores_of_the_package() -> dict[int, frozenset[int]]:
    """Where the stores are, by id of code object: found once here, instead of in each child."""
    known = die_at_store()
    modules = [module for name, module in sys.modules.items() if name.startswith("shmkv.")]
    codes = [code for module in modules for function in functions_of(module) for code in codes_of(function.__code__)]
    return {id(code): known._stores_of(code) for code in codes}


STORES: dict[int, frozenset[int]] = {}


def no_driver() -> None:
    raise TransportUnavailable("no driver here")


FIND = driver.find
FOLDER = ""


def with_driver(body: Callable[[], Any], seconds: int) -> None:
    """The rest of a forked child's life, with the emulated driver; it ends as if killed, without taking leave."""
    signal.alarm(seconds)
    driver.find = FIND
    try:
        os._exit(DONE if emulated.run(FOLDER, {}, body) else FAILED)
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
        os._exit(FAILED)


class Live:
    """A process with a driver that does what it is told: functions of a dict of its own."""

    def __init__(self) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self.pid = os.fork()
        if not self.pid:
            self._pipe.close()
            with_driver(lambda: self._serve(theirs), 200)
        theirs.close()

    @staticmethod
    def _serve(pipe: Any) -> bool:
        own: dict[str, Any] = {}
        while True:
            try:
                function, args = pipe.recv()
            except EOFError:
                return True
            try:
                result = True, function(own, *args)
            except Exception as error:
                result = False, f"{type(error).__name__}: {error}"
            pipe.send(result)

    def tell(self, function: Callable, *args: Any) -> None:
        self._pipe.send((function, args))

    def answer(self, timeout: float = 15) -> Any:
        expect(self._pipe.poll(timeout), "a living process does not answer")
        done, result = self._pipe.recv()
        expect(done, f"a living process raised {result}")
        return result

    def ask(self, function: Callable, *args: Any) -> Any:
        self.tell(function, *args)
        return self.answer()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        self._pipe.close()


def attach_to(own: dict, name: str, options: dict) -> None:
    own["buffer"] = shmkv.attach(name, **options)


def insert_there(own: dict, contents: Contents) -> None:
    insert_device(own["buffer"], contents)


def hold_there(own: dict, shared: list, taken: list, mapped: list) -> list[str]:
    """Hold views of shared and of taken entries; of the last ones only the mapping is left."""
    buffer = own["buffer"]
    hits = [buffer.select(list(tokens), match="exact") for tokens in shared]
    hits += [buffer.drop_select(list(tokens), match="exact") for tokens in taken]
    for tokens in mapped:
        with buffer.drop_select(list(tokens), match="exact") as hit:
            check_payload(hit, NEW_TAG)
    own["held"] = [[hit, hit["x"][2:], hit["y"]] for hit in hits]
    return [hit.transport for hit in hits]


def let_go_there(own: dict) -> None:
    own.pop("held", None)
    gc.collect()


def fetch_there(own: dict, tokens: list, tag: int) -> str:
    try:
        with own["buffer"].select(tokens, match="exact") as hit:
            if not hit:
                return "miss"
            check_payload(hit, tag)
            return hit.transport
    except shmkv.ShmkvError as error:
        return type(error).__name__


def be_brief(own: dict, seconds: float) -> None:
    fetch.FETCH_TIMEOUT_S = seconds


def look_often(own: dict) -> None:
    keeper.LOOK_EVERY_S = 0.02


# ---------------------------------------------------------------- tensors on the device

_memory: list[torch.Tensor] = []


def device_memory() -> torch.Tensor:
    """2 MiB of the device's, as torch sees them."""
    if not _memory:
        cuda = driver.find()
        host = cuda.host_alias(cuda.allocate(0, 2 << 20))
        _memory.append(torch.frombuffer((ctypes.c_ubyte * (2 << 20)).from_address(host), dtype=torch.uint8))
    return _memory[0]


def on_device(tag: int) -> dict[str, torch.Tensor]:
    found, end = {}, 0
    for name, tensor in kv(tag).items():
        nbytes = tensor.numel() * tensor.itemsize
        found[name] = device_memory()[end:end + nbytes].view(tensor.dtype).copy_(tensor)
        end += -(-nbytes // 256) * 256
    return found


def insert_device(buffer: shmkv.KVBuffer, contents: Contents) -> None:
    for tokens, tag in contents.items():
        buffer.insert(list(tokens), on_device(tag), on_full="error")


def specs(tag: int) -> dict[str, Spec]:
    return {name: Spec(tensor.shape, tensor.dtype, "cuda:0") for name, tensor in kv(tag).items()}


# ---------------------------------------------------------------- the world of a case

class World:
    """The survivor's buffer, and the living owner, whose entries it gets by `path`."""

    def __init__(self, path: str = "staging") -> None:
        self.name, self.path, self.n_links = unique_name(), path, 0
        self.buffer = shmkv.create(self.name, **GEOMETRY)
        self.owner, self.living = Live(), []
        try:
            self.owner.ask(be_brief, 0.5)
            self.owner.ask(attach_to, self.name, OWNER)
            self.restore({})
        except BaseException:
            self.end()
            raise
        self.meta_bytes = self.buffer.stats().meta_used_bytes

    def live(self, options: dict) -> Live:
        """One more process that lives."""
        live = Live()
        self.living.append(live)
        live.ask(look_often)
        live.ask(attach_to, self.name, options)
        return live

    def restore(self, found: Contents) -> None:
        """Make the contents BASE again."""
        for tokens in found.keys() - BASE.keys():
            self.buffer.cancel(list(tokens))
        for tokens in ON_HOST.keys() - found.keys():
            self.buffer.insert(list(tokens), kv(ON_HOST[tokens]), on_full="error")
        missing = {tokens: tag for tokens, tag in ON_DEVICE.items() if tokens not in found}
        if missing:
            self.owner.ask(insert_there, missing)

    def found(self, outcomes: tuple[Contents, ...]) -> Contents:
        """All there is under the keys that there may be, checked bit for bit."""
        found = {}
        for tokens in sorted({tokens for outcome in outcomes for tokens in outcome} | {(40,), (41,), (42,)}):
            hit = self.buffer.select(list(tokens), match="exact", copy=True)
            if hit:
                found[tokens] = int(hit["x"][0])
                check_payload(hit, found[tokens])
                expect(tokens not in ON_DEVICE or hit.transport == self.path, f"{tokens} came by {hit.transport}")
        return found

    def end(self) -> None:
        for live in (self.owner, *self.living):
            live.kill()
        self.buffer.close()
        for left in os.listdir("/dev/shm"):
            if self.name in left:
                os.unlink(f"/dev/shm/{left}")


@dataclass(frozen=True)
class Case:
    """One operation of the process that dies, `act`; what `attach` and `prepare` do in it before is not killed.

    In the survivor run `before`, `between` (after `prepare`, and at the same time as what threads of the dying process
    do then) and `after`; each gets what the one before returned. `threads`: the kills fall into these only.
    """

    name: str
    act: Callable[[Any, Any], Any]
    options: dict = field(default_factory=lambda: OWNER)
    outcomes: tuple[Contents, ...] = (BASE,)
    prepare: Callable[[Any], Any] = lambda buffer: None
    before: Callable[[World], Any] = lambda world: None
    between: Callable[[World, Any], Any] = lambda world, made: made
    after: Callable[[World, Any], Any] = lambda world, made: None
    threads: tuple[str, ...] = ()
    stride: int = 1  # more where each kill takes a process more, or a connection
    seconds: float = SOON_S
    attaches: bool = True


class Victim:
    """A child that does the case and is killed (or stopped) just before its k-th store."""

    def __init__(self, world: World, case: Case, k: int | None, made: Any, stop: bool = False):
        self._case, self._code, self.stores = case, None, 0
        self._ready, ready = os.pipe()
        go, self._go = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(self._ready), os.close(self._go)
            if stop:
                testing.signal = types.SimpleNamespace(SIGKILL=signal.SIGSTOP)
            with_driver(lambda: self._body(world.name, k, ready, go), CHILD_S)
        os.close(ready), os.close(go)
        self.is_ready = os.read(self._ready, 1) == b"r"
        if self.is_ready:
            self.made = case.between(world, made)
            with contextlib.suppress(BrokenPipeError):
                os.write(self._go, b"g")
        else:
            self.made = made

    def _body(self, name: str, k: int | None, ready: int, go: int) -> Any:
        case = self._case
        owned.LEAVE_TIMEOUT_S, keeper.LOOK_EVERY_S = 0.03, 0.02
        point = die_in_threads(k, *case.threads).watch()
        buffer = shmkv.attach(name, **case.options) if case.attaches else name
        held = case.prepare(buffer)
        with point:
            os.write(ready, b"r")
            os.read(go, 1)
            kept = case.act(buffer, held)
        os.write(ready, point.stores.to_bytes(8, "little"))
        return [buffer, held, kept, True]

    def stopped(self) -> bool:
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            self._code = os.waitstatus_to_exitcode(status)
        return self._code is None

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.end()

    def end(self) -> int:
        """Wait for it; what its last signal or exit code was."""
        if self._code is None:
            _, status = os.waitpid(self.pid, 0)
            self._code = os.waitstatus_to_exitcode(status)
        if self._ready >= 0:
            self.stores = int.from_bytes(os.read(self._ready, 8), "little")
            os.close(self._ready), os.close(self._go)
            self._ready = -1
        expect(self._code in (DONE, -signal.SIGKILL), f"the child to be killed ended with {self._code}")
        return self._code


# ---------------------------------------------------------------- what dies, doing what

def settled(buffer: shmkv.KVBuffer) -> None:
    """The keeper has ended what was let go of."""
    eventually(lambda: buffer._session.sweep() or not buffer._session._lifelines, timeout=3)


def attach(name: str, _: Any, **options: Any) -> shmkv.KVBuffer:
    return shmkv.attach(name, **OWNER, **options)


def insert(buffer: shmkv.KVBuffer, tensors: dict) -> None:
    buffer.insert([40], tensors, on_full="error")
    settled(buffer)


def new_tensors(buffer: Any) -> dict[str, torch.Tensor]:
    return on_device(NEW_TAG)


def reserve_and_seal(buffer: shmkv.KVBuffer, _: Any) -> None:
    with buffer.reserve([40], specs(NEW_TAG)) as entry:
        for name, tensor in kv(NEW_TAG).items():
            entry[name].copy_(tensor)
    del entry
    settled(buffer)


def reserve_and_abort(buffer: shmkv.KVBuffer, _: Any) -> None:
    entry = buffer.reserve([40], specs(NEW_TAG))
    entry.abort()
    del entry
    settled(buffer)
    buffer.stats()


def register_and_insert(buffer: shmkv.KVBuffer, tensors: dict) -> Any:
    registered = buffer.register(device_memory()[:1 << 20])
    assert registered.in_place
    buffer.insert([40], tensors)
    settled(buffer)
    return registered


def registered(buffer: shmkv.KVBuffer) -> Any:
    made = register_and_insert(buffer, on_device(NEW_TAG))
    buffer.cancel([40])
    return made


def end_registration(buffer: shmkv.KVBuffer, made: Any) -> None:
    assert len(buffer.released()) == 1
    made.close()


def share(buffer: shmkv.KVBuffer, transport: str) -> None:
    with buffer.select([20, 21, 22]) as hit:
        assert hit.transport == transport, hit.transport
        check_payload(hit, 21)
    del hit
    settled(buffer)
    buffer.stats()


def share_by_link(buffer: shmkv.KVBuffer, _: Any) -> None:
    with buffer.select([20, 21, 22]) as hit:
        assert hit.transport == "nccl", hit.transport
        check_payload(hit, 21)


def share_and_close(buffer: shmkv.KVBuffer, _: Any) -> None:
    share(buffer, "cuda_ipc")
    buffer.close()


def take(buffer: shmkv.KVBuffer, transport: str, **how: Any) -> None:
    hit = buffer.drop_select([20, 21, 22])
    assert hit.transport == transport, hit.transport
    check_payload(hit, 21)
    hit.release(**how)
    del hit
    settled(buffer)
    buffer.stats()


def several(buffer: shmkv.KVBuffer) -> None:
    insert_device(buffer, {(40,): NEW_TAG, (41,): NEW_TAG, (42,): NEW_TAG})


def wait_to_be_told(buffer: shmkv.KVBuffer, _: Any) -> None:
    """The survivor does something between; then this process has nothing more to do."""


def ask_it(world: World, consumer: Live | None) -> Live | None:
    """Have the dying owner bring its entry, to a consumer with a driver or to the survivor."""
    if consumer is not None:
        path = consumer.ask(fetch_there, [40], NEW_TAG)
        expect(path in ("nccl", "miss", "TransportUnavailable", "TimedOut"), f"the consumer's end: {path}")
        return consumer
    started = time.monotonic()
    with contextlib.suppress(TransportUnavailable):
        with world.buffer.select([40]) as hit:
            if hit:
                check_payload(hit, NEW_TAG)
    took = time.monotonic() - started
    expect(took < SOON_S, f"the consumer needed {took:.3f} s")
    return consumer


def held_by_another(world: World, consumer: Live) -> Live:
    expect(consumer.ask(hold_there, [(40,)], [(41,)], [(42,)]) == ["cuda_ipc"] * 2, "not seen in place")
    return consumer


def let_go_by_another(world: World, consumer: Live) -> None:
    gone = [region for region in world.buffer.stats().regions if region.owner_pid != world.owner.pid]
    expect([(region.state, region.held_by) for region in gone] == [("gone", [consumer.pid])], f"{gone}")
    consumer.ask(let_go_there)


def consumer_of(options: dict) -> Callable[[World], Live]:
    def before(world: World) -> Live:
        if not world.living:
            world.live(options).ask(be_brief, 2.0)
        return world.living[0]

    return before


def linked_consumer(world: World) -> Live:
    """It has a link with the living owner, and keeps it."""
    if not world.living:
        consumer = consumer_of(NCCL)(world)
        expect(consumer.ask(fetch_there, [20], 20) == "nccl", "there is no link")
        world.n_links, world.meta_bytes = 1, world.buffer.stats().meta_used_bytes
    return world.living[0]


def use_other_link(world: World, consumer: Live) -> None:
    expect(consumer.ask(fetch_there, [20], 20) == "nccl", "the link with the living owner is gone")


def mortal_consumer(world: World) -> Live:
    live = Live()
    live.ask(attach_to, world.name, IPC)
    return live


def consumer_dies(world: World, live: Live) -> None:
    held_by_another(world, live).kill()


def mortal_owner(world: World) -> Live:
    live = Live()
    live.ask(attach_to, world.name, OWNER)
    live.ask(insert_there, {(40,): NEW_TAG, (41,): NEW_TAG})
    return live


def hold_both(buffer: shmkv.KVBuffer) -> list:
    hits = [buffer.select([40]), buffer.drop_select([41])]
    return [[hit, hit["x"][2:]] for hit in hits]


def owner_dies(world: World, live: Live) -> None:
    live.kill()


def release_all(buffer: shmkv.KVBuffer, held: list) -> None:
    while held:
        held.pop()[0].release()
    settled(buffer)
    buffer.stats()


def keep_none(buffer: shmkv.KVBuffer) -> None:
    with buffer.select([40]):
        pass
    settled(buffer)


def keeper_lets_go(buffer: shmkv.KVBuffer, _: Any) -> None:
    eventually(lambda: emulated.live()[1] == 0, timeout=5)
    time.sleep(0.05)


def fill_arena(buffer: shmkv.KVBuffer) -> None:
    for number in range(3):
        with buffer.reserve([41, number], {"x": Spec((150 * PAGE,), torch.uint8, "cuda:0")}):
            pass


def evict(buffer: shmkv.KVBuffer, _: Any) -> None:
    with buffer.reserve([40], {"x": Spec((300 * PAGE,), torch.uint8, "cuda:0")}, on_full="evict"):
        pass
    settled(buffer)


IPC, STAGING, NCCL = {}, {"prefer": "staging"}, {"prefer": "nccl"}
SERVICE = ("shmkv-service", "shmkv-send", "shmkv-link")

CASES = [
    Case("attach", attach, attaches=False),
    Case("attach, event", lambda name, _: attach(name, _, publish="event"), attaches=False),
    Case("insert", insert, prepare=new_tensors),
    Case("insert, event", insert, prepare=new_tensors, options={**OWNER, "publish": "event"}),
    Case("insert, through the host", insert, prepare=new_tensors, options=GPU, outcomes=(BASE, WITH_NEW)),
    Case("reserve and seal", reserve_and_seal),
    Case("reserve and abort", reserve_and_abort),
    Case("register and insert", register_and_insert, prepare=new_tensors, options=GPU),
    Case("end a registration", end_registration, prepare=registered, options=GPU),
    Case("select, ipc", lambda buffer, _: share(buffer, "cuda_ipc"), options=IPC),
    Case("select, peer", lambda buffer, _: share(buffer, "cuda_peer"), options={"device": "cuda:1"}),
    Case("select, ipc, and close", share_and_close, options=IPC),
    Case("drop_select, ipc", lambda buffer, _: take(buffer, "cuda_ipc"), options=IPC, outcomes=(BASE, TAKEN)),
    Case("drop_select, ipc, returned", lambda buffer, _: take(buffer, "cuda_ipc", returned=True), options=IPC),
    Case("drop_select, staging", lambda buffer, _: take(buffer, "staging"), options=STAGING, outcomes=(BASE, TAKEN)),
    Case("select, staging to the device", lambda buffer, _: share(buffer, "staging"), options={**GPU, **STAGING}),
    Case("bring by staging", wait_to_be_told, prepare=several, between=ask_it, threads=SERVICE),
    Case("select, nccl", share_by_link, options=NCCL, stride=7, seconds=5),
    Case("bring by nccl", wait_to_be_told, prepare=several, before=linked_consumer, between=ask_it,
         after=use_other_link, threads=SERVICE, stride=7, seconds=5),
    Case("close, entries mapped", lambda buffer, _: buffer.close(), prepare=several, before=consumer_of(IPC),
         between=held_by_another, after=let_go_by_another),
    Case("close, entries", lambda buffer, _: buffer.close(), prepare=several),
    Case("close, a consumer died", lambda buffer, _: buffer.close(), prepare=several, before=mortal_consumer,
         between=consumer_dies, stride=2),
    Case("evict", evict, prepare=fill_arena),
    Case("release what a dead owner had", release_all, prepare=hold_both, options=IPC, before=mortal_owner,
         between=owner_dies, stride=2),
    Case("the keeper buries an owner", keeper_lets_go, prepare=keep_none, options=IPC, before=mortal_owner,
         between=owner_dies, threads=("shmkv-keeper",)),
]
BY_NAME = {case.name: case for case in CASES}

# ---------------------------------------------------------------- the survivor

def check_survival(world: World, case: Case, made: Any, patience: float = 0) -> None:
    """Go on as the survivor of a death in `case`, and leave the contents BASE."""
    buffer, started = world.buffer, time.monotonic()
    expect(not buffer.drop_select(ABSENT, timeout=patience), "an absent key was found")
    case.after(world, made)
    expect(buffer.problems() == [], f"problems: {buffer.problems()}")
    buffer.insert([8, 8], kv(8), on_full="error", timeout=0)
    expect(bool(buffer.drop_select([8, 8, 8], copy=True)), "what the survivor inserted is not there")
    took = time.monotonic() - started
    expect(took < SOON_S, f"the survivor needed {took:.3f} s")

    found = world.found(case.outcomes)
    expect(found in case.outcomes, f"left: {found}")
    soon(lambda: what_is_left(world, found), case.seconds)
    expect(buffer.problems() == [], f"problems: {buffer.problems()}")
    with shmkv.attach(world.name):  # in the record that the dead peer had
        held = {pid for region in buffer.stats().regions for pid in region.held_by}
    living = {world.owner.pid, *(live.pid for live in world.living)}
    expect(held <= living - {world.owner.pid}, f"regions are held by {held}")
    world.restore(found)
    expect(buffer.stats().meta_used_bytes == world.meta_bytes, "bytes of the meta arena are lost")


def soon(text_of: Callable[[], str], seconds: float) -> None:
    """Wait for the text to become empty: others have to notice, too."""
    until = time.monotonic() + seconds
    while (text := text_of()) and time.monotonic() < until:
        time.sleep(0.005)
    expect(not text, text)


def what_is_left(world: World, found: Contents) -> str:
    """What is there beyond the entries found and the living, in words."""
    stats = world.buffer.stats()
    in_use = {name: n for name, n in stats.entries.items() if n and name != "free"}
    if in_use != {"ready": len(found), **({"reserved": world.n_links} if world.n_links else {})}:
        return f"{in_use}, but {found} could be had"
    if stats.held_leases != 2 * world.n_links or stats.peers != 2 + len(world.living):
        return f"{stats.held_leases} leases, {stats.peers} peers"
    used = sum(run_bytes(tag) for tokens, tag in found.items() if tokens not in ON_DEVICE)
    used += world.n_links * MAILBOX_BYTES
    if stats.used_bytes != used:
        return f"{stats.used_bytes} B in use on the host, it should be {used}"
    used = sum(run_bytes(tag) for tokens, tag in found.items() if tokens in ON_DEVICE)
    there = [(region.owner_pid, region.state, region.used_bytes) for region in stats.regions]
    if there != [(world.owner.pid, "open", used)]:
        return f"regions {there}, {used} B should be in use in the one of {world.owner.pid}"
    return what_of_the_dead(world)


def what_of_the_dead(world: World) -> str:
    """Peer records, wait records and semaphores of who is no more."""
    session = world.buffer._session
    words, waits, peers = session.tables.words, session.tables.waits, session.tables.peers
    dead = [peer for peer in peers.attached() if not peers.alive(peer)]
    if dead:
        return f"the dead peers {dead} are attached"
    attached, bells = set(peers.attached()), set()
    for at in waits._records:
        if words[at + Wait.state] in (WaitState.IDLE, WaitState.WAITING):
            if words[at + Wait.peer] not in attached:
                return f"a wait record of peer {words[at + Wait.peer]}"
            bells.add(waits.bell_name(at).replace("/", "sem.", 1))
    left = {entry for entry in os.listdir("/dev/shm") if world.name in entry} - bells - {f"shmkv.{world.name}"}
    return f"left in /dev/shm: {left}" if left else ""


def fault_of(what: str, error: Exception) -> Fault:
    """The fault as a text alone: its frames would keep hits of a buffer that is closed."""
    fault = Fault(f"{what}: {type(error).__name__}: {error}")
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__, error = None, error.__context__
    return fault


def kill_everywhere(world: World, case: Case) -> int:
    """Kill at every store of the case (at each `stride`-th), one after the other; returns how often."""
    n_kills = 0
    for k in itertools.count(1, case.stride):
        try:
            made = case.before(world)
            victim = Victim(world, case, k, made)
            code = victim.end()
            check_survival(world, case, victim.made, patience=0.002 if k % 16 == 0 else 0)
        except (Fault, shmkv.ShmkvError) as error:
            raise fault_of(f"{case.name}: after a kill at store {k}", error) from None
        if code == DONE:
            return n_kills
        n_kills += 1
    raise AssertionError("unreachable")


@pytest.fixture
def world(kv_watchdog, monkeypatch) -> Iterator[World]:
    made = make_world(monkeypatch.setattr)
    yield made
    made.end()


def make_world(setattr_: Callable = setattr) -> World:
    setattr_(sys.modules[__name__], "FOLDER", str(build()))
    STORES.update(STORES or stores_of_the_package())
    setattr_(driver, "find", no_driver)
    setattr_(fetch, "FETCH_TIMEOUT_S", 5.0)
    return World()


@pytest.fixture
def report(capsys, record_property):
    def say(what: str, n_kills: int) -> None:
        record_property("kills", n_kills)
        with capsys.disabled():
            print(f"\n{what}: {n_kills} kills", end=" ", flush=True)

    return say


@pytest.mark.kv_timeout(120)
@pytest.mark.parametrize("name", BY_NAME)
def test_a_kill_at_every_store_harms_nobody(world, report, name):
    n_kills = kill_everywhere(world, BY_NAME[name])
    report(name, n_kills)
    assert n_kills > 5


# ---------------------------------------------------------------- two deaths in a row

def look(name: str, k: int) -> Callable[[], Any]:
    def body() -> Any:
        with die_in_threads(k):
            buffer = shmkv.attach(name)
            return [buffer, buffer.drop_select(ABSENT, timeout=0)]

    return body


@pytest.mark.kv_timeout(120)
@pytest.mark.parametrize("name", ["insert", "register and insert", "drop_select, ipc", "drop_select, staging"])
def test_a_kill_at_every_store_of_who_buries_the_dead_harms_nobody(world, report, name):
    case, n_kills = BY_NAME[name], 0
    victim = Victim(world, case, None, None)
    victim.end()
    check_survival(world, case, victim.made)
    for first in (victim.stores // 2, None):
        for second in itertools.count(1):
            try:
                victim = Victim(world, case, first, None)
                victim.end()
                code, _ = forked(look(world.name, second))
                expect(code in (DONE, -signal.SIGKILL), f"the one that buries ended with {code}")
                check_survival(world, case, None)
            except (Fault, shmkv.ShmkvError) as error:
                raise fault_of(f"{name}: after kills at stores {first} and {second}", error) from None
            n_kills += 2
            if code == DONE:
                break
    report(f"{name}, then who buries it", n_kills)


# ---------------------------------------------------------------- work that outlives who asked for it

def hold_work(own: dict, microseconds: int) -> None:
    emulated.set_delay(microseconds)


def a_copy_for_the_dead(world: World) -> None:
    """Kill a consumer while the owner copies for it, and have something else lie where it would have been put."""
    buffer, leases = world.buffer, world.buffer._session.tables.leases
    words = buffer._session.tables.words
    world.owner.ask(hold_work, 3_600_000_000)
    victim = Victim(world, BY_NAME["drop_select, staging"], None, None)
    eventually(lambda: any(words[leases.at(index) + Lease.request] == fetch.Ask.SERVING for index in leases.held()))
    victim.kill()
    expect(not buffer.drop_select(ABSENT), "an absent key was found")
    ours = {}
    while (free := buffer.stats().largest_free_bytes) >= PAGE:
        ours[len(ours)] = kept = torch.full((free,), 100 + len(ours), dtype=torch.uint8)
        buffer.insert([50, len(ours)], {"x": kept}, on_full="error")
    world.owner.ask(hold_work, 0)
    soon(lambda: f"{buffer.stats().held_leases} leases are held" if buffer.stats().held_leases else "", 2)
    for number, kept in ours.items():
        with buffer.drop_select([50, number + 1], match="exact") as hit:
            expect(bool(hit) and torch.equal(hit["x"], kept), "a late copy for the dead lies in another entry")
    del hit
    check_survival(world, BY_NAME["drop_select, staging"], None)


def test_a_copy_for_a_dead_consumer_harms_no_entry(world):
    a_copy_for_the_dead(world)


# ---------------------------------------------------------------- stopped is not dead

def is_waited_for(world: World, victim: Victim) -> bool:
    """Check that the stopped process is not robbed, then let it go on; returns whether it held the lock."""
    buffer = world.buffer
    deaths = buffer._session.tables.counter(Counter.deaths)
    try:
        buffer.drop_select(ABSENT, timeout=0)
    except shmkv.TimedOut:
        patient = threading.Thread(target=buffer.stats)
        patient.start()
        victim.resume()
        patient.join(10)
        expect(not patient.is_alive(), "the lock was not free when its holder went on")
        return True
    expect(buffer.problems() == [], f"problems beside a stopped process: {buffer.problems()}")
    stats = buffer.stats()
    expect(stats.counters["deaths"] == deaths, "the stopped process was buried")
    expect(all(region.state == "open" for region in stats.regions), f"its region was taken: {stats.regions}")
    victim.resume()
    return False


@pytest.mark.parametrize("name", ["attach", "insert", "drop_select, ipc", "drop_select, staging"])
def test_a_stopped_process_is_waited_for_and_never_robbed(world, name, monkeypatch):
    monkeypatch.setattr(sync, "LOCK_GRACE_NS", 300_000_000)
    case, held_the_lock = BY_NAME[name], []
    victim = Victim(world, case, None, None)
    victim.end()
    check_survival(world, case, None)
    for k in range(1, victim.stores - 1, max(1, victim.stores // 10)):
        victim = Victim(world, case, k, None, stop=True)
        try:
            if victim.stopped():
                held_the_lock.append(is_waited_for(world, victim))
            expect(victim.end() == DONE, "it did not go on")
            check_survival(world, case, None)
        except (Fault, shmkv.ShmkvError) as error:
            raise fault_of(f"{name}: stopped at store {k}", error) from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                victim.resume()
    assert {True, False} <= set(held_the_lock)


# ---------------------------------------------------------------- interrupts

INTERRUPTED = {
    "insert": (BASE, WITH_NEW), "reserve and seal": (BASE, WITH_NEW), "reserve and abort": (BASE,),
    "register and insert": (BASE, WITH_NEW), "select, ipc": (BASE,), "drop_select, ipc": (BASE, TAKEN),
    "drop_select, staging": (BASE, TAKEN),
}


def interrupt_somewhere(name: str, stride: int) -> tuple[int, list[str]]:
    """Interrupt the case at each `stride`-th of its places, with a driver; how often, and what was wrong."""
    global FOLDER
    FOLDER, case, n_interrupts, faults = str(build()), BY_NAME[name], 0, []
    fetch.FETCH_TIMEOUT_S = 5.0
    sys.unraisablehook = lambda unraisable: None  # an interrupt in a finaliser reaches nobody
    world = World("cuda_ipc")
    buffer = shmkv.attach(world.name, **case.options)
    gc.collect()
    gc.freeze()
    for n in itertools.count(1, stride):
        held, point = case.prepare(buffer), interrupt_at(n)
        try:
            with contextlib.suppress(KeyboardInterrupt), point:
                case.act(buffer, held)
            end_interrupted(world, buffer, INTERRUPTED[name])
        except (Fault, shmkv.ShmkvError, TimeoutError) as error:
            faults.append(str(fault_of(f"{n}. {point.where}", error)))
            if len(faults) == 3:
                break
        if not point.fired:
            break
        n_interrupts += 1
    buffer.close()
    del buffer, held
    gc.unfreeze()
    world.end()
    return n_interrupts, faults


def end_interrupted(world: World, buffer: shmkv.KVBuffer, outcomes: tuple[Contents, ...]) -> None:
    gc.collect()
    for handle in (world.buffer, buffer):
        expect(handle.problems() == [], f"problems: {handle.problems()}")
    found = world.found(outcomes)
    expect(found in outcomes, f"left: {found}")
    world.restore(found)

    def held() -> str:
        gc.collect()
        stats = world.buffer.stats()
        in_use = {name: n for name, n in stats.entries.items() if n and name != "free"}
        ours = [region for region in stats.regions if region.owner_pid == os.getpid() and region.kind == "arena"]
        used = [region.used_bytes for region in ours]
        used += [stats.used_bytes - sum(run_bytes(tag) for tag in ON_HOST.values())]
        wrong = stats.held_leases or in_use != {"ready": len(BASE)} or any(used)
        return f"{stats.held_leases} leases, {in_use}, {used} B" if wrong else ""

    soon(held, 2)
    buffer.released()
    for registered in list(buffer._devices.owned._registered.values()):
        registered.close()
    left = [region for region in world.buffer.stats().regions if region.kind == "tensor"]
    expect(not left, f"regions that nobody can close any more: {left}")


def raise_beside_the_last_view(name: str) -> str:
    with shmkv.attach(name, **OWNER) as buffer:
        insert_device(buffer, {(40,): NEW_TAG})
        try:
            print(buffer.select([40])["x"], 1 / 0)
        except Exception as error:
            raised = type(error).__name__
        gc.collect()
        settled(buffer)
        return raised


def test_an_exception_that_lets_go_of_the_last_view_stays_what_it_is(kv_spawn, kv_buffer):
    assert emulated.spawner(kv_spawn)(raise_beside_the_last_view, kv_buffer.name).result() == "ZeroDivisionError"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="as in test_interrupts")
@pytest.mark.parametrize("name", INTERRUPTED)
def test_an_interrupt_leaves_all_sound(kv_spawn, capsys, name):
    n_interrupts, faults = emulated.spawner(kv_spawn)(interrupt_somewhere, name, 7).result(55)
    with capsys.disabled():
        print(f"\n{name}: {n_interrupts} interrupts", end=" ", flush=True)
    assert not faults, faults
    assert n_interrupts >= 10


def cut_close_short(own: dict) -> None:
    """An interrupt between a region's end and that of the entries in it."""
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    own["buffer"]._session.store._remove_ready = interrupted
    with contextlib.suppress(KeyboardInterrupt):
        own["buffer"].close()


def test_a_close_cut_short_keeps_nobody_looking(world):
    consumer = world.live(IPC)
    world.owner.ask(cut_close_short)
    consumer.tell(fetch_there, [20], 20)
    assert consumer.answer(3) in ("miss", "cuda_ipc")  # the memory is still there


# ---------------------------------------------------------------- the harness finds what it looks for

def do_nothing(*_: Any) -> None:
    return None


def pin_nothing(self: store.Store, slot: int, generation: int, hold: Any) -> bool:
    return True


def kill_amid(name: str) -> Callable[[World], Any]:
    return lambda world: kill_everywhere(world, BY_NAME[name])


SABOTAGE = {
    "end_regions": (store.Store, "end_regions", do_nothing, kill_amid("insert")),
    "clear_peer": (regions.Regions, "clear_peer", do_nothing, kill_amid("select, ipc")),
    "reap_regions": (store.Store, "reap_regions", do_nothing, kill_amid("attach")),
    "pin": (store.Store, "pin", pin_nothing, a_copy_for_the_dead),
}


def fault_with(sabotage: str) -> str:
    """What is found with a part of the package taken out, in a process of its own."""
    where, what, instead, look_for_it = SABOTAGE[sabotage]
    setattr(where, what, instead)
    world = make_world()
    try:
        look_for_it(world)
    except Fault as fault:
        return str(fault)
    finally:
        world.end()
    return ""


@pytest.mark.parametrize("sabotage", SABOTAGE)
def test_the_harness_notices(kv_spawn, sabotage):
    fault = kv_spawn(fault_with, sabotage).result(50)
    print(fault)
    assert fault
