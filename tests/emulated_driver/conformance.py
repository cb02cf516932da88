"""Questions about sharing device memory between processes, put to whatever driver this machine has.

    python conformance.py [--json FILE]                              a real driver
    LD_LIBRARY_PATH=<folder of build.py> python conformance.py       the emulated driver

Each question has the answer that is documented, or that others reported; the emulated driver gives that one. OK: this
driver gives it too. DIFF: it does not, and the emulated driver has to learn. REC: nobody documents it, it is recorded.

The questions are asked in the order they stand here, each in the process of its role. A role's process starts with its
first question; what it found out lies in `me`, and what others must know (handles, as hex) in `me.mail`.

Needs Python and cuda-bindings 12.9 to 13.5, nothing else of this project.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

try:
    from cuda.bindings import driver
except ImportError:  # the questions can be counted without it
    driver = None

SECONDS_PER_ANSWER = 60.0
UNDOCUMENTED = None
MIB = 1 << 20
SIZE, OFFSET = 8 * MIB, 3 * MIB
NON_BLOCKING = 1                                  # flag of a stream
TIMING_OFF, INTERPROCESS = 2, 4                   # flags of an event
LAZY_PEER_ACCESS = 1                              # flag of an open


@dataclass(frozen=True)
class Question:
    role: str
    text: str
    want: object
    ask: Callable[[SimpleNamespace], object]


@dataclass(frozen=True)
class Answer:
    role: str
    question: str
    want: object
    got: object

    @property
    def verdict(self) -> str:
        return "REC" if self.want is UNDOCUMENTED else "OK" if self.got == self.want else "DIFF"

    def __str__(self) -> str:
        expected = f" (expected: {self.want})" if self.verdict == "DIFF" else ""
        return f"{self.verdict:<4} {self.role}: {self.question} -> {self.got}{expected}"


QUESTIONS: list[Question] = []


def question(role: str, text: str, want: object) -> Callable[[Callable], Callable]:
    def add(ask: Callable) -> Callable:
        QUESTIONS.append(Question(role, text, want, ask))
        return ask
    return add


# ---------------------------------------------------------------- the driver, in any version of cuda-bindings

def code(result: tuple) -> str:
    """The name of a call's result: SUCCESS, INVALID_VALUE, ..."""
    try:
        return driver.CUresult(result[0]).name.removeprefix("CUDA_").removeprefix("ERROR_")
    except ValueError:
        return f"error {int(result[0])}"


def value(result: tuple) -> object:
    """What a call returned besides its result, which must be success."""
    if int(result[0]):
        raise RuntimeError(code(result))
    return None if len(result) == 1 else result[1] if len(result) == 2 else result[1:]


def raw(handle: object) -> bytes:
    return ctypes.string_at(handle.getPtr(), 64)


def mem_handle(data: bytes) -> object:
    return _filled(driver.CUipcMemHandle(), data)


def event_handle(data: bytes) -> object:
    return _filled(driver.CUipcEventHandle(), data)


def _filled(handle: object, data: bytes) -> object:
    ctypes.memmove(handle.getPtr(), data, 64)
    return handle


def enter(ordinal: int = 0) -> object:
    """Initialise, and make the primary context of this device current."""
    value(driver.cuInit(0))
    context = value(driver.cuDevicePrimaryCtxRetain(value(driver.cuDeviceGet(ordinal))))
    value(driver.cuCtxSetCurrent(context))
    return context


def new_context() -> object:
    if int(driver.CUDA_VERSION) >= 13000:
        return value(driver.cuCtxCreate(None, 0, 0))
    return value(driver.cuCtxCreate(0, 0))


def put(address: int, data: bytes) -> None:
    value(driver.cuMemcpyHtoD(address, data, len(data)))


def get(address: int, size: int) -> bytes:
    data = bytearray(size)
    value(driver.cuMemcpyDtoH(data, address, size))
    return bytes(data)


