"""The CUDA driver, as far as this package needs it: devices by UUID, memory, IPC handles, copies, events.

Everything goes through cuda-python's driver API, imported on first use: importing shmkv never initialises CUDA. Each
call runs in the device's primary context, the one torch uses too, pushed and popped around it. Handles travel as 64
bytes read and written by address: the struct's own attribute went away in cuda-bindings 13.4.4. Works with
cuda-bindings 12.9 to 13.5.

The *emulated driver* of the test suite is found by the loader like the real one and spoken to in the same way. Its
memory cannot be seen by torch as a CUDA tensor, so there the same address is shown by its host alias
(`Driver.host_alias`): the one place where the two differ.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from .errors import InvalidArgument, StorageFull, TimedOut, TransportUnavailable

GRANULE_BYTES = 2 << 20
"""cuMemAlloc may serve less out of a shared 2 MiB block, and IPC would then share the neighbours too"""
HANDLE_BYTES = 64
_PAUSE_S, _PAUSE_MOST_S = 20e-6, 1e-3
_LAZY_PEER_ACCESS = 1  # the only flag that cuIpcOpenMemHandle takes
_DISABLE_TIMING, _INTERPROCESS = 2, 4


class Device(NamedTuple):
    ordinal: int
    uuid: bytes
    name: str


class CudaError(TransportUnavailable):
    """The driver refused a call; `code` is its name, such as CUDA_ERROR_INVALID_CONTEXT."""

    def __init__(self, call: str, code: str):
        super().__init__(f"{call}: {code}")
        self.code = code


class Driver:
    """The driver of this process. Ordinals are this process's own; only UUIDs mean the same elsewhere."""

    def __init__(self) -> None:
        self._api, self._pid = _bindings(), os.getpid()
        self._contexts: dict[int, Any] = {}
        self._events: dict[int, list[Any]] = {}  # spare ones by ordinal
        self._lock = threading.Lock()
        self._hooks = _emulator_hooks()
        self._call("cuInit", 0)
        self.devices = tuple(self._device(ordinal) for ordinal in range(self._call("cuDeviceGetCount")))
        self._ordinals = {device.uuid: device.ordinal for device in self.devices}

    @property
    def emulated(self) -> bool:
        return self._hooks is not None

    @property
    def inherited(self) -> bool:
        """Whether this is a forked child of the process that initialised CUDA: then no call works."""
        return self._pid != os.getpid()

    def ordinal(self, uuid: bytes) -> int | None:
        """Which of this process's devices has this UUID; None if none that it may see."""
        return self._ordinals.get(uuid)

    def device(self, text: Any) -> Device:
        """The device named "cuda", "cuda:1", a torch.device, or a UUID as nvidia-smi prints it ("GPU-...")."""
        name = str(text)[:80]
        if name.startswith(("GPU-", "MIG-")):
            found = [device for device in self.devices if uuid_text(device.uuid).startswith("GPU-" + name[4:].lower())]
        else:
            kind, _, number = name.partition(":")
            counts = number.isascii() and number.isdigit() and len(number) < 6
            wanted = int(number) if counts else -1 if number else 0
            found = [device for device in self.devices if kind == "cuda" and device.ordinal == wanted]
        if len(found) != 1:
            known = ", ".join(f"cuda:{device.ordinal} = {uuid_text(device.uuid)}" for device in self.devices)
            raise InvalidArgument(f"device={name!r} is none of {known or 'no device'}",
                                  hint="see CUDA_VISIBLE_DEVICES, or name the GPU by its UUID")
        return found[0]

    # ------------------------------------------------------------ memory

    def allocate(self, ordinal: int, nbytes: int) -> int:
        """A device address of `nbytes`, a multiple of 2 MiB. Raises StorageFull, naming the bytes needed and free."""
        with self._current(ordinal):
            try:
                return int(self._call("cuMemAlloc", nbytes))
            except CudaError as error:
                if error.code != "CUDA_ERROR_OUT_OF_MEMORY":
                    raise
                free, _ = self._call("cuMemGetInfo")
        raise StorageFull(f"need {nbytes} B on cuda:{ordinal}, {free} B are free",
                          hint="lower device_capacity=, or free device memory") from None

    def free(self, ordinal: int, address: int) -> None:
        with self._current(ordinal):
            self._call("cuMemFree", address)

    def free_bytes(self, ordinal: int) -> int:
        with self._current(ordinal):
            return self._call("cuMemGetInfo")[0]

    def allocation(self, ordinal: int, address: int) -> tuple[int, int]:
        """Start and size in bytes of the allocation that an address lies in."""
        with self._current(ordinal):
            base, nbytes = self._call("cuMemGetAddressRange", address)
        return int(base), int(nbytes)

    def allocation_id(self, ordinal: int, address: int) -> int:
        """A number of this allocation that the process never gives again."""
        attribute = self._api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID
        with self._current(ordinal):
            return int(self._call("cuPointerGetAttribute", attribute, address))

    def why_not_exportable(self, ordinal: int, address: int) -> str:
        """Why no IPC handle can be had of the allocation of this address; "" if it can."""
        attributes = self._api.CUpointer_attribute
        with self._current(ordinal):
            try:
                capable = self._call("cuPointerGetAttribute",
                                     attributes.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, address)
            except CudaError as error:
                return str(error)
        return "" if capable else "it was not made by cudaMalloc (a memory pool, expandable segments or managed memory)"

    def export(self, ordinal: int, base: int) -> bytes:
        """The IPC handle of the allocation that starts at `base`."""
        with self._current(ordinal):
            return _handle_bytes(self._call("cuIpcGetMemHandle", base))

    def open(self, ordinal: int, handle: bytes) -> int:
        """Map another process's allocation into this one; slow (hundreds of ms were seen): once a process."""
        with self._current(ordinal):
            made = _handle(self._api.CUipcMemHandle, handle)
            return int(self._call("cuIpcOpenMemHandle", made, _LAZY_PEER_ACCESS))

    def close(self, ordinal: int, address: int) -> None:
        with self._current(ordinal):
            self._call("cuIpcCloseMemHandle", address)

    def can_access_peer(self, ordinal: int, other: int) -> bool:
        return bool(self._call("cuDeviceCanAccessPeer", ordinal, other))

    def pin(self, ordinal: int, address: int, nbytes: int) -> None:
        """Page-lock host memory, so that copies to and from it run at full speed and asynchronously."""
        with self._current(ordinal):
            self._call("cuMemHostRegister", address, nbytes, 1)  # 1: portable, pinned for all contexts

    def unpin(self, ordinal: int, address: int) -> None:
        with self._current(ordinal):
            self._call("cuMemHostUnregister", address)

    # ------------------------------------------------------------ work on streams

    def copy(self, ordinal: int, target: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy between any two addresses, of the host or of a device; does not wait."""
        with self._current(ordinal):
            self._call("cuMemcpyAsync", target, source, nbytes, stream)

    def wait(self, ordinal: int, stream: int, until_ns: int) -> None:
        """Wait until all that is on the stream now is done. Raises TimedOut: the work goes on then."""
        mark, pause_s = self.mark(ordinal, stream), _PAUSE_S
        while not self.is_past(ordinal, mark):
            if time.monotonic_ns() >= until_ns:
                raise TimedOut(f"stream {stream:#x} of cuda:{ordinal} still works",
                               hint="raise timeout=, or find out what the device waits for")
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _PAUSE_MOST_S)

    def mark(self, ordinal: int, stream: int) -> Any:
        """An event behind all that is on the stream now, for `is_past`."""
        with self._current(ordinal):
            event = self._spare_event(ordinal)
            self._call("cuEventRecord", event, stream)
        return event

    def is_past(self, ordinal: int, mark: Any) -> bool:
        """Whether the device has come to a mark, which is used up then."""
        with self._current(ordinal):
            if not self._is_done("cuEventQuery", mark):
                return False
        self._events[ordinal].append(mark)
        return True

    def is_idle(self, ordinal: int, stream: int) -> bool:
        """Whether all that was ever put on the stream is done."""
        with self._current(ordinal):
            return self._is_done("cuStreamQuery", stream)

    def _is_done(self, query: str, what: Any) -> bool:
        code = getattr(self._api, query)(what)[0]
        if code == self._api.CUresult.CUDA_ERROR_NOT_READY:
            return False
        if code:
            raise CudaError(query, self._api.CUresult(code).name)
        return True

    def make_stream(self, ordinal: int) -> int:
        """A stream that does not wait for the default one; for as long as the process lives."""
        with self._current(ordinal):
            return int(self._call("cuStreamCreate", 1))  # 1: non-blocking

    def shared_event(self, ordinal: int) -> tuple[Any, bytes]:
        """An event that other processes can wait for, and its handle. To be kept while they may."""
        with self._current(ordinal):
            event = self._call("cuEventCreate", _DISABLE_TIMING | _INTERPROCESS)
            return event, _handle_bytes(self._call("cuIpcGetEventHandle", event))

    def open_event(self, ordinal: int, handle: bytes) -> Any:
        with self._current(ordinal):
            return self._call("cuIpcOpenEventHandle", _handle(self._api.CUipcEventHandle, handle))

    def destroy_event(self, ordinal: int, event: Any) -> None:
        with self._current(ordinal):
            self._call("cuEventDestroy", event)

    def record(self, ordinal: int, event: Any, stream: int) -> None:
        with self._current(ordinal):
            self._call("cuEventRecord", event, stream)

    def order_behind(self, ordinal: int, stream: int, event: Any) -> None:
        """Make the stream's later work wait for the event; does not wait."""
        with self._current(ordinal):
            self._call("cuStreamWaitEvent", stream, event, 0)

    # ------------------------------------------------------------ what torch sees

    def host_alias(self, address: int) -> int:
        """Where the host sees the emulated driver's memory at a device address."""
        return self._hooks.emucudaHostPointer(address)

    def device_address(self, address: int, is_cuda: bool) -> int:
        """The device address of a tensor's data pointer; 0 if it lies on the host."""
        if self._hooks is None:
            return address if is_cuda else 0
        return self._hooks.emucudaDevicePointer(address)

    def ordinal_of(self, address: int) -> int:
        """The device that a device address lies on."""
        attribute = self._api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        with self._current(0):
            return int(self._call("cuPointerGetAttribute", attribute, address))

    # ------------------------------------------------------------ how

    def _device(self, ordinal: int) -> Device:
        handle = self._call("cuDeviceGet", ordinal)
        name = self._call("cuDeviceGetName", 128, handle).split(b"\0")[0].decode(errors="replace")
        return Device(ordinal, bytes(self._call("cuDeviceGetUuid", handle).bytes)[:16], name)

    @contextmanager
    def _current(self, ordinal: int) -> Iterator[None]:
        if self.inherited:
            raise CudaError("CUDA", "CUDA_ERROR_NOT_INITIALIZED in a forked child; use spawn or forkserver")
        context = self._contexts.get(ordinal)
        if context is None:
            with self._lock:
                context = self._contexts.setdefault(ordinal, self._call("cuDevicePrimaryCtxRetain", ordinal))
        self._call("cuCtxPushCurrent", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    def _spare_event(self, ordinal: int) -> Any:
        spares = self._events.setdefault(ordinal, [])
        try:
            return spares.pop()
        except IndexError:
            return self._call("cuEventCreate", _DISABLE_TIMING)

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            code, *results = getattr(self._api, name)(*arguments)
        except RuntimeError as error:  # no driver, or one without this function
            raise CudaError(name, str(error)) from None
        if code:
            raise CudaError(name, self._api.CUresult(code).name)
        return results[0] if len(results) == 1 else tuple(results)


_driver: Driver | None = None
_once = threading.Lock()
after_fork: list[Callable[[], None]] = []
"""what a forked child, which cannot use CUDA, is to forget"""


def _forget() -> None:
    global _once
    _once = threading.Lock()
    for forget in after_fork:
        forget()


os.register_at_fork(after_in_child=_forget)


def find() -> Driver:
    """This process's driver, initialised on the first call. Raises TransportUnavailable, saying why there is none."""
    global _driver
    if _driver is not None:  # without the lock: a signal handler may ask in the midst of it
        return _driver
    with _once:
        if _driver is None:
            _driver = Driver()
        return _driver


def loaded() -> Driver | None:
    """The driver if `find` was called before."""
    return _driver


def uuid_text(uuid: bytes) -> str:
    """As nvidia-smi prints it."""
    text = uuid.hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def _bindings() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise TransportUnavailable(f"cuda-python cannot be imported: {error}", hint="pip install cuda-python") from None
    return driver


def _emulator_hooks() -> Any:
    try:
        library = ctypes.CDLL("libcuda.so.1")
        library.emucudaHostPointer.restype = ctypes.c_void_p
        library.emucudaHostPointer.argtypes = [ctypes.c_ulonglong]
        library.emucudaDevicePointer.restype = ctypes.c_ulonglong
        library.emucudaDevicePointer.argtypes = [ctypes.c_void_p]
    except (OSError, AttributeError):
        return None
    return library


def _handle_bytes(handle: Any) -> bytes:
    return ctypes.string_at(int(handle.getPtr()), HANDLE_BYTES)


def _handle(kind: Any, data: bytes) -> Any:
    handle = kind()
    ctypes.memmove(int(handle.getPtr()), data, HANDLE_BYTES)
    return handle
