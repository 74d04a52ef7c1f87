"""Megatron-LM's sharding metadata as layouts, and its plans made by tensorbus's planner."""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import pickle
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorbus as tb

from .. import _meet
from ._types import ParameterMetadata, ReshardPlan, TransferOp

_DTYPES = {1: "u8", 2: "bf16", 4: "f32", 8: "f64"}  # by size, which is all that a plan looks at
_EMBEDDINGS = ("embedding.word_embeddings.weight", "word_embeddings.weight")

Roster = Mapping[str, Sequence[ParameterMetadata]]  # of one side, by name
Named = Mapping[str, ParameterMetadata]  # of one rank and side, by the name that both sides know


class PlanError(tb.Invalid, RuntimeError):
    """Metadata from which no plan can be made. Megatron's planner raises a RuntimeError."""


# ---- From metadata to layouts ---------------------------------------------------------------------------------------


class Facts(NamedTuple):
    """What decides how a rank's part of a parameter fits in with those of others."""

    shape: tuple[int, ...]
    dtype: Any
    element_size: int
    dim: int | None  # along which it is cut; None: not marked as cut
    stride: int
    sizes: tuple[int, ...] | None
    group: int  # the number of the tensor-parallel group, among the rank's


class Body:
    """Parameters of a rank: those with the same facts together. Ranks that are alike share it."""

    def __init__(self, entries: Sequence[tuple[Facts, Sequence[str]]]) -> None:
        self.entries = entries
        self.ranks: list[tuple[int, Sequence[tuple[int, ...]]]] = []  # who has it, with their groups
        self._places: dict[str, int] | None = None

    @property
    def places(self) -> dict[str, int]:
        """The parameters by name, in order."""
        if self._places is None:
            keys = itertools.chain.from_iterable(keys for _, keys in self.entries)
            self._places = {key: place for place, key in enumerate(keys)}
        return self._places


Entries = tuple[tuple[Body, Facts], ...]  # where a parameter is, on all ranks of a side


class Side:
    """What all ranks have of one of the models.

    A plan for one of hundreds of ranks takes far less time than to look at each parameter of each rank, because ranks
    that are alike have one body, and parameters that are alike have the same entries, from which they get one plan.
    """

    def __init__(self) -> None:
        self.where: dict[str, Entries] = {}  # by key
        self._holders: dict[Entries, Holders] = {}
        self._bodies: dict[int, Body] = {}

    def add(self, bodies: Iterable[Body]) -> None:
        """Adds all bodies of the side; no more can be added then."""
        for body in bodies:
            self._bodies.update((rank, body) for rank, _ in body.ranks)
            for facts, keys in body.entries:
                entry = ((body, facts),)
                if self.where.keys().isdisjoint(keys):
                    self.where.update(dict.fromkeys(keys, entry))
                else:
                    self.where.update([(key, (*self.where.get(key, ()), *entry)) for key in keys])

    def places(self, rank: int) -> dict[str, int]:
        """The numbers of parameters among those of the rank, by key; {} if it has none."""
        return self._bodies[rank].places if rank in self._bodies else {}

    def holders(self, key: str) -> Holders:
        """Those of a parameter; the same object for all that are alike."""
        entries = self.where[key]
        found = self._holders.get(entries)
        if found is None:
            found = self._holders[entries] = Holders(key, entries)
        return found


class Holders:
    """The ranks of one side that have a part of a parameter, and of all that are like it."""

    def __init__(self, name: str, entries: Entries) -> None:
        self.name = name  # of the first one
        self.shapes = {rank: facts.shape for body, facts in entries for rank, _ in body.ranks}
        groups = {groups[facts.group] or (rank,) for body, facts in entries for rank, groups in body.ranks}
        self.groups = sorted(groups)
        self.width = len(self.groups[0])
        self.first = first = entries[0][1]  # what it is marked as is the same on all ranks
        self.dim, self.sizes = first.dim, first.sizes
        self.stride = max(1, first.stride) if first.dim is not None else 1

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
    src: Holders, dst: Holders, src_seats: Mapping[int, int] | None, dst_seats: Mapping[int, int] | None
) -> tuple[tuple[int, ...], str, str]:
    """The global shape of a parameter, and both sides' layouts."""
    name = dst.name
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


def by_key(metas: Iterable[ParameterMetadata]) -> dict[str, ParameterMetadata]:
    """A rank's parameters by the names that both sides know."""
    return {key_of(meta): meta for meta in metas}


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


# ---- What ranks tell ------------------------------------------------------------------------------------------------

Told = tuple[list[tuple[int, ...]], bytes]  # a rank's groups, and its body; without groups, it has no model


def tell(metas: Sequence[ParameterMetadata]) -> Told:
    """What a rank tells all others of a model. The body is the same for all ranks that are alike."""
    groups: dict[tuple[int, ...], int] = {}
    numbers: dict[int, int] = {}  # by id
    entries: dict[Facts, list[str]] = {}
    for meta in metas:
        ranks = meta.tensor_parallel_group_ranks
        number = numbers.get(id(ranks))
        if number is None:
            number = numbers[id(ranks)] = groups.setdefault(tuple(ranks or ()), len(groups))
        entries.setdefault(_facts(meta, number), []).append(key_of(meta))
    return list(groups), pickle.dumps([(tuple(facts), keys) for facts, keys in entries.items()])


