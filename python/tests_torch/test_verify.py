"""Engines compared with checkpoints and trainers, by hashes: equal, one element changed, a replica that differs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import engine_model as em
import jobs
import pytest
import torch
from test_engine import FALLBACKS, hashes, trace

import tensorbus as tb
from tensorbus import engine

CONFIG = em.Config(dtype=torch.bfloat16)
SENT = replace(CONFIG, dtype=torch.float32)  # cast to compare


def _save(folder: Path, checkpoint: dict[str, torch.Tensor]) -> Path:
    header, data = {}, b""
    for name, t in checkpoint.items():
        more = t.contiguous().numpy().tobytes()
        header[name] = {"dtype": "F32", "shape": list(t.shape), "data_offsets": [len(data), len(data) + len(more)]}
        data += more
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return folder


def _engines(size: int, seed: int = 1) -> tuple[engine.Targets, list[dict[str, torch.Tensor]]]:
    old = em.random_checkpoint(CONFIG, seed)
    models = [em.cold_load(CONFIG, old, rank, size) for rank in range(size)]
    targets = engine.make_targets([trace(model, old) for model in models])
    return targets, [{n: p.data for n, p in m.named_parameters()} for m in models]


def _fitting(seed: int) -> dict[str, torch.Tensor]:
    """A trainer's checkpoint in f32, of which the engine has what is left in bf16."""
    return {name: t.to(SENT.dtype) for name, t in em.random_checkpoint(CONFIG, seed).items()}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_checkpoint(tmp_path: Path, size: int) -> None:
    folder = _save(tmp_path / "same", _fitting(1))
    targets, params = _engines(size)
    hashes = [engine.hash_boxes(params[rank], targets, rank) for rank in range(size)]
    found = engine.verify(hashes, folder)
    assert (found.differences, set(found.unchecked)) == ([], FALLBACKS)
    assert found.sentences[0].startswith("'layers.0.norm' was not compared: ")
    direct = {p.param for t in targets.tensors if t.pieces for p in t.pieces.values()}
    assert found.nelements > 0.9 * sum(p[name].numel() for p in params for name in direct)
    for rank in range(size):
        assert engine.compare(params[rank], targets, rank, folder).differences == []
    last = size - 1
    target = next(t for t in targets.tensors if t.source == "layers.1.gate.weight")
    assert target.pieces is not None
    piece = target.pieces[last]
    engine.locate(piece, params[last][piece.param])[1, 2] += 1
    found = engine.verify([engine.hash_boxes(params[r], targets, r) for r in range(size)], folder)
    assert [(d.param, d.rank, d.name) for d in found.differences] == [(piece.param, last, target.source)]
    (one,) = engine.compare(params[last], targets, last, folder).differences
    row = piece.start[0] + 1
    elements = piece.size[0] * piece.size[1]
    assert str(one) == (
        f"'{piece.param}' of rank {last} differs from 'layers.1.gate.weight' in [{row}:{row + 1}, 2:3]: "
        f"1 of {elements} elements"
    )


@pytest.mark.parametrize("size", [1, 2])
def test_modules_of_the_engines_own_loader(tmp_path: Path, size: int) -> None:
    """They have what that makes of the checkpoint's tensors, or are named; comparing them changes nothing."""
    old = em.random_checkpoint(CONFIG, 1)
    models = [em.cold_load(CONFIG, old, rank, size) for rank in range(size)]
    traces = [trace(model, old) for model in models]
    receivers = [engine.Receiver(model, traces, rank, "off") for rank, model in enumerate(models)]
    rank, folder = size - 1, _save(tmp_path / "same", _fitting(1))
    model, receiver = models[rank], receivers[rank]

    def load() -> None:
        em.reload(model, {name: t.clone() for name, t in receiver.whole.items()}, receiver.targets.reasons)

    assert set(engine.verify([receiver.hashes(load)], folder).unchecked) == FALLBACKS  # nothing was loaded so far
    receiver.fill(old)
    assert set(engine.verify([receiver.hashes()], folder).unchecked) == FALLBACKS
    found = engine.verify([receiver.hashes(load)], folder)
    assert (found.differences, found.unchecked) == ([], {})
    name = "layers.1.packed.weight"
    dict(model.named_parameters())[name].data[2, 1] += 1
    before = hashes(model)
    for found in engine.verify([receiver.hashes(load)], folder), receiver.compare(folder, load):
        (one,) = found.differences
        where = "differs from what the engine's own loader makes of its tensors in [2:3, 1:2]: 1 of "
        assert str(one).startswith(f"'{name}' of rank {rank} {where}")
        assert hashes(model) == before
    changed = _fitting(1)
    changed["layers.0.norm.weight"][3] += 1
    other = _save(tmp_path / "other", changed)
    assert {d.name for d in engine.verify([receiver.hashes(load)], other).differences} == {"", "layers.0.norm.weight"}
    assert "'layers.0.norm' of rank" in str(receiver.compare(other, load))


def test_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorbus.engine._verify.TILE", 32)
    folder = _save(tmp_path / "same", _fitting(1))
    targets, (params,) = _engines(1)
    assert engine.verify([engine.hash_boxes(params, targets, 0)], folder).differences == []
    params["layers.0.o.weight"][5, 3] = 7
    (one,) = engine.verify([engine.hash_boxes(params, targets, 0)], folder).differences
    assert (one.start, one.size) == ((4, 0), (2, 16))
    (one,) = engine.compare(params, targets, 0, folder).differences
    assert (one.start, one.size, one.why) == ((5, 3), (1, 1), "1 of 32 elements")


