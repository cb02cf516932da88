"""The house is in order: floors, imports, sync points, headers, nothing unpickled; and format version 1 is what it was.

Every checker has a control: a small bad house in which it fires.
"""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import shmkv
from shmkv import entries, fetch, journal, layout, leases, peers, regions, segment, signals, transport
from shmkv.testing import unique_name
from shmkv_tools import checks

TEXTS = checks.sources()


def house(**texts):
    """A package of the given modules: `transport__host` is transport/host.py."""
    return {name.replace("__", ".") if name != "__init__" else name: textwrap.dedent(text)
            for name, text in texts.items()}


# ---------------------------------------------------------------- this house

def test_all_modules_are_read():
    folder = Path(shmkv.__file__).parent
    assert len(TEXTS) == len(list(folder.rglob("*.py"))) and {"__init__", "layout", "transport.host"} <= set(TEXTS)


@pytest.mark.parametrize("check", [checks.layers, checks.torch_users, checks.system_users, checks.unsafe])
def test_this_house_is_in_order(check):
    assert list(check(TEXTS)) == []


def test_the_sync_points_of_this_house_have_both_ends():
    assert list(checks.sync_points(TEXTS)) == []


@pytest.mark.parametrize("protocol", checks.PROTOCOLS)
def test_the_header_of_a_protocol_file_is_whole(protocol):
    assert list(checks.headers({protocol: TEXTS[protocol]}, [protocol])) == []


def test_no_file_claims_to_be_a_protocol_that_is_not_listed():
    found = "\n".join(checks.headers(TEXTS))
    assert "is not listed as one" not in found and "without a file" not in found


def test_the_checks_need_the_standard_library_only_and_run_as_a_program():
    code = "import sys, shmkv_tools.checks; print({'torch', 'numpy', 'posix_ipc', 'shmkv'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
    done = subprocess.run([sys.executable, "-m", "shmkv_tools.checks"], capture_output=True, text=True)
    assert (done.returncode == 0) == (done.stdout == "the house is in order\n"), done.stderr


# ---------------------------------------------------------------- controls: floors

FLOORS = {"errors": 0, "layout": 1, "segment": 2, "sync": 2, "transport": 3, "transport.host": 4, "__init__": 5}
SOUND = house(errors="", layout="from .errors import E", segment="from . import layout\nfrom shmkv.errors import E",
              sync="import shmkv.layout", transport="from ..segment import S", transport__host="from . import C",
              __init__="from .transport.host import H")


def test_a_sound_house_passes():
    assert list(checks.layers(SOUND, FLOORS, {})) == []


@pytest.mark.parametrize("module, text, finding", [
    ("sync", "from .segment import S", "sync:1: imports segment (floor 2) from floor 2"),
    ("sync", "from . import segment", "sync:1: imports segment"),
    ("layout", "\nimport shmkv.segment", "layout:2: imports segment (floor 2) from floor 1"),
    ("layout", "from shmkv.segment import S", "layout:1: imports segment"),
    ("layout", "def f():\n    from .segment import S", "layout:2: imports segment"),
    ("layout", "if TYPE_CHECKING:\n    from .segment import S", "layout:2: imports segment"),
    ("transport.host", "from .. import create", "transport.host:1: imports __init__ (floor 5) from floor 4"),
    ("transport", "from .host import H", "transport:1: imports transport.host (floor 4) from floor 3"),
    ("errors", "import shmkv", "errors:1: imports __init__"),
    ("attic", "", "attic: has no floor"),
])
def test_an_import_that_does_not_go_downward_is_found(module, text, finding):
    found = list(checks.layers({**SOUND, module: text}, FLOORS, {}))
    assert len(found) == 1 and found[0].startswith(finding), found


def test_an_exception_counts_as_long_as_it_is_used():
    texts = {**SOUND, "sync": "from .segment import S"}
    assert list(checks.layers(texts, FLOORS, {("sync", "segment"): "why"})) == []
    assert "not used" in "".join(checks.layers(SOUND, FLOORS, {("sync", "segment"): "why"}))
    assert "without a module" in "".join(checks.layers(SOUND, {**FLOORS, "cellar": 0}, {}))


# ---------------------------------------------------------------- controls: torch, the system, unpickling

@pytest.mark.parametrize("text", ["import torch", "import torch.nn as nn", "from torch import Tensor",
                                  "def f():\n    import torch"])
