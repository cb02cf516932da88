"""What the README shows is what happens."""

import os
import re
import subprocess
import sys
from pathlib import Path

from emulated_driver.build import build

import shmkv
from shmkv.testing import unique_name

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


def program(start):
    return next(block for block in BLOCKS if block.startswith(start))


def run(code, *arguments, environment=None):
    return subprocess.Popen([sys.executable, *arguments, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, env=environment)


def test_the_two_processes_hand_over(kv_watchdog):
    name = unique_name()
    programs = [run(program(start).replace('"toy", ', f'"{name}", ', 1)) for start in ("# prefill.py", "# decode.py")]
    (_, prefill_says), (decoded, decode_says) = [process.communicate(timeout=50) for process in programs]
    assert (prefill_says, decode_says) == ("", "")
    assert decoded == "4 of 5 tokens, key of shape (2, 4, 64)\n"


def test_the_two_processes_hand_over_device_memory(kv_watchdog):
    """On the emulated driver."""
    name, environment = unique_name(), {**os.environ, "LD_LIBRARY_PATH": str(build())}
    programs = [run(program(start).replace('"gpu", ', f'"{name}", ', 1), environment=environment)
                for start in ("# gpu_prefill.py", "# gpu_decode.py")]
    (_, prefill_says), (decoded, decode_says) = [process.communicate(timeout=50) for process in programs]
    assert (prefill_says, decode_says) == ("", "")
    assert decoded == "cuda_ipc {'local': 'the memory belongs to another process'}\n"


def test_the_pytest_example_passes(tmp_path):
    (tmp_path / "test_example.py").write_text(next(block for block in BLOCKS if "def test_hand_over" in block))
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
                          capture_output=True, text=True, cwd=tmp_path, timeout=50)
    assert "1 passed" in done.stdout, done.stdout


def test_every_public_name_of_the_package_is_there():
    for name in shmkv.__all__:
        assert getattr(shmkv, name) is not None


def die(name):
    buffer = shmkv.create(name, capacity="64KiB", slots=8, meta_capacity=4096)
    buffer.drop_select([1], timeout=0.01)
    os.kill(os.getpid(), 9)


def gc(*arguments):
    done = subprocess.run([sys.executable, "-m", "shmkv_tools.cli", "gc", *arguments], capture_output=True, text=True,
                          timeout=50)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_gc_removes_what_the_dead_left_and_nothing_else(kv_buffer, kv_spawn):
    name = unique_name()
    kv_spawn(die, name).join()
    foreign = f"/dev/shm/shmkv.{name}-foreign"
    Path(foreign).write_bytes(b"no segment")
    os.chmod(foreign, 0o600)
    try:
        left = sorted(file for file in os.listdir("/dev/shm") if name in file)
        ours = (name, kv_buffer.name, f"{name}-foreign")  # others' tests may be at work on this host
        assert f"{name}: to be removed, all its processes are dead" in gc("--dry-run", *ours)
        assert f"{name}: to be removed, all its processes are dead" in gc("--dry-run")
        assert sorted(file for file in os.listdir("/dev/shm") if name in file) == left
        said = gc(*ours)
        assert f"{name}: removed, all its processes are dead" in said
        assert f"{kv_buffer.name}: kept, a process that lives is attached" in said
        assert any(line.startswith(f"{name}-foreign: kept, ") for line in said)
        assert [file for file in os.listdir("/dev/shm") if name in file] == [f"shmkv.{name}-foreign"]
    finally:
        os.unlink(foreign)
    assert kv_buffer.problems() == []
