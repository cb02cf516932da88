"""The whole buffer, through two handles, against a model of plain Python; and proof that a broken one is noticed."""

import math
import os
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import shmkv
from shmkv import recovery, store
from shmkv.entries import READY
from shmkv.leases import Outcome
from shmkv.prefix import PrefixOrder
from shmkv.segment import Segment
from shmkv.store import Store
from shmkv.testing import unique_name

PAGE = 4096
GEOMETRY = {"capacity": 12 * PAGE, "meta_capacity": 32 << 10, "slots": 8, "leases": 9, "peers": 4, "waits": 4}
NAMESPACES = [None, {"model": "a"}, {"model": "a", "rank": 1}]
STEP_S = 100  # how much time passes at once; ttl are odd multiples of half of it

tokens = st.sampled_from([[0], [0, 0], [0, 0], [0, 1], [0, 0, 1], [0, 0, 1, 1], [0, 1, 1, 0], [1]])
namespaces = st.sampled_from([0, 0, 0, 1, 2])
picks = st.integers(0, 63)
sizes = st.sampled_from([(3,), (0,), (), (5, 0), (PAGE,), (PAGE + 1,), (2, PAGE), (4 * PAGE - 256, 1)])
matches = st.sampled_from(["exact", "prefix", "prefix", "overlap"])
ttls = st.sampled_from([None, None, None, 50, 150, 250])


# ---------------------------------------------------------------- the model

