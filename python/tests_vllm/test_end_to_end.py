"""The real vLLM, and trainers launched by themselves: after every version each parameter, and greedy tokens."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import families
import jobs
import pytest
import requests
import simulate
import torch
import transformers
from engine_program import Remote
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

import tensorbus as tb
from tensorbus import engine as tb_engine

HERE = Path(__file__).parent
VERSIONS = (2, 3, 4, 5, 6)
PROMPT = list(range(5, 45))  # longer than a block of the prefix cache
START_S = float(os.environ.get("TB_START_S", "1800"))  # on a busy machine; one that ends is noticed at once


def _plugins(folder: Path) -> Path:
    """An installed package's entry points: ours, and one of the test's that keeps weights as they are on GPUs."""
    info = folder / "site" / "tensorbus_plugins-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorbus_plugins\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\ntensorbus = tensorbus.vllm:register\nplain = simulate:keep_plain_weights\n"
    )
    return info.parent


def _environment(folder: Path) -> dict[str, str]:
    paths = [_plugins(folder), HERE, HERE.parent, HERE.parent / "tests_torch"]
    return os.environ | {"PYTHONPATH": ":".join(map(str, paths)), "VLLM_LOGGING_LEVEL": "INFO"}


def wait_for_start(process: subprocess.Popen[bytes], log: Path, is_there: Callable[[], bool]) -> None:
    """Waits until vLLM is there; one that ends instead, or takes too long, is told of, and killed."""
    until = time.monotonic() + START_S
    try:
        while not is_there():
            assert process.poll() is None, log.read_text()[-6000:]
            assert time.monotonic() < until, f"vLLM has not started: {log.read_text()[-6000:]}"
            time.sleep(0.5)
    except BaseException:
        process.terminate()
        raise


class Engine:
    def __init__(self, folder: Path, model: Path, size: int, shadow: str) -> None:
        self.socket, self.size = str(folder / "engine.sock"), size
        self.log = folder / "engine.log"
        command = [sys.executable, str(HERE / "engine_program.py"), self.socket, str(model), str(size), shadow]
        with self.log.open("w") as log:
            self._process = subprocess.Popen(command, env=_environment(folder), stdout=log, stderr=subprocess.STDOUT)
        self.remote = Remote(self.socket)
        wait_for_start(self._process, self.log, lambda: os.path.exists(self.socket))

    def close(self) -> None:
        try:
            self.remote.call("stop")
            self._process.wait(60)
        finally:
            self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class Server:
    """The same over HTTP."""

    def __init__(self, folder: Path, model: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "server.log"
        options = [
            *("--host", "127.0.0.1", "--port", str(port), "--skip-tokenizer-init", "--dtype", "float32"),
            *("--enforce-eager", "--max-model-len", "64"),
            *("--weight-transfer-config", '{"backend": "tensorbus"}'),
            *("--worker-extension-cls", "engine_program.WorkerExtension"),
        ]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *options]
        env = _environment(folder) | {"VLLM_SERVER_DEV_MODE": "1"}
        with self.log.open("w") as log:
            self._process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
        wait_for_start(self._process, self.log, self._is_healthy)

    def _is_healthy(self) -> bool:
        try:
            return requests.get(f"{self.url}/health", timeout=10).ok
        except requests.RequestException:
            return False

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        finally:
            self._process.kill()


class HTTP:
    """What the trainer asks a server besides updates."""

    def __init__(self, url: str) -> None:
        self._url = url

    def post(self, path: str, body: Any = None) -> Any:
        answer = requests.post(f"{self._url}/{path}", json=body, timeout=START_S)
        answer.raise_for_status()
        return answer

    def call(self, method: str) -> Any:
        return self.post("collective_rpc", {"method": method}).json()["results"]


def train_over_http(seat: jobs.Seat) -> list[Any]:
    import torch.distributed as dist

    import tensorbus.vllm

    tensorbus.vllm.register()
    http = HTTP(seat.args["url"])
    client = HTTPVLLMWeightSyncClient(seat.args["url"])
    found = []
    for path in seat.args["models"]:
        info = tensorbus.vllm.TensorbusTrainerInitInfo(seat.url, seat.size, rank=seat.index)
        trainer = WeightTransferTrainerFactory.trainer_init(info, client=client, source=path)
        if seat.index == 0:
            http.post("pause?mode=keep")
        trainer.send_weights()
        if seat.index == 0:
            http.post("reset_prefix_cache")
            http.post("resume")
            found.append(http.call("tensorbus_hashes"))
        trainer.shutdown()
        dist.barrier()  # nobody meets a rank that is about to leave
    return found


def send_versions(seat: jobs.Seat, source: Any, assign: Callable[[Any], None]) -> list[Any]:
    """Sends the versions, and looks what the engine has after each. ``assign`` gives the trainer's model the weights of
    a model of transformers."""
    import tensorbus.vllm

    tensorbus.vllm.register()
    remote = Remote(seat.args["socket"])
    info = tensorbus.vllm.TensorbusTrainerInitInfo(seat.url, seat.size, rank=seat.index)
    trainer = WeightTransferTrainerFactory.trainer_init(info, client=remote, source=source)
    found = []
    for path in seat.args["models"][1:]:
        with torch.no_grad():
            assign(transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
        began = time.perf_counter()
        trainer.send_weights()
        seconds = time.perf_counter() - began
        if seat.index == 0:
            remote.call("reset_prefix_cache")
            found.append([remote.call("hashes"), remote.call("generate", PROMPT), seconds])
    trainer.shutdown()
    return found


def train_megatron(seat: jobs.Seat) -> list[Any]:
    """A rank of a trainer with a GPTModel of Megatron: tensor parallelism of two, and a stage for every two ranks."""
    import megatron_models as megatron
    import torch.distributed as dist

    config = transformers.AutoConfig.from_pretrained(seat.args["models"][0])
    form = {
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": config.head_dim,
        "ffn_hidden_size": config.intermediate_size,
        "normalization": "RMSNorm",
        "add_qkv_bias": False,
    }
    with megatron.without_gpu():
        model = megatron.model(megatron.groups(2, seat.size // 2, 1, seat.size), config.num_hidden_layers, **form)
    vocabulary = config.vocab_size
    source = tb_engine.from_megatron(model, kind=config.model_type, vocabulary=vocabulary, group=dist.group.WORLD)
    return send_versions(seat, source, lambda new: megatron.fill_from_checkpoint(model, new.state_dict()))


def train(seat: jobs.Seat) -> list[Any]:
    """A rank of a trainer with a module of PyTorch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def refuse(_self: Any, **_: Any) -> None:
        raise AssertionError("full_tensor was called")

    DTensor.full_tensor = refuse
    args = seat.args
    model = transformers.AutoModelForCausalLM.from_pretrained(args["models"][0], dtype=torch.float32)
    kind = args["kind"]
    sizes = {"fsdp": (seat.size, 1), "tp": (1, seat.size), "fsdp+tp": (2, seat.size // 2)}[kind]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
    if kind != "fsdp":
        plan = {"q_proj": ColwiseParallel(), "k_proj": ColwiseParallel(), "v_proj": ColwiseParallel()}
        plan = {f"self_attn.{n}": p for n, p in plan.items()} | {"self_attn.o_proj": RowwiseParallel()}
        plan |= {
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(),
        }
        for layer in model.model.layers:
            parallelize_module(layer, mesh["tp"], plan)
    if kind != "tp":
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])

    def assign(new: Any) -> None:
        for (name, p), q in zip(model.named_parameters(), new.parameters(), strict=True):
            whole = distribute_tensor(q.data, p.device_mesh, p.placements) if isinstance(p, DTensor) else q.data
            assert whole.shape == p.shape, name
            p.copy_(whole)

    return send_versions(seat, model, assign)


