"""A link moves every byte or says why not, in time, and no process dies of it; a mailbox is a store without a lock."""

import mmap
import os
import random
import signal
import threading
import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as distributed

from shmkv import errors, sync
from shmkv.testing import eventually
from shmkv.transport import mailbox, nccl
from shmkv.transport.mailbox import CONSUMER, OWNER, Mailbox
from shmkv.transport.nccl import Link

FATES = [(signal.SIGKILL, errors.TransportUnavailable), (signal.SIGSTOP, errors.TimedOut)]
SLACK_S = 1.5
PAGE = 4096
DTYPES = sorted({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str)
EDGES = (0, 1, 7, 4095, 4096, 4097, 3 * 4096, 100_001)

needs_gloo = pytest.mark.skipif(bool(nccl._no_gloo()), reason="gloo is not built into this torch")


@pytest.fixture
def box(tmp_path):
    path = tmp_path / "mailbox"
    path.write_bytes(bytes(mailbox.MAILBOX_BYTES))
    return str(path)


@contextmanager
def mapped(path):
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory, memoryview(memory) as view:
        yield view


@contextmanager
def box_of(path, rank):
    with mapped(path) as view:
        box = Mailbox(view, rank)
        try:
            yield box
        finally:
            box.close()


@contextmanager
def linked(path, rank, timeout=10.0, **options):
    with box_of(path, rank) as box:
        link = Link(box, rank, "gloo", **options)
        try:
            link.connect(sync.deadline(timeout))
            yield link
        finally:
            link.close()


def pattern(nbytes, seed=0):
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def late(began, timeout):
    return time.monotonic() - began > timeout + SLACK_S


# ---------------------------------------------------------------- both ends, in processes and in threads

def sends(path, sizes, timeout=10.0, ticket=1, n_times=1, **options):
    with linked(path, OWNER, **options) as link:
        tensors = [pattern(size, seed) for seed, size in enumerate(sizes)]
        for number in range(n_times):
            link.send(ticket + number, tensors, sync.deadline(timeout))
    return distributed.is_initialized()


def receives(path, sizes, timeout=10.0, ticket=1, **options):
    with linked(path, CONSUMER, **options) as link:
        return received(link, sizes, timeout, ticket)


def received(link, sizes, timeout=10.0, ticket=1):
    tensors = [torch.full((size,), 255, dtype=torch.uint8) for size in sizes]
    link.receive(ticket, tensors, sync.deadline(timeout))
    return [torch.equal(tensor, pattern(tensor.numel(), seed)) for seed, tensor in enumerate(tensors)]


def raised(body):
    """(the error's type, its text, seconds) of a body in a child that must live to tell."""
    began = time.monotonic()
    try:
        body()
    except errors.ShmkvError as error:
        return type(error), str(error), time.monotonic() - began
    return None, "", time.monotonic() - began


class Pair:
    """Two links of this process, connected."""

    def __init__(self, path, **options):
        self._maps = [box_of(path, rank) for rank in (OWNER, CONSUMER)]
        self.links = [Link(box.__enter__(), rank, "gloo", **options) for rank, box in enumerate(self._maps)]
        self.owner, self.consumer = self.links

    def both(self, first, second):
        """What the two raised or returned, run at the same time."""
        found = {}

        def run(rank, body):
            try:
                found[rank] = body()
            except errors.ShmkvError as error:
                found[rank] = error

        thread = threading.Thread(target=run, args=(CONSUMER, second))
        thread.start()
        run(OWNER, first)
        thread.join(30)
        return found[OWNER], found[CONSUMER]

    def connect(self, timeout=10.0):
        return self.both(lambda: self.owner.connect(sync.deadline(timeout)),
                         lambda: self.consumer.connect(sync.deadline(timeout)))

    def exchange(self, sent, taken, tickets=(1, 1), timeout=10.0):
        return self.both(lambda: self.owner.send(tickets[0], sent, sync.deadline(timeout)),
                         lambda: self.consumer.receive(tickets[1], taken, sync.deadline(timeout)))

    def close(self):
        for link, box in zip(self.links, self._maps, strict=True):
            link.close()
            box.__exit__(None, None, None)


@pytest.fixture
def pair(box, kv_watchdog):
    pair = Pair(box, chunk_bytes=PAGE)
    assert pair.connect() == (None, None)
    yield pair
    pair.close()


# ---------------------------------------------------------------- bytes arrive

@needs_gloo
def test_all_sizes_arrive_between_processes_and_the_default_group_is_untouched(box, kv_spawn):
    child = kv_spawn(sends, box, EDGES, chunk_bytes=PAGE)
    assert all(receives(box, EDGES, chunk_bytes=PAGE))
    assert child.result() is False
    assert not distributed.is_initialized()


@needs_gloo
def test_more_than_a_chunk_of_the_usual_size_arrives(box, kv_spawn):
    sizes = (nccl.CHUNK_BYTES + 1, 3)
    child = kv_spawn(sends, box, sizes)
    assert all(receives(box, sizes))
    child.result()


@needs_gloo
@pytest.mark.parametrize("sizes", [(), (0,), (0, 0, 0), (1,), tuple(range(200))])
def test_any_number_of_tensors_arrives(pair, sizes):
    taken = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    assert pair.exchange([pattern(size, 3) for size in sizes], taken) == (None, None)
    assert all(torch.equal(tensor, pattern(tensor.numel(), 3)) for tensor in taken)


@needs_gloo
def test_every_dtype_arrives_bit_equal_as_bytes(pair):
    moved = set()
    for seed, dtype in enumerate(DTYPES):
        try:
            sent = pattern(1024, seed).view(dtype).view(torch.uint8)
        except (RuntimeError, TypeError):   # quantized and packed ones are no view of bytes in every version
            continue
        taken = torch.zeros(1024, dtype=torch.uint8)
        assert pair.exchange([sent], [taken]) == (None, None)
        assert torch.equal(taken, pattern(1024, seed)), dtype
        moved.add(dtype)
    assert {torch.bool, torch.int8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
            torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128, torch.uint16} <= moved


@needs_gloo
def test_a_link_serves_many_exchanges(pair):
    for ticket in (0, 7, (1 << 64) - 1):
        taken = torch.zeros(5000, dtype=torch.uint8)
        assert pair.exchange([pattern(5000, ticket % 100)], [taken], (ticket, ticket)) == (None, None)
        assert torch.equal(taken, pattern(5000, ticket % 100))


@needs_gloo
def test_two_links_of_one_process_serve_two_peers(tmp_path, kv_spawn):
    paths = [str(tmp_path / name) for name in "ab"]
    for path in paths:
        with open(path, "wb") as file:
            file.truncate(mailbox.MAILBOX_BYTES)
    children = [kv_spawn(sends, path, EDGES, ticket=number) for number, path in enumerate(paths)]
    with linked(paths[0], CONSUMER) as first, linked(paths[1], CONSUMER) as second:
        assert all(received(second, EDGES, ticket=1))
        assert all(received(first, EDGES, ticket=0))
    assert [child.result() for child in children] == [False, False]


# ---------------------------------------------------------------- disagreement

MISMATCHES = [((100,), (99,)), ((99,), (100,)), ((100, 1), (1, 100)), ((100,), (50, 50)), ((), (1,)), ((9000,), (1,))]


@needs_gloo
@pytest.mark.parametrize("sent, taken", MISMATCHES)
def test_other_sizes_are_an_error_on_both_sides_and_the_link_lives_on(pair, sent, taken):
    outcome = pair.exchange([pattern(size) for size in sent], [torch.zeros(size, dtype=torch.uint8) for size in taken])
    assert [type(error) for error in outcome] == [errors.TransportUnavailable] * 2
    assert all(f"{sum(sent)} B" in str(error) and f"{sum(taken)} B" in str(error) for error in outcome)
    assert not pair.owner.broken and not pair.consumer.broken
    tensor = torch.zeros(10, dtype=torch.uint8)
    assert pair.exchange([pattern(10)], [tensor], (2, 2)) == (None, None)
    assert torch.equal(tensor, pattern(10))


@needs_gloo
def test_another_ticket_is_an_error_on_both_sides_and_the_link_lives_on(pair):
    tensor = torch.zeros(10, dtype=torch.uint8)
    outcome = pair.exchange([pattern(10)], [tensor], (3, 4))
    assert all(isinstance(error, errors.TransportUnavailable) and "ticket 3" in str(error) and "ticket 4" in str(error)
               for error in outcome)
    assert not tensor.any()
    assert pair.exchange([pattern(10)], [tensor], (4, 4)) == (None, None)


def offers(path, sizes):
    with linked(path, OWNER) as link:
        return raised(lambda: link.send(1, [pattern(size) for size in sizes], sync.deadline(10)))


@needs_gloo
def test_neither_process_dies_of_a_shorter_receive(box, kv_spawn):
    child = kv_spawn(offers, box, [65])
    with linked(box, CONSUMER) as link:
        assert raised(lambda: received(link, [64]))[0] is errors.TransportUnavailable
        assert child.result()[0] is errors.TransportUnavailable


def bare(path, rank, nbytes):
    store = distributed.FileStore(path, 2)
    group = nccl._gloo(distributed.PrefixStore("bare", store), rank, sync.deadline(10))
    tensor = torch.zeros(nbytes, dtype=torch.uint8)
    work = group.send([tensor], 1, 0) if rank == OWNER else group.recv([tensor], 0, 0)
    work.wait(timedelta(seconds=10))


@needs_gloo
def test_control_without_the_check_the_receiving_process_aborts(tmp_path, kv_spawn):
    path = str(tmp_path / "store")
    owner, consumer = kv_spawn(bare, path, OWNER, 65), kv_spawn(bare, path, CONSUMER, 64)
    assert consumer.join() == -signal.SIGABRT
    owner.join()


@needs_gloo
@pytest.mark.parametrize("change", [
    lambda message: message._replace(exchange=message.exchange + 1),
    lambda message: message._replace(kind=nccl.Kind.DONE),
    lambda message: message._replace(kind=77),
])
def test_a_message_out_of_step_breaks_the_link(pair, monkeypatch, change):
    say = nccl._Wire.say
    monkeypatch.setattr(nccl._Wire, "say", lambda wire, message, until: say(
        wire, change(message) if message.kind == nccl.Kind.OFFER else message, until))
    outcome = pair.exchange([pattern(10)], [torch.zeros(10, dtype=torch.uint8)], timeout=5.0)
    assert [type(error) for error in outcome] == [errors.TransportUnavailable] * 2
    assert pair.owner.broken and pair.consumer.broken


@needs_gloo
def test_other_chunks_are_refused_before_the_library_is_called(box, kv_watchdog):
    pair = Pair(box)
    pair.consumer._chunk = 17
    try:
        outcome = pair.connect()
        assert all(isinstance(error, errors.TransportUnavailable) and "chunk_bytes" in str(error) for error in outcome)
    finally:
        pair.close()


@needs_gloo
def test_wrong_calls_change_nothing(pair):
    for tensor in (torch.zeros(4), torch.zeros(2, 2, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)[::2], 5):
        with pytest.raises(errors.InvalidTensor):
            pair.owner.send(1, [tensor], sync.deadline(1))
    with pytest.raises(errors.InvalidArgument):
        pair.owner.receive(1, [], sync.deadline(1))
    with pytest.raises(errors.InvalidArgument):
        pair.owner.send(-1, [], sync.deadline(1))
    with pytest.raises(errors.InvalidArgument):
        pair.owner.connect(sync.deadline(1))
    for rank, backend, device in ((2, "gloo", None), (0, "mpi", None), (0, "gloo", "cuda"), (0, "nccl", "cpu"),
                                  (0, "gloo", "nonsense")):
        with pytest.raises(errors.InvalidArgument):
            Link(None, rank, backend, device)
    assert pair.exchange([pattern(9)], [torch.zeros(9, dtype=torch.uint8)]) == (None, None)


# ---------------------------------------------------------------- peers that are absent, silent or dead

@needs_gloo
@pytest.mark.parametrize("timeout", [0.0, 0.4])
def test_an_absent_peer_is_waited_for_until_the_deadline(box, timeout, kv_watchdog):
    with box_of(box, OWNER) as store:
        link, began = Link(store, OWNER, "gloo"), time.monotonic()
        with pytest.raises(errors.TimedOut, match="peer was silent: waited"):
            link.connect(sync.deadline(timeout))
        assert not late(began, timeout)
        assert link.broken
        with pytest.raises(errors.TransportUnavailable, match="broken"):
            link.send(1, [], sync.deadline(1))


@needs_gloo
def test_a_peer_that_greets_and_does_not_connect_is_waited_for_until_the_deadline(box, kv_watchdog):
    with box_of(box, OWNER) as store, box_of(box, CONSUMER) as other:
        other.set("hello/1", f"{nccl._HELLO} gloo {nccl.CHUNK_BYTES} built-in -")
        link, began = Link(store, OWNER, "gloo"), time.monotonic()
        with pytest.raises(errors.TimedOut, match="connect"):
            link.connect(sync.deadline(0.5))
        assert not late(began, 0.5)


@needs_gloo
def test_a_group_made_too_late_is_undone(box, monkeypatch, kv_watchdog):
    late_groups, go = [], threading.Event()
    build = nccl._Wire.__init__

    def slow(wire, *args):
        go.wait(10)
        build(wire, *args)
        late_groups.append(wire)

    pair = Pair(box)
    monkeypatch.setattr(nccl._Wire, "__init__", slow)
    try:
        outcome = pair.connect(0.2)
        assert [type(error) for error in outcome] == [errors.TimedOut] * 2
        until = nccl._left
        monkeypatch.setattr(nccl, "_left", lambda until_ns: max(until(until_ns), timedelta(seconds=5)))
        go.set()
        eventually(lambda: len(late_groups) == 2 and all(wire._group is None for wire in late_groups))
    finally:
        pair.close()


@needs_gloo
def test_a_peer_that_does_not_ask_is_waited_for_and_both_links_are_over(pair):
    began = time.monotonic()
    with pytest.raises(errors.TimedOut, match="accept ticket 5"):
        pair.owner.send(5, [pattern(10)], sync.deadline(0.3))
    assert not late(began, 0.3)
    with pytest.raises(errors.TransportUnavailable):   # the late offer is not taken for another
        pair.consumer.receive(5, [torch.zeros(10, dtype=torch.uint8)], sync.deadline(5))
    assert pair.owner.broken and pair.consumer.broken


def connects(path, rank, ready):
    with linked(path, rank):
        open(ready, "w").close()
        time.sleep(60)


@needs_gloo
@pytest.mark.parametrize("fate", ["kill", "stop"])
def test_a_peer_that_ends_or_stops_before_it_answers(box, tmp_path, kv_spawn, fate):
    ready = tmp_path / "ready"
    child = kv_spawn(connects, box, CONSUMER, str(ready))
    with linked(box, OWNER) as link:
        eventually(ready.exists)
        getattr(child, fate)()
        began = time.monotonic()
        with pytest.raises(errors.TransportUnavailable if fate == "kill" else errors.TimedOut):
            link.send(1, [pattern(100)], sync.deadline(0.6))
        assert not late(began, 0.6)
        assert link.broken


def stalls(path, sizes, after, fate):
    """Receive, and meet one's fate after some chunks."""
    receive = nccl._Wire.receive
    chunks = 0

    def counted(wire, tensor, until_ns, tag=nccl._PAYLOAD):
        nonlocal chunks
        chunks += tag == nccl._PAYLOAD
        if chunks > after:
            os.kill(os.getpid(), fate)
        receive(wire, tensor, until_ns, tag)

    nccl._Wire.receive = counted
    receives(path, sizes, chunk_bytes=1 << 20)


@needs_gloo
@pytest.mark.parametrize("fate, error", FATES)
def test_a_receiver_that_ends_or_stops_amid_the_bytes(box, kv_spawn, fate, error):
    sizes = [64 << 20]
    child = kv_spawn(stalls, box, sizes, 2, fate)
    with linked(box, OWNER, chunk_bytes=1 << 20) as link:
        timeout, began = (10.0 if fate == signal.SIGKILL else 1.0), time.monotonic()
        with pytest.raises(error, match="67108864 B of ticket 1"):
            link.send(1, [pattern(size) for size in sizes], sync.deadline(timeout))
        assert time.monotonic() - began < 5
        assert not late(began, timeout)
    child.kill()


def breaks_off(path, sizes, fate):
    send = nccl._Wire.send

    def once(wire, tensor, until_ns, tag=nccl._PAYLOAD):
        send(wire, tensor, until_ns, tag)
        if tag == nccl._PAYLOAD:
            os.kill(os.getpid(), fate)

    nccl._Wire.send = once
    sends(path, sizes, chunk_bytes=PAGE)


@needs_gloo
@pytest.mark.parametrize("fate, error", FATES)
def test_a_sender_that_ends_or_stops_amid_the_bytes(box, kv_spawn, fate, error):
    child = kv_spawn(breaks_off, box, [5 * PAGE], fate)
    with linked(box, CONSUMER, chunk_bytes=PAGE) as link:
        timeout, began = (10.0 if fate == signal.SIGKILL else 1.0), time.monotonic()
        with pytest.raises(error, match="ticket 1"):
            received(link, [5 * PAGE], timeout)
        assert time.monotonic() - began < 5
        assert not late(began, timeout)
    child.kill()


@needs_gloo
def test_a_call_of_the_library_that_hangs_is_left_behind_at_the_deadline(pair, monkeypatch):
    hangs = threading.Event()
    monkeypatch.setattr(nccl._Wire, "send", lambda *_: hangs.wait(30))
    began = time.monotonic()
    with pytest.raises(errors.TimedOut):
        pair.owner.send(1, [pattern(9)], sync.deadline(0.1))
    assert not late(began, 0.1) and pair.owner.broken
    hangs.set()


@needs_gloo
def test_closing_ends_an_exchange_in_another_thread(pair):
    failed = []

    def waits():
        try:
            pair.consumer.receive(1, [torch.zeros(9, dtype=torch.uint8)], sync.deadline(None))
        except errors.ShmkvError as error:
            failed.append(error)

    thread = threading.Thread(target=waits)
    thread.start()
    eventually(lambda: pair.consumer._doing.startswith("offer"))
    pair.consumer.close()
    thread.join(SLACK_S)
    assert not thread.is_alive() and isinstance(failed[0], errors.ClosedError)
    with pytest.raises(errors.ClosedError):
        pair.consumer.receive(1, [], sync.deadline(1))
    with pytest.raises(errors.TransportUnavailable):
        pair.owner.send(1, [], sync.deadline(5))


@needs_gloo
def test_an_interrupt_ends_an_exchange_and_breaks_the_link(pair):
    def interrupt():
        eventually(lambda: pair.consumer._doing.startswith("offer"))
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        pair.consumer.receive(1, [torch.zeros(9, dtype=torch.uint8)], sync.deadline(None))
    thread.join()
    assert pair.consumer.broken


@needs_gloo
def test_a_second_thread_waits_its_turn_no_longer_than_its_deadline(pair):
    thread = threading.Thread(target=lambda: raised(
        lambda: pair.owner.send(1, [pattern(10)], sync.deadline(5))))
    thread.start()
    eventually(lambda: pair.owner._turn.locked())
    with pytest.raises(errors.TimedOut, match="another exchange"):
        pair.owner.send(2, [], sync.deadline(0.05))
    tensor = torch.zeros(10, dtype=torch.uint8)
    pair.consumer.receive(1, [tensor], sync.deadline(5))
    thread.join()
    assert torch.equal(tensor, pattern(10)) and not pair.owner.broken


@needs_gloo
def test_a_mailbox_serves_one_link(pair, box):
    with box_of(box, OWNER) as store, pytest.raises(errors.InvalidArgument, match="zero"):
        Link(store, OWNER, "gloo").connect(sync.deadline(1))


@needs_gloo
def test_any_store_of_torch_will_do(kv_watchdog, box):
    pair = Pair(box)
    store = distributed.HashStore()
    pair.owner._store = pair.consumer._store = store
    try:
        assert pair.connect() == (None, None)
    finally:
        pair.close()
    link = Link(distributed.HashStore(), OWNER, "gloo")
    with pytest.raises(errors.TimedOut):
        link.connect(sync.deadline(0.2))


# ---------------------------------------------------------------- NCCL, as far as it goes without a GPU

@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_without_a_gpu_is_unavailable(box):
    with box_of(box, OWNER) as store, pytest.raises(errors.TransportUnavailable, match="NCCL"):
        Link(store, OWNER, "nccl").connect(sync.deadline(5))


@pytest.fixture
def as_if_nccl(monkeypatch):
    """NCCL as far as the greeting, at which every test here ends."""
    monkeypatch.setitem(nccl._MISSING, "nccl", lambda: "")
    monkeypatch.setattr(nccl, "_gpu", lambda device: device)
    monkeypatch.setattr(nccl, "_version", lambda backend: "2.28.9")
    monkeypatch.setattr(nccl, "_uuid", lambda device: f"GPU-{device.index}")
    monkeypatch.setitem(nccl._GROUPS, "nccl", lambda *_: pytest.fail("the library was called"))


def greets(path, theirs, kind=errors.TransportUnavailable):
    with box_of(path, OWNER) as store, box_of(path, CONSUMER) as other:
        other.set("hello/1", theirs)
        with pytest.raises(kind) as caught:
            Link(store, OWNER, "nccl", "cuda:3").connect(sync.deadline(2))
        return str(caught.value)


def test_two_ranks_on_one_gpu_are_refused_by_its_uuid(box, as_if_nccl):
    assert "GPU-3" in greets(box, f"{nccl._HELLO} nccl {nccl.CHUNK_BYTES} 2.28.9 GPU-3")


@pytest.mark.parametrize("theirs, what", [
    (f"shmkv-link/2 nccl {nccl.CHUNK_BYTES} 2.28.9 GPU-4", "protocol"),
    (f"{nccl._HELLO} gloo {nccl.CHUNK_BYTES} built-in -", "backend"),
    (f"{nccl._HELLO} nccl {nccl.CHUNK_BYTES} 2.30.1 GPU-4", "version is 2.28.9 here and '2.30.1'"),
])
def test_a_peer_of_another_kind_is_refused(box, as_if_nccl, theirs, what):
    assert what in greets(box, theirs)


@pytest.mark.parametrize("theirs", [b"", b"\xff\x00 \n", b"x" * 9000])
def test_a_senseless_greeting_is_a_broken_segment(box, as_if_nccl, theirs):
    greets(box, theirs, errors.SegmentBroken)


def test_a_group_is_made_without_watchdog_and_the_environment_put_back(monkeypatch):
    class Options:
        pass

    class Group:
        def __init__(self, *_):
            self.seen = {name: os.environ.get(name) for name in nccl._NO_WATCHDOG}

    Group.Options = Options
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "engine's")
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    assert nccl._nccl(None, 0, sync.deadline(1)).seen == nccl._NO_WATCHDOG
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "engine's"
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ


