"""SGLang's custom weight loader and its trainer, with stand-ins for what the loader asks of SGLang."""

from __future__ import annotations

import json
import sys
import time
from multiprocessing.connection import Client, Listener
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import engine_model as em
import jobs
import pytest
import torch
from test_engine import hashes

import tensorbus as tb
from tensorbus import engine, sglang
from tensorbus.sglang import _call, _load

CONFIG = em.Config(layers=1)
DEFAULTS = {
    **dict.fromkeys(("enable_eplb", "enable_lora", "speculative_algorithm", "quantization", "enable_memory_saver")),
    "pp_size": 1,
    "dp_size": 1,
    "cpu_offload_gb": 0,
    "load_format": "auto",
}


def save(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    header, data = {}, b""
    for name, t in tensors.items():
        begin, data = len(data), data + t.numpy().tobytes()
        header[name] = {"dtype": "F32", "shape": list(t.shape), "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


def stand_in(rank: int, size: int, leaves: dict[str, Any]) -> None:
    import torch.distributed as dist

    parallel = SimpleNamespace(tp_rank=rank, tp_size=size, tp_group=SimpleNamespace(cpu_group=dist.group.WORLD))
    context: Any = ModuleType("sglang.srt.runtime_context")
    context.get_parallel = lambda: parallel
    context.get_context = lambda: SimpleNamespace(config_leaf=leaves.__getitem__)
    loader: Any = ModuleType("sglang.srt.model_loader.loader")
    loader.post_load_weights = lambda model: model.post_load_weights()
    for module in context, loader:
        parts = module.__name__.split(".")
        for i in range(1, len(parts)):
            sys.modules.setdefault(".".join(parts[:i]), ModuleType(".".join(parts[:i])))
        sys.modules[module.__name__] = module


def serve(seat: jobs.Seat) -> list[str]:
    """A worker: runs the loader when it is asked, and says what it has after each request."""
    model = em.Model(CONFIG, seat.index, seat.size)
    model.load_weights((n, t.clone()) for n, t in em.random_checkpoint(CONFIG, 9).items())
    derived: list[float] = []
    model.post_load_weights = lambda: derived.append(float(model.embed.weight.sum()))  # type: ignore[assignment]
    stand_in(seat.index, seat.size, {**DEFAULTS, "model_path": seat.args["place"], **seat.args["leaves"]})
    versions = {}
    for v in (9, 1, 2):
        cold = em.Model(CONFIG, seat.index, seat.size)
        cold.load_weights((n, t.clone()) for n, t in em.random_checkpoint(CONFIG, v).items())
        versions[v] = hashes(cold)
    found, ways = [], list[list[str]]()
    with Listener(f"{seat.args['place']}/worker{seat.index}", "AF_UNIX") as listener:
        while True:
            with listener.accept() as connection:
                payload = connection.recv_bytes()
                if not payload:
                    return found
                import pickle

                sglang.load(model, pickle.loads(payload))
                found.append(",".join(str(v) for v, cold in versions.items() if cold == hashes(model)))
                assert not derived or derived[-1] == float(model.embed.weight.sum())
                if (known := _load._known.get(model)) is not None and known.receiver is not None:
                    ways.append(sorted(known.receiver.targets.reasons))
                    assert ways[-1] == ways[0]
                connection.send_bytes(b"done")


class Engine:
    """What SGLang's server does with requests."""

    def __init__(self, folder: str, size: int) -> None:
        self.folder, self.size, self.routes = folder, size, list[str]()

    def __call__(self, route: str, body: dict[str, Any] | None) -> dict[str, Any]:
        self.routes.append(route)
        if route == "update_weights_from_tensor":
            import base64

            assert body is not None
            assert body["load_format"] == "tensorbus.sglang.load"
            self._each([base64.b64decode(text) for text in body["serialized_named_tensors"]])
        return {"tp_size": self.size, "success": True}

    def _each(self, payloads: list[bytes]) -> None:
        connections = []
        for rank, payload in enumerate(payloads):
            until = time.monotonic() + 60
            while True:
                try:
                    connections.append(Client(f"{self.folder}/worker{rank}", "AF_UNIX"))
                    break
                except OSError:
                    assert time.monotonic() < until
                    time.sleep(0.05)
            connections[-1].send_bytes(payload)
        for connection in connections:
            with connection:
                assert not payload or connection.recv_bytes() == b"done"

    def stop(self) -> None:
        self._each([b""] * self.size)


def train(seat: jobs.Seat) -> list[str]:
    its = Engine(seat.args["place"], seat.args["size"])
    source = engine.Source({n: (t, None) for n, t in em.random_checkpoint(CONFIG, 1).items()})
    said = []
    began = time.monotonic()
    try:
        trainer = sglang.Trainer(seat.url, seat.index, seat.size, source, its, shadow=seat.args["shadow"], timeout=60.0)
        trainer.send_weights()
        for name, t in em.random_checkpoint(CONFIG, 2).items():
            source.tensors[name][0].copy_(t)
        trainer.send_weights("step 2")
        assert trainer.version == 2
        trainer.close()
        other = "off" if seat.args["shadow"] != "off" else "device"
        trainer = sglang.Trainer(seat.url + "2", seat.index, seat.size, source, its, shadow=other, timeout=60.0)
        trainer.send_weights()
        trainer.close()
    except tb.Error as error:
        said.append(f"{type(error).__name__}: {error}")
        assert time.monotonic() - began < 55  # at once, and not after the timeout
    if seat.index == 0:
        assert its.routes.count("begin_weight_update") == its.routes.count("end_weight_update")
        its.stop()
    return said


def run(folder: Path, size: int, shadow: str = "device", **leaves: Any) -> dict[str, list[Any]]:
    save(folder, em.random_checkpoint(CONFIG, 9))
    groups = {"trainer": (1, "train"), "engine": (size, "serve")}
    return jobs.run(folder, __file__, groups, place=str(folder), size=size, shadow=shadow, leaves=leaves)


@pytest.mark.parametrize(("size", "shadow"), [(2, "device"), (1, "off")])
def test_versions(tmp_path: Path, size: int, shadow: str) -> None:
    found = run(tmp_path, size, shadow)
    assert found == {"trainer": [[]], "engine": [["9", "1", "2", "2", "2"]] * size}


def test_a_refusal_is_named_by_the_trainer_at_once(tmp_path: Path) -> None:
    found = run(tmp_path, 2, enable_lora=True)
    ((said,),) = found["trainer"]
    assert "tensor-parallel rank 0: Refused: tensorbus does not update this engine: " in said
    assert "LoRA (--enable-lora) wraps modules" in said
    assert found["engine"] == [["9"]] * 2


def test_a_request_is_a_tensor_that_is_pickled_by_value() -> None:
    import pickle

    request = _call.Request(3, "id", "unix:/run/bus", "trainer", "engine", None, 1.5, "off")
    ((name, tensor),) = pickle.loads(_call.encode(request))
    assert (name, tensor.dtype) == ("tensorbus", torch.uint8)
    assert _call.decode([(name, tensor)]) == request
