"""Whatever is passed, the interpreter does not crash: calls of the whole surface with arguments of all kinds.

Most arguments are what their parameter wants, so that calls get far: batches are added to, transfers move. Each call
works, or raises a tb.Error that says what is wrong. TB_CASES sets the number of calls.
"""

from __future__ import annotations

import inspect
import itertools
import os
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

import tensorbus as tb

CASES = int(os.environ.get("TB_CASES", "20000"))
SEED = int(os.environ.get("TB_SEED", time.time_ns() % 10**6))

FUNCTIONS = ["apply_view", "copy_service", "empty", "join", "layout", "match_names", "Names", "plan", "share"]
KEPT = (tb.Bus, tb.Pair, tb.Batch, tb.Transfer, tb.Layout, tb.Plan, tb.Memory, tb.CopyService, tb.Names, tb.IR)
# One makes a process, one needs PyTorch, one hands out a descriptor, and asyncio is tested elsewhere.
NEVER = ("svg", "torch", "fileno", "pair_async", "register_async")
# Seldom: of what was made first, what makes further calls fail; and what waits, or leaves something behind.
ENDING = ("close", "add", "add_all", "add_pair", "remove_pair")
SLOW = ("reshard", "copy_service", "enter")

LAYOUTS = ["mesh=1 place=R", "mesh=1 place=S0", "mesh=2 place=S1 ranks=1,0", "mesh=2,2 place=R,S0", "none"]
DTYPES = ["f32", "bf16", "f4e2m1", "int8", "torch.float32", np.dtype("f4"), np.float64, "bool"]
EVENTS = ["released", "committed", "arrived", None]
NAMES = ["w", "v", "x.0", "layers.1.experts.2.w"]
VIEWS = ["split(0, 2, -1)", "merge(0, 1)", "permute(1, 0)", "slice(0, 0, 1)", ""]
INTS = [0, 1, 2, 3, 64, 4096]
FLAGS = [False, True]
# What parameters want; those that are not here are flags or ints.
FITTING: dict[str, list[Any]] = {
    "name": NAMES,
    "remote": ["a", "b", "c"],
    "source": ["a", 0, NAMES],
    "group": ["a", "b", 0, 1],
    "layout": LAYOUTS,
    "text": LAYOUTS,
    "src": LAYOUTS,
    "dst": LAYOUTS,
    "its_layout": LAYOUTS,
    "dtype": DTYPES,
    "wire_dtype": [None, "f32", "bf16"],
    "shape": [(4, 4), (4,), (2, 3, 4), 8, [4, 4], ()],
    "shapes": [{}, {"w": (4, 4)}],
    "view": VIEWS,
    "encode": [None, "mxfp8", "fp8_block", "nvfp4", "fp8_tensor"],
    "scale_group": [None, "g"],
    "event": EVENTS,
    "wait": EVENTS,
    "commit": ["in_place", "shadow"],
    "ties": [None, {"w": "v"}],
    "ignored": [(), ["x.*"]],
    "target": [NAMES, []],
    "params": [NAMES, []],
    "rules": [[("x.*", r"y.\1")], [("w", None, "merge(0, 1)")]],
    "layer_pattern": [None, "layers.#."],
    "expert_pattern": [None, "experts.#."],
    "first_layers": [None, [0, 1]],
    "expert_map": [None, [0, 2, 1]],
    "device": ["cpu", "host", "pinned"],
    "hosts": [None, [0, 0, 1, 1]],
    "token": [None, "secret"],
    "transport": [None, "auto", "shm"],
    "host": [None, "here"],
    "ranks": [None],
    "mesh": [None],
    "stream": [None],
    "rank": [0, 1],
    "index": [0],
    "size": [1],
    "workers": [0, 1],
    "task_id": [None, 1, 2],
    "staging_bytes": [0, 1 << 20],
    "sources": [{}, {"w": np.zeros((4, 4), np.float32)}],
    "targets": [{}, {"w": np.zeros((4, 4), np.float32)}],
    "sends": [[], [tb.SliceOp("w", 0, (slice(0, 2), slice(0, 4)))]],
    "recvs": [[], [tb.SliceOp("w", 0, (slice(2, 4), slice(0, 4)))]],
}
SPECS = [tb.TensorSpec("mesh=1 place=S0", text, (4, 4), "f32") for text in LAYOUTS[:4]]


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


def anything(rng: random.Random, objects: list[Any]) -> Any:
    odd: list[Any] = [
        rng.choice([0, 1, 2, -1, 3, 2**31, 2**63, -(2**63), 2**64, 2**200, True]),
        rng.choice([0.0, 0.01, -1.0, float("inf"), float("nan"), 1e300]),
        rng.choice(["", "a", "\0", "\ud800", "x" * 5000, "é", "a/b", "%s%n", "unix:", "agent:/x", "mesh=", "S0"]),
        tuple(rng.choice([0, 1, 2, 4, -1, 2**62, 2**63]) for _ in range(rng.randrange(10))),
        rng.choice([None, [], {}, (), b"w", object(), Odd(rng), Ellipsis, int, lambda: 0, [None], {1: 2}]),
        arrays(rng),
        rng.choice(objects),
    ]
    return rng.choice(odd)