def test_backends_says_what_there_is_and_starts_no_gpu():
    before = torch.cuda.is_initialized()
    found = nccl.backends()
    assert set(found) == {"nccl", "gloo"} and all(found.values())
    assert found["gloo"] in ("built-in", "gloo is not built into this torch")
    assert torch.cuda.is_initialized() == before


# ---------------------------------------------------------------- the mailbox

@pytest.fixture
def boxes():
    memory = mmap.mmap(-1, 2048)
    with memoryview(memory) as view:
        both = Mailbox(view, OWNER), Mailbox(view, CONSUMER)
        yield both
        for box in both:
            box.close()
    memory.close()


def test_both_ranks_see_what_either_wrote(boxes):
    owner, consumer = boxes
    owner.set("a", b"\x00\xff")
    consumer.set("b", "text")
    for box in boxes:
        assert box.multi_get(["a", "b"]) == [b"\x00\xff", b"text"]
        assert box.check(["a", "b"]) and not box.check(["a", "c"])
        assert box.num_keys() == 2
    owner.set("b", b"later")
    assert consumer.get("b") == b"later"
    assert consumer.delete_key("a") and not owner.delete_key("a") and owner.num_keys() == 1
    owner.multi_set(["x", "y"], [b"1", b""])
    assert consumer.multi_get(["x", "y"]) == [b"1", b""]


