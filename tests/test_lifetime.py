"""Memory stays mapped, unchanged and unrecycled while anything derived from it is reachable, and no longer."""

import gc
import itertools
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time

import pytest
import torch

import shmkv
from shmkv import Spec, segment
from shmkv.testing import ChildDied, eventually, unique_name

HERE = os.path.dirname(os.path.abspath(__file__))
PAGE = torch.arange(4096, dtype=torch.int64).to(torch.uint8)
OTHER = 255 - PAGE


def run_here(function, *args):
    """Run a function of this file in an interpreter of its own: its exit is a real one, and so is its stderr."""
    call = f"import test_lifetime; test_lifetime.{function.__name__}(*{args!r})"
    environment = {**os.environ, "PYTHONPATH": HERE}
    return subprocess.run([sys.executable, "-c", call], env=environment, capture_output=True, text=True, timeout=60)


def inode(name):
    return os.stat(segment.path_of(name)).st_ino


def mappings(number):
    """This process's mappings of the file with that inode."""
    with open("/proc/self/maps") as maps:
        return [line for line in maps if line.split()[4] == str(number)]


# ---------------------------------------------------------------- every order of destruction

ENDS = {
    "release": lambda things: things["hit"].release(),
    "forget the hit": lambda things: things.pop("hit"),
    "close": lambda things: things["buffer"].close(),
    "forget the buffer": lambda things: things.pop("buffer"),
    "unlink": lambda things: os.unlink(segment.path_of(things["name"])),
}


