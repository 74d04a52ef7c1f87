"""The IR, and plans of others: what a copy service executes besides what was submitted."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import Seat, run

import tensorbus as tb
from tensorbus._c import tb_chunk_mode


def of_a_batch(seat: Seat) -> None:
    """What the batch would do is done by a copy service."""
    is_send = seat.group == "a"
    with seat.join() as bus:
        bus.enter("both", 0 if is_send else 1, 2)
        pair = bus.pair("p", "b" if is_send else "a", "mesh=1 place=R")
        service = tb.copy_service(bus, "both", timeout=20.0)
        x = np.arange(12.0).reshape(3, 4) if is_send else np.full((3, 4), -1.0)
        with bus.batch("step") as batch:
            batch.add(pair, "x", x)
            with pytest.raises(tb.Refused):
                batch.ir(is_send)
            batch.register()
            ir = batch.ir(is_send)
            assert (ir.nchunks, ir.names) == (1, ["x"])
            chunk = ir.c.chunks[0]
            assert (chunk.mode, chunk.is_source, chunk.is_target) == (tb_chunk_mode.TB_P2P, is_send, not is_send)
            assert "P2P" in str(ir)
        for each in ir, tb.IR.parse(ir.json()):
            x[:] = np.arange(12.0).reshape(3, 4) if is_send else -1
            seat.meet()
            service.execute(each, *(({"x": x}, {}) if is_send else ({}, {"x": x})), timeout=20.0, bus_ranks=True)
            assert (x == np.arange(12.0).reshape(3, 4)).all()
            seat.meet()
        with pytest.raises(tb.Invalid, match="it has no target"):  # on both
            service.execute(ir, {"x": x} if is_send else {}, timeout=20.0, bus_ranks=True)
        with pytest.raises(tb.Invalid, match="the IR has no tensor 'y'"):  # nobody else hears of it
            service.execute(ir, {"y": x}, timeout=20.0, bus_ranks=True)


def test_an_ir_of_a_batch_is_executed(tmp_path: Path) -> None:
    run(of_a_batch, tmp_path, {"a": 1, "b": 1})


def planned(seat: Seat) -> None:
    """Rows of two ranks to columns of the same two, in another dtype; Ctrl-C ends a run that waits for the other."""
    with seat.join() as bus:
        service = tb.copy_service(bus, "all", timeout=20.0)
        spec = tb.TensorSpec("mesh=2 place=S0", "mesh=2 place=S1", (4, 6), "f32", dst_dtype="f64")
        ir = tb.IR.plan(seat.index, {"w": spec})
        whole = np.arange(24.0, dtype="f4").reshape(4, 6)
        mine, columns = whole[2 * seat.index :][:2].copy(), np.zeros((4, 3))
        if seat.index == 0:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            begun = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                service.execute(ir, {"w": mine}, {"w": columns}, timeout=20.0)
            assert time.monotonic() - begun < 10
        seat.meet()
        service.execute(ir, {"w": mine}, {"w": columns}, timeout=20.0)
        assert (columns == whole[:, 3 * seat.index :][:, :3]).all()


def test_an_ir_of_layouts_is_executed(tmp_path: Path) -> None:
    run(planned, tmp_path, {"all": 2})


def sliced(seat: Seat) -> None:
    """Each rank sends a row of its matrix to the other; and a tensor that is rounded on its way."""
    other = 1 - seat.index
    with seat.join() as bus:
        service = tb.copy_service(bus, "all", timeout=20.0)
        x = np.arange(6.0, dtype="f4").reshape(2, 3) + 10 * seat.index
        row, first = (slice(1, 2), slice(0, 3)), (slice(None, 1), slice(0, 3))
        y, rounded = np.zeros((4, 3), "f4"), np.zeros(3, "f4")
        whole = (slice(0, 3),)
        numbers = np.array([1.0, 1.0 + 2**-20, 3.0], "f4")
        halves = [tb.PlanParam(each, buffer_dtype="bf16") for each in (numbers, rounded)]
        counts = service.execute_plan(
            [tb.SliceOp("x", other, row, first), tb.SliceOp("n", other, whole)],
            [tb.SliceOp("y", other, first, row), tb.SliceOp("n", other, whole)],
            {"x": x, "n": halves[0]},
            {"y": y, "n": halves[1]},
            timeout=20.0,
        )
        assert (counts.direct, counts.copied, counts.transformed, counts.accumulated) == (1, 1, 0, 0)
        assert (y[0] == np.arange(3.0, 6.0) + 10 * other).all()
        assert (y[1:] == 0).all()
        assert rounded.tolist() == [1.0, 1.0, 3.0]
        x[:], y[:] = 7, 0
        with pytest.raises(tb.Error, match=r"rank 1|all 1"):  # its mistake is everybody's, before anything is written
            wrong = (slice(0, 9), slice(0, 3)) if seat.index else first
            service.execute_plan([tb.SliceOp("x", other, wrong)], [tb.SliceOp("y", other, first)], {"x": x}, {"y": y})
        assert (y == 0).all()


def test_a_plan_of_slices_is_executed(tmp_path: Path) -> None:
    run(sliced, tmp_path, {"all": 2})


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    def refuses(call: Any, sentence: str) -> None:
        with pytest.raises(tb.Invalid, match=sentence):
            call()

    refuses(lambda: tb.IR.parse("{"), "line 1, column 1")
    refuses(lambda: tb.IR.parse(None), "text must be a str")  # type: ignore[arg-type]
    refuses(lambda: tb.IR(None), "an IR is made by")
    refuses(lambda: tb.IR.plan(0, {"w": 7}), "tensor 'w': it must be a TensorSpec")  # type: ignore[dict-item]
    refuses(lambda: tb.IR.plan(0, {"w": tb.TensorSpec("mesh=1 place=R", "mesh=1", (4,), "f32")}), "tensor 'w'")
    refuses(lambda: tb.IR.plan(0, {"w": tb.TensorSpec("mesh=1 place=R", "mesh=1 place=R", (4,), "f9")}), "'w': dtype")
    with tb.join(f"unix:{tmp_path}/bus", "all", 0, 1) as bus, tb.copy_service(bus) as service:
        x = np.zeros((2, 2))
        frozen = x.copy()
        frozen.flags.writeable = False
        op = tb.SliceOp("w", 0, (slice(0, 2), slice(0, 2)))
        refuses(lambda: service.execute(7), "ir must be")  # type: ignore[arg-type]
        refuses(lambda: service.execute_plan([op], [op], {"w": x}, {"w": frozen}), "targets 'w': it is read-only")
        refuses(lambda: service.execute_plan([7], []), r"sends\[0\] must be a SliceOp")  # type: ignore[list-item]
        refuses(lambda: service.execute_plan([tb.SliceOp("w", 1, ())], []), r"peer of sends\[0\] is 1")
        stepped, backwards = tb.SliceOp("w", 0, (slice(0, 4, 2),)), tb.SliceOp("w", 0, (slice(2, 1),))
        refuses(lambda: service.execute_plan([stepped], []), r"dim 0 of here of sends\[0\]")
        refuses(lambda: service.execute_plan([], [backwards]), r"the end of dim 0 of here of recvs\[0\]")
        scaled = tb.PlanParam(x, encode="mxfp8", scales=np.zeros(9, "u1"))
        refuses(lambda: service.execute_plan([], [op], {}, {"w": scaled}), r"targets 'w': .*(scales|dtype)")


def test_json() -> None:
    ir = tb.IR.plan(1, {"w": tb.TensorSpec("mesh=2 place=S0", "mesh=2 place=R", (4, 6), "f32")}, bucket_size=1)
    assert [channel["source"] for channel in json.loads(ir.json())["channels"]] == [0, 1, 1]
    assert repr(ir) == "<tensorbus.IR of rank 1: 1 tensors, 3 chunks in 3 buckets>"
