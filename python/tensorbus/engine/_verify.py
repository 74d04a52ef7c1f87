"""Whether an engine has the weights of a checkpoint, or of the trainer: by hashes of the boxes that its ranks have.

Nothing is gathered: each rank of the engine hashes its boxes where they lie, each rank of the trainer what it has of
these boxes, and the trainer's sums are compared with the engine's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .._errors import Invalid
from .._hash import Part, hash_box
from .._tensors import View, read
from .._torch import Held
from ._record import Piece
from ._source import Source, as_source, from_checkpoint
from ._targets import Target, Targets
from ._trace import locate

TILE = 1 << 20  # elements that are hashed at once, if a box can be cut along its first dim

Hashes = dict[str, Any]  # of one rank; plain values, for calls of a worker
_Key = tuple[str, tuple[int, ...], tuple[int, ...], str]  # checkpoint tensor, start, size, torch's dtype


@dataclass(frozen=True, slots=True)
class Difference:
    """A box in which a rank of the engine has something else."""

    param: str
    rank: int  # of the engine
    name: str  # of the checkpoint tensor
    start: tuple[int, ...]  # in that
    size: tuple[int, ...]
    why: str

    def __str__(self) -> str:
        box = ", ".join(f"{a}:{a + n}" for a, n in zip(self.start, self.size, strict=True))
        return f"'{self.param}' of rank {self.rank} differs from '{self.name}' in [{box}]: {self.why}"


@dataclass(frozen=True, slots=True)
class Verified:
    """What was compared, and found."""

    differences: list[Difference]
    nelements: int  # that were compared, on all ranks of the engine
    unchecked: dict[str, str]  # modules whose weights are no copies, and why: the engine's own loader has computed them

    def __str__(self) -> str:
        lines = [f"{len(self.differences)} differences in {self.nelements} elements"]
        lines += [str(difference) for difference in self.differences]
        return "\n".join(lines + [f"'{name}' was not compared: {why}" for name, why in self.unchecked.items()])


def hash_boxes(params: Mapping[str, Any], targets: Targets, rank: int) -> Hashes:
    """The hashes of all that a rank of the engine has copied from the checkpoint."""
    boxes = []
    for target, piece in _pieces(targets, rank):
        part = locate(piece, params[piece.param].detach())
        dtype = str(part.dtype).removeprefix("torch.")
        for at, start, size in _tiles(piece):
            found = hash_box(part[at : at + size[0]] if size else part, target.shape, start)
            boxes.append([target.source, piece.param, dtype, list(start), list(size), found])
    return {"rank": rank, "boxes": boxes, "unchecked": dict(targets.reasons)}


def verify(
    hashes: Sequence[Hashes],
    source: Source | Any,
    *,
    rank: int = 0,
    size: int = 1,
    gather: Callable[[Any], Sequence[Any]] | None = None,
) -> Verified:
    """Compares what all ranks of the engine have (``hash_boxes``) with a source, on all ranks of the trainer.

    A source is a folder, a module, or a ``Source``. The engine's dtype counts: what the trainer has is cast to it.
    Every replica of the trainer's is compared. With several ranks ``gather`` returns what all of them give it;
    ``torch.distributed`` does by default. The result is the same on all ranks.
    """
    source = as_source(source)
    source.refresh()
    wanted: dict[str, set[_Key]] = {}
    for one in hashes:
        for name, _, dtype, start, length, _ in one["boxes"]:
            wanted.setdefault(name, set()).add((name, tuple(start), tuple(length), dtype))
    mine: dict[tuple[_Key, int], int] = {}
    for name, keys in wanted.items():
        held = source.tensors.get(name) or source.tensors.get(source.ties.get(name, name))
        if held is not None:
            mine |= _sums(*held, keys, rank)
    found: dict[_Key, dict[int, int]] = {}
    for sums in _gather(mine, size, gather):
        for (key, replica), value in sums.items():
            by_replica = found.setdefault(key, {})
            by_replica[replica] = (by_replica.get(replica, 0) + value) % 2**64
    differences: list[Difference] = []
    nelements, unchecked = 0, dict[str, str]()
    for one in hashes:
        unchecked |= one["unchecked"]
        for name, param, dtype, start, length, value in one["boxes"]:
            replicas = found.get((name, tuple(start), tuple(length), dtype), {})
            nelements += math.prod(length)
            why = _why(value, replicas)
            if why is not None:
                differences.append(Difference(param, one["rank"], name, tuple(start), tuple(length), why))
    return Verified(differences, nelements, unchecked)


def compare(params: Mapping[str, Any], targets: Targets, rank: int, folder: str | Path) -> Verified:
    """Compares what one rank of the engine has with a checkpoint that it can read; tells the smallest boxes."""
    source = from_checkpoint(folder)
    hashes = hash_boxes(params, targets, rank)
    verified = verify([hashes], source)
    differences = []
    for d in verified.differences:
        held = source.tensors.get(d.name)
        if held is None:
            differences.append(d)
            continue
        piece = next(p for t, p in _pieces(targets, rank) if (t.source, p.param) == (d.name, d.param) and _has(p, d))
        box = tuple(slice(a, a + n) for a, n in zip(d.start, d.size, strict=True))
        inside = tuple(slice(s.start - a, s.stop - a) for s, a in zip(box, piece.start, strict=True))
        has = locate(piece, params[piece.param].detach())[inside].cpu().contiguous()
        wants = held[0][box].to(has.dtype).contiguous()
        at = (_bits(has) != _bits(wants)).nonzero()
        first, last = at.min(0).values.tolist(), at.max(0).values.tolist()
        start = tuple(a + f for a, f in zip(d.start, first, strict=True))
        size = tuple(b - a + 1 for a, b in zip(first, last, strict=True))
        differences.append(Difference(d.param, rank, d.name, start, size, f"{len(at)} of {has.numel()} elements"))
    return Verified(differences, verified.nelements, verified.unchecked)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: Any) -> Any:
    return tensor.view(_INTEGERS[tensor.element_size()])


def _pieces(targets: Targets, rank: int) -> Iterator[tuple[Target, Piece]]:
    for target in targets.tensors:
        if target.pieces is not None and rank in target.pieces:
            yield target, target.pieces[rank]


def _has(piece: Piece, box: Difference) -> bool:
    places = zip(piece.start, piece.size, box.start, box.size, strict=True)
    return all(a <= b and b + m <= a + n for a, n, b, m in places)


def _tiles(piece: Piece) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """The piece, cut along its first dim into boxes of about ``TILE`` elements: where in the piece, start, size."""
    if not piece.size:
        yield 0, (), ()
        return
    (first, *starts), (n, *sizes) = piece.start, piece.size
    rows = max(1, TILE // max(1, math.prod(sizes)))
    for at in range(0, n, rows):
        yield at, (first + at, *starts), (min(rows, n - at), *sizes)


def _sums(tensor: Any, view: str | None, keys: set[_Key], rank: int) -> dict[tuple[_Key, int], int]:
    """What this rank of the trainer has of each box, and in which replica."""
    made = {}
    for dtype in sorted({key[3] for key in keys}):
        cast = _cast(tensor, getattr(torch, dtype))
        part = Part(cast, view=view)
        replica = rank if cast.layout is None else part.replica
        for key in keys:
            places = list(zip(key[1], key[2], part.shape, strict=False))
            is_inside = len(key[1]) == len(part.shape) and all(a + n <= whole for a, n, whole in places)
            if key[3] == dtype and replica is not None and is_inside:
                made[key, replica] = part.hash_box(key[1], key[2])
    return made


def _cast(tensor: Any, dtype: Any) -> View:
    """What this rank has of a tensor, in the engine's dtype, in the CPU's memory."""
    view = read(tensor)
    if not isinstance(view.keepalive, Held):
        raise Invalid(f"the source's tensors must be PyTorch's, not {type(tensor).__name__}")
    local = read(view.keepalive.local.detach().to(dtype).cpu())
    return replace(
        view, address=local.address, dtype=local.dtype, strides=local.strides, device="host", keepalive=local.keepalive
    )


def _gather(mine: Any, size: int, gather: Callable[[Any], Sequence[Any]] | None) -> Sequence[Any]:
    if gather is not None:
        return gather(mine)
    if size == 1:
        return [mine]
    found: list[Any] = [None] * size
    torch.distributed.all_gather_object(found, mine)
    return found


def _why(value: int, replicas: Mapping[int, int]) -> str | None:
    """What is wrong with a box of the engine whose hash this is; None: nothing."""
    if not replicas:
        return "the source has no such tensor, or in another shape"
    wrong = sorted(replica for replica, other in replicas.items() if other != value)
    if len(wrong) == len(replicas):
        return f"its hash is {value:016x}, and {replicas[wrong[0]]:016x} in the source"
    return f"replica {wrong[0]} of the source has other bits than the others" if wrong else None
