#!/usr/bin/env python3
"""A matrix of floats from 4 processes that have its rows to 4 that want its columns, from Python.

    bench/python/row_col.py [--size MIB] [--rounds N] [--check]

Lines take turns, round after round: this package; `tensorbus bench --only row_col`, which is C; slices that are sent by
torch.distributed over gloo; and torch.distributed.checkpoint through files in /dev/shm. Then what sending a small batch
takes, from Python and from C (bench/send_wait.c), and adding 37,000 tensors, in time of the CPU. Figures are medians,
with the least and the most of the rounds. With --check, it fails if this package is not 5 times as fast as gloo and
checkpoints, or takes 50 us more than C to send, or 0.5 s more to add.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as multiprocessing
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))
import tensorbus as tb  # noqa: E402
from tensorbus import _c, _values  # noqa: E402

SIDE = 4
NSMALL = 500
NTENSORS = 37000


def spread(values: list[float]) -> str:
    """The median, and the least and the most."""
    return f"{statistics.median(values):8.2f}  ({min(values):.2f} to {max(values):.2f})"


class Rank:
    """One of the 8 processes, and its ways to move its part."""

    def __init__(self, rank: int, folder: str, n: int) -> None:
        self.is_source, self.index, self.n = rank < SIDE, rank % SIDE, n
        self.folder = folder
        self.block = n // SIDE
        shape = (self.block, n) if self.is_source else (n, self.block)
        self.data = tb.empty(shape, "f32").torch()
        if self.is_source:
            first = self.index * self.block * n
            self.data.view(torch.int32).copy_(torch.arange(first, first + self.block * n).reshape(shape))
        groups = [DeviceMesh("cpu", list(range(s, s + SIDE))) for s in (0, SIDE)]
        self.mesh = groups[not self.is_source]
        self.group = self.mesh.get_group()
        self.bus = tb.join(f"unix:{folder}/bus", "source" if self.is_source else "target", self.index, SIDE)
        pair = self.bus.pair("rows", "target" if self.is_source else "source")
        self.batch = self.bus.batch("matrix")
        self.tensor = DTensor.from_local(self.data, self.mesh, [Shard(0 if self.is_source else 1)])
        self.batch.add(pair, "matrix", self.tensor, ranks={r: r % SIDE for r in range(2 * SIDE)})

    def tensorbus(self) -> None:
        """By this package."""
        self.batch.send() if self.is_source else self.batch.recv()

    def gloo(self) -> None:
        """As a program would: a slice for each target, without gaps; a band from each source, where it belongs."""
        b = self.block
        if self.is_source:
            parts = [self.data[:, t * b : (t + 1) * b].contiguous() for t in range(SIDE)]
            works = [dist.isend(parts[t], SIDE + t) for t in range(SIDE)]
        else:
            works = [dist.irecv(self.data[s * b : (s + 1) * b], s) for s in range(SIDE)]
        for work in works:
            work.wait()

    def checkpoint(self) -> None:
        """Saved by the sources, then loaded by the targets."""
        path = f"/dev/shm/{Path(self.folder).name}"
        if self.is_source:
            dcp.save({"matrix": self.tensor}, checkpoint_id=path, process_group=self.group)
        dist.barrier()
        if not self.is_source:
            dcp.load({"matrix": self.tensor}, checkpoint_id=path, process_group=self.group)

    def verify(self, what: str) -> None:
        """Looks at every element of a target, and clears it."""
        if self.is_source:
            return
        rows = torch.arange(self.n)[:, None] * self.n
        expected = rows + torch.arange(self.index * self.block, (self.index + 1) * self.block)
        assert torch.equal(self.data.view(torch.int32), expected.to(torch.int32)), f"{what}: a wrong element"
        self.data.zero_()


def measure(move: Callable[[], None]) -> float:
    """Seconds from the moment that all are there until the last is done."""
    dist.barrier()
    start = time.monotonic()
    move()
    times = torch.tensor([-start, time.monotonic()], dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return float(times.sum())


def run(rank: int, folder: str, n: int, rounds: int, results: Any) -> None:
    """What each of the 8 processes does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2 * SIDE)
    me = Rank(rank, folder, n)
    ways = {"tensorbus": me.tensorbus, "gloo": me.gloo, "checkpoint": me.checkpoint}
    seconds: dict[str, list[float]] = {name: [] for name in [*ways, "C"]}
    for round_ in range(-1, rounds):
        for name, move in ways.items():
            took = measure(move)
            me.verify(name)
            if round_ >= 0:
                seconds[name].append(took)
        if rank == 0 and round_ >= 0:  # the others wait, without using a core
            seconds["C"].append(4e-9 * n * n / c_row_col(4 * n * n))
        dist.barrier()
    me.bus.close()
    if rank == 0:
        results.put(seconds)
    dist.destroy_process_group()


def c_row_col(nbytes: int) -> float:
    """GB/s of one round in C."""
    command = [ROOT / "build/release/tensorbus", "bench", "--only", "row_col", "--rounds", "1", "--json"]
    done = subprocess.run([*command, "--size", str(nbytes)], capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["gb_per_s"])


