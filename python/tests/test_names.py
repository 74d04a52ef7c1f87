"""Names of models, and moves in which a process may be on both sides."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import Seat, run

import tensorbus as tb

ROWS, COLUMNS = 12, 8


def test_layers_and_experts() -> None:
    """Every rank's names, put together, are those of the whole model, each once."""
    seen = []
    for stage, rank in itertools.product(range(2), range(3)):
        names = tb.Names(
            layer_pattern="layers.#.",
            stage=stage,
            nstages=2,
            nlayers=4,
            expert_pattern="experts.#.",
            expert_rank=rank,
            nexpert_ranks=3,
            nexperts=6,
        )
        seen += [p.name for p in names.resolve(f"layers.{i}.experts.{j}.w" for i in range(2) for j in range(2))]
    assert sorted(seen) == sorted(f"layers.{i}.experts.{j}.w" for i in range(4) for j in range(6))
    uneven = tb.Names(layer_pattern="layers.#.", stage=1, nstages=3, nlayers=7, first_layers=[0, 1, 5])
    assert [p.name for p in uneven.resolve(["layers.0.w", "layers.3.w"])] == ["layers.1.w", "layers.4.w"]
    mapped = tb.Names(expert_pattern="experts.#.", expert_map=[5, 0])
    assert [p.name for p in mapped.resolve(["experts.0.w", "experts.1.w"])] == ["experts.5.w", "experts.0.w"]


def test_rules() -> None:
    names = tb.Names([("a.*", r"b.\1", "merge(0, 1)"), ("same", None)])
    assert names.resolve(["a.x", "same", "other"]) == [
        tb.Part("a.x", "b.x", "merge(0, 1)"),
        tb.Part("same", "same", None),
        tb.Part("other", "other", None),
    ]
    assert names.resolve([]) == []


def test_matches() -> None:
    found = tb.match_names(["a", "b", "x.1"], ["b", "c"], ignored=["x.*"], allow_unmatched=True)
    assert found == tb.Match([("b", "b")], ["a"], ["c"])
    with pytest.raises(tb.Invalid, match="'a'"):
        tb.match_names(["a"], [])


def test_views() -> None:
    """A view's shape and parts are those of the array that NumPy makes of the whole."""
    shape, its = tb.apply_view("split(0, 3, -1) permute(1, 0, 2)", (ROWS, COLUMNS), "mesh=4 place=S1")
    whole = np.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS)
    viewed = whole.reshape(3, 4, COLUMNS).transpose(1, 0, 2)
    assert shape == viewed.shape
    for rank in range(4):
        part = whole[:, 2 * rank : 2 * rank + 2].reshape(3, 4, 2).transpose(1, 0, 2)
        cut = tuple(slice(*segments[0]) for segments in its.local(shape, rank))
        assert np.array_equal(viewed[cut], part)


@pytest.mark.parametrize(
    "call",
    [
        lambda: tb.Names("rules"),  # type: ignore[arg-type]
        lambda: tb.Names([("only",)]),
        lambda: tb.Names([("a", "b", "c", "d")]),
        lambda: tb.Names([(1, "b")]),  # type: ignore[list-item]
        lambda: tb.Names([("*", r"\9")]).resolve(["a"]),
        lambda: tb.Names([("a", "b", "no view")]),
        lambda: tb.Names([("*", "one")]).resolve(["a", "b"]),
        lambda: tb.Names(layer_pattern="layers.#.", nstages=2, nlayers=4, first_layers=[0]),
        lambda: tb.Names(layer_pattern="layers.#.", stage=2, nstages=2, nlayers=4),
        lambda: tb.Names(expert_pattern="experts.#.", expert_map=[-1]),
        lambda: tb.Names().resolve("abc"),
        lambda: tb.Names().resolve([1]),  # type: ignore[list-item]
        lambda: tb.Names().resolve(3),  # type: ignore[arg-type]
        lambda: tb.match_names("abc", ["a"]),
        lambda: tb.match_names(["a", "a"], ["a"]),
        lambda: tb.match_names(["a"], ["a"], ties=["a"]),  # type: ignore[arg-type]
        lambda: tb.match_names(["a"], ["a"], allow_unmatched=1),  # type: ignore[arg-type]
        lambda: tb.apply_view("split(0, 5, -1)", (12, 8), "mesh=2 place=S0"),
        lambda: tb.apply_view("turn", (12, 8), "mesh=2 place=S0"),
        lambda: tb.apply_view("merge(0, 1)", 12, "mesh=2 place=S0"),
        lambda: tb.apply_view("merge(0, 1)", (12, 8), "mesh"),
    ],
)
def test_bad_arguments(call: Any) -> None:
    with pytest.raises(tb.Error) as caught:
        call()
    assert len(str(caught.value)) > 10


def whole(version: int) -> np.ndarray:
    return (np.arange(ROWS * COLUMNS, dtype=np.float32) + 1000 * version).reshape(ROWS, COLUMNS)


def both_sides(seat: Seat) -> None:
    """Ranks 0 and 1 have rows, ranks 1 and 2 have columns: one sends, one does both, one receives."""
    rank = seat.index
    has_rows, has_columns = rank < 2, rank > 0
    with seat.join() as bus:
        bus.wait("all", timeout=20.0)
        rows, columns = np.full((6, COLUMNS), -1, np.float32), np.full((ROWS, 4), -1, np.float32)
        batch = bus.batch("step", commit=seat.args[0])
        if has_rows:
            bus.enter("rows", rank, 2)
        if has_columns:
            bus.enter("columns", rank - 1, 2)
        if has_rows:
            pair = bus.pair("p", "columns", "mesh=2 place=S0", group="rows", wait=False)
            batch.add(pair, "w", rows, shape=(ROWS, COLUMNS))
        if has_columns:
            pair = bus.pair("p", "rows", "mesh=2 place=S1", group="columns", wait=False)
            batch.add(pair, "w", columns, shape=(ROWS, COLUMNS))
        for version in range(1, 4):
            if has_rows:
                rows[:] = whole(version)[6 * rank : 6 * rank + 6]
            columns[:] = -1
            sent, received = batch.reshard("rows", timeout=20.0)
            assert (sent is not None, received is not None) == (has_rows, has_columns)
            if has_columns:
                assert np.array_equal(columns, whole(version)[:, 4 * rank - 4 : 4 * rank])
        rows[:] = -1
        sent, received = batch.reshard("columns", timeout=20.0)
        assert (sent is not None, received is not None) == (has_columns, has_rows)
        if has_rows:
            assert np.array_equal(rows, whole(3)[6 * rank : 6 * rank + 6])
        with pytest.raises(tb.Invalid, match="'nobody' is in no pair"):
            batch.reshard("nobody")
        assert bus.plans.misses > 0
        assert bus.plans.nbytes > 0
        seat.meet()


@pytest.mark.parametrize("commit", ["in_place", "shadow"])
def test_reshard(tmp_path: Path, commit: str) -> None:
    run(both_sides, tmp_path, {"all": 3}, commit)


def test_reshard_names_the_missing(tmp_path: Path) -> None:
    with tb.join(f"unix:{tmp_path}/bus", "a", index=0, size=1) as bus:
        batch = bus.batch("b")
        batch.add(bus.pair("p", "b", "mesh=1 place=R", wait=False), "w", np.zeros(3))
        with pytest.raises(tb.Timeout, match="'b'"):
            batch.reshard("a", timeout=0.3)
        with pytest.raises(tb.Timeout, match="nobody has joined group 'b'"):
            bus.wait("b", timeout=0.1)
