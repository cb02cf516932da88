"""Tensors in device memory: what comes out is what went in, by every path, when the work is done, for as long as it is
looked at, whoever dies. All of it over the emulated driver, in processes of their own.
"""

import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import types

import emulated
import pytest
import torch
from emulated_driver.build import build

import shmkv
from shmkv import Spec
from shmkv.testing import eventually
from shmkv.transport import LADDER, WHY, Decision, Facts, Path, Reason, decide, decode_decision

N = 64 << 10
LATE_NS = 1 << 62
HOLD_US = 3_600_000_000  # held until the delay is set to 0
DTYPES = [dtype for dtype in (getattr(torch, name) for name in (
    "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128 float8_e4m3fn float8_e5m2 "
    "float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu uint16 uint32 uint64 float4_e2m1fn_x2").split()
    if hasattr(torch, name))]


@pytest.fixture
def gpu_spawn(kv_spawn):
    return emulated.spawner(kv_spawn)


class Gate:
    """Something that one process says and others wait for: a file that comes to be."""

    def __init__(self, path):
        self.path = str(path)

    def open(self):
        with open(self.path, "w"):
            pass

    def wait(self):
        eventually(lambda: os.path.exists(self.path), timeout=30)


@pytest.fixture
def gates(tmp_path):
    return [Gate(tmp_path / f"gate{number}") for number in range(4)]


def pattern(n, seed=0):
    return ((torch.arange(n, dtype=torch.int64) * 31 + seed) % 251).to(torch.uint8)


def on_device(buffer, tensors, tokens=(0xFFFF,)):
    """Device tensors with the given contents: those of a reserved entry that is never sealed, which it keeps."""
    entry = buffer.reserve(list(tokens), {name: Spec(t.shape, t.dtype, "cuda:0") for name, t in tensors.items()})
    for name, tensor in tensors.items():
        if tensor.numel():
            entry[name].view(torch.uint8 if tensor.dim() else tensor.dtype).copy_(
                tensor.view(torch.uint8) if tensor.dim() else tensor)
    return entry


def same_bits(one, other):
    return one.shape == other.shape and one.dtype == other.dtype and \
        one.contiguous().flatten().view(torch.uint8).equal(other.contiguous().flatten().view(torch.uint8))


# ---------------------------------------------------------------- the ladder

def test_the_best_path_that_the_facts_allow_is_taken_and_each_better_one_has_its_reason():
    remote = Facts()
    ours, unseen = remote._replace(is_ours=True), remote._replace(is_visible=False)
    other = remote._replace(is_wanted=False, peer_access=True)
    for facts, path, reasons in [
        (ours, Path.LOCAL, []),
        (remote, Path.CUDA_IPC, [Reason.OTHER_PROCESS]),
        (other, Path.CUDA_PEER, [Reason.OTHER_PROCESS, Reason.OTHER_DEVICE]),
        (other._replace(peer_access=False), Path.STAGING,
         [Reason.OTHER_PROCESS, Reason.OTHER_DEVICE, Reason.NO_PEER_ACCESS]),
        (unseen, Path.STAGING, [Reason.OTHER_PROCESS, Reason.NOT_VISIBLE, Reason.NOT_VISIBLE]),
        (remote._replace(has_driver=False), Path.STAGING, [Reason.OTHER_PROCESS, Reason.NO_DRIVER, Reason.NO_DRIVER]),
        (remote._replace(torch_sees_cuda=False), Path.STAGING,
         [Reason.OTHER_PROCESS, Reason.NO_TORCH_CUDA, Reason.NO_TORCH_CUDA]),
        (remote._replace(exported=False), Path.STAGING,
         [Reason.OTHER_PROCESS, Reason.NOT_EXPORTED, Reason.NOT_EXPORTED]),
        (remote._replace(same_pid_namespace=False), Path.STAGING,
         [Reason.OTHER_PROCESS, Reason.PID_NAMESPACE, Reason.PID_NAMESPACE]),
        (remote._replace(open_failed=True), Path.STAGING,
         [Reason.OTHER_PROCESS, Reason.OPEN_FAILED, Reason.OPEN_FAILED]),
        (unseen._replace(fits_arena=False, nccl=True), Path.NCCL,
         [Reason.OTHER_PROCESS, Reason.NOT_VISIBLE, Reason.NOT_VISIBLE, Reason.NO_ROOM]),
        (Facts(has_region=False), Path.STAGING, [Reason.NO_REGION] * 3),
    ]:
        decision = decide(facts)
        assert decision == Decision(path, dict(zip(LADDER, reasons, strict=False))), facts
        assert decode_decision(decision.word) == decision
    assert set(WHY) == set(Reason)


def test_what_is_required_is_never_degraded_and_what_is_preferred_comes_first():
    unseen = Facts(is_visible=False, nccl=True)
    with pytest.raises(shmkv.TransportUnavailable, match="cuda_ipc: the GPU is not visible") as refusal:
        decide(unseen, require="cuda_peer")
    assert all(f"{path.name.lower()}: " in str(refusal.value) for path in LADDER)
    assert decide(Facts(is_ours=True), require="cuda_ipc").path == Path.LOCAL
    preferred = decide(Facts(nccl=True), prefer="nccl")
    assert preferred == Decision(Path.NCCL, dict.fromkeys(LADDER[:4], Reason.NOT_PREFERRED))
    assert decide(Facts(nccl=False), prefer="nccl").path == Path.CUDA_IPC
    with pytest.raises(shmkv.TransportUnavailable):
        decide(unseen._replace(fits_arena=False, nccl=False))
    for options in ({"require": "host"}, {"require": "ipc"}, {"prefer": "fastest"}):
        with pytest.raises(shmkv.InvalidArgument, match="none of local, cuda_ipc"):
            shmkv.create(capacity=1 << 20, **options)


