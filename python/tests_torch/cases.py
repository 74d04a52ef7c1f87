"""Random layouts of DTensors, and their local tensors as torch's own placements cut them."""

from __future__ import annotations

import functools
import itertools
import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry
from torch.distributed.tensor.placement_types import _StridedShard

SHAPES = {
    3: [(3,), (2,), (1, 3), (3, 1)],
    4: [(4,), (2, 2), (1, 4), (3,), (2,), (2, 1, 2)],
    6: [(6,), (2, 3), (3, 2), (2, 2)],
    12: [(12,), (2, 6), (3, 4), (4, 3), (2, 3, 2), (3, 2, 2), (2, 2, 2), (4, 2)],
}


@dataclass(frozen=True)
class Case:
    """How one side has a tensor."""

    mesh_shape: tuple[int, ...]
    ranks: tuple[int, ...]
    placements: tuple[Any, ...]
    shard_order: Any  # None: torch's default, or that of split factors

    @property
    def is_strided(self) -> bool:
        return any(isinstance(p, _StridedShard) for p in self.placements)

    @property
    def mesh(self) -> torch.Tensor:
        return torch.tensor(self.ranks).reshape(self.mesh_shape)


def make_meshes(
    world: int, rng: random.Random, extra: int = 2, ascending: bool = False
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Shapes with the first ranks in order, and some with any ranks in any order.

    ``ascending``: ranks ascend along each dim of the mesh, though not from row to row. torch 2.13 sorts the ranks of
    each process group, so that its own collectives are wrong for other meshes.
    """
    meshes = []
    for shape in SHAPES[world]:
        n = math.prod(shape)
        meshes.append((shape, tuple(range(n))))
        for _ in range(extra):
            ranks = rng.sample(range(world), n)
            if ascending:
                dims = rng.sample(range(len(shape)), len(shape))
                turned = torch.tensor(sorted(ranks)).reshape([shape[d] for d in dims])
                ranks = turned.permute([dims.index(d) for d in range(len(shape))]).flatten().tolist()
            meshes.append((shape, tuple(ranks)))
    return meshes


def _shuffled_order(placements: tuple[Any, ...], rng: random.Random) -> Any:
    by_dim: dict[int, list[int]] = {}
    for mesh_dim, p in enumerate(placements):
        if isinstance(p, Shard):
            by_dim.setdefault(p.dim, []).append(mesh_dim)
    for mesh_dims in by_dim.values():
        rng.shuffle(mesh_dims)
    return tuple(ShardOrderEntry(dim, tuple(mesh_dims)) for dim, mesh_dims in sorted(by_dim.items()))


def make_case(
    rng: random.Random, mesh: tuple[Any, Any], ndim: int, *, partial: str | None = None, any_factor: bool = False
) -> Case:
    """Shards in any order, replicas, contributions; split factors as FSDP over TP makes them, or any."""
    shape, ranks = mesh
    placements: list[Any] = [
        rng.choice([Replicate(), Shard(rng.randrange(ndim)), Shard(rng.randrange(ndim))]) for _ in shape
    ]
    if rng.random() < 0.35:
        dim = rng.randrange(ndim)
        if any_factor:
            at = rng.randrange(len(shape))
            placements[at] = _StridedShard(dim, split_factor=rng.choice([2, 3, 4]))
        elif len(shape) > 1:
            placements[-2:] = [_StridedShard(dim, split_factor=shape[-1]), Shard(dim)]
    if partial is not None:
        placements[rng.randrange(len(shape))] = Partial(partial)
    order = None
    if not any(isinstance(p, _StridedShard) for p in placements):
        order = _shuffled_order(tuple(placements), rng)
    return Case(shape, ranks, tuple(placements), order)


def coordinate(case: Case, rank: int) -> tuple[int, ...] | None:
    """Where the rank is in the mesh."""
    if rank not in case.ranks:
        return None
    at = case.ranks.index(rank)
    return list(itertools.product(*map(range, case.mesh_shape)))[at]


def cut(case: Case, whole: torch.Tensor, rank: int, order: list[int] | None) -> torch.Tensor:
    """The rank's part: mesh dims cut in this order, by torch's placements."""
    at = coordinate(case, rank)
    if at is None:
        return whole.new_empty((0,) * whole.ndim)
    for mesh_dim in order if order is not None else range(len(case.mesh_shape)):
        p = case.placements[mesh_dim]
        if order is not None and isinstance(p, _StridedShard):
            p = Shard(p.dim)
        if isinstance(p, Shard | _StridedShard):
            parts, _ = p._split_tensor(whole, case.mesh_shape[mesh_dim], with_padding=False)
            whole = parts[at[mesh_dim]]
    return whole.clone()


def order_of(case: Case, mesh: Any) -> list[int] | None:
    """The order that torch reads: the one given, or that of split factors; None: from left to right."""
    order = case.shard_order
    if case.is_strided:
        order = DTensorSpec._maybe_convert_StridedShard_to_shard_order(case.placements, mesh)
    return None if order is None else [d for entry in order for d in entry.mesh_dims]


def contributions(case: Case, whole: torch.Tensor, seed: int) -> list[torch.Tensor]:
    """A tensor for each coordinate of the Partial mesh dim, whose reduction is ``whole``; [whole] if there is none."""
    found = [(i, p) for i, p in enumerate(case.placements) if isinstance(p, Partial)]
    if not found:
        return [whole]
    mesh_dim, p = found[0]
    n = case.mesh_shape[mesh_dim]
    g = torch.Generator().manual_seed(seed)
    noise = [torch.randint(0, 50, whole.shape, generator=g).to(whole.dtype) for _ in range(n)]
    if p.reduce_op in ("min", "max"):
        sign = 1 if p.reduce_op == "min" else -1
        parts = [whole + sign * x for x in noise]
        parts[seed % n] = whole
        return parts
    rest = functools.reduce(torch.add, noise[1:], torch.zeros_like(whole))
    scale = n if p.reduce_op == "avg" else 1
    return [whole * scale - rest, *noise[1:]]


def part_of(case: Case, whole: torch.Tensor, rank: int, seed: int, order: list[int] | None) -> torch.Tensor:
    """The rank's local tensor, with its contribution where the case is Partial."""
    at = coordinate(case, rank)
    parts = contributions(case, whole, seed)
    which = 0
    if at is not None and len(parts) > 1:
        which = at[next(i for i, p in enumerate(case.placements) if isinstance(p, Partial))]
    return cut(case, parts[which], rank, order)
