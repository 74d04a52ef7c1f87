"""Ctrl-C, asyncio, threads and forked children: a blocked call ends at once, and nothing hangs or crashes."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import Seat, run

import tensorbus as tb

# What blocks, and the word for it in the sentence of its deadline.
BLOCKED = {
    "join": 'tb.join("agent:" + folder + "/nobody", timeout=50)',
    "pair": 'bus.pair("p", "nobody", "mesh=1 place=R", timeout=50)',
    "register": "batch.register(timeout=50)",
    "send": "batch.send(timeout=50)",
    "reshard": 'batch.reshard("a", timeout=50)',
    "group": 'bus.wait("nobody", timeout=50)',
    "copy_service": 'bus.enter("c", 0, 2); tb.copy_service(bus, "c", timeout=50)',
    "open": 'bus.enter("c", 0, 2); idle.enter("c", 1, 2); tb.copy_service(bus, "c", timeout=50)',
    "wait": 'batch.recv(timeout=50, wait=None).wait("arrived", timeout=50)',
}
SCRIPT = """
import sys, numpy as np, tensorbus as tb
folder = sys.argv[1]
bus = tb.join("unix:" + folder + "/bus", group="a", index=0, size=1)
idle = tb.join("unix:" + folder + "/bus", group="idle", index=0, size=1)
batch = bus.batch("b")
batch.add(bus.pair("q", "b", "mesh=1 place=R", wait=False), "w", np.zeros(4))
print("ready", flush=True)
try:
    {call}
finally:
    print("ended", flush=True)
