"""Birth, attach and end of a segment: exclusive, checked, harmless to others, and ended only by its owner."""

import fcntl
import multiprocessing
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time

import pytest
import torch

import shmkv
from shmkv import segment as seg
from shmkv.layout import FORMAT, GEOMETRY_FIELDS, MAGIC, Header
from shmkv.testing import eventually, unique_name

HERE = os.path.dirname(os.path.abspath(__file__))
PAGE = torch.arange(4096, dtype=torch.int64).to(torch.uint8)
GUARDED = ("magic", "format", "file_bytes", *GEOMETRY_FIELDS)


def image(path):
    """All that a failed attach may not change: the bytes and what stat tells of them."""
    status = os.lstat(path)
    content = open(path, "rb").read() if stat.S_ISREG(status.st_mode) else b""
    return content, status.st_size, status.st_mode, status.st_uid, status.st_ino, status.st_mtime_ns, status.st_blocks


def run_here(function, *args):
    """Run a function of this file in an interpreter of its own: its exit is a real one, and so is its stderr."""
    call = f"import test_segment; test_segment.{function.__name__}(*{args!r})"
    environment = {**os.environ, "PYTHONPATH": HERE}
    return subprocess.run([sys.executable, "-c", call], env=environment, capture_output=True, text=True, timeout=60)


# ---------------------------------------------------------------- birth

