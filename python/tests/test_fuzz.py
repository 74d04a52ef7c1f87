"""Whatever is passed, the interpreter does not crash: calls of the whole surface with arguments of all kinds.

Each call either works, or raises an exception that says what is wrong. TB_CASES sets the number of calls; 100000 is a
long run.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np

import tensorbus as tb

CASES = int(os.environ.get("TB_CASES", "20000"))
SEED = int(os.environ.get("TB_SEED", time.time_ns() % 10**6))


class Odd:
    """Has what tensors have, and none of it is right."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def __dlpack_device__(self) -> Any:
        return self.rng.choice([(1, 0), (2, 0), (99, 0), (), None, "x"])

    def __dlpack__(self, **_: Any) -> Any:
        return self.rng.choice([None, 7, b"", object()])

    def __index__(self) -> int:
        return self.rng.choice([-1, 0, 1, 2**70])

    def __iter__(self) -> Any:
        return iter([self, self])


def arrays(rng: random.Random) -> Any:
    dims = [rng.choice([0, 1, 2, 3, 4, 8]) for _ in range(rng.randrange(4))]
    dtype = rng.choice(["f4", "f8", "i4", "u1", "u2", "?", ">f4", "c8", "O", "S3", "f2", "M8[s]", "i4,f4"])
    array = np.zeros(dims, dtype)
    if array.ndim and rng.random() < 0.3:
        array = array[:: rng.choice([-1, 2, -2])]
    if rng.random() < 0.2:
        array = array.T
    if rng.random() < 0.1:
        array.flags.writeable = False
    if rng.random() < 0.1 and array.ndim:
        array = np.broadcast_to(array[:1], array.shape)
    return array


def values(rng: random.Random, objects: list[Any]) -> Any:
    layouts = ["mesh=1 place=R", "mesh=2 place=S0", "mesh=2 place=S1", "mesh=2,2 place=R,S0", "none", "mesh=", "S0"]
    kind = rng.randrange(14)
    if kind == 0:
        return rng.choice([0, 1, 2, -1, 3, 2**31, 2**63, -(2**63), 2**64, 2**200, True])
    if kind == 1:
        return rng.choice([0.0, 0.01, -1.0, float("inf"), float("nan"), 1e300])
    if kind == 2:
        return rng.choice(["", "a", "b", "w", "p", "\0", "\ud800", "x" * 5000, "é", "a/b", "%s%n", "unix:", "agent:/x"])
    if kind == 3:
        return rng.choice(layouts)
    if kind in (4, 5, 6):
        return arrays(rng)
    if kind == 7:
        return rng.choice(["f32", "bf16", "f4e2m1", "int8", "torch.float32", np.dtype("f4"), np.float32, "q"])
    if kind == 8:
        return tuple(rng.choice([0, 1, 2, 4, -1, 2**62, 2**63]) for _ in range(rng.randrange(10)))
    if kind == 9:
        return rng.choice([None, [], {}, (), b"w", object(), Odd(rng), Ellipsis, int, lambda: 0])
    if kind == 10:
        return rng.choice(["released", "committed", "arrived", "decided", "in_place", "shadow", "cpu", "host", "cuda"])
    if kind == 11:
        return tb.empty(rng.choice([(2, 2), (0,), (4,)]), rng.choice(["f32", "bf16", "f4e2m1"]))
    return rng.choice(objects) if objects else None


_KEPT = (tb.Bus, tb.Pair, tb.Batch, tb.Transfer, tb.Layout, tb.Plan, tb.Memory, tb.CopyService, tb.Names)
KEYWORDS = [
    *("shape", "layout", "dtype", "wire_dtype", "group", "view", "timeout", "wait", "commit", "staged", "snapshot"),
    *("ties", "ignored", "checksum", "stream", "hold", "skip_lost", "whole_group", "hosts", "index", "size", "token"),
    *("transport", "workers", "rank", "rotation", "event", "pair", "device", "is_send"),
    *("source", "dest", "task_id", "rules", "layer_pattern", "nstages", "nlayers", "first_layers", "expert_map"),
]
NEVER = ("_", "fileno")  # the last hands out a descriptor, which is closed elsewhere


WAITING = ("pair", "join", "register", "send", "recv", "wait", "wait_group", "reshard", "signal", "copy_service", "run")


def join(url: str) -> tb.Bus:
    """With the deadline that calls without one get: short, so that a busy machine may miss it here."""
    until = time.monotonic() + 60
    while True:
        try:
            return tb.join(url, group="a", index=0, size=1, timeout=0.05)
        except tb.Error:
            if time.monotonic() > until:
                raise


def surface(value: Any) -> list[str]:
    return [
        name for name in dir(value) if not name.startswith("_") and name not in NEVER and not name.endswith("async")
    ]


def test_no_argument_crashes(tmp_path: Path) -> None:
    print(f"seed {SEED} (TB_SEED={SEED} repeats this run)")
    rng = random.Random(SEED)
    objects: list[Any] = []
    counts = {"worked": 0, "refused": 0}
    bus: tb.Bus | None = None
    for case in range(CASES):
        if bus is None or bus.is_closed:
            objects.clear()
            bus = join(f"unix:{tmp_path}/bus")
            objects += [bus, bus.batch("b"), bus.pair("p", "b", "mesh=1 place=R", wait=False)]
            objects += [tb.layout("mesh=2 place=S0"), tb.plan("mesh=2 place=S0", "mesh=2 place=S1", (4, 4), "f32")]
        target = rng.choice([tb, *objects])
        name = rng.choice(surface(target))
        if target is bus and name == "close" and rng.random() < 0.9:
            continue
        arguments = [values(rng, objects) for _ in range(rng.randrange(5))]
        named = {rng.choice(KEYWORDS): values(rng, objects) for _ in range(rng.randrange(3))}
        if name in WAITING:
            named["timeout"] = rng.choice([0.0, 0.001, -1.0, "soon"])
        try:
            member = getattr(target, name)
            made = member(*arguments, **named) if callable(member) else member
        except (tb.Error, TypeError, ValueError, OverflowError, AttributeError, MemoryError, ImportError):
            counts["refused"] += 1
            continue
        counts["worked"] += 1
        if isinstance(made, _KEPT):
            objects.append(made)
            if isinstance(made, tb.Bus):
                made.close()
        if len(objects) > 40:
            del objects[5:20]
        if case % 1000 == 0:
            bus.close()
    if bus is not None:
        bus.close()
    print(counts)
    assert min(counts.values()) > CASES // 50
