"""The views: top in a terminal of 80x24, map's drawings, export's metrics; also of pictures of no sense."""

import fcntl
import json
import os
import pty
import random
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import urllib.error
import urllib.request
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pyte
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

import shmkv
from shmkv import inspector
from shmkv.errors import NoSuchSegment, SegmentBroken, ShmkvError
from shmkv.layout import WORD_BYTES, Header
from shmkv.testing import unique_name
from shmkv_tools import cli, export, figures, frame, top, trie
from shmkv_tools import map as mapping

SVG = "{http://www.w3.org/2000/svg}"
TOKEN, SECRET = 3141592653, "namespace-of-a-customer"
ROLE = "decode 世界 of a long name"
FLIPS = 200


def run(capsys, *line):
    """(exit code, stdout, stderr) of the command, run here."""
    code = cli.main(list(line))
    return code, *capsys.readouterr()


def set_mutation(name, odd):
    """Leave the segment as a writer who died in mid-change leaves it, or as it was."""
    with open(f"/dev/shm/shmkv.{name}", "r+b", buffering=0) as file:
        at = Header.mutation * WORD_BYTES
        word = int.from_bytes(os.pread(file.fileno(), WORD_BYTES, at), sys.byteorder)
        os.pwrite(file.fileno(), (word & ~1 | odd).to_bytes(WORD_BYTES, sys.byteorder), at)


def wait_for(name, tokens):
    with shmkv.attach(name, role=ROLE) as buffer:
        return bool(buffer.drop_select(tokens, timeout=30))


@pytest.fixture(scope="module")
def cores(tmp_path_factory):
    """Pictures that were kept: empty, of one entry, of 4,096, torn, and each as a file."""
    folder = tmp_path_factory.mktemp("cores")
    for name, n in (("empty", 0), ("one", 1), ("many", 4096)):
        with shmkv.create(unique_name(), capacity="32MiB", slots=max(16, n + 8), meta_capacity="4MiB") as buffer:
            fill(buffer, n)
            inspector.look(buffer.name).save(str(folder / name))
            if n == 1:
                set_mutation(buffer.name, True)
                inspector.look(buffer.name).save(str(folder / "torn"))
                set_mutation(buffer.name, False)
    return folder


def fill(buffer, n):
    """Entries with beginnings in common, in three namespaces, with holes between them."""
    chance = random.Random(n)
    documents = [[chance.randrange(50_000) for _ in range(40)] for _ in range(8)]
    namespaces = [None, {"model": f"<{SECRET} & \"sons\">"},
                  {"model": "世界\u202e\x00", "rank": 10**5000, "list": [10**5000]}]
    for serial in range(n):
        tokens = [TOKEN, *chance.choice(documents)[:chance.randrange(40)], chance.randrange(50_000)]
        namespace = chance.choices(namespaces, (50, 50, 1))[0]
        buffer.insert(tokens, {"kv": torch.zeros(chance.randrange(5000), dtype=torch.uint8)}, namespace=namespace)
        if serial % 7 == 3:
            buffer.cancel(tokens, namespace=namespace)


def flipped(core, chance, n_bits):
    """The picture with bits flipped behind its geometry: anywhere, or in one of its tables."""
    picture = inspector.load(str(core))
    data, layout = bytearray(picture.raw), picture.layout
    area = chance.choice([None, layout.peers, layout.waits, layout.leases, layout.entries, layout.journal, layout.meta])
    first, end = (Header.instance * WORD_BYTES, len(data)) if area is None else (area.at, area.at + area.nbytes)
    for _ in range(n_bits):
        data[chance.randrange(first, end)] ^= 1 << chance.randrange(8)
    state = chance.choice(list(inspector.State))
    return inspector.Picture(picture.name, picture.layout, bytes(data), picture.raw, state, {0: "dead"}, None,
                             picture.now_ns, picture.taken_ns)


# ---------------------------------------------------------------- top in a terminal

