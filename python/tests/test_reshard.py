"""Checkpoints resharded by rules with names and views, compared with a model in NumPy.

Sources are written, and targets read, by the safetensors library. TB_SPECS is how many specs are tried (25), TB_SEED
the first one's seed.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import numpy as safetensors_numpy

from tensorbus import _c

TOOL = _c.find("tensorbus")
Array = np.ndarray[Any, Any]


def reshard(spec: dict[str, Any], source: Path, target: Path, *more: str) -> None:
    path = target.with_suffix(".json")
    path.write_text(json.dumps(spec))
    command = [TOOL, "reshard", "--spec", str(path), "--in", str(source), "--out", str(target), *more]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stderr}\n{path.read_text()}"


# ---- What ranks hold, by the rules of docs/design.md ------------------------------------------------------------


def cut(indices: list[int], pieces: list[int], ways: int, coordinate: int) -> list[int]:
    """BlockShard: of each piece the coordinate's share."""
    kept, begin = [], 0
    for size in pieces:
        piece, begin = indices[begin : begin + size], begin + size
        each = -(-len(piece) // ways)
        kept += piece[coordinate * each : (coordinate + 1) * each]
    return kept


@dataclass
class Form:
    """How one side keeps canonical tensors in one: the tensor, each one's view, and how it may be cut."""

    build: Callable[[list[Array]], Array]
    views: list[str]
    cuts: list[tuple[int, list[int] | None]]  # a dim, and pieces; None: the whole dim
    shape: tuple[int, ...] | None = None  # where it can't be told from the views


@dataclass
class Kind:
    """Canonical tensors of three dims, and the forms they may have."""

    shapes: list[tuple[int, int, int]]
    forms: list[list[Form]] = field(default_factory=list)  # ways to cover all tensors, each with several forms
    covers: list[list[list[int]]] = field(default_factory=list)  # which tensors each of these forms has


def flat(x: Array) -> Array:
    return x.reshape(x.shape[0] * x.shape[1], x.shape[2])


def single(r: random.Random, i: int, shape: tuple[int, int, int]) -> Form:
    g, n, _ = shape
    split = f"split(0,{g},{n})"
    choice = r.randrange(5)
    if choice == 0:
        return Form(lambda x: x[i], [""], [(0, None), (2, None)])
    if choice == 1:
        return Form(lambda x: flat(x[i]).T, [f"permute(1,0) {split}"], [(0, None)])
    if choice == 2:
        before, after = r.randrange(3), r.randrange(1, 4)
        pad = f"pad(0,{before},{after}) {split}"
        return Form(lambda x: np.pad(flat(x[i]), ((before, after), (0, 0))), [pad], [(1, None)])
    if choice == 3:
        return Form(lambda x: x[i].transpose(2, 0, 1), ["permute(1,2,0)"], [(0, None), (1, None)])
    return Form(lambda x: flat(x[i]), [split], [(0, [g * n]), (1, None)])


def kind(r: random.Random) -> Kind:
    g, h = r.choice([2, 4, 6]), r.choice([1, 3, 8])
    count = r.randrange(1, 4)
    rows = [r.randrange(1, 5) for _ in range(count)]
    stacked = r.random() < 0.3
    if stacked:
        rows = [rows[0]] * count
    shapes = [(g, n, h) for n in rows]
    out = Kind(shapes)

    def all_single() -> tuple[list[Form], list[list[int]]]:
        return [single(r, i, shapes[i]) for i in range(count)], [[i] for i in range(count)]

    def concat() -> tuple[list[Form], list[list[int]]]:
        views, begin = [], 0
        for n in rows:
            views.append(f"slice(0,{begin},{g * n}) split(0,{g},{n})")
            begin += g * n
        form = Form(lambda x: np.concatenate([flat(y) for y in x]), views, [(0, [g * n for n in rows]), (1, None)])
        return [form], [list(range(count))]

    def interleaved() -> tuple[list[Form], list[list[int]]]:
        total, views, begin = sum(rows), [], 0
        for n in rows:
            views.append(f"split(0,-1,{total}) slice(1,{begin},{n})")
            begin += n
        return [Form(lambda x: flat(np.concatenate(x, axis=1)), views, [(0, None), (1, None)])], [list(range(count))]

    def stack() -> tuple[list[Form], list[list[int]]]:
        views = [f"slice(0,{i},1) merge(0,1) split(0,{g},{rows[0]})" for i in range(count)]
        shape = (count, g * rows[0], h)
        return [Form(lambda x: np.stack([flat(y) for y in x]), views, [(0, None), (2, None)], shape)], [
            list(range(count))
        ]

    ways = [all_single, concat, interleaved] + ([stack] if stacked else [])
    for _ in range(2):
        forms, covers = r.choice(ways)()
        out.forms.append(forms)
        out.covers.append(covers)
    return out


@dataclass
class Side:
    stages: int
    ways: int
    layers: list[int]  # the first of each stage, and how many there are
    is_model: bool

    def mesh(self) -> dict[str, Any]:
        mesh: dict[str, Any] = {"mesh": [self.stages, self.ways], "names": ["pp", "tp"]}
        if self.stages > 1:
            mesh["layers"] = {"dim": "pp", "count": self.layers[-1], "first": self.layers[:-1]}
        return mesh


def random_side(r: random.Random, nlayers: int) -> Side:
    if r.random() < 0.3:
        return Side(1, 1, [0, nlayers], True)
    stages = r.choice([1, 1, 2])
    inner = sorted(r.randrange(0, nlayers + 1) for _ in range(stages - 1))
    return Side(stages, r.choice([1, 2, 3, 4]), [0, *inner, nlayers], False)


@dataclass
class Cut:
    dim: int | None
    pieces: list[int] | None

    def text(self) -> str:
        if self.dim is None:
            return "Replicate"
        if self.pieces is None:
            return f"Shard({self.dim})"
        return f"BlockShard({self.dim},{','.join(map(str, self.pieces))})"

    def part(self, x: Array, ways: int, coordinate: int) -> Array:
        if self.dim is None:
            return x
        n = x.shape[self.dim]
        kept = cut(list(range(n)), self.pieces or [n], ways, coordinate)
        return x.take(kept, axis=self.dim)


def write(side: Side, folder: Path, tensors: dict[str, tuple[Array, Cut]], layer_of: dict[str, int]) -> None:
    folder.mkdir()
    for rank, held in enumerate(expected(side, tensors, layer_of)):
        name = "model" if side.is_model else f"rank_{rank}"
        safetensors_numpy.save_file(
            {k: np.ascontiguousarray(v) for k, v in held.items()}, str(folder / f"{name}.safetensors")
        )


def expected(side: Side, tensors: dict[str, tuple[Array, Cut]], layer_of: dict[str, int]) -> list[dict[str, Array]]:
    ranks: list[dict[str, Array]] = [{} for _ in range(side.stages * side.ways)]
    for name, (array, how) in tensors.items():
        layer = layer_of[name]
        for stage in range(side.stages):
            if not side.layers[stage] <= layer < side.layers[stage + 1]:
                continue
            local = name.replace(f"layers.{layer}.", f"layers.{layer - side.layers[stage]}.", 1)
            for way in range(side.ways):
                ranks[stage * side.ways + way][local] = how.part(array, side.ways, way)
    return ranks


def usable(form: Form, shape: tuple[int, ...], ways: int, groups: int) -> list[Cut]:
    """Cuts after which each rank has boxes of the canonical tensors: groups are whole, or rows are not cut."""
    out = [Cut(None, None)]
    for dim, pieces in form.cuts:
        if pieces is None and shape[dim] % ways == 0 and (dim > 0 or groups % ways == 0 or form.shape):
            out.append(Cut(dim, None))
        if pieces is not None and groups % ways == 0:
            out.append(Cut(dim, pieces))
    return out


def one_spec(seed: int, folder: Path) -> None:
    r = random.Random(seed)
    values = np.random.default_rng(seed)
    nlayers = r.randrange(1, 4)
    kinds = [kind(r) for _ in range(r.randrange(1, 4))]
    sides = [random_side(r, nlayers), random_side(r, nlayers)]
    source_type, target_type = r.choice([("f4", None), ("f2", None), ("u1", None), ("i4", None), ("f4", "f16")])
    tensors: list[dict[str, tuple[Array, Cut]]] = [{}, {}]
    layer_of: dict[str, int] = {}
    rules: list[dict[str, Any]] = []
    for number, k in enumerate(kinds):
        cuts: list[list[Cut]] = [[], []]
        shapes: list[list[tuple[int, ...]]] = [[], []]
        for layer in range(nlayers):
            canonical = [values.integers(0, 200, size=shape).astype(source_type) for shape in k.shapes]
            for s in range(2):
                for f, form in enumerate(k.forms[s]):
                    array = form.build(canonical)
                    if layer == 0:
                        shapes[s].append(array.shape)
                        cuts[s].append(r.choice(usable(form, array.shape, sides[s].ways, k.shapes[0][0])))
                    name = f"{'ab'[s]}.layers.{layer}.k{number}.{f}"
                    layer_of[name] = layer
                    if s == 1 and target_type:
                        array = array.astype(np.float16)
                    tensors[s][name] = (array, cuts[s][f])
        where = {i: f for f, held in enumerate(k.covers[1]) for i in held}
        for f, held in enumerate(k.covers[0]):
            for i in held:
                g = where[i]
                target = k.forms[1][g]
                dst: dict[str, Any] = {
                    "name": f"b.layers.\\1.k{number}.{g}",
                    "tp": cuts[1][g].text(),
                }
                if view := target.views[k.covers[1][g].index(i)]:
                    dst["view"] = view
                if target.shape or r.random() < 0.3:
                    dst["shape"] = shapes[1][g]
                if target_type:
                    dst["dtype"] = target_type
                src: dict[str, Any] = {"tp": cuts[0][f].text()}
                if view := k.forms[0][f].views[held.index(i)]:
                    src["view"] = view
                match = f"a.layers.*.k{number}.{f}"
                rules.append({"match": match, "src": src, "dst": dst})
    spec: dict[str, Any] = {"src_mesh": sides[0].mesh(), "dst_mesh": sides[1].mesh(), "rules": rules}
    if sides[1].is_model:
        spec["files"] = "hf"
    write(sides[0], folder / "in", tensors[0], layer_of)
    more = r.choice([["--verify"], [], ["--trust-replicas", "--threads", "1"]])
    reshard(spec, folder / "in", folder / "out", *more)
    wanted = expected(sides[1], tensors[1], layer_of)
    for rank, held in enumerate(wanted):
        name = "model" if sides[1].is_model else f"rank_{rank}"
        got = safetensors_numpy.load_file(str(folder / "out" / f"{name}.safetensors"))
        assert sorted(got) == sorted(held), f"seed {seed}, rank {rank}"
        for key, array in held.items():
            assert got[key].dtype == array.dtype, f"seed {seed}, rank {rank}, {key}"
            assert np.array_equal(got[key], array), f"seed {seed}, rank {rank}, {key}"


def test_random_specs(tmp_path: Path) -> None:
    count, first = int(os.environ.get("TB_SPECS", "25")), int(os.environ.get("TB_SEED", "0"))
    for seed in range(first, first + count):
        folder = tmp_path / str(seed)
        folder.mkdir()
        one_spec(seed, folder)
        for file in folder.glob("*/*"):
            file.unlink()