def test_a_segment_and_its_semaphores_are_private_whatever_the_umask(kv_create):
    for umask in (0, 0o022, 0o077):
        old = os.umask(umask)
        try:
            buffer = kv_create()
            buffer.select([1], timeout=0.01)
        finally:
            os.umask(old)
        status = os.stat(seg.path_of(buffer.name))
        assert stat.S_ISREG(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o600
        assert (status.st_uid, status.st_nlink) == (os.geteuid(), 1)
        bells = [name for name in os.listdir("/dev/shm") if name.startswith(f"sem.shmkv.{buffer.name}.")]
        assert [stat.S_IMODE(os.stat(f"/dev/shm/{name}").st_mode) for name in bells] == [0o600]


def test_creation_is_exclusive_and_touches_nothing(kv_buffer):
    kv_buffer.insert([1], {"x": PAGE})
    before = image(seg.path_of(kv_buffer.name))
    with pytest.raises(shmkv.SegmentExists):
        shmkv.create(kv_buffer.name, capacity=4096)
    assert image(seg.path_of(kv_buffer.name)) == before
    with shmkv.create(kv_buffer.name, capacity=4096, exist_ok=True) as same:
        assert same.select([1], copy=True)["x"].equal(PAGE)
    assert os.path.exists(seg.path_of(kv_buffer.name)), "a guest by exist_ok removed the name"


def create_once(name):
    """One of many who want the same name at the same time."""
    eventually(lambda: os.path.exists(f"/dev/shm/{name}.go"))
    try:
        buffer = shmkv.create(name, capacity=4096, slots=4, meta_capacity=4096)
    except shmkv.SegmentExists:
        return "refused"
    eventually(lambda: not os.path.exists(f"/dev/shm/{name}.go"))
    buffer.close()
    return "created"


def test_of_many_creators_exactly_one_wins(kv_spawn):
    name = unique_name()
    children = [kv_spawn(create_once, name) for _ in range(4)]
    with open(f"/dev/shm/{name}.go", "x"):
        pass
    try:
        eventually(lambda: os.path.exists(seg.path_of(name)))
        eventually(lambda: sum(child.exitcode is not None for child in children) == 3)
    finally:
        os.unlink(f"/dev/shm/{name}.go")
    assert sorted(child.result() for child in children) == ["created", "refused", "refused", "refused"]


def test_two_spellings_are_one_name(kv_create):
    name = unique_name()
    buffer = kv_create(name=f"/{name}")
    assert buffer.name == name
    with pytest.raises(shmkv.SegmentExists):
        shmkv.create(name)
    buffer.insert([1], {"x": PAGE})
    with shmkv.attach(name) as one, shmkv.attach(f"/{name}") as other:
        assert one.name == other.name == name and one.select([1]) and other.select([1])


BAD_NAMES = ["", "/", "//a", "a/b", "..", "../a", ".", ".hidden", "-a", "_a", "a b", "a\n", "a\0b", "käse", "٣",
             "a" * 181, "/" + "a" * 181, b"abc", 7]


def test_bad_names_are_refused():
    before = set(os.listdir("/dev/shm"))
    for name in BAD_NAMES:
        with pytest.raises(shmkv.InvalidName):
            shmkv.create(name, capacity=4096)
        with pytest.raises(shmkv.InvalidName):
            shmkv.attach(name)
    assert set(os.listdir("/dev/shm")) == before


def test_the_longest_name_works_and_so_does_its_semaphore(kv_create):
    name = unique_name().ljust(180, "x")
    buffer = kv_create(name=name)
    assert not buffer.select([1], timeout=0.01)
    with shmkv.attach(name):
        pass


def test_instances_with_default_names_are_independent():
    with shmkv.create(capacity=4096, slots=4) as one, shmkv.create(capacity=4096, slots=4) as other:
        assert one.name != other.name
        one.insert([1], {"x": PAGE})
        other.insert([1], {"x": PAGE + 1})
        assert one.drop_select([1], copy=True)["x"].equal(PAGE)
        assert other.drop_select([1], copy=True)["x"].equal(PAGE + 1)


def test_a_repeating_source_of_names_is_noticed(monkeypatch):
    monkeypatch.setattr(seg.secrets, "token_hex", lambda n: "0" * 2 * n)
    with shmkv.create(capacity=4096, slots=4) as first:
        first.insert([1], {"x": PAGE})
        with pytest.raises(shmkv.SegmentExists):
            shmkv.create(capacity=4096, slots=4)
        assert first.select([1])


def test_storage_is_reserved_as_asked_and_no_more(kv_create):
    for capacity in (4096, (1 << 20) + 4096, 4 << 20):
        buffer = kv_create(capacity=capacity)
        status, nbytes = os.stat(seg.path_of(buffer.name)), buffer._session.segment.layout.file_bytes
        assert status.st_size == nbytes == buffer._session.segment.memory.nbytes
        assert nbytes <= status.st_blocks * 512 <= 1.02 * nbytes
        assert buffer.stats().capacity_bytes == capacity


def test_a_buffer_without_payload_works_or_its_capacity_is_refused():
    try:
        with shmkv.create(unique_name(), capacity=0, slots=4) as buffer:
            buffer.insert([1], {"x": torch.empty(0)})
            refused = "" if buffer.drop_select([1])["x"].shape == (0,) else "lost"
    except shmkv.InvalidArgument as error:
        refused = str(error)
    assert not refused or "capacity=" in refused or "arena_bytes=" in refused, refused


# ---------------------------------------------------------------- squatters

def _symlink(path):
    os.symlink("/etc/hostname", path)


def _dangling(path):
    os.symlink(f"{path}.nowhere", path)


def _open_to_others(path):
    os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))
    os.chmod(path, 0o644)


def _of_another_user(path):
    if os.geteuid():
        pytest.skip("giving a file away wants root: run the tests as root")
    os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))
    os.chown(path, 12345, 12345)


def _socket(path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)


@pytest.fixture
def squatted():
    """A name whose object somebody else made; removed afterwards."""
    name = unique_name()
    yield name
    path = seg.path_of(name)
    shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)


@pytest.mark.parametrize("squat", [
    _symlink, _dangling, os.mkdir, os.mkfifo, _socket, _open_to_others, _of_another_user])
def test_a_squatted_name_is_refused_and_left_alone(squatted, squat):
    path = seg.path_of(squatted)
    squat(path)
    before = image(path)
    with pytest.raises(shmkv.SegmentExists):
        shmkv.create(squatted, capacity=4096)
    with pytest.raises(shmkv.NotOurs):
        shmkv.attach(squatted)
    with pytest.raises(shmkv.NotOurs):
        shmkv.create(squatted, capacity=4096, exist_ok=True)
    assert image(path) == before
    assert not os.path.lexists(f"{path}.nowhere")


# ---------------------------------------------------------------- attach

