"""Bad input is an exception with a sentence that names the parameter, before a byte moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import Die, Seat, run

import tensorbus as tb


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tb.Bus]:
    with tb.join(f"unix:{tmp_path_factory.mktemp('bus')}/bus", group="a", index=0, size=2) as bus:
        yield bus


@pytest.fixture
def pair(bus: tb.Bus) -> Iterator[tb.Pair]:
    with bus.pair("p", "b", "mesh=2 place=S0", wait=False) as pair:
        yield pair


@pytest.fixture
def batch(bus: tb.Bus) -> Iterator[tb.Batch]:
    with bus.batch("b") as batch:
        yield batch


X = np.zeros((3, 4), np.float32)

# Arguments of tb.join, Bus.pair and Bus.batch, and words of the sentence.
JOIN: list[tuple[dict[str, Any], str]] = [
    ({"url": 7}, "url must be a str"),
    ({"url": "nowhere"}, "nowhere"),
    ({"url": "unix:/\0"}, "url has a NUL"),
    ({"url": "\ud800"}, "url is not valid Unicode"),
    ({"group": ""}, "needs a name"),
    ({"group": None}, "tells this process's group"),
    ({"index": 2}, "seat 2|index 2"),
    ({"index": -1}, "index is -1"),
    ({"index": 2**40}, "index is"),
    ({"index": "0"}, "index must be an int"),
    ({"size": 0}, "size is 0"),
    ({"timeout": -1}, "timeout is -1"),
    ({"timeout": float("nan")}, "timeout is nan"),
    ({"timeout": "soon"}, "timeout must be a number of seconds"),
    ({"transport": "pigeon"}, "pigeon"),
    ({"workers": 10**9}, "workers"),
    ({"plan_bytes": 2**70}, "plan_bytes is"),
    ({"host": ""}, "host"),
]


@pytest.mark.parametrize(("wrong", "words"), JOIN)
def test_join(wrong: dict[str, Any], words: str, tmp_path: Path) -> None:
    right: dict[str, Any] = {"url": f"unix:{tmp_path}/bus", "group": "a", "index": 0, "size": 2, "timeout": 5.0}
    with pytest.raises((tb.Invalid, tb.Refused), match=words):
        tb.join(**{**right, **wrong})


def test_join_without_a_seat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(tb.Invalid, match="TENSORBUS_INDEX and TENSORBUS_SIZE"):
        tb.join(f"unix:{tmp_path}/bus", group="a")
    with pytest.raises(tb.Invalid, match="index is missing: give both"):
        tb.join(f"unix:{tmp_path}/bus", group="a", size=2)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with tb.join(f"unix:{tmp_path}/bus", group="a") as bus:
        assert (bus.index, bus.size) == (1, 3)
    with pytest.raises(tb.Invalid, match="set TENSORBUS_STORE"):
        tb.join()
    for name, value in {"STORE": f"unix:{tmp_path}/bus", "GROUP": "b", "INDEX": "2", "SIZE": "4"}.items():
        monkeypatch.setenv("TENSORBUS_" + name, value)
    with tb.join() as bus:
        assert (bus.group, bus.index, bus.size) == ("b", 2, 4)


ADD: list[tuple[dict[str, Any], str]] = [
    ({"tensor": [1, 2]}, "tensor 'w': list is no tensor"),
    ({"tensor": X[:2]}, r"tensor 'w': seat 0 holds \(3, 4\) .* but the tensor is \(2, 4\)"),
    ({"shape": (7, 4)}, r"tensor 'w': seat 0 holds \(4, 4\)"),
    ({"shape": (6, -4)}, "tensor 'w': dim 1 of shape is -4"),
    ({"shape": (1,) * 9}, "tensor 'w': shape has 9 dimensions"),
    ({"shape": "6,4"}, "tensor 'w': shape must be a list or tuple"),
    ({"shape": 24}, "tensor 'w': seat 0 holds"),
    ({"tensor": X.astype(complex)}, "tensor 'w': its dtype: .*complex128"),
    ({"tensor": X.astype(object)}, "tensor 'w': its dtype: .*object"),
    ({"tensor": X.astype(">f4")}, "tensor 'w': its dtype, >f4, has the other byte order"),
    ({"dtype": "f64"}, "tensor 'w': its elements have 32 bits, and can't be taken as f64"),
    ({"dtype": "f33"}, "tensor 'w': dtype: .*f33"),
    ({"wire_dtype": "f33"}, "tensor 'w': wire_dtype: .*f33"),
    ({"layout": "mesh=2 place=S7"}, "tensor 'w': .*7"),
    ({"layout": "mesh=2"}, "tensor 'w': .*mesh=2"),
    ({"layout": 3}, "tensor 'w': layout must be a str"),
    ({"layout": "mesh=3 place=S0"}, "tensor 'w': "),
    ({"group": -1}, "tensor 'w': group is -1"),
    ({"group": 2**32 - 1}, "tensor 'w': group is 4294967295"),
    ({"view": "split("}, "tensor 'w': .*split"),
    ({"view": 5}, "tensor 'w': view must be a str"),
    ({"name": ""}, "a tensor needs a name"),
    ({"name": 5}, "name must be a str"),
    ({"name": "a\0b"}, "name has a NUL"),
    ({"pair": "p"}, "'p' is no pair of this bus"),
    ({"pair": None}, "None is no pair of this bus"),
]


@pytest.mark.parametrize(("wrong", "words"), ADD)
def test_add(pair: tb.Pair, batch: tb.Batch, wrong: dict[str, Any], words: str) -> None:
    arguments = {"pair": pair, "name": "w", "tensor": X, "shape": (6, 4), **wrong}
    with pytest.raises((tb.Invalid, tb.Refused), match=words):
        batch.add(arguments.pop("pair"), arguments.pop("name"), arguments.pop("tensor"), **arguments)


def test_other_calls(bus: tb.Bus, pair: tb.Pair, batch: tb.Batch) -> None:
    open_batch = bus.batch("with a tensor")
    open_batch.add(pair, "w", X, shape=(6, 4))
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: bus.pair("p2", "a", "mesh=2 place=S0"), "can't be both"),
        (lambda: bus.pair("p2", "b", "mesh=3 place=S0"), "rank 2 of group 'a', which has 2"),
        (lambda: bus.pair("p2", "b", "nonsense"), "nonsense"),
        (lambda: bus.pair("p2", "b", group="c"), "not in group 'c'"),
        (lambda: bus.batch("b2", commit="later"), "commit is 'later'; there are 'in_place', 'shadow'"),
        (lambda: bus.batch("b2", bucket_size=-1), "bucket_size is -1"),
        (lambda: bus.batch("b2", staging_bytes=1), "staging_bytes must be at least"),
        (lambda: bus.batch("b2", staged=1), "staged must be a bool"),  # type: ignore[arg-type]
        (lambda: bus.batch("b2", ignored="w*"), "ignored must be a list"),
        (lambda: bus.batch("b2", ties=["w"]), "ties must be a dict"),  # type: ignore[arg-type]
        (lambda: bus.batch(""), "needs a name"),
        (lambda: batch.register(), "has no tensors"),
        (lambda: batch.send(wait="soon"), "wait is 'soon'"),
        (lambda: open_batch.send(stream="0"), "stream must be an int"),  # type: ignore[arg-type]
        (lambda: batch.recv(timeout=-2), "timeout is -2"),
        (lambda: batch.remove_pair(pair), "is not in batch"),
        (lambda: bus.enter("a", 0, 2), "already has seat"),
        (lambda: bus.invalidate("x"), "is no tensor"),
        (lambda: open_batch.rebind(pair, {"v": X}), "no tensor 'v' of pair"),
        (lambda: open_batch.rebind(pair, {"w": X.T}), "tensor 'w': it must have the shape, the strides"),
        (lambda: open_batch.rebind(pair, {"w": X.astype("f2")}), "tensor 'w': its elements have 16 bits"),
        (lambda: open_batch.rebind(pair, [X]), "tensors must be a dict"),  # type: ignore[arg-type]
        (lambda: tb.empty((2,), "f32", device="tpu"), "tpu"),
        (lambda: tb.empty((2**40, 2**40)), "more than 2"),
        (lambda: tb.plan("mesh=2 place=S0", "mesh=2 place=S1", (4,), "f32"), "dim"),
        (lambda: tb.layout("mesh=2 place=S0").local((4,), rank=-1), "rank is -1"),
    ]
    for call, words in calls:
        with pytest.raises(tb.Error, match=words):
            call()
    open_batch.close()
    with pytest.raises(TypeError, match=r"^Bus\.pair\(\) got an unexpected keyword argument 'layouts'"):
        bus.pair("p2", "b", layouts="mesh=2 place=S0")  # type: ignore[call-arg]


def test_closed(bus: tb.Bus, tmp_path: Path) -> None:
    batch = bus.batch("closed")
    pair = bus.pair("closed", "b", "mesh=2 place=S0", wait=False)
    batch.close()
    pair.close()
    batch.close()
    for call in (lambda: batch.version, batch.send, batch.register, lambda: batch.add(pair, "w", X, shape=(6, 4))):
        with pytest.raises(tb.Invalid, match="closed"):
            call()
    idle = tb.join(f"unix:{tmp_path}/bus", group="idle", index=0, size=1)
    idle.close()
    with pytest.raises(tb.Invalid, match=r"^bus seat 0 of 1 in group 'idle' is closed"):
        idle.groups()
    other = bus.batch("open")
    with pytest.raises(tb.Invalid, match="pair 'closed' is closed"):
        other.add(pair, "w", X, shape=(6, 4))
    other.close()


def test_deadlines_name_who_is_missing(bus: tb.Bus) -> None:
    with pytest.raises(tb.Timeout, match="nobody has joined group 'b'") as caught:
        bus.pair("q", "b", "mesh=2 place=S0", timeout=0.2)
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.status == "timeout"


def test_fields_of_errors() -> None:
    from tensorbus import _errors

    error = _errors.make(-8, "rank 6 (inference 2) was lost: it has ended")
    assert isinstance(error, tb.PeerLost)
    assert isinstance(error, ConnectionError)
    assert (error.rank, error.group, error.seat) == (6, "inference", 2)
    error = _errors.make(-10, "pair 'p': trainer 1 is gone, and nobody has taken its seat: it was lost")
    assert (type(error), error.rank, error.group, error.seat) == (tb.Conflict, None, "trainer", 1)
    assert _errors.make(-4, "no").rank is None
    assert str(_errors.make(-3, "too much")) == "too much"
    assert _errors.make(-5, "no disk").status == "io"


def disagree(seat: Seat) -> str:
    """Shapes that differ, a read-only target, a peer that dies: the same on both sides, by name."""
    sends = seat.group == "a"
    with seat.join(timeout=20.0) as bus:
        pair = bus.pair("p", "b" if sends else "a", "mesh=1 place=R")
        batch = bus.batch("wrong")
        batch.add(pair, "w", np.zeros(4 if sends else 5))
        with pytest.raises(tb.Conflict, match=r"'w' has shape \[[45]\] in group '[ab]' but \[[45]\] in group '[ab]'"):
            batch.register()
        batch.close()
        batch = bus.batch("fixed")
        x = np.zeros(4)
        x.flags.writeable = False
        batch.add(pair, "w", x)
        batch.register()
        if not sends:
            with pytest.raises(tb.Invalid, match="tensor 'w' of batch 'fixed': it is read-only"):
                batch.recv()
        seat.meet()
        if sends:
            bus.close = lambda: None  # type: ignore[method-assign]
            raise Die
        with pytest.raises(tb.PeerLost) as caught:
            x.flags.writeable = True
            again = bus.batch("fixed2")
            again.add(pair, "w", x)
            again.register(timeout=20.0)
        return f"{caught.value.group} {caught.value.seat}"


def test_disagreement_and_loss(tmp_path: Path) -> None:
    found = run(disagree, tmp_path, {"a": 1, "b": 1})
    assert found["b", 0] == "a 0"