def _facts(meta: ParameterMetadata, group: int) -> Facts:
    sizes = None if meta.partition_sizes is None else tuple(meta.partition_sizes)
    dim = meta.partition_dim if meta.is_tp else None
    return Facts(tuple(meta.shape), meta.dtype, meta.element_size, dim, meta.partition_stride, sizes, group)


def side_of(told: Iterable[Told]) -> Side:
    """A side from what ranks 0, 1, ... have told."""
    side = Side()
    bodies: dict[bytes, Body] = {}
    for rank, (groups, text) in enumerate(told):
        if not groups:
            continue
        body = bodies.get(text)
        if body is None:
            body = bodies[text] = Body([(Facts(*facts), keys) for facts, keys in pickle.loads(text)])
        body.ranks.append((rank, groups))
    side.add(bodies.values())
    return side


# ---- Plans ----------------------------------------------------------------------------------------------------------

Piece = tuple[int, tuple[slice, ...], tuple[slice, ...]]  # from or to whom, and the slices there and here


class Parameter:
    """The plan for all parameters that are alike on both sides."""

    def __init__(self, src: Holders, dst: Holders) -> None:
        shape, src_layout, dst_layout = cut(src, dst, None, None)
        self._plan = tb.plan(src_layout, dst_layout, shape, _DTYPES.get(src.first.element_size, "u8"))
        # As many rotations as it takes until replicas of the source have sent alike.
        copies = len(src.groups), len(dst.groups)
        self.nrotations = min(64, copies[0] // math.gcd(*copies))
        self._received: dict[tuple[int, int], list[Piece]] = {}
        self._sent: dict[tuple[int, int], list[tuple[int, list[tuple[int, Piece]]]]] = {}

    def rotation(self, key: str) -> int:
        """Which of the rotations a parameter has, the same on all ranks."""
        return zlib.crc32(key.encode()) % self.nrotations if self.nrotations > 1 else 0

    def received(self, rank: int, rotation: int) -> list[Piece]:
        """What a rank receives."""
        found = self._received.get((rank, rotation))
        if found is None:
            routes = [route for route in self._plan.routes(rank, rotation) if rank in route.targets]
            routes.sort(key=lambda route: route.target_start)
            found = self._received[rank, rotation] = [
                (route.source, _slices(route.source_start, route.lengths), _slices(route.target_start, route.lengths))
                for route in routes
                if route.source is not None
            ]
        return found

    def sent(self, rank: int, rotation: int) -> list[tuple[int, list[tuple[int, Piece]]]]:
        """What a rank sends: to each target the pieces, with their numbers among those that the target receives."""
        found = self._sent.get((rank, rotation))
        if found is None:
            routes = self._plan.routes(rank, rotation)
            targets = sorted({target for route in routes if route.source == rank for target in route.targets})
            found = self._sent[rank, rotation] = [
                (target, [(i, piece) for i, piece in enumerate(self.received(target, rotation)) if piece[0] == rank])
                for target in targets
            ]
        return found


def _slices(start: tuple[int, ...], lengths: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(start, lengths, strict=True))


class Planner:
    """Plans parameter by parameter; those that are alike share a plan."""

    def __init__(self, src: Side, dst: Side) -> None:
        self._src, self._dst = src, dst
        self._targets = dst.where
        self.other_sources = {key: find_source(key, src.where) for key in dst.where.keys() - src.where.keys()}
        self._sources = src.where | {key: src.where[it] for key, it in self.other_sources.items()}
        self._plans: dict[tuple[Holders, Holders], Parameter] = {}
        self._known: dict[tuple[int, int], Parameter] = {}  # by entries, which are mostly the same objects

    def plan(self, key: str) -> Parameter:
        """That of a parameter of the target."""
        both = id(self._sources.get(key)), id(self._targets[key])
        found = self._known.get(both)
        if found is None:
            holders = self._src.holders(self.other_sources.get(key, key)), self._dst.holders(key)
            found = self._plans.get(holders)
            if found is None:
                found = self._plans[holders] = Parameter(*holders)
            self._known[both] = found
        return found


def _build(src: Side, dst: Side, me: int, sources: Named, targets: Named) -> ReshardPlan:
    """What this rank sends and receives; all ranks come to plans that fit together, each by itself.

    An operation's id is made of the receiver's rank, the parameter's place among those of the receiver, and the number
    of the piece, so that it stays the same when ranks are added.
    """
    planner = Planner(src, dst)
    sends: list[TransferOp] = []
    recvs: list[TransferOp] = []
    for key, place in dst.places(me).items() if targets else ():
        name, plan = targets[key].name, planner.plan(key)
        first = _first_task(me, place)
        recvs += [
            TransferOp(name, source, False, here, there, first + i)
            for i, (source, there, here) in enumerate(plan.received(me, plan.rotation(key)))
        ]
    for key, meta in [*sources.items(), *((key, sources.get(it)) for key, it in planner.other_sources.items())]:
        if meta is None or key not in dst.where:
            continue
        name, plan = meta.name, planner.plan(key)
        for target, pieces in plan.sent(me, plan.rotation(key)):
            first = _first_task(target, dst.places(target)[key])
            sends += [TransferOp(name, target, True, there, here, first + i) for i, (_, there, here) in pieces]
    sends.sort(key=_task_of)
    return ReshardPlan(sends, recvs)


def _first_task(target: int, place: int) -> int:
    return (target << 40) | (place << 16)


_task_of = operator.attrgetter("task_id")


# ---- Megatron's functions -------------------------------------------------------------------------------------------


def index_metadata_rosters(
    gathered_pairs: Sequence[tuple[Sequence[ParameterMetadata], Sequence[ParameterMetadata]]],
) -> tuple[dict[int, dict[str, ParameterMetadata]], dict[str, list[ParameterMetadata]]]:
    """What ranks 0, 1, ... have of (source, target): the target's by rank and name, the source's by name."""
    targets: dict[int, dict[str, ParameterMetadata]] = {}
    sources: dict[str, list[ParameterMetadata]] = {}
    for rank, (src, dst) in enumerate(gathered_pairs):
        targets[rank] = by_key(dst)
        for meta in src:
            sources.setdefault(key_of(meta), []).append(meta)
    return targets, sources


def build_plan_from_rosters(
    dst_param_metadata_by_rank: Mapping[int, Mapping[str, ParameterMetadata]],
    src_param_metadata: Roster,
    my_global_rank: int,
) -> ReshardPlan:
    """What this rank sends and receives, from the metadata of all ranks.

    ``build_local_reshard_plan`` needs less time: there ranks tell what they have in a form from which planning is
    faster. Most of what this takes is to look at each parameter of each rank.
    """
    me = my_global_rank
    dst = _side_of_columns(
        (rank, list(metas), list(metas.values())) for rank, metas in dst_param_metadata_by_rank.items()
    )
    columns = list(_columns_of(src_param_metadata))
    sources = {key: meta for rank, keys, metas in columns if rank == me for key, meta in zip(keys, metas, strict=True)}
    return _build(_side_of_columns(columns), dst, me, sources, dst_param_metadata_by_rank.get(me, {}))


Column = tuple[int, Sequence[str], Sequence[ParameterMetadata]]  # a rank, and parameters that it has


def _columns_of(roster: Roster) -> Iterator[Column]:
    """For names that the same ranks have, a column for each rank."""
    blocks: dict[tuple[int, int], list[str]] = {}  # of names that the same ranks have, most probably
    for name, metas in roster.items():
        blocks.setdefault((len(metas), metas[0].owner_rank), []).append(name)
    for names in blocks.values():
        for metas in zip(*(roster[name] for name in names), strict=True):
            owners = [meta.owner_rank for meta in metas]
            if owners.count(owners[0]) == len(owners):
                yield owners[0], names, metas
            else:
                yield from zip(owners, ([name] for name in names), ([meta] for meta in metas), strict=True)


def _side_of_columns(columns: Iterable[Column]) -> Side:
    """A side from metadata. A rank may have several columns; what parameters are marked as is the same on all ranks."""
    side = Side()
    known: dict[str, list[tuple[Any, Body]]] = {}  # by the first key
    for rank, keys, metas in columns:
        if not keys:
            continue
        shapes = [meta.shape for meta in metas]
        lists = [meta.tensor_parallel_group_ranks for meta in metas]
        groups: dict[tuple[int, ...], int] = {tuple(lists[0] or ()): 0}
        numbers = None  # all in one group
        if lists.count(lists[0]) < len(lists):
            numbers = [groups.setdefault(tuple(ranks or ()), len(groups)) for ranks in lists]
        alike = known.setdefault(keys[0], [])
        what = keys, shapes, numbers
        body = next((body for others, body in alike if others == what), None)
        if body is None:
            entries: dict[Facts, list[str]] = {}
            for key, meta, number in zip(keys, metas, numbers or itertools.repeat(0), strict=False):
                entries.setdefault(_facts(meta, number), []).append(key)
            body = Body(list(entries.items()))
            alike.append((what, body))
        body.ranks.append((rank, list(groups)))
    side.add(body for alike in known.values() for _, body in alike)
    return side


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
    return plan_from_told(_meet.gather(tuple(map(tell, mine)), group), rank, *mine)


def plan_from_told(
    told: Sequence[tuple[Told, Told]],
    rank: int,
    src_metas: Sequence[ParameterMetadata],
    dst_metas: Sequence[ParameterMetadata],
) -> ReshardPlan:
    """What this rank does, from what all ranks have told of their source and of their target, and from its own."""
    src, dst = (side_of(each) for each in zip(*told, strict=True))
    return _build(src, dst, rank, by_key(src_metas), by_key(dst_metas))