def test_who_has_seen_the_other_writes_later(boxes):
    owner, consumer = boxes
    for number in range(5):
        consumer.set("k", str(number))
    owner.set("k", "after")
    assert owner.get("k") == consumer.get("k") == b"after"
    assert consumer.delete_key("k") and not owner.check(["k"])


def test_adds_of_both_ranks_are_summed(boxes):
    assert [boxes[rank].add("n", by) for rank, by in ((0, 1), (1, 1), (0, 10), (1, -20), (0, 0))] == [1, 2, 12, -8, -8]
    assert boxes[1].get("n") == b"-8"
    with pytest.raises(errors.InvalidArgument):
        boxes[0].add("n", -(1 << 63))
    boxes[0].set("word", b"x")
    with pytest.raises(errors.InvalidArgument):
        boxes[1].add("word", 1)
    assert boxes[1].get("word") == b"x"


def test_compare_set_answers_as_other_stores_do(boxes):
    reference = distributed.HashStore()
    for key, expected, desired in (("k", "", "one"), ("k", "two", "x"), ("k", "one", "two"), ("k", "two", "three")):
        assert boxes[0].compare_set(key, expected, desired) == reference.compare_set(key, expected, desired)
        assert boxes[1].get(key) == reference.get(key)


def test_a_wait_ends_with_the_key_or_the_timeout(boxes, kv_watchdog):
    owner, consumer = boxes
    with pytest.raises(errors.TimedOut, match="k2"):
        owner.wait(["k2"], timedelta(milliseconds=30))
    with pytest.raises(errors.TimedOut):
        owner.wait(["k2"], timedelta(0))
    owner.set_timeout(timedelta(milliseconds=20))
    with pytest.raises(errors.TimedOut):
        owner.get("k2")
    found = []
    waiting = threading.Thread(target=lambda: found.append(owner.wait(["k1", "k2"], timedelta(seconds=10))))
    waiting.start()
    consumer.set("k1", b"1")
    assert waiting.is_alive()
    consumer.set("k2", b"2")
    waiting.join(5)
    assert found == [None]