@dataclass(eq=False)
class Entry:
    namespace: int
    tokens: tuple[int, ...]
    tensors: dict[str, torch.Tensor]
    ttl: float | None
    sequence: int = 0
    state: str = "reserved"
    used: int = 0
    n_leases: int = 0
    cancelled: bool = False
    expires: float | None = None

    @property
    def run_bytes(self) -> int:
        end = 0
        for tensor in self.tensors.values():
            end = -(-end // 256) * 256 + tensor.numel() if tensor.numel() else end
        return -(-end // PAGE) * PAGE


@dataclass(eq=False)
class Lease:
    """One hit or reserved entry, with what keeps it: the handle, or views of it."""

    entry: Entry
    kind: str
    thing: Any
    owner: shmkv.KVBuffer
    views: list[torch.Tensor] = field(default_factory=list)
    released: bool = False
    returned: bool = False
    scribbled: bool = False


class Model:
    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.clock, self.now = 0, 0

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def settle(self) -> None:
        """What every call does first: see who is held no more, and expire."""
        for entry in self.entries:
            if entry.state == "ready" and entry.ttl and not entry.n_leases:
                entry.expires = self.now + entry.ttl if entry.expires is None else entry.expires
                if entry.expires <= self.now:
                    entry.state = "free"
        self.entries = [entry for entry in self.entries if entry.state != "free"]

    def candidates(self, namespace: int, wanted: tuple[int, ...], match: str, min_tokens: int) -> list[Entry]:
        """The entries of which any may be found; the oldest of equal keys only."""
        ready = [entry for entry in self.entries if entry.state == "ready" and entry.namespace == namespace]
        common = {entry: shared(entry.tokens, wanted) for entry in ready}
        if match == "exact":
            fitting = [entry for entry in ready if entry.tokens == wanted]
        elif match == "prefix":
            fitting = [entry for entry in ready if common[entry] == len(entry.tokens)]
        else:
            fitting = ready
        fitting = [entry for entry in fitting if common[entry] >= min_tokens]
        longest = max((common[entry] for entry in fitting), default=0)
        fitting = [entry for entry in fitting if common[entry] == longest]
        whole = [entry for entry in fitting if len(entry.tokens) == longest]  # nothing but what is shared
        return [entry for entry in whole or fitting
                if entry.sequence == min(other.sequence for other in fitting if other.tokens == entry.tokens)]

    def lease(self, entry: Entry, state: str) -> None:
        """Somebody holds the entry from now on; its ttl stands still."""
        if entry.expires is not None:
            entry.ttl, entry.expires = entry.expires - self.now, None
        entry.n_leases, entry.state, entry.used = entry.n_leases + 1, state, self.tick()

    def end(self, lease: Lease) -> None:
        """What the end of a lease does to its entry, as soon as anybody looks."""
        entry = lease.entry
        entry.n_leases -= 1
        if lease.kind == "write" and entry.state == "reserved":
            self.drop(entry)
        elif lease.kind == "take" and entry.state == "taken":
            if lease.returned:
                entry.state = "ready"
            else:
                self.drop(entry)
        elif entry.state == "dropped":
            self.drop(entry)

    def drop(self, entry: Entry) -> None:
        entry.state = "dropped" if entry.n_leases else "free"

    def idle(self) -> list[Entry]:
        """What may be evicted, least recently used first."""
        found = [entry for entry in self.entries if entry.state == "ready" and not entry.n_leases]
        return sorted(found, key=lambda entry: entry.used)


def shared(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def pattern(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    n = math.prod(shape)
    return ((torch.arange(n) * 31 + seed * 7919) % 253).to(torch.uint8).reshape(shape)


# ---------------------------------------------------------------- the machine

class Clock:
    """The time that the store sees: it passes when a test says so."""

    passed_s = 0

    def monotonic_ns(self) -> int:
        return time.monotonic_ns() + self.passed_s * 1_000_000_000


clock = Clock()


def run_machine(chosen: settings) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for module in (store, recovery):
            patch.setattr(module, "time", clock)
        run_state_machine_as_test(Machine, settings=chosen)


class Machine(RuleBasedStateMachine):
    """Each rule makes one call through one of two handles and the same move in the model."""

    @initialize()
    def begin(self) -> None:
        self.model = Model()
        self.leases: list[Lease] = []
        self.first = shmkv.create(unique_name(), **GEOMETRY)
        self.second: shmkv.KVBuffer | None = shmkv.attach(self.first.name)
        self.closed: list[shmkv.KVBuffer] = []

    def handle(self, pick: int) -> shmkv.KVBuffer:
        return self.second if pick % 2 and self.second is not None else self.first

    def live(self, kind: str | None = None) -> list[Lease]:
        return [lease for lease in self.leases if not lease.released and kind in (None, lease.kind)]

    # -------------------------------------------------------- producing

    @rule(pick=picks, tokens=tokens, namespace=namespaces, shapes=st.lists(sizes, min_size=1, max_size=3), ttl=ttls,
          on_full=st.sampled_from(["error", "evict", "wait"]))
    def insert(self, pick, tokens, namespace, shapes, ttl, on_full):
        entry = self.new_entry(tokens, namespace, shapes, ttl)

        def call(handle: shmkv.KVBuffer) -> int:
            return handle.insert(tokens, entry.tensors, namespace=NAMESPACES[namespace], ttl=ttl, on_full=on_full,
                                 timeout=0)

        sequence = self.if_it_fits(self.handle(pick), entry, on_full, call)
        if sequence is not None:
            entry.sequence, entry.state, entry.used = sequence, "ready", self.model.tick()
            entry.expires = ttl and self.model.now + ttl

    @rule(pick=picks, tokens=tokens, namespace=namespaces, shapes=st.lists(sizes, min_size=1, max_size=2), ttl=ttls)
    def reserve(self, pick, tokens, namespace, shapes, ttl):
        entry, handle = self.new_entry(tokens, namespace, shapes, ttl), self.handle(pick)
        reserved = self.if_it_fits(handle, entry, "error", lambda handle: handle.reserve(
            tokens, entry.tensors, namespace=NAMESPACES[namespace], ttl=ttl, on_full="error"))
        if reserved is not None:
            for name, tensor in entry.tensors.items():
                reserved[name].copy_(tensor)
            entry.sequence, entry.n_leases = reserved.sequence, 1
            self.leases.append(Lease(entry, "write", reserved, handle))

    def new_entry(self, tokens, namespace, shapes, ttl) -> Entry:
        tensors = {f"t{i}": pattern(self.model.tick(), shape) for i, shape in enumerate(shapes)}
        return Entry(namespace, tuple(tokens), tensors, ttl)

    def if_it_fits(self, handle: shmkv.KVBuffer, entry: Entry, on_full: str, call: Any) -> Any:
        """The result of `call`, or None if the buffer refused it for want of room, as it should."""
        before = handle.stats()
        self.model.settle()
        fits = (before.entries["free"] > 0 and before.held_leases < GEOMETRY["leases"]
                and before.largest_free_bytes >= entry.run_bytes)
        if entry.run_bytes > GEOMETRY["capacity"]:
            with pytest.raises(shmkv.TooLarge):
                call(handle)
            return None
        try:
            result = call(handle)
        except shmkv.ArenaFull:
            result = None
        idle, n_evicted = self.model.idle(), handle.stats().counters["evicted"] - before.counters["evicted"]
        assert result is not None or not fits, "refused what fits"
        assert n_evicted == 0 or (on_full == "evict" and not fits), "evicted without need"
        assert result is None or fits or n_evicted, "accepted what does not fit"
        for victim in idle[:n_evicted]:
            victim.state = "free"
        if result is not None:
            self.model.entries.append(entry)
        return result

    @precondition(lambda self: self.live("write"))
    @rule(pick=picks, keep=st.booleans())
    def seal(self, pick, keep):
        lease = self.pick_live(pick, "write")
        kept = [lease.thing[name] for name in lease.thing] if keep and lease.entry.run_bytes else []
        if lease.owner.closed:
            with pytest.raises(shmkv.ClosedError):
                lease.thing.seal()
            return
        self.model.settle()
        if lease.entry.cancelled:
            with pytest.raises(shmkv.Cancelled):
                lease.thing.seal()
            lease.entry.state = "dropped"
        else:
            assert lease.thing.seal() == lease.entry.sequence
            lease.entry.state, lease.entry.used = "ready", self.model.tick()
        self.let_go(lease, kept)
        if lease.entry.ttl and not lease.entry.n_leases:
            lease.entry.expires = self.model.now + lease.entry.ttl

    @precondition(lambda self: self.live("write"))
    @rule(pick=picks, keep=st.booleans(), forget=st.booleans())
    def abort(self, pick, keep, forget):
        lease = self.pick_live(pick, "write")
        kept = [lease.thing[name] for name in lease.thing] if keep and lease.entry.run_bytes else []
        if not (forget or lease.owner.closed):
            self.model.settle()
            lease.thing.abort()
            lease.entry.state = "dropped"
        self.let_go(lease, kept)

    @rule(pick=picks, tokens=tokens, namespace=namespaces)
    def cancel(self, pick, tokens, namespace):
        n_cancelled = self.handle(pick).cancel(tokens, namespace=NAMESPACES[namespace])
        self.model.settle()
        mine = [entry for entry in self.model.entries
                if (entry.namespace, entry.tokens) == (namespace, tuple(tokens)) and not entry.cancelled
                and entry.state in ("ready", "reserved")]
        assert n_cancelled == len(mine)
        for entry in mine:
            if entry.state == "ready":
                self.model.drop(entry)
            else:
                entry.cancelled = True

    # -------------------------------------------------------- consuming

    @rule(pick=picks, tokens=tokens, namespace=namespaces, match=matches, min_tokens=st.integers(1, 3),
          kind=st.sampled_from(["take", "share"]), readonly=st.booleans())
    def select(self, pick, tokens, namespace, match, min_tokens, kind, readonly):
        handle = self.handle(pick)
        call = handle.drop_select if kind == "take" else handle.select
        self.model.settle()
        found = self.model.candidates(namespace, tuple(tokens), match, min_tokens)
        n_held = sum(entry.n_leases for entry in self.model.entries)
        how = {"namespace": NAMESPACES[namespace], "match": match, "min_tokens": min_tokens, "readonly": readonly}
        if found and n_held == GEOMETRY["leases"]:
            with pytest.raises(shmkv.TableFull):
                call(tokens, **how)
            return
        hit = call(tokens, **how)
        assert bool(hit) == bool(found), f"{hit}, the model has {found}"
        if not hit:
            return
        [entry] = [entry for entry in self.model.entries if entry.sequence == hit.sequence]
        assert entry in found, f"{entry} was found, not one of {found}"
        assert hit.matched_tokens == shared(entry.tokens, tuple(tokens)) and hit.n_tokens == len(entry.tokens)
        assert hit.nbytes == sum(tensor.numel() for tensor in entry.tensors.values())
        assert tuple(hit.tokens.tolist()) == entry.tokens and hit.namespace == (NAMESPACES[namespace] or {})
        self.model.lease(entry, "taken" if kind == "take" else "ready")
        self.leases.append(Lease(entry, kind, hit, handle))
        check_same(hit, entry)
        if not readonly and pick % 3 == 0:
            self.leases[-1].scribbled = True
            for tensor in hit.values():
                tensor.bitwise_not_()  # nobody else may see it

    @rule(pick=picks, tokens=tokens, namespace=namespaces)
    def take_a_copy(self, pick, tokens, namespace):
        self.model.settle()
        found = self.model.candidates(namespace, tuple(tokens), "prefix", 1)
        if sum(entry.n_leases for entry in self.model.entries) == GEOMETRY["leases"]:
            return
        hit = self.handle(pick).drop_select(tokens, namespace=NAMESPACES[namespace], copy=True)
        assert bool(hit) == bool(found)
        if hit:
            assert hit.sequence == found[0].sequence
            check_same(hit, found[0])
            self.model.drop(found[0])

    @precondition(lambda self: self.live("take") + self.live("share"))
    @rule(pick=picks, keep=st.booleans(), returned=st.booleans(), forget=st.booleans())
    def release(self, pick, keep, returned, forget):
        lease = self.pick_live(pick, "take", "share")
        kept = [lease.thing[name][...] for name in lease.thing] if keep and lease.entry.run_bytes else []
        if not forget:  # else only the reference to it goes
            lease.returned = returned and lease.kind == "take"
            lease.thing.release(returned=returned)
        self.let_go(lease, kept)

    @precondition(lambda self: any(lease.views for lease in self.leases))
    @rule(pick=picks)
    def drop_views(self, pick):
        holding = [lease for lease in self.leases if lease.views]
        lease = holding[pick % len(holding)]
        lease.views.pop()
        if not lease.views:
            self.model.end(lease)
            self.leases.remove(lease)

    def pick_live(self, pick: int, *kinds: str) -> Lease:
        live = [lease for lease in self.leases if not lease.released and lease.kind in kinds]
        return live[pick % len(live)]

    def let_go(self, lease: Lease, kept: list[torch.Tensor]) -> None:
        """The handle of the lease is gone; some of its tensors may live on."""
        lease.released, lease.thing, lease.views = True, None, [tensor for tensor in kept if tensor.numel()]
        if not lease.views:
            self.model.end(lease)
            self.leases.remove(lease)

    # -------------------------------------------------------- coming and going

    @precondition(lambda self: self.second is not None)
    @rule()
    def close_second(self):
        self.model.settle()
        self.second.close()
        with pytest.raises(shmkv.ClosedError):
            self.second.stats()
        self.closed.append(self.second)
        self.second = None

    @precondition(lambda self: self.second is None)
    @rule()
    def attach_second(self):
        lingering = {id(lease.owner) for lease in self.leases if lease.owner.closed}
        if len(lingering) + 1 < GEOMETRY["peers"]:
            self.first.drop_select([9])  # who looks in vain buries the dead
            self.second = shmkv.attach(self.first.name)
        self.model.settle()

    @rule()
    def time_passes(self):
        self.model.now += STEP_S
        clock.passed_s += STEP_S

    # -------------------------------------------------------- what always holds

    @invariant()
    def all_is_sound(self):
        if not hasattr(self, "model"):
            return
        handle = self.second or self.first
        assert handle.problems() == []
        self.model.settle()
        stats, states = handle.stats(), [entry.state for entry in self.model.entries]
        assert {name: n for name, n in stats.entries.items() if name != "free"} == {
            name: states.count(name) for name in ("reserved", "ready", "taken", "dropped")}
        assert stats.used_bytes == sum(entry.run_bytes for entry in self.model.entries)
        assert stats.held_leases == sum(entry.n_leases for entry in self.model.entries)
        assert stats.peers == (1 if self.second is None else 2)
        assert stats.counters["deaths"] == stats.counters["recoveries"] == 0
        for lease in self.leases:
            if lease.scribbled:
                continue
            if lease.released:
                originals = [tensor for tensor in lease.entry.tensors.values() if tensor.numel()]
                assert any(torch.equal(view, tensor) for view in lease.views for tensor in originals)
            elif lease.kind != "write":
                check_same(lease.thing, lease.entry)

    def teardown(self):
        if not hasattr(self, "model"):
            return
        try:
            while self.leases:
                lease = self.leases.pop()
                lease.thing = lease.views = None
                self.model.end(lease)
            self.model.settle()
            left = [hit for namespace in NAMESPACES for hit in self.drain(namespace)]
            wanted = sorted(entry.sequence for entry in self.model.entries if entry.state == "ready")
            assert sorted(hit.sequence for hit in left) == wanted
            left.clear()
            stats = self.first.stats()
            assert (stats.used_bytes, stats.meta_used_bytes, stats.held_leases) == (0, 0, 0)
            assert stats.entries["free"] == GEOMETRY["slots"] and self.first.problems() == []
        finally:
            for handle in (self.second, self.first):
                if handle is not None:
                    handle.close()

    def drain(self, namespace: dict | None) -> list[shmkv.Hit]:
        hits = []
        for first in (0, 1):
            while hit := self.first.drop_select([first], namespace=namespace, match="overlap"):
                hits.append(hit)
        return hits


def check_same(hit: shmkv.Hit, entry: Entry) -> None:
    assert list(hit) == list(entry.tensors)
    for name, tensor in entry.tensors.items():
        assert hit[name].dtype == tensor.dtype and torch.equal(hit[name], tensor), f"{name} of {entry.tokens} is wrong"


SETTINGS = settings(max_examples=300, stateful_step_count=40, deadline=None, database=None, print_blob=False,
                    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


@pytest.mark.kv_timeout(120)
def test_the_buffer_does_what_the_model_does(kv_watchdog):
    run_machine(SETTINGS)


# ---------------------------------------------------------------- a broken buffer is noticed

def forget_the_arena() -> None:
    """A freed entry's run is never given back."""
    free = Store._free

    def freed(self: Store, slot: int) -> None:
        arena, self.tables.arena = self.tables.arena, type("Forgetful", (), {"free": lambda *_: None})()
        try:
            free(self, slot)
        finally:
            self.tables.arena = arena

    Store._free = freed


def consume_what_is_returned() -> None:
    end_taking = Store._end_taking
    Store._end_taking = lambda self, slot, holders, outcome: end_taking(self, slot, holders, Outcome.CONSUMED)


def show_shared_pages() -> None:
    """What one reader writes, all see."""
    Segment.private = lambda self, at, nbytes, addresses: self.shared(at, nbytes)


def run_ttl_while_held() -> None:
    Store._pause_ttl = lambda self, at, now: None


def run_ttl_from_the_seal() -> None:
    """... although the producer still holds tensors."""

    def enter(self: Store, slot: int, now: int) -> None:
        self._order.add(slot)
        self._run_ttl(self._entries.at(slot), now)

    Store._enter_order = enter


def evict_what_is_held() -> None:
    """The count of holders looks like 0 to whoever evicts."""
    idle = Store._evict_for

    def evict(self: Store, request: Any) -> bool:
        words, entries = self.words, self._entries
        for slot in entries.slots(READY):
            if not self.tables.has_room(request.run_bytes, request.meta_bytes):
                self._mutate()
                self._order.remove(slot)
                self._free(slot)
        return idle(self, request) and bool(words)

    Store._evict_for = evict


def newest_first() -> None:
    find = PrefixOrder.find

    def found(self: PrefixOrder, query: bytes, match: str, min_bytes: int, start: int) -> Any:
        best = find(self, query, match, min_bytes, start)
        rank = best and self._rank(best[0])
        if best and rank + 1 < len(self) and self._key(self._slot(rank + 1)) == self._key(best[0]):
            return self._slot(rank + 1), best[1]
        return best

    PrefixOrder.find = found


SABOTAGE = {function.__name__: function for function in (
    forget_the_arena, consume_what_is_returned, show_shared_pages, run_ttl_while_held, run_ttl_from_the_seal,
    evict_what_is_held,
    newest_first)}


def first_fault(sabotage: str) -> str:
    """Run the machine on a sabotaged buffer, in a process of its own; returns what it found, "" if nothing."""
    SABOTAGE[sabotage]()
    try:
        run_machine(settings(SETTINGS, phases=[Phase.generate], derandomize=True, max_examples=3000))
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    finally:
        for name in os.listdir("/dev/shm"):
            if f".t{os.getpid()}-" in name:
                os.unlink(f"/dev/shm/{name}")
    return ""


@pytest.mark.parametrize("sabotage", SABOTAGE)
def test_the_model_notices_a_broken_buffer(kv_spawn, sabotage):
    fault = kv_spawn(first_fault, sabotage).result(50)
    assert fault


def test_problems_names_a_run_that_was_not_given_back(kv_spawn):
    problems = kv_spawn(problems_of_a_forgotten_run).result()
    assert f"arena: arena: {12 * PAGE} B at 0 is free but not listed" in problems
    assert "arena: arena: 12 units are free, counted are 11" in problems


def problems_of_a_forgotten_run() -> list[str]:
    buffer = shmkv.create(unique_name(), **GEOMETRY)
    try:
        forget_the_arena()
        buffer.insert([1], {"x": pattern(1, (3,))})
        buffer.drop_select([1]).release()
        return buffer.problems()
    finally:
        buffer.close()


# ---------------------------------------------------------------- what the machine lets pass

@pytest.mark.parametrize("timeout", [0, 0.05])
def test_an_evicting_insert_that_fails_changes_nothing(kv_create, timeout):
    buffer = kv_create(capacity=4 * PAGE)
    for token in range(4):
        buffer.insert([token], {"x": pattern(token, (3,))})
    with buffer.select([0]):
        with pytest.raises((shmkv.ArenaFull, shmkv.TimedOut)):
            buffer.insert([9], {"x": pattern(9, (4 * PAGE,))}, on_full="evict", timeout=timeout)
        assert [bool(buffer.select([token])) for token in range(4)] == [True] * 4


def test_min_tokens_refuses_a_short_exact_match(kv_buffer):
    kv_buffer.insert([1, 2], {"x": pattern(1, (3,))})
    assert not kv_buffer.select([1, 2], match="exact", min_tokens=3)
