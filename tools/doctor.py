"""`shmkv doctor`: what this host and this process can do for a hand-over, what they cannot, and the knob to turn."""

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import click

from shmkv import driver as drivers
from shmkv import inspector, segment, sync
from shmkv.errors import ShmkvError, StorageFull
from shmkv.transport import WHY, Facts, decide

from . import target
from .target import emit, example

OK, NOTE, NO = "ok", "note", "no"
SMALL_SHM_BYTES = 1 << 30
UNVERIFIED = "the NCCL path has been run over gloo only; no two GPUs have run it yet"


class Finding(NamedTuple):
    """One thing looked at; `remedy` is the knob to turn where something is amiss."""

    name: str
    state: str
    text: str
    remedy: str = ""


@click.command("doctor", epilog=example("shmkv doctor", "shmkv doctor toy", "shmkv doctor --json"))
@click.argument("names", nargs=-1, metavar="[NAME ...]")
@target.JSON
def command(names: tuple[str, ...], as_json: bool) -> None:
    """What this host and this process can do for a hand-over, what they cannot, and the knob to turn. With NAME, also
    whether the processes of that buffer share what they need to with this one.
    """
    found = [*findings(), *(finding for name in names for finding in peers(name))]
    if as_json:
        return emit({"findings": [finding._asdict() for finding in found]})
    width = max(len(finding.name) for finding in found)
    for finding in found:
        click.echo(f"{finding.state:<5} {finding.name:<{width}}  {finding.text}")
        if finding.remedy and finding.state != OK:
            click.echo(f"{'':<5} {'':<{width}}  -> {finding.remedy}")


def findings() -> Iterator[Finding]:
    yield shared_memory()
    yield from containers()
    yield from limits()
    yield remove_ipc()
    yield clock()
    yield from devices()
    yield from collective()


# ---------------------------------------------------------------- the host

def shared_memory() -> Finding:
    status = os.statvfs(segment.DIRECTORY)
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    text = f"{segment.DIRECTORY}: {_mib(free)} free of {_mib(size)}"
    return Finding("shared memory", NOTE if size < SMALL_SHM_BYTES else OK, text, StorageFull.hint)


def containers() -> Iterator[Finding]:
    for kind, flag in (("pid", "--pid=container:NAME"), ("ipc", "--ipc=container:NAME")):
        with suppress(OSError):
            mine, first = os.readlink(f"/proc/self/ns/{kind}"), os.readlink(f"/proc/1/ns/{kind}")
            same = mine == first
            text = mine if same else f"{mine}, process 1 has {first}"
            yield Finding(f"{kind} namespace", OK if same else NOTE, text,
                          f"processes that share device memory must have the same one: {flag}")
    room = segment.cgroup_room()
    if room is not None:
        yield Finding("memory limit", OK, f"the cgroup leaves {_mib(room)}")


def limits() -> Iterator[Finding]:
    for name, which, least, knob in (("open files", resource.RLIMIT_NOFILE, 1024, "ulimit -n"),
                                     ("locked memory", resource.RLIMIT_MEMLOCK, 64 << 20, "ulimit -l"),
                                     ("address space", resource.RLIMIT_AS, 1 << 40, "ulimit -v")):
        limit = resource.getrlimit(which)[0]
        unlimited = limit == resource.RLIM_INFINITY
        yield Finding(name, OK if unlimited or limit >= least else NOTE, "unlimited" if unlimited else f"{limit}",
                      f"raise {knob}")


def remove_ipc() -> Finding:
    """systemd removes a user's shared memory when the last session of that user ends, unless told not to."""
    for path in ("/etc/systemd/logind.conf", "/usr/lib/systemd/logind.conf"):
        with suppress(OSError), open(path) as file:
            settings = [line.strip().lower() for line in file if line.strip().lower().startswith("removeipc=")]
            if settings:
                off = settings[-1].endswith(("no", "false", "0"))
                return Finding("RemoveIPC", OK if off else NOTE, f"{path}: {settings[-1]}", "set RemoveIPC=no")
            if os.geteuid() >= 1000 and os.path.isdir("/run/systemd/system"):
                return Finding("RemoveIPC", NOTE, "systemd's default: shared memory goes with a user's last session",
                               f"RemoveIPC=no in {path}, or loginctl enable-linger")
    return Finding("RemoveIPC", OK, "no systemd login manager, or a system user")