def test_a_closed_mailbox_ends_its_waits_and_lets_go_of_the_memory(kv_watchdog):
    memory = mmap.mmap(-1, 1024)
    box, failed = Mailbox(memoryview(memory), OWNER), []

    def waits():
        try:
            box.wait(["never"], timedelta(seconds=20))
        except errors.ClosedError as error:
            failed.append(error)

    thread = threading.Thread(target=waits)
    thread.start()
    box.close()
    thread.join(5)
    assert failed
    with pytest.raises(errors.ClosedError):
        box.set("a", b"b")
    memory.close()


def test_a_full_half_refuses_and_changes_nothing(boxes):
    owner, consumer = boxes
    owner.set("k", b"v")
    with pytest.raises(errors.TableFull, match="rank 0"):
        owner.set("big", bytes(1000))
    with pytest.raises(errors.TableFull):
        for number in range(1000):
            owner.set(f"k{number}", b"v")
    assert consumer.get("k") == b"v" and consumer.get("k0") == b"v" and not consumer.check(["big"])
    consumer.set("other half", b"free")
    assert owner.get("other half") == b"free"


def test_a_mailbox_takes_only_memory_that_will_do():
    memory = mmap.mmap(-1, 1024)
    for unfit in (memoryview(bytes(1024)), memoryview(bytearray(64)), memoryview(memory)[1:1001],
                  memoryview(memory)[::2]):
        with pytest.raises(errors.InvalidArgument):
            Mailbox(unfit, OWNER)
        unfit.release()
    with pytest.raises(errors.InvalidArgument):
        Mailbox(memoryview(memory), 2)
    memory.close()


