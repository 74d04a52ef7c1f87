"""The transfer IR: what one rank does to move tensors, as data."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from ctypes import POINTER, byref, c_int32, c_int64, pointer
from dataclasses import dataclass
from typing import Any

from . import _tensors, _values
from ._c import (
    TB_MAX_DIMS,
    TB_MAX_RANKS,
    lib,
    take_text,
    tb_binding,
    tb_bucket,
    tb_bucket_entry,
    tb_channel,
    tb_chunk,
    tb_ir,
    tb_ir_opts,
    tb_ir_part,
    tb_plan_opts,
    tb_tensor_spec,
)
from ._errors import Error, Invalid
from ._layout import Layout, layout

_ALIGN = 64  # of chunks in a bucket

Parts = Mapping[int, tuple[_tensors.View | None, _tensors.View | None]]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that ``IR.plan`` moves."""

    src: str | Layout
    dst: str | Layout
    shape: Any  # the global one
    dtype: Any  # the source's
    dst_dtype: Any = None  # by default, the source's
    wire_dtype: Any = None  # by default, that of the narrower side
    group: int = 0  # tensors of a lower group go first
    band: int = 0  # so many indices of dim 0 are a group of their own; 0: the tensor is in one group
    memory_kind: int = 0  # tensors with different numbers are never in one bucket


class IR:
    """All that one rank does for some tensors: chunks in buckets, in channels. It never changes.

    ``Batch.ir`` tells what a batch does, ``IR.plan`` works it out from layouts, ``IR.parse`` reads what ``json`` has
    written. ``CopyService.execute`` does it. ``str()`` has it in lines. ``c`` is the C struct ``tb_ir``, to be read.

    >>> import tensorbus as tb
    >>> ir = tb.IR.plan(0, {"w": tb.TensorSpec("mesh=2 place=S0", "mesh=2 place=S1", (4, 6), "f32")})
    >>> ir.rank, ir.names, ir.nchunks, tb.IR.parse(ir.json()).json() == ir.json()
    (0, ['w'], 3, True)
    """

    def __init__(self, made: Any, keepalive: object = None) -> None:
        if not isinstance(made, POINTER(tb_ir)):
            raise Invalid("an IR is made by IR.plan, IR.parse or Batch.ir")
        self._pointer = made
        self._keepalive = keepalive  # of what was built by hand; None: the library made it
        self.c: tb_ir = made.contents

    @staticmethod
    def plan(
        rank: int,
        tensors: Mapping[str, TensorSpec],
        *,
        hosts: Sequence[int] | None = None,
        unbalanced: bool = False,
        whole_rows: bool = False,
        bucket_size: int = 0,
        staging_bytes: int = 0,
        max_in_flight: int = 0,
        direct: bool = False,
    ) -> IR:
        """What the rank does to move the tensors. The options are those of ``tb.plan`` and of ``tb_ir_opts``."""
        rank = _values.integer("rank", rank, 0, TB_MAX_RANKS - 1)
        specs = [_spec(name, spec) for name, spec in _values.mapping("tensors", tensors).items()]
        plan_opts = tb_plan_opts(
            unbalanced=_values.flag("unbalanced", unbalanced), whole_rows=_values.flag("whole_rows", whole_rows)
        )
        if hosts is not None:
            numbers = [_values.integer("a host", h, 0, _values.MOST_I32) for h in _values.items("hosts", hosts)]
            plan_opts.hosts, plan_opts.nhosts = (c_int32 * len(numbers))(*numbers), len(numbers)
        opts = tb_ir_opts(
            bucket_size=_values.integer("bucket_size", bucket_size, 0, _values.MOST_I64),
            staging_bytes=_values.integer("staging_bytes", staging_bytes, 0, _values.MOST_I64),
            max_in_flight=_values.integer("max_in_flight", max_in_flight, 0, _values.MOST_U32),
            direct=_values.flag("direct", direct),
            plan=pointer(plan_opts),
        )
        out = POINTER(tb_ir)()
        lib.tb_ir_create(rank, (tb_tensor_spec * len(specs))(*specs), len(specs), None, byref(opts), byref(out))
        return IR(out)

    @staticmethod
    def parse(text: str) -> IR:
        """Reads what ``json`` has written, and checks it."""
        c_text, out = _values.text("text", text), POINTER(tb_ir)()
        lib.tb_ir_parse_json(c_text, len(c_text), byref(out))
        return IR(out)

    def json(self) -> str:
        """All of it as JSON."""
        return take_text(lib.tb_ir_dump_json, self._pointer)

    @property
    def rank(self) -> int:
        """Whose it is."""
        return int(self.c.rank)

    @property
    def names(self) -> list[str]:
        """Of the tensors, sorted."""
        return [name.decode() for name in self.c.names[: self.c.ntensors]]

    @property
    def nchunks(self) -> int:
        """How many boxes it sends, receives, or both."""
        return int(self.c.nchunks)

    def __str__(self) -> str:
        return take_text(lib.tb_ir_dump_text, self._pointer)

    def __repr__(self) -> str:
        c = self.c
        return f"<tensorbus.IR of rank {c.rank}: {c.ntensors} tensors, {c.nchunks} chunks in {c.nbuckets} buckets>"

    def __del__(self, destroy: Callable[..., None] = lib.tb_ir_destroy) -> None:
        if getattr(self, "_keepalive", self) is None:
            destroy(self._pointer)


def _spec(name: Any, spec: Any) -> tb_tensor_spec:
    c_name = _values.text("a tensor's name", name)
    if not isinstance(spec, TensorSpec):
        raise Invalid(f"tensor '{name}': it must be a TensorSpec, not {type(spec).__name__}")
    try:
        src, dst, dtype = layout(spec.src), layout(spec.dst), _values.dtype("dtype", spec.dtype)
        made = tb_tensor_spec(
            name=c_name,
            shape=_values.shape("shape", spec.shape),
            src=src._handle,
            dst=dst._handle,
            src_dtype=dtype,
            dst_dtype=dtype if spec.dst_dtype is None else _values.dtype("dst_dtype", spec.dst_dtype),
            wire_dtype=0 if spec.wire_dtype is None else _values.dtype("wire_dtype", spec.wire_dtype),
            group=_values.integer("group", spec.group, 0, _values.MOST_U32),
            band=_values.integer("band", spec.band, 0, _values.MOST_I64),
            memory_kind=_values.integer("memory_kind", spec.memory_kind, 0, 2**64 - 1),
        )
    except Error as error:
        raise type(error)(f"tensor '{name}': {error}", error.status) from None
    made.keepalive = src, dst
    return made


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
            shape=_values.shape("shape", view.shape),
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


def bind_names(ir: IR, sources: Mapping[str, _tensors.View], targets: Mapping[str, _tensors.View]) -> Any:
    """The same by name."""
    index = {name: i for i, name in enumerate(ir.names)}
    for name in (*sources, *targets):
        if name not in index:
            raise Invalid(f"the IR has no tensor {name!r}")
    return bind(ir, {i: (sources.get(name), targets.get(name)) for name, i in index.items()})