def test_views() -> None:
    """A trainer that keeps experts packed: each is a view of that."""
    checkpoint = _fitting(1)
    made: dict[str, tuple[Any, str | None]] = {name: (t, None) for name, t in checkpoint.items()}
    packed = torch.stack([checkpoint[f"layers.1.experts.{e}.w1"] for e in range(CONFIG.experts)])
    for e in range(CONFIG.experts):
        made[f"layers.1.experts.{e}.w1"] = (packed, f"slice(0,{e},1) merge(0,1)")
    targets, params = _engines(2)
    hashes = [engine.hash_boxes(params[rank], targets, rank) for rank in range(2)]
    assert engine.verify(hashes, engine.Source(made)).differences == []
    packed[2, 1, 3] += 1
    (one,) = engine.verify(hashes, engine.Source(made)).differences
    assert (one.name, one.rank) == ("layers.1.experts.2.w1", 0)


def test_a_tensor_that_is_missing(tmp_path: Path) -> None:
    checkpoint = _fitting(1)
    del checkpoint["layers.0.up.weight"]
    checkpoint["layers.0.o.weight"] = checkpoint["layers.0.o.weight"][:4].clone()
    folder = _save(tmp_path / "less", checkpoint)
    targets, (params,) = _engines(1)
    found = engine.verify([engine.hash_boxes(params, targets, 0)], folder)
    assert {(d.name, d.why) for d in found.differences} == {
        (f"layers.0.{name}.weight", "the source has no such tensor, or in another shape") for name in ("up", "o")
    }
    with pytest.raises(tb.Invalid, match="source must be a torch"):
        engine.verify([], 7)


def train(seat: jobs.Seat) -> list[Any]:
    """A rank of a trainer that has cut its tensors along one mesh dim, and has replicas along the other."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    def no_gather(_: Any) -> None:
        raise AssertionError("a tensor was gathered")

    mesh = init_device_mesh("cpu", (2, seat.size // 2))
    targets, params = _engines(2)
    hashes = [engine.hash_boxes(params[rank], targets, rank) for rank in range(2)]
    made = {}
    for i, (name, t) in enumerate(_fitting(1).items()):
        cut = Shard(i % t.ndim)
        made[name] = (distribute_tensor(t, mesh, [Replicate(), cut]), None)
    DTensor.full_tensor = no_gather
    source = engine.Source(made)
    found = [engine.verify(hashes, source, rank=seat.index, size=seat.size).differences]
    changed = "layers.0.down.weight"
    with torch.no_grad():
        if seat.index == seat.size - 1:
            made[changed][0].to_local()[0, 0] += 1
    found.append(engine.verify(hashes, source, rank=seat.index, size=seat.size).differences)
    whole = made["layers.0.o.weight"][0]
    return [[str(d) for d in differences] for differences in found] + [tb.hash_tensor(whole)]


def test_trainer(tmp_path: Path) -> None:
    found = jobs.run(tmp_path, __file__, {"trainer": (4, "train")})["trainer"]
    assert all(rank[:2] == found[0][:2] for rank in found)
    assert found[0][0] == []
    (sentence,) = found[0][1]
    assert "'layers.0.down.weight' of rank" in sentence
    assert sentence.endswith("replica 1 of the source has other bits than the others")
    whole = tb.hash_tensor(_fitting(1)["layers.0.o.weight"])
    assert (found[0][2] + found[1][2]) % 2**64 == (found[2][2] + found[3][2]) % 2**64 == whole


def _header(change: Any) -> Any:
    """Changes the header of a file in safetensors' format."""

    def spoil(file: Path) -> None:
        data = file.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:end])
        change(header["b"])
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])

    return spoil


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda file: file.write_bytes(b""), "no whole file in safetensors' format: it has 0 bytes"),
        (
            lambda file: file.write_bytes(file.read_bytes()[:40]),
            "no whole file in safetensors' format: it has 40 bytes",
        ),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), r"the bytes of tensor 'b' end at \d+, and the file at"),
        (lambda file: file.write_bytes((3).to_bytes(8, "little") + b"[1]"), "has no header that could be read"),
        (_header(lambda b: b.update(dtype="F4")), "tensor 'b' has dtype F4, which is none of F64, F32, "),
        (_header(lambda b: b.update(shape=[3, 3])), r"tensor 'b' has 16 bytes, which are not \[3, 3\] F32"),
        (_header(lambda b: b.pop("shape")), "has no header that could be read: KeyError: 'shape'"),
        (lambda file: file.unlink(), "has no files"),
        (
            lambda file: file.with_name("model.safetensors.index.json").write_text("{}"),
            "index.json has no weight_map that could be read: KeyError: 'weight_map'",
        ),
    ],
)
def test_checkpoints_that_are_spoiled(tmp_path: Path, spoil: Any, sentence: str) -> None:
    """By name of the file, before anything is read of it."""
    folder = _save(tmp_path / "model", {"a": torch.ones(3), "b": torch.ones(2, 2), "empty": torch.ones(0, 4)})
    assert {name: tuple(t.shape) for name, (t, _) in engine.from_checkpoint(folder).tensors.items()} == {
        "a": (3,),
        "b": (2, 2),
        "empty": (0, 4),
    }
    spoil(folder / "model.safetensors")
    with pytest.raises(tb.Invalid, match=sentence):
        engine.from_checkpoint(folder)