def test_a_word_that_holds_no_decision_is_none():
    assert decode_decision(0) is decode_decision(7) is decode_decision(0xFF) is None
    assert decode_decision(Path.STAGING | 0xEE << 16) == Decision(Path.STAGING, {})


# ---------------------------------------------------------------- without a driver

def test_without_a_driver_host_tensors_work_and_device_memory_is_a_clear_error(kv_buffer):
    kv_buffer.insert([1], {"x": torch.ones(4)})
    for call in (lambda: shmkv.create(capacity=1 << 20, device_capacity="1GiB"),
                 lambda: shmkv.create(capacity=1 << 20, device="cuda:0"),
                 lambda: shmkv.attach(kv_buffer.name, device_capacity="1GiB"),
                 lambda: kv_buffer.reserve([2], {"x": Spec((4,), torch.float32, "cuda:0")})):
        with pytest.raises(shmkv.TransportUnavailable, match="cuInit|libcuda"):
            call()
    with pytest.raises(shmkv.InvalidTensor, match="CUDA device"):
        kv_buffer.register(torch.ones(4))
    assert kv_buffer.select([1])["x"].equal(torch.ones(4))


def test_neither_the_import_nor_host_tensors_initialise_cuda():
    program = """if True:
        import torch, shmkv
        with shmkv.create(capacity=1 << 20) as buffer:
            buffer.insert([1], {"x": torch.ones(4)})
            assert buffer.select([1])["x"].sum() == 4
        assert "libcuda.so" not in open("/proc/self/maps").read() and not torch.cuda.is_initialized()
        shmkv.create(capacity=1 << 20, device="cuda:0").close()
        assert "libcuda.so" in open("/proc/self/maps").read(), "the control finds nothing" """
    environment = {**os.environ, "LD_LIBRARY_PATH": str(build())}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- every path

PATHS = {
    "host": {},
    "local": {},
    "cuda_ipc": {},
    "cuda_peer": {"device": "cuda:1"},
    "staging": {"prefer": "staging"},
    "nccl": {"prefer": "nccl"},
}
BASE = {"key": torch.arange(120).view(3, 5, 8).to(torch.bfloat16), "value": torch.arange(120.).view(3, 5, 8) / 7,
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(7.5, dtype=torch.float64), "turned": pattern(96).reshape(8, 12).t()}


def owner(name, ready, done, base=BASE):
    """Own device memory, insert an entry under [1, 2, 3], stay until told."""
    with shmkv.attach(name, device_capacity="4MiB", device="cuda:0", role="owner") as buffer:
        entry = on_device(buffer, base)
        buffer.insert([1, 2, 3], {name: entry[name] if tensor.is_contiguous() else
                                  entry[name].view(tensor.shape) for name, tensor in base.items()})
        entry.abort()
        del entry
        ready.open()
        done.wait()
        assert buffer.problems() == []
        return buffer.stats().paths


def look(name, path, options):
    with shmkv.attach(name, **options) as buffer:
        with buffer.select([1, 2, 3, 4]) as hit:
            assert hit.transport == path
            assert set(hit.refused) == {better.name.lower() for better in LADDER if better < Path[path.upper()]}
            for key, tensor in BASE.items():
                assert same_bits(hit[key], tensor), key
            copies = hit.copy()
            target = torch.empty(3, 5, 8)
            hit.copy_to({"value": target})
        assert same_bits(copies["key"], BASE["key"]) and same_bits(target, BASE["value"])
        kept = buffer.select([1, 2, 3], match="exact")["key"]
        eventually(lambda: gc.collect() or buffer.stats().held_leases == 1)
        assert same_bits(kept, BASE["key"])
        taken = buffer.drop_select([1, 2, 3])
        assert not buffer.select([1, 2, 3]) and same_bits(taken["turned"], BASE["turned"])
        taken.release(returned=True)
        again = eventually_found(buffer)
        assert again.sequence == taken.sequence
        again.release(returned=True)
        copied = buffer.drop_select([1, 2, 3], copy=True)
        assert same_bits(copied["value"], BASE["value"])
        del kept, again, taken
        eventually(lambda: gc.collect() or buffer.stats().held_leases == 0)
        assert buffer.problems() == []
    return emulated.live()


def eventually_found(buffer):
    """The lease of a device entry ends when the device is done, not at once."""
    found = buffer.drop_select([1, 2, 3], timeout=10)
    assert found, found
    return found


def own_and_look(name):
    with shmkv.attach(name, device_capacity="4MiB", device="cuda:0") as buffer:
        buffer.insert([1, 2, 3], dict(on_device(buffer, BASE)))
        return look(name, "local", {})


@pytest.mark.parametrize("path", PATHS)
def test_every_path_shows_what_went_in_for_as_long_as_it_is_looked_at(kv_buffer, gpu_spawn, gates, path):
    ready, done, *_ = gates
    if path == "local":
        assert gpu_spawn(own_and_look, kv_buffer.name).result()[1] == 0
        return
    if path == "host":
        kv_buffer.insert([1, 2, 3], BASE)
        assert gpu_spawn(look, kv_buffer.name, path, {}).result() == (0, 0)
        return
    producer = gpu_spawn(owner, kv_buffer.name, ready, done)
    ready.wait()
    live = gpu_spawn(look, kv_buffer.name, path, PATHS[path]).result()
    assert live == (0, 0), "device memory of the consumer, or a mapping, was left behind"
    done.open()
    assert producer.result()[path] == 5
    assert kv_buffer.stats().regions == []


