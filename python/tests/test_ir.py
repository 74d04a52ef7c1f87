"""The IR of a batch, and its execution by a copy service."""

from __future__ import annotations

import concurrent.futures
from pathlib import Path
from typing import Any

import numpy
import pytest

import tensorbus as tb
from tensorbus import _ir, _tensors
from tensorbus._c import tb_bucket_step, tb_chunk_mode


def _side(url: str, is_send: bool, x: numpy.ndarray[Any, Any], all_told: list[Any]) -> None:
    names = ("a", "b") if is_send else ("b", "a")
    with tb.join(url, names[0], index=0, size=1) as bus:
        bus.enter("both", 0 if is_send else 1, 2)
        pair = bus.pair("p", names[1], "mesh=1 place=R", group=names[0])
        service = tb.copy_service(bus, "both", timeout=20.0)
        with bus.batch("step") as batch:
            batch.add(pair, "x", x)
            with pytest.raises(tb.Refused):
                _ir.of_batch(batch, is_send)
            batch.register()
            ir = _ir.of_batch(batch, is_send)
            assert (ir.c.nchunks, ir.c.nbuckets, ir.c.names[0]) == (1, 1, b"x")
            chunk = ir.c.chunks[0]
            assert (chunk.mode, chunk.is_source, chunk.is_target) == (tb_chunk_mode.TB_P2P, is_send, not is_send)
            assert "P2P" in str(ir)
            view = _tensors.read(x)
            bound = _ir.bind(ir, {0: (view, None) if is_send else (None, view)})
            told: list[tuple[int, tb_bucket_step]] = []
            _ir.execute(service, ir, bound, 20.0, True, lambda bucket, step: told.append((bucket, step)))
            with pytest.raises(tb.Invalid, match="it has no target"):  # on both
                _ir.execute(service, ir, bound if is_send else _ir.bind(ir, {}), 20.0, True)
            all_told.append(told)


def test_an_ir_of_a_batch_is_executed(tmp_path: Path) -> None:
    x, y = numpy.arange(12.0).reshape(3, 4), numpy.full((3, 4), -1.0)
    told: list[Any] = []
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        url = f"unix:{tmp_path}/bus"
        for done in [pool.submit(_side, url, True, x, told), pool.submit(_side, url, False, y, told)]:
            done.result(60)
    assert told == [[(0, step) for step in tb_bucket_step]] * 2
    assert (y == x).all()
