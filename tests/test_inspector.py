"""A picture is taken from outside, of anybody in any state, of any bytes, and leaves no trace."""

import os
import random
import time

import pytest
import scenes

import shmkv
from shmkv import inspector
from shmkv.errors import ShmkvError
from shmkv.inspector import State
from shmkv.layout import Entry, Header, Region, read_header
from shmkv.regions import RegionState
from shmkv.testing import eventually

PROMPT, NAMES = scenes.PROMPT, scenes.NAMES


def settled(name):
    """A picture with everybody where the scene wants them."""
    return inspector.look(name)


# ---------------------------------------------------------------- what is told of whom

def test_a_living_pair(kv_create, kv_spawn, kv_leaks):
    buffer, child = scenes.living_pair(kv_create, kv_spawn)
    picture = settled(buffer.name)
    assert picture.state == State.AT_REST and picture.lock_pid is None
    ours, theirs = picture.peers()
    assert (ours.role, ours.pid, ours.life, ours.roles) == ("prefill", os.getpid(), "alive", ["producer"])
    assert (theirs.role, theirs.pid, theirs.life, theirs.leases) == ("decode", child.pid, "alive", 1)
    first, second, other = picture.entries()
    assert (first.state, first.tokens, first.namespace, first.holders) == ("taken", PROMPT, NAMES, [theirs.index])
    assert (second.state, second.n_tokens, second.producer) == ("ready", 4, ours.index)
    assert 3500e9 < second.ttl_left_ns <= 3600e9 and first.ttl_left_ns is None
    assert second.tensors[0] == {"name": "key", "dtype": "float32", "shape": [2, 4, 8], "nbytes": 256, "region": None}
    assert other.namespace == {"model": "toy", "rank": "0"}
    [waiter] = picture.waiters()
    assert (waiter.peer, waiter.kind, waiter.tokens) == (theirs.index, "entry", [scenes.SECRET + 5, 1])
    assert waiter.on == [ours.index] and picture.cycle() == []
    assert sum(nbytes for _, nbytes in picture.runs() + picture.holes()) == picture.layout.arena.nbytes
    assert picture.used_bytes() == buffer.stats().used_bytes
    assert picture.counters()["takes"] == 1 and set(picture.paths()) >= {"host", "staged_inserts"}
    assert [row["kind"] for row in picture.signals()] == ["taken"]
    assert [row["kind"] for row in picture.leases()] == ["take"]
    assert [event.kind.name for event in picture.events()] == ["READY", "READY", "READY", "TAKEN"]
    assert picture.problems() == [] and picture.regions() == []


def test_a_process_stopped_inside_the_lock(kv_create, kv_spawn):
    buffer, child = scenes.stopped_pair(kv_create, kv_spawn)
    picture = settled(buffer.name)
    assert picture.state == State.TORN and picture.lock_pid == child.pid
    by = picture.mutator()
    assert (picture.pid(by), picture.life(by)) == (child.pid, "stopped")
    assert "mutation: a mutation was left half done" in picture.problems()
    assert picture.explain([*PROMPT, 7], NAMES).hit  # by an order of its own


def test_a_process_killed_inside_the_lock(kv_create, kv_spawn):
    buffer, child = scenes.killed_pair(kv_create, kv_spawn)
    picture = settled(buffer.name)
    assert picture.state == State.TORN and picture.lock_pid is None
    by = picture.mutator()
    assert (picture.pid(by), picture.life(by)) == (child.pid, "dead")
    assert picture.explain([*PROMPT, 7], NAMES).hit
    before = [row.state for row in picture.entries()]
    assert before == [row.state for row in inspector.look(buffer.name).entries()], "looking up changed what is shown"


def test_what_moves_is_marked(kv_create, monkeypatch):
    buffer = scenes.filled(kv_create)
    numbers = iter(range(1, 10_000, 2))
    monkeypatch.setattr(inspector, "_mutation", lambda fd: next(numbers))
    read, times = inspector._read, []

    def read_and_change(fd, layout):
        times.append(1)
        if len(times) == inspector.LOOKS:
            data = read(fd, layout)
            buffer.cancel(PROMPT, namespace=NAMES)
            return data
        return read(fd, layout)

    monkeypatch.setattr(inspector, "_read", read_and_change)
    picture = inspector.look(buffer.name)
    assert picture.state == State.MOVING
    assert [row.sequence for row in picture.entries() if row.moving] == []  # it is gone from the second copy
    assert {row.sequence for row in picture.entries()} == {2, 3}
    assert picture._moved(0) and not picture._moved(1)


