"""Which tensors are taken, and how: NumPy's, whatever has DLPack, memory of the library's."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import Seat, run

import tensorbus as tb
from tensorbus import _tensors


class OnlyDlpack:
    """A tensor of some other package."""

    def __init__(self, array: np.ndarray, is_old: bool) -> None:
        self.array, self.is_old = array, is_old

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        if self.is_old and "max_version" in options:
            raise TypeError("max_version")
        return self.array.__dlpack__(**options)


@pytest.mark.parametrize("is_old", [False, True])
def test_dlpack_is_as_numpy(is_old: bool) -> None:
    for array in (
        np.arange(24, dtype=np.float32).reshape(2, 3, 4),
        np.arange(24, dtype=np.int64).reshape(4, 6)[::2, 1::2],
        np.zeros((3, 0), np.uint8),
        np.array(7.0),
        np.ones((4, 4), bool).T,
    ):
        by_numpy, by_dlpack = _tensors.read(array), _tensors.read(OnlyDlpack(array, is_old))
        assert by_dlpack.shape == by_numpy.shape
        assert by_dlpack.dtype == by_numpy.dtype
        assert by_dlpack.device == "host"
        if array.size:
            assert by_dlpack.address == by_numpy.address
            assert by_dlpack.strides == by_numpy.strides


def test_dlpack_keeps_memory() -> None:
    view = _tensors.read(OnlyDlpack(np.full(1 << 16, 3.0), False))
    gc.collect()
    import ctypes

    assert set((ctypes.c_double * (1 << 16)).from_address(view.address)) == {3.0}


def test_span() -> None:
    array = np.zeros((4, 6), np.int16)
    whole = _tensors.span(_tensors.read(array))
    assert whole == (array.ctypes.data, array.ctypes.data + array.nbytes)
    assert _tensors.span(_tensors.read(array[::-1, ::-1])) == whole
    assert _tensors.span(_tensors.read(array[:, :2])) == (whole[0], whole[1] - 8)


@pytest.mark.parametrize("dtype", ["bool", "u8", "u16", "u32", "u64", "i8", "i16", "i32", "i64", "f16", "f32", "f64"])
def test_empty(dtype: str) -> None:
    memory = tb.empty((3, 5), dtype)
    x = memory.numpy()
    assert x.shape == (3, 5)
    assert x.nbytes == memory.nbytes
    assert _tensors.read(x).dtype == _tensors.read(memory).dtype
    x[:] = 1
    del memory
    gc.collect()
    assert x.sum() == 15


def test_empty_of_dtypes_that_numpy_lacks() -> None:
    assert tb.empty((4, 4), "bf16").numpy().dtype == np.uint16
    assert tb.empty((4, 4), "f8e4m3").numpy().dtype == np.uint8
    assert tb.empty((4, 4), "f4e2m1").numpy().shape == (4, 2)
    assert tb.empty((0, 4), "f32").numpy().shape == (0, 4)
    assert tb.empty((), "f32").numpy().shape == ()


def kinds(seat: Seat) -> None:
    """Every kind of tensor is sent, and received as another kind."""
    sends = seat.group == "a"
    base = np.arange(60, dtype=np.float32).reshape(6, 10)
    memory = tb.empty((6, 10), "f32")
    memory.numpy()[:] = base
    mine: list[Any] = [
        base,
        memory,
        OnlyDlpack(base.copy(), False),
        np.asfortranarray(base),
        np.repeat(base, 2, 1)[:, ::2],
    ]
    if not sends:
        for tensor in mine:
            (tensor.numpy() if isinstance(tensor, tb.Memory) else getattr(tensor, "array", tensor))[:] = 0
        mine = mine[1:] + mine[:1]
    bits = np.arange(8, dtype=np.uint16) * 128 if sends else np.zeros(8, np.uint16)
    with seat.join() as bus:
        pair = bus.pair("p", "b" if sends else "a", "mesh=1 place=R")
        batch = bus.batch("step")
        batch.add_all(pair, {f"t{i}": tensor for i, tensor in enumerate(mine)})
        batch.add(pair, "bits", bits, dtype="bf16")
        batch.add(pair, "half", base[:2, :4].copy(), wire_dtype="bf16")
        batch.add(pair, "empty", np.zeros((0, 3)))
        assert (batch.send if sends else batch.recv)(wait="committed").state().status == "ok"
        assert "t0" in batch.dump(sends)
    for tensor in mine:
        found = tensor.numpy() if isinstance(tensor, tb.Memory) else getattr(tensor, "array", tensor)
        assert np.array_equal(found, np.arange(60).reshape(6, 10))
    assert bits[7] == 896


def test_kinds(tmp_path: Path) -> None:
    run(kinds, tmp_path, {"a": 1, "b": 1})


def quantised(seat: Seat) -> None:
    """One side has the tensor as numbers, the other as mxfp8."""
    sends = seat.group == "a"
    x = np.tile(np.arange(32, dtype=np.float32), (4, 2))
    data, scales = np.zeros((4, 64), np.uint8), np.zeros((4, 2), np.uint8)
    plain = np.full((4, 64), 56 if sends else 0, np.uint8)  # alike, and not quantised
    with seat.join() as bus:
        pair = bus.pair("p", "b" if sends else "a", "mesh=1 place=R")
        batch = bus.batch("step")
        if sends:
            batch.add(pair, "w", x)
        else:
            for wrong, words in (
                ({"scales": scales[:3]}, "scales must have 8 bytes"),
                ({"scales": scales[:, ::2]}, "scales must have 8 bytes without gaps"),
                ({"scales": scales, "encode": "fp9"}, "fp9"),
                ({"scales": scales, "encode": None}, "encode must be a str"),
            ):
                with pytest.raises(tb.Invalid, match=f"tensor 'w': .*{words}"):
                    batch.add(pair, "w", data, dtype="f8e4m3", **{"encode": "mxfp8", **wrong})
            batch.add(pair, "w", data, dtype="f8e4m3", encode="mxfp8", scales=scales)
        batch.add(pair, "v", plain, dtype="f8e4m3")
        (batch.send if sends else batch.recv)(wait="committed")
    if not sends:
        assert (plain == 56).all()
        assert len(set(scales.ravel())) == 1
        assert scales[0, 0] != 0
        assert np.array_equal(data[:, :32], data[:, 32:])


def test_quantised(tmp_path: Path) -> None:
    run(quantised, tmp_path, {"a": 1, "b": 1})


def own_layouts(seat: Seat) -> None:
    """Tensors that bring their layouts, in a pair without one; and seat to seat."""
    sends = seat.group == "a"
    x = np.full((4, 2) if sends else (2, 4), float(sends))
    y = np.full(seat.index + 1, float(10 * sends + seat.index))
    with seat.join() as bus:
        remote = "b" if sends else "a"
        pair = bus.pair("p", remote)
        batch = bus.batch("step")
        with pytest.raises(tb.Invalid, match="tensor 'x': it has no layout"):
            batch.add(pair, "x", x, shape=(4, 4))
        batch.add(pair, "x", x, shape=(4, 4), layout="mesh=2 place=S1" if sends else "mesh=2 place=S0")
        own = bus.pair("own", remote, layout="none")
        batch.add(own, "y", y)
        (batch.send if sends else batch.recv)(wait="committed")
        assert batch.version_of(pair) == ((0, False) if sends else (1, False))
    assert x.min() == 1
    assert y[0] == 10 + seat.index


def test_own_layouts(tmp_path: Path) -> None:
    run(own_layouts, tmp_path, {"a": 2, "b": 2})


def test_an_array_that_is_resized_under_the_batch(tmp_path: Path) -> None:
    with tb.join(f"unix:{tmp_path}/bus", group="g", index=0, size=1) as bus:
        pair = bus.pair("p", "other", layout="mesh=1 place=R", wait=False)
        batch = bus.batch("step")
        array = np.ones(1 << 20)
        batch.add(pair, "w", array)
        batch.add(pair, "v", array[5:9])
        array.resize((5,), refcheck=False)
        with pytest.raises(tb.Invalid, match="'w' of batch 'step': its memory was freed or resized"):
            batch.register(timeout=5.0)
        with pytest.raises(tb.Invalid, match="freed or resized"):
            batch.send(timeout=5.0)


def test_memory_is_refused_in_a_forked_child() -> None:
    x = tb.empty((4,), "f64")
    child = os.fork()
    if child == 0:
        try:
            x.numpy()
        except tb.Refused:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