# ---------------------------------------------------------------- published behind the work, released behind the work

def late_producer(name, ready, reading, done, publish, forgetful=False):
    """Insert what a stream has not written yet; it does when the insert has waited, or somebody reads."""
    from shmkv import driver
    with shmkv.attach(name, device_capacity="4MiB", device="cuda:0", publish=publish) as buffer:
        cuda = driver.find()
        stream = cuda.make_stream(0)
        source = buffer.reserve([9], {"x": Spec((N,), torch.uint8, "cuda:0")})
        source["x"].zero_()
        emulated.set_delay(HOLD_US)
        fill(cuda, source["x"], 7, stream)
        wait = driver.Driver.wait
        if forgetful:
            driver.Driver.wait, driver.Driver.is_idle = lambda *_: None, lambda *_: True
        elif publish == "wait":
            threading.Timer(0.2, emulated.set_delay, [0]).start()
        buffer.insert([1], {"x": source["x"]}, stream=stream)
        with cuda._current(0):
            done_before = cuda._api.cuStreamQuery(stream)[0] == 0
        ready.open()
        reading.wait()
        emulated.set_delay(0)
        done.wait()
        wait(cuda, 0, stream, LATE_NS)
        source.abort()
        return done_before


def fill(cuda, tensor, value, stream):
    with cuda._current(0):
        cuda._call("cuMemsetD8Async", cuda.device_address(tensor.data_ptr(), False), value, tensor.numel(), stream)


def read_behind(name, reading, at_once, careless):
    """Copy a view on a stream of our own, as a kernel would read it, and say what was there."""
    from shmkv import driver
    with shmkv.attach(name, timeout=10) as buffer:
        cuda = driver.find()
        stream = cuda.make_stream(0)
        if careless:
            driver.Driver.order_behind = lambda *_: None
        target = torch.zeros(N, dtype=torch.uint8)
        with buffer.select([1], timeout=10, stream=stream) as hit:
            if not at_once:
                reading.open()
            cuda.copy(0, target.data_ptr(), cuda.device_address(hit["x"].data_ptr(), False), N, stream)
            cuda.wait(0, stream, LATE_NS)
        reading.open()
        return set(target.tolist())


@pytest.mark.parametrize("publish, sabotage, seen", [
    ("wait", "", {7}), ("event", "", {7}), ("wait", "producer", {0}), ("event", "consumer", {0})])
def test_an_entry_is_published_behind_the_work_that_makes_it(kv_buffer, gpu_spawn, gates, publish, sabotage, seen):
    """With the wait (or the order) taken out, the consumer reads what was there before."""
    ready, reading, done, _ = gates
    producer = gpu_spawn(late_producer, kv_buffer.name, ready, reading, done, publish, sabotage == "producer")
    ready.wait()
    consumer = gpu_spawn(read_behind, kv_buffer.name, reading, bool(sabotage), sabotage == "consumer")
    assert consumer.result() == seen
    done.open()
    assert producer.result() == (publish == "wait" and not sabotage), "what was waited for, and what was not"


def two_streams(name, ready, reading, done, forgetful):
    """A slow entry, then a quick one from another stream: the second recording must not hide the first's work."""
    from shmkv import driver
    with shmkv.attach(name, device_capacity="4MiB", device="cuda:0", publish="event") as buffer:
        cuda = driver.find()
        slow, quick = cuda.make_stream(0), cuda.make_stream(0)
        source = buffer.reserve([9], {"x": Spec((N,), torch.uint8, "cuda:0")})
        source["x"].zero_()
        emulated.set_delay(HOLD_US)
        fill(cuda, source["x"], 7, slow)
        if forgetful:
            driver.Driver.order_behind = lambda *_: None
        buffer.insert([1, 1], {"x": source["x"]}, stream=slow)
        with buffer.reserve([2], {"x": Spec((1,), torch.uint8, "cuda:0")}, stream=quick) as entry:
            del entry
        ready.open()
        reading.wait()
        emulated.set_delay(0)
        done.wait()
        source.abort()


def read_the_slow_one(name, reading, at_once):
    from shmkv import driver
    with shmkv.attach(name) as buffer:
        cuda = driver.find()
        stream, target = cuda.make_stream(0), torch.zeros(N, dtype=torch.uint8)
        with buffer.select([1, 1], stream=stream) as hit:
            if not at_once:
                reading.open()
            cuda.copy(0, target.data_ptr(), cuda.device_address(hit["x"].data_ptr(), False), N, stream)
            cuda.wait(0, stream, LATE_NS)
        reading.open()
        return set(target.tolist())


@pytest.mark.parametrize("forgetful, seen", [(False, {7}), (True, {0})])
def test_one_event_stands_for_the_work_of_all_streams(kv_buffer, gpu_spawn, gates, forgetful, seen):
    ready, reading, done, _ = gates
    producer = gpu_spawn(two_streams, kv_buffer.name, ready, reading, done, forgetful)
    ready.wait()
    assert gpu_spawn(read_the_slow_one, kv_buffer.name, reading, forgetful).result() == seen
    done.open()
    producer.result()