def test_no_such_segment_is_said_at_once_and_waited_for_if_told():
    name = unique_name()
    with pytest.raises(shmkv.NoSuchSegment, match=name):
        shmkv.attach(name)
    started = time.monotonic()
    with pytest.raises(shmkv.NoSuchSegment):
        shmkv.attach(name, timeout=0.1)
    assert 0.1 <= time.monotonic() - started < 1


def _edit(path, at, data):
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


def _word(value):
    return value.to_bytes(8, sys.byteorder)


DAMAGE = {
    "another format": (shmkv.FormatMismatch, lambda path: _edit(path, 8, _word(FORMAT ^ 1))),
    "another version": (shmkv.FormatMismatch, lambda path: _edit(path, 8, _word(FORMAT + (1 << 32)))),
    "not yet born": (shmkv.SegmentBroken, lambda path: _edit(path, 0, bytes(8))),
    "zeroed": (shmkv.SegmentBroken, lambda path: _edit(path, 0, bytes(os.path.getsize(path)))),
    "empty": (shmkv.SegmentBroken, lambda path: os.truncate(path, 0)),
    "a byte": (shmkv.SegmentBroken, lambda path: os.truncate(path, 1)),
    "half a header": (shmkv.SegmentBroken, lambda path: os.truncate(path, 64)),
    "a header only": (shmkv.SegmentBroken, lambda path: os.truncate(path, 4096)),
    "a byte short": (shmkv.SegmentBroken, lambda path: os.truncate(path, os.path.getsize(path) - 1)),
    "a byte long": (shmkv.SegmentBroken, lambda path: os.truncate(path, os.path.getsize(path) + 1)),
    "all ones": (shmkv.FormatMismatch, lambda path: _edit(path, 8, b"\xff" * 8 * (len(GUARDED) - 1))),
}


@pytest.fixture
def corpse():
    """A segment whose owner is gone: the bytes of a real one under a name of its own."""
    name = unique_name()
    with shmkv.create(unique_name(), capacity=8192, slots=64, leases=64, peers=32, waits=64,
                      meta_capacity=4096) as buffer:
        buffer.insert([1], {"x": PAGE})
        shutil.copyfile(seg.path_of(buffer.name), seg.path_of(name))
    os.chmod(seg.path_of(name), 0o600)
    yield name
    os.unlink(seg.path_of(name))


def test_a_failed_attach_says_why_and_changes_nothing(corpse):
    path = seg.path_of(corpse)
    with open(path, "rb") as file:
        sound = file.read()
    for damage, (error, spoil) in DAMAGE.items():
        spoil(path)
        before = image(path)
        with pytest.raises(error):
            shmkv.attach(corpse)
        assert image(path) == before, damage
        os.truncate(path, len(sound))
        _edit(path, 0, sound)
    with shmkv.attach(corpse) as buffer:
        assert buffer.drop_select([1], copy=True)["x"].equal(PAGE)
        assert buffer.problems() == []


def flips_not_noticed(name):
    """Every single bit of the words that describe the segment, flipped in turn: those that attach puts up with."""
    path, let_through = seg.path_of(name), []
    with open(path, "r+b", buffering=0) as file:
        header = os.pread(file.fileno(), 8 * Header.words, 0)
        for field in GUARDED:
            at = 8 * getattr(Header, field)
            word = int.from_bytes(header[at:at + 8], sys.byteorder)
            for bit in range(64):
                os.pwrite(file.fileno(), _word(word ^ 1 << bit), at)
                try:
                    seg.attach(name).detach()
                except (shmkv.SegmentBroken, shmkv.FormatMismatch):
                    continue
                let_through.append((field, bit))
            os.pwrite(file.fileno(), header[at:at + 8], at)
        assert os.pread(file.fileno(), len(header), 0) == header, "a refused attach wrote into the header"
    return let_through


def test_each_flipped_bit_of_the_header_is_refused(corpse):
    assert int.from_bytes(open(seg.path_of(corpse), "rb").read(8), sys.byteorder) == MAGIC
    assert flips_not_noticed(corpse) == []


