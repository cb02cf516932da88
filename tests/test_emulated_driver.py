"""The emulated driver keeps the laws on which the tests of the device transports rest.

Each law is tried in child processes, which run the programs of this file (`python test_emulated_driver.py PROGRAM`) and
talk with the test by lines. No driver is ever loaded into the process of the tests.
"""

import ctypes
import functools
import json
import mmap
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from emulated_driver import build
from emulated_driver.conformance import (
    LAZY_PEER_ACCESS,
    NON_BLOCKING,
    SIZE,
    attribute,
    code,
    driver,
    enter,
    event_handle,
    get,
    mapped_memory,
    mem_handle,
    open_memory,
    put,
    raw,
    value,
)

TESTS = Path(__file__).resolve().parent
CONFORMANCE = TESTS / "emulated_driver" / "conformance.py"
CHILD_S = 30.0
HOLD_US = 3_600_000_000
EVENT_FLAGS = 2 | 4  # keeps no time, for other processes


# ---------------------------------------------------------------- children

@functools.cache
def environment() -> dict[str, str]:
    plain = {name: text for name, text in os.environ.items() if not name.startswith(("EMUCUDA_", "CUDA_"))}
    return plain | {"LD_LIBRARY_PATH": str(build.build()), "PYTHONPATH": str(TESTS)}


class Child:
    """A process that runs one program of this file; it is killed at the end, and after CHILD_S in any case."""

    def __init__(self, program, *arguments, **switches):
        self.name = program.__name__
        self.process = subprocess.Popen([sys.executable, __file__, self.name, *map(str, arguments)],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        env=environment() | switches)
        self.watchdog = threading.Timer(CHILD_S, self.process.kill)

    def __enter__(self):
        self.watchdog.start()
        return self

    def __exit__(self, *_):
        self.watchdog.cancel()
        self.process.kill()
        self.process.communicate()

    def say(self, text):
        self.process.stdin.write(f"{text}\n")
        self.process.stdin.flush()

    def hear(self):
        line = self.process.stdout.readline()
        assert line, f"{self.name} ended with status {self.process.wait()}"
        return json.loads(line)

    def ask(self, text):
        self.say(text)
        return self.hear()


def answer_of(program, *arguments, **switches):
    """What a program that needs no talk says."""
    with Child(program, *arguments, **switches) as child:
        return child.hear()


def say(answer):
    print(json.dumps(answer), flush=True)


def hear():
    return input()


def hook(name, result=ctypes.c_int, *arguments):
    function = getattr(ctypes.CDLL("libcuda.so.1"), name)
    function.restype, function.argtypes = result, arguments
    return function


def host_pointer(address):
    return hook("emucudaHostPointer", ctypes.c_void_p, ctypes.c_uint64)(address)


def device_pointer(host):
    return hook("emucudaDevicePointer", ctypes.c_uint64, ctypes.c_void_p)(host)


def set_delay(us):
    hook("emucudaSetDelay", None, ctypes.c_long)(us)


def calls(name):
    return hook("emucudaCalls", ctypes.c_ulonglong, ctypes.c_char_p)(name.encode())


def live():
    imports = ctypes.c_int()
    return [hook("emucudaLive", ctypes.c_int, ctypes.c_void_p)(ctypes.addressof(imports)), imports.value]


def allocate(data=b"", size=SIZE):
    address = int(value(driver.cuMemAlloc(size)))
    if data:
        put(address, data)
    return address


def memory_handle(address):
    return raw(value(driver.cuIpcGetMemHandle(address))).hex()


def mapped_files():
    """Of the files that hold memory of the device: where they are, without what makes their names unique."""
    maps = Path("/proc/self/maps").read_text().split()
    return sorted({word.rpartition("-")[0] or word for word in maps if "emucuda" in word or "/dev/shm" in word})


# ---------------------------------------------------------------- conformance

def test_the_emulated_driver_answers_as_documented(tmp_path):
    """Conformance: no answer differs from what documents and reports say."""
    answers = tmp_path / "answers.json"
    subprocess.run([sys.executable, CONFORMANCE, "--json", answers], env=environment(), timeout=60, capture_output=True)
    rows = json.loads(answers.read_text())
    assert [row for row in rows if row["verdict"] == "DIFF"] == []
    assert len(rows) >= 39 and sum(row["verdict"] == "OK" for row in rows) > 50