def reuse_at_once(name, ready, done, again):
    """One run's worth of memory: whatever is inserted next lies where the last entry lay."""
    with shmkv.attach(name, device_capacity="2MiB", device="cuda:0") as buffer:
        half = {"x": Spec(((1 << 20) + 1,), torch.uint8, "cuda:0")}
        with buffer.reserve([1], half) as entry:
            entry["x"].fill_(7)
        del entry
        ready.open()
        again.wait()
        with buffer.reserve([2], half, timeout=20) as entry:
            entry["x"].fill_(9)
        del entry
        done.open()
        return buffer.stats().counters["consumed"]


def slow_reader(name, done, again, forgetful):
    from shmkv import driver
    with shmkv.attach(name) as buffer:
        cuda = driver.find()
        stream, target = cuda.make_stream(0), cuda.allocate(0, 2 << 20)
        if forgetful:
            driver.Driver.wait, driver.Driver.is_idle = lambda *_: None, lambda *_: True
        with buffer.drop_select([1], stream=stream) as hit:
            emulated.set_delay(HOLD_US)
            cuda.copy(0, target, cuda.device_address(hit["x"].data_ptr(), False), 1 << 20, stream)
        del hit
        again.open()
        eventually(lambda: os.path.exists(done.path) if forgetful else buffer.stats().waiting["room"])
        emulated.set_delay(0)
        done.wait()
        with cuda._current(0):
            cuda._call("cuStreamSynchronize", stream)
        return set(ctypes.string_at(cuda.host_alias(target), 1 << 20))


@pytest.mark.parametrize("forgetful, seen", [(False, {7}), (True, {9})])
def test_bytes_are_reused_only_after_the_consumers_own_device_work(kv_buffer, gpu_spawn, gates, forgetful, seen):
    ready, done, again, _ = gates
    producer = gpu_spawn(reuse_at_once, kv_buffer.name, ready, done, again)
    ready.wait()
    assert gpu_spawn(slow_reader, kv_buffer.name, done, again, forgetful).result() == seen
    assert producer.result() == 1


def abort_amid_work(name):
    """The run of an aborted entry is not reused while a stream still writes to it."""
    from shmkv import driver
    with shmkv.attach(name, device_capacity="2MiB", device="cuda:0") as buffer:
        cuda = driver.find()
        stream = cuda.make_stream(0)
        spec = {"x": Spec(((1 << 20) + 1,), torch.uint8, "cuda:0")}
        emulated.set_delay(HOLD_US)
        with pytest.raises(KeyboardInterrupt):
            with buffer.reserve([1], spec, stream=stream) as entry:
                fill(cuda, entry["x"], 7, stream)
                raise KeyboardInterrupt
        del entry
        threading.Timer(0.2, emulated.set_delay, [0]).start()
        with buffer.reserve([3], spec, timeout=20) as entry:
            entry["x"].fill_(9)
        del entry
        cuda.wait(0, stream, LATE_NS)
        with buffer.select([3]) as hit:
            return set(hit["x"].tolist())


def test_an_aborted_run_is_not_reused_amid_device_work(kv_buffer, gpu_spawn):
    assert gpu_spawn(abort_amid_work, kv_buffer.name).result() == {9}


# ---------------------------------------------------------------- opened once, let go of, owners that go

def count_opens(name, owner_gate):
    with shmkv.attach(name) as buffer:
        views = []
        for _ in range(5):
            with buffer.select([1, 2, 3]) as hit:
                views.append(hit["key"])
        counted = emulated.calls("cuIpcOpenMemHandle"), emulated.calls("cuIpcCloseMemHandle")
    assert emulated.live() == (0, 1), "unmapped while a view looks at it"
    assert same_bits(views[0], BASE["key"])
    views.clear()
    gc.collect()
    eventually(lambda: emulated.live() == (0, 0))
    return (*counted, emulated.calls("cuIpcCloseMemHandle"))


def test_a_region_is_opened_once_a_process_and_unmapped_after_the_last_view(kv_buffer, gpu_spawn, gates):
    ready, done, *_ = gates
    producer = gpu_spawn(owner, kv_buffer.name, ready, done)
    ready.wait()
    assert gpu_spawn(count_opens, kv_buffer.name, done).result() == (1, 0, 1)
    done.open()
    producer.result()


def hold_on(name, held, let_go):
    with shmkv.attach(name) as buffer:
        key = buffer.select([1, 2, 3])["key"]
        held.open()
        eventually(lambda: buffer.stats().regions[0].state == "gone", timeout=5)
        state = buffer.stats().regions[0]
        assert state.held_by == [os.getpid()] and not buffer.select([1, 2, 3])
        let_go.wait()
        before = emulated.live()
        del key
        gc.collect()
        eventually(lambda: emulated.live() == (0, 0) and buffer.stats().regions == [])
        assert buffer.problems() == [] and buffer.stats().counters["lost"] == 1
        return before


@pytest.mark.parametrize("end", ["kill", "close"])
def test_an_owner_that_goes_takes_its_entries_along_and_who_holds_on_is_named(kv_buffer, gpu_spawn, gates, end):
    ready, done, held, let_go = gates
    producer = gpu_spawn(owner, kv_buffer.name, ready, done)
    ready.wait()
    consumer = gpu_spawn(hold_on, kv_buffer.name, held, let_go)
    held.wait()
    if end == "kill":
        producer.kill()
    else:
        done.open()
    eventually(lambda: [region.state for region in kv_buffer.stats().regions] == ["gone"], timeout=5)
    assert [region.held_by for region in kv_buffer.stats().regions] == [[consumer.pid]]
    let_go.open()
    assert consumer.result() == (0, 1)
    if end == "close":
        producer.result()
    assert kv_buffer.stats().regions == [] and kv_buffer.stats().entries["free"] == 256