def test_each_flipped_bit_is_refused_where_tables_do_not_fill_their_pages():
    name = unique_name()
    with shmkv.create(name, capacity=8192, slots=5, leases=7, peers=3, waits=3, meta_capacity=4096):
        assert flips_not_noticed(name) == []


# ---------------------------------------------------------------- storage

def ask_for_too_much():
    """Run with a /dev/shm of 1 MiB: what the limit says, before and after looking, and that nothing stays."""
    shmkv.create  # noqa: B018  (torch is loaded now)
    for look_first in (True, False):
        if not look_first:
            seg._refuse_if_short = lambda nbytes: None
        try:
            shmkv.create("big", capacity="4MiB", slots=16)
        except shmkv.StorageFull as full:
            print(full)
        assert os.listdir("/dev/shm") == [], os.listdir("/dev/shm")
        free = os.statvfs("/dev/shm")
        assert free.f_bavail * free.f_frsize == 1 << 20, "bytes stayed in use"
    with shmkv.create("small", capacity=65536, slots=16, leases=16, peers=4, waits=4, meta_capacity=4096) as buffer:
        fill = open("/dev/shm/rest", "wb", buffering=0)
        try:
            while fill.write(bytes(4096)):
                pass
        except OSError:
            pass
        buffer.insert([1], {"x": torch.full((65536,), 7, dtype=torch.uint8)})  # was reserved: no SIGBUS
        assert buffer.drop_select([1], copy=True)["x"].unique().tolist() == [7]
        os.unlink("/dev/shm/rest")
    print("whole")


def wait_where_no_semaphore_fits():
    """Run with a /dev/shm of 1 MiB that fills up after creation: what a call says that has to sleep."""
    with shmkv.create("small", capacity=65536, slots=16, leases=16, peers=4, waits=4, meta_capacity=4096) as buffer:
        with open("/dev/shm/rest", "wb", buffering=0) as fill:
            try:
                while fill.write(bytes(4096)):
                    pass
            except OSError:
                pass
        for _ in range(2):
            try:
                assert not buffer.select([1], timeout=0.05)
            except shmkv.StorageFull:
                pass
        os.unlink("/dev/shm/rest")
        assert not buffer.select([1], timeout=0.05)
    print("whole")


def run_with_little_storage(function):
    if not shutil.which("unshare") or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("a /dev/shm of 1 MiB wants a mount namespace: run as root with CAP_SYS_ADMIN and util-linux")
    script = f"mount -t tmpfs -o size=1m tmpfs /dev/shm && exec {sys.executable} -c " \
             f"'import test_segment; test_segment.{function.__name__}()'"
    environment = {**os.environ, "PYTHONPATH": HERE}
    return subprocess.run(["unshare", "-m", "sh", "-c", script], env=environment, capture_output=True, text=True,
                          timeout=60)


def test_too_little_storage_is_an_exception_that_names_the_bytes():
    done = run_with_little_storage(ask_for_too_much)
    assert done.returncode == 0, done.stderr
    looked, tried, end = done.stdout.splitlines()
    for line in (looked, tried):
        assert line.startswith("need ") and "B in /dev/shm, 1048576 B are free" in line and "--shm-size" in line
        assert int(line.split()[1]) > 4 << 20
    assert end == "whole"


def test_no_room_for_a_semaphore_is_a_miss_or_an_exception_of_ours_and_passes():
    done = run_with_little_storage(wait_where_no_semaphore_fits)
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr


# ---------------------------------------------------------------- the end of a name

def visit(name, way):
    buffer = shmkv.attach(name)
    hit = buffer.select([1])
    assert hit["x"].equal(PAGE)
    if way == "close":
        buffer.close()
    elif way == "close twice and unlink":
        buffer.close(), buffer.close()
        assert not buffer.unlink()
    elif way == "exit":
        sys.exit(3)
    elif way == "raise":
        raise ZeroDivisionError
    elif way == "_exit":
        os._exit(0)
    elif way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif way == "unlink":
        assert not buffer.unlink()


