"""Checks on a machine with a GPU what tests on an emulated driver cannot show, and measures what means nothing there.

    python tools/gpu_check.py [--json FILE] [--sections A,B] [--quick]

Needs a CUDA driver, torch with CUDA, cuda-bindings and posix_ipc; shmkv itself need not be installed. Each section runs
in processes of its own, within a time of its own; the whole takes less than four minutes. The verdicts: ok; FAIL, what
is promised was not kept; DIFF, the driver differs from the emulated one, or a control saw nothing, so that the check
beside it proves nothing; info, a measurement, or what nobody documents. Exit code 0: no FAIL and no DIFF; 1: some; 2:
nothing could be asked.

Under the emulated driver of the test suite it runs too, with small sizes, to exercise this program: the timings then
mean nothing at all.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "tools" / "gpu_check" / "sections.py"
VERDICTS = ("ok", "DIFF", "FAIL", "info")
TOTAL_S = 225.0
KEPT_ERROR_CHARS = 6000


class Section(NamedTuple):
    limit_s: float
    about: str
    needs_kernels: bool = False
    needs_shmkv: bool = True
    n_devices: int = 1


SECTIONS = {
    "conformance": Section(40, "the driver's answers against those that the emulated one gives", needs_shmkv=False),
    "roundtrip": Section(45, "two processes by CUDA IPC, every dtype, shapes and strides"),
    "register": Section(60, "an engine's own tensors, seen in place"),
    "order": Section(60, "an entry is published behind the work that makes it", needs_kernels=True),
    "release": Section(45, "an entry's bytes are not reused before its readers are done", needs_kernels=True),
    "dead": Section(60, "the owner of device memory is killed while it is mapped"),
    "opening": Section(60, "the first look into a region"),
    "copy": Section(40, "insert beside a bare copy on the device"),
    "handoff": Section(70, "seal to views in a waiting process, beside torch.multiprocessing"),
    "staging": Section(60, "by the host, for those who cannot or will not map"),
    "nccl": Section(60, "between two devices", n_devices=2),
}


def main() -> int:
    options = parser().parse_args()
    names = options.sections.split(",")
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        return complain(f"there is no section {unknown[0]!r}; there are: {', '.join(SECTIONS)}")
    if not PROGRAM.exists():
        return complain("it is run from a checkout: python tools/gpu_check.py")
    sys.path.insert(0, str(ROOT))
    try:
        machine = facts()
    except ImportError as error:
        return complain(f"shmkv's driver cannot be imported: {error}")
    except LookupError as error:
        return complain(error.args[0])
    print(f"{describe(machine)}\n", flush=True)
    results: dict[str, dict] = {}
    for name, result in run_all(names, machine, options.quick, time.monotonic() + TOTAL_S):
        machine |= result.pop("facts")
        results[name] = result
        print(table(f"{name}: {SECTIONS[name].about} ({result['seconds']:.1f} s)", result), flush=True)
    counts = Counter(row["verdict"] for result in results.values() for row in result["rows"])
    verdicts = {verdict: counts[verdict] for verdict in VERDICTS}
    print(", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()))
    if options.json:
        whole = {"machine": machine, "quick": options.quick, "verdicts": verdicts, "sections": results}
        options.json.write_text(json.dumps(whole, indent=1) + "\n")
    return int(bool(verdicts["FAIL"] + verdicts["DIFF"]))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine facts and all rows to FILE")
    parser.add_argument("--sections", default=",".join(SECTIONS), metavar="A,B", help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds")
    return parser


def complain(text: str) -> int:
    print(f"gpu_check: {text}", file=sys.stderr)
    return 2


# ---------------------------------------------------------------- the machine

def facts() -> dict[str, Any]:
    """What this machine is. Raises LookupError, saying why, if there is no driver or no device."""
    from shmkv import driver as drivers
    from shmkv.errors import TransportUnavailable

    try:
        driver = drivers.find()
    except TransportUnavailable as error:
        raise LookupError(f"no CUDA driver can be used here, so there is nothing to check: "
                          f"{str(error).splitlines()[0]}") from None
    if not driver.devices:
        raise LookupError("the CUDA driver sees no device (CUDA_VISIBLE_DEVICES?), so there is nothing to check")
    return {
        "device": "emulated driver" if driver.emulated else driver.devices[0].name,
        "emulated": driver.emulated,
        "n_devices": len(driver.devices),
        "driver": "emulated driver" if driver.emulated else driver_release(),
        "driver_api": api_version(),
        "cuda_bindings": installed("cuda-bindings"),
        "torch": installed("torch"),
        "posix_ipc": installed("posix_ipc"),
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "linux": platform.release(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def describe(machine: dict[str, Any]) -> str:
    timings = "; its timings mean nothing" if machine["emulated"] else ""
    return (f"{machine['n_devices']} x {machine['device']}{timings}\n"
            f"driver {machine['driver']} (API {machine['driver_api']}), torch {machine['torch']}, cuda-bindings "
            f"{machine['cuda_bindings']}, Python {machine['python']}, {machine['cpus']} CPUs, {machine['date']}")


def installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def driver_release() -> str:
    """As nvidia-smi prints it: what the kernel module says first, as the program may be missing in containers."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text().splitlines()[0].split()
        return next(word for word in words if word[0].isdigit() and word.count(".") >= 1)
    except (OSError, IndexError, StopIteration):
        pass
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.splitlines()[0].strip()
    except (OSError, IndexError, subprocess.TimeoutExpired):
        return "unknown"


