"""Compiles the emulated driver: `build()` returns the folder that holds its libcuda.so.1.

The folder lies outside the source tree, so that nothing started in the tree finds that library by accident, and is
named by what was compiled, so that concurrent sessions share one build. With CUDA_INCLUDE set to a folder of the real
cuda.h, every prototype and constant is compared with the ones there.
"""

import hashlib
import os
import secrets
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
LIBRARY = "libcuda.so.1"
WARNINGS = ["-std=gnu11", "-Wall", "-Wextra", "-Werror"]
FLAGS = [*WARNINGS, "-O1", "-g", "-shared", "-fPIC", "-pthread", "-fvisibility=hidden",
         f"-Wl,-soname,{LIBRARY}", "-Wl,-z,defs"]
CHECK_FLAGS = [*WARNINGS, "-Wmissing-prototypes", "-fsyntax-only", "-DEMUCUDA_CHECK_HEADER"]


class BuildFailed(RuntimeError):
    """The emulated driver could not be built, so nothing can be said about what needs it."""


def build() -> Path:
    if include := os.environ.get("CUDA_INCLUDE"):
        check_against(include)
    folder = _cache_folder()
    library = folder / LIBRARY
    if not library.exists():
        unfinished = folder / f".{secrets.token_hex(8)}.so"
        try:
            _gcc(*FLAGS, "-o", str(unfinished))
            unfinished.rename(library)  # whoever looks sees all of it or nothing; of two builders the last one wins
        finally:
            unfinished.unlink(missing_ok=True)
    return folder


def check_against(include: str) -> None:
    """Fails where the emulated driver and the real cuda.h of this folder do not agree."""
    if not Path(include, "cuda.h").exists():
        raise BuildFailed(f"CUDA_INCLUDE: there is no cuda.h in {include}")
    _gcc(*CHECK_FLAGS, f"-I{include}")


def _cache_folder() -> Path:
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for source in sorted(SOURCES.glob("*.[ch]")):
        digest.update(source.name.encode() + source.read_bytes())
    folder = Path(tempfile.gettempdir(), f"shmkv-emulated-driver-{os.getuid()}-{digest.hexdigest()[:16]}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise BuildFailed(f"{folder} is not a folder of this user alone: no library is loaded from there")
    return folder


def _gcc(*arguments: str) -> None:
    if not shutil.which("gcc"):
        raise BuildFailed("the emulated driver is written in C: install gcc (Debian: apt install gcc libc6-dev)")
    sources = sorted(str(source) for source in SOURCES.glob("*.c"))
    done = subprocess.run(["gcc", *arguments, *sources], capture_output=True, text=True)
    if done.returncode:
        raise BuildFailed(f"gcc refused the emulated driver:\n{done.stderr}")


if __name__ == "__main__":
    print(build())
