#!/usr/bin/env python3
"""PyTorch tensors on a GPU, between two processes: for a machine with a GPU and PyTorch. Prints what it has seen.

usage: PYTHONPATH=python tests/gpu/torch_pool.py

Memory of tb.torch_allocator() is read in place; that of PyTorch's own allocator arrives, too. Work on the current
stream is done before the tensors are read, and stream_wait lets work on it wait for what arrives.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
import tempfile
from typing import Any

import torch

import tensorbus as tb

SHAPE, VERSIONS = (4096, 1024), 5


def spin() -> None:
    """Work that takes the GPU a while, so that what is not ordered would be seen."""
    torch.cuda._sleep(50_000_000)


def trainer(url: str, pooled: bool, said: Any) -> None:
    pool = tb.torch_allocator() if pooled else None
    with torch.cuda.use_mem_pool(pool) if pooled else contextlib.nullcontext():
        model = torch.nn.Linear(*SHAPE, bias=False, device="cuda", dtype=torch.bfloat16)
    with tb.join(url, group="trainer", index=0, size=1, timeout=60.0) as bus:
        pair = bus.pair("weights", "engine", layout="mesh=1 place=R")
        batch = bus.batch("step")
        batch.add_module(pair, model)
        for version in range(1, VERSIONS + 1):
            with torch.no_grad():
                spin()
                model.weight.fill_(version)
            batch.send(timeout=30.0)  # after what is on the stream
        if not pooled:
            said.put(batch.dump(is_send=True))


def engine(url: str, pooled: bool, said: Any) -> None:
    weight = torch.zeros(SHAPE[::-1], device="cuda", dtype=torch.bfloat16)
    with tb.join(url, group="engine", index=0, size=1, timeout=60.0) as bus:
        pair = bus.pair("weights", "trainer", layout="mesh=1 place=R")
        batch = bus.batch("step")
        batch.add(pair, "weight", weight)
        for version in range(1, VERSIONS + 1):
            t = batch.recv(timeout=30.0, wait=None)
            t.stream_wait("arrived")
            total = weight.float().mean()  # on the stream, after the arrival
            t.wait("committed")
            assert float(total) == version, (float(total), version)
        if pooled:
            said.put(batch.dump(is_send=False))


def main() -> int:
    if not torch.cuda.is_available():
        print("skipped: torch sees no GPU")
        return 77
    spawn = multiprocessing.get_context("spawn")
    failed = 0
    for pooled in (True, False):
        said = spawn.Queue()
        with tempfile.TemporaryDirectory() as folder:
            args = (f"unix:{folder}/bus", pooled, said)
            processes = [spawn.Process(target=f, args=args) for f in (trainer, engine)]
            for p in processes:
                p.start()
            for p in processes:
                p.join(180)
            codes = [p.exitcode for p in processes]
            for p in processes:
                p.kill()
        good = codes == [0, 0]
        text = said.get(timeout=10) if good else ""
        good = good and (not pooled or ", mapped" in text)
        failed += not good
        print(
            f"{'memory of tb.torch_allocator()' if pooled else 'memory of PyTorch'}: "
            f"{'passed' if good else f'FAILED {codes}'}, {VERSIONS} versions\n{text[:400]}"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
