"""Etha's calls for moving tensors between meshes of one process group, over tensorbus's planner and transfer IR.

Nothing is sent to plan: each rank calls ``get_m2m_map``, ``m2m_to_chunks`` and ``chunk_to_bucket_ops`` by itself, and
what they make fits together. ``bucket_comm`` is called by all ranks of the default process group.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement

import tensorbus as tb

from ... import _dtensor, _tensors, _values
from ..._c import tb_chunk, tb_chunk_mode, tb_reduce_op
from . import _run
from .ir import TRANSPORTS, Box, Bucket, BucketEntry, Chunk, Endpoint, M2MMap, Route, Transport, make_chunk

# Chunks are cut to a quarter of it, so that staging memory can hold them also where the source's dtype is wider.
_STAGING_BYTES = 64 << 20
_MOST_BUCKET_BYTES = 16 << 20


def _layout(mesh: DeviceMesh, placements: Sequence[Placement]) -> tb.Layout:
    return tb.layout(_dtensor.layout_text(mesh.shape, _dtensor.own_ranks(mesh), tuple(placements)))


def _cuts(mesh: DeviceMesh, placements: Sequence[Placement], ndim: int) -> list[int]:
    """Into how many parts each dim is cut."""
    parts = [1] * ndim
    for size, placement in zip(mesh.shape, placements, strict=True):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            parts[dim] *= size
    return parts


def get_m2m_map(
    source_mesh: DeviceMesh,
    source_placements: Sequence[Placement],
    target_mesh: DeviceMesh,
    target_placements: Sequence[Placement],
    group: Any = None,  # noqa: ARG001
    device: str = "cpu",  # noqa: ARG001
) -> M2MMap:
    """The map from one mesh to another. No rank waits for another; ``group`` and ``device`` are not used."""
    dims = [getattr(placement, "dim", 0) for placement in (*source_placements, *target_placements)]
    ndim = max(dims, default=0) + 1
    source = _cuts(source_mesh, source_placements, ndim)
    target = _cuts(target_mesh, target_placements, ndim)
    grid = tuple(math.lcm(a, b) for a, b in zip(source, target, strict=True))
    return M2MMap(
        source=_layout(source_mesh, source_placements),
        target=_layout(target_mesh, target_placements),
        grid=grid,
        source_num_slicers=[n // a for n, a in zip(grid, source, strict=True)],
        target_num_slicers=[n // b for n, b in zip(grid, target, strict=True)],
        source_partial_reductions=[
            (i, placement.reduce_op) for i, placement in enumerate(source_placements) if isinstance(placement, Partial)
        ],
    )


def _global_shape(m2m: M2MMap, part: Sequence[int], slicers: Sequence[int]) -> tuple[int, ...]:
    """That of a tensor whose parts all have this shape."""
    ndim = len(part)
    cuts = [n // each for n, each in zip(m2m.grid, slicers, strict=True)]
    return tuple(n * cut for n, cut in zip(part, (*cuts, *[1] * ndim)[:ndim], strict=True))


def m2m_to_chunks(
    m2m: M2MMap,
    rank: int,
    source_tensor: torch.Tensor | None = None,
    target_tensor: torch.Tensor | None = None,
    transfer_dtype: torch.dtype | None = None,
    source_partial_groups: Any = None,
    *,
    global_shape: Sequence[int] | None = None,
) -> list[Chunk]:
    """What the rank does to move a tensor, of which it has these parts.

    All parts of a side have the same shape, unless ``global_shape`` is given, which is that of the whole tensor. Who
    contributes to a Partial source is known from the map; ``source_partial_groups`` is not used.
    """
    del source_partial_groups
    src, dst = (None if t is None else (t.shape, t.dtype) for t in (source_tensor, target_tensor))
    asked = rank, src, dst, transfer_dtype, None if global_shape is None else tuple(global_shape)
    boxes = m2m.known.get(asked)
    if boxes is None:
        boxes = m2m.known[asked] = _find_boxes(m2m, *asked)
    # What a rank does not read, or not write, is not asked for.
    read: Any = target_tensor if source_tensor is None else source_tensor
    written: Any = source_tensor if target_tensor is None else target_tensor
    return [make_chunk(box, written if box.is_target else read, read if box.is_source else written) for box in boxes]


def _find_boxes(
    m2m: M2MMap, rank: int, src: Any, dst: Any, wire: torch.dtype | None, shape: tuple[int, ...] | None
) -> list[Box]:
    """What the rank does of a tensor of which it has parts of these shapes and dtypes."""
    is_source, is_target = rank in m2m.source.ranks, rank in m2m.target.ranks
    sides = [(*src, m2m.source, m2m.source_num_slicers)] if is_source and src is not None else []
    sides += [(*dst, m2m.target, m2m.target_num_slicers)] if is_target and dst is not None else []
    if not sides:
        return []
    if shape is None:
        shape = _global_shape(m2m, sides[0][0], sides[0][3])
    for part, _, layout, _ in sides:
        if tuple(part) != layout.local_shape(shape, rank):
            raise ValueError(
                f"rank {rank} has {tuple(part)} of a tensor of {shape} in '{layout}', where its part is "
                f"{layout.local_shape(shape, rank)}; give global_shape if parts differ in size"
            )
    if len(sides) < is_source + is_target:
        raise ValueError(f"rank {rank} is a source and a target, and has a tensor for one of them only")
    return _boxes(m2m.source, m2m.target, shape, wire or sides[0][1], rank)


@functools.lru_cache(maxsize=4096)
def _boxes(source: tb.Layout, target: tb.Layout, shape: tuple[int, ...], wire: torch.dtype, rank: int) -> list[Box]:
    """What the rank does of a tensor with this global shape."""
    dtype = _values.dtype_name(_values.dtype("transfer_dtype", wire))
    spec = tb.TensorSpec(source, target, shape, dtype)
    made = tb.IR.plan(rank, {"t": spec}, bucket_size=1, staging_bytes=_STAGING_BYTES)
    return [_box(made.c.chunks[i], wire, shape) for i in range(made.c.nchunks)]


def _box(c: tb_chunk, wire: torch.dtype, global_shape: tuple[int, ...]) -> Box:
    n = c.ndim
    lengths, src, dst = tuple(c.len[:n]), tuple(c.src.start[:n]), tuple(c.dst.start[:n])
    return Box(
        transport=TRANSPORTS[tb_chunk_mode(c.mode)],
        is_source=c.is_source,
        is_target=c.is_target,
        src_rank=c.source,
        dst_ranks=tuple(c.targets[: c.ntargets]),
        chunk_shape=lengths,
        transfer_dtype=wire,
        src_slice=_slices(src, lengths) if c.is_source else (),
        dst_slice=_slices(dst, lengths) if c.is_target else (),
        src_idx=src,
        dst_idx=dst if c.is_target else None,
        contributors=tuple(c.contributors[: c.ncontributors]),
        op=tb_reduce_op(c.op),
        divisor=c.divisor,
        global_shape=global_shape,
    )


def _slices(start: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(start, lengths, strict=True))


def chunk_to_bucket_ops(chunks: Sequence[Chunk], bucket_size: int) -> list[Bucket]:
    """Chunks with one key, in their order, in buckets that are full at ``bucket_size`` bytes; 1: each chunk alone.

    Buckets have at most 16 MiB and a chunk.
    """
    full = min(bucket_size, _MOST_BUCKET_BYTES)
    by_key: dict[tuple[Any, ...], list[Chunk]] = {}
    for chunk in chunks:
        by_key.setdefault(chunk.box.bucket_key, []).append(chunk)
    made: list[list[Chunk]] = []
    for its in by_key.values():
        first = nbytes = 0
        for end, chunk in enumerate(its, 1):
            nbytes += chunk.box.nbytes
            if nbytes >= full or end == len(its):
                made.append(its[first:end])
                first, nbytes = end, 0
    buckets = [Bucket(chunks=its, device=its[0].tensor.device) for its in made]
    for bucket in buckets:
        bucket._list = buckets
    return buckets


def bucket_comm(buckets: Sequence[Bucket], max_in_flight: int = 2, timeout: float = _run.DEADLINE_S) -> None:
    """Transfers the buckets; all ranks of the default process group call it, also those without any.

    At most ``max_in_flight`` buckets with one key are under way at a time. What does not fit together fails on all
    ranks before anything is written; a rank that is missing after ``timeout`` seconds, or dies, is named.
    """
    _run.Run(list(buckets), max_in_flight, timeout).execute()


def gather_broadcast_comm(
    target_mesh: DeviceMesh,
    target_specs: Sequence[Placement],
    local_tensor: DTensor,
    origin_tensor: torch.Tensor,
    source_world_size: int,  # noqa: ARG001
) -> DTensor | None:
    """The source's DTensor in another mesh; None on ranks outside of that. Nothing is gathered: it goes by the plan."""
    m2m = get_m2m_map(local_tensor.device_mesh, local_tensor.placements, target_mesh, target_specs)
    rank, shape = torch.distributed.get_rank(), tuple(origin_tensor.shape)
    result = None
    part = torch.empty(m2m.target.local_shape(shape, rank), dtype=origin_tensor.dtype, device=origin_tensor.device)
    chunks = m2m_to_chunks(m2m, rank, local_tensor.to_local(), part, global_shape=shape)
    bucket_comm(chunk_to_bucket_ops(chunks, _MOST_BUCKET_BYTES))
    if rank in m2m.target.ranks:
        strides = _tensors.row_major(shape)
        mesh, places, size = target_mesh, tuple(target_specs), torch.Size(shape)
        result = DTensor.from_local(part, mesh, places, run_check=False, shape=size, stride=strides)
    return result


__all__ = [
    "Bucket",
    "BucketEntry",
    "Chunk",
    "Endpoint",
    "M2MMap",
    "Route",
    "Transport",
    "bucket_comm",
    "chunk_to_bucket_ops",
    "gather_broadcast_comm",
    "get_m2m_map",
    "m2m_to_chunks",
]
