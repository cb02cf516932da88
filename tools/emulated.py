"""`shmkv demo --emulated-gpu`: the same prompts by each path that leads to an entry in device memory.

*prefill* owns device memory, computes on the CPU as ever and puts keys and values into device tensors; *decode* fetches
them by the path asked for. For `local` prefill takes its own entries. For `in_place` the tensors are those of a cache
of its own, as an engine has, whose rows are inserted without a copy and written again once `released()` has named them.

The driver is the emulated one of the test suite: device memory is host memory that the CPU reaches at another address,
so a model on the CPU can compute from it. Addresses, handles and the order of work are real, times mean nothing.
"""

import argparse
import importlib.util
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from types import ModuleType

from shmkv.transport import WHY
from shmkv_tools.demo import (
    CAPACITY,
    PROMPTS,
    Alone,
    Decode,
    DemoFailed,
    Prefill,
    hand_over,
    human,
    parts_of,
    progress,
    ready_team,
    tokens_of,
)
from shmkv_tools.prompts import DOCUMENT
from shmkv_tools.team import Team

BUILDER = Path(__file__).resolve().parent.parent / "tests" / "emulated_driver" / "build.py"
WARNING = "emulated driver: timings mean nothing"
OWN, OTHER = "cuda:0", "cuda:1"
RELEASED_TIMEOUT_S = 30.0
N_ROWS = 2
"""of the engine's cache: the document may lie in one for long, the prompts come and go in the other"""


@dataclass(frozen=True)
class Way:
    """One line of the report: what is asked for, and what has to come of it."""

    name: str
    transport: str
    options: dict
    """of decode's handle"""
    taker: str = "decode"
    insert: str = "insert"


WAYS = (
    Way("local", "local", {}, taker="prefill"),
    Way("cuda_ipc", "cuda_ipc", {}),
    Way("cuda_peer", "cuda_peer", {"device": OTHER}),
    Way("staging", "staging", {"prefer": "staging"}),
    Way("nccl", "nccl", {"prefer": "nccl"}),
    Way("in_place", "cuda_ipc", {}, insert="insert_in_place"),
)


@dataclass(frozen=True)
class Line:
    path: str
    came_by: list[str]
    as_asked: bool
    entries: int
    bytes: int
    handoff_us: float
    identical: int
    prompts: int
    refused: dict[str, str]


# ---- the processes ---------------------------------------------------------------------------------------------------


class DevicePrefill(Prefill, Decode):
    device = OWN
    engine = None

    @property
    def options(self) -> dict:
        return {"device": OWN, "device_capacity": CAPACITY[self.settings.model]}

    def forget(self, tokens: list[int]) -> None:
        self.buffer.cancel(tokens, namespace=self.namespace)

    def make_rows(self, n_tokens: int) -> None:
        """The cache of an engine, and its handle, which owns no device memory: what it inserts stays in place, or is
        copied to the host and comes by no path that was asked for."""
        self.engine = self.attach(device=OWN)
        config = self.model.net.config
        shape = (config.num_hidden_layers, 1, config.num_key_value_heads, n_tokens, config.head_dim)
        self.rows = device_tensor((N_ROWS, 2, *shape), self.model.net.dtype)
        self.registered = self.engine.register(self.rows)
        self.free_rows, self.row_of = list(range(N_ROWS)), {}

    def insert_in_place(self, tokens: list[int]) -> int:
        if not self.free_rows:
            self._take_back()
        row = self.free_rows.pop()
        keys, values = self.rows[row, ..., : len(tokens), :]
        self._put(self._start(tokens)[1], keys, values)
        about_to_insert_ns = time.monotonic_ns()
        sequence = self.engine.insert(tokens, {"key": keys, "value": values}, namespace=self.namespace)
        self.row_of[sequence] = row
        return about_to_insert_ns

    def _take_back(self) -> None:
        released = self.engine.released(timeout=RELEASED_TIMEOUT_S)
        if not released:
            raise DemoFailed(f"entries {list(self.row_of)} lie in place, and none was released")
        self.free_rows += [self.row_of.pop(sequence) for sequence in released]

    def end_rows(self) -> None:
        while self.row_of:
            self._take_back()
        self.registered.close()

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
        super().close()


class DeviceDecode(Decode):
    def attach_anew(self, options: dict) -> None:
        self.buffer.close()
        self.buffer = self.attach(**options)


ROLES = {"prefill": DevicePrefill, "decode": DeviceDecode, "alone": Alone}


def device_tensor(shape: tuple[int, ...], dtype):
    """Device memory as torch sees it here; it is freed with the tensor."""
    from shmkv import driver
    from shmkv.transport import cuda_ipc, foreign  # they bring torch, which the parent does without

    nbytes, found = prod(shape) * dtype.itemsize, driver.find()
    allocation = cuda_ipc.Allocation(found, found.device(OWN).ordinal, nbytes)
    address = found.host_alias(allocation.address)
    return foreign.host_bytes(address, nbytes, allocation).view(dtype).view(shape)


# ---- the parent ------------------------------------------------------------------------------------------------------


