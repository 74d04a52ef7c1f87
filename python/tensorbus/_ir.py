"""The transfer IR: what one rank does to move tensors, as data of C, and its execution by a copy service."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from ctypes import POINTER, byref, c_int32, c_int64, pointer
from typing import Any

from . import _tensors, _values
from ._batch import Batch
from ._c import (
    TB_MAX_DIMS,
    lib,
    take_text,
    tb_binding,
    tb_bucket,
    tb_bucket_entry,
    tb_bucket_step,
    tb_channel,
    tb_chunk,
    tb_ir,
    tb_ir_execute_opts,
    tb_ir_opts,
    tb_ir_part,
    tb_shape,
    tb_tensor_spec,
)
from ._copy import CopyService
from ._layout import Layout

_ALIGN = 64  # of chunks in a bucket

Parts = Mapping[int, tuple[_tensors.View | None, _tensors.View | None]]
Progress = Callable[[int, tb_bucket_step], None]


class IR:
    """All that one rank does for some tensors: chunks in buckets, in channels. ``c`` is the struct, to be read."""

    def __init__(self, made: Any, keepalive: object = None) -> None:
        self._pointer = made
        self._keepalive = keepalive  # of what was built by hand; None: the library made it
        self.c: tb_ir = made.contents

    def __str__(self) -> str:
        return take_text(lib.tb_ir_dump_text, self._pointer)

    def __del__(self, destroy: Callable[..., None] = lib.tb_ir_destroy) -> None:
        if getattr(self, "_keepalive", self) is None:
            destroy(self._pointer)


def of_batch(batch: Batch, is_send: bool) -> IR:
    """What this process does when the registered batch is sent, or received. Ranks are those of the bus."""
    out = POINTER(tb_ir)()
    with batch._use() as handle:
        lib.tb_batch_ir(handle, is_send, byref(out))
    return IR(out)


def create(rank: int, src: Layout, dst: Layout, shape: Sequence[int], dtype: int, staging_bytes: int = 0) -> IR:
    """What the rank does to move one tensor, each chunk in a bucket of its own."""
    c_shape = tb_shape(len(shape), (c_int64 * TB_MAX_DIMS)(*shape))
    spec = tb_tensor_spec(
        name=b"t", shape=c_shape, src=src._handle, dst=dst._handle, src_dtype=dtype, dst_dtype=dtype, wire_dtype=dtype
    )
    out = POINTER(tb_ir)()
    opts = tb_ir_opts(bucket_size=1, staging_bytes=staging_bytes)
    lib.tb_ir_create(rank, byref(spec), 1, None, byref(opts), byref(out))
    return IR(out)


def build(rank: int, names: Sequence[str], channels: Sequence[Sequence[Sequence[tb_chunk]]], max_in_flight: int) -> IR:
    """An IR by hand: ``channels`` have buckets, which have chunks. The library checks it when it is executed."""
    buckets = [bucket for channel in channels for bucket in channel]
    chunks = [chunk for bucket in buckets for chunk in bucket]
    c_names = (ctypes.c_char_p * len(names))(*[name.encode() for name in names])
    c_chunks, c_entries = (tb_chunk * len(chunks))(*chunks), (tb_bucket_entry * len(chunks))()
    c_buckets, c_channels = (tb_bucket * len(buckets))(), (tb_channel * len(channels))()
    nchunks = nbuckets = 0
    for i, channel in enumerate(channels):
        c_channels[i] = tb_channel(nbuckets, len(channel), max_in_flight, None)
        for bucket in channel:
            first, end = nchunks, 0
            for chunk in bucket:
                offset = -(-end // _ALIGN) * _ALIGN
                c_entries[nchunks] = tb_bucket_entry(nchunks, offset, chunk.nbytes)
                end = offset + chunk.nbytes
                nchunks += 1
            c_buckets[nbuckets] = tb_bucket(i, 0, first, len(bucket), end)
            nbuckets += 1
    made = tb_ir(rank=rank, bucket_size=1, ntensors=len(names), nchunks=nchunks, nentries=nchunks)
    made.nbuckets, made.nchannels = nbuckets, len(channels)
    made.names = ctypes.cast(c_names, POINTER(ctypes.c_char_p))
    made.chunks = ctypes.cast(c_chunks, POINTER(tb_chunk))
    made.entries = ctypes.cast(c_entries, POINTER(tb_bucket_entry))
    made.buckets = ctypes.cast(c_buckets, POINTER(tb_bucket))
    made.channels = ctypes.cast(c_channels, POINTER(tb_channel))
    return IR(pointer(made), [c_names, c_chunks, c_entries, c_buckets, c_channels, chunks])


def ranks_of(numbers: Sequence[int]) -> Any:
    """Ranks as a chunk has them."""
    return (c_int32 * len(numbers))(*numbers)


def _bind(view: _tensors.View | None) -> Any:
    if view is None:
        return None
    strides = view.strides or _tensors.row_major(view.shape)
    return pointer(
        tb_binding(
            base=view.address,
            dtype=view.dtype,
            shape=tb_shape(len(view.shape), (c_int64 * TB_MAX_DIMS)(*view.shape)),
            strides=(c_int64 * TB_MAX_DIMS)(*strides),
        )
    )


def bind(ir: IR, parts: Parts) -> Any:
    """Where this rank has its parts of the tensors, by index: (source, target). Their memory has to stay."""
    bound = (tb_ir_part * max(1, ir.c.ntensors))()
    for part in bound:
        part.size = ctypes.sizeof(tb_ir_part)
    for tensor, (src, dst) in parts.items():
        bound[tensor].src, bound[tensor].dst = _bind(src), _bind(dst)
    return bound


def execute(
    service: CopyService,
    ir: IR,
    bound: Any,
    timeout: float | None = None,
    bus_ranks: bool = False,
    progress: Progress | None = None,
) -> None:
    """Does what the IR says; all ranks of the service's group call it, each with its own, which has the same names.

    What does not fit together fails on all ranks, before anything is written. ``progress`` is called by other threads.
    """
    opts = tb_ir_execute_opts(timeout_ms=_values.milliseconds("timeout", timeout), bus_ranks=bus_ranks)
    if progress is not None:
        tell = progress
        opts.progress = type(opts.progress)(lambda _arg, bucket, step: tell(bucket, tb_bucket_step(step)))
    with service._use() as copy:
        lib.tb_ir_execute(copy, ir._pointer, bound, byref(opts))