def own_and_close(name):
    buffer = shmkv.attach(name, device_capacity="4MiB", device="cuda:0")
    with buffer.reserve([1], {"x": Spec((N,), torch.uint8, "cuda:0")}) as entry:
        entry["x"].fill_(3)
    kept = buffer.select([1])["x"]
    del entry
    buffer.close()
    assert emulated.live()[0] == 1 and set(kept.tolist()) == {3}, "freed under a view of our own"
    del kept
    gc.collect()
    eventually(lambda: emulated.live() == (0, 0))


def test_device_memory_is_freed_after_the_last_view_also_of_its_own_process(kv_buffer, gpu_spawn):
    gpu_spawn(own_and_close, kv_buffer.name).result()
    assert kv_buffer.stats().regions == []


# ---------------------------------------------------------------- what is refused, what is degraded, and what is not

def strict(name, options, wanted):
    with shmkv.attach(name, **options) as buffer:
        with pytest.raises(shmkv.TransportUnavailable, match=wanted):
            buffer.drop_select([1, 2, 3])
        eventually(lambda: buffer.stats().held_leases == 0)
        return buffer.stats().entries["ready"]


@pytest.mark.parametrize("options, switches, wanted", [
    ({"require": "cuda_ipc", "device": "cuda:1"}, {}, "cuda_ipc: the memory lies on another GPU"),
    ({"require": "cuda_peer"}, {"CUDA_VISIBLE_DEVICES": "1"}, "not visible"),
    ({"require": "cuda_peer", "device": "cuda:1"}, {"EMUCUDA_P2P": "0"}, "no peer access"),
    ({"require": "cuda_ipc"}, {"EMUCUDA_IPC": "0"}, "refused to open"),
])
def test_a_required_path_fails_and_the_entry_stays(kv_buffer, gpu_spawn, gates, options, switches, wanted):
    ready, done, *_ = gates
    producer = gpu_spawn(owner, kv_buffer.name, ready, done)
    ready.wait()
    assert gpu_spawn(strict, kv_buffer.name, options, wanted, **switches).result() == 1
    done.open()
    producer.result()


def degraded(name, options):
    with shmkv.attach(name, **options) as buffer, buffer.select([1, 2, 3]) as hit:
        assert all(same_bits(hit[key], tensor) for key, tensor in BASE.items())
        return hit.transport, hit.refused


@pytest.mark.parametrize("options, switches, reason", [
    ({}, {"CUDA_VISIBLE_DEVICES": "1"}, Reason.NOT_VISIBLE),
    ({"device": "cuda:0"}, {"CUDA_VISIBLE_DEVICES": "1"}, Reason.NOT_VISIBLE),
    ({}, {"EMUCUDA_IPC": "0"}, Reason.OPEN_FAILED),
    ({"device": "cuda:1"}, {"EMUCUDA_P2P": "0"}, Reason.OTHER_DEVICE),
])
def test_what_cannot_be_opened_is_brought_by_its_owner(kv_buffer, gpu_spawn, gates, options, switches, reason):
    ready, done, *_ = gates
    producer = gpu_spawn(owner, kv_buffer.name, ready, done)
    ready.wait()
    path, refused = gpu_spawn(degraded, kv_buffer.name, options, **switches).result()
    assert (path, refused["cuda_ipc"]) == ("staging", WHY[reason])
    with kv_buffer.select([1, 2, 3]) as hit:  # this process has no driver at all
        assert hit.transport == "staging" and hit.refused["cuda_ipc"] == WHY[Reason.NO_DRIVER]
        kept = hit["key"]
        assert same_bits(hit["value"], BASE["value"])
    assert same_bits(kept, BASE["key"]), "the copy was given back under a view"
    del kept, hit
    gc.collect()
    eventually(lambda: kv_buffer.stats().used_bytes == 0)
    done.open()
    assert producer.result()["staging"] == 2
    assert set(kv_buffer.stats().refused["staging"]) == {"local", "cuda_ipc", "cuda_peer"}


def not_exported(name, ready, done):
    return owner(name, ready, done)


def test_memory_that_cannot_be_exported_is_brought_by_its_owner(kv_buffer, gpu_spawn, gates):
    ready, done, *_ = gates
    producer = gpu_spawn(owner, kv_buffer.name, ready, done, EMUCUDA_IPC="0")
    ready.wait()
    path, refused = gpu_spawn(degraded, kv_buffer.name, {}).result()
    assert (path, refused["cuda_ipc"]) == ("staging", WHY[Reason.NOT_EXPORTED])
    done.open()
    producer.result()


def insert_without_region(name):
    with shmkv.attach(name, device_capacity="2MiB", device="cuda:0") as other, shmkv.attach(name) as buffer:
        entry = on_device(other, {"x": pattern(N), "turned": pattern(96).reshape(8, 12)})
        buffer.insert([5], {"x": entry["x"], "turned": entry["turned"].t()})
        with pytest.raises(shmkv.TransportUnavailable, match="owns no device memory"):
            buffer.reserve([6], {"x": Spec((4,), torch.uint8, "cuda:0")})
        with pytest.raises(shmkv.InvalidTensor, match="'x' lies on cuda:0, 'y' on the host"):
            buffer.insert([6], {"x": entry["x"], "y": torch.ones(3)})
        with pytest.raises(shmkv.TooLarge, match="device_capacity"):
            other.reserve([6], {"x": Spec((3 << 20,), torch.uint8, "cuda:0")})
        with pytest.raises(shmkv.InvalidArgument, match="cuda:7.*none of"):
            other.reserve([6], {"x": Spec((4,), torch.uint8, "cuda:7")})
        with pytest.raises(shmkv.TransportUnavailable, match="local: this handle has no device memory"):
            shmkv.attach(name, require="cuda_ipc").insert([6], {"x": entry["x"]})
        entry.abort()