def small(sends: bool, folder: str, begin: Any, results: Any) -> None:
    """What bench/send_wait.c does, whenever ``begin`` has something."""
    with tb.join(f"unix:{folder}/small", "trainer" if sends else "engine", 0, 1) as bus:
        pair = bus.pair("pair", "engine" if sends else "trainer", layout="mesh=1 place=R")
        batch = bus.batch("batch")
        batch.add(pair, "w", tb.empty((1024,)))
        batch.register()
        while begin.get(timeout=120):
            took = []
            for _ in range(NSMALL):
                start = time.perf_counter()
                batch.send(wait="committed") if sends else batch.recv()
                took.append(1e6 * (time.perf_counter() - start))
            results.put(statistics.median(took) if sends else None)


def measure_small(folder: str, rounds: int) -> float:
    """Microseconds that Python takes more than C: the median of rounds, in which one comes right after the other."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    begin = [context.Queue(), context.Queue()]
    processes = [context.Process(target=small, args=(i == 0, folder, begin[i], results)) for i in range(2)]
    for process in processes:
        process.start()
    figures: list[tuple[float, float]] = []
    for _ in range(rounds):
        for queue in begin:
            queue.put(True)
        ours = next(filter(None, [results.get(timeout=120) for _ in processes]))
        command = [ROOT / "build/release/bench/send_wait", str(NSMALL)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        figures.append((ours, float(done.stdout.split()[1])))
    for queue in begin:
        queue.put(False)
    for process in processes:
        process.join()
    more = [ours - theirs for ours, theirs in figures]
    for what, values in (
        ("send and wait, 4 KiB, Python, us", [ours for ours, _ in figures]),
        ("                      C, us", [theirs for _, theirs in figures]),
        ("                      more, us", more),
    ):
        print(f"  {what:32} {spread(values)}")
    return statistics.median(more)


def measure_adding(folder: str, rounds: int) -> float:
    """Seconds of the CPU that adding many tensors takes more than the library's part of it."""
    figures: dict[str, list[float]] = {"NumPy": [], "PyTorch": [], "a module": [], "C": []}
    arrays = {f"model.layers.{i}.weight": torch.zeros(2, 4) for i in range(NTENSORS)}
    module = torch.nn.ModuleList([torch.nn.Linear(4, 2) for _ in range(NTENSORS // 2)])
    numpy = {name: array.numpy() for name, array in arrays.items()}
    with tb.join(f"unix:{folder}/adding", "a", 0, 1) as bus:
        pair = bus.pair("p", "b", "mesh=1 place=R", wait=False)
        names = (ctypes.c_char_p * NTENSORS)(*(name.encode() for name in arrays))
        structs = (_c.tb_tensor * NTENSORS)()
        for struct, array in zip(structs, arrays.values(), strict=True):
            struct.__init__(
                data=array.data_ptr(), dtype=_values.dtype("", "f32"), ndim=2, shape=_c.Dims(2, 4), memory=b"host"
            )
        for _ in range(rounds):
            for what, add in (
                ("NumPy", lambda batch: batch.add_all(pair, numpy)),
                ("PyTorch", lambda batch: batch.add_all(pair, arrays)),
                ("a module", lambda batch: batch.add_module(pair, module)),
                (
                    "C",
                    lambda batch: _c.lib.tb_batch_add_all(batch._handle, pair._handle, names, structs, NTENSORS, None),
                ),
            ):
                with bus.batch("many") as batch:
                    start = time.process_time()
                    add(batch)
                    figures[what].append(time.process_time() - start)
    for what, values in figures.items():
        print(f"  adding {NTENSORS} tensors, {what}, s{'':{9 - len(what)}} {spread(values)}")
    middles = {what: statistics.median(values) for what, values in figures.items()}
    return max(middles.values()) - middles["C"]


def main() -> int:
    """Runs all lines, and prints them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=512, help="of the matrix, in MiB (512)")
    parser.add_argument("--rounds", type=int, default=7, help="how often each line is measured (7)")
    parser.add_argument("--check", action="store_true", help="fail if a figure misses its mark")
    options = parser.parse_args()
    n = int((options.size * 2**20 / 4) ** 0.5) // 64 * 64
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="tensorbus-bench-") as folder:
        results = context.Queue()
        try:
            multiprocessing.start_processes(
                run, args=(folder, n, options.rounds, results), nprocs=2 * SIDE, start_method="fork"
            )
        finally:
            shutil.rmtree(f"/dev/shm/{Path(folder).name}", ignore_errors=True)
        seconds = results.get(timeout=10)
        gb = 4e-9 * n * n
        print(f"f32 {n} x {n}, Shard(0) to Shard(1), 4 to 4 processes, {options.rounds} rounds")
        for name, what in (
            ("tensorbus", "tensorbus from Python"),
            ("C", "tensorbus bench, in C"),
            ("gloo", "gloo send/recv of slices"),
            ("checkpoint", "checkpoint in /dev/shm"),
        ):
            ratios = [t / ours for t, ours in zip(seconds[name], seconds["tensorbus"], strict=True)]
            print(f"  {what:26} GB/s {spread([gb / t for t in seconds[name]])}   takes {spread(ratios)} times as long")
        more_us = measure_small(folder, options.rounds)
        more_s = measure_adding(folder, options.rounds)
    middles = {name: statistics.median(took) for name, took in seconds.items()}
    is_fastest = all(middles[name] >= 5 * middles["tensorbus"] for name in ("gloo", "checkpoint"))
    good = more_us <= 50 and more_s <= 0.5 and is_fastest
    return 1 if options.check and not good else 0


if __name__ == "__main__":
    sys.exit(main())