def test_conformance_sees_a_driver_that_differs():
    """Control: a driver that refuses IPC does not pass."""
    done = subprocess.run([sys.executable, CONFORMANCE], env=environment() | {"EMUCUDA_IPC": "0"}, timeout=60,
                          capture_output=True, text=True)
    assert done.returncode == 1 and "DIFF exporter: handle of an allocation -> NOT_SUPPORTED" in done.stdout


# ---------------------------------------------------------------- asynchrony

def producer():
    enter()
    memory, fresh = allocate(b"stale"), allocate(b"fresh")
    stream, event = value(driver.cuStreamCreate(NON_BLOCKING)), value(driver.cuEventCreate(EVENT_FLAGS))
    say([memory_handle(memory), raw(value(driver.cuIpcGetEventHandle(event))).hex()])
    hear()
    set_delay(HOLD_US)
    value(driver.cuMemcpyDtoDAsync(memory, fresh, 5, stream))
    value(driver.cuEventRecord(event, stream))
    say(code(driver.cuEventQuery(event)))
    hear()
    set_delay(0)
    value(driver.cuEventSynchronize(event))
    say(code(driver.cuEventQuery(event)))
    hear()


def consumer(memory, event):
    enter()
    address = int(value(open_memory(bytes.fromhex(memory))))
    event = value(driver.cuIpcOpenEventHandle(event_handle(bytes.fromhex(event))))
    pinned = int(value(driver.cuMemHostAlloc(4096, 0)))
    say("ready")
    hear()
    say([code(driver.cuEventQuery(event)), get(address, 5).decode()])
    stream = value(driver.cuStreamCreate(NON_BLOCKING))
    value(driver.cuStreamWaitEvent(stream, event, 0))
    value(driver.cuMemcpyDtoHAsync(pinned, address, 5, stream))
    say(code(driver.cuStreamQuery(stream)))
    hear()
    value(driver.cuStreamSynchronize(stream))
    say(ctypes.string_at(pinned, 5).decode())


def test_a_consumer_that_does_not_wait_reads_stale_bytes_and_one_that_waits_reads_fresh_ones():
    """Asynchrony: a copy that was queued is not done; the event that was recorded after it tells when it is."""
    with Child(producer) as left:
        with Child(consumer, *left.hear()) as right:
            assert right.hear() == "ready"
            assert left.ask("produce") == "NOT_READY"
            assert right.ask("look") == ["NOT_READY", "stale"]
            assert right.hear() == "NOT_READY"
            assert left.ask("let go") == "SUCCESS"
            assert right.ask("wait") == "fresh"


def delayed():
    enter()
    stream, memory = value(driver.cuStreamCreate(NON_BLOCKING)), allocate()
    began = time.monotonic()
    value(driver.cuMemsetD8Async(memory, 1, SIZE, stream))
    returned = time.monotonic() - began
    value(driver.cuStreamSynchronize(stream))
    say([returned, time.monotonic() - began])


def test_the_delay_falls_on_the_work_and_not_on_the_call():
    """EMUCUDA_DELAY_US: queuing returns at once, and the work takes that much longer."""
    returned, done = answer_of(delayed, EMUCUDA_DELAY_US="200000")
    assert returned < 0.2 <= done


def orders():
    enter()
    blocking, free = value(driver.cuStreamCreate(0)), value(driver.cuStreamCreate(NON_BLOCKING))
    memory, other, event = allocate(), allocate(), value(driver.cuEventCreate(2))
    set_delay(HOLD_US)
    value(driver.cuMemsetD8Async(memory, 1, 16, blocking))
    value(driver.cuEventRecord(event, 0))                       # the default stream, after the blocking one
    value(driver.cuStreamSynchronize(free))
    answers = [code(driver.cuEventQuery(event)), code(driver.cuStreamQuery(0)), code(driver.cuStreamQuery(free))]
    value(driver.cuMemcpyDtoD(other, memory, 16))               # returns although it is held
    value(driver.cuStreamDestroy(blocking))                     # does not wait, and loses no work
    set_delay(0)
    value(driver.cuStreamSynchronize(0))
    say([*answers, get(other, 16).hex()])