def run(arguments: argparse.Namespace, show: Callable[[str], object]) -> int:
    """The exit status of the demo. Raises DemoFailed."""
    environment = emulation()
    progress(WARNING)
    lines = []
    with ready_team(arguments, ROLES, environment) as team:
        document = team.ask("alone", "encode", DOCUMENT)
        prompts = [(tokens_of(team, prompt, document), prompt.shared) for prompt in PROMPTS[: arguments.prompts]]
        expected = []
        for tokens, shared in prompts:
            progress(f"prompt {len(expected) + 1} of {len(prompts)} in a single process ...", passing=True)
            parts = parts_of(tokens, len(document) if shared else len(tokens) - 1)
            expected.append(team.ask("alone", "generate", parts)["ids"])
        team.ask("prefill", "make_rows", max(len(tokens) for tokens in (document, *(tokens for tokens, _ in prompts))))
        show(HEADER)
        for way in WAYS:
            lines.append(run_way(team, way, prompts, document, expected))
            show(text_of(lines[-1]))
        team.ask("prefill", "end_rows")
    if arguments.json:
        print(json.dumps(as_json(lines)))
    else:
        show(summary(lines))
    return verdict(lines, arguments.corrupt)


def run_way(team: Team, way: Way, prompts: list[tuple[list[int], bool]], document: list[int],
            expected: list[list[int]]) -> Line:
    team.ask("decode", "attach_anew", way.options)
    taken, n_entries, document_is_in = [], 0, False
    for tokens, shared in prompts:
        progress(f"{way.name}: prompt {len(taken) + 1} of {len(prompts)} ...", passing=True)
        to_insert = None if shared and document_is_in else document if shared else tokens[:-1]
        document_is_in |= shared
        n_entries += to_insert is not None
        if way.taker == "prefill" and to_insert is not None:  # it cannot wait for itself
            team.ask("prefill", way.insert, to_insert)
            to_insert = None
        taken.append(hand_over(team, tokens, shared, to_insert, way.insert, way.taker))
    team.ask("prefill", "forget", document)
    handoffs = sorted(one["handoff_us"] for one in taken)
    came_by = sorted({one["transport"] for one in taken})
    return Line(
        path=way.name,
        came_by=came_by,
        as_asked=came_by == [way.transport],
        entries=n_entries,
        bytes=sum(one["bytes"] for one in taken),
        handoff_us=round(handoffs[len(handoffs) // 2], 1),
        identical=sum(one["ids"] == ids for one, ids in zip(taken, expected, strict=True)),
        prompts=len(prompts),
        refused={path: SHORT.get(why, why) for one in taken for path, why in one["refused"].items()},
    )


def emulation() -> dict[str, str]:
    """The environment in which the loader finds the emulated driver, and two devices of it."""
    try:
        folder = str(builder().build())
    except (OSError, RuntimeError) as failure:
        raise DemoFailed(f"--emulated-gpu: {failure}") from None
    paths = os.pathsep.join(filter(None, (folder, os.environ.get("LD_LIBRARY_PATH"))))
    return {"LD_LIBRARY_PATH": paths, "EMUCUDA_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "0,1"}


def builder() -> ModuleType:
    if not BUILDER.is_file():
        raise DemoFailed(f"--emulated-gpu needs a source checkout: there is no {BUILDER}")
    spec = importlib.util.spec_from_file_location("emulated_driver_build", BUILDER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- the report ------------------------------------------------------------------------------------------------------

SHORT = {text: reason.name.lower().replace("_", " ") for reason, text in WHY.items()}
HEADER = f"{'path':10} {'came by':10} {'entries':>7} {'KV':>9} {'hand-off, µs':>12} {'identical':>9}  refused before it"


def text_of(line: Line) -> str:
    refused = ", ".join(f"{path}: {why}" for path, why in line.refused.items())
    identical = f"{line.identical} of {line.prompts}"
    return (
        f"{line.path:10} {'+'.join(line.came_by):10} {line.entries:7} {human(line.bytes):>9} {line.handoff_us:12.0f} "
        f"{identical:>9}  {refused or '-'}{'' if line.as_asked else '  NOT THE PATH ASKED FOR'}"
    )


def summary(lines: list[Line]) -> str:
    return (
        f"{sum(line.identical for line in lines)} of {sum(line.prompts for line in lines)} hand-overs by {len(lines)} "
        f"paths generate the same tokens as a single process.\n{WARNING}."
    )


def as_json(lines: list[Line]) -> dict:
    return {
        "paths": [asdict(line) for line in lines],
        "all_identical": all(line.identical == line.prompts for line in lines),
        "all_as_asked": all(line.as_asked for line in lines),
        "warning": WARNING,
    }


def verdict(lines: list[Line], corrupt: bool) -> int:
    strayed = [line.path for line in lines if not line.as_asked]
    different = [line.path for line in lines if line.identical < line.prompts]
    unharmed = [line.path for line in lines if line.path not in different]
    if strayed:
        progress(f"FAILED: came by another path than asked for: {', '.join(strayed)}")
    if corrupt and unharmed:
        progress(f"control FAILED: the KV was corrupted on purpose, but by {', '.join(unharmed)} no token changed")
        return 3
    if corrupt:
        progress("control: the KV was corrupted on purpose; prompts differ by every path, as expected")
        return 1
    if different:
        progress(f"FAILED: prompts differ from the single process by {', '.join(different)}")
    return 1 if strayed or different else 0
