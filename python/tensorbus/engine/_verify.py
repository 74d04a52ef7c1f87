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
    name: str  # of the checkpoint tensor; "" for what the engine's own loader makes of several
    start: tuple[int, ...]  # in that, or in the parameter
    size: tuple[int, ...]
    why: str

    def __str__(self) -> str:
        box = ", ".join(f"{a}:{a + n}" for a, n in zip(self.start, self.size, strict=True))
        source = f"'{self.name}'" if self.name else "what the engine's own loader makes of its tensors"
        return f"'{self.param}' of rank {self.rank} differs from {source} in [{box}]: {self.why}"


@dataclass(frozen=True, slots=True)
class Verified:
    """What was compared, and found."""

    differences: list[Difference]
    nelements: int  # that were compared, on all ranks of the engine
    unchecked: dict[str, str]  # modules that were not compared, and why

    @property
    def sentences(self) -> list[str]:
        """One for each difference, and for each module that was not compared."""
        skipped = [f"'{name}' was not compared: {why}" for name, why in self.unchecked.items()]
        return [str(difference) for difference in self.differences] + skipped

    def __str__(self) -> str:
        return "\n".join([f"{len(self.differences)} differences in {self.nelements} elements", *self.sentences])


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the engine's own loader has loaded: whole checkpoint tensors, and what it has made of them."""

    tensors: Mapping[str, Any]  # by checkpoint tensor
    modules: Mapping[str, str]  # the module that each is for
    changed: Sequence[tuple[str, Sequence[int], Sequence[int], str]]  # parameter, start, size, why
    unchecked: Mapping[str, str]  # modules whose memory can't be read, and why


def load_again(
    model: Any, names: Sequence[str], whole: Mapping[str, Any], modules: Mapping[str, str], load: Any
) -> Loaded:
    """Runs ``load``, the engine's own loader of ``whole``, once more: whether modules have then what they had before.

    They have it again afterwards. Nobody may use the model meanwhile.
    """
    kept, unchecked = dict[str, tuple[str, Any]](), dict[str, str]()
    for name in names:
        tensors = _tensors_of(model, name)
        kept |= {key: (name, t.detach().to("cpu", copy=True)) for key, t in tensors.items()}
        if not tensors:
            unchecked[name] = "its parameters are empty: the engine keeps its weights elsewhere"
    load()
    changed = []
    for key, (name, had) in kept.items():
        now = _tensors_of(model, name).get(key)
        if now is None or (now.shape, now.dtype) != (had.shape, had.dtype):
            unchecked[name] = f"loading it again replaces '{key}'"
            continue
        start, size, count = _box_of(_bits(had) != _bits(now.detach().cpu()))
        if count:
            changed.append((key, start, size, f"{count} of {had.numel()} elements"))
            with torch.no_grad():
                now.copy_(had)
    return Loaded(whole, modules, changed, unchecked)


def _tensors_of(model: Any, name: str) -> dict[str, Any]:
    module = model.get_submodule(name)
    own = {**module._parameters, **module._buffers}
    return {f"{name}.{key}" if name else key: t for key, t in own.items() if t is not None and t.numel()}


def _box_of(at: Any) -> tuple[list[int], list[int], int]:
    """The smallest box that has all that is true: start, size; and how many elements that are."""
    found = at.nonzero()
    if not len(found):
        return [], [], 0
    first, last = found.min(0).values.tolist(), found.max(0).values.tolist()
    return first, [b - a + 1 for a, b in zip(first, last, strict=True)], len(found)


def hash_boxes(params: Mapping[str, Any], targets: Targets, rank: int, loaded: Loaded | None = None) -> Hashes:
    """The hashes of all that a rank of the engine has copied from the checkpoint, or has given to its own loader."""
    boxes = []
    parts = [(t, p.param, p.start, locate(p, params[p.param].detach())) for t, p in _pieces(targets, rank)]
    if loaded is not None:
        for t in targets.tensors:
            if t.pieces is None and t.source in loaded.modules:
                parts.append((t, loaded.modules[t.source], (0,) * len(t.shape), loaded.tensors[t.source]))
    for target, param, first, part in parts:
        dtype = str(part.dtype).removeprefix("torch.")
        for at, start, size in _tiles(first, tuple(part.shape)):
            found = hash_box(part[at : at + size[0]] if size else part, target.shape, start)
            boxes.append([target.source, param, dtype, list(start), list(size), found])
    if loaded is None:
        return {"rank": rank, "boxes": boxes, "changed": [], "unchecked": dict(targets.reasons)}
    changed = [[param, list(start), list(size), why] for param, start, size, why in loaded.changed]
    return {"rank": rank, "boxes": boxes, "changed": changed, "unchecked": dict(loaded.unchecked)}


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
        for param, start, length, why in one.get("changed", ()):
            differences.append(Difference(param, one["rank"], "", tuple(start), tuple(length), why))
        for name, param, dtype, start, length, value in one["boxes"]:
            replicas = found.get((name, tuple(start), tuple(length), dtype), {})
            nelements += math.prod(length)
            why = _why(value, replicas)
            if why is not None:
                differences.append(Difference(param, one["rank"], name, tuple(start), tuple(length), why))
    return Verified(differences, nelements, unchecked)


def compare(
    params: Mapping[str, Any], targets: Targets, rank: int, folder: str | Path, loaded: Loaded | None = None
) -> Verified:
    """Compares what one rank of the engine has with a checkpoint that it can read; tells the smallest boxes."""
    source = from_checkpoint(folder)
    hashes = hash_boxes(params, targets, rank, loaded)
    verified = verify([hashes], source)
    differences = []
    for d in verified.differences:
        held = source.tensors.get(d.name)
        if held is None:
            differences.append(d)
            continue
        its = (p for t, p in _pieces(targets, rank) if (t.source, p.param) == (d.name, d.param) and _has(p, d))
        box = tuple(slice(a, a + n) for a, n in zip(d.start, d.size, strict=True))
        if (piece := next(its, None)) is not None:
            inside = tuple(slice(s.start - a, s.stop - a) for s, a in zip(box, piece.start, strict=True))
            has = locate(piece, params[piece.param].detach())[inside]
        else:
            assert loaded is not None
            has = loaded.tensors[d.name][box]
        has = has.cpu().contiguous()
        first, size, count = _box_of(_bits(has) != _bits(held[0][box].to(has.dtype).contiguous()))
        start = tuple(a + f for a, f in zip(d.start, first, strict=True))
        differences.append(Difference(d.param, rank, d.name, start, tuple(size), f"{count} of {has.numel()} elements"))
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


def _tiles(start: Sequence[int], size: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """A box, cut along its first dim into boxes of about ``TILE`` elements: where in the box, start, size."""
    if not size:
        yield 0, (), ()
        return
    (first, *starts), (n, *sizes) = start, size
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