def test_an_import_of_torch_is_found(text):
    assert len(list(checks.torch_users({"store": text}))) == 1
    assert list(checks.torch_users({"tensors": text, "devices": text, "transport.host": text})) == []
    assert list(checks.torch_users({"store": f"if TYPE_CHECKING:\n    {text.splitlines()[-1].strip()}"})) == []
    assert list(checks.torch_users({"store": "import torchless\nfrom .torch import x"})) == []


@pytest.mark.parametrize("text, use", [
    ("import os\nos.open('x', 0)", "os.open"), ("import os", "os"), ("from os import getpid", "os"),
    ("import fcntl\nfcntl.flock(1, 2)", "fcntl.flock"), ("import ctypes", "ctypes"), ("import mmap", "mmap"),
    ("import posix_ipc", "posix_ipc"), ("import os.path\nos.path", "os.path"), ("import signal", "signal"),
])
def test_a_use_of_the_operating_system_is_found(text, use):
    assert [found.rpartition(" ")[2] for found in checks.system_users({"store": text}, exceptions={})] == [use]
    assert list(checks.system_users({name: text for name in ("segment", "sync", "peers")}, exceptions={})) == []


def test_an_exception_for_the_system_covers_what_it_names_only():
    allowed = {("store", "os.getpid"): "why"}
    assert list(checks.system_users({"store": "import os\nos.getpid()"}, exceptions=allowed)) == []
    assert "os.open" in "".join(checks.system_users({"store": "import os\nos.open(os.getpid())"}, exceptions=allowed))
    assert "not used" in "".join(checks.system_users({"store": ""}, exceptions=allowed))


@pytest.mark.parametrize("text", [
    "import pickle", "from pickle import loads", "import marshal", "import cloudpickle as p", "eval('1')", "exec(x)",
    "torch.load(f)", "np.load(f)", "np.foo(x, allow_pickle=True)", "def f():\n    import shelve", "__import__('x')",
])
def test_a_way_from_bytes_to_code_is_found(text):
    assert list(checks.unsafe({"store": text})) != []
    assert list(checks.unsafe({"testing": text})) == []
    assert list(checks.unsafe({"store": "import re\nre.compile('x')\nmodel.eval()\nx.load()"})) == []


# ---------------------------------------------------------------- controls: sync points and headers

HEADER = '''"""What: a lock.

Map: one word.

States: open, shut.

Guarantees: some.

Not guaranteed: others.

If a party dies here: nothing.

Sync points: lock-taken, gone.

Why not a queue (slower. Much): no.
"""
'''
POINTS = """
words[0] = 1  # SYNC POINT lock-taken (store)
if words[0]:  # SYNC POINT lock-taken (load)
    words[1] = 0  # SYNC POINT gone (store)
x = words[1]  # SYNC POINT gone (load)
y = words[1]  # SYNC POINT gone (load)
"""


def test_sound_sync_points_and_headers_pass():
    assert list(checks.sync_points({"lock": HEADER + POINTS, "other": '"""Sync points: none, as none."""'})) == []
    assert list(checks.headers({"lock": HEADER}, ["lock"])) == []


@pytest.mark.parametrize("old, new, finding", [
    ("SYNC POINT lock-taken (load)", "", "lock-taken stands at no load"),
    ("SYNC POINT lock-taken (store)", "", "lock-taken stands at 0 stores"),
    ("gone (load)", "gone (store)", "gone stands at 3 stores"),
    ("lock-taken, gone", "gone", "lock-taken is not listed"),
    ("lock-taken, gone", "none", "gone is not listed"),
    ("lock-taken, gone", "lock-taken, gone, lost", "lists sync point lost, which stands nowhere"),
    ("gone (load)", "gone (look)", "is named `label (store)`"),
    ("gone (load)", "gone", "is named `label (store)`"),
])
def test_a_sync_point_without_its_other_end_is_found(old, new, finding):
    assert old in HEADER + POINTS
    assert finding in "\n".join(checks.sync_points({"lock": (HEADER + POINTS).replace(old, new)}))


def test_a_sync_point_in_two_files_is_found():
    elsewhere = HEADER.replace("lock-taken, gone", "gone") + "x = words[1]  # SYNC POINT gone (load)"
    assert "gone stands in 2 files" in "\n".join(checks.sync_points({"lock": HEADER + POINTS, "other": elsewhere}))


