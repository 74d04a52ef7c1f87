"""The real SGLang's server on the CPU, and trainers launched by themselves: after every version each parameter, and
greedy tokens.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch

import tensorbus as tb
from tensorbus import engine, sglang

HERE = Path(__file__).parent
VERSIONS = (2, 3, 4)
PROMPT = list(range(5, 45))
START_S = 500.0


def make_model(folder: Path, version: int, family: str = "Llama") -> Path:
    import families  # which trainers' processes do not find

    return families.make(family, folder, version)


class Server:
    def __init__(self, folder: Path, model: Path, size: int, *options: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{port}", folder / "server.log"
        command = [
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--tp-size", str(size)),
            *("--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"),
            *("--skip-tokenizer-init", "--skip-server-warmup", "--disable-overlap-schedule", "--disable-cuda-graph"),
            *("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--context-length", "64"),
            *("--max-total-tokens", "512", "--max-running-requests", "2", "--mem-fraction-static", "0.9"),
            *("--custom-weight-loader", "tensorbus.sglang.load", *options),
        ]
        cores = sorted(os.sched_getaffinity(0))
        env = os.environ | {
            "PYTHONPATH": f"{HERE / 'kernels'}:{HERE.parent}",
            "SGLANG_USE_CPU_ENGINE": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "SGLANG_NCCL_SO_PATH": "none",  # without NCCL SGLang's workers use gloo
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cores[rank % len(cores)]) for rank in range(size)),
        }
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        until = time.monotonic() + START_S
        while True:
            assert self._process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < until, "SGLang has not started"
            try:
                ask(self.url, "model_info")
                return
            except OSError:
                time.sleep(0.5)

    def close(self) -> None:
        print("\n".join(line[-200:] for line in self.log.read_text().splitlines() if "tensorbus: " in line))
        os.killpg(self._process.pid, signal.SIGKILL)  # its own session: its processes, too
        self._process.wait()


def ask(url: str, route: str, **body: Any) -> Any:
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(f"{url}/{route}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())


def look(url: str) -> list[Any]:
    """The checksum of every parameter of every rank, and greedy tokens."""
    ranks = ask(url, "weights_checker", action="checksum")["ranks"]
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    answer = ask(url, "generate", input_ids=PROMPT, sampling_params=sampling)
    # A request that was answered counts as running for a moment, in which no cache is flushed: wait for that.
    urllib.request.urlopen(f"{url}/flush_cache?timeout=60", timeout=120).close()
    return [[rank["checksums"] for rank in ranks], answer["output_ids"]]


def read_from_disk(url: str, paths: dict[int, Path]) -> dict[int, list[Any]]:
    """What SGLang has after it has loaded each version itself; at the end it has the first one."""
    found = {}
    for version in [*paths, next(iter(paths))]:
        assert ask(url, "update_weights_from_disk", model_path=str(paths[version]))["success"]
        found[version] = look(url)
    return found


def train(seat: jobs.Seat) -> list[Any]:
    """A trainer whose model is sharded by FSDP2, or by tensor parallelism."""
    import transformers
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def refuse(_self: Any, **_: Any) -> None:
        raise AssertionError("full_tensor was called")

    DTensor.full_tensor = refuse
    args = seat.args
    model = transformers.AutoModelForCausalLM.from_pretrained(args["models"][0], dtype=torch.float32)
    mesh = init_device_mesh("cpu", (seat.size,))
    if args["kind"] == "tp":
        plan = {f"self_attn.{n}_proj": ColwiseParallel() for n in "qkv"} | {"self_attn.o_proj": RowwiseParallel()}
        for layer in model.model.layers:
            parallelize_module(layer, mesh, plan)
    else:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    trainer = sglang.Trainer(
        seat.url, seat.index, seat.size, model, args["engine"], shadow=args["shadow"], timeout=120.0
    )
    found = []
    for version, path in enumerate(args["models"][1:], 1):
        new = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        with torch.no_grad():
            for p, q in zip(model.parameters(), new.parameters(), strict=True):
                p.copy_(distribute_tensor(q.data, p.device_mesh, p.placements) if isinstance(p, DTensor) else q.data)
        began = time.perf_counter()
        trainer.send_weights(f"step {version}")
        seconds = time.perf_counter() - began
        if seat.index == 0:
            found.append([*look(args["engine"]), ask(args["engine"], "model_info")["weight_version"], seconds])
    trainer.close()
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Any]:
    made: list[Server] = []

    def make(*args: Any) -> Server:
        made.append(Server(tmp_path, *args))
        return made[-1]

    yield make
    for each in made:
        each.close()


CASES = [  # family, tp of the engine, trainers: kind, ranks and shadow
    ("Llama", 1, [("fsdp", 2, "pinned"), ("tp", 2, "off")]),
    ("Llama", 2, [("fsdp", 2, "device")]),
]


@pytest.mark.parametrize(("family", "size", "trainers"), CASES, ids=[f"{c[0]}-tp{c[1]}" for c in CASES])
def test_versions(
    tmp_path: Path, models: Path, servers: Any, family: str, size: int, trainers: list[tuple[str, int, str]]
) -> None:
    paths = {v: make_model(models, v, family) for v in (1, *VERSIONS)}
    server = servers(paths[1], size)
    wanted = read_from_disk(server.url, paths)
    assert len({json.dumps(tokens) for _, tokens in wanted.values()}) > 1
    for kind, ranks, shadow in trainers:
        folder = tmp_path / f"{kind}{ranks}"
        folder.mkdir()
        args = {"engine": server.url, "models": [str(p) for p in paths.values()], "kind": kind, "shadow": shadow}
        found = jobs.run(folder, __file__, {"trainer": (ranks, "train")}, START_S, **args)["trainer"][0]
        for i, (version, (checksums, tokens, weight_version, seconds)) in enumerate(zip(VERSIONS, found, strict=True)):
            assert checksums == wanted[version][0], f"{kind} {ranks}, version {version}"
            assert tokens == wanted[version][1], f"{kind} {ranks}, version {version}"
            assert weight_version == f"step {i + 1}"
            print(f"{family} tp {size} {shadow}, {kind} {ranks}: version {version} equal, {seconds:.3f} s")
    assert server.log.read_text().count("100.0% of the bytes, go the direct way") == size


def test_what_fails_is_named_and_changes_nothing(tmp_path: Path, models: Path, servers: Any) -> None:
    """A missing tensor; a trainer that dies while the engine waits; and the next trainer, which succeeds."""
    paths = {v: make_model(models, v) for v in (1, 2)}
    server = servers(paths[1], 1)
    wanted = read_from_disk(server.url, paths)
    source = engine.from_checkpoint(paths[2])
    left_out = source.tensors.pop("model.layers.0.mlp.up_proj.weight")
    with pytest.raises(tb.Conflict, match=r"model\.layers\.0\.mlp\.up_proj\.weight"):
        sglang.Trainer(f"unix:{tmp_path}/bus1", 0, 1, source, server.url, timeout=30.0)
    assert look(server.url) == wanted[1]
    source.tensors["model.layers.0.mlp.up_proj.weight"] = left_out
    trainer = sglang.Trainer(f"unix:{tmp_path}/bus2", 0, 1, source, server.url, timeout=10.0)
    trainer._sender.bus.close()  # as if it had died: the engine is asked to receive, and nobody sends
    with pytest.raises(tb.Error, match=r"the engine has not taken version 1.*trainer 0"):
        trainer._sender._links["engine"]._client.update_weights({"version": 1})
    assert look(server.url) == wanted[1]
    trainer = sglang.Trainer(f"unix:{tmp_path}/bus3", 0, 1, source, server.url, timeout=30.0)
    trainer.send_weights()
    assert look(server.url) == wanted[2]
    trainer.close()


def test_an_engine_that_is_refused_is_named(tmp_path: Path, models: Path, servers: Any) -> None:
    """An engine that has no checkpoint, which would say what its loaders take, is refused, and the trainer says so."""
    path, empty = make_model(models, 1), tmp_path / "empty"
    empty.mkdir()
    shutil.copy(path / "config.json", empty)
    server = servers(empty, 1, "--load-format", "dummy")
    began = time.monotonic()
    with pytest.raises(tb.Error, match=f"{empty} is no folder with files"):
        sglang.Trainer(f"unix:{tmp_path}/bus", 0, 1, path, server.url, timeout=60.0)
    assert time.monotonic() - began < 50