def test_the_default_stream_waits_for_blocking_streams_only_and_no_call_between_devices_waits():
    """Order of streams; cuMemcpyDtoD and cuStreamDestroy return before the work is done."""
    assert answer_of(orders) == ["NOT_READY", "NOT_READY", "SUCCESS", "01" * 16]


def forbidden():
    enter()
    memory, seen = allocate(), []
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: seen.append(code(driver.cuMemFree(memory))))
    value(driver.cuLaunchHostFunc(0, driver.CUhostFn(ctypes.cast(callback, ctypes.c_void_p).value), 0))
    value(driver.cuStreamSynchronize(0))
    say(seen)


def test_a_host_function_must_not_call_cuda():
    """cuLaunchHostFunc: calls from within are refused (documented as possible, not as certain)."""
    assert answer_of(forbidden) == ["NOT_PERMITTED"]


def masked():
    enter()
    allocate(b"work, so that the thread of the default stream is under way")
    tasks = [Path("/proc/self/task", task, "status").read_text() for task in os.listdir("/proc/self/task")]
    blocked = [int(text.split("SigBlk:")[1].split()[0], 16) for text in tasks]
    say(sorted(bool(mask >> (signal.SIGALRM - 1) & 1) for mask in blocked))


def test_signals_are_left_to_the_threads_of_the_program():
    """The threads of streams block all signals: a handler that should interrupt a wait finds the one who waits."""
    assert answer_of(masked) == [False, True]


# ---------------------------------------------------------------- memory and its ends

def exporter(ordinal=0):
    enter(int(ordinal))
    memory = allocate(b"here")
    say(memory_handle(memory))
    hear()
    files = mapped_files()
    value(driver.cuMemFree(memory))
    allocate(b"next")  # it takes the place, and the descriptor's number, of what was freed
    say([live(), files])
    hear()


def importer(handle, ordinal=0):
    enter(int(ordinal))
    result = open_memory(bytes.fromhex(handle))
    if code(result) != "SUCCESS":
        say(code(result))
        return
    address = int(result[1])
    say(get(address, 4).decode())
    hear()
    say([get(address, 4).hex(), code(open_memory(bytes.fromhex(handle)))])


def test_an_importer_reads_poison_after_the_exporter_freed_the_memory():
    """Freed memory never holds plausible old bytes; its handle opens nowhere, not even where it is mapped. A memfd has
    no name in /dev/shm, so nothing of it can be left there."""
    with Child(exporter) as left:
        with Child(importer, left.hear()) as right:
            assert right.hear() == "here"
            assert left.ask("free") == [[1, 0], ["/memfd:emucuda-mem"]]
            assert right.ask("look") == ["db" * 4, "INVALID_VALUE"]


def test_the_handle_of_a_killed_exporter_opens_nowhere():
    """SIGKILL: a new open fails, also while nobody has waited for the dead process."""
    with Child(exporter) as left:
        handle = left.hear()
        left.process.kill()
        os.waitid(os.P_PID, left.process.pid, os.WEXITED | os.WNOWAIT)
        assert answer_of(importer, handle) == "INVALID_VALUE"
        left.process.wait()
        assert answer_of(importer, handle) == "INVALID_VALUE"


def touch():
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    enter()
    memory = allocate(b"x")
    say(ctypes.string_at(host_pointer(memory), 1).decode())
    ctypes.string_at(memory, 1)


def test_the_cpu_cannot_touch_a_device_address():
    """A device address that is taken for a host address ends the process with SIGSEGV, as with a GPU."""
    with Child(touch) as child:
        assert child.hear() == "x"
        assert child.process.wait(CHILD_S) == -signal.SIGSEGV


def refused():
    enter()
    memory, _ = mapped_memory(SIZE)
    say([bool(value(attribute("IS_LEGACY_CUDA_IPC_CAPABLE", memory))), code(driver.cuIpcGetMemHandle(memory))])


def test_memory_of_cumemmap_cannot_be_exported():
    """VMM: not capable of legacy IPC, and no handle."""
    assert answer_of(refused) == [False, "INVALID_VALUE"]