def test_device_tensors_of_a_handle_without_device_memory_go_through_the_host(kv_buffer, gpu_spawn):
    gpu_spawn(insert_without_region, kv_buffer.name).result()
    with kv_buffer.select([5]) as hit:
        assert hit.transport == "host" and hit["x"].equal(pattern(N))
        assert hit["turned"].equal(pattern(96).reshape(8, 12).t())
    stats = kv_buffer.stats()
    assert stats.paths["staged_inserts"] == 1 and stats.refused["staged_inserts"]["cuda_ipc"] == WHY[Reason.NO_REGION]
    assert kv_buffer.select([6]).reason


# ---------------------------------------------------------------- an engine's own tensors

def engine(name, ready, done, freed):
    """A paged cache of our own, registered; slices of it are inserted in place."""
    from shmkv import driver
    cuda = driver.find()
    base = cuda.allocate(0, 4 << 20)
    host = cuda.host_alias(base)
    cache = torch.frombuffer((ctypes.c_ubyte * (1 << 20)).from_address(host + 4096), dtype=torch.uint8)
    cache = cache.view(torch.float32).view(2, 16, 16, 512)  # keys and values, blocks, slots, features
    with shmkv.attach(name, device="cuda:0") as buffer:
        registered = buffer.register(cache)
        assert registered.in_place and not registered.reason
        cache.copy_(torch.arange(cache.numel(), dtype=torch.float32).view_as(cache))
        sequence = buffer.insert([1, 2], {"blocks": cache[:, 3:5], "one": cache[0, 7]})
        assert buffer.stats().used_bytes == 0 and buffer.released() == []
        with pytest.raises(shmkv.InvalidArgument, match="still lie"):
            registered.close()
        cache[0, 7, 0, 0] = -1.0  # the very bytes, so a consumer sees this
        ready.open()
        freed_ = buffer.released(timeout=20)
        freed.open()
        assert freed_ == [sequence] and buffer.released() == []
        registered.close()
        eventually(lambda: buffer.stats().regions == [])
        done.wait()
    return cache[0, 0, 0, 0].item()


def consume_in_place(name, options, freed, transport):
    with shmkv.attach(name, **options) as buffer:
        with buffer.drop_select([1, 2]) as hit:
            assert hit.transport == transport, hit.refused
            expected = torch.arange(2 * 16 * 16 * 512, dtype=torch.float32).view(2, 16, 16, 512)
            assert hit["blocks"].equal(expected[:, 3:5]) and hit["blocks"].shape == (2, 2, 16, 512)
            assert hit["one"][0, 0] == -1 and hit["one"][1:].equal(expected[0, 7, 1:])
            assert hit.copy()["blocks"].equal(expected[:, 3:5])
            assert not os.path.exists(freed.path), "given back while it was read"
        freed.wait()


@pytest.mark.parametrize("options, transport", [
    ({}, "cuda_ipc"), ({"device": "cuda:1"}, "cuda_peer"), ({"prefer": "staging"}, "staging"),
    ({"prefer": "nccl"}, "nccl")])
def test_slices_of_a_registered_tensor_are_seen_in_place_and_given_back(kv_buffer, gpu_spawn, gates, options,
                                                                        transport):
    ready, done, freed, _ = gates
    producer = gpu_spawn(engine, kv_buffer.name, ready, done, freed)
    ready.wait()
    gpu_spawn(consume_in_place, kv_buffer.name, options, freed, transport).result()
    done.open()
    producer.result()


def register_virtual(name):
    """Memory that has no IPC handle, as of expandable segments."""
    import logging

    from shmkv import driver
    cuda = driver.find()
    api = cuda._api
    prop = api.CUmemAllocationProp()
    prop.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    with cuda._current(0):
        memory = cuda._call("cuMemCreate", 2 << 20, prop, 0)
        address = cuda._call("cuMemAddressReserve", 2 << 20, 0, 0, 0)
        cuda._call("cuMemMap", address, 2 << 20, 0, memory, 0)
    host = cuda.host_alias(int(address))
    tensor = torch.frombuffer((ctypes.c_ubyte * N).from_address(host), dtype=torch.uint8)
    said = []
    logging.getLogger("shmkv").addFilter(lambda record: said.append(record.getMessage()) or True)
    with shmkv.attach(name, device_capacity="2MiB", device="cuda:0") as buffer:
        assert not buffer.register(tensor).in_place and "cudaMalloc" in buffer.register(tensor).reason
        assert len([text for text in said if "cannot be shared in place" in text]) == 1, said
        tensor.copy_(pattern(N))
        buffer.insert([1], {"x": tensor})
        tensor.zero_()
        with buffer.select([1]) as hit:
            assert hit["x"].equal(pattern(N)), "it was not copied"
        return buffer.released()


def test_what_cannot_be_shared_in_place_is_copied_and_said_once(kv_buffer, gpu_spawn):
    assert gpu_spawn(register_virtual, kv_buffer.name).result() == []


# ---------------------------------------------------------------- owners that do not answer, consumers that die