def writes(path, rank, n):
    with box_of(path, rank) as box:
        for number in range(n):
            box.add("n", 1)
            box.set(f"{rank}/{number}", str(number))
        box.wait([f"{1 - rank}/{n - 1}"], timedelta(seconds=20))
        return box.get("n"), box.num_keys()


def test_two_processes_write_at_once_and_read_the_same(box, kv_spawn):
    child = kv_spawn(writes, box, CONSUMER, 150)
    assert writes(box, OWNER, 150) == child.result() == (b"300", 301)


def test_torch_calls_a_mailbox_through_its_own_threads_and_prefixes(boxes):
    store, other = (distributed.PrefixStore("p", box) for box in boxes)
    store.set("a", "1")
    assert other.get("a") == b"1" and boxes[1].get("p/a") == b"1"
    assert (store.add("n", 2), other.add("n", 3)) == (2, 5)
    assert other.check(["a"]) and other.delete_key("a") and not store.check(["a"])
    assert store.num_keys() == 1
    store.multi_set(["x", "y"], ["1", "2"])
    assert other.multi_get(["x", "y"]) == [b"1", b"2"]
    with pytest.raises(Exception, match="(?i)waited"):
        other.wait(["none"], timedelta(milliseconds=20))


def test_hostile_bytes_raise_only_our_errors():
    rng, found = random.Random(1), set()
    calls = (lambda box: box.get("k"), lambda box: box.add("n", 1), lambda box: box.set("k2", b"v"),
             lambda box: box.check(["k"]), lambda box: box.delete_key("k"), lambda box: box.num_keys())
    for _ in range(1500):
        memory = bytearray(1024)
        with memoryview(memory) as view, view.cast("Q") as words:
            writer, reader = Mailbox(view, CONSUMER), Mailbox(view, OWNER)
            reader.set_timeout(timedelta(0))
            writer.set("k", b"v")
            writer.add("n", 7)
            if rng.random() < 0.5:
                reader.check(["k"])
            for _ in range(rng.choice((1, 1, 2, 8))):
                if rng.random() < 0.5:
                    words[64 + rng.randrange(16)] = rng.choice((0, 1, 2, 3, 8, 40, 48, 88, 504, 512, rng.getrandbits(9),
                                                                rng.getrandbits(64), (1 << 64) - 8, (1 << 62) - 1))
                else:
                    view[512 + rng.randrange(128)] = rng.getrandbits(8)
            for call in rng.sample(calls, 3):
                try:
                    call(reader)
                except errors.ShmkvError as error:
                    found.add(type(error))
            writer.close()
            reader.close()
    assert errors.SegmentBroken in found