def test_a_guest_never_removes_the_name(kv_buffer, kv_spawn):
    kv_buffer.insert([1], {"x": PAGE})
    before = os.stat(seg.path_of(kv_buffer.name)).st_ino
    ways = ("close", "close twice and unlink", "exit", "raise", "_exit", "kill", "unlink", "leave")
    for way, guest in [(way, kv_spawn(visit, kv_buffer.name, way)) for way in ways]:
        guest.join()
        assert os.stat(seg.path_of(kv_buffer.name)).st_ino == before, way
    with shmkv.attach(kv_buffer.name) as another:
        assert another.select([1])["x"].equal(PAGE)
    eventually(lambda: not kv_buffer.select([9]) and kv_buffer.stats().peers == 1)
    assert kv_buffer.stats().counters["deaths"] == 2


def visit_from_outside(name):
    shmkv.attach(name).select([1])


def test_an_unrelated_interpreter_comes_and_goes_without_a_word(kv_buffer):
    kv_buffer.insert([1], {"x": PAGE})
    done = run_here(visit_from_outside, kv_buffer.name)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    with shmkv.attach(kv_buffer.name) as another:
        assert another.select([1])


def test_a_failed_attach_of_a_guest_does_not_hurt_the_host(kv_create, monkeypatch):
    buffer = kv_create(peers=1)
    with pytest.raises(shmkv.TableFull, match="peers="):
        shmkv.attach(buffer.name)
    with monkeypatch.context() as patch:
        def no_memory(*_):
            raise OSError(12, "Cannot allocate memory")
        patch.setattr(seg.mmap, "mmap", no_memory)
        with pytest.raises(OSError):
            shmkv.attach(buffer.name)
    assert os.path.exists(seg.path_of(buffer.name))
    buffer.insert([1], {"x": PAGE})


def test_the_owner_removes_its_name_once():
    buffer = shmkv.create(unique_name(), capacity=4096, slots=4)
    assert buffer.unlink() and not buffer.unlink()
    with shmkv.create(buffer.name, capacity=4096, slots=4) as heir:
        buffer.close()
        assert os.path.exists(seg.path_of(heir.name)), "the former owner removed its heir's name"


def test_an_owner_leaves_alone_what_took_its_name():
    buffer = shmkv.create(unique_name(), capacity=4096, slots=4)
    path = seg.path_of(buffer.name)
    os.unlink(path)
    with open(path, "x") as other:
        other.write("not yours")
    try:
        buffer.close()
        assert open(path).read() == "not yours"
    finally:
        os.unlink(path)


def take_when_told(name):
    with shmkv.attach(name) as buffer:
        buffer.insert([1], {"x": PAGE})
        with buffer.drop_select([2], timeout=20) as hit:
            return hit["x"].equal(PAGE + 1)


def test_those_attached_go_on_when_the_name_is_removed(kv_spawn):
    buffer = shmkv.create(unique_name(), capacity=1 << 20, slots=16)
    child = kv_spawn(take_when_told, buffer.name)
    assert buffer.drop_select([1], timeout=20)
    os.unlink(seg.path_of(buffer.name))
    with pytest.raises(shmkv.NoSuchSegment, match="no segment"):
        shmkv.attach(buffer.name)
    buffer.insert([2], {"x": PAGE + 1})
    assert child.result()
    assert buffer.problems() == []
    buffer.close()


def test_a_view_of_a_removed_segment_is_no_abort():
    buffer = shmkv.create(unique_name(), capacity=1 << 20, slots=16)
    buffer.insert([1], {"x": PAGE})
    hit = buffer.drop_select([1])
    os.unlink(seg.path_of(buffer.name))
    assert hit["x"].equal(PAGE)
    hit.release()
    assert buffer.stats().used_bytes == 0
    buffer.close()


# ---------------------------------------------------------------- forked children

WAYS = ("_exit", "sys.exit", "exception", "SIGKILL", "multiprocessing")