def ask(name, prefer, timeout):
    from shmkv import fetch
    fetch.FETCH_TIMEOUT_S = timeout
    with shmkv.attach(name, prefer=prefer) as buffer:
        started = time.monotonic()
        try:
            buffer.drop_select([1, 2, 3])
        except shmkv.ShmkvError as error:
            return type(error).__name__, time.monotonic() - started, str(error)
        return "found", time.monotonic() - started, ""


@pytest.mark.parametrize("prefer", ["staging", "nccl"])
def test_a_silent_owner_is_an_error_in_time_and_the_entry_stays(kv_buffer, gpu_spawn, gates, prefer):
    ready, done, *_ = gates
    producer = gpu_spawn(owner, kv_buffer.name, ready, done)
    ready.wait()
    producer.stop()
    try:
        error, seconds, text = gpu_spawn(ask, kv_buffer.name, prefer, 1.0).result()
    finally:
        producer.resume()
    assert (error, f"pid {producer.pid}" in text) == ("TimedOut", True) and seconds < 3
    eventually(lambda: kv_buffer.stats().entries["ready"] == 1)
    assert gpu_spawn(ask, kv_buffer.name, prefer, 10.0).result()[0] == "found"
    done.open()
    producer.result()
    assert kv_buffer.stats().used_bytes == 0


@pytest.mark.parametrize("prefer", ["staging", "nccl"])
def test_an_owner_that_dies_before_it_answers_is_an_error_soon(kv_buffer, gpu_spawn, gates, prefer):
    ready, done, *_ = gates
    producer = gpu_spawn(owner, kv_buffer.name, ready, done)
    ready.wait()
    producer.stop()
    consumer = gpu_spawn(ask, kv_buffer.name, prefer, 20.0)
    eventually(lambda: kv_buffer.stats().waiting["answer"] == 1)
    producer.kill()
    error, seconds, text = consumer.result()
    assert error == "TransportUnavailable" and "died" in text and seconds < 10
    assert kv_buffer.stats().used_bytes == 0 and kv_buffer.stats().regions == []


def owner_that_never_meets(name, ready, done):
    """It serves the request, and comes to the meeting place no more."""
    from shmkv import fetch

    def never(link, until_ns):
        Gate(ready.path + "serving").open()
        time.sleep(60)

    fetch.Link.connect = never
    return owner(name, ready, done)


def test_an_owner_that_dies_before_the_two_have_met_is_an_error_soon(kv_buffer, gpu_spawn, gates):
    ready, done, *_ = gates
    producer = gpu_spawn(owner_that_never_meets, kv_buffer.name, ready, done)
    ready.wait()
    consumer = gpu_spawn(ask, kv_buffer.name, "nccl", 40.0)
    Gate(ready.path + "serving").wait()
    producer.kill()
    error, seconds, _ = consumer.result()
    assert error == "TransportUnavailable" and seconds < 20, "it waited until the deadline"


@pytest.mark.parametrize("prefer", ["staging", "nccl"])
def test_a_consumer_that_dies_amid_being_served_leaves_nothing(kv_buffer, gpu_spawn, gates, prefer):
    ready, done, *_ = gates
    producer = gpu_spawn(owner, kv_buffer.name, ready, done)
    ready.wait()
    producer.stop()
    consumer = gpu_spawn(ask, kv_buffer.name, prefer, 20.0)
    eventually(lambda: kv_buffer.stats().waiting["answer"] == 1)
    consumer.kill()
    producer.resume()
    eventually(lambda: kv_buffer.stats().entries["ready"] == 1 and kv_buffer.stats().peers == 2)
    eventually(lambda: kv_buffer.stats().used_bytes == 0 and kv_buffer.stats().held_leases == 0, timeout=15)
    assert kv_buffer.problems() == []
    assert gpu_spawn(ask, kv_buffer.name, prefer, 10.0).result()[0] == "found"
    done.open()
    producer.result()


# ---------------------------------------------------------------- room in device memory

def crowd(name):
    """Waiting, evicting and refusing go by the arena that an entry is to lie in."""
    third = {"x": Spec((1 << 20,), torch.uint8, "cuda:0")}
    with shmkv.attach(name, device_capacity="4MiB", device="cuda:0") as buffer:
        buffer.insert([50], {"x": torch.ones(1 << 20)})
        for number in range(4):
            with buffer.reserve([number], third) as entry:
                entry["x"].fill_(number)
        del entry
        with pytest.raises(shmkv.ArenaFull, match="device_capacity"):
            buffer.reserve([9], third, on_full="error")
        with pytest.raises(shmkv.TimedOut):
            buffer.reserve([9], third, timeout=0.1)
        with buffer.reserve([9], third, on_full="evict") as entry:
            entry["x"].fill_(9)
        del entry
        stats = buffer.stats()
        assert stats.counters["evicted"] == 1 and buffer.select([50]), "an entry elsewhere was evicted in vain"
        assert not buffer.select([0], match="exact")
        assert stats.regions[0].used_bytes == 4 << 20 and buffer.problems() == []
        with buffer.select([9]) as hit:
            assert set(hit["x"].tolist()) == {9}


def test_room_is_a_matter_of_the_arena(kv_buffer, gpu_spawn):
    gpu_spawn(crowd, kv_buffer.name).result()


# ---------------------------------------------------------------- dtypes

