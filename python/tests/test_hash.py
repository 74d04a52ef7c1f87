"""Hashes of tensors: against a formula written down anew, over random layouts and views."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest

import tensorbus as tb
from tensorbus._hash import Part, hash_box

CASES = int(os.environ.get("TB_CASES", "300"))


def mix(x: Any) -> Any:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def model(a: Any) -> int:
    bits = a.reshape(-1).view(f"u{a.itemsize}").astype(np.uint64)
    bits = mix(bits) if a.itemsize == 8 else bits
    index = np.arange(1, a.size + 1, dtype=np.uint64)
    return int(mix(index * np.uint64(0x9E3779B97F4A7C15) + bits).sum(dtype=np.uint64))


def part_of(a: Any, layout: Any, rank: int) -> Any:
    for d, segments in enumerate(layout.local(a.shape, rank)):
        a = np.take(a, [i for first, stop in segments for i in range(first, stop)], axis=d)
    return a


def random_layout(r: random.Random, ndim: int) -> str:
    mesh = [r.randint(1, 3) for _ in range(r.randint(1, 3))]
    places = [
        r.choice(["R", *(f"S{d}" for d in range(ndim)), *(f"StridedShard({d},2)" for d in range(ndim))]) for _ in mesh
    ]
    return f"mesh={','.join(map(str, mesh))} place={','.join(places)}"


def test_every_replica_adds_up_to_the_whole() -> None:
    r = random.Random(0)
    for _ in range(CASES):
        shape = tuple(r.randint(0, 9) for _ in range(r.randint(1, 3)))
        dtype = r.choice(["u1", "i2", "f4", "f8"])
        a = np.frombuffer(r.randbytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype).reshape(shape)
        layout = tb.layout(random_layout(r, len(shape)))
        sums: dict[int, int] = {}
        box = [sorted((r.randint(0, n), r.randint(0, n))) for n in shape]
        start, size = [x for x, _ in box], [y - x for x, y in box]
        boxes: dict[int, int] = {}
        for rank in layout.ranks:
            held = part_of(a, layout, rank)
            held = np.asfortranarray(held) if r.random() < 0.5 else np.ascontiguousarray(held)
            part = Part(held, shape, layout, rank)
            assert part.replica is not None
            sums[part.replica] = sums.get(part.replica, 0) + tb.hash_tensor(held, shape=shape, layout=layout, rank=rank)
            boxes[part.replica] = boxes.get(part.replica, 0) + part.hash_box(start, size)
        with np.errstate(over="ignore"):
            whole = model(a)
        assert tb.hash_tensor(a) == whole
        assert {s % 2**64 for s in sums.values()} == {whole}, (shape, layout)
        cut = a[tuple(slice(x, y) for x, y in box)]
        assert {s % 2**64 for s in boxes.values()} == {hash_box(cut, shape, start)}, (shape, layout, box)


def test_views_have_the_hash_of_what_they_show() -> None:
    fused = np.arange(96, dtype=np.float32).reshape(24, 4)
    for rank in range(2):
        part = fused.reshape(2, 12, 4)[rank]
        canonical = fused.reshape(4, 6, 4)[2 * rank : 2 * rank + 2]
        its = {"layout": "mesh=2 place=S0", "rank": rank}
        viewed = tb.hash_tensor(part, shape=(24, 4), view="split(0, 4, 6)", **its)
        assert viewed == tb.hash_tensor(canonical, shape=(4, 6, 4), **its)


def test_differences_are_seen_and_mistakes_named() -> None:
    a = np.zeros((4, 6), np.float16)
    b = a.copy()
    b[1, 2] = 1
    c = a.copy()
    c[1, 3] = 1
    assert len({tb.hash_tensor(x) for x in (a, b, c, a.T)}) == 3  # all zeros: the transposed one has the same bits
    assert tb.hash_tensor(np.zeros((0, 3), np.float32)) == 0
    with pytest.raises(tb.Invalid, match="a layout needs a rank"):
        tb.hash_tensor(a, layout="mesh=2 place=S0")
    with pytest.raises(tb.Invalid, match="shape and rank go with a layout"):
        tb.hash_tensor(a, rank=1)
    with pytest.raises(tb.Refused, match="contributions have no hash"):
        tb.hash_tensor(a, layout="mesh=2 place=P", rank=0)
    with pytest.raises(tb.Invalid, match="the part has 4 indices, and rank 0 has 2"):
        tb.hash_tensor(a, layout="mesh=2 place=S0", rank=0)