def attribute(name: str, address: int) -> tuple:
    return driver.cuPointerGetAttribute(getattr(driver.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}"), address)


def open_memory(data: bytes, flags: int = LAZY_PEER_ACCESS) -> tuple:
    return driver.cuIpcOpenMemHandle(mem_handle(data), flags)


def exported(me: SimpleNamespace, name: str, result: tuple) -> str:
    if code(result) == "SUCCESS":
        me.mail[name] = raw(result[1]).hex()
    return code(result)


def opened(me: SimpleNamespace, name: str) -> int:
    address = int(value(open_memory(bytes.fromhex(me.mail[name]))))
    me.opens = getattr(me, "opens", 0) + 1
    return address


def mapped_memory(size: int) -> tuple[int, Callable[[], None]]:
    """Device memory by cuMemCreate and cuMemMap, as engines with growing or sleeping memory have it."""
    kind = driver.CUmemAllocationProp()
    kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    kind.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    kind.location.id = 0
    rights = driver.CUmemAccessDesc()
    rights.location.type, rights.location.id = kind.location.type, 0
    rights.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    smallest = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    granularity = int(value(driver.cuMemGetAllocationGranularity(kind, smallest)))
    size = (size + granularity - 1) // granularity * granularity
    physical = value(driver.cuMemCreate(size, kind, 0))
    address = int(value(driver.cuMemAddressReserve(size, 0, 0, 0)))
    value(driver.cuMemMap(address, size, 0, physical, 0))
    value(driver.cuMemSetAccess(address, size, [rights], 1))

    def free() -> None:
        value(driver.cuMemUnmap(address, size))
        value(driver.cuMemRelease(physical))
        value(driver.cuMemAddressFree(address, size))
    return address, free


# ---------------------------------------------------------------- the exporter begins

@question("exporter", "a call before cuInit", "NOT_INITIALIZED")
def _(me):
    return code(driver.cuDeviceGetCount())


@question("exporter", "version of the driver", UNDOCUMENTED)
def _(me):
    value(driver.cuInit(0))
    return int(value(driver.cuDriverGetVersion()))


@question("exporter", "name of device 0", UNDOCUMENTED)
def _(me):
    return value(driver.cuDeviceGetName(80, 0)).split(b"\0")[0].decode()


@question("exporter", "length of a UUID, and whether it has a byte that is not 0", [16, True])
def _(me):
    uuid = bytes(value(driver.cuDeviceGetUuid(0)).bytes)
    return [len(uuid), any(uuid)]


@question("exporter", "an allocation without a context", "INVALID_CONTEXT")
def _(me):
    return code(driver.cuMemAlloc(4096))


@question("exporter", "a pop from an empty stack of contexts", "INVALID_CONTEXT")
def _(me):
    return code(driver.cuCtxPopCurrent())


@question("exporter", "primary context: retained, pushed, popped", True)
def _(me):
    me.context = value(driver.cuDevicePrimaryCtxRetain(0))
    value(driver.cuCtxPushCurrent(me.context))
    popped = value(driver.cuCtxPopCurrent())
    value(driver.cuCtxSetCurrent(me.context))
    return int(popped) == int(me.context)


@question("exporter", "a device can access itself as a peer", 0)
def _(me):
    return int(value(driver.cuDeviceCanAccessPeer(0, 0)))


@question("exporter", "free and total memory: 0 < free <= total", True)
def _(me):
    free, total = value(driver.cuMemGetInfo())
    return 0 < free <= total


@question("exporter", "an allocation's base and size, asked at an interior address", [True, SIZE])
def _(me):
    me.memory = int(value(driver.cuMemAlloc(SIZE)))
    put(me.memory + OFFSET, b"from the exporter")
    base, size = value(driver.cuMemGetAddressRange(me.memory + OFFSET))
    return [int(base) == me.memory, int(size)]


@question("exporter", "the range of a small allocation begins at its address", True)
def _(me):
    me.small = int(value(driver.cuMemAlloc(4096)))
    base, me.small_range = value(driver.cuMemGetAddressRange(me.small + 8))
    return int(base) == me.small


@question("exporter", "size of the range of an allocation of 4096 bytes", UNDOCUMENTED)
def _(me):
    return int(me.small_range)


@question("exporter", "memory type, and ordinal of the device, of an allocation", [2, 0])
def _(me):
    return [int(value(attribute(name, me.memory))) for name in ("MEMORY_TYPE", "DEVICE_ORDINAL")]


@question("exporter", "context of an allocation is the one that was current", True)
def _(me):
    return int(value(attribute("CONTEXT", me.memory))) == int(me.context)


@question("exporter", "allocation: IS_LEGACY_CUDA_IPC_CAPABLE", True)
def _(me):
    return bool(value(attribute("IS_LEGACY_CUDA_IPC_CAPABLE", me.memory)))


@question("exporter", "an address allocated anew has a new BUFFER_ID", True)
def _(me):
    before = int(value(attribute("BUFFER_ID", me.small)))
    value(driver.cuMemFree(me.small))
    again = int(value(driver.cuMemAlloc(4096)))
    after = int(value(attribute("BUFFER_ID", again)))
    value(driver.cuMemFree(again))
    return before != after


@question("exporter", "attribute of an address that CUDA does not know", "INVALID_VALUE")
def _(me):
    return code(attribute("DEVICE_ORDINAL", ctypes.addressof(ctypes.create_string_buffer(64))))


# ---------------------------------------------------------------- exporting

@question("exporter", "handle of an allocation", "SUCCESS")
def _(me):
    return exported(me, "memory", driver.cuIpcGetMemHandle(me.memory))


@question("exporter", "handle taken at an interior address", "SUCCESS")
def _(me):
    return exported(me, "interior", driver.cuIpcGetMemHandle(me.memory + OFFSET))


@question("exporter", "the same allocation gives the same handle again", UNDOCUMENTED)
def _(me):
    return raw(value(driver.cuIpcGetMemHandle(me.memory))).hex() == me.mail["memory"]


@question("exporter", "handles taken at the base and inside are equal", UNDOCUMENTED)
def _(me):
    return me.mail["interior"] == me.mail["memory"]


@question("exporter", "open one's own memory", "INVALID_CONTEXT")
def _(me):
    return code(open_memory(bytes.fromhex(me.mail["memory"])))


@question("exporter", "close one's own memory", "INVALID_VALUE")
def _(me):
    return code(driver.cuIpcCloseMemHandle(me.memory))


@question("exporter", "handle of freed memory", "INVALID_VALUE")
def _(me):
    freed = int(value(driver.cuMemAlloc(SIZE)))
    value(driver.cuMemFree(freed))
    return code(driver.cuIpcGetMemHandle(freed))


@question("exporter", "handle of pinned host memory", "INVALID_VALUE")
def _(me):
    host = int(value(driver.cuMemHostAlloc(4096, 0)))
    result = code(driver.cuIpcGetMemHandle(host))
    value(driver.cuMemFreeHost(host))
    return result


@question("exporter", "memory of cuMemMap: can be copied to and from", True)
def _(me):
    me.mapped, me.free_mapped = mapped_memory(SIZE)
    put(me.mapped + OFFSET, b"mapped")
    return get(me.mapped + OFFSET, 6) == b"mapped"


@question("exporter", "memory of cuMemMap: IS_LEGACY_CUDA_IPC_CAPABLE", False)
def _(me):
    return bool(value(attribute("IS_LEGACY_CUDA_IPC_CAPABLE", me.mapped)))


@question("exporter", "handle of memory of cuMemMap", "INVALID_VALUE")
def _(me):
    result = code(driver.cuIpcGetMemHandle(me.mapped))
    me.free_mapped()
    return result


@question("exporter", "event for other processes that keeps time", "INVALID_VALUE")
def _(me):
    return code(driver.cuEventCreate(INTERPROCESS))


@question("exporter", "handle of an event that is not for other processes", "INVALID_HANDLE")
def _(me):
    return code(driver.cuIpcGetEventHandle(value(driver.cuEventCreate(TIMING_OFF))))


@question("exporter", "handle of an event for other processes", "SUCCESS")
def _(me):
    me.event = value(driver.cuEventCreate(TIMING_OFF | INTERPROCESS))
    return exported(me, "event", driver.cuIpcGetEventHandle(me.event))


@question("exporter", "open one's own event", "INVALID_CONTEXT")
def _(me):
    return code(driver.cuIpcOpenEventHandle(event_handle(bytes.fromhex(me.mail["event"]))))


@question("exporter", "an event that was never recorded is complete", "SUCCESS")
def _(me):
    return code(driver.cuEventQuery(me.event))


# ---------------------------------------------------------------- streams and host memory

@question("exporter", "a stretch in the middle of a mapped file in shared memory can be registered", "SUCCESS")
def _(me):
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(MIB)
        me.file = mmap.mmap(file.fileno(), MIB)
    me.stretch = ctypes.addressof(ctypes.c_char.from_buffer(me.file)) + 65536
    return code(driver.cuMemHostRegister(me.stretch, 131072, 0))


@question("exporter", "register it again", "HOST_MEMORY_ALREADY_REGISTERED")
def _(me):
    return code(driver.cuMemHostRegister(me.stretch, 131072, 0))


@question("exporter", "memory type of registered memory", 1)
def _(me):
    return int(value(attribute("MEMORY_TYPE", me.stretch)))


@question("exporter", "handle of registered memory", "INVALID_VALUE")
def _(me):
    return code(driver.cuIpcGetMemHandle(me.stretch))


@question("exporter", "asynchronous copies through registered memory, in the order of their stream", True)
def _(me):
    me.stream = value(driver.cuStreamCreate(NON_BLOCKING))
    me.file[65536:65536 + 6] = b"staged"
    value(driver.cuMemcpyHtoDAsync(me.memory, me.stretch, 6, me.stream))
    value(driver.cuMemcpyDtoDAsync(me.memory + MIB, me.memory, 6, me.stream))
    value(driver.cuMemcpyDtoHAsync(me.stretch + 4096, me.memory + MIB, 6, me.stream))
    value(driver.cuStreamSynchronize(me.stream))
    return me.file[65536 + 4096:65536 + 4102] == b"staged"


@question("exporter", "a host function runs after the work before it", True)
def _(me):
    seen = []
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: seen.append(me.file[65536:65536 + 4]))
    value(driver.cuMemsetD8Async(me.memory, ord("z"), 4, me.stream))
    value(driver.cuMemcpyDtoHAsync(me.stretch, me.memory, 4, me.stream))
    value(driver.cuLaunchHostFunc(me.stream, driver.CUhostFn(ctypes.cast(callback, ctypes.c_void_p).value), 0))
    value(driver.cuStreamSynchronize(me.stream))
    return seen == [b"zzzz"]


