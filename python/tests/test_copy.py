"""The copy service between processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from ranks import Seat, run

import tensorbus as tb


def ring(seat: Seat) -> None:
    """Each rank sends to the next one: by id, by order, several tensors in one operation, with strides, to itself."""
    n, i = seat.size, seat.index
    with seat.join() as bus:
        service = tb.copy_service(bus, "all", timeout=20.0)
        for round_ in range(3):
            got = np.zeros((4, 3)), np.zeros(2, np.int32), np.zeros((3, 4)).T
            own = np.zeros(5, np.float32)
            service.submit_send([np.full((4, 3), i + 0.5), np.array([i, round_], np.int32)], (i + 1) % n, task_id=i)
            service.submit_send(np.arange(12.0).reshape(4, 3) + i, (i + 1) % n)
            service.submit_recv(list(got[:2]), (i - 1) % n, task_id=(i - 1) % n)
            service.submit_recv(got[2], (i - 1) % n)
            service.submit_send(np.arange(5, dtype=np.float32), i, task_id=100)
            service.submit_recv(own, i, task_id=100)
            service.run(timeout=20.0)
            assert (got[0] == (i - 1) % n + 0.5).all()
            assert got[1].tolist() == [(i - 1) % n, round_]
            assert (got[2] == np.arange(12.0).reshape(4, 3) + (i - 1) % n).all()
            assert own.tolist() == [0, 1, 2, 3, 4]
        service.submit_recv(np.zeros(3 + i), (i - 1) % n, task_id=7)
        with pytest.raises(tb.Error, match="7"):
            service.run(timeout=20.0)
        service.run(timeout=20.0)  # what failed is gone


def test_ring(tmp_path: Path) -> None:
    run(ring, tmp_path, {"all": 3})


def interrupted(seat: Seat) -> None:
    """A run that Ctrl-C ends, before the other rank has come to it; then all is well again."""
    with seat.join() as bus:
        service = tb.copy_service(bus, "all", timeout=20.0)
        x = np.full(1000, 7.0 if seat.index else -1.0)
        for round_ in range(3):
            x[:] = round_ if seat.index else -1
            if seat.index:
                service.submit_send(x, 0)
            else:
                service.submit_recv(x, 1)
                begun = time.monotonic()
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
                with pytest.raises(KeyboardInterrupt):
                    service.run(timeout=20.0)
                assert time.monotonic() - begun < 2
                assert (x == -1).all()
                service.submit_recv(x, 1)
            seat.meet()
            service.run(timeout=20.0)
            assert (x == round_).all()
            seat.meet()


def test_interrupted_run(tmp_path: Path) -> None:
    run(interrupted, tmp_path, {"all": 2})


def test_refusals(tmp_path: Path) -> None:
    with tb.join(f"unix:{tmp_path}/bus", "all", index=0, size=1) as bus:
        with pytest.raises(tb.Invalid, match="not in group 'other'"):
            tb.copy_service(bus, "other")
        service = tb.copy_service(bus)
        with pytest.raises(tb.Invalid, match="dest is 1"):
            service.submit_send(np.zeros(3), 1)
        with pytest.raises(tb.Invalid, match="tensor 0: it is read-only"):
            service.submit_recv(np.broadcast_to(np.zeros(1), (3,)), 0)
        with pytest.raises(tb.Invalid, match="tensor 1: str is no tensor"):
            service.submit_send([np.zeros(3), "x"], 0)
        with pytest.raises(tb.Invalid, match="task_id is -1"):
            service.submit_send(np.zeros(3), 0, task_id=-1)
        service.close()
        with pytest.raises(tb.Invalid, match="closed"):
            service.run()