@pytest.mark.parametrize("section", checks.SECTIONS)
def test_a_missing_section_is_found(section):
    without = HEADER.replace(section, "Something else")
    assert list(checks.headers({"lock": without}, ["lock"])) == [f"lock: the header has no section {section!r}"]


def test_sections_in_another_order_and_unlisted_protocols_are_found():
    turned = HEADER.replace("States: open", "X: open").replace("Sync points: lock-taken", "States: x\n\nSync points: x")
    assert "stand in the order" in "".join(checks.headers({"lock": turned}, ["lock"]))
    assert "is not listed as one" in "".join(checks.headers({"lock": HEADER, "key": HEADER}, ["lock"]))
    assert "without a file" in "".join(checks.headers({}, ["lock"]))


# ---------------------------------------------------------------- format version 1

VERSION_1 = {
    "Header": (40, "magic format file_bytes slots peers leases waits ring journal meta_bytes arena_bytes "
                   "device_arenas registrations geometry_check instance owner owner_generation owner_pid born_ns "
                   "unlinked mutation mutator next_sequence next_expiry_ns ready_count producers_seen waits_high "
                   "leases_high releases_pending free_slots free_leases ranked journal_next arena_holes arena_free "
                   "arena_recent meta_holes meta_free meta_recent"),
    "Counter": (24, "inserts takes shares consumed redelivered misses starved orphaned timeouts aborted cancelled "
                    "evicted expired lost deaths recoveries signals signals_dropped inserted_bytes taken_bytes"),
    "Ladder": (16, "host local cuda_ipc cuda_peer staging nccl host_last local_last cuda_ipc_last cuda_peer_last "
                   "staging_last nccl_last staged_inserts staged_inserts_last"),
    "Peer": (16, "state generation closed roles pid start_ticks pid_namespace attached_ns role_0 role_1 role_2 role_3 "
                 "ring_head ring_tail ring_dropped"),
    "Wait": (24, "state generation peer peer_generation thread kind since_ns deadline_ns posted evaluated family "
                 "n_tokens tokens_0 tokens_1 tokens_2 tokens_3 wanted_bytes wanted_meta_bytes wanted_region"),
    "Lease": (16, "held released outcome kind slot entry_generation peer peer_generation thread since_ns generation "
                  "path request scratch"),
    "Entry": (32, "state generation sequence peer peer_generation meta_at meta_bytes key_bytes token_start roi_tokens "
                  "descriptor_bytes run_at run_bytes payload_bytes n_tensors created_ns ready_ns used_ns ttl_ns "
                  "ttl_left_ns expires_ns holders taker cancelled fingerprint region"),
    "Region": (32, "state generation kind peer peer_generation uuid_0 uuid_1 nbytes start allocation exported "
                   "handle_0 handle_1 handle_2 handle_3 handle_4 handle_5 handle_6 handle_7 published event_0 event_1 "
                   "event_2 event_3 event_4 event_5 event_6 event_7 holes free recent"),
    "Signal": (8, "kind sequence slot sender value time_ns ticket"),
    "Event": (16, "ticket kind time_ns sequence slot generation peer pid fingerprint n_tokens"),
}
NUMBERS_1 = {
    entries.EntryState: "FREE 0 RESERVED 1 READY 2 TAKEN 3 DROPPED 4",
    leases.LeaseKind: "WRITE 1 TAKE 2 SHARE 3",
    leases.Outcome: "NONE 0 CONSUMED 1 RETURNED 2",
    peers.WaitState: "FREE 0 IDLE 1 WAITING 2 RETIRED 3",
    peers.WaitKind: "ENTRY 1 ROOM 2 SIGNAL 3 REQUEST 4 ANSWER 5",
    signals.SignalKind: "READY 1 ROOM 2 TAKEN 3 RELEASED 4 CANCELLED 5 CLOSED 6",
    journal.EventKind: "READY 1 TAKEN 2 CONSUMED 3 RETURNED 4 EVICTED 5 EXPIRED 6 CANCELLED 7 ABORTED 8 DIED 9 "
                       "RECOVERED 10 LOST 11",
    regions.RegionState: "FREE 0 OPEN 1 GONE 2",
    regions.RegionKind: "ARENA 1 TENSOR 2",
    transport.Path: "HOST 1 LOCAL 2 CUDA_IPC 3 CUDA_PEER 4 STAGING 5 NCCL 6",
    transport.Reason: "NOT_PREFERRED 1 OTHER_PROCESS 2 NO_REGION 3 NO_DRIVER 4 NO_TORCH_CUDA 5 NOT_VISIBLE 6 "
                      "OTHER_DEVICE 7 SAME_DEVICE 8 NO_PEER_ACCESS 9 PID_NAMESPACE 10 NOT_EXPORTED 11 OPEN_FAILED 12 "
                      "NO_ROOM 13 NO_NCCL 14 NOT_REQUIRED 15",
    fetch.Ask: "NONE 0 ASKED 1 SERVING 2 SERVED 3 REFUSED 4",
}
GEOMETRY_1 = {"slots": 700, "peers": 40, "leases": 70, "waits": 50, "ring": 4, "journal": 60, "meta_bytes": 8192,
              "arena_bytes": 12288, "device_arenas": 3, "registrations": 5}