"""


@pytest.mark.parametrize("name", BLOCKED)
def test_ctrl_c(name: str, tmp_path: Path) -> None:
    script = SCRIPT.format(call=BLOCKED[name])
    command = [sys.executable, "-c", script, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.3)
    assert process.poll() is None
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "ended\n"
    assert time.monotonic() - begun < 2
    _, errors = process.communicate(timeout=20)
    assert "KeyboardInterrupt" in errors
    assert process.returncode == -signal.SIGINT


def interrupted(seat: Seat) -> tuple[int, int]:
    """Moves versions, and is interrupted all the while; a version that was received is whole."""
    sends, is_armed, nmoved, ninterrupts, in_vain = seat.group == "a", False, 0, 0, 0
    rng = random.Random(seat.group)

    def interrupt(*_: object) -> None:
        nonlocal is_armed
        if is_armed:
            is_armed = False
            raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    with seat.join() as bus:
        batch = bus.batch("step", commit="shadow")
        x = np.zeros(1000, np.float32)
        batch.add(bus.pair("p", "b" if sends else "a", "mesh=1 place=R"), "x", x)
        batch.register()
        until = time.monotonic() + 2
        while time.monotonic() < until:
            x[:] = nmoved if sends else x
            try:
                is_armed = True
                most = 1e-3 * 2 ** min(8, in_vain // 20)  # a busy machine needs longer for a version
                signal.setitimer(signal.ITIMER_REAL, rng.random() * most)
                (batch.send if sends else batch.recv)(wait="committed", timeout=1.0)
                is_armed = False
                nmoved, in_vain = nmoved + 1, 0
            except KeyboardInterrupt:
                ninterrupts, in_vain = ninterrupts + 1, in_vain + 1
            except (tb.Cancelled, tb.Timeout):  # by the other
                is_armed = False
            assert (x == x[0]).all()
        seat.meet()
    return nmoved, ninterrupts


def test_interrupts_at_any_moment_leave_nothing_behind(tmp_path: Path) -> None:
    found = run(interrupted, tmp_path, {"a": 1, "b": 1})
    print(found)
    assert all(nmoved > 0 and ninterrupts > 10 for nmoved, ninterrupts in found.values())


def test_asyncio_gives_up(tmp_path: Path) -> None:
    """A call that a task gives up can be made again, and other tasks run meanwhile."""

    async def program() -> int:
        bus = await tb.join_async(f"unix:{tmp_path}/bus", group="a", index=0, size=1)
        ticks = 0
        for begin in (
            lambda: bus.pair_async("p", "nobody", "mesh=1 place=R", timeout=50.0),
            lambda: tb.join_async(f"agent:{tmp_path}/nobody", timeout=50.0),
        ):
            task = asyncio.ensure_future(begin())
            for _ in range(5):
                await asyncio.sleep(0.02)
                ticks += 1
            assert not task.done()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        with pytest.raises(tb.Timeout, match="nobody"):
            await bus.pair_async("p", "nobody", "mesh=1 place=R", timeout=0.2)
        bus.close()
        return ticks

    assert asyncio.run(program()) == 10


def test_close_by_another_thread(tmp_path: Path) -> None:
    bus = tb.join(f"unix:{tmp_path}/bus", group="a", index=0, size=1)
    found: list[BaseException] = []

    def wait() -> None:
        try:
            bus.pair("p", "nobody", "mesh=1 place=R", timeout=50.0)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.2)
    bus.close()
    thread.join(5)
    assert isinstance(found[0], tb.Cancelled)
    bus.close()
    with pytest.raises(tb.Invalid, match="is closed"):
        bus.batch("b")


def test_waits_let_go_of_the_gil(tmp_path: Path) -> None:
    bus = tb.join(f"unix:{tmp_path}/bus", group="a", index=0, size=1)
    count = 0
    ended = threading.Event()

    def work() -> None:
        nonlocal count
        while not ended.is_set():
            count += 1
            time.sleep(0.001)

    thread = threading.Thread(target=work)
    thread.start()
    with pytest.raises(tb.Timeout):
        bus.pair("p", "nobody", "mesh=1 place=R", timeout=0.5)
    ended.set()
    thread.join()
    bus.close()
    assert count > 50


def test_forked_child(tmp_path: Path) -> None:
    """It is refused with a sentence, can close what it inherited, and can join by itself."""
    bus = tb.join(f"unix:{tmp_path}/bus", group="a", index=0, size=1)
    batch = bus.batch("b")
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            with pytest.raises(tb.Refused, match="forked child"):
                bus.batch("c")
            with pytest.raises(tb.Refused, match="forked child"):
                _ = batch.version
            batch.close()
            bus.close()
            with tb.join(f"unix:{tmp_path}/bus", group="child", index=0, size=1) as own:
                assert own.group == "child"
            assert tb.layout("mesh=2 place=S0").local((4,), 1) == [[(2, 4)]]
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert bus.batch("d").version == 0
    bus.close()


def test_pickling_is_refused(tmp_path: Path) -> None:
    import pickle

    with tb.join(f"unix:{tmp_path}/bus", group="a", index=0, size=1) as bus:
        with pytest.raises(TypeError, match="belongs to its process"):
            pickle.dumps(bus)
    assert pickle.loads(pickle.dumps(tb.layout("mesh=2 place=S0"))).ranks == (0, 1)
    assert np.array_equal(tb.empty((2,), "u8").numpy().shape, (2,))


STORE = """
import sys, tensorbus as tb
with tb.join("unix:" + sys.argv[1] + "/bus", group="store", index=0, size=1):
    print("up", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize(
    "call",
    [
        'bus.enter("c", 0, 1)',
        'bus.pair("z", "b", "mesh=1 place=R", wait=False)',
        "batch.register(timeout=50)",
        "idle.groups(timeout=50)",
    ],
)
def test_ctrl_c_while_the_store_is_silent(call: str, tmp_path: Path) -> None:
    """The call ends at once, and so does the program, though the library waits for the store's answer."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    store = subprocess.Popen([sys.executable, "-c", STORE, str(tmp_path)], text=True, **pipes)
    try:
        assert store.stdout is not None
        assert store.stdout.readline() == "up\n"
        script = SCRIPT.format(call=f"sys.stdin.readline(); {call}").replace("size=1)", "size=1, timeout=50)")
        process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], text=True, **pipes)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        store.send_signal(signal.SIGSTOP)
        until = time.monotonic() + 20
        while "T (stopped)" not in Path(f"/proc/{store.pid}/status").read_text() and time.monotonic() < until:
            time.sleep(0.01)
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        time.sleep(0.5)
        assert process.poll() is None
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "ended\n"
        assert time.monotonic() - begun < 5
        _, errors = process.communicate(timeout=30)
        assert "KeyboardInterrupt" in errors
        assert time.monotonic() - begun < 20
    finally:
        store.kill()
        store.wait()
