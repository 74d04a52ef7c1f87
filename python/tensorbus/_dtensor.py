"""Layouts of DTensors: a mesh, placements and a shard order of torch, as the text that tensorbus takes.

torch is not imported: objects are told apart by their types' names, so that one file serves every version of torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from . import _values
from ._c import TB_MAX_RANKS
from ._errors import Invalid, Refused

# What maps the ranks of a mesh to seats of the group: {global rank: seat}, or seats by global rank.
RankMap = Mapping[int, int] | Sequence[int]

_REDUCE_OPS = ("sum", "avg", "min", "max", "product")


def _decode_strided(mesh_shape: Sequence[int], cuts: Sequence[tuple[int, int] | None]) -> list[int] | None:
    """The order of mesh dims that split factors stand for, or None if they stand for no order.

    FSDP over tensor parallelism writes "tensor parallelism cuts first" as a split factor on its own mesh dim: the
    number of pieces that mesh dims to its right have made before it.
    """
    order: dict[int, list[int]] = {}
    for mesh_dim in reversed(range(len(cuts))):
        cut = cuts[mesh_dim]
        if cut is None:
            continue
        dim, factor = cut
        before = order.setdefault(dim, [])
        pieces, position = 1, 0
        while pieces != factor and position < len(before):
            pieces *= mesh_shape[before[position]]
            position += 1
        if pieces != factor:
            return None
        before.insert(position, mesh_dim)
    return [mesh_dim for _, mesh_dims in sorted(order.items()) for mesh_dim in mesh_dims]


def _placement(placement: Any) -> tuple[str, tuple[int, int] | None]:
    """The text of a placement, and what it cuts: (dim, split factor)."""
    kind = type(placement).__name__
    if kind == "Replicate":
        return "R", None
    if kind == "Shard":
        return f"Shard({placement.dim})", (placement.dim, 1)
    if kind == "_StridedShard":
        factor = int(placement.split_factor)
        return f"StridedShard({placement.dim},{factor})", (placement.dim, factor)
    if kind == "Partial" and placement.reduce_op in _REDUCE_OPS:
        return f"Partial({placement.reduce_op})", None
    raise Refused(
        f"placement {placement!r} has no layout; there are Shard, _StridedShard, Replicate and Partial of "
        f"{', '.join(_REDUCE_OPS)}"
    )


def _runs(ranks: Sequence[int]) -> str:
    """Ranks as a list of runs: 0,2,4..7"""
    texts: list[str] = []
    first = 0
    for i in range(1, len(ranks) + 1):
        if i == len(ranks) or ranks[i] != ranks[i - 1] + 1:
            texts.append(str(ranks[first]) if i - first == 1 else f"{ranks[first]}..{ranks[i - 1]}")
            first = i
    return ",".join(texts)


def layout_text(
    mesh_shape: Sequence[int],
    ranks: Sequence[int],
    placements: Sequence[Any],
    shard_order: Sequence[tuple[int, Sequence[int]]] | None = None,
    strided_is_order: bool = True,
) -> str:
    """The layout of a mesh whose row-major ranks are `ranks`.

    `shard_order` has, for each tensor dim that is cut, the mesh dims that cut it, the first one first; None: from left
    to right. `strided_is_order`: split factors stand for such an order where they can, which is how torch reads them
    unless a tensor says otherwise; else they are pieces of the tensor.

    >>> class Shard: dim = 0
    >>> layout_text((2, 2), (0, 1, 2, 3), (Shard(), Shard()), shard_order=((0, (1, 0)),))
    'mesh=2,2 place=Shard(0),Shard(0) ranks=0,2,1,3'
    """
    read = [_placement(placement) for placement in placements]
    if len(read) != len(mesh_shape):
        raise Invalid(f"{len(read)} placements for a mesh of {len(mesh_shape)} dims")
    order: list[int] | None = None
    if shard_order is not None:
        order = [mesh_dim for _, mesh_dims in shard_order for mesh_dim in mesh_dims]
    elif strided_is_order and any(cut is not None and cut[1] > 1 for _, cut in read):
        order = _decode_strided(mesh_shape, [cut for _, cut in read])
        if order is not None:
            read = [(text if cut is None else f"Shard({cut[0]})", cut) for text, cut in read]
    if order is not None:
        # Layouts are read from left to right: put the mesh dims in the order in which they cut, and turn the list of
        # ranks with them.
        cutting = iter(order)
        dims = [d if cut is None else next(cutting) for d, (_, cut) in enumerate(read)]
        ranks = _permute(mesh_shape, ranks, dims)
        mesh_shape = [mesh_shape[d] for d in dims]
        read = [read[d] for d in dims]
    text = f"mesh={','.join(map(str, mesh_shape))} place={','.join(text for text, _ in read)}"
    if list(ranks) != list(range(len(ranks))):
        text += f" ranks={_runs(ranks)}"
    return text


def _permute(shape: Sequence[int], values: Sequence[int], dims: Sequence[int]) -> list[int]:
    """A row-major array of that shape with its dims in another order."""
    strides = [1] * len(shape)
    for d in reversed(range(len(shape) - 1)):
        strides[d] = strides[d + 1] * shape[d + 1]
    offsets = [0]
    for d in dims:
        offsets = [offset + i * strides[d] for offset in offsets for i in range(shape[d])]
    return [values[offset] for offset in offsets]


def check_ranks(ranks: Any) -> None:
    """Refuses what maps no ranks to seats."""
    if ranks is None:
        return
    if isinstance(ranks, str | bytes) or not isinstance(ranks, Mapping | Sequence):
        raise Invalid(f"ranks must be a dict or a list of seats, not {type(ranks).__name__}")
    for seat in ranks.values() if isinstance(ranks, Mapping) else ranks:
        _values.integer("a seat of ranks", seat, 0, TB_MAX_RANKS - 1)


def own_ranks(mesh: Any) -> list[int]:
    """The row-major ranks of a DeviceMesh. Refuses one in whose order torch does not put the parts of tensors.

    A part belongs to a coordinate of the mesh. But the process groups of a mesh have their ranks in ascending order,
    unless the program asks torch for the mesh's, and collectives go by that order: on a mesh of ranks 1 and 0,
    distribute_tensor and FSDP give rank 0 the first part, and redistribute and torch.distributed.checkpoint the second.
    """
    numbers: list[int] = mesh.mesh.flatten().tolist()
    if numbers == sorted(numbers):
        return numbers
    coordinate = mesh.get_coordinate() if hasattr(mesh, "get_coordinate") else None
    for dim, at in enumerate(coordinate or ()):
        try:
            place = mesh.get_local_rank(dim)
        except RuntimeError:  # it has no process groups
            break
        if place != at:
            raise Refused(
                f"this rank is number {at} of the device mesh {mesh.mesh.tolist()} along dim {dim}, and number {place} "
                "of the process group there, which PyTorch has sorted; its functions do not agree on which part of a "
                "tensor that is: make a mesh whose ranks ascend along each dim"
            )
    return numbers


def mesh_ranks(mesh: Any, ranks: RankMap | None = None) -> list[int]:
    """The row-major ranks of a DeviceMesh, as seats of the group."""
    return _seats(own_ranks(mesh), ranks)


def _seats(numbers: list[int], ranks: RankMap | None) -> list[int]:
    if ranks is None:
        return numbers
    try:
        return [ranks[number] for number in numbers]
    except (KeyError, IndexError):
        known = ranks if isinstance(ranks, Mapping) else range(len(ranks))
        missing = next(number for number in numbers if number not in known)
        raise Invalid(f"ranks= has no seat for rank {missing} of the mesh") from None


def copies(whole_shape: Sequence[int], whole: Sequence[int], ranks: Sequence[int]) -> list[list[int]] | None:
    """The meshes that lie beside a sub-mesh in a larger mesh, itself among them: the same dims, other coordinates.

    None if it is no sub-mesh of that.

    >>> copies((2, 2), (0, 1, 2, 3), (0, 2))
    [[0, 2], [1, 3]]
    """
    if not set(ranks) <= set(whole):
        return None
    strides = [math.prod(whole_shape[d + 1 :]) for d in range(len(whole_shape))]
    at = [[whole.index(rank) // stride % n for n, stride in zip(whole_shape, strides, strict=True)] for rank in ranks]
    fixed = [d for d in range(len(whole_shape)) if len({c[d] for c in at}) == 1]
    beside = math.prod(whole_shape[d] for d in fixed)
    if beside * len(ranks) != len(whole):
        return None
    moves = itertools.product(*(range(whole_shape[d]) for d in fixed))
    return [
        [whole[sum(dict(zip(fixed, move, strict=True)).get(d, c[d]) * s for d, s in enumerate(strides))] for c in at]
        for move in moves
    ]


class Replicate:
    """The placement over copies of a sub-mesh."""


def spec_layout(spec: Any, ranks: RankMap | None = None, within: Sequence[Any] = ()) -> str:
    """The layout that a DTensorSpec says. In a sub-mesh of one ``within``, those beside it have the same tensor."""
    shape, numbers = tuple(spec.mesh.mesh.shape), own_ranks(spec.mesh)
    placements, order = tuple(spec.placements), getattr(spec, "shard_order", None)
    found = (copies(tuple(w.mesh.shape), w.mesh.flatten().tolist(), numbers) for w in within)
    meshes = next(filter(None, found), [numbers])
    if len(meshes) > 1:
        shape, placements = (len(meshes), *shape), (Replicate(), *placements)
        numbers = [number for mesh in meshes for number in mesh]
        order = None if order is None else [(dim, [d + 1 for d in mesh_dims]) for dim, mesh_dims in order]
    is_order = getattr(spec, "use_strided_shard_as_shard_order", None) is not False
    return layout_text(shape, _seats(numbers, ranks), placements, order, is_order)