@pytest.fixture(scope="module", autouse=True)
def vllm_process() -> None:
    simulate.begin()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def expect(family: str, folder: Path, size: int) -> list[tuple[list[dict[str, str]], list[int]]]:
    """Of each version: the hashes of engines that load it from disk, and the tokens that transformers generates."""

    wanted = []
    for version in VERSIONS:
        path = families.make(family, folder, version)
        hashes = [simulate.hashes(simulate.cold_load(path, rank, size)[0]) for rank in range(size)]
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        ids = torch.tensor([PROMPT])
        made = model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)
        wanted.append((hashes, made[0, len(PROMPT) :].tolist()))
    return wanted


CASES = [  # family, tp of the engine, shadow, trainers: kind and ranks
    ("Llama", 1, "device", [("fsdp", 2), ("tp", 2), ("fsdp+tp", 4), ("megatron", 2)]),
    ("Llama", 2, "off", [("fsdp", 4), ("fsdp+tp", 4), ("megatron", 4)]),
    ("Qwen3-MoE", 1, "off", [("fsdp", 2)]),
    ("Qwen3-MoE", 2, "device", [("fsdp", 4)]),
]


@pytest.mark.parametrize(
    ("family", "size", "shadow", "trainers"), CASES, ids=[f"{c[0]}-tp{c[1]}-{c[2]}" for c in CASES]
)
def test_versions(
    tmp_path: Path, models: Path, family: str, size: int, shadow: str, trainers: list[tuple[str, int]]
) -> None:
    first = families.make(family, models, 1)
    wanted = expect(family, models, size)
    engine = Engine(tmp_path, first, size, shadow)
    try:
        paths = [str(first)] + [str(families.make(family, models, v)) for v in VERSIONS]
        for kind, ranks in trainers:
            folder = tmp_path / f"{kind}{ranks}"
            folder.mkdir()
            found = jobs.run(
                folder,
                __file__,
                {"trainer": (ranks, "train_megatron" if kind == "megatron" else "train")},
                START_S,
                socket=engine.socket,
                models=paths,
                kind=kind,
            )["trainer"][0]
            for version, (hashes, tokens), (got, generated, seconds) in zip(VERSIONS, wanted, found, strict=True):
                for rank, (its, cold) in enumerate(zip(got, hashes, strict=True)):
                    wrong = {n for n in cold if its.get(n) != cold[n]}
                    assert not wrong, f"{kind} {ranks}, version {version}, rank {rank}: {wrong}"
                assert generated == tokens, f"{kind} {ranks}, version {version}"
                print(f"{family} tp {size} {shadow}, {kind} {ranks}: version {version} equal, {seconds:.3f} s")
    finally:
        print("\n".join(line[-160:] for line in engine.log.read_text().splitlines() if "tensorbus: " in line))
        engine.close()


