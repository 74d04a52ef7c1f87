"""Nothing grows, and interpreters end at any moment without a crash or a hang."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from ranks import Seat, run

import tensorbus as tb

VERSIONS = int(os.environ.get("TB_CASES", "500"))
CYCLES = VERSIONS // 10


def usage() -> tuple[int, int]:
    """Resident KiB, open descriptors."""
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0]), len(os.listdir("/proc/self/fd"))


def many_versions(seat: Seat) -> tuple[int, int]:
    sends = seat.group == "a"
    layout = "mesh=2 place=S0" if sends else "mesh=2 place=S1"
    with seat.join() as bus:
        pair = bus.pair("p", "b" if sends else "a", layout)
        batch = bus.batch("step", commit="shadow")
        parts = {f"w{i}": np.zeros((8, 16) if sends else (16, 8), np.float32) for i in range(20)}
        batch.add_all(pair, parts, shapes=dict.fromkeys(parts, (16, 16)))
        before = (0, 0)
        for version in range(1, VERSIONS + 1):
            if sends:
                parts["w3"][:] = version
                batch.send(timeout=30.0)
            else:
                batch.recv(timeout=30.0)
                assert parts["w3"].max() == version
            if version == VERSIONS // 5:
                before = usage()
        after = usage()
    return after[0] - before[0], after[1] - before[1]


def test_versions_do_not_grow(tmp_path: Path) -> None:
    for grown_kib, new_fds in run(many_versions, tmp_path, {"a": 2, "b": 2}).values():
        assert grown_kib < 2048
        assert new_fds <= 0


def many_objects(seat: Seat) -> tuple[int, int]:
    sends = seat.group == "a"
    before = (0, 0)
    for cycle in range(CYCLES):
        with seat.join() as bus:
            pair = bus.pair("p", "b" if sends else "a", "mesh=1 place=R")
            batch = bus.batch("step")
            batch.add(pair, "w", tb.empty((64, 64)))
            (batch.send if sends else batch.recv)(wait="committed")
            seat.meet()
        seat.meet()
        if cycle == CYCLES // 4:
            before = usage()
    after = usage()
    return after[0] - before[0], after[1] - before[1]


def test_objects_do_not_grow(tmp_path: Path) -> None:
    for grown_kib, new_fds in run(many_objects, tmp_path, {"a": 1, "b": 1}).values():
        assert grown_kib < 2048
        assert new_fds <= 0


PROGRAM = """
import sys, threading, numpy as np, tensorbus as tb
url, group, how = sys.argv[1:4]
sends = group == "a"
bus = tb.join(url, group=group, index=0, size=1, timeout=20)
pair = bus.pair("p", "b" if sends else "a", "mesh=1 place=R")
batch = bus.batch("step", snapshot=sends)
x = np.zeros(1 << 20, np.float32)
batch.add(pair, "w", x)
batch.register()
print("ready", flush=True)

def work():
    while True:
        try:
            (batch.send if sends else batch.recv)(timeout=20)
        except tb.Error:
            break

if how == "thread":
    threading.Thread(target=work, daemon=True).start()
elif how == "transfer":
    transfer = (batch.send if sends else batch.recv)(wait=None)
sys.stdin.readline()
if how == "error":
    raise SystemError("on purpose")
"""


def test_exit_at_any_moment(tmp_path: Path) -> None:
    """With a transfer under way, a thread that moves tensors, or neither: the interpreter ends, and soon."""
    seed = int(os.environ.get("TB_SEED", time.time_ns() % 10**6))
    print(f"seed {seed} (TB_SEED={seed} repeats this run)")
    rng = random.Random(seed)
    for case in range(6):
        how = ["transfer", "thread", "error", "nothing"][case % 4]
        command = [sys.executable, "-c", PROGRAM, f"unix:{tmp_path}/bus{case}"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        both = [subprocess.Popen([*command, group, how], **pipes) for group in ("a", "b")]
        for process in both:
            assert process.stdout.readline() == "ready\n"
        time.sleep(rng.random() * 0.2)
        for process in rng.sample(both, 2):
            process.stdin.write("\n")
            process.stdin.flush()
            time.sleep(rng.random() * 0.2)
        for process in both:
            _, errors = process.communicate(timeout=30)
            assert process.returncode == (1 if how == "error" else 0), f"{how}: {errors}"
            assert ("on purpose" in errors) == (how == "error"), errors
