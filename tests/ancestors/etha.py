"""Etha's tests, with tensorbus.etha in the place of its package.

``python etha.py CHECKOUT`` prints a line for each test. The tests, and the programs that they start, are read from the
checkout and run as they are: a package ``etha`` that leads to tensorbus.etha is put before theirs. Processes of tests
are forked, not spawned, which saves minutes. Their test of agents and clients wants GPUs and a model from a network: it
gets CPU tensors and a small model of the same kind, by a module ``transformers`` of ours. As a plug-in of pytest this
file tells of each test how it ended.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FILES = ("self_copy_bucket", "communication_symmetric_mesh", "communication_cpu", "communication_replicate_shard")
FILES += ("partial_chunk_reduce", "distributed_model_transfer")
NOT_OURS = {
    "test_command_queue.py": "tests their queue in LMDB; commands go over a socket here",
    "test_kvstore.py": "tests their stores; the store here is no interface of users, and our tests have it, etcd too",
    "examples/vllm_weight_sync": "needs GPUs, and vLLM 0.20.2 with their patch",
}
WHY = {
    "test_communication_replicate_shard.py": "through etha.comm; _create_partial_groups of their agent, which makes "
    "process groups for reductions, is replaced by nothing: the plan knows who contributes",
    "test_distributed_model_transfer.py": "through eight agents and eight clients; on CPU tensors, with a small model",
    "test_partial_chunk_reduce.py": "reduces by torch.distributed alone, calls nothing of Etha; passes",
}

# What takes the place of their package, and of what is not here.
PLACED = {
    "etha/__init__.py": "",
    "etha/comm/__init__.py": "from tensorbus.etha.comm import *\n",
    "etha/comm/ir.py": "from tensorbus.etha.comm.ir import *\n",
    "etha/tensor_bus/__init__.py": "from tensorbus.etha import *\n",
    "etha/tensor_bus/agent.py": "from tensorbus.etha import *\ndef _create_partial_groups(**_):\n    return []\n",
    "transformers.py": '''
import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(64, 48)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(48, 96 + 8 * i, bias=i % 2 == 0) for i in range(6))
        self.norm = torch.nn.LayerNorm(48)

    def to(self, device):
        return self


class AutoModelForCausalLM:
    @staticmethod
    def from_pretrained(name, dtype):
        torch.manual_seed(7)
        model = Model()
        with torch.no_grad():
            model.norm.weight.copy_(torch.randn(48))  # unlike what reset_parameters makes
        return torch.nn.Module.to(model, dtype)
''',
    "sitecustomize.py": '''
import os

if "LOCAL_RANK" in os.environ:  # a program that torchrun started
    import torch
    import torch.distributed._tensor as tensor

    mesh = tensor.DeviceMesh
    tensor.DeviceMesh = lambda kind, *args, **named: mesh("cpu", *args, **named)
    torch.cuda.set_device = lambda device: None
''',
}


def run(checkout: str) -> list[tuple[str, str, str]]:
    """Runs them; of each test its name, "passed", "failed" or "not applicable", and why."""
    files = [f"tests/test_{name}.py" for name in FILES]
    with tempfile.TemporaryDirectory() as folder:
        for name, text in PLACED.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        Path(folder, "with_tensorbus.py").write_text(Path(__file__).read_text())
        results = Path(folder, "results.json")
        binaries = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join([folder, str(HERE.parents[1] / "python")]),
            "PATH": binaries,
            "ANCESTOR_RESULTS": str(results),
            "LMDB_ROOT": f"{folder}/agents",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider"]
        command += ["-p", "with_tensorbus", "-o", "addopts=", "--rootdir", checkout, *files]
        done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, timeout=3000, check=False)
        if not results.exists():
            raise RuntimeError(f"pytest did not begin:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        found = [(str(a), str(b), str(c)) for a, b, c in json.loads(results.read_text())]
    return found + [(name, "not applicable", why) for name, why in NOT_OURS.items()]


# ---- The plug-in ----------------------------------------------------------------------------------------------------

_results: list[tuple[str, str, str]] = []


def pytest_configure(config: Any) -> None:
    config.addinivalue_line("markers", "timeout: of pytest-timeout")
    import torch._dynamo  # which DTensor imports in each process, for seconds
    import torch.multiprocessing as mp

    def fork(function: Any, args: Any = (), nprocs: int = 1, join: bool = True) -> Any:
        return mp.start_processes(function, args, nprocs, join, start_method="fork")

    mp.spawn = fork


def pytest_runtest_logreport(report: Any) -> None:
    if report.when != "call" and report.passed:
        return
    name = report.nodeid.removeprefix("tests/")
    file = name.partition("::")[0]
    if not report.passed:
        _results.append((name, "failed", str(report.longrepr).strip().splitlines()[-1]))
    elif file == "test_partial_chunk_reduce.py":
        _results.append((name, "not applicable", WHY[file]))
    else:
        _results.append((name, "passed", WHY.get(file, "through etha.comm")))


def pytest_sessionfinish() -> None:
    Path(os.environ["ANCESTOR_RESULTS"]).write_text(json.dumps(_results))


if __name__ == "__main__":
    lines = run(sys.argv[1])
    for line in lines:
        print(" | ".join(line))
    sys.exit(any(outcome == "failed" for _, outcome, _ in lines))