def test_looking_at_a_busy_pair(kv_create, kv_spawn):
    buffer = scenes.filled(kv_create)
    child = kv_spawn(scenes.hammer, buffer.name, 1.0)
    eventually(lambda: inspector.look(buffer.name).counters()["takes"] > 3)
    states, until = set(), time.monotonic() + 0.7
    while time.monotonic() < until:
        picture = inspector.look(buffer.name)
        states.add(picture.state)
        if picture.state == State.AT_REST:
            assert picture.problems() == []
    assert State.AT_REST in states and State.TORN not in states
    child.result()


@pytest.mark.parametrize("scene", scenes.SCENES)
def test_looking_leaves_no_trace(kv_create, kv_spawn, kv_leaks, scene):
    buffer, child = scenes.SCENES[scene](kv_create, kv_spawn)
    if scene == "live":
        child.stop()  # nobody moves but us
        eventually(lambda: inspector.look(buffer.name).peers()[1].life == "stopped")
    before, descriptors = scenes.image(buffer.name), len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        picture = inspector.look(buffer.name)
        list(picture.entries()), picture.waiters(), picture.problems(), picture.explain(PROMPT)
    assert scenes.image(buffer.name) == before
    assert len(os.listdir("/proc/self/fd")) == descriptors
    if scene == "live":
        child.resume()


def test_peers_that_wait_for_each_other(kv_create, kv_spawn):
    buffer, _ = scenes.living_pair(kv_create, kv_spawn)
    with scenes.WaitingForRoom(buffer, 200 << 10):
        picture = inspector.look(buffer.name)
        ours, theirs = (row.index for row in picture.peers())
        assert picture.cycle() == [ours, theirs]
        assert {row.peer: row.on for row in picture.waiters()} == {ours: [theirs], theirs: [ours]}


@pytest.mark.parametrize("edges, cycle", [
    ({0: {1}, 1: {0}}, [0, 1]), ({0: {1}, 1: {2}, 2: {0}, 3: {0}}, [0, 1, 2]),
    ({0: {1}, 1: {2}}, []), ({0: {1, 2}, 1: {0}}, []), ({0: {1, 2}, 1: {0}, 2: {0}}, [0, 1]),
    ({0: set()}, []), ({}, []),
])
def test_a_cycle_is_one_that_nobody_can_leave(kv_buffer, monkeypatch, edges, cycle):
    row = inspector.WaitRow(0, 1, 1, "room", 0, None, "", 0, [], 0, [])
    monkeypatch.setattr(inspector.Picture, "waiters",
                        lambda self: [row._replace(peer=peer, on=sorted(on)) for peer, on in edges.items()])
    assert inspector.look(kv_buffer.name).cycle() == cycle


# ---------------------------------------------------------------- explaining

def why(buffer, tokens, names=NAMES, **options):
    return inspector.look(buffer.name).explain(tokens, names, **options)


def test_explaining_a_hit(kv_create):
    found = why(scenes.filled(kv_create), [*PROMPT, 7, 8])
    assert (found.hit, found.sequence, found.matched_tokens, found.n_tokens) == (True, 2, 4, 5)
    assert [event.sequence for event in found.history] == [1, 2]


def test_explaining_where_a_prompt_parts(kv_create):
    found = why(scenes.filled(kv_create), [PROMPT[0], PROMPT[1], 9, 9])
    assert not found.hit and found.reasons == []
    assert (found.common_tokens, found.wanted_token, found.found_token) == (2, 9, PROMPT[2])


def test_explaining_options_that_rule_out(kv_create):
    buffer = scenes.filled(kv_create)
    assert 'match="prefix" would' in why(buffer, [*PROMPT, 7, 8], match="exact").reasons[0]
    assert "fewer than min_tokens=5" in why(buffer, [*PROMPT, 7, 8], min_tokens=5).reasons[0]
    assert 'match="overlap" would' in why(buffer, PROMPT[:2]).reasons[0]
    assert why(buffer, PROMPT[:2], match="overlap").hit
    with pytest.raises(shmkv.InvalidArgument):
        why(buffer, PROMPT, match="best")


def test_explaining_another_namespace(kv_create):
    found = why(scenes.filled(kv_create), PROMPT, {"model": "toy", "rank": 1})
    assert "another namespace (rank: 0 there, 1 asked for)" in found.reasons[0]


def test_explaining_who_has_it(kv_create, kv_spawn):
    buffer, child = scenes.living_pair(kv_create, kv_spawn)
    [reason] = why(buffer, PROMPT).reasons
    assert reason.startswith("entry 1 of 3 tokens was taken ") and f"peer 1 (pid {child.pid}, alive)" in reason
    with buffer.reserve([4, 5], scenes.kv(2), namespace=NAMES):
        assert "is still being written by peer 0" in why(buffer, [4, 5, 6]).reasons[0]