def without_ipc():
    enter()
    memory, event, nothing = allocate(b"x"), value(driver.cuEventCreate(EVENT_FLAGS)), bytes(64)
    say([bool(value(attribute("IS_LEGACY_CUDA_IPC_CAPABLE", memory))),
         *map(code, [driver.cuIpcGetMemHandle(memory), driver.cuIpcGetEventHandle(event), open_memory(nothing),
                     driver.cuIpcOpenEventHandle(event_handle(nothing)), driver.cuIpcCloseMemHandle(memory)]),
         get(memory, 1).decode()])


def test_a_device_may_refuse_ipc():
    """EMUCUDA_IPC=0: every call of cuIpc* answers NOT_SUPPORTED; memory says so of itself, and else is as ever."""
    assert answer_of(without_ipc, EMUCUDA_IPC="0") == [False, *["NOT_SUPPORTED"] * 5, "x"]


def registered():
    enter()
    memory = allocate(b"through the file")
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(1 << 20)
        with mmap.mmap(file.fileno(), 1 << 20) as view:
            cell = ctypes.c_char.from_buffer(view)
            stretch = ctypes.addressof(cell) + 8192
            value(driver.cuMemHostRegister(stretch, 65536, 0))
            overlap = code(driver.cuMemHostRegister(stretch - 4096, 8192, 0))
            across = code(driver.cuMemcpyDtoH(stretch - 8, memory, 16))
            past = code(driver.cuMemcpyDtoH(stretch, memory + SIZE - 8, 16))
            set_delay(HOLD_US)
            value(driver.cuMemcpyDtoHAsync(stretch + 16, memory, 16, 0))
            held = os.pread(file.fileno(), 16, 8192 + 16)
            set_delay(0)
            value(driver.cuStreamSynchronize(0))
            done = os.pread(file.fileno(), 16, 8192 + 16)
            say([overlap, across, past, held.hex(), done.decode(), device_pointer(stretch),
                 code(driver.cuMemHostUnregister(stretch)), code(driver.cuMemHostUnregister(stretch))])
            del cell


def test_a_stretch_of_a_shared_file_can_be_registered_and_then_takes_asynchronous_copies():
    """Pinned staging: copies through it are asynchronous; a copy across an edge and a second registration fail."""
    assert answer_of(registered) == ["HOST_MEMORY_ALREADY_REGISTERED", "INVALID_VALUE", "INVALID_VALUE", "00" * 16,
                                     "through the file", 0, "SUCCESS", "HOST_MEMORY_NOT_REGISTERED"]


def crowd(handle):
    context, failures = enter(), []

    def rounds(number):
        try:
            value(driver.cuCtxSetCurrent(context))
            for _ in range(40):
                stream, event = value(driver.cuStreamCreate(number % 2)), value(driver.cuEventCreate(2))
                imported = int(value(open_memory(bytes.fromhex(handle))))
                memory = allocate(bytes([number]) * 8, size=65536)
                value(driver.cuMemcpyDtoDAsync(memory + 64, memory, 8, stream))
                value(driver.cuEventRecord(event, stream))
                value(driver.cuStreamDestroy(stream))
                value(driver.cuEventSynchronize(event))
                if get(memory + 64, 8) != bytes([number]) * 8 or get(imported, 4) != b"here":
                    failures.append("wrong bytes")
                value(driver.cuEventDestroy(event))
                value(driver.cuIpcCloseMemHandle(imported))
                value(driver.cuMemFree(memory))
        except Exception as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=rounds, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        assert forked() == ["NOT_INITIALIZED"] * 3 + [0, None]
    for thread in threads:
        thread.join()
    say([failures, live(), value(driver.cuMemGetInfo())[0] == value(driver.cuMemGetInfo())[1]])


