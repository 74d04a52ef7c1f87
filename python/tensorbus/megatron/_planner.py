"""Megatron-LM's sharding metadata as layouts, and its plans made by tensorbus's planner."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import tensorbus as tb

from .. import _meet
from ._types import ParameterMetadata, ReshardPlan, TransferOp

_DTYPES = {1: "u8", 2: "bf16", 4: "f32", 8: "f64"}  # by size, which is all that a plan looks at
_EMBEDDINGS = ("embedding.word_embeddings.weight", "word_embeddings.weight")

Roster = Mapping[str, Sequence[ParameterMetadata]]  # of one side, by name


class PlanError(tb.Invalid, RuntimeError):
    """Metadata from which no plan can be made. Megatron's planner raises a RuntimeError."""


# ---- From metadata to layouts ---------------------------------------------------------------------------------------


class Holders:
    """The ranks of one side that have a part of a parameter."""

    def __init__(self, name: str, metas: Sequence[ParameterMetadata]) -> None:
        first = metas[0]
        self.name = name
        self.shapes = {meta.owner_rank: tuple(meta.shape) for meta in metas}
        self.groups = sorted({tuple(meta.tensor_parallel_group_ranks or (meta.owner_rank,)) for meta in metas})
        self.width = len(self.groups[0])
        self.dim = first.partition_dim if first.is_tp else None
        self.stride = max(1, first.partition_stride) if first.is_tp else 1
        self.sizes = first.partition_sizes

    def shape_of_copies(self) -> tuple[int, ...]:
        """The global shape, if every rank has all of it."""
        shapes = set(self.shapes.values())
        if len(shapes) != 1:
            raise PlanError(f"'{self.name}' is not sharded, and has the shapes {sorted(shapes)}")
        return shapes.pop()

    def shape_of_parts(self, dim: int) -> tuple[int, ...]:
        """The global shape, if each tensor-parallel group has cut it along ``dim``."""
        found = set()
        for group in self.groups:
            if len(group) != self.width:
                raise PlanError(f"'{self.name}' is in tensor-parallel groups of {self.width} and of {len(group)}")
            if missing := [rank for rank in group if rank not in self.shapes]:
                raise PlanError(f"'{self.name}' is cut over ranks {list(group)}, of which {missing} do not have it")
            parts = [self.shapes[rank] for rank in group]
            total = sum(part[dim] for part in parts)
            found |= {(*part[:dim], total, *part[dim + 1 :]) for part in parts}
        if len(found) != 1:
            raise PlanError(f"the parts of '{self.name}' make up different shapes: {sorted(found)}")
        return found.pop()

    def readings(self, other: Holders) -> list[tuple[int | None, tuple[int, ...]]]:
        """The dim that it may be cut along, None for copies, and the global shape then; what is marked comes first.

        Parameters of experts may be cut without a mark, and some that are marked are whole on each rank: the shapes of
        the two sides tell.
        """
        dim = other.dim if self.dim is None else self.dim
        if self.width == 1 or dim is None:
            return [(None, self.shape_of_copies())]
        found: list[tuple[int | None, tuple[int, ...]]] = []
        if self.dim is not None:
            found.append((dim, self.shape_of_parts(dim)))
        with contextlib.suppress(PlanError):
            found.append((None, self.shape_of_copies()))
        if self.dim is None:
            with contextlib.suppress(PlanError):
                found.append((dim, self.shape_of_parts(dim)))
        if not found:
            self.shape_of_copies()  # says what is wrong
        return found

    def blocks(self, dim: int | None) -> tuple[int, ...] | None:
        """The sizes of blocks that are cut one by one, in the whole parameter."""
        if self.sizes is None:
            return None
        return tuple(size * (1 if dim is None else self.width) for size in self.sizes)

    def layout(self, dim: int | None, blocks: Sequence[int] | None, seats: Mapping[int, int] | None) -> str:
        """The layout as text. ``seats`` are the numbers of ranks in it; None: the ranks themselves."""
        if dim is None:
            rows, place = [tuple(sorted(self.shapes))], "R"
        else:
            rows, place = self.groups, f"R,{self._placement(dim, blocks)}"
        ranks = ",".join(str(rank if seats is None else seats[rank]) for row in rows for rank in row)
        mesh = f"{len(rows[0])}" if dim is None else f"{len(rows)},{self.width}"
        return f"mesh={mesh} place={place} ranks={ranks}"

    def _placement(self, dim: int, blocks: Sequence[int] | None) -> str:
        if blocks is not None:
            return f"BlockShard({dim},{','.join(map(str, blocks))})"
        if self.stride > 1:
            return f"StridedShard({dim},{self.stride})"
        lengths = [self.shapes[rank][dim] for rank in self.groups[0]]
        piece = -(-sum(lengths) // self.width)
        if all(length == max(0, min(piece, sum(lengths) - i * piece)) for i, length in enumerate(lengths)):
            return f"Shard({dim})"
        starts = [sum(lengths[:i]) for i in range(self.width)]
        lists = (f"{start}-{start + n}" if n else "" for start, n in zip(starts, lengths, strict=True))
        return f"Explicit({dim}, {'; '.join(lists)})"


def cut(
    name: str, src: Holders, dst: Holders, src_seats: Mapping[int, int] | None, dst_seats: Mapping[int, int] | None
) -> tuple[tuple[int, ...], str, str]:
    """The global shape of a parameter, and both sides' layouts."""
    for src_dim, shape in src.readings(dst):
        for dst_dim, other_shape in dst.readings(src):
            if shape != other_shape:
                continue
            blocks, other_blocks = src.blocks(src_dim), dst.blocks(dst_dim)
            if blocks and other_blocks and blocks != other_blocks:
                raise PlanError(f"'{name}' has blocks of {blocks} at the source, of {other_blocks} at the target")
            blocks = blocks or other_blocks
            return shape, src.layout(src_dim, blocks, src_seats), dst.layout(dst_dim, blocks, dst_seats)
    shapes = [" or ".join(str(shape) for _, shape in a.readings(b)) for a, b in ((src, dst), (dst, src))]
    raise PlanError(f"size mismatch: '{name}' is {shapes[0]} at the source, {shapes[1]} at the target")


_LOCAL_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+(?=\.)")


def key_of(meta: ParameterMetadata) -> str:
    """The name by which both sides know a rank's tensor.

    Ranks of an expert-parallel group have different experts. ``resolved_name`` has their global numbers where each is a
    tensor of a grouped layer; ``local_experts.0`` of a sequential one gets its number here. A tensor for several
    experts belongs to a rank of the group, so that both sides need groups of one size.
    """
    name = meta.resolved_name or meta.name
    if not meta.is_ep or meta.global_expert_index is not None:
        return name
    group = meta.expert_parallel_group_ranks
    if group is None or len(group) == 1:
        return name
    rank = group.index(meta.owner_rank)
    if meta.num_experts and _LOCAL_EXPERT.search(name):
        first = rank * (meta.num_experts // len(group))
        return _LOCAL_EXPERT.sub(lambda found: str(first + int(found[0])), name)
    return f"{name} of expert rank {rank} of {len(group)}"


def find_source(name: str, sources: Mapping[str, Any]) -> str:
    """The source's name of what the target calls ``name``: the same, or that of the embedding it is tied to."""
    if name in sources:
        return name
    if name.endswith("output_layer.weight"):
        for embedding in _EMBEDDINGS:
            if embedding in sources:
                return embedding
    raise PlanError(f"the target's parameter '{name}' is not found in the source model")


# ---- Plans ----------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _plan(src: str, dst: str, shape: tuple[int, ...], element_size: int) -> tb.Plan:
    return tb.plan(src, dst, shape, _DTYPES.get(element_size, "u8"))


@functools.lru_cache(maxsize=65536)
def _received(plan: tb.Plan, rank: int, rotation: int) -> tuple[tuple[int, tuple[slice, ...], tuple[slice, ...]], ...]:
    """What the rank receives: from whom, and the slices there and here."""
    found = []
    for route in plan.routes(rank, rotation):
        if rank in route.targets:
            assert route.source is not None
            found.append((route.source, route.source_start, route.target_start, route.lengths))
    found.sort(key=lambda piece: piece[2])
    return tuple((source, _slices(a, n), _slices(b, n)) for source, a, b, n in found)


@functools.lru_cache(maxsize=65536)
def _receivers(plan: tb.Plan, rank: int, rotation: int) -> tuple[int, ...]:
    found = {target for route in plan.routes(rank, rotation) if route.source == rank for target in route.targets}
    return tuple(sorted(found))


def _slices(start: tuple[int, ...], lengths: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(start, lengths, strict=True))


def index_metadata_rosters(
    gathered_pairs: Sequence[tuple[Sequence[ParameterMetadata], Sequence[ParameterMetadata]]],
) -> tuple[dict[int, dict[str, ParameterMetadata]], dict[str, list[ParameterMetadata]]]:
    """What ranks 0, 1, ... have of (source, target): the target's by rank and name, the source's by name."""
    targets: dict[int, dict[str, ParameterMetadata]] = {}
    sources: dict[str, list[ParameterMetadata]] = {}
    for rank, (src, dst) in enumerate(gathered_pairs):
        targets[rank] = {key_of(meta): meta for meta in dst}
        for meta in src:
            sources.setdefault(key_of(meta), []).append(meta)
    return targets, sources


def build_plan_from_rosters(
    dst_param_metadata_by_rank: Mapping[int, Mapping[str, ParameterMetadata]],
    src_param_metadata: Roster,
    my_global_rank: int,
) -> ReshardPlan:
    """What this rank sends and receives; all ranks come to plans that fit together, each by itself.

    An operation's id is made of the receiver's rank, the parameter's place among those of the receiver, and the number
    of the piece, so that it stays the same when ranks are added.
    """
    me = my_global_rank
    wanted = _by_name(dst_param_metadata_by_rank)
    owned = dst_param_metadata_by_rank.get(me, {})
    places: dict[int, dict[str, int]] = {}
    layouts: dict[Any, tuple[tuple[int, ...], str, str]] = {}
    src_kinds, dst_kinds = _Kinds(src_param_metadata), _Kinds(wanted)
    sends: list[TransferOp] = []
    recvs: list[TransferOp] = []
    for name, dst in wanted.items():
        src_name = find_source(name, src_param_metadata)
        src = src_param_metadata[src_name]
        kind = src_kinds.find(src_name)
        mine = src[kind.owners[me]] if me in kind.owners else None
        own = owned.get(name)
        if mine is None and own is None:
            continue
        both = kind, dst_kinds.find(name)
        found = layouts.get(both)
        if found is None:
            found = layouts[both] = cut(name, Holders(name, src), Holders(name, dst), None, None)
        shape, src_layout, dst_layout = found
        plan = _plan(src_layout, dst_layout, shape, src[0].element_size)
        rotation = zlib.crc32(name.encode()) % 64  # so that replicas of a source share the parameters
        targets = {me} if own is not None else set()
        targets |= set(_receivers(plan, me, rotation)) if mine is not None else set()
        for target in targets:
            if target not in places:
                places[target] = {each: i for i, each in enumerate(dst_param_metadata_by_rank[target])}
            base = (target << 40) | (places[target][name] << 16)
            for i, (source, there, here) in enumerate(_received(plan, target, rotation)):
                if target == me and own is not None:
                    recvs.append(TransferOp(own.name, source, False, here, there, base + i))
                if source == me and mine is not None:
                    sends.append(TransferOp(mine.name, target, True, there, here, base + i))
    recvs.sort(key=_task)
    sends.sort(key=_task)
    return ReshardPlan(sends, recvs)


def _task(op: TransferOp) -> int:
    return op.task_id or 0


def _by_name(by_rank: Mapping[int, Mapping[str, ParameterMetadata]]) -> dict[str, list[ParameterMetadata]]:
    """Of each parameter the metadata of all ranks that have it. Ranks with the same parameters are taken together."""
    alike: dict[tuple[str, ...], list[Mapping[str, ParameterMetadata]]] = {}
    for metas in by_rank.values():
        alike.setdefault(tuple(metas), []).append(metas)
    found: dict[str, list[ParameterMetadata]] = {}
    for names, its in alike.items():
        for name, column in zip(names, zip(*(metas.values() for metas in its), strict=True), strict=True):
            if name in found:
                found[name] += column
            else:
                found[name] = list(column)
    return found


_owner_of = operator.attrgetter("owner_rank")
_shape_of = operator.attrgetter("shape")
_group_of = operator.attrgetter("tensor_parallel_group_ranks")


class _Kind:
    """What decides the layout: parameters that are alike in it, such as those of all layers, have one plan."""

    def __init__(self, facts: Any, metas: Sequence[ParameterMetadata]) -> None:
        self.facts = facts
        self.owners = {meta.owner_rank: i for i, meta in enumerate(metas)}


class _Kinds:
    """The kinds of one side's parameters.

    The metadata of all ranks are looked at, which is most of the time that planning takes. So it is done rank by rank,
    because those of a rank lie together in memory, and without a loop in Python. Of what all of a rank's parameters
    have in common, and of ranks that are alike, nothing is left to compare for each parameter.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._facts: dict[str, Any] = {}
        self._known: dict[Any, list[_Kind]] = {}
        blocks: dict[Any, list[str]] = {}  # of names that the same ranks have, most probably
        for name, metas in roster.items():
            blocks.setdefault((len(metas), metas[0].owner_rank), []).append(name)
        for block, names in blocks.items():
            rows: list[list[Any]] = []
            for metas in zip(*(roster[name] for name in names), strict=True):
                for read in _owner_of, _shape_of, _group_of:
                    row = list(map(read, metas))
                    if row.count(row[0]) < len(row) and row not in rows:
                        rows.append(row)
            columns = zip(*rows, strict=True) if rows else itertools.repeat(())
            self._facts.update((name, (block, column)) for name, column in zip(names, columns, strict=False))

    def find(self, name: str) -> _Kind:
        """That of a parameter. What it is marked as is the same on all ranks, so it is read from the first."""
        metas, facts = self._roster[name], self._facts[name]
        first = metas[0]
        sizes = first.partition_sizes and tuple(first.partition_sizes)
        alike = self._known.setdefault((first.is_tp, first.partition_dim, first.partition_stride, sizes), [])
        for kind in alike:
            if kind.facts == facts:
                return kind
        alike.append(_Kind(facts, metas))
        return alike[-1]


def read_module(module: Any, rank: int, num_experts: int | None, rank_offset: int) -> list[ParameterMetadata]:
    """The metadata of a module's parameters and of the buffers that its state_dict has; [] without a module."""
    if module is None:
        return []
    from megatron.core.resharding import utils

    groups = getattr(module, "pg_collection", None)
    if groups is None:
        raise PlanError("the module has no pg_collection, which says who has which part of it")
    numbers = utils._build_layer_module_prefix_map(module)
    lists: dict[Any, Any] = {}
    return [
        utils.extract_param_metadata(
            tensor,
            name,
            rank,
            groups,
            num_experts=num_experts,
            layer_module_prefix_map=numbers,
            rank_offset=rank_offset,
            _rank_list_cache=lists,
        )
        for name, tensor in utils.named_refit_tensors(module)
    ]


def build_local_reshard_plan(
    src_module: Any,
    dst_module: Any,
    num_experts: int | None = None,
    group: Any = None,
    src_rank_offset: int = 0,
    dst_rank_offset: int = 0,
) -> ReshardPlan:
    """What this rank does to move one module into another; all ranks of the process group call it.

    Either module may be None.
    """
    import torch.distributed as dist

    rank = dist.get_rank() if group is None else group.rank()
    mine = (
        read_module(src_module, rank, num_experts, src_rank_offset),
        read_module(dst_module, rank, num_experts, dst_rank_offset),
    )
    return build_plan_from_rosters(*index_metadata_rosters(_meet.gather(mine, group)), rank)
