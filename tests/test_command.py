"""Each verb of the command, looking at the living, the stopped, the dead and at damaged files."""

import json
import os
import pty
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyte
import pytest
import scenes
import test_inspector
import torch
from test_inspector import core  # noqa: F401  # a fixture

import shmkv
from shmkv.testing import eventually, unique_name
from shmkv_tools import cli, schema, verbs
from shmkv_tools.text import age, size, table

TOKENS = " ".join(map(str, scenes.PROMPT))
NAMESPACE = ("--namespace", "model=toy", "--namespace", "rank=0")
EXPLAIN = ("explain", "{}", "--tokens", f"{TOKENS} 7 8", *NAMESPACE)
VIEWS = (("dump", "{}"), ("entries", "{}"), ("peers", "{}"), ("waiters", "{}"), ("check", "{}"), EXPLAIN)


class Said:
    def __init__(self, code, out, err, seconds):
        self.code, self.out, self.err, self.seconds = code, out, err, seconds

    @property
    def document(self):
        return json.loads(self.out)


@pytest.fixture
def shmkv_command(capsys, monkeypatch):
    """Run the command in this process: at most one line of complaint, no bug, no long wait."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def run(*words):
        capsys.readouterr()
        started = time.monotonic()
        code = cli.main([str(word) for word in words])
        said = Said(code, *capsys.readouterr(), time.monotonic() - started)
        assert len(said.err.splitlines()) <= 1 and "a bug" not in said.err, said.err
        assert "Traceback" not in said.out + said.err and said.seconds < 5
        assert (code == 2) <= bool(said.err)
        return said

    return run


def on(verb, name):
    return [word.format(name) for word in verb]


# ---------------------------------------------------------------- the line

def test_help_with_an_example_for_each_verb(shmkv_command):
    said = shmkv_command("--help")
    assert said.code == 0 and all(f"  {name} " in said.out for name in verbs.VERBS)
    for name in verbs.VERBS:
        if name not in ("demo", "bench"):
            said = shmkv_command(name, "--help")
            assert said.code == 0 and re.search(f"examples?:\\s+shmkv {name}", said.out), name


@pytest.mark.parametrize("words, expected", [
    ((), "a verb is missing"), (("fly",), "'fly'"), (("dump",), "NAME"), (("dump", "a", "--file", "b"), "one of them"),
    (("dump", "a/b"), "is not a segment name"), (("dump", "nosuch"), "no segment 'nosuch'"),
    (("dump", "--file", "/absent"), "/absent"), (("entries", "x", "--sort", "mood"), "mood"),
    (("explain", "x"), "--tokens"), (("explain", "x", "--tokens", "1 a"), "'a' is no token id"),
    (("explain", "x", "--tokens", ""), "no token ids"), (("explain", "x", "--tokens", "1", "--tokens-file", "f"), "or"),
    (("explain", "x", "--tokens-file", "/absent"), "/absent"), (("rm", "nosuch"), "nosuch"), (("rm", "a/b"), "a/b"),
    (("explain", "x", "--tokens", "1", "--namespace", "k"), "K=V"),
    (("check", "--fix", "--file", "f"), "--fix"), (("dump", "x", "--core", "f", "--no-tokens"), "--core"),
    (("ls", "x"), "x"), (("dump", "x\n\x1b[31my"), r"x\n\x1b[31my"),
    (("dump", "--file", "x\n\x1b[31my"), "x ?[31my"),
])
def test_what_is_wrong_with_a_line_is_said_in_one(shmkv_command, words, expected):
    said = shmkv_command(*words)
    assert said.code == 2 and said.out == "" and expected in said.err


def test_version_and_completion(shmkv_command):
    assert re.fullmatch(r"shmkv \S+\n", shmkv_command("--version").out)
    environment = {**os.environ, "_SHMKV_COMPLETE": "bash_complete", "COMP_WORDS": "shmkv e", "COMP_CWORD": "1"}
    done = subprocess.run([sys.executable, "-c", "from shmkv_tools.cli import main; main()"], env=environment,
                          capture_output=True, text=True)
    assert done.stdout.split() == ["plain,entries", "plain,explain", "plain,export"], done.stderr


def test_a_name_is_completed(kv_buffer):
    environment = {**os.environ, "_SHMKV_COMPLETE": "bash_complete", "COMP_WORDS": f"shmkv dump {kv_buffer.name[:-2]}",
                   "COMP_CWORD": "2"}
    done = subprocess.run([sys.executable, "-c", "from shmkv_tools.cli import main; main()"], env=environment,
                          capture_output=True, text=True)
    assert f"plain,{kv_buffer.name}" in done.stdout.splitlines()


def test_without_click_the_remedy_is_named():
    probe = "import sys; sys.modules['click'] = None; from shmkv_tools.cli import main; sys.exit(main(['ls']))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == "shmkv: the command needs click: pip install 'shmkv[cli]'\n"


def test_a_bug_is_one_line_too(capsys, monkeypatch):
    monkeypatch.setattr("shmkv_tools.ls.found", lambda: 1 / 0)
    assert cli.main(["ls"]) == 2
    assert re.fullmatch(r"shmkv: a bug of shmkv: ZeroDivisionError: .*\n", capsys.readouterr().err)


def cpu_seconds(*words):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "shmkv_tools.cli", *words], stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_ls_starts_at_once(kv_buffer):
    assert min(cpu_seconds("ls") for _ in range(5)) < 0.25
    probe = "import sys; from shmkv_tools.cli import main; main(['ls']); print({'torch', 'numpy'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True).stdout.endswith("set()\n")


# ---------------------------------------------------------------- the living, the stopped, the dead

@pytest.mark.parametrize("scene", scenes.SCENES)
def test_every_view_of_every_scene_leaves_no_trace(kv_create, kv_spawn, shmkv_command, tmp_path, scene):
    buffer, child = scenes.SCENES[scene](kv_create, kv_spawn)
    if scene == "live":
        child.stop()
        eventually(lambda: "stopped" in shmkv_command("peers", buffer.name).out)
    before, descriptors = scenes.image(buffer.name), len(os.listdir("/proc/self/fd"))
    kept = tmp_path / "core"
    assert shmkv_command("dump", buffer.name, "--core", kept).code == 0
    for verb in VIEWS:
        wrong = 1 if verb[0] == "check" and scene != "live" else 0
        assert shmkv_command(*on(verb, buffer.name)).code == wrong, verb
        assert shmkv_command(*on(verb, buffer.name), "--json").code == wrong, verb
        from_file = [word for word in on(verb, "") if word]
        assert shmkv_command(*from_file, "--file", kept).code == wrong, verb
    assert buffer.name in shmkv_command("ls").out
    shmkv_command("gc", "--dry-run", buffer.name)
    refused = shmkv_command("rm", buffer.name)
    assert refused.code == 1 and f"pid {os.getpid()}" in refused.err
    assert scenes.image(buffer.name) == before and len(os.listdir("/proc/self/fd")) == descriptors
    if scene == "live":
        child.resume()


def test_the_state_is_told_right(kv_create, kv_spawn, shmkv_command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    calm, _ = scenes.living_pair(kv_create, kv_spawn)
    stopped, stopped_child = scenes.stopped_pair(kv_create, kv_spawn)
    killed, killed_child = scenes.killed_pair(kv_create, kv_spawn)
    for verb in ("dump", "entries", "peers", "waiters"):
        first = [shmkv_command(verb, buffer.name).out.splitlines()[0] for buffer in (calm, stopped, killed)]
        assert first[0] == f"{calm.name}: at rest"
        by = f"torn: left half changed by peer 1 halfway (pid {stopped_child.pid}, stopped)"
        assert first[1] == f"{stopped.name}: {by}; pid {stopped_child.pid} holds the lock (stopped)"
        assert first[2] == f"{killed.name}: torn: left half changed by peer 1 halfway (pid {killed_child.pid}, dead)"
    listed = shmkv_command("ls", "--json").document["segments"]
    states = {one["name"]: (one["state"], one["mutator_life"], one["lock_pid"]) for one in listed}
    assert states[calm.name] == ("at rest", "alive", None)
    assert states[stopped.name] == ("torn", "stopped", stopped_child.pid)
    assert states[killed.name] == ("torn", "dead", None)


def test_a_picture_in_motion_is_said_to_be_one(kv_create, shmkv_command, monkeypatch):
    buffer = scenes.filled(kv_create)
    numbers = iter(range(1, 10_000_000, 2))
    monkeypatch.setattr("shmkv.inspector._mutation", lambda fd: next(numbers))
    for verb in ("dump", "entries", "peers", "waiters"):
        said = shmkv_command(verb, buffer.name).out
        assert "moving: it changed while it was looked at, last by peer 0 prefill" in said
    said = shmkv_command("check", buffer.name)
    assert said.code == 2 and "changed all the time" in said.err


def test_who_waits_for_whom_is_drawn(kv_create, kv_spawn, shmkv_command):
    buffer, child = scenes.living_pair(kv_create, kv_spawn)
    with scenes.WaitingForRoom(buffer, 200 << 10):
        said = shmkv_command("waiters", buffer.name)
        assert f"1 decode (pid {child.pid}, alive) waits for an entry for 2 tokens" in said.out
        assert f"0 prefill (pid {os.getpid()}, alive) waits for room for 200.0 KiB" in said.out
        assert "they wait for each other: 0 prefill → 1 decode → 0 prefill" in said.out
        document = shmkv_command("waiters", buffer.name, "--json").document
        assert document["cycle"] == [0, 1] and {row["kind"] for row in document["waiters"]} == {"entry", "room"}
        only = shmkv_command("waiters", buffer.name, "--json", "--state", "room", "--limit", 5).document
        assert [row["kind"] for row in only["waiters"]] == ["room"]
    assert "they wait" not in shmkv_command("waiters", buffer.name).out


def test_views_are_sorted_and_narrowed(kv_create, kv_spawn, shmkv_command):
    buffer, _ = scenes.living_pair(kv_create, kv_spawn)

    def rows(*words):
        return shmkv_command(*words, "--json").document[words[0]]

    assert [row["sequence"] for row in rows("entries", buffer.name, "--sort", "bytes")] == [2, 1, 3]
    assert [row["sequence"] for row in rows("entries", buffer.name, "--reverse")] == [3, 2, 1]
    assert [row["sequence"] for row in rows("entries", buffer.name, "--state", "taken")] == [1]
    assert [row["sequence"] for row in rows("entries", buffer.name, "--sort", "ttl", "--limit", 1)] == [2]
    assert [row["role"] for row in rows("peers", buffer.name, "--sort", "leases")] == ["decode", "prefill"]
    assert rows("peers", buffer.name, "--state", "dead") == [] and rows("waiters", buffer.name, "--limit", 0) == []


def test_token_ids_can_be_left_out(kv_create, kv_spawn, shmkv_command):
    buffer, _ = scenes.living_pair(kv_create, kv_spawn)
    secret = str(scenes.SECRET)[:5]
    views = [("dump", "{}"), ("entries", "{}"), ("waiters", "{}"),
             ("explain", "{}", "--tokens", f"{TOKENS} 7 8", *NAMESPACE), ("explain", "{}", "--tokens", "5", *NAMESPACE)]
    for verb in views:
        for json_too in ((), ("--json",)):
            said = shmkv_command(*on(verb, buffer.name), *json_too, "--no-tokens")
            assert secret not in said.out, verb
    assert secret in shmkv_command("dump", buffer.name).out
    events = shmkv_command("dump", buffer.name, "--json", "--no-tokens").document["events"]
    assert {event["fingerprint"] for event in events} == {None}


def test_explaining_answers_by_its_exit_code(kv_create, shmkv_command, tmp_path):
    buffer = scenes.filled(kv_create)
    hit = shmkv_command(*on(EXPLAIN, buffer.name))
    assert hit.code == 0 and hit.out.startswith("hit: entry 2 is valid for 4 of 5 tokens")
    prompt = tmp_path / "prompt.json"
    prompt.write_text(json.dumps(scenes.PROMPT))
    miss = shmkv_command("explain", buffer.name, "--tokens-file", prompt, "--namespace", "model=toy")
    assert miss.code == 1 and "rank: 0 there, nothing asked for" in miss.out
    parts = shmkv_command("explain", buffer.name, "--tokens", f"{scenes.SECRET}, 5", *NAMESPACE)
    assert parts.code == 1 and f"position 1 differs: {scenes.SECRET + 1} there, 5 asked for" in parts.out
    assert "4294967295" in shmkv_command("explain", buffer.name, "--tokens", "9999999999").err
    typed = shmkv_command("explain", buffer.name, "--tokens", TOKENS, "--namespace", "model=toy", "--namespace",
                          'rank="0"', "--json").document["explain"]
    assert typed["hit"] and typed["sequence"] == 3


# ---------------------------------------------------------------- changing things

def test_check_recovers_only_when_told_to(kv_create, kv_spawn, shmkv_command):
    buffer, _ = scenes.killed_pair(kv_create, kv_spawn)
    before = scenes.image(buffer.name)
    said = shmkv_command("check", buffer.name)
    assert said.code == 1 and "left half done" in said.out and "has not been cleaned up after" in said.out
    assert scenes.image(buffer.name) == before
    said = shmkv_command("check", buffer.name, "--fix")
    assert said.code == 0 and "rebuilt what was left half changed (1)" in said.out and "sound" in said.out
    assert "took over what dead peers left (1)" in said.out
    assert shmkv_command("check", buffer.name).code == 0
    assert "nothing was to be done" in shmkv_command("check", buffer.name, "--fix").out


def test_a_stopped_holder_of_the_lock_is_not_robbed_by_fix(kv_create, kv_spawn, shmkv_command):
    buffer, _ = scenes.stopped_pair(kv_create, kv_spawn)
    before = scenes.image(buffer.name)
    assert shmkv_command("check", buffer.name, "--fix").code == 2
    assert scenes.image(buffer.name) == before


def leave(name):
    buffer = shmkv.create(name, **scenes.SMALL)
    buffer.insert(scenes.PROMPT, scenes.kv(3))
    os.kill(os.getpid(), signal.SIGKILL)


def test_rm_removes_the_dead_and_by_force_the_living(kv_create, kv_spawn, shmkv_command):
    name = unique_name()
    kv_spawn(leave, name).join()
    assert shmkv_command("rm", name).out == f"{name}: removed\n"
    assert not os.path.exists(f"/dev/shm/shmkv.{name}")
    buffer = kv_create()
    assert shmkv_command("rm", buffer.name).code == 1
    assert shmkv_command("rm", buffer.name, "--json").document["removed"] is False
    assert shmkv_command("rm", buffer.name, "--force").code == 0
    assert shmkv_command("rm", buffer.name, "--force").code == 2
    buffer.insert([1], scenes.kv(1))  # who has it mapped goes on


@pytest.mark.parametrize("mode, code", [(0o600, 0), (0o644, 2)])
def test_rm_by_force_removes_what_is_broken_but_nothing_foreign(shmkv_command, mode, code):
    name = unique_name()
    path = Path(f"/dev/shm/shmkv.{name}")
    path.write_bytes(b"no segment")
    path.chmod(mode)
    try:
        assert shmkv_command("rm", name).code in (1, 2)
        assert path.exists()
        assert name in shmkv_command("ls").out
        assert shmkv_command("rm", name, "--force").code == code
        assert path.exists() == bool(code)
    finally:
        path.unlink(missing_ok=True)


# ---------------------------------------------------------------- files

@pytest.mark.kv_timeout(100)
def test_damaged_files_are_an_error_or_shown(shmkv_command, core):  # noqa: F811
    test_inspector.prepare(core)
    codes = set()
    for seed in range(240):
        undo = test_inspector.flipped(core, seed)
        verb = [word for word in on(VIEWS[seed % len(VIEWS)], "") if word]
        codes.add(shmkv_command(*verb, "--file", core, *(("--json",) if seed % 4 == 1 else ())).code)
        test_inspector.restore(core, undo)
    assert codes >= {0, 1}


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:100], lambda data: data[:4095],
                                    lambda data: data[:60_000], lambda data: bytes(len(data))])
def test_truncated_and_zeroed_files_are_refused_by_every_view(shmkv_command, core, damage):  # noqa: F811
    core.write_bytes(damage(core.read_bytes()))
    for verb in VIEWS:
        said = shmkv_command(*[word for word in on(verb, "") if word], "--file", core)
        assert said.code == 2 and said.out == ""


# ---------------------------------------------------------------- what --json promises

def fits(kind, value, where):
    """Hold a value to a kind of the schema; returns the records and fields seen."""
    kind = kind.partition(":")[0]
    if kind.startswith("list of "):
        kinds = kind.removeprefix("list of ").partition("|")
        if value is None and kinds[2] == "null":
            return set()
        assert isinstance(value, list), where
        return set().union(*(fits(kinds[0], one, f"{where}[]") for one in value), set())
    if kind in schema.RECORDS:
        assert set(value) == set(schema.RECORDS[kind]), where
        return {(kind, name) for name in value}.union(
            *(fits(text, value[name], f"{where}.{name}") for name, text in schema.RECORDS[kind].items()))
    types = {"int": int, "str": str, "bool": bool, "object": dict, "null": type(None)}
    assert type(value) in [types[one] for one in kind.split("|")], (where, kind, value)
    return set()


def test_every_field_is_described_and_every_description_met(kv_create, kv_spawn, shmkv_command, core):  # noqa: F811
    living, _ = scenes.living_pair(kv_create, kv_spawn)
    broken = Path(f"/dev/shm/shmkv.{unique_name()}")
    broken.write_bytes(b"no segment")
    broken.chmod(0o600)
    try:
        said = {
            "ls": [shmkv_command("ls", "--json")], "doctor": [shmkv_command("doctor", "--json")],
            "gc": [shmkv_command("gc", "--json", "--dry-run", living.name)],
            "rm": [shmkv_command("rm", "--json", living.name)],
            **{verb[0]: [shmkv_command(*on(verb, living.name), "--json"),
                         shmkv_command(*[word for word in on(verb, "") if word], "--file", core, "--json")]
               for verb in VIEWS}}
    finally:
        broken.unlink()
    seen = set()
    assert set(said) == set(schema.DOCUMENTS)
    for verb, documents in said.items():
        for one in documents:
            document = one.document
            assert document.pop("schema") == schema.SCHEMA
            assert set(document) == set(schema.DOCUMENTS[verb]), verb
            for name, kind in schema.DOCUMENTS[verb].items():
                seen |= fits(kind, document[name], f"{verb}.{name}")
    assert {(kind, name) for kind, names in schema.RECORDS.items() for name in names} == seen
    assert shmkv_command("schema", "--json").document["records"] == schema.RECORDS
    assert "segment.now_ns" in shmkv_command("schema").out


# ---------------------------------------------------------------- what it looks like

@pytest.mark.parametrize("scene", scenes.SCENES)
@pytest.mark.parametrize("columns", [80, 100, 140])
def test_nothing_is_wider_than_the_terminal(kv_create, kv_spawn, shmkv_command, monkeypatch, columns, scene):
    monkeypatch.setenv("COLUMNS", str(columns))
    buffer, _ = scenes.SCENES[scene](kv_create, kv_spawn, role="a role of 32 letters, the most..")
    for verb in (("ls",), *VIEWS):
        lines = shmkv_command(*on(verb, buffer.name)).out.splitlines()
        wide = [line for line in lines if len(line) > columns]
        assert not wide, wide


def in_a_terminal(columns, *words, **environment):
    """What a terminal of this width shows, and the bytes that made it."""
    ours, theirs = pty.openpty()
    screen = pyte.Screen(columns, 80)
    import fcntl
    import struct
    import termios
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 80, columns, 0, 0))
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
    done = subprocess.Popen([sys.executable, "-m", "shmkv_tools.cli", *words], stdin=theirs, stdout=theirs,
                            stderr=theirs, env={**kept, "TERM": "xterm-256color", "LANG": "C.UTF-8", **environment})
    os.close(theirs)
    data = b""
    try:
        while part := os.read(ours, 65536):
            data += part
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    done.wait()
    pyte.ByteStream(screen).feed(data)
    return [line.rstrip() for line in screen.display], data


def test_colours_are_for_terminals_that_want_them(kv_create, kv_spawn, shmkv_command):
    buffer, _ = scenes.killed_pair(kv_create, kv_spawn)
    screen, data = in_a_terminal(100, "peers", buffer.name)
    assert b"\x1b[31mdead" in data and "dead" in " ".join(screen)
    assert b"\x1b" not in in_a_terminal(100, "peers", buffer.name, NO_COLOR="1")[1]
    assert "\x1b" not in shmkv_command("peers", buffer.name).out


def test_tables():
    assert table("a> b~ c?", [(1, "xyz", ""), (10, "x", "")]) == ["\x1b[1m a  b\x1b[0m", " 1  xyz", "10  x"]
    assert [age(ns) for ns in (-5, 10**6, 1.25e9, 61e9, 3 * 3600e9, 90_000e9, 2**64)] == [
        "0 ms", "1 ms", "1.2 s", "1m01s", "3h00m", "1d01h", "213503d23h"]
    assert [size(n) for n in (0, 1023, 1024, 1 << 20, 5 << 40, 2**64)] == [
        "0 B", "1023 B", "1.0 KiB", "1.0 MiB", "5.0 TiB", "16777216.0 TiB"]


@pytest.mark.kv_timeout(60)
def test_thousands_of_entries_are_shown_in_a_moment(kv_create, shmkv_command):
    buffer = kv_create(capacity=32 << 20, slots=4096, meta_capacity=4 << 20)
    tensors = scenes.kv(3)
    for n in range(4096):
        buffer.insert([n, 1, 2], tensors, namespace=scenes.NAMES)
    took = []
    for _ in range(4):
        started = time.process_time()
        assert len(shmkv_command("dump", buffer.name).out.splitlines()) > 8192
        took.append(time.process_time() - started)
    assert min(took) < 0.3, took


# ---------------------------------------------------------------- what may not happen to others

EVIL = "\x1b]0;pwn\x07\n\x1b[2J\u202e\x9b"


@pytest.mark.parametrize("verb", [("dump",), ("entries",), ("explain", "--tokens", "5")])
def test_no_control_character_of_a_namespace_reaches_the_terminal(kv_buffer, shmkv_command, verb):
    kv_buffer.insert([5], {"x": torch.ones(1)}, namespace={EVIL: EVIL})
    said = shmkv_command(verb[0], kv_buffer.name, *verb[1:])
    assert not [letter for letter in said.out + said.err if not letter.isprintable() and letter != "\n"]


def test_gc_leaves_alone_what_is_no_semaphore_of_ours(shmkv_command):
    tag = unique_name()
    paths = [Path(f"/dev/shm/sem.shmkv.{tag}"), Path(f"/dev/shm/sem.shmkv.{tag}.gone.{'0' * 16}.0.1")]
    link = Path(f"/dev/shm/sem.shmkv.{tag}.{'1' * 16}.0.1")
    try:
        for path in paths:
            path.write_text("foreign")
        link.symlink_to("/etc/passwd")
        said = shmkv_command("gc").out
        assert all(path.exists() for path in paths) and link.is_symlink() and tag not in said
    finally:
        for path in (*paths, link):
            path.unlink()


def test_gc_of_a_name_that_is_not_there_is_an_error(shmkv_command):
    said = shmkv_command("gc", unique_name())
    assert said.code == 2 and "no segment" in said.err


def test_a_kept_picture_is_for_its_owner_alone_and_harms_no_other_file(kv_buffer, shmkv_command, tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("old")
    kept.chmod(0o644)
    assert shmkv_command("dump", kv_buffer.name, "--core", str(kept)).code == 0
    assert kept.stat().st_mode & 0o777 == 0o600 and os.listdir(tmp_path) == ["kept"]
    for wrong in (f"/dev/shm/shmkv.{kv_buffer.name}", "/dev/full"):
        assert shmkv_command("dump", kv_buffer.name, "--core", wrong).code == 2
    assert kv_buffer.problems() == []


def test_a_closed_pipe_does_not_turn_yes_into_no(kv_buffer):
    kv_buffer.insert([5], {"x": torch.ones(1)})
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", "shmkv_tools.cli", "explain", kv_buffer.name, "--tokens", "5"],
                          stdout=writer, stderr=subprocess.PIPE, text=True, timeout=30)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_explain_names_the_namespace_that_differs_least(kv_buffer, shmkv_command):
    kv_buffer.insert([5, 6], {"x": torch.ones(1)}, namespace={"other": 1, "fields": 2})
    kv_buffer.insert([5, 6], {"x": torch.ones(1)}, namespace={"layers": 32, "model": "m"})
    said = shmkv_command("explain", kv_buffer.name, "--tokens", "5 6", "--namespace", 'layers="32"', "--namespace",
                         "model=m")
    assert "layers: 32 there, '32' asked for" in said.out and said.code == 1