class Terminal:
    """`shmkv top` in a pseudo terminal; the screen is larger than the terminal claims, to see what leaves it."""

    def __init__(self, *line, size=(80, 24), **environment):
        self.master, self.slave = pty.openpty()
        self.resize(*size)
        self.before = termios.tcgetattr(self.slave)
        self.screen, self.output = pyte.Screen(200, 60), b""
        self.stream = pyte.ByteStream(self.screen)
        environment = {**os.environ, "PYTHONIOENCODING": "utf8", "TERM": "xterm-256color", **environment}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shmkv_tools.cli", "top", *line], stdin=self.slave, stdout=self.slave,
            stderr=self.slave, env=environment, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)

    def resize(self, columns, lines):
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def read_until(self, condition, seconds=20):
        """Feed the screen until the condition holds of its lines."""
        deadline = time.monotonic() + seconds
        while not condition(self.lines()):
            assert time.monotonic() < deadline, "\n".join(self.lines())
            self._feed(0.1)

    def end(self, seconds=20):
        """Wait for the end of the process; returns its exit code."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < deadline, "\n".join(self.lines())
            self._feed(0.05)
        while self._feed(0):
            pass
        return self.process.returncode

    def _feed(self, seconds):
        if not select.select([self.master], [], [], seconds)[0]:
            return False
        data = os.read(self.master, 65536)
        self.output += data
        self.stream.feed(data)
        return True

    def lines(self):
        return [line.rstrip() for line in self.screen.display]

    def press(self, key):
        os.write(self.master, key)

    def is_as_before(self):
        modes = (b"\x1b[?1049h", b"\x1b[?1049l"), (b"\x1b[?25l", b"\x1b[?25h"), (b"\x1b[?7l", b"\x1b[?7h")
        back = all(self.output.rfind(taken) < self.output.rfind(given) for taken, given in modes)
        return back and termios.tcgetattr(self.slave) == self.before and not self.screen.cursor.hidden


def has(*texts):
    return lambda lines: all(any(text in line for line in lines) for text in texts)


def fits(lines, columns, rows):
    return not any(lines[rows:]) and all(cell_len(line) <= columns for line in lines)


@pytest.mark.parametrize("key, code", [(b"q", 0), (b"\x03", 0)], ids=["q", "Ctrl-C"])
def test_top_fits_a_terminal_and_gives_it_back(key, code, kv_buffer, kv_spawn):
    fill(kv_buffer, 30)
    child = kv_spawn(wait_for, kv_buffer.name, list(range(7, 30)))
    with Terminal(kv_buffer.name, "--interval", "0.1") as terminal:
        terminal.read_until(has("shmkv top", "at rest", "q quits", "an entry for 23 tokens", "decode 世", "inserts"))
        assert fits(terminal.lines(), 80, 24)
        child.stop()
        terminal.read_until(has("stopped"))
        child.kill()
        terminal.read_until(has("dead"))
        assert fits(terminal.lines(), 80, 24)
        terminal.press(b"x")
        terminal.press(key)
        assert terminal.end() == code and terminal.is_as_before()


@pytest.mark.kv_timeout(10)
def test_keys_that_an_interrupt_takes_back_are_not_waited_for(monkeypatch, kv_watchdog):
    """Ctrl-C flushes what was typed, also between the moment it is seen and the moment it is read."""
    from shmkv_tools import screen
    master, slave = pty.openpty()
    seen = select.select

    def flushed_then(*sources):
        found = seen(*sources)
        termios.tcflush(slave, termios.TCIFLUSH)
        return found

    with open(os.dup(slave)) as keys, open(os.dup(slave), "w") as out:
        monkeypatch.setattr(sys, "stdin", keys)
        monkeypatch.setattr(sys, "stdout", out)
        with screen.Screen(colours=False) as shown:
            monkeypatch.setattr(select, "select", flushed_then)
            os.write(master, b"x\n")
            assert shown.wait(2.0) in ("key", "")
            monkeypatch.setattr(select, "select", seen)
            os.write(master, b"q\n")
            assert shown.wait(2.0) == "q"
        monkeypatch.undo()
    os.close(master)
    os.close(slave)


def test_top_draws_into_what_is_there_without_clearing(kv_buffer):
    with Terminal(kv_buffer.name, "--interval", "0.05", "--frames", "4") as terminal:
        assert terminal.end() == 0 and terminal.is_as_before()
        assert terminal.output.count(b"\x1b[?2026h") == terminal.output.count(b"\x1b[?2026l") == 4
        frames = terminal.output.split(b"\x1b[?2026h")[1:]
        assert all(b"\x1b[2J" not in text.split(b"\x1b[?2026l")[0] for text in frames[1:])
        assert b"\n" not in terminal.output


def test_top_follows_the_size_of_its_terminal(kv_buffer):
    with Terminal(kv_buffer.name, "--interval", "60") as terminal:
        terminal.read_until(has("peers"))
        terminal.resize(40, 9)
        terminal.read_until(lambda lines: fits(lines, 40, 9) and has("shmkv top", "entries")(lines))
        terminal.resize(100, 30)
        terminal.read_until(has("peers", "q quits"))
        assert fits(terminal.lines(), 100, 30)
        terminal.press(b"q")
        assert terminal.end() == 0


def test_top_without_colours(kv_buffer):
    with Terminal(kv_buffer.name, "--frames", "1", NO_COLOR="1") as terminal:
        assert terminal.end() == 0
        assert not re.search(rb"\x1b\[[0-9;]*m", terminal.output)
    with Terminal(kv_buffer.name, "--frames", "1", NO_COLOR="") as terminal:
        assert terminal.end() == 0
        assert re.search(rb"\x1b\[32m", terminal.output)


def test_top_says_that_the_segment_is_gone(kv_create):
    buffer = kv_create()
    with Terminal(buffer.name, "--interval", "0.05") as terminal:
        terminal.read_until(has("peers"))
        buffer.close()
        assert terminal.end() == 1 and terminal.is_as_before()
        assert has(f"shmkv: the segment {buffer.name} is gone")(terminal.lines())


def test_top_gives_the_terminal_back_on_sigterm_and_for_a_while_on_ctrl_z(kv_buffer):
    with Terminal(kv_buffer.name, "--interval", "0.05") as terminal:
        terminal.read_until(has("peers"))
        terminal.press(b"\x1a")
        os.waitid(os.P_PID, terminal.process.pid, os.WSTOPPED | os.WNOWAIT)
        while terminal._feed(0.05):
            pass
        assert terminal.is_as_before()
        os.kill(terminal.process.pid, signal.SIGCONT)
        terminal.read_until(has("peers"))
        terminal.process.terminate()
        assert terminal.end() == 143 and terminal.is_as_before()


def test_top_shows_a_torn_segment_and_its_repair(kv_buffer):
    kv_buffer.insert([1, 2, 3], {"kv": torch.zeros(3)})
    set_mutation(kv_buffer.name, True)
    with Terminal(kv_buffer.name, "--interval", "0.05") as terminal:
        terminal.read_until(has("torn", "left half changed by pid"))
        assert fits(terminal.lines(), 80, 24)
        set_mutation(kv_buffer.name, False)
        terminal.read_until(has("at rest"))
        terminal.press(b"q")
        assert terminal.end() == 0


# ---------------------------------------------------------------- top as text

def test_top_as_text(kv_buffer, capsys):
    kv_buffer.insert([1, 2, 3], {"kv": torch.zeros(3)})
    assert kv_buffer.drop_select([1, 2, 3]).release() is None and not kv_buffer.select([9])
    code, out, err = run(capsys, "top", kv_buffer.name, "--frames", "2", "--interval", "0.05")
    assert (code, err) == (0, "") and "\x1b" not in out
    first, second = out.split("\n\nshmkv top ")
    assert "known from the second frame on" in first and "inserts 0/s" in second
    assert "50.0% of 2 ever" in first and "sealed to taken, the last 1:   p50" in first
    assert "no entries" in first and max(map(cell_len, out.splitlines())) <= 80


def test_top_hides_tokens_if_told_to(kv_buffer, kv_spawn, capsys):
    kv_spawn(wait_for, kv_buffer.name, [TOKEN, TOKEN])
    shmkv.testing.eventually(lambda: kv_buffer.stats().waiting["entry"])
    assert str(TOKEN) in run(capsys, "top", kv_buffer.name, "--frames", "1")[1]
    assert str(TOKEN) not in run(capsys, "top", kv_buffer.name, "--frames", "1", "--no-tokens")[1]


def test_top_of_what_is_not_there(capsys):
    code, out, err = run(capsys, "top", "no-such-segment", "--frames", "1")
    assert code == 2 and not out and len(err.splitlines()) == 1


def test_top_waits_for_a_broken_segment_to_be_replaced(kv_buffer, monkeypatch, capsys):
    looks = iter([SegmentBroken("the object shrank"), NoSuchSegment("gone")])

    def look(name):
        raise next(looks)

    picture = inspector.look(kv_buffer.name)
    monkeypatch.setattr(top, "look", lambda name: monkeypatch.setattr(top, "look", look) or picture)
    code, out, err = run(capsys, "top", kv_buffer.name, "--interval", "0.05")
    assert code == 1 and "no picture: the object shrank" in out
    assert err == f"shmkv: the segment {kv_buffer.name} is gone\n"


@pytest.mark.parametrize("width, height", [(1, 1), (10, 3), (33, 12), (80, 24), (80, 15), (132, 50), (80, None)])
@pytest.mark.parametrize("core", ["empty", "one", "many", "torn"])
def test_a_frame_fits(cores, core, width, height):
    picture = inspector.load(str(cores / core))
    for blocks in (True, False):
        lines = frame.Frame(width, height, blocks).lines(picture, picture, "a note")
        assert len(lines) <= (height or 1000)
        assert all(cell_len(frame.plain(line)) <= width for line in lines)
        assert blocks or all(frame.plain(line).isascii() for line in lines)


def test_rates_are_of_one_segment_only(cores):
    one, many = (inspector.load(str(cores / core)) for core in ("one", "many"))
    assert frame.growth(one, None) is frame.growth(one, many) is frame.growth(one, one) is None


def test_hand_offs_are_binned_by_thirds_of_a_decade():
    bins = frame.binned([0.0, 1.5e-5, 1.1e-4, 0.9, 1.1, 1e9])
    assert sum(bins) == 6 and bins[0] == 2 and bins[3] == 1 and bins[14] == 1 and bins[15] == 1 and bins[-1] == 1


@pytest.mark.parametrize("seconds, text", [(0, "0.0 us"), (1.5e-6, "1.5 us"), (1.2e-4, "120 us"), (0.0123, "12.3 ms"),
                                           (2.5, "2.5 s")])
def test_latencies_are_written_with_the_digits_that_count(seconds, text):
    assert figures.latency(seconds) == text


@pytest.mark.parametrize("value, text", [(0, "0"), (3.14, "3.1"), (1234, "1,234"), (99_999, "99,999"),
                                         (1_234_567, "1.23M"), (1 << 63, "9.22E")])
def test_counts_stay_short(value, text):
    assert figures.count(value) == text


# ---------------------------------------------------------------- map

@pytest.mark.parametrize("core", ["empty", "one", "many", "torn"])
def test_a_drawing_is_whole_and_stands_by_itself(cores, core, tmp_path, capsys):
    for flag in ("--svg", "--html"):
        file = tmp_path / f"{core}{flag}"
        assert run(capsys, "map", "--file", str(cores / core), flag, str(file)) == (0, "", "")
        text = file.read_text()
        root = ElementTree.fromstring(text)
        drawing = root if flag == "--svg" else root.find(f".//{SVG}svg")
        check_drawing(drawing)
        assert "prefers-color-scheme:dark" in text and "<script" not in text
        assert not re.search(r"(href|src|url\()", text) and text.count("http") == 1  # the namespace of SVG
        HTMLParser(convert_charrefs=True).feed(text)


def check_drawing(drawing):
    """No two texts meet, none leaves the drawing or the tile that it begins in."""
    width, height = float(drawing.get("width")), float(drawing.get("height"))
    boxes = sorted(text_box(text) for text in drawing.iter(f"{SVG}text"))
    assert boxes
    for at, (left, top_edge, right, bottom, text) in enumerate(boxes):
        assert 0 <= left and right <= width and 0 <= top_edge and bottom <= height, text
        for other_left, other_top, _, other_bottom, other in boxes[at + 1:]:
            if other_left >= right:
                break
            assert bottom <= other_top or other_bottom <= top_edge, (text, other)
    for tile in drawing.iter(f"{SVG}rect"):
        if tile.get("class") == "tile":
            x, end = float(tile.get("x")), float(tile.get("x")) + float(tile.get("width"))
            y, foot = float(tile.get("y")), float(tile.get("y")) + float(tile.get("height"))
            inside = [box for box in boxes if x <= box[0] < end and y <= box[1] < foot]
            assert len(inside) == 3 and all(box[2] <= end and box[3] <= foot for box in inside)


def text_box(text):
    size, x, y = (float(text.get(name)) for name in ("font-size", "x", "y"))
    width = cell_len(text.text or "") * 0.602 * size
    left = x - {"end": width, "middle": width / 2}.get(text.get("text-anchor"), 0)
    return left, y - 0.8 * size, left + width, y + 0.25 * size, text.text


def test_the_check_of_drawings_can_fail():
    drawing = f'<svg xmlns="{SVG[1:-1]}" width="100" height="50">{{}}</svg>'
    for texts in ('<text x="95" y="20" font-size="12">xx</text>', '<text x="5" y="5" font-size="12">x</text>',
                  '<text x="5" y="20" font-size="12">xxx</text><text x="20" y="24" font-size="12">x</text>'):
        with pytest.raises(AssertionError):
            check_drawing(ElementTree.fromstring(drawing.format(texts)))


def test_a_drawing_shows_runs_holes_and_common_beginnings(kv_buffer, tmp_path, capsys):
    for tokens in ([5, 8, 13], [5, 8, 13, 21], [5, 8, 99], [7]):
        kv_buffer.insert(tokens, {"kv": torch.zeros(1 << 20, dtype=torch.uint8)}, namespace={"model": "<a>&b"})
    kv_buffer.cancel([5, 8, 13], namespace={"model": "<a>&b"})
    with kv_buffer.drop_select([7], namespace={"model": "<a>&b"}):
        assert run(capsys, "map", kv_buffer.name, "--svg", str(tmp_path / "map.svg"))[0] == 0
    root = ElementTree.fromstring((tmp_path / "map.svg").read_text())
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"model='<a>&b'", "5 8", "13 21", "99", "7", "entry 2", "entry 4", "hole 1.0 MiB"} <= set(texts)
    runs = [rect for rect in root.iter(f"{SVG}rect") if (rect.findtext(f"{SVG}title") or "").startswith("entry ")]
    assert {rect.get("class") for rect in runs} == {"ready0", "taken0"}
    assert sum(float(rect.get("width")) for rect in runs) == pytest.approx(3 / 16 * 8 * mapping.TRACK, rel=0.01)


def test_tokens_can_be_left_out(cores):
    picture = inspector.load(str(cores / "many"))
    assert str(TOKEN) in mapping.drawn(picture) and str(TOKEN) not in mapping.drawn(picture, tokens=False)
    assert SECRET in mapping.drawn(picture)


def test_thousands_of_entries_are_drawn_in_time_and_in_few_rows(cores):
    picture, started = inspector.load(str(cores / "many")), time.process_time()
    root = ElementTree.fromstring(mapping.drawn(picture))
    assert time.process_time() - started < 3
    assert float(root.get("height")) < 3000 and len(list(root.iter(f"{SVG}text"))) < 1500


@pytest.mark.parametrize("line", [["x"], ["x", "--svg", "a", "--html", "b"], ["--svg", "a"],
                                  ["x", "--file", "y", "--svg", "a"], ["--file", "/nowhere", "--svg", "a"]])
def test_a_wrong_line_is_refused_in_one_line(line, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "map", *line)
    assert code == 2 and not out and len(err.splitlines()) == 1 and not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_is_one_line(cores, capsys):
    code, out, err = run(capsys, "map", "--file", str(cores / "one"), "--svg", "/proc/no/such")
    assert code == 2 and len(err.splitlines()) == 1


TOKENS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=30)


@settings(max_examples=100, deadline=None)
@given(TOKENS, st.integers(1, 40))
def test_the_tree_has_every_entry_once(rows, n_rows):
    leaves = [trie.Leaf(struct.pack(f"={len(row)}I", *row), serial, "ready") for serial, row in enumerate(rows)]
    root, seen = trie.grow(leaves), []
    walk = [(root, [])]
    while walk:
        node, before = walk.pop()
        tokens = before + node.edge(100)
        assert len(tokens) == node.end and node.count == len(node.leaves) + sum(child.count for child in node.children)
        assert node is root or node.leaves or len(node.children) > 1
        assert len({child.edge(1)[0] for child in node.children}) == len(node.children)
        seen += [(tokens, leaf.sequence) for leaf in node.leaves]
        walk += [(child, tokens) for child in node.children]
    assert sorted(seen) == sorted((row, serial) for serial, row in enumerate(rows))
    shown = list(trie.visible([root], n_rows))
    assert len(shown) <= max(1, n_rows) and shown[0].node is root


def test_a_chain_of_prefixes_is_no_deeper_than_can_be_shown():
    leaves = [trie.Leaf(struct.pack("=I", 7) * n, n, "ready") for n in range(1, 3000)]
    shown = list(trie.visible([trie.grow(leaves)], 90))
    assert len(shown) == trie.DEEPEST + 1 and shown[-1].node.count == 3000 - trie.DEEPEST and not shown[-1].is_open


# ---------------------------------------------------------------- pictures of no sense

@pytest.mark.parametrize("core, n_pictures", [("one", FLIPS), ("torn", FLIPS), ("many", 5)])
def test_flipped_bits_never_break_a_view(cores, core, n_pictures):
    chance = random.Random(core)
    n_views = 0
    for _ in range(n_pictures):
        picture = flipped(cores / core, chance, chance.choice((1, 20, 2000)))
        for view in (lambda p: frame.Frame(80, 24).lines(p, p), lambda p: list(export.samples(p)),
                     lambda p: check_drawing(ElementTree.fromstring(mapping.drawn(p)))):
            try:
                view(picture)
                n_views += 1
            except ShmkvError:
                pass
    assert n_views > n_pictures


# ---------------------------------------------------------------- export

NAMES = """
shmkv_aborted_total shmkv_arena_capacity_bytes shmkv_arena_holes shmkv_arena_largest_hole_bytes shmkv_arena_used_bytes
shmkv_cancelled_total shmkv_consumed_total shmkv_created_timestamp_seconds shmkv_deaths_total shmkv_entries
shmkv_evicted_total shmkv_expired_total shmkv_handoff_recent_seconds shmkv_handouts_total shmkv_inserted_bytes_total
shmkv_inserts_total shmkv_longest_wait_seconds shmkv_lost_total shmkv_misses_total shmkv_oldest_entry_age_seconds
shmkv_orphaned_total shmkv_owner_alive shmkv_peers shmkv_picture shmkv_recoveries_total shmkv_redelivered_total
shmkv_shares_total shmkv_signals_dropped_total shmkv_signals_total shmkv_slots shmkv_staged_inserts_total
shmkv_starved_total shmkv_taken_bytes_total shmkv_takes_total shmkv_timeouts_total shmkv_up shmkv_wait_cycle_peers
shmkv_waiters
""".split()
SAMPLE = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)")


def samples_of(text):
    """{(name, labels): value} of the text format."""
    lines = [SAMPLE.fullmatch(line) for line in text.splitlines() if not line.startswith("#")]
    return {(line[1], line[2]): float(line[3]) for line in lines}


def test_the_metrics_are_the_documented_ones(kv_buffer, kv_spawn, capsys):
    kv_buffer.insert([TOKEN, 2], {"kv": torch.zeros(3)}, namespace={"model": SECRET})
    kv_buffer.insert([TOKEN], {"kv": torch.zeros(3)})
    kv_buffer.drop_select([TOKEN]).release()
    kv_spawn(wait_for, kv_buffer.name, [TOKEN, 9])
    shmkv.testing.eventually(lambda: kv_buffer.stats().waiting["entry"])
    code, out, err = run(capsys, "export", kv_buffer.name, "--once")
    assert code == 0 and not err
    found, mine = samples_of(out), f'segment="{kv_buffer.name}"'
    assert sorted({name for name, _ in found}) == sorted(NAMES) == sorted(export.FAMILIES)
    assert found["shmkv_up", mine] == 1 and found["shmkv_inserts_total", mine] == 2
    assert found["shmkv_entries", f'{mine},state="ready"'] == 1 and found["shmkv_arena_used_bytes", mine] == 4096
    assert found["shmkv_peers", f'life="alive",{mine}'] == 2 and found["shmkv_waiters", f'kind="entry",{mine}'] == 1
    assert found["shmkv_handouts_total", f'path="host",{mine}'] == 1
    assert str(TOKEN) not in out and SECRET not in out
    assert sorted(re.findall(r"^\w+", run(capsys, "export", "--list")[1], re.MULTILINE)) == sorted(NAMES)


def test_a_segment_that_is_gone_or_broken_is_down(kv_create, capsys):
    buffer, broken = kv_create(), Path(f"/dev/shm/shmkv.{unique_name()}")
    broken.touch(0o600)
    broken.write_bytes(bytes(8192))
    name = broken.name.removeprefix("shmkv.")
    try:
        code, out, _ = run(capsys, "export", buffer.name, "gone", name, "not a name", "--once")
    finally:
        broken.unlink()
    assert code == 0
    assert {labels: value for (what, labels), value in samples_of(out).items() if what == "shmkv_up"} == {
        f'segment="{buffer.name}"': 1, 'segment="gone"': 0, f'segment="{name}"': 0, 'segment="not a name"': 0}


def test_without_names_all_segments_are_exported(kv_create, capsys):
    buffers = [kv_create(), kv_create()]
    found = samples_of(run(capsys, "export", "--once")[1])
    assert all(found["shmkv_up", f'segment="{buffer.name}"'] == 1 for buffer in buffers)


@pytest.mark.parametrize("ends", [signal.SIGINT, signal.SIGTERM])
def test_scrapes_are_served_until_told_to_end(ends, kv_create, capsys):
    buffer = kv_create()
    line = [sys.executable, "-m", "shmkv_tools.cli", "export", buffer.name, "--port", "0"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        try:
            url = process.stdout.readline().strip()
            port = url.rpartition(":")[2].partition("/")[0]
            assert scraped(url)["shmkv_up", f'segment="{buffer.name}"'] == 1
            code, _, err = run(capsys, "export", "--port", port)
            assert code == 2 and len(err.splitlines()) == 1 and port in err
            buffer.close()
            assert scraped(url) == {("shmkv_up", f'segment="{buffer.name}"'): 0}
            process.send_signal(ends)
            assert process.wait(10) == 0
        finally:
            process.kill()
    with pytest.raises(urllib.error.URLError):
        scraped(url)


def scraped(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return samples_of(answer.read().decode())


def test_the_dashboard_names_metrics_that_exist_and_labels_that_they_have():
    board = json.loads((Path(export.__file__).parent / "grafana.json").read_text())
    lines = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    used = {name for line in lines for name in re.findall(r"shmkv_\w+", line)}
    assert used and used <= set(NAMES)
    for panel in board["panels"]:
        for target in panel["targets"]:
            names = re.findall(r"(shmkv_\w+)\{", target["expr"])
            labels = {"segment", *(export.FAMILIES[name].label for name in names)}
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(places)) == len(places) and len({panel["id"] for panel in board["panels"]}) == len(places)


# ---------------------------------------------------------------- all of them

@pytest.mark.parametrize("verb", ["top", "map", "export"])
def test_help_has_an_example(verb, capsys):
    code, out, _ = run(capsys, verb, "--help")
    assert code == 0 and f"shmkv {verb} " in out.partition("example")[2]


def test_the_views_start_without_torch():
    code = "import sys; from shmkv_tools import top, map, export; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_looking_is_measured():
    code = """if True:
        from shmkv_tools.bench import looking
        looking.QUICK_ROUNDS, looking.SETTLE_S, looking.STRETCH_S = 1, 0.02, 0.1
        looking.main(["--quick"])"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "no trace of them" in done.stdout, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("  looking, killed")]