def fitting(rng: random.Random, parameter: inspect.Parameter, objects: list[Any]) -> Any:
    name = parameter.name
    if name in ("tensor", "scales", "scale"):
        return rng.choice([arrays(rng), np.zeros((4, 4), np.float32), tb.empty((4, 4)), np.zeros((4, 1), np.uint8)])
    if name == "tensors" and parameter.annotation == "Mapping[str, TensorSpec]":
        return {"w": rng.choice(SPECS)}
    if name == "tensors":
        return {rng.choice(NAMES): rng.choice([np.zeros((4, 4), np.float32), arrays(rng)]) for _ in range(2)}
    if name in ("pair", "bus", "ir"):
        kind = {"pair": tb.Pair, "bus": tb.Bus, "ir": tb.IR}[name]
        return rng.choice([each for each in objects if isinstance(each, kind)] or [None])
    if isinstance(parameter.default, bool):
        return rng.choice(FLAGS)
    return rng.choice(FITTING.get(name, INTS))


def arguments(rng: random.Random, call: Any, objects: list[Any]) -> dict[str, Any]:
    """A value for each parameter that has to be there, and for some of the others."""
    chosen = {}
    likely = rng.choice([0, 0.1, 0.3])
    for parameter in inspect.signature(call).parameters.values():
        if parameter.name == "timeout":
            chosen["timeout"] = rng.choice([0.0, 0.001, 0.002] if rng.random() < 0.95 else [-1.0, "soon", [], 1j])
        elif parameter.default is parameter.empty or rng.random() < likely:
            fits = rng.random() < 0.9
            chosen[parameter.name] = fitting(rng, parameter, objects) if fits else anything(rng, objects)
    if call.__name__ in ("send", "recv") and rng.random() < 0.7:
        chosen |= {"wait": None, "timeout": 0.05}  # so that the other side can begin, too
    return chosen


def state_of(transfer: tb.Transfer) -> frozenset[str]:
    return frozenset() if transfer.is_closed else transfer.state().events


def on_both(*calls: Any) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def make_objects(url: str) -> list[Any]:
    """Two seats in this process, with a batch that both have registered."""
    buses = [tb.join(url, group=group, index=0, size=1, timeout=30.0) for group in "ab"]
    pairs = [buses[i].pair("p", "ba"[i], "mesh=1 place=R", wait=False) for i in range(2)]
    batches = [bus.batch("good") for bus in buses]
    for batch, pair in zip(batches, pairs, strict=True):
        batch.add(pair, "w", np.zeros((4, 4), np.float32))
    on_both(*(batch.register for batch in batches))
    for bus in buses:
        bus._timeout = 0.002  # of calls that are given none
    return [
        *buses,
        *pairs,
        *batches,
        *batches,
        tb.copy_service(buses[0]),
        tb.IR.plan(0, {"w": SPECS[0]}),
        tb.layout(LAYOUTS[0]),
    ]


def test_no_argument_crashes(tmp_path: Path) -> None:
    print(f"seed {SEED} (TB_SEED={SEED} repeats this run)")
    rng = random.Random(SEED)
    counts: Counter[str] = Counter()
    FITTING["url"] = [f"unix:{tmp_path}/other", "tcp://127.0.0.1:0", f"agent:{tmp_path}/nobody"]
    objects: list[Any] = []
    made: Any = None
    transfers: list[tb.Transfer] = []
    for case in itertools.count():
        if counts["worked"] + counts["refused"] == CASES:
            break
        if not objects or objects[0].is_closed or objects[1].is_closed or case % 1000 == 0:
            for bus in objects[:2]:
                bus.close()
            objects = make_objects(f"unix:{tmp_path}/{case}")
            nfixed = len(objects)
            objects += [objects[0].batch("other"), objects[1].batch("other")]
        target = tb if rng.random() < 0.1 else rng.choice(objects)
        name = rng.choice(FUNCTIONS if target is tb else [n for n in dir(target) if n[0] != "_" and n not in NEVER])
        is_fixed = target in objects[:nfixed]
        if rng.random() < (0.98 if is_fixed and name in ENDING else 0.8 if name in SLOW else 0):
            continue
        where = f"{type(target).__name__ if target is not tb else 'tb'}.{name}"
        try:
            member = getattr(target, name)
            made = member(**arguments(rng, member, objects)) if callable(member) else member
        except tb.Error:
            counts["refused"] += 1
            counts[f"{where} refused"] += 1
            continue
        counts["worked"] += 1
        counts[where] += 1
        if isinstance(made, tb.Transfer):
            transfers.append(made)
        if transfers and case % 20 == 0:
            counts["moved"] += "committed" in state_of(transfers.pop(0))
        if isinstance(made, KEPT):
            objects.append(made)
            if isinstance(made, tb.Bus):
                made.close()
        if len(objects) > nfixed + 30:
            del objects[nfixed : nfixed + 15]
    for bus in objects[:2]:
        bus.close()
    print(dict(sorted(counts.items())))
    assert min(counts["worked"], counts["refused"]) > CASES // 5
    assert min(counts["Batch.add"], counts["Batch.send"], counts["Batch.recv"]) > CASES // 10000
