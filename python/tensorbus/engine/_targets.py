"""The tensors that an engine receives: what the traces of all its ranks say, as names and layouts of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ._record import Piece
from ._trace import Trace


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor of the batch. Ranks without a piece hold nothing of it."""

    name: str
    source: str  # the checkpoint tensor; under another name it is tied to this
    shape: tuple[int, ...]
    layout: str
    pieces: dict[int, Piece] | None  # by rank; None: every rank takes all of it, for the engine's own loader


@dataclass(frozen=True, slots=True)
class Targets:
    """What an engine receives."""

    tensors: list[Target]
    ties: dict[str, str]
    reasons: dict[str, str]  # of modules that are loaded by the engine's own loader on some rank
    unused: list[str]  # checkpoint tensors that no rank's loader takes


def make_targets(traces: Sequence[Trace]) -> Targets:
    """The same on all ranks: rank i has ``traces[i]``. A module that goes another way on one rank does so on all."""
    reasons: dict[str, str] = {}
    for one in traces:
        for module in one.modules.values():
            if module.reason is not None:
                reasons.setdefault(module.name, module.reason)
    loaded = set().union(*(one.failed for one in traces))
    pieces: dict[str, list[list[Piece]]] = {}
    for rank, one in enumerate(traces):
        for module in one.modules.values():
            if module.name in reasons:
                loaded |= module.sources
                continue
            for piece in module.pieces:
                pieces.setdefault(piece.source, [[] for _ in traces])[rank].append(piece)
    tensors: list[Target] = []
    ties: dict[str, str] = {}
    unused = []
    for source, shape in traces[0].shapes.items():
        found: list[tuple[str, dict[int, Piece] | None]] = []
        if source in loaded:
            found.append((f"mesh={len(traces)} place=R", None))
        found += _layouts(shape, pieces.get(source, []))
        if not found:
            unused.append(source)
        for i, (layout, its) in enumerate(found):
            name = source if i == 0 else f"{source}@{i}"
            if i > 0:
                ties[name] = source
            tensors.append(Target(name, source, shape, layout, its))
    return Targets(tensors, ties, reasons, unused)


def _layouts(shape: tuple[int, ...], by_rank: Sequence[Sequence[Piece]]) -> Iterable[tuple[str, dict[int, Piece]]]:
    """The pieces of one checkpoint tensor: the first one of every rank together, the second ones, and so on."""
    for i in range(max((len(its) for its in by_rank), default=0)):
        pieces = {rank: its[i] for rank, its in enumerate(by_rank) if i < len(its)}
        cut = [d for d, n in enumerate(shape) if any((p.start[d], p.size[d]) != (0, n) for p in pieces.values())]
        if len(cut) < 2:
            yield _layout(list(pieces), pieces, cut), pieces
        else:  # each rank's is a tensor of its own: it takes a mesh dim for each dim that is cut
            for rank, piece in pieces.items():
                yield _layout([rank], {rank: piece}, cut), {rank: piece}


def _layout(ranks: list[int], pieces: dict[int, Piece], cut: list[int]) -> str:
    seats = ",".join(map(str, ranks))
    if not cut:
        return f"mesh={len(ranks)} place=R ranks={seats}"
    places = []
    for d in cut:
        lists = ";".join(f"{p.start[d]}-{p.start[d] + p.size[d]}" for p in pieces.values())
        places.append(f"Explicit({d},{lists})")
    mesh = ",".join([str(len(ranks))] + ["1"] * (len(cut) - 1))
    return f"mesh={mesh} place={','.join(places)} ranks={seats}"
