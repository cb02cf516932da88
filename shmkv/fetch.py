"""What: bringing an entry's bytes to a consumer that cannot see them, by the process in whose device memory they lie.

Map: the request stands in the consumer's own lease: `path` says how, `request` how far it is, `scratch` names an entry
of the consumer's own (RESERVED, never sealed) in the payload arena: for staging the owner copies into its run, for NCCL
the two meet there (`mailbox`).

States: `Lease.request` is NONE -> ASKED (the consumer) -> SERVING (the owner, under the lock, with a lease of its own
on the scratch entry) -> SERVED or REFUSED (the owner, under the lock).

Guarantees: both sides compute the sizes from the entry's descriptors, and compare them before a byte moves. The scratch
run is not reused while the owner may still write to it, whatever becomes of the consumer. A dead, absent or silent
owner is an error at the consumer, which then gives its lease back: nothing is lost.

Not guaranteed: that an owner whose interpreter is busy answers soon.

If a party dies here: a dead consumer's lease and scratch entry are settled by `store`, the owner's own lease keeps the
run until its copy is done; a dead owner is noticed by the waiting consumer within its recheck interval.

Sync points: none of its own; requests and answers move under the lock, bells of their own kind are rung.

Why not a socket: the request would not be seen by who looks into the segment, and would need an end of its own.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any

import torch

from . import keys, sync
from .driver import Driver
from .entries import meta_parts
from .errors import ClosedError, SegmentBroken, ShmkvError, TableFull, TimedOut, TooLarge, TransportUnavailable
from .layout import PAGE_BYTES, Entry, Lease, Peer
from .leases import Hold, Outcome
from .peers import Place, WaitKind
from .segment import Window, log
from .session import Session
from .store import Grant, Request
from .tensors import Placed, decode, view
from .transport import Mapped, Path
from .transport.cuda_ipc import Memory, copy_pieces, device_buffer, packed
from .transport.mailbox import MAILBOX_BYTES, Mailbox
from .transport.nccl import Link

FETCH_TIMEOUT_S = 10.0
"""how long the owner may take, also where the look-up itself was not to wait"""
END_TIMEOUT_S = 5.0
_NONSENSE = (LookupError, ValueError, OverflowError, TypeError)
_SCRATCH = keys.key([0], namespace={"shmkv": "scratch"})


class Ask(IntEnum):
    NONE = 0
    ASKED = 1
    SERVING = 2
    SERVED = 3
    REFUSED = 4


Source = Callable[[int, Sequence[Placed]], tuple[Driver, Mapping[int, Memory], tuple[int, int], Any]]
"""(slot, its tensors) -> driver, memory by region, run, and the event behind which they are complete, if any"""


class Brought:
    """A copy of an entry's bytes in host memory of this process's own; as a transport, it shows them."""

    name = "brought"

    def __init__(self, address: int, nbytes: int, keeps: object):
        self.address, self.run, self._keeps = address, (0, nbytes), keeps

    def views(self, run: tuple[int, int], placed: Sequence[Placed], how: str, mapped: Mapped,
              when_gone: Callable[[weakref.ref], object]) -> dict[str, torch.Tensor]:
        window = Window.at(self.address, run[1], self._keeps)
        mapped.watch(window, when_gone)
        return {tensor.name: view(window, run[1], tensor) for tensor in placed}


# ---------------------------------------------------------------- the consumer

class Scratch:
    """An entry of our own in the payload arena that nobody will see; it goes with this object."""

    def __init__(self, session: Session, nbytes: int, until: int):
        self._lifeline = session.lifeline(self)
        self.hold = self._lifeline.hold
        run_bytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        capacity = session.tables.layout.geometry.arena_bytes
        if run_bytes > capacity:
            raise TooLarge(f"a copy of {nbytes} B does not fit the payload arena of {capacity} B",
                           hint="raise capacity= in shmkv.create()")
        request = Request(_SCRATCH, b"", 0, 0, run_bytes, 0, 0, meta_parts(len(_SCRATCH.data), 0, 0)[2])

        def look(place: Place | None) -> Grant | None:
            grant = session.store.reserve(request, self.hold, evict=False, scratch=True)
            if grant is None and place is not None and session.store.bury_dead():
                grant = session.store.reserve(request, self.hold, evict=False, scratch=True)
            return grant

        def announce(place: Place) -> None:
            place.announce(WaitKind.ROOM, until, wanted=(run_bytes, request.meta_bytes, 0))

        grant = session.wait(look, until, announce)
        if grant is None:
            raise TimedOut(f"no room for a copy of {nbytes} B in the payload arena in time",
                           hint="raise capacity= or timeout=")
        self.slot, self.nbytes = grant.slot, run_bytes
        self.at = session.segment.layout.arena.at + grant.run_at
        self.address = session.segment.address + self.at


class Fetcher:
    """`wake` starts whoever calls `sweep` now and then while there are links."""

    def __init__(self, session: Session, wake: Callable[[], None]):
        self._session, self._wake = session, wake
        self._links: dict[tuple[int, int], tuple[Link, Scratch]] = {}  # by owner
        self._turns: dict[tuple[int, int], threading.Lock] = {}

    def __bool__(self) -> bool:
        return bool(self._links)

    def staged(self, hold: Hold, owner: tuple[int, int], nbytes: int, until: int) -> Brought:
        """Have the owner (peer, generation) copy the entry of this lease into the payload arena."""
        until = max(until, sync.deadline(FETCH_TIMEOUT_S))
        scratch = Scratch(self._session, max(1, nbytes), until)
        self._ask(hold, owner, scratch, until, {Ask.SERVED})
        return Brought(scratch.address, nbytes, (scratch, self._session.segment.memory))

    def sent(self, hold: Hold, owner: tuple[int, int], nbytes: int, until: int, backend: str,
             buffer: torch.Tensor) -> None:
        """Have the owner send the entry of this lease into `buffer` (uint8, 1-D), over a link that is made once."""
        until = max(until, sync.deadline(FETCH_TIMEOUT_S))
        turn = self._turns.setdefault(owner, threading.Lock())
        if not turn.acquire(timeout=max(0.0, (until - time.monotonic_ns()) / 1e9)):
            raise TimedOut("the link with the owner of the entry's device memory was busy all the time")
        try:
            link, scratch, is_new = self._link(owner, backend, buffer.device, until)
            try:
                self._ask(hold, owner, scratch, until, {Ask.SERVING, Ask.SERVED})
                if is_new:
                    link.connect(until)
                link.receive(_ticket(hold), [buffer] if nbytes else [], until)
            except ClosedError:  # `sweep` found the owner gone
                raise TransportUnavailable("the owner of the entry's device memory has closed or died",
                                           hint="compute it again") from None
            except BaseException:
                self._links.pop(owner, None)
                link.close()
                raise
        finally:
            turn.release()

    def sweep(self) -> None:
        """Let go of the links with owners that are gone."""
        for owner in list(self._links):
            if not _is_open(self._session, owner) or not self._session.tables.peers.alive(owner[0]):
                known = self._links.pop(owner, None)
                self._turns.pop(owner, None)
                if known is not None:
                    known[0].close()

    def close(self) -> None:
        links, self._links = self._links, {}
        for link, _ in links.values():
            link.close()

    def _link(self, owner: tuple[int, int], backend: str, device: torch.device,
              until: int) -> tuple[Link, Scratch, bool]:
        known = self._links.get(owner)
        is_new = known is None or bool(known[0].broken)
        if known is None or is_new:
            scratch = Scratch(self._session, MAILBOX_BYTES, until)
            memory = self._session.segment.memory[scratch.at:scratch.at + MAILBOX_BYTES]
            memory[:] = bytes(MAILBOX_BYTES)
            link = Link(Mailbox(memory, 1), 1, backend, device)
            known = self._links[owner] = link, scratch
            self._wake()
        return *known, is_new

    def _ask(self, hold: Hold, owner: tuple[int, int], scratch: Scratch, until: int, enough: set[Ask]) -> None:
        session = self._session
        words, at = session.tables.words, session.tables.leases.at(hold.index)
        peer = session.tables.peers.at(owner[0])

        def ask() -> None:
            words[at + Lease.scratch] = scratch.slot + 1
            words[at + Lease.request] = Ask.ASKED

        def look(place: Place | None) -> int | None:
            if place is not None:
                session.store.bury_dead()
            if not _is_open(session, owner):
                return Ask.NONE
            answer = words[at + Lease.request]
            return answer if answer in enough or answer == Ask.REFUSED else None

        session.run(ask, until)
        session.tables.waits.ring(WaitKind.REQUEST, peer=owner[0])
        answer = session.wait(look, until, lambda place: place.announce(WaitKind.ANSWER, until))
        if answer is None:
            raise TimedOut(f"the owner of the entry's device memory, pid {words[peer + Peer.pid]}, did not answer in "
                           f"time. The entry was left as it is", hint="is it stopped, or is its interpreter busy?")
        if answer == Ask.NONE:
            raise TransportUnavailable("the owner of the entry's device memory has closed or died",
                                       hint="compute it again")
        if answer == Ask.REFUSED:
            raise TransportUnavailable("the owner of the entry's device memory could not bring it: its log says why")


# ---------------------------------------------------------------- the owner

class Job:
    """One request in service."""

    def __init__(self, session: Session, index: int, generation: int, peer: tuple[int, int] = (0, 0)):
        self.index, self.generation = index, generation
        self.lifeline = session.lifeline(self)
        self.lifeline.hold.outcome = Outcome.CONSUMED
        self.path, self.slot, self.peer, self.scratch, self.scratch_generation = 0, 0, peer, 0, 0
        self.scratch_at, self.scratch_bytes = 0, 0
        self.placed: list[Placed] = []
        self.run_bytes = 0


class Service:
    """A thread of an owner of device memory that answers such requests; it ends with the session."""

    def __init__(self, session: Session, source: Source):
        self._session, self._source = session, source
        self._links: dict[tuple[int, int], tuple[int, int, Link, Job]] = {}  # by consumer: its mailbox
        self._streams: dict[int, int] = {}
        self._thread = threading.Thread(target=self._run, name="shmkv-service", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Wait for the end of the thread, which comes with the session's: a link must not outlive the interpreter."""
        if self._thread is not threading.current_thread():
            self._thread.join(END_TIMEOUT_S)

    def _run(self) -> None:
        forever = sync.deadline(None)
        try:
            while True:
                jobs = self._session.wait(self._requests, forever,
                                          lambda place: place.announce(WaitKind.REQUEST, forever))
                for job in jobs or ():
                    if job.index < 0:
                        self._drop_link(job.peer)
                    elif job.path == Path.NCCL:
                        threading.Thread(target=self._answer, args=(job,), name="shmkv-send", daemon=True).start()
                    else:
                        self._answer(job)
                jobs = job = None
        except ClosedError:
            pass
        except ShmkvError as error:
            if not self._session.closed:
                log.warning("no longer bringing device memory to those who cannot see it: %s", error)
        finally:
            for peer in list(self._links):
                self._drop_link(peer)

    def _requests(self, place: Place | None) -> list[Job] | None:
        """Under the lock: those who ask for an entry of ours, marked SERVING; None if there is none."""
        if place is not None:
            self._session.store.bury_dead()
            gone = [peer for peer in self._links if not _is_open(self._session, peer)]
            if gone:  # their links are closed outside the lock
                return [Job(self._session, -1, peer[1], peer) for peer in gone]
        session, words, jobs = self._session, self._session.tables.words, []
        leases, entries, me = session.tables.leases, session.tables.entries, session.store.me
        for index in leases.held():
            at = leases.at(index)
            if words[at + Lease.request] != Ask.ASKED or leases.is_released(index):
                continue
            slot = words[at + Lease.slot]
            if slot >= entries.count:
                continue
            entry = entries.at(slot)
            if (words[entry + Entry.peer], words[entry + Entry.peer_generation]) != (me.index, me.generation):
                continue
            job = Job(session, index, words[at + Lease.held])
            job.slot, job.path = slot, words[at + Lease.path] & 0xFF
            job.peer = words[at + Lease.peer], words[at + Lease.peer_generation]
            try:
                taken = self._take_scratch(job, words[at + Lease.scratch])
            except TableFull:
                continue  # asked again soon
            except (ShmkvError, *_NONSENSE) as error:
                log.warning("a request of peer %d makes no sense: %s", job.peer[0], error)
                taken = False
            words[at + Lease.request] = Ask.SERVING if taken else Ask.REFUSED
            session.store.news.ring(WaitKind.ANSWER, job.peer[0])
            if taken:
                jobs.append(job)
        return jobs or None

    def _take_scratch(self, job: Job, scratch: int) -> bool:
        """Pin the consumer's scratch entry, and learn what is asked for."""
        session, words = self._session, self._session.tables.words
        entries, layout = session.tables.entries, session.tables.layout
        if not 0 < scratch <= entries.count:
            return False
        entry = entries.at(scratch - 1)
        theirs = words[entry + Entry.peer], words[entry + Entry.peer_generation]
        generation = words[entry + Entry.generation]
        if theirs != job.peer or words[entry + Entry.region] or not session.store.pin(
                scratch - 1, generation, job.lifeline.hold):
            return False
        start, job.scratch_bytes = entries.run(scratch - 1)
        job.scratch, job.scratch_generation, job.scratch_at = scratch - 1, generation, layout.arena.at + start
        job.run_bytes = entries.run(job.slot)[1]
        _, at, end = entries.parts(job.slot)
        job.placed = decode(session.store.meta_of(job.slot)[at:end], job.run_bytes)
        return True

    def _answer(self, job: Job) -> None:
        session, keep = self._session, False
        try:
            if job.path == Path.STAGING:
                self._stage(job)
            elif job.path == Path.NCCL:
                keep = self._send(job)
            else:
                raise SegmentBroken(f"a request by path {job.path}")
            answer = Ask.SERVED
        except Exception as error:  # whatever it is, torch's out of memory too, the consumer is to hear of it
            log.warning("could not bring an entry of ours to peer %d: %s: %s", job.peer[0], type(error).__name__, error)
            answer = Ask.REFUSED
        try:
            session.run(functools.partial(self._note, job, answer), sync.deadline(FETCH_TIMEOUT_S))
        except ShmkvError as error:
            log.debug("an answer was not given: %s", error)
        if not keep:
            job.lifeline.drop_handle()
            session.settle()

    def _note(self, job: Job, answer: Ask) -> None:
        words, at = self._session.tables.words, self._session.tables.leases.at(job.index)
        if words[at + Lease.held] == job.generation and words[at + Lease.request] == Ask.SERVING:
            words[at + Lease.request] = answer
            self._session.store.news.ring(WaitKind.ANSWER, job.peer[0])

    def _stage(self, job: Job) -> None:
        copies, nbytes = packed(job.placed, job.run_bytes)
        if nbytes > job.scratch_bytes:
            raise SegmentBroken(f"an entry of {nbytes} B is wanted in {job.scratch_bytes} B")
        self._copy(job, copies, self._session.segment.address + job.scratch_at)

    def _copy(self, job: Job, copies: Sequence[Placed], target: int) -> None:
        """Copy the entry's tensors to an address, and wait until they are there."""
        driver, memories, run, event = self._source(job.slot, job.placed)
        ordinal = next(iter(memories.values())).ordinal if memories else 0
        stream = self._stream(driver, ordinal)
        if event is not None:
            driver.order_behind(ordinal, stream, event)
        try:
            for source, copy in zip(job.placed, copies, strict=True):
                copy_pieces(driver, ordinal, memories, run, source, copy, target, stream)
        finally:
            driver.wait(ordinal, stream, sync.deadline(FETCH_TIMEOUT_S))

    def _send(self, job: Job) -> bool:
        """Send the entry over the link with its consumer; whether the job's pin now belongs to a new link."""
        until = sync.deadline(FETCH_TIMEOUT_S)
        copies, nbytes = packed(job.placed, job.run_bytes)
        driver, memories, _, _ = self._source(job.slot, job.placed)
        backend = backend_of(driver)
        if backend == "gloo":
            payload = torch.empty(nbytes, dtype=torch.uint8)
            address, device = payload.data_ptr(), payload.device
        else:
            ordinal = next(iter(memories.values())).ordinal
            buffer = device_buffer(driver, ordinal, max(1, nbytes), self._stream(driver, ordinal))
            payload, address = buffer.keeps[:nbytes], buffer.address
            device = payload.device
        if nbytes:
            self._copy(job, copies, address)
        link, is_new = self._link(job, backend, device)
        try:
            if is_new:
                link.connect(until)
            link.send(job.index << 32 | job.generation & 0xFFFF_FFFF, [payload] if nbytes else [], until)
        except BaseException:
            self._drop_link(job.peer)
            raise
        return is_new

    def _drop_link(self, peer: tuple[int, int]) -> None:
        known = self._links.pop(peer, None)
        if known is not None:
            known[2].close()
            known[3].lifeline.drop_handle()

    def _link(self, job: Job, backend: str, device: torch.device) -> tuple[Link, bool]:
        known = self._links.get(job.peer)
        if known is not None and known[:2] == (job.scratch, job.scratch_generation) and not known[2].broken:
            return known[2], False
        self._drop_link(job.peer)
        memory = self._session.segment.memory[job.scratch_at:job.scratch_at + MAILBOX_BYTES]
        link = Link(Mailbox(memory, 0), 0, backend, device)
        self._links[job.peer] = job.scratch, job.scratch_generation, link, job
        return link, True

    def _stream(self, driver: Driver, ordinal: int) -> int:
        if ordinal not in self._streams:
            self._streams[ordinal] = driver.make_stream(ordinal)
        return self._streams[ordinal]


def _is_open(session: Session, who: tuple[int, int]) -> bool:
    """Whether this peer, of this generation, is attached and not about to leave."""
    words, at = session.tables.words, session.tables.peers.at(who[0])
    return (words[at + Peer.state], words[at + Peer.generation], words[at + Peer.closed]) == (1, who[1], 0)


def backend_of(driver: Driver) -> str:
    """NCCL between GPUs; gloo where the driver is emulated and NCCL cannot run."""
    return "gloo" if driver.emulated else "nccl"


def _ticket(hold: Hold) -> int:
    return hold.index << 32 | hold.generation & 0xFFFF_FFFF