@pytest.mark.parametrize("word, value", [
    (0, 44), (0, 32), (0, 0), (0, 1 << 63), (1, 4), (2, 0), (2, 1 << 63), (3, 9), (3, 1 << 40), (4, 1 << 40), (4, 9)])
def test_a_word_out_of_bounds_is_a_broken_segment(word, value):
    with memoryview(bytearray(1024)) as view, view.cast("Q") as words:
        writer, reader = Mailbox(view, CONSUMER), Mailbox(view, OWNER)
        if value == 0:   # it was there before
            writer.set("k", b"v")
            reader.check(["k"])
        writer.set("k", b"v")
        words[64 + word + (5 if value == 0 and word else 0)] = value
        with pytest.raises(errors.SegmentBroken):
            reader.check(["k"])
        writer.close()
        reader.close()


def test_memory_of_the_peer_alone_can_say_what_it_likes_about_numbers():
    for digits in (b"9" * 19, b"-", b"9" * 300, b"\xff", b" 1", b"1_0"):
        memory = bytearray(2048)
        with memoryview(memory) as view:
            writer, reader = Mailbox(view, CONSUMER), Mailbox(view, OWNER)
            writer._post(mailbox._RecordKind.SET, "n", b"1")
            with pytest.raises(errors.SegmentBroken):
                writer._post(mailbox._RecordKind.ADD, "n", digits)
            with pytest.raises(errors.SegmentBroken):
                reader.add("n", 1)
            writer.close()
            reader.close()
