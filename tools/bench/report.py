"""Percentiles, tables, and what machine this is."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence

import torch

MIB = 1 << 20
SIZES = {"64KiB": 64 << 10, "1MiB": MIB, "16MiB": 16 * MIB, "256MiB": 256 * MIB}


def percentiles(samples_us: Sequence[float]) -> dict[str, float]:
    ranked = sorted(samples_us)
    last = len(ranked) - 1
    return {"p50_us": ranked[last // 2], "p90_us": ranked[round(last * 0.9)], "p99_us": ranked[round(last * 0.99)],
            "max_us": ranked[-1], "runs": len(ranked)}


def row(name: str, samples_us: Sequence[float]) -> list[str]:
    figures = percentiles(samples_us)
    return [name, *(f"{figures[key]:,.1f}" for key in ("p50_us", "p90_us", "p99_us", "max_us")), str(figures["runs"])]


HEADERS = ["", "p50", "p90", "p99", "max", "runs"]


def table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(cells[i]) for cells in (headers, *rows)) for i in range(len(headers))]
    lines = [title]
    for cells in (headers, *rows):
        first, *rest = (cell.ljust(width) if i == 0 else cell.rjust(width)
                        for i, (cell, width) in enumerate(zip(cells, widths, strict=True)))
        lines.append("  ".join(("  " + first, *rest)).rstrip())
    return "\n".join(lines) + "\n"


def timed_us(action: Callable[[], object]) -> float:
    started = time.perf_counter_ns()
    action()
    return (time.perf_counter_ns() - started) / 1e3


def machine() -> str:
    with open("/proc/cpuinfo") as file:
        models = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    return (f"{models[0] if models else platform.machine()}, {len(os.sched_getaffinity(0))} CPUs, "
            f"Linux {platform.release()}, torch {torch.__version__} with {torch.get_num_threads()} threads")
