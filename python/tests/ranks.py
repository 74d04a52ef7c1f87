"""Runs a function in several processes, each with a seat on one bus; whatever one raises fails the test."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorbus as tb

_spawn = multiprocessing.get_context("spawn")
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Seat:
    """What a rank's function gets: where it sits, and a barrier for all."""

    url: str
    group: str
    index: int
    size: int
    barrier: Any
    args: tuple[Any, ...]

    def join(self, **options: Any) -> tb.Bus:
        return tb.join(self.url, group=self.group, index=self.index, size=self.size, **{"timeout": 30.0, **options})

    def meet(self) -> None:
        self.barrier.wait(PATIENCE_S)


class Die(Exception):
    """Raised by a rank's function to end its process at once, without leaving the bus."""


def _main(function: Callable[[Seat], Any], seat: Seat, results: Any) -> None:
    try:
        results.put((seat.group, seat.index, function(seat), None))
    except Die:
        results.put((seat.group, seat.index, None, None))
        results.close()
        results.join_thread()
        os._exit(0)
    except BaseException:
        results.put((seat.group, seat.index, None, traceback.format_exc()))
        raise


def run(function: Callable[[Seat], Any], folder: Any, sizes: dict[str, int], *args: Any) -> dict[tuple[str, int], Any]:
    """Calls function(seat) in a process for each seat of each group, and returns what they return, by seat."""
    results = _spawn.Queue()
    barrier = _spawn.Barrier(sum(sizes.values()))
    seats = [
        Seat(f"unix:{folder}/bus", group, index, size, barrier, args)
        for group, size in sizes.items()
        for index in range(size)
    ]
    processes = [_spawn.Process(target=_main, args=(function, seat, results)) for seat in seats]
    for process in processes:
        process.start()
    try:
        found = [results.get(timeout=PATIENCE_S) for _ in seats]
        for process in processes:
            process.join(PATIENCE_S)
    finally:
        for process in processes:
            process.kill()
    failures = [f"{group} {index}:\n{why}" for group, index, _, why in found if why]
    assert not failures, "\n".join(failures)
    assert [p.exitcode for p in processes] == [0] * len(processes)
    return {(group, index): result for group, index, result, _ in found}