@question("exporter", "unregister it, and once more", ["SUCCESS", "HOST_MEMORY_NOT_REGISTERED"])
def _(me):
    return [code(driver.cuMemHostUnregister(me.stretch)) for _ in range(2)]


@question("exporter", "an event on a stream without work completes", "SUCCESS")
def _(me):
    event = value(driver.cuEventCreate(TIMING_OFF))
    value(driver.cuEventRecord(event, me.stream))
    value(driver.cuEventSynchronize(event))
    return code(driver.cuEventQuery(event))


@question("exporter", "record an event for other processes after work on a stream", "SUCCESS")
def _(me):
    value(driver.cuMemsetD8Async(me.memory, 1, MIB, me.stream))
    return code(driver.cuEventRecord(me.event, me.stream))


@question("exporter", "after fork(): cuInit and cuMemAlloc in the child", ["NOT_INITIALIZED", "NOT_INITIALIZED"])
def _(me):
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.write(writer, json.dumps([code(driver.cuInit(0)), code(driver.cuMemAlloc(4096))]).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answers:
        answer = answers.read()
    os.waitpid(child, 0)
    return json.loads(answer or '"no answer"')


# ---------------------------------------------------------------- importing

@question("importer", "open before cuInit", "NOT_INITIALIZED")
def _(me):
    return code(open_memory(bytes(64)))


@question("importer", "open without a context", "INVALID_CONTEXT")
def _(me):
    value(driver.cuInit(0))
    return code(open_memory(bytes.fromhex(me.mail["memory"])))


@question("importer", "open 64 zeros", "INVALID_VALUE")
def _(me):
    me.context = enter()
    return code(open_memory(bytes(64)))


@question("importer", "open without the flag for lazy peer access", "INVALID_VALUE")
def _(me):
    return code(open_memory(bytes.fromhex(me.mail["memory"]), flags=0))


@question("importer", "milliseconds of the first open", UNDOCUMENTED)
def _(me):
    began = time.perf_counter()
    me.memory = opened(me, "memory")
    return round((time.perf_counter() - began) * 1e3, 3)


@question("importer", "a second open in the same context gives the same address", True)
def _(me):
    return opened(me, "memory") == me.memory


@question("importer", "a handle taken at an interior address opens at the base", True)
def _(me):
    return opened(me, "interior") == me.memory


@question("importer", "what the exporter wrote is there", "from the exporter")
def _(me):
    return get(me.memory + OFFSET, 17).decode(errors="replace")


@question("importer", "the import's base and size, asked at an interior address", [True, SIZE])
def _(me):
    base, size = value(driver.cuMemGetAddressRange(me.memory + OFFSET))
    return [int(base) == me.memory, int(size)]


@question("importer", "memory type, and ordinal of the device, of an import", [2, 0])
def _(me):
    return [int(value(attribute(name, me.memory))) for name in ("MEMORY_TYPE", "DEVICE_ORDINAL")]


@question("importer", "import: IS_LEGACY_CUDA_IPC_CAPABLE", UNDOCUMENTED)
def _(me):
    return bool(value(attribute("IS_LEGACY_CUDA_IPC_CAPABLE", me.memory)))


@question("importer", "export an import", "INVALID_VALUE")
def _(me):
    return code(driver.cuIpcGetMemHandle(me.memory))


@question("importer", "free an import", "INVALID_VALUE")
def _(me):
    return code(driver.cuMemFree(me.memory))


@question("importer", "open in a second context of the device", "INVALID_HANDLE")
def _(me):
    second = new_context()
    try:
        return code(open_memory(bytes.fromhex(me.mail["memory"])))
    finally:
        value(driver.cuCtxDestroy(second))
        value(driver.cuCtxSetCurrent(me.context))


@question("importer", "open an event", "SUCCESS")
def _(me):
    me.event = value(driver.cuIpcOpenEventHandle(event_handle(bytes.fromhex(me.mail["event"]))))
    return "SUCCESS"


@question("importer", "export an imported event", "INVALID_HANDLE")
def _(me):
    return code(driver.cuIpcGetEventHandle(me.event))


@question("importer", "a stream waits for the imported event, which then is complete", "SUCCESS")
def _(me):
    stream = value(driver.cuStreamCreate(NON_BLOCKING))
    value(driver.cuStreamWaitEvent(stream, me.event, 0))
    value(driver.cuStreamSynchronize(stream))
    return code(driver.cuEventQuery(me.event))


@question("importer", "after that event, the exporter's work is seen", True)
def _(me):
    return get(me.memory, MIB) == b"\1" * MIB


@question("importer", "write into it, close it as often as it was opened, and once more", ["SUCCESS", "INVALID_VALUE"])
def _(me):
    put(me.memory + OFFSET, b"from the importer")
    for _ in range(me.opens - 1):
        value(driver.cuIpcCloseMemHandle(me.memory))
    return [code(driver.cuIpcCloseMemHandle(me.memory)) for _ in range(2)]


@question("importer", "attribute of an address that was closed", "INVALID_VALUE")
def _(me):
    return code(attribute("DEVICE_ORDINAL", me.memory))


@question("importer", "what it wrote is there after the last close and another open", "from the importer")
def _(me):
    me.memory = opened(me, "memory")
    return get(me.memory + OFFSET, 17).decode(errors="replace")


@question("exporter", "what the importer wrote is there", "from the importer")
def _(me):
    return get(me.memory + OFFSET, 17).decode(errors="replace")


# ---------------------------------------------------------------- ends

@question("doomed", "handle of an allocation", "SUCCESS")
def _(me):
    enter()
    memory = int(value(driver.cuMemAlloc(SIZE)))
    put(memory, b"doomed")
    return exported(me, "doomed", driver.cuIpcGetMemHandle(memory))


@question("heir", "what it wrote is there", "doomed")
def _(me):
    enter()
    me.memory = opened(me, "doomed")
    return get(me.memory, 6).decode(errors="replace")


@question("doomed", "the exporter is killed", "ended by SIGKILL")
def _(me):
    os.kill(os.getpid(), signal.SIGKILL)


@question("exporter", "free memory that another process has opened", "SUCCESS")
def _(me):
    return code(driver.cuMemFree(me.memory))


@question("importer", "read a mapping after the exporter freed it", UNDOCUMENTED)
def _(me):
    data = bytearray(4)
    return [code(driver.cuMemcpyDtoH(data, me.memory, 4)), data.hex()]


@question("importer", "close a mapping after the exporter freed it", UNDOCUMENTED)
def _(me):
    return code(driver.cuIpcCloseMemHandle(me.memory))


@question("heir", "read a mapping after the exporter was killed", UNDOCUMENTED)
def _(me):
    data = bytearray(6)
    return [code(driver.cuMemcpyDtoH(data, me.memory, 6)), data.hex()]


@question("heir", "open its handle again while it is mapped", UNDOCUMENTED)
def _(me):
    return code(open_memory(bytes.fromhex(me.mail["doomed"])))


@question("heir", "close a mapping after the exporter was killed", UNDOCUMENTED)
def _(me):
    return code(driver.cuIpcCloseMemHandle(me.memory))


@question("late", "open the handle of freed memory", "INVALID_VALUE")
def _(me):
    enter()
    return code(open_memory(bytes.fromhex(me.mail["memory"])))


@question("late", "open the handle of a killed exporter", "INVALID_VALUE")
def _(me):
    return code(open_memory(bytes.fromhex(me.mail["doomed"])))


# ---------------------------------------------------------------- asking

def run() -> list[Answer]:
    """Put all questions, in new processes, which find the driver as any child of this process would."""
    return list(ask_all())


def ask_all() -> Iterator[Answer]:
    mail: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        roles: dict[str, Role] = {}
        for number, asked in enumerate(QUESTIONS):
            if asked.role not in roles:
                roles[asked.role] = stack.enter_context(Role())
            got = roles[asked.role].answer(number, mail)
            yield Answer(asked.role, asked.text, asked.want, got)


class Role:
    """A process that answers questions; one that has ended answers how."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, os.path.abspath(__file__), "--role"],
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __enter__(self) -> Role:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def answer(self, number: int, mail: dict[str, str]) -> object:
        try:
            self._process.stdin.write(json.dumps([number, mail]).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return self._end()
        if not select.select([self._process.stdout], [], [], SECONDS_PER_ANSWER)[0]:
            self._process.kill()
            return f"no answer within {SECONDS_PER_ANSWER:.0f} s"
        line = self._process.stdout.readline()
        if not line:
            return self._end()
        got, news = json.loads(line)
        mail.update(news)
        return got

    def _end(self) -> str:
        status = self._process.wait()
        return f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def play_role() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    me = SimpleNamespace(mail={})
    for line in sys.stdin:
        number, me.mail = json.loads(line)
        try:
            got = QUESTIONS[number].ask(me)
        except Exception as error:
            got = f"{type(error).__name__}: {error}".splitlines()[0]
        print(json.dumps([got, me.mail]), file=answers, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Put the questions to the driver of this machine.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the answers there, too")
    parser.add_argument("--role", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        play_role()
        return 0
    if driver is None:
        parser.error("there is no cuda.bindings in this Python: pip install cuda-python")
    answers = []
    for answer in ask_all():
        answers.append(answer)
        print(answer, flush=True)
    if options.json:
        rows = [asdict(answer) | {"verdict": answer.verdict} for answer in answers]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(answer.verdict == "DIFF" for answer in answers))


if __name__ == "__main__":
    sys.exit(main())