AREAS_1 = {
    "header": (0, 4096, 1, 40), "counter": (4096, 4096, 1, 24), "ladder": (8192, 4096, 1, 16), "peer": (12288,
    8192, 40, 16), "wait": (20480, 12288, 50, 24), "lease": (32768, 12288, 70, 16), "entry": (45056, 180224,
    700, 32), "region": (225280, 4096, 8, 32), "signal": (229376, 12288, 160, 8), "event": (241664, 8192, 60,
    16), "free slots": (249856, 4096, 700, 0), "free leases": (253952, 4096, 70, 0), "prefix order": (258048,
    4096, 700, 0), "prefix parents": (262144, 4096, 700, 0), "arena hole starts": (266240, 8192, 701, 0),
    "arena hole lengths": (274432, 8192, 701, 0), "meta hole starts": (282624, 8192, 701, 0),
    "meta hole lengths": (290816, 8192, 701, 0), "device hole starts": (299008, 20480, 2103, 0),
    "device hole lengths": (319488, 20480, 2103, 0), "region mappings": (339968, 4096, 320, 0), "meta arena":
    (344064, 8192, 0, 0), "payload arena": (352256, 12288, 0, 0),
}
FILE_BYTES_1 = 364544
FORMAT_1 = 0x1_534D_D988
IMAGE_1 = """
73686d6b76006b76 88d94d5301000000 0090050000000000 bc02000000000000
2800000000000000 4600000000000000 3200000000000000 0400000000000000
3c00000000000000 0020000000000000 0030000000000000 0300000000000000
0500000000000000 980501a700000000
"""
"""the first words of a segment of that geometry, to the checksum, as they lie in the file of a little-endian machine"""


def test_the_records_of_version_1_are_what_they_were():
    assert layout.VERSION == 1
    assert {record.__name__: (record.words, " ".join(record.names)) for record in layout.RECORDS} == VERSION_1
    for record in layout.RECORDS:
        assert [getattr(record, name) for name in record.names] == list(range(len(record.names)))


def test_the_numbers_of_version_1_are_what_they_were():
    for numbers, text in NUMBERS_1.items():
        assert " ".join(f"{number.name} {int(number)}" for number in numbers) == text
    assert (peers.FREE, peers.ATTACHED, peers.PRODUCER, peers.CONSUMER) == (0, 1, 1, 2)
    assert (layout.WORD_BYTES, layout.PAGE_BYTES, layout.META_UNIT_BYTES, layout.NONE) == (8, 4096, 64, 0xFFFF_FFFF)


def test_the_format_word_of_version_1_is_what_it_was():
    if sys.byteorder != "little":
        pytest.skip("the format word names the byte order: pin another one for a big-endian machine")
    assert layout.FORMAT == FORMAT_1


def test_the_areas_of_version_1_are_where_they_were():
    made = layout.Layout(layout.Geometry(**GEOMETRY_1))
    assert {area.name: (area.at, area.nbytes, area.count, area.stride) for area in made.areas} == AREAS_1
    assert made.file_bytes == FILE_BYTES_1


def test_the_bytes_of_version_1_are_what_they_were():
    if sys.byteorder != "little":
        pytest.skip("the image is that of a little-endian machine")
    made = segment.create(unique_name(), layout.Layout(layout.Geometry(**GEOMETRY_1)))
    segment.publish(made)
    with open(made.path, "rb") as file:
        image = file.read(len(bytes.fromhex(IMAGE_1)))
    made.unlink()
    made.detach()
    assert image == bytes.fromhex(IMAGE_1)
