"""Tracing an engine's loaders: what goes the direct way, what does not and why, and that every byte arrives."""

from __future__ import annotations

import hashlib
from typing import Any

import engine_model as em
import pytest
import torch

import tensorbus as tb
from tensorbus import engine
from tensorbus.engine._record import Recording, Slot, record


def hashes(model: torch.nn.Module) -> dict[str, str]:
    return {
        name: hashlib.sha256(t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, t in model.named_parameters(remove_duplicate=False)
    }


def headers(checkpoint: dict[str, torch.Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(t.shape), t.dtype) for name, t in checkpoint.items()}


def trace(model: em.Model, checkpoint: dict[str, torch.Tensor]) -> engine.Trace:
    return engine.trace(model, headers(checkpoint), process=em.process)


FALLBACKS = {f"layers.{i}.{name}" for i in range(2) for name in ("norm", "packed")}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_traced_copies_equal_the_cold_load(size: int, tied: bool, dtype: torch.dtype) -> None:
    c = em.Config(tied=tied, dtype=dtype)
    old, new = em.random_checkpoint(c, 1), em.random_checkpoint(c, 2)
    models = [em.cold_load(c, old, rank, size) for rank in range(size)]
    before = [hashes(model) for model in models]
    traces = [trace(model, old) for model in models]
    assert [hashes(model) for model in models] == before  # tracing leaves the weights alone
    targets = engine.make_targets(traces)
    assert set(targets.reasons) == FALLBACKS
    assert targets.unused == ["rotary.inv_freq"]
    for rank, model in enumerate(models):
        direct = [m for m in traces[rank].modules.values() if m.reason is None]
        params = {name: p.data for name, p in model.named_parameters()}
        engine.apply((piece for m in direct for piece in m.pieces), new, params)
        cold = hashes(em.cold_load(c, new, rank, size))
        for name, value in hashes(model).items():
            in_fallback = name.rsplit(".", 1)[0] in FALLBACKS
            assert value == (before[rank] if in_fallback else cold)[name], name


def test_reasons() -> None:
    c = em.Config(layers=1)
    found = trace(em.cold_load(c, em.random_checkpoint(c, 1)), em.random_checkpoint(c, 1))
    assert found.modules["layers.0.norm"].reason == "aten.add.Tensor of 'layers.0.norm.weight'"
    assert found.modules["layers.0.packed"].reason == "what follows loading replaces 'weight'"
    assert found.modules["layers.0.norm"].sources == {"layers.0.norm.weight"}
    assert 0.9 < found.direct_share < 1.0
    assert found.report().splitlines()[0].startswith("10 of 12 modules, 92.")


def test_a_partly_written_module_falls_back_as_a_whole() -> None:
    c = em.Config(layers=1)
    checkpoint = em.random_checkpoint(c, 1)
    model = em.cold_load(c, checkpoint)
    del checkpoint["layers.0.experts.1.w2"]
    module = trace(model, checkpoint).modules["layers.0.experts"]
    assert module.reason == "128 of 384 elements of 'w2' are not written exactly once"
    assert module.pieces == []


def test_a_loader_that_fails_is_named_and_the_others_are_traced() -> None:
    c = em.Config(layers=1)
    checkpoint = em.random_checkpoint(c, 1)
    model = em.cold_load(c, checkpoint)
    checkpoint["layers.0.o.weight"] = torch.zeros(3, 3)
    found = trace(model, checkpoint)
    assert list(found.failed) == ["layers.0.o.weight"]
    assert "layers.0.o" not in found.modules
    assert found.modules["layers.0.qkv"].reason is None
    load = model.layers[0].o.load

    def check(part: str, loaded: torch.Tensor) -> None:
        if loaded.shape != (16, 16):
            raise AssertionError
        load(part, loaded)

    model.layers[0].o.load = check  # type: ignore[method-assign]
    found = trace(model, checkpoint)
    assert found.failed["layers.0.o.weight"] == "its loader failed: AssertionError: check: raise AssertionError"


def test_a_loader_that_looks_at_values_differs_from_its_trace() -> None:
    """The recorded copy is the same for all values, but the loader is not."""
    c = em.Config(layers=1)
    checkpoint = em.random_checkpoint(c, 1)
    model = em.cold_load(c, checkpoint)
    load = model.layers[0].o.load

    def sneaky(part: str, loaded: torch.Tensor) -> None:
        load(part, loaded)
        if type(loaded) is torch.Tensor:
            model.layers[0].o.weight.data[0, 0] = 7.0

    model.layers[0].o.load = sneaky  # type: ignore[method-assign]
    assert trace(model, checkpoint).modules["layers.0.o"].reason == (
        "'weight' gets other bytes from the loader than from its trace"
    )


def test_weights_that_something_else_has_changed() -> None:
    """What another module does after loading is seen in the bytes."""
    c = em.Config(layers=1)
    checkpoint = em.random_checkpoint(c, 1)
    model = em.cold_load(c, checkpoint)
    model.layers[0].down.weight.data[2, 3] += 1
    found = engine.trace(model, headers(checkpoint), process=em.process, loaded=checkpoint)
    assert {m.name for m in found.modules.values() if m.reason} == {"layers.0.norm", "layers.0.packed", "layers.0.down"}
    assert found.modules["layers.0.down"].reason == (
        "'weight' has other bytes now than its trace makes of the checkpoint"
    )


VIEWS: dict[str, Any] = {
    "transpose": lambda t: t.transpose(0, 2),
    "permute": lambda t: t.permute(1, 2, 0),
    "flatten": lambda t: t.flatten(),
    "reshape": lambda t: t.reshape(6, 4),
    "view": lambda t: t.view(2, 3, 2, 2)[:, 1:, 1],
    "rows": lambda t: t[1, :, 1:3],
    "steps": lambda t: t[:, ::2],
    "select": lambda t: t.select(1, 2),
    "unbind": lambda t: t.unbind(2)[3],
    "chunk": lambda t: t.chunk(2, dim=2)[1],
    "split": lambda t: t.split([1, 2], dim=1)[1],
    "squeeze": lambda t: t[:1].squeeze(0).t().contiguous(),
    "unflatten": lambda t: t.unflatten(2, (2, 2)).transpose(0, 2),
    "flat part": lambda t: t.view(-1)[12:],
    "cast": lambda t: t[1].to(torch.float64),
    "scalar": lambda t: t[1, 2, 3],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=list(VIEWS))
def test_views(view: Any) -> None:
    source = torch.arange(24.0).reshape(2, 3, 4)
    wanted = view(source)
    slot = Slot("m", "w", torch.nn.Parameter(torch.full(wanted.shape, -1.0, dtype=wanted.dtype), requires_grad=False))
    with Recording([slot]):
        slot.tensor.data.copy_(view(record("x", source.shape, source.dtype, "cpu")))
    assert (slot.tensor == -1).all()
    assert not slot.computed
    engine.apply(slot.pieces, {"x": source}, {"m.w": slot.tensor.data})
    assert torch.equal(slot.tensor.data, wanted)


COMPUTED: dict[str, tuple[Any, str]] = {
    "sum": (lambda t: t + 1, "aten.add.Tensor of 'x'"),
    "cat": (lambda t: torch.cat([t[1:], t[:1]]), "aten.cat.default of 'x'"),
    "bits": (lambda t: t.view(torch.int32), "aten.view.dtype of 'x'"),
    "there and back": (lambda t: t.to(torch.bfloat16).to(torch.float32), "aten._to_copy.default of 'x'"),
    "narrow": (lambda t: t.to(torch.bfloat16), "'w' is cast through torch.bfloat16"),
    "broadcast": (lambda t: t[:, :1], "'w' takes elements that are no box of 'x'"),
}


@pytest.mark.parametrize(("compute", "why"), COMPUTED.values(), ids=list(COMPUTED))
def test_what_is_computed_is_no_copy(compute: Any, why: str) -> None:
    slot = Slot("m", "w", torch.zeros(4, 6))
    with Recording([slot]):
        slot.tensor.copy_(compute(record("x", (4, 6), torch.float32, "cpu")))
    assert slot.computed == {why: {"x"}}
    assert slot.pieces == []


def test_refuses_what_has_no_loader() -> None:
    with pytest.raises(tb.Invalid, match="Linear has no load_weights"):
        engine.trace(torch.nn.Linear(2, 2), {})