def every_dtype(name, ready, done):
    with shmkv.attach(name, device_capacity="8MiB", device="cuda:0") as buffer:
        for number, dtype in enumerate(DTYPES):
            raw = pattern(24 * dtype.itemsize, number)
            if dtype == torch.bool:
                raw = raw & 1
            entry = buffer.reserve([0xFFFF], {"x": Spec((2, 3, 4), dtype, "cuda:0")})
            x = entry["x"]
            x.view(torch.uint8).flatten().copy_(raw) if dtype.itemsize == 1 else \
                x.flatten().view(torch.uint8).copy_(raw)
            buffer.insert([number], {"plain": x, "turned": x.transpose(0, 2), "strided": x[:, ::2], "none": x[:0]})
            del x
            entry.abort()
        ready.open()
        done.wait()


def check_dtypes(name):
    with shmkv.attach(name) as buffer:
        for number, dtype in enumerate(DTYPES):
            raw = pattern(24 * dtype.itemsize, number)
            if dtype == torch.bool:
                raw = raw & 1
            x = raw.view(dtype).view(2, 3, 4)
            with buffer.drop_select([number]) as hit:
                assert hit.transport == "cuda_ipc"
                assert same_bits(hit["plain"], x) and same_bits(hit["turned"], x.transpose(0, 2)), dtype
                assert same_bits(hit["strided"], x[:, ::2]) and same_bits(hit["none"], x[:0]), dtype


def test_every_dtype_shape_and_stride_is_bit_equal_over_cuda_ipc(kv_buffer, gpu_spawn, gates):
    ready, done, *_ = gates
    producer = gpu_spawn(every_dtype, kv_buffer.name, ready, done)
    ready.wait()
    gpu_spawn(check_dtypes, kv_buffer.name).result()
    done.open()
    producer.result()


# ---------------------------------------------------------------- forked children

def fork_with_a_view(name):
    with shmkv.attach(name) as buffer:
        hit = buffer.select([1, 2, 3])
        view = hit["key"]
        child = os.fork()
        if child == 0:
            del view
            hit = None
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert same_bits(view, BASE["key"]) and buffer.stats().held_leases == 1
        os.kill(os.getpid(), signal.SIGKILL) if hit is None else None


def test_a_forked_child_ends_nothing_of_its_parents_device_side(kv_buffer, gpu_spawn, gates):
    ready, done, *_ = gates
    producer = gpu_spawn(owner, kv_buffer.name, ready, done)
    ready.wait()
    gpu_spawn(fork_with_a_view, kv_buffer.name).result()
    done.open()
    producer.result()


# ---------------------------------------------------------------- one owner after the other

def outlive_two(name, held, first_gone, none_left, held_again, second_gone):
    with shmkv.attach(name) as buffer:
        buffer.select([1, 2, 3]).release()
        held.open()
        first_gone.wait()
        eventually(lambda: not buffer.stats().regions)
        eventually(lambda: not buffer._devices._openings)  # nothing is looked after now
        none_left.open()
        with buffer.select([1, 2, 3], timeout=20) as hit:
            key = hit["key"]
        held_again.open()
        second_gone.wait()
        eventually(lambda: [region.state for region in kept_regions(name)] == ["gone"])
        assert same_bits(key, BASE["key"])
        del key, hit
        gc.collect()
        eventually(lambda: not buffer.stats().regions)


def kept_regions(name):
    """As they are found by somebody who changes nothing."""
    from shmkv import inspector
    return [types.SimpleNamespace(**region) for region in inspector.look(name).regions()]


def test_the_second_owner_is_looked_after_like_the_first(kv_buffer, gpu_spawn, gates, tmp_path):
    ready, done, held, first_gone = gates
    more = [Gate(tmp_path / f"more{number}") for number in range(4)]
    ready_again, none_left, held_again, second_gone = more
    first = gpu_spawn(owner, kv_buffer.name, ready, done)
    ready.wait()
    consumer = gpu_spawn(outlive_two, kv_buffer.name, held, first_gone, none_left, held_again, second_gone)
    held.wait()
    first.kill()
    first_gone.open()
    none_left.wait()
    second = gpu_spawn(owner, kv_buffer.name, ready_again, done)
    held_again.wait()
    second.kill()
    second_gone.open()
    consumer.result()


def miss_the_dead(name, held, killed):
    with shmkv.attach(name) as buffer:
        view = buffer.select([1, 2, 3])["key"]
        held.open()
        killed.wait()
        miss = buffer.drop_select([1, 2, 3])
        assert not miss, "memory of a dead process was handed out"
        del view


@pytest.mark.parametrize("switches", [{}, {"EMUCUDA_IPC": "0"}])
def test_what_lay_with_the_dead_is_a_miss_at_once(kv_buffer, gpu_spawn, gates, switches):
    ready, done, held, killed = gates
    producer = gpu_spawn(owner, kv_buffer.name, ready, done)
    ready.wait()
    consumer = gpu_spawn(miss_the_dead, kv_buffer.name, held, killed, **switches)
    held.wait()
    producer.kill()
    killed.open()
    consumer.result()


# ---------------------------------------------------------------- exceptions in flight

def drop_views_amid_an_exception(name):
    with shmkv.attach(name) as buffer:
        for _ in range(20):
            with pytest.raises(ZeroDivisionError):
                print(buffer.select([1, 2, 3])["key"], 1 / 0)
        gc.collect()
        eventually(lambda: buffer.stats().held_leases == 0)


def test_an_exception_beside_the_last_view_is_only_that(kv_buffer, gpu_spawn, gates):
    ready, done, *_ = gates
    producer = gpu_spawn(owner, kv_buffer.name, ready, done)
    ready.wait()
    gpu_spawn(drop_views_amid_an_exception, kv_buffer.name).result()
    done.open()
    producer.result()