@pytest.mark.parametrize("end, word", [
    (lambda buffer: buffer.drop_select([8, 9], copy=True), "consumed"),
    (lambda buffer: buffer.cancel([8, 9]), "cancelled"),
])
def test_explaining_what_became_of_it(kv_create, end, word):
    buffer = scenes.filled(kv_create)
    buffer.insert([8, 9], scenes.kv(2))
    end(buffer)
    buffer.stats()
    assert f"entry 4 of 2 tokens was {word} " in why(buffer, [8, 9, 10], {}).reasons[0]


def test_explaining_an_entry_whose_time_is_over_but_that_nobody_freed(kv_create):
    buffer = scenes.filled(kv_create)
    buffer.insert([8, 9], scenes.kv(2), ttl=0.05)
    assert why(buffer, [8, 9], {}).hit
    eventually(lambda: not why(buffer, [8, 9], {}).hit)
    assert "expired " in why(buffer, [8, 9], {}).reasons[0]
    assert "freed" not in why(buffer, [8, 9], {}).reasons[0] and "frees it" in why(buffer, [8, 9], {}).reasons[0]


# ---------------------------------------------------------------- files

@pytest.fixture
def core(kv_create, kv_spawn, tmp_path):
    """The bytes of a segment with something in each of its tables, as a file."""
    buffer, _ = scenes.living_pair(kv_create, kv_spawn)
    path = tmp_path / "segment"
    with buffer.reserve([3, 4], scenes.kv(2)):
        data = bytearray(scenes.image(buffer.name)[0])
    layout = read_header(bytes(data[:4096]), len(data))
    words = memoryview(data).cast("Q")
    words[layout.regions.word + Region.kind] = words[layout.regions.word + Region.generation] = 1
    words[layout.regions.word + Region.state], words[layout.mappings.word] = RegionState.GONE, 1
    words[layout.regions.word + Region.nbytes] = 1 << 20
    words.release()
    path.write_bytes(data)
    return path


def look_at_all(picture):
    for part in (picture.header, picture.counters, picture.paths, picture.states, picture.used_bytes,
                 picture.meta_used_bytes, picture.runs, picture.holes, picture.owner, picture.mutator, picture.peers,
                 lambda: list(picture.entries()), picture.waiters, picture.cycle, picture.events, picture.signals,
                 picture.regions, picture.leases, picture.problems, lambda: picture.explain(PROMPT, NAMES),
                 lambda: picture.explain([*PROMPT, 7], NAMES, match="overlap")):
        try:
            part()
        except ShmkvError as error:
            assert error.args[0] and "\n" not in error.args[0]


def test_a_kept_picture_tells_the_same(kv_create, kv_spawn, tmp_path):
    buffer, _ = scenes.killed_pair(kv_create, kv_spawn)
    picture = inspector.look(buffer.name)
    path = tmp_path / "core"
    picture.save(str(path))
    assert path.stat().st_mode & 0o777 == 0o600
    kept = inspector.load(str(path))
    for part in ("name", "state", "lives", "lock_pid", "now_ns", "taken_ns", "raw"):
        assert getattr(kept, part) == getattr(picture, part), part
    assert list(kept.entries()) == list(picture.entries()) and kept.peers() == picture.peers()


def test_a_copy_made_by_other_means(core):
    picture = inspector.load(str(core))
    assert {row.life for row in picture.peers()} == {"unknown"}
    assert len(picture.regions()) == 1
    look_at_all(picture)


@pytest.mark.parametrize("head", [b'{"core": 1', b'{"core": ' + b"[" * 100_000, b'{"core": 1, "file_bytes": "x"}',
                                  b'{"core": 1, "lives": {"9": 7, "-1": "dead"}, "now_ns": "x", "state": []}'])
def test_a_hostile_head_is_refused_or_means_nothing(core, head):
    core.write_bytes(head + b"\n" + core.read_bytes())
    try:
        look_at_all(inspector.load(str(core)))
    except ShmkvError:
        pass


@pytest.mark.parametrize("nbytes", [0, 1, 8, 4095, 4096, 4097, 50_000])
def test_a_truncated_copy_is_refused(core, nbytes):
    core.write_bytes(core.read_bytes()[:nbytes])
    with pytest.raises(ShmkvError):
        inspector.load(str(core))


def test_a_zeroed_copy_is_refused_and_what_is_no_file(core, tmp_path):
    core.write_bytes(bytes(core.stat().st_size))
    os.mkfifo(tmp_path / "pipe")
    for path in (core, tmp_path / "pipe", tmp_path, "/dev/zero", tmp_path / "absent", "a\0b"):
        with pytest.raises(ShmkvError):
            inspector.load(str(path))