def clock() -> Finding:
    exact = sync.HAS_CLOCKWAIT
    return Finding("waiting", OK if exact else NOTE, "by the monotonic clock" if exact else
                   "this libc has no sem_clockwait: a step of the wall clock can delay a wake-up by half a second",
                   "glibc 2.30 or newer")


def peers(name: str) -> Iterator[Finding]:
    """Whether the processes of a buffer are in our PID namespace, which device memory has to be shared in."""
    here = os.stat("/proc/self/ns/pid").st_ino
    for peer in inspector.look(name).peers():
        same = peer.pid_namespace == here
        who = f"{name}: peer {peer.index}{f' {peer.role}' if peer.role else ''}"
        yield Finding(who, OK if same else NOTE, f"pid {peer.pid}, {peer.life}, in "
                      f"{'this' if same else 'another'} PID namespace",
                      "device memory is staged between them: --pid=container:NAME brings them together")


# ---------------------------------------------------------------- devices

def devices() -> Iterator[Finding]:
    try:
        driver = drivers.find()
    except ShmkvError as error:
        yield Finding("CUDA driver", NOTE, f"none: {error.args[0]}", "host tensors work; device memory needs a driver")
        yield from paths(None)
        return
    what = "the emulated driver of the tests, no GPU" if driver.emulated else "CUDA"
    yield Finding("CUDA driver", OK, f"{what}, {len(driver.devices)} visible devices")
    for device in driver.devices:
        yield Finding(f"cuda:{device.ordinal}", OK, f"{drivers.uuid_text(device.uuid)} {device.name}, "
                      f"{_mib(driver.free_bytes(device.ordinal))} free")
        yield exportable(driver, device.ordinal)
    setting = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
    if "expandable_segments:true" in setting.lower():
        yield Finding("torch's allocator", NOTE, f"{setting}: its tensors cannot be registered in place",
                      "unset expandable_segments, or let insert() copy them")
    yield from paths(driver)


def exportable(driver: drivers.Driver, ordinal: int) -> Finding:
    """Tried, not guessed: an allocation and its handle."""
    try:
        address = driver.allocate(ordinal, drivers.GRANULE_BYTES)
        try:
            driver.export(ordinal, address)
        finally:
            driver.free(ordinal, address)
    except ShmkvError as error:
        return Finding(f"cuda:{ordinal} IPC", NO, str(error.args[0]), "MIG and Tegra cannot share: others get copies")
    return Finding(f"cuda:{ordinal} IPC", OK, "memory can be shared with other processes")


def paths(driver: drivers.Driver | None) -> Iterator[Finding]:
    """Which path the ladder takes from memory of another process on one device to here, on each."""
    from shmkv.transport import nccl
    from shmkv.transport.cuda_ipc import torch_sees
    seen = driver is not None and torch_sees(driver)
    facts = Facts(has_driver=driver is not None, torch_sees_cuda=seen)
    if driver is None or not seen:
        decision = decide(facts)
        yield Finding("device memory of others", NOTE, f"{decision.path.name.lower()}: "
                      f"{WHY[decision.refused[max(decision.refused)]]}", "")
        return
    for theirs in driver.devices:
        for ours in driver.devices:
            same = theirs == ours
            peer = not same and driver.can_access_peer(ours.ordinal, theirs.ordinal)
            decision = decide(facts._replace(is_wanted=same, peer_access=peer,
                                             nccl=not same and not nccl.missing("nccl")))
            why = "; ".join(f"not {path}: {reason}" for path, reason in decision.describe().items() if path != "local")
            yield Finding(f"cuda:{theirs.ordinal} -> cuda:{ours.ordinal}", OK if decision.path <= 4 else NOTE,
                          f"{decision.path.name.lower()}{f' ({why})' if why else ''}")


def collective() -> Iterator[Finding]:
    from shmkv.transport import nccl
    for name in ("nccl", "gloo"):
        why = nccl.missing(name)
        yield Finding(name, NOTE if why else OK, why or nccl.backends()[name])
    yield Finding("nccl path", NOTE, UNVERIFIED)


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes >> 20} MiB"
