"""Hashes of tensors that do not depend on how they are cut; docs/verify.md tells what they are."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from ctypes import byref, c_int64, c_uint64, c_void_p
from typing import Any

from . import _tensors, _torch, _values
from ._c import TB_MAX_DIMS, lib, take_text, tb_binding, tb_shape
from ._errors import Invalid, Refused
from ._layout import Layout, layout

Box = tuple[tuple[int, ...], tuple[int, ...]]  # where it begins, and its size


def hash_tensor(
    tensor: Any,
    *,
    shape: Any = None,
    layout: str | Layout | None = None,
    rank: int | None = None,
    view: str | None = None,
) -> int:
    """The hash of what this process has of a tensor; modulo 2**64 the parts of all ranks add up to that of the whole.

    A DTensor brings its global shape, its layout and its rank; else a tensor is whole unless a layout is given, and
    ``shape`` is the global shape. ``view`` is what it is as a canonical tensor, as in ``Batch.add``. What is on a GPU
    is copied to the host for it.

    >>> import numpy as np
    >>> import tensorbus as tb
    >>> a = np.arange(24, dtype="float32").reshape(4, 6)
    >>> its = {"shape": (4, 6), "layout": "mesh=2 place=S0"}
    >>> halves = [tb.hash_tensor(a[2 * r : 2 * r + 2], rank=r, **its) for r in range(2)]
    >>> sum(halves) % 2**64 == tb.hash_tensor(a)
    True
    """
    part = Part(tensor, shape, layout, rank, view)
    out = c_uint64()
    lib.tb_hash_part(part.layout._handle, byref(part.c_shape), part.rank, byref(part.binding), byref(out))
    return out.value


def hash_box(box: Any, shape: Sequence[int], start: Sequence[int]) -> int:
    """The hash of a tensor that is a box of a larger one, and begins there at these indices."""
    read, out = _tensors.read(_on_host(box)), c_uint64()
    binding = tb_binding(
        read.address, 0, read.dtype, _shape(read.shape), _dims(read.strides or _tensors.row_major(read.shape))
    )
    lib.tb_hash_box(byref(binding), byref(_shape(shape)), _dims(start), byref(out))
    return out.value


class Part:
    """What this process has of a tensor, as the library takes it."""

    def __init__(
        self, tensor: Any, shape: Any = None, its: str | Layout | None = None, rank: int | None = None, view: Any = None
    ) -> None:
        read = self._read = _tensors.read(_on_host(tensor))
        if its is not None and read.layout is not None:
            raise Invalid("the tensor is a DTensor, which brings its layout")
        text = its if its is not None else read.layout
        if text is None and (rank is not None or shape is not None):
            raise Invalid("shape and rank go with a layout")
        if text is not None and rank is None:
            if read.layout is None:
                raise Invalid("a layout needs a rank")
            rank = _torch_rank()
        self.layout = layout("mesh=1 place=R") if text is None else layout(text)
        if "Partial" in str(self.layout):
            raise Refused(f"its layout is {self.layout}: contributions have no hash")
        self.rank = 0 if rank is None else _values.integer("rank", rank, 0, _values.MOST_I32)
        whole = _values.dims("shape", shape) if shape is not None else read.global_shape or read.shape
        strides = read.strides or _tensors.row_major(read.shape)
        self.binding = tb_binding(read.address, 0, read.dtype, _shape(read.shape), _dims(strides))
        self.c_shape = _shape(whole)
        if view is not None:
            self._apply(view)
        self.shape = tuple(self.c_shape.dim[: self.c_shape.ndim])

    def _apply(self, text: str) -> None:
        view, made, shape, binding = c_void_p(), c_void_p(), tb_shape(), tb_binding()
        lib.tb_view_parse(_values.text("view", text), byref(view))
        try:
            lib.tb_view_apply(view, byref(self.c_shape), self.layout._handle, byref(shape), byref(made))
            lib.tb_view_bind(
                view, byref(self.c_shape), self.layout._handle, self.rank, byref(self.binding), byref(binding)
            )
            self.layout = layout(take_text(lib.tb_layout_format, made))
        finally:
            lib.tb_layout_destroy(made)
            lib.tb_view_destroy(view)
        self.c_shape, self.binding = shape, binding

    @property
    def replica(self) -> int | None:
        """Which of the tensor's replicas it is a part of; None: this rank is not in the mesh."""
        if self.rank not in self.layout.ranks:
            return None
        text = str(self.layout)
        mesh = [int(n) for n in re.findall(r"mesh=([\d,]*)", text)[0].split(",")]
        kinds = re.findall(r"([A-Za-z]+)(?:\([^)]*\))?", text.split("place=")[1].split(" ranks=")[0])
        index, replica, step = self.layout.ranks.index(self.rank), 0, 1
        for n, kind in reversed(list(zip(mesh, kinds, strict=True))):
            if kind == "Replicate":
                replica, step = replica + index % n * step, step * n
            index //= n
        return replica

    def hash_box(self, start: Sequence[int], size: Sequence[int]) -> int:
        """The hash of what this process has in a box of the whole tensor."""
        found, out = 0, c_uint64()
        lists = [
            list(_common(segments, a, a + n))
            for segments, a, n in zip(self.layout.local(self.shape, self.rank), start, size, strict=True)
        ]
        strides, bits = self.binding.strides, _values.dtype_bits(self.binding.dtype)
        for runs in itertools.product(*lists):
            at = sum(local * strides[d] for d, (_, _, local) in enumerate(runs)) * bits
            if at % 8:
                raise Refused("a box begins in the middle of a byte")
            box = tb_binding(
                self.binding.base,
                self.binding.offset + at // 8,
                self.binding.dtype,
                _shape([n for _, n, _ in runs]),
                strides,
            )
            lib.tb_hash_box(byref(box), byref(self.c_shape), _dims([first for first, _, _ in runs]), byref(out))
            found += out.value
        return found % 2**64


def _common(segments: Sequence[tuple[int, int]], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Of the indices start .. stop-1 those in the segments: first index, how many, and where the rank has them."""
    local = 0
    for first, end in segments:
        low, high = max(first, start), min(end, stop)
        if low < high:
            yield low, high - low, local + low - first
        local += end - first


def _dims(numbers: Sequence[int]) -> Any:
    return (c_int64 * TB_MAX_DIMS)(*numbers)


def _shape(numbers: Sequence[int]) -> tb_shape:
    return tb_shape(len(numbers), _dims(numbers))


def _on_host(tensor: Any) -> Any:
    """The tensor, or a View of a copy of it in the CPU's memory."""
    read = _tensors.read(tensor)
    if read.device == "host":
        return read
    if not hasattr(tensor, "cpu"):
        raise Refused(f"it is on {read.device}, and a {type(tensor).__name__} has no cpu(); hash a copy on the host")
    local = _tensors.read(_torch.local_part(tensor).detach().cpu())
    return _tensors.View(
        local.address,
        local.dtype,
        read.shape,
        local.strides,
        "host",
        local.keepalive,
        global_shape=read.global_shape,
        layout=read.layout,
    )


def _torch_rank() -> int:
    import torch.distributed

    return int(torch.distributed.get_rank())