EXTREME = (0, 1, 2, 3, 5, 255, 1 << 31, (1 << 32) - 1, 1 << 63, (1 << 64) - 1, (1 << 64) - 8)


def flipped(path, seed):
    """Flip bits, and set words to what may hurt, in the tables of a copy, most of it where something is. Returns how to
    undo it.
    """
    chance = random.Random(seed)
    with open(path, "r+b") as file:
        tables = file.read(flipped.tables_bytes)
        undo = []
        for _ in range(chance.choice((1, 1, 2, 8))):
            at = chance.choice(flipped.used) if chance.random() < 0.8 else 8 * chance.randrange(len(tables) // 8)
            word = int.from_bytes(tables[at:at + 8], "little")
            word = chance.choice(EXTREME) if chance.random() < 0.3 else word ^ 1 << chance.randrange(64)
            undo.append((at, tables[at:at + 8]))
            file.seek(at)
            file.write(word.to_bytes(8, "little"))
    return undo


def prepare(path):
    data = path.read_bytes()
    layout = read_header(data[:4096], len(data))
    flipped.tables_bytes = layout.arena.at
    past = (Header.geometry_check + 1) * 8  # what the header's checksum covers is refused at once
    flipped.used = [at for at in range(past, layout.arena.at, 8) if data[at:at + 8] != bytes(8)]


def restore(path, undo):
    with open(path, "r+b") as file:
        for at, word in reversed(undo):
            file.seek(at)
            file.write(word)


def record_words(path):
    """Where each word of each record in use lies, what the header's checksum covers excepted."""
    data = path.read_bytes()
    layout = read_header(data[:4096], len(data))
    for area in layout.areas:
        nbytes = area.stride * 8
        for at in range(area.at, area.at + area.count * nbytes, nbytes or 1):
            if any(data[at:at + nbytes]):
                yield from range(at, at + 8 * len(area.record.names), 8)


def each_extreme(path):
    """Each word of each record in use, set to each of the values that may hurt; returns how to undo it."""
    for at in record_words(path):
        if at > Header.geometry_check * 8:
            for word in (0, 1, 17, 1 << 20, 1 << 63, (1 << 64) - 1):
                with open(path, "r+b") as file:
                    file.seek(at)
                    old = file.read(8)
                    file.seek(at)
                    file.write(word.to_bytes(8, "little"))
                yield [(at, old)]


def at_random(path, n):
    prepare(path)
    return (flipped(path, seed) for seed in range(n))


def fuzz(path, damages):
    """Look at all of a copy with each damage; returns the longest look, and how many could be looked at."""
    slowest, n_loaded = 0.0, 0
    for number, undo in enumerate(damages):
        started = time.monotonic()
        try:
            picture = inspector.load(str(path))
            n_loaded += 1
            look_at_all(picture)
        except ShmkvError:
            pass
        except Exception as error:
            raise AssertionError(f"damage {number} at {undo}: {type(error).__name__}: {error}") from error
        slowest = max(slowest, time.monotonic() - started)
        restore(path, undo)
    return slowest, n_loaded


@pytest.mark.kv_timeout(100)
@pytest.mark.parametrize("damages", [lambda path: at_random(path, 3000), each_extreme], ids=["bits", "words"])
def test_bytes_of_no_sense_are_never_more_than_an_error(core, damages):
    slowest, n_loaded = fuzz(core, damages(core))
    assert slowest < 5 and n_loaded > 1500


@pytest.mark.parametrize("what, broken", [
    ("_named", lambda numbers, value: numbers(value).name.lower()),  # a number that is trusted
    ("Picture.pid", lambda self, peer: self.words[self._peer(peer or 0)]),  # an index that is
    ("Picture._producer", lambda self, record: self.words[self._peer(record[Entry.peer])]),
])
def test_the_harness_finds_what_is_not_checked(core, monkeypatch, what, broken):
    monkeypatch.setattr(f"shmkv.inspector.{what}", broken)
    with pytest.raises(AssertionError, match="damage"):
        fuzz(core, each_extreme(core))


def test_no_torch_and_no_numpy_to_look(kv_buffer):
    import subprocess
    import sys
    probe = ("import sys; from shmkv import inspector; picture = inspector.look(sys.argv[1]); list(picture.entries());"
             "picture.events(); picture.regions(); sys.exit({'torch', 'numpy'} & set(sys.modules) != set())")
    assert subprocess.run([sys.executable, "-c", probe, kv_buffer.name]).returncode == 0


def test_names(kv_buffer):
    assert kv_buffer.name in inspector.names()
    assert inspector.look(f"/{kv_buffer.name}").name == kv_buffer.name
    with pytest.raises(shmkv.InvalidName):
        inspector.look("a/b")