def use_what_is_inherited(buffer, hit, kept):
    """In a forked child: every call is a clear error, every view is readable."""
    calls = [lambda: buffer.insert([5], {"x": PAGE}), lambda: buffer.select([1]), lambda: buffer.drop_select([1]),
             lambda: buffer.reserve([5], {"x": PAGE}), lambda: buffer.cancel([1]), buffer.stats, buffer.problems,
             buffer.signals]
    for call in calls:
        try:
            call()
        except shmkv.InheritedHandle:
            continue
        raise AssertionError(f"{call} worked in a forked child")
    assert kept.equal(PAGE) and hit["x"].equal(PAGE)
    hit.release()
    assert not buffer.unlink()
    with shmkv.attach(buffer.name) as own:
        assert own.select([1], copy=True)["x"].equal(PAGE)


def leave(way):
    if way == "_exit":
        os._exit(0)
    if way == "sys.exit":
        sys.exit(0)
    if way == "exception":
        raise ZeroDivisionError
    os.kill(os.getpid(), signal.SIGKILL)


def locked_for_others(buffer):
    fd = os.open(seg.path_of(buffer.name), os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


def intact(buffer, hit, kept, held):
    stats = buffer.stats()
    assert os.path.exists(seg.path_of(buffer.name)), "the name is gone"
    assert (stats.held_leases, stats.peers) == (held, 1), "the parent's records are gone"
    assert not buffer._session.tables.peers.dead(), "the parent counts as dead"
    assert kept.equal(PAGE) and hit["x"].equal(PAGE)
    assert stats.counters["deaths"] == 0 and buffer.problems() == []


def family(name):
    """A parent whose forked children end in every way, some born in the midst of its critical section."""
    buffer = shmkv.create(name, capacity=1 << 20, slots=16)
    buffer.insert([1], {"x": PAGE})
    buffer.insert([2], {"x": PAGE})
    hit, shared = buffer.drop_select([2]), buffer.select([1], readonly=True)
    kept = shared["x"]
    assert hit["x"].equal(PAGE)
    for way in WAYS:
        if way == "multiprocessing":
            child = multiprocessing.get_context("fork").Process(target=use_what_is_inherited, args=(buffer, hit, kept))
            child.start(), child.join()
            assert child.exitcode == 0
        else:
            pid = os.fork()
            if pid == 0:
                use_what_is_inherited(buffer, hit, kept)
                leave(way)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            assert status == {"exception": 1, "SIGKILL": -9}.get(way, 0), (way, status)
        intact(buffer, hit, kept, held=2)

    def fork_inside(way):
        pid = os.fork()
        if pid == 0:
            leave(way)
        os.waitpid(pid, 0)
        assert locked_for_others(buffer), f"a child that left by {way} dropped the parent's lock"

    for way in WAYS[:-1]:
        buffer._session.run(lambda way=way: fork_inside(way), 0)
        assert not locked_for_others(buffer)
        intact(buffer, hit, kept, held=2)
    print("whole")
    sys.stdout.flush()


def test_a_forked_child_is_refused_and_hurts_nobody_however_it_ends():
    done = run_here(family, unique_name())
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("whole") == 1
    assert "Exception ignored" not in done.stderr
    assert done.stderr.count("Traceback") == done.stderr.count("ZeroDivisionError") // 2 == 2, done.stderr


def parent_of_a_sleeper(name):
    buffer = shmkv.attach(name)
    hit = buffer.drop_select([1])
    kept = hit["x"]
    pid = os.fork()
    if pid == 0:
        time.sleep(30 if kept.equal(PAGE) else 0)
        os._exit(0)
    buffer.insert([2], {"pid": torch.tensor(pid)})
    time.sleep(30)


def test_a_dead_parent_is_dead_although_its_forked_child_lives_on(kv_buffer, kv_spawn):
    kv_buffer.insert([1], {"x": PAGE})
    parent = kv_spawn(parent_of_a_sleeper, kv_buffer.name)
    sleeper = kv_buffer.drop_select([2], timeout=20, copy=True)["pid"].item()
    try:
        os.kill(parent.pid, signal.SIGKILL)
        took = eventually(lambda: kv_buffer.select([1]), 5)
        assert took < 1 and kv_buffer.stats().counters["deaths"] == 1
        os.kill(sleeper, 0)
    finally:
        os.kill(sleeper, signal.SIGKILL)
    assert kv_buffer.drop_select([1], copy=True)["x"].equal(PAGE)
    parent.join()