def forked():
    """What a child of fork() is told, whatever lock a thread held at that moment."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(10)
        answers = [code(driver.cuInit(0)), code(driver.cuMemAlloc(64)), code(driver.cuCtxSynchronize())]
        os.write(writer, json.dumps([*answers, device_pointer(writer), host_pointer(4096)]).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return json.loads(answer or "[]")


def test_threads_do_not_disturb_each_other_and_a_fork_amid_them_is_told_no():
    """Eight threads allocate, copy, open, wait and free; a child of fork() gets NOT_INITIALIZED, never a hang."""
    with Child(exporter) as left:
        assert answer_of(crowd, left.hear()) == [[], [0, 0], True]


def freed_twice():
    context = enter()
    memory, stream, results = allocate(), value(driver.cuStreamCreate(NON_BLOCKING)), []
    set_delay(HOLD_US)
    value(driver.cuMemsetD8Async(memory, 1, 16, stream))

    def free():
        value(driver.cuCtxSetCurrent(context))
        results.append(code(driver.cuMemFree(memory)))

    threads = [threading.Thread(target=free) for _ in range(2)]
    for thread in threads:
        thread.start()
    while not results:  # one waits for the work, the other is refused
        time.sleep(0.001)
    first = list(results)
    set_delay(0)
    for thread in threads:
        thread.join()
    say([first, results])


def test_memory_is_freed_once_after_the_work_on_it():
    """cuMemFree waits for the work of the context; a second one meanwhile finds nothing."""
    assert answer_of(freed_twice) == [["INVALID_VALUE"], ["INVALID_VALUE", "SUCCESS"]]


def released():
    enter()
    allocate()
    stream, event = value(driver.cuStreamCreate(NON_BLOCKING)), value(driver.cuEventCreate(2))
    value(driver.cuDevicePrimaryCtxRelease(0))
    after = [live(), code(driver.cuMemAlloc(SIZE)), code(driver.cuEventQuery(event))]
    enter()
    free, total = value(driver.cuMemGetInfo())
    say([*after, code(driver.cuStreamQuery(stream)), free == total])


def test_a_context_takes_all_that_is_its_own_along():
    """The last release of a primary context ends its memory, events and streams; the next one begins empty."""
    assert answer_of(released) == [[0, 0], "CONTEXT_IS_DESTROYED", "INVALID_HANDLE", "INVALID_HANDLE", True]


# ---------------------------------------------------------------- devices

def uuids():
    if int(driver.cuInit(0)[0]):
        say(code(driver.cuInit(0)))
        return
    n = value(driver.cuDeviceGetCount())
    say([bytes(value(driver.cuDeviceGetUuid(ordinal)).bytes).hex() for ordinal in range(n)])


def test_cuda_visible_devices_hides_and_reorders_devices_by_uuid_and_ordinal():
    """A UUID stays with its device; the list ends at its first senseless entry."""
    first, second, third = answer_of(uuids, EMUCUDA_DEVICES="3")

    def visible(entries):
        return answer_of(uuids, EMUCUDA_DEVICES="3", CUDA_VISIBLE_DEVICES=entries)

    dashed = "-".join([third[:8], third[8:12], third[12:16], third[16:20], third[20:]])
    assert visible(f"GPU-{dashed},0,9,1") == [third, first]
    assert visible(f"GPU-{second[:2]}") == [second]
    assert visible("GPU-") == visible("") == "NO_DEVICE"


def test_memory_is_opened_under_another_ordinal_of_the_same_device():
    """Identity is the UUID: exported from ordinal 1, opened as ordinal 0 by a process that sees only that one."""
    with Child(exporter, 1, EMUCUDA_DEVICES="2") as left:
        handle = left.hear()
        alone = {"EMUCUDA_DEVICES": "2", "EMUCUDA_P2P": "0", "CUDA_VISIBLE_DEVICES": "1"}
        assert answer_of(importer, handle, 0, **alone) == "here"


def peers(handle):
    value(driver.cuInit(0))
    zero = value(driver.cuDevicePrimaryCtxRetain(0))
    enter(1)
    say([value(driver.cuDeviceCanAccessPeer(1, 0)), code(open_memory(bytes.fromhex(handle))),
         *(code(driver.cuCtxEnablePeerAccess(zero, 0)) for _ in range(2)), code(driver.cuCtxDisablePeerAccess(zero))])


def test_without_peer_access_memory_of_another_device_is_not_opened():
    """EMUCUDA_P2P=0: PEER_ACCESS_UNSUPPORTED (217). With it, an open gives the access that else is to be enabled."""
    no, on = "PEER_ACCESS_UNSUPPORTED", "PEER_ACCESS_ALREADY_ENABLED"
    with Child(exporter, EMUCUDA_DEVICES="2") as left:
        handle = left.hear()
        assert answer_of(peers, handle, EMUCUDA_DEVICES="2", EMUCUDA_P2P="0") == [
            0, no, no, no, "PEER_ACCESS_NOT_ENABLED"]
        assert answer_of(peers, handle, EMUCUDA_DEVICES="2") == [1, "SUCCESS", on, on, "SUCCESS"]


def staged():
    enter(1)
    far = allocate()
    one = value(driver.cuCtxGetCurrent())
    zero = enter(0)
    near = allocate(b"across")
    value(driver.cuMemcpyPeerAsync(far, one, near, zero, 6, 0))
    value(driver.cuStreamSynchronize(0))
    say(get(far, 6).decode())


def test_bytes_go_from_device_to_device():
    """cuMemcpyPeerAsync needs no peer access."""
    assert answer_of(staged, EMUCUDA_DEVICES="2", EMUCUDA_P2P="0") == "across"


# ---------------------------------------------------------------- hooks

def pointers(handle):
    enter()
    imported, own = int(value(open_memory(bytes.fromhex(handle)))), allocate()
    there_and_back = [device_pointer(host_pointer(address + 4099)) - address for address in (own, imported)]
    seen = ctypes.string_at(host_pointer(imported), 4).decode()
    foreign = ctypes.create_string_buffer(8)
    past = device_pointer(host_pointer(own + SIZE - 1) + 1)
    alias = host_pointer(own)
    value(driver.cuMemFree(own))
    say([there_and_back, seen, past == own + SIZE, device_pointer(alias), device_pointer(ctypes.addressof(foreign)),
         host_pointer(own)])


def test_a_device_address_has_a_host_alias_that_leads_back_to_it():
    """emucudaHostPointer and emucudaDevicePointer are each other's reverse, for imports too; 0 where nothing lives."""
    with Child(exporter) as left:
        assert answer_of(pointers, left.hear()) == [[4099, 4099], "here", False, 0, 0, None]