def test_checkpoints_over_http(tmp_path: Path, models: Path) -> None:
    """A trainer of two ranks that has checkpoints on disk; it comes anew with each of them."""
    server = Server(tmp_path, families.make("Llama", models, 1))
    try:
        paths = [families.make("Llama", models, version) for version in VERSIONS[:2]]
        found = jobs.run(
            tmp_path,
            __file__,
            {"trainer": (2, "train_over_http")},
            START_S,
            url=server.url,
            models=[str(path) for path in paths],
        )["trainer"][0]
        for path, (got,) in zip(paths, found, strict=True):
            assert got == simulate.hashes(simulate.cold_load(path, 0, 1)[0])
    finally:
        print("\n".join(line[-160:] for line in server.log.read_text().splitlines() if "tensorbus: " in line))
        server.close()


def test_what_does_not_fit_changes_nothing(tmp_path: Path, models: Path) -> None:
    """A trainer with a tensor too few, or one of another shape, is refused by name, and nothing changes."""
    first, second = families.make("Llama", models, 1), families.make("Llama", models, 2)
    old, new = ([simulate.hashes(simulate.cold_load(path, 0, 1)[0])] for path in (first, second))
    engine = Engine(tmp_path, first, 1, "device")
    try:
        source, name = tb_engine.from_checkpoint(second), "model.layers.0.mlp.up_proj.weight"
        tensor, _ = source.tensors.pop(name)
        for i, wrong in enumerate((None, tensor[:-1])):
            if wrong is not None:
                source.tensors[name] = (wrong, None)
            with pytest.raises(tb.Conflict, match=re.escape(name)):
                tb_engine.Sender(f"unix:{tmp_path}/bus{i}", 0, 1, source, engine.remote, timeout=60.0)
            assert engine.remote.call("hashes") == old
        source.tensors[name] = (tensor, None)
        sender = tb_engine.Sender(f"unix:{tmp_path}/bus", 0, 1, source, engine.remote, timeout=60.0)
        sender.send()
        assert engine.remote.call("hashes") == new
        sender.close()
    finally:
        engine.close()


@pytest.mark.parametrize("what", ["enable_eplb", "enable_lora", "data parallelism", "pipeline parallelism"])
def test_what_is_refused(what: str) -> None:
    """Engines of which no test shows that an update is right are refused by name, when they are made."""
    from tensorbus.vllm import TensorbusWeightTransferEngine

    engine = object.__new__(TensorbusWeightTransferEngine)
    engine.parallel_config = SimpleNamespace(
        enable_eplb=what == "enable_eplb",
        data_parallel_size=2 if what == "data parallelism" else 1,
        pipeline_parallel_size=2 if what == "pipeline parallelism" else 1,
    )
    engine.vllm_config = SimpleNamespace(lora_config=object() if what == "enable_lora" else None)
    with pytest.raises(tb.Refused, match=what):
        engine._refuse()


@pytest.mark.parametrize("options", ["pinned", {"shadows": "pinned"}], ids=["text", "another key"])
def test_options_that_there_are_not(options: Any) -> None:
    """Options of the backend that there are not are named when the engine is made."""
    from tensorbus.vllm import TensorbusWeightTransferEngine

    config = SimpleNamespace(additional_config={"tensorbus": options}, parallel_config=None, model_config=None)
    with pytest.raises(tb.Invalid, match=r"additional_config\['tensorbus'\] is .*pinned"):
        TensorbusWeightTransferEngine(None, config, None, None)
