"""Tensors between two groups of processes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
from ranks import Seat, run

import tensorbus as tb

SHAPE = (600, 400)


def whole(version: int) -> np.ndarray:
    return (np.arange(np.prod(SHAPE), dtype=np.float32) * version).reshape(SHAPE)


def part_of(full: np.ndarray, layout: str, index: int) -> np.ndarray:
    rows, columns = (
        np.concatenate([np.arange(*s) for s in d] or [np.arange(0)]) for d in tb.layout(layout).local(full.shape, index)
    )
    return np.ascontiguousarray(full[np.ix_(rows, columns)])


def trainer_and_engine(seat: Seat) -> list[int]:
    commit, versions = seat.args
    sends = seat.group == "trainer"
    layout = "mesh=2 place=Shard(0)" if sends else "mesh=3 place=S1"
    seen = []
    with seat.join() as bus:
        pair = bus.pair("weights", "engine" if sends else "trainer", layout=layout)
        batch = bus.batch("step", commit=commit)
        part = part_of(whole(0), layout, seat.index)
        batch.add(pair, "w", part, shape=SHAPE)
        batch.register(timeout=30.0)
        if not sends:
            assert batch.signal(1, timeout=10.0) == batch.signal(1, group="engine", timeout=10.0)
        for version in range(1, versions + 1):
            if not sends:
                deadline, question = time.monotonic() + 10.0, 1 + 10000 * version
                while not batch.signal(question, timeout=10.0) and time.monotonic() < deadline:
                    question += 1
                    time.sleep(0.002)
                assert batch.signal(question, timeout=10.0)
            if sends:
                part[:] = part_of(whole(version), layout, seat.index)
                batch.send(timeout=10.0)
            else:
                batch.recv(timeout=10.0)
                assert np.array_equal(part, part_of(whole(version), layout, seat.index))
                assert not batch.is_torn
                seen.append(batch.version)
        assert bus.seats == {seat.group: (seat.index, seat.size)}
        assert bus.groups()[seat.group].size == seat.size
        assert {"trainer", "engine"} == set(bus.groups())
        seat.meet()
    return seen


def test_versions_in_place(tmp_path: Path) -> None:
    found = run(trainer_and_engine, tmp_path, {"trainer": 2, "engine": 3}, "in_place", 5)
    assert found["engine", 0] == [1, 2, 3, 4, 5]


def test_versions_shadow(tmp_path: Path) -> None:
    found = run(trainer_and_engine, tmp_path, {"trainer": 2, "engine": 3}, "shadow", 3)
    assert found["engine", 2] == [1, 2, 3]


def test_many_tensors(tmp_path: Path) -> None:
    """As many as a model of a trillion parameters has, in one call of the library."""
    tensors = {f"model.layers.{i}.weight": np.zeros((2, 4), np.float32) for i in range(37000)}
    with tb.join(f"unix:{tmp_path}/bus", group="a", index=0, size=1) as bus:
        pair = bus.pair("p", "b", "mesh=1 place=R", wait=False)
        batch = bus.batch("b")
        begun = time.process_time()
        batch.add_all(pair, tensors)
        seconds = time.process_time() - begun
    print(f"37,000 tensors were added in {seconds:.2f} s of the CPU")
    assert seconds < 2


def later(seat: Seat) -> None:
    sends = seat.group == "trainer"
    with seat.join() as bus:
        pair = bus.pair("weights", "engine" if sends else "trainer", layout="mesh=1 place=R")
        batch = bus.batch("step")
        x = np.full((8, 8), 1.0 if sends else 0.0)
        batch.add(pair, "w", x.T)
        if sends:
            t = batch.send(wait=None)
            t.wait("released", timeout=10.0)
            assert t.state().bytes_total == x.nbytes

            async def again() -> None:
                t.close()
                await batch.send(wait=None)

            asyncio.run(again())
        else:
            assert batch.recv().version == 1
            assert x.sum() == 64

            async def again() -> int:
                t = batch.recv(wait=None)
                await t
                return t.version

            assert asyncio.run(again()) == 2


def test_waits_later(tmp_path: Path) -> None:
    run(later, tmp_path, {"trainer": 1, "engine": 1})
