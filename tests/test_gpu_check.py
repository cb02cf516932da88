"""The check for machines with a GPU runs to its end over the emulated driver, and says so where there is no driver."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from emulated_driver.build import build

PROGRAM = Path(__file__).resolve().parent.parent / "tools" / "gpu_check.py"
SECTIONS = ["conformance", "roundtrip", "register", "order", "release", "dead", "opening", "copy", "handoff", "staging",
            "nccl"]
FACTS = {"device", "emulated", "n_devices", "driver", "driver_api", "cuda_bindings", "torch", "torch_cuda", "posix_ipc",
         "python", "cpus", "linux", "date"}
CHILD_S = 150.0


def check(*arguments, **environment):
    """The program, run from elsewhere, so that it finds the package by itself."""
    plain = {name: text for name, text in os.environ.items()
             if not name.startswith(("EMUCUDA_", "CUDA_")) and name not in ("LD_LIBRARY_PATH", "PYTHONPATH")}
    return subprocess.run([sys.executable, str(PROGRAM), *arguments], capture_output=True, text=True, timeout=CHILD_S,
                          env=plain | environment, cwd="/")


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """(what ended, its JSON): all sections over two emulated devices."""
    file = tmp_path_factory.mktemp("gpu_check") / "found.json"
    done = check("--quick", "--json", str(file), LD_LIBRARY_PATH=str(build()), EMUCUDA_DEVICES="2")
    assert done.returncode == 0, done.stdout + done.stderr
    return done, json.loads(file.read_text())


def test_every_section_runs_over_the_emulated_driver_and_finds_no_fault(emulated):
    done, found = emulated
    assert list(found["sections"]) == SECTIONS
    assert (found["verdicts"]["FAIL"], found["verdicts"]["DIFF"]) == (0, 0) and found["verdicts"]["ok"] >= 25
    assert done.stdout.splitlines()[-1].startswith(f"{found['verdicts']['ok']} ok, 0 DIFF, 0 FAIL")
    for name, section in found["sections"].items():
        keys = [row["key"] for row in section["rows"]]
        assert keys and len(keys) == len(set(keys)), name
        assert all(set(row) == {"key", "question", "result", "verdict", "value"} for row in section["rows"])


def test_what_needs_kernels_is_not_run_and_says_so(emulated):
    _, found = emulated
    for name in ("order", "release"):
        assert [row["result"] for row in found["sections"][name]["rows"]] == ["not run: emulated driver"]


def test_an_emulated_driver_is_never_called_a_gpu(emulated):
    done, found = emulated
    assert set(found["machine"]) == FACTS
    assert (found["machine"]["device"], found["machine"]["driver"]) == ("emulated driver", "emulated driver")
    assert "timings mean nothing" in done.stdout
    assert set(re.findall(r"[^,(\n]*\bGPU\b", done.stdout)) <= {" no GPU"}


def test_without_a_driver_it_says_so_and_ends_with_2():
    done = check("--quick")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("gpu_check: no CUDA driver can be used here") and len(done.stderr.splitlines()) == 1


def test_a_driver_without_a_device_and_an_unknown_section_are_named():
    none = check("--quick", LD_LIBRARY_PATH=str(build()), CUDA_VISIBLE_DEVICES="")
    assert none.returncode == 2 and len(none.stderr.splitlines()) == 1, none.stderr
    unknown = check("--sections", "copy,fly")
    assert unknown.returncode == 2 and "'fly'" in unknown.stderr