def counted(handle):
    enter()
    for _ in range(3):
        memory = int(value(open_memory(bytes.fromhex(handle))))
    driver.cuIpcOpenMemHandle(mem_handle(bytes(64)), LAZY_PEER_ACCESS)
    value(driver.cuIpcCloseMemHandle(memory))
    value(driver.cuMemFree(allocate()))
    allocate()
    names = ["cuIpcOpenMemHandle", "cuIpcCloseMemHandle", "cuMemAlloc", "cuMemFree", "cuMemcpy"]
    say([[calls(name) for name in names], live()])


def test_calls_are_counted_and_live_memory_too():
    """emucudaCalls counts calls that failed as well, and knows which it does not count; emucudaLive counts memory."""
    with Child(exporter) as left:
        assert answer_of(counted, left.hear()) == [[4, 1, 2, 1, 2**64 - 1], [1, 1]]


def opened(handle):
    enter()
    began = time.monotonic()
    value(open_memory(bytes.fromhex(handle)))
    say(time.monotonic() - began)


def test_an_open_may_take_long():
    """EMUCUDA_OPEN_DELAY_US: cuIpcOpenMemHandle takes that long, as on hardware."""
    with Child(exporter) as left:
        assert answer_of(opened, left.hear(), EMUCUDA_OPEN_DELAY_US="200000") >= 0.2


# ---------------------------------------------------------------- building

def test_concurrent_builds_share_one_library_and_a_missing_compiler_is_named(tmp_path, monkeypatch):
    """A build is atomic and private to the user; without gcc it fails, and says what to install."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folders = []
    builders = [threading.Thread(target=lambda: folders.append(build.build())) for _ in range(2)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert len(set(folders)) == 1 and os.listdir(folders[0]) == ["libcuda.so.1"]
    assert folders[0].parent == tmp_path and folders[0].stat().st_mode & 0o777 == 0o700

    folders[0].chmod(0o755)
    assert "not a folder of this user alone" in refusal()
    (folders[0] / "libcuda.so.1").unlink()
    folders[0].chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "install gcc" in refusal()


def refusal():
    try:
        return f"built in {build.build()}"
    except build.BuildFailed as error:
        return str(error)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