@pytest.fixture
def quick_collections():
    """Garbage collections that look only at what was made since."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("readonly", [False, True])
def test_a_view_outlives_everything_in_every_order(quick_collections, readonly):
    for order in itertools.permutations(ENDS):
        things = {"buffer": shmkv.create(unique_name(), capacity=8192, slots=4, peers=4, waits=4)}
        things["name"] = name = things["buffer"].name
        number = inode(name)
        things["buffer"].insert([1], {"x": PAGE})
        things["hit"] = things["buffer"].drop_select([1], readonly=readonly)
        kept = things["hit"]["x"]
        for end in order:
            try:
                ENDS[end](things)
            except (KeyError, FileNotFoundError):
                pass  # an earlier end has taken it along
            assert kept.equal(PAGE), (order, end)
        assert mappings(number), "the bytes are not those of the segment"
        del kept, things
        gc.collect()
        assert not mappings(number) and not os.path.exists(segment.path_of(name)), order


def test_a_producers_tensor_outlives_the_buffer_too():
    buffer = shmkv.create(unique_name(), capacity=8192, slots=4)
    with buffer.reserve([1], {"x": Spec((4096,), torch.uint8)}) as entry:
        kept = entry["x"]
        kept.copy_(PAGE)
    buffer.close()
    del buffer, entry
    assert kept.equal(PAGE)
    del kept
    gc.collect()


@pytest.mark.parametrize("derive", [
    lambda x: x[100:200:3], lambda x: x.view(torch.int32), lambda x: x.view(64, 64).T[3:, ::2],
    lambda x: x.numpy(), lambda x: x.view(64, 64).numpy()[1:],
    lambda x: memoryview(x.numpy()), lambda x: torch.from_numpy(x.numpy())[7], lambda x: x.untyped_storage(),
    lambda x: x.detach().as_strided((10,), (5,), 3),
], ids=["slice", "dtype", "transposed", "numpy", "numpy slice", "memoryview", "there and back", "storage", "strided"])
def test_whatever_is_derived_from_a_view_keeps_its_run(kv_create, derive):
    buffer = kv_create(capacity=2 * 4096)
    buffer.insert([1], {"x": PAGE})
    hit = buffer.drop_select([1])
    derived, expected = derive(hit["x"]), derive(PAGE)
    hit.release()
    del hit
    gc.collect()
    for token in range(2, 8):
        buffer.insert([token], {"x": OTHER}, on_full="evict")
    with pytest.raises(shmkv.ArenaFull):
        buffer.insert([9], {"x": torch.zeros(2 * 4096, dtype=torch.uint8)}, on_full="error")
    assert content(derived) == content(expected), "the run was recycled under a view"
    assert buffer.stats().held_leases == 1
    del derived
    gc.collect()
    buffer.insert([9], {"x": torch.zeros(2 * 4096, dtype=torch.uint8)}, on_full="evict")


def content(derived):
    """The bytes of a tensor, an array, a storage."""
    if isinstance(derived, torch.UntypedStorage):
        return bytes(derived[:4096])
    return (derived.contiguous().numpy() if isinstance(derived, torch.Tensor) else derived).tobytes()


def test_each_tensor_alone_keeps_the_run_of_all(kv_create):
    buffer = kv_create(capacity=3 * 4096)
    buffer.insert([1], {"a": PAGE, "b": PAGE + 1, "c": PAGE[:0]})
    hit = buffer.drop_select([1])
    kept = list(hit.values())
    hit.release()
    for last in ("c", "a", "b"):
        assert buffer.stats().held_leases == 1, last
        kept.pop({"c": -1, "a": 0, "b": 0}[last])
    assert buffer.stats().held_leases == 0 and buffer.stats().used_bytes == 0


def test_a_released_hit_without_views_frees_its_run_at_once(kv_buffer):
    for touch in (False, True):
        kv_buffer.insert([1], {"x": PAGE})
        hit = kv_buffer.drop_select([1])
        if touch:
            assert hit["x"].equal(PAGE)
        hit.release()
        assert kv_buffer.stats().used_bytes == 0, "the entry waits for a garbage collection"


# ---------------------------------------------------------------- writes

def test_a_write_reaches_neither_another_reader_nor_a_redelivered_entry(kv_buffer):
    kv_buffer.insert([1], {"x": PAGE})
    first, second = kv_buffer.select([1]), kv_buffer.select([1])
    plain = kv_buffer.select([1], readonly=True)
    assert second["x"].equal(PAGE) and plain["x"].equal(PAGE)
    first["x"].zero_()
    first["x"].numpy()[7] = 9
    assert second["x"].equal(PAGE) and plain["x"].equal(PAGE) and kv_buffer.select([1])["x"].equal(PAGE)
    assert first["x"][:8].tolist() == [0] * 7 + [9]
    first.release(), second.release(), plain.release()
    taken = kv_buffer.drop_select([1])
    taken["x"].fill_(3)
    taken.release(returned=True)
    del taken
    assert kv_buffer.drop_select([1])["x"].equal(PAGE)


def test_a_write_does_not_hide_the_next_entry_of_the_run(kv_create):
    buffer = kv_create(capacity=4096)
    for fill in range(5):
        buffer.insert([1], {"x": torch.full((4096,), fill, dtype=torch.uint8)})
        with buffer.drop_select([1]) as hit:
            assert hit["x"].unique().tolist() == [fill]
            hit["x"].fill_(99)


def test_copies_are_private_and_keep_nothing(kv_buffer):
    kv_buffer.insert([1], {"x": PAGE})
    copied = kv_buffer.select([1], copy=True)
    kept = kv_buffer.select([1]).copy()
    copied["x"].zero_(), kept["x"].zero_()
    assert kv_buffer.stats().held_leases == 0
    assert kv_buffer.drop_select([1])["x"].equal(PAGE)


def write_where_it_faults(name):
    with shmkv.attach(name) as buffer:
        hit = buffer.select([1], readonly=True)
        assert hit["x"].equal(PAGE)
        hit["x"].zero_()
    return "written"


def test_a_write_to_a_readonly_view_is_a_fault(kv_buffer, kv_spawn):
    kv_buffer.insert([1], {"x": PAGE})
    child = kv_spawn(write_where_it_faults, kv_buffer.name)
    with pytest.raises(ChildDied):
        child.result()
    assert child.join() == -signal.SIGSEGV
    assert kv_buffer.select([1])["x"].equal(PAGE)
    eventually(lambda: not kv_buffer.select([9]) and kv_buffer.stats().held_leases == 0)


# ---------------------------------------------------------------- many

def hold_many(name, n, readonly):
    with shmkv.attach(name) as buffer:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        hits = [buffer.select([1], readonly=readonly) for _ in range(n)]
        views = [hit["x"] for hit in hits]
        assert all(view.equal(PAGE) for view in views[::500]) and buffer.stats().held_leases == n
        hits.clear()
        views.clear()
        return buffer.stats().held_leases, len(mappings(inode(name)))


@pytest.mark.parametrize("readonly", [False, True])
def test_thousands_of_hits_need_no_descriptors(kv_create, kv_spawn, readonly):
    buffer = kv_create(leases=5000)
    buffer.insert([1], {"x": PAGE})
    held, maps = kv_spawn(hold_many, buffer.name, 5000, readonly).result()
    assert held == 0 and maps <= 2, "mappings of released hits stayed"


# ---------------------------------------------------------------- the end of a process

kept_to_the_end = []


def keep_to_the_end(name):
    """Leave with everything alive: a taken entry, a shared one, a reserved one, their views, the buffer itself."""
    buffer = shmkv.attach(name)
    taken, shared, plain = buffer.drop_select([1]), buffer.select([2]), buffer.select([2], readonly=True)
    entry = buffer.reserve([3], {"x": Spec((4096,), torch.uint8)})
    entry["x"].fill_(1)
    assert taken["x"].equal(PAGE) and shared["x"].equal(PAGE) and plain["x"].equal(PAGE)
    assert not buffer.select([9], timeout=0.01)
    kept_to_the_end.extend((buffer, taken, shared, plain, entry, taken["x"][3:], shared["x"].numpy(), entry["x"]))


def fork_and_keep(name):
    """A forked child of multiprocessing, which skips atexit, with a handle of its own."""
    child = multiprocessing.get_context("fork").Process(target=keep_to_the_end, args=(name,))
    child.start(), child.join()
    assert child.exitcode == 0


def fork_beside_a_handle(name):
    """The same, of a parent that is attached too and goes on."""
    with shmkv.attach(name) as buffer:
        fork_and_keep(name)
        assert buffer.select([2])["x"].equal(PAGE)


def spawn_and_keep(name):
    child = multiprocessing.get_context("spawn").Process(target=keep_to_the_end, args=(name,))
    child.start(), child.join()
    assert child.exitcode == 0


@pytest.mark.parametrize("process", [keep_to_the_end, fork_and_keep, fork_beside_a_handle, spawn_and_keep])
def test_an_orderly_exit_with_live_views_is_silent_and_settles_all(kv_buffer, process):
    for token in (1, 2):
        kv_buffer.insert([token], {"x": PAGE})
    done = run_here(process, kv_buffer.name)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    stats = kv_buffer.stats()
    assert stats.counters["consumed"] == 1 and stats.counters["aborted"] == 1 and stats.counters["redelivered"] == 0
    assert stats.counters["deaths"] == 0 and stats.held_leases == 0 and stats.peers == 1
    assert stats.entries["ready"] == 1 and stats.entries["free"] == 255, "an entry was not settled"
    assert kv_buffer.select([2])["x"].equal(PAGE) and not kv_buffer.select([3])
    assert [s for s in os.listdir("/dev/shm") if s.startswith(f"sem.shmkv.{kv_buffer.name}.")] == []


def exit_as_creator(name):
    buffer = shmkv.create(name, capacity=8192, slots=4)
    buffer.insert([1], {"x": PAGE})
    kept_to_the_end.extend((buffer, buffer.drop_select([1])["x"]))


def test_a_creators_exit_with_live_views_is_silent_and_removes_the_name():
    name = unique_name()
    done = run_here(exit_as_creator, name)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not os.path.exists(segment.path_of(name))


def keep_and_die(name):
    keep_to_the_end(name)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_consumers_entry_is_delivered_again_unchanged(kv_buffer, kv_spawn):
    for token in (1, 2):
        kv_buffer.insert([token], {"x": PAGE})
    assert kv_spawn(keep_and_die, kv_buffer.name).join() == -signal.SIGKILL
    started = time.monotonic()
    with kv_buffer.drop_select([1], timeout=5) as hit:
        assert hit["x"].equal(PAGE) and time.monotonic() - started < 1
    stats = kv_buffer.stats()
    assert stats.counters["redelivered"] == stats.counters["deaths"] == stats.counters["aborted"] == 1
    assert stats.entries["ready"] == 1 and stats.held_leases == 0 and not kv_buffer.select([3])


# ---------------------------------------------------------------- errors on the way

def test_an_exception_in_the_block_reaches_the_caller_though_views_live(kv_buffer):
    kv_buffer.insert([1], {"x": PAGE})
    kept = []
    with pytest.raises(ZeroDivisionError), shmkv.attach(kv_buffer.name) as other, other.select([1]) as hit:
        kept.append(hit["x"])
        1 / 0  # noqa: B018
    assert kept.pop().equal(PAGE)
    del hit, other


@pytest.mark.parametrize("owner, name", [("segment.mmap", "mmap"), ("segment", "populate"), ("segment", "_map"),
                                         ("segment.Window", "at"), ("transport.host", "view")])
def test_a_constructor_that_fails_says_so_once(kv_spawn, owner, name):
    assert kv_spawn(fail_at, owner, name).result() == []


def fail_at(owner, name):
    """One step of attaching or of looking into a hit fails; returns what is told besides that one exception."""
    told = []
    sys.unraisablehook = lambda trouble: told.append(repr(trouble.exc_value))
    buffer = shmkv.create(capacity=8192, slots=4)
    buffer.insert([1], {"x": PAGE})
    place = shmkv
    for part in owner.split("."):
        place = getattr(place, part)
    with pytest.MonkeyPatch.context() as patch:
        def fail(*_):
            raise MemoryError
        patch.setattr(place, name, fail)
        with pytest.raises(MemoryError):
            shmkv.attach(buffer.name).select([1])["x"].sum()
    gc.collect()
    stats = buffer.stats()
    if (stats.held_leases, stats.peers) != (0, 1) or not buffer.select([1])["x"].equal(PAGE):
        told.append(f"left behind: {stats}")
    buffer.close()
    return told


def test_a_view_alone_keeps_its_lease(kv_buffer):
    """Handle closed and gone, hit gone, garbage collected: nobody else may get the entry or its bytes."""
    kv_buffer.insert([1], {"x": PAGE})
    other = shmkv.attach(kv_buffer.name)
    kept = other.drop_select([1])["x"]
    other.close()
    del other
    gc.collect()
    assert not kv_buffer.select([1], timeout=0) and kv_buffer.stats().held_leases == 1
    assert kept.equal(PAGE)
    del kept
    gc.collect()
    assert kv_buffer.stats().held_leases == 0 and kv_buffer.stats().counters["consumed"] == 1