def api_version() -> str:
    from cuda.bindings import driver

    number = int(driver.cuDriverGetVersion()[1])
    return f"{number // 1000}.{number % 1000 // 10}"


# ---------------------------------------------------------------- running sections

def run_all(names: list[str], machine: dict[str, Any], quick: bool, until: float) -> Iterator[tuple[str, dict]]:
    """Each section's result, in order. Measurements want the machine for themselves; on the emulated driver nothing is
    measured, so there two run at a time.
    """
    with ThreadPoolExecutor(max_workers=2 if machine["emulated"] else 1) as pool:
        running = [(name, pool.submit(run, name, machine, quick, until)) for name in names]
        for name, result in running:
            yield name, result.result()


def run(name: str, machine: dict[str, Any], quick: bool, until: float) -> dict[str, Any]:
    began = time.monotonic()
    not_run = why_not(SECTIONS[name], machine) or (
        ("FAIL", "no time was left") if until - began < 5 else None)
    if not_run is not None:
        verdict, why = not_run
        row = {"key": "run", "question": "is this section run?", "result": f"not run: {why}", "verdict": verdict,
               "value": None}
        return {"seconds": 0.0, "rows": [row], "facts": {}, "errors": ""}
    with tempfile.TemporaryFile("w+") as errors:
        rows, found = watch(name, quick, min(until, began + SECTIONS[name].limit_s), errors)
        errors.seek(0)
        text = errors.read()[-KEPT_ERROR_CHARS:]
    return {"seconds": round(time.monotonic() - began, 2), "rows": rows, "facts": found, "errors": text}


def why_not(section: Section, machine: dict[str, Any]) -> tuple[str, str] | None:
    if machine["emulated"] and section.needs_kernels:
        return "info", "emulated driver"
    if machine["n_devices"] < section.n_devices:
        return "info", "one emulated device" if machine["emulated"] else "one GPU"
    missing = [name for name in ("torch", "numpy", "posix_ipc") if importlib.util.find_spec(name) is None]
    if section.needs_shmkv and missing:
        return "FAIL", f"shmkv needs {missing[0]} at import, and it is not installed"
    return None


def watch(name: str, quick: bool, until: float, errors: Any) -> tuple[list[dict], dict]:
    """Start the section's process and take its rows, until it ends or its time is over: then all of it is killed."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen([sys.executable, str(PROGRAM), name, *(["--quick"] if quick else [])],
                               stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.DEVNULL, start_new_session=True,
                               env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)})
    rows, found, ended = [], {}, True
    for line in lines(process.stdout.fileno(), until):
        if line is None:
            ended = False
            break
        said = json.loads(line)
        found |= said.get("facts", {})
        rows += [said["row"]] if "row" in said else []
    if ended:
        try:
            process.wait(max(1.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            ended = False
    if not ended:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    process.stdout.close()
    if not ended or process.returncode:
        how = f"exit code {process.returncode}" if ended else "killed: its time was over"
        rows.append({"key": "end", "question": "does this section come to its end?", "result": how, "verdict": "FAIL",
                     "value": process.returncode})
    return rows, found


def lines(descriptor: int, until: float) -> Iterator[bytes | None]:
    """Whole lines as they come; None when the time is over."""
    pending = b""
    while True:
        if not select.select([descriptor], [], [], max(0.0, until - time.monotonic()))[0]:
            yield None
            return
        data = os.read(descriptor, 1 << 16)
        if not data:
            return
        *whole, pending = (pending + data).split(b"\n")
        yield from whole


# ---------------------------------------------------------------- showing

def table(title: str, result: dict) -> str:
    rows = result["rows"]
    width = min(84, max((len(row["question"]) for row in rows), default=0))
    shown = [title, *(f"  {row['verdict']:<4}  {row['question']:<{width}}  {brief(row['result'])}" for row in rows)]
    if any(row["verdict"] in ("FAIL", "DIFF") for row in rows):
        shown += [f"  |  {line}" for line in result["errors"].splitlines()[-25:]]
        shown += [f"  |  {line}" for row in rows if row["verdict"] == "FAIL"
                  for line in row["result"].splitlines()[-12:] if "\n" in row["result"]]
    return "\n".join(shown) + "\n"


def brief(result: str) -> str:
    """The last line of a traceback says what it was."""
    said = result.strip().splitlines()
    return said[-1] if said else ""


if __name__ == "__main__":
    sys.exit(main())
