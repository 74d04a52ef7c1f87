"""Megatron-LM's tests of whole models, test_model_swap.py, and of its executor, test_execution.py, with tensorbus.

``python megatron_swap.py CHECKOUT [--limit SECONDS]`` prints a line for each test as it ends. The tests are read from
the checkout and run as they are, on one GPU, or on the CPU where torch sees none. Each is run by as many forked
processes as its layouts need, over gloo, since NCCL wants a GPU for each of them. Tests that want Transformer Engine
get Megatron's own layers where it is not installed. The tests' two parameters for how weights are moved stand for two
ways of ours:

- ``gloo``: their ``swap_model_weights``, with our planner and our copy service
- ``nccl``: our ``refit``

A test that fails is run again with nothing of ours: if it fails then, too, it is not applicable.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TESTS = "tests.unit_tests.resharding"
PATIENCE_S = 180.0  # for one test
Line = tuple[str, str, str]  # a test, "passed", "failed" or "not applicable", and why

_only_theirs = False  # set before a test's processes fork

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compilers take longer than the tests
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # to look for a GPU without using it, before processes fork


# ---- What the tests need of the machine -----------------------------------------------------------------------------


class _Done:
    """Work that has ended, but for what follows when it is waited for."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self._then = then

    def wait(self, *_: Any) -> bool:
        then, self._then = self._then, lambda: None
        then()
        return True

    def is_completed(self) -> bool:
        return True


def _stage(dist: Any) -> None:
    """Makes gloo take tensors on a GPU: a collective is done with copies on the CPU, which are copied back."""

    def collective(function: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            copied: list[tuple[Any, Any]] = []

            def on_cpu(value: Any) -> Any:
                if isinstance(value, list):
                    return [on_cpu(each) for each in value]
                if not getattr(value, "is_cuda", False):
                    return value
                copied.append((value, value.detach().cpu()))
                return copied[-1][1]

            is_async = named.pop("async_op", False)
            found = function(*map(on_cpu, args), **{name: on_cpu(value) for name, value in named.items()})
            for tensor, its in copied:
                tensor.detach().copy_(its)
            return _Done() if is_async else found

        return call

    def isend(tensor: Any, *args: Any, **named: Any) -> Any:
        return send(tensor.detach().cpu(), *args, **named)

    def irecv(tensor: Any, *args: Any, **named: Any) -> Any:
        its = tensor.detach().cpu()
        work = recv(its, *args, **named)

        def end() -> None:
            work.wait()
            tensor.detach().copy_(its)

        return _Done(end)

    send, recv = dist.isend, dist.irecv
    for name in (
        "all_reduce",
        "broadcast",
        "all_gather",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "all_to_all_single",
    ):
        setattr(dist, name, collective(getattr(dist, name)))
    for module in dist, dist.distributed_c10d:  # where a P2POp looks whether it is one of them
        module.isend, module.irecv = isend, irecv
    by_name = {"isend": isend, "irecv": irecv}
    dist.batch_isend_irecv = lambda ops: [by_name[op.op.__name__](op.tensor, op.peer, group=op.group) for op in ops]


@contextlib.contextmanager
def _described_gpu() -> Iterator[None]:
    """Modules of theirs ask which GPU this is when they are imported. A process that has used a GPU can't fork others
    that use it, so another one asks."""
    import torch

    ask = "import json, torch; p = torch.cuda.get_device_properties(0); "
    ask += "print(json.dumps({n: getattr(p, n) for n in dir(p) if isinstance(getattr(p, n), int | str)}))"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    gpu = types.SimpleNamespace(**json.loads(done.stdout))
    names = ("get_device_properties", "get_device_name", "get_device_capability")
    asked = [getattr(torch.cuda, name) for name in names]
    for name, answer in zip(names, (gpu, gpu.name, (gpu.major, gpu.minor)), strict=True):
        setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    try:
        yield
    finally:
        for name, function in zip(names, asked, strict=True):
            setattr(torch.cuda, name, function)
    if torch.cuda.is_initialized():
        raise RuntimeError("a module has used the GPU when it was imported, so no test can run")


@contextlib.contextmanager
def _on_cpu() -> Iterator[None]:
    """What asks for a GPU gets the CPU."""
    import megatron_models
    import torch
    from megatron.core.tensor_parallel import random
    from torch.overrides import TorchFunctionMode

    class Number(int):
        """Of a GPU."""

    def cpu(value: Any) -> Any:
        is_cuda = isinstance(value, torch.device | str) and str(value).startswith("cuda")
        return torch.device("cpu") if is_cuda or isinstance(value, Number) else value

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*map(cpu, args), **{name: cpu(value) for name, value in (kwargs or {}).items()})

    random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    random.CudaRNGStatesTracker.add = lambda *_: None
    torch.cuda.device_count = lambda: 1
    for module, name in (
        (torch.cuda, "_lazy_init"),
        (torch.cuda, "manual_seed"),
        (torch.cuda.memory, "empty_cache"),
        (random, "_lazy_init"),
    ):
        setattr(module, name, lambda *_: None)
    all_to_all = torch.distributed.all_to_all_single

    def with_lists(*args: Any, **named: Any) -> Any:
        """Sizes on a GPU become lists on their way; those on the CPU stay tensors, which gloo refuses."""
        lists = {
            name: value.tolist() for name, value in named.items() if name.endswith("split_sizes") and value is not None
        }
        return all_to_all(*args, **named | lists)

    torch.distributed.all_to_all_single = with_lists
    with megatron_models.without_gpu(), OnCpu():
        torch.cuda.current_device = lambda: Number(0)
        yield


def _place_ours(has_engine: bool) -> None:
    """Puts ours in the place of theirs, before the tests import the names."""
    import tensorbus.megatron as ours

    # Their utilities of tests import it for other tests, and it needs more packages, and Python 3.12.
    unused = types.ModuleType("megatron.training.argument_utils")
    for name in ("gpt_config_from_args", "hybrid_config_from_args", "pretrain_cfg_container_from_args"):
        setattr(unused, name, None)
    sys.modules["megatron.training"] = types.ModuleType("megatron.training")
    sys.modules[unused.__name__] = unused

    refit = importlib.import_module("megatron.core.resharding.refit")
    swap, clear, build = refit.swap_model_weights, refit.clear_all_caches, refit.build_local_reshard_plan
    services: list[Any] = []

    def swap_model_weights(src: Any, dst: Any, refit_method: Any, **named: Any) -> None:
        if _only_theirs:
            refit.build_local_reshard_plan = build
            swap(src, dst, refit_method="gloo", **named)
            return
        if refit_method == "nccl":
            ours.refit(src, dst, timeout=PATIENCE_S, **named)
            return
        services.append(ours.CopyService(timeout=PATIENCE_S))
        swap(src, dst, refit_method=services[-1], **named)

    def clear_all_caches() -> None:
        ours.clear_refits()
        while services:
            services.pop().close()
        clear()

    refit.swap_model_weights, refit.clear_all_caches = swap_model_weights, clear_all_caches
    refit.build_local_reshard_plan = ours.build_local_reshard_plan
    if has_engine:
        return
    specs = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    block = specs.get_gpt_mtp_block_spec
    specs.get_gpt_layer_with_transformer_engine_spec = lambda num_experts, **_: specs.get_gpt_layer_local_spec(
        num_experts=num_experts, moe_grouped_gemm=False
    )
    specs.get_gpt_mtp_block_spec = lambda **named: block(**named | {"use_transformer_engine": False})


# ---- Tests ----------------------------------------------------------------------------------------------------------


class _Collected:
    """A plug-in of pytest that keeps what it has found."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def pytest_collection_finish(self, session: Any) -> None:
        self.items = list(session.items)


def _collect(checkout: str, names: list[str]) -> list[Any]:
    """The tests' functions with their parameters; their modules are imported."""
    import pytest

    found = _Collected()
    files = [f"{checkout}/{TESTS.replace('.', '/')}/{name}.py" for name in names]
    with contextlib.redirect_stdout(sys.stderr):
        how = [
            "--collect-only",
            "-qq",
            "--noconftest",
            "-p",
            "no:cacheprovider",
            "-o",
            "addopts=",
            "--rootdir",
            checkout,
        ]
        if code := pytest.main([*how, *files], plugins=[found]):
            raise RuntimeError(f"pytest has not collected {names}: {code!r}")
    return found.items


def _count_ranks(parameters: dict[str, Any]) -> int:
    """As few as both layouts divide."""
    sizes = [
        math.prod(
            value for name, value in parameters.items() if name in {f"{side}_{kind}" for kind in ("tp", "pp", "ep")}
        )
        for side in ("src", "dst")
    ]
    return math.lcm(*sizes)


def _rank(item: Any, rank: int, nranks: int, port: int, has_gpu: bool) -> str:
    """Runs a test as one of its ranks; "" if it passed, "skipped: " and why, or why it failed."""
    import torch
    import torch.distributed as dist
    from _pytest.outcomes import Skipped

    utils = sys.modules["tests.unit_tests.test_utilities"].Utils
    utils.rank, utils.local_rank, utils.world_size = rank, rank, nranks
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    begin = dist.init_process_group
    dist.init_process_group = lambda backend, **named: begin("gloo", **named, timeout=timedelta(seconds=PATIENCE_S))
    make = dist.new_group

    def new_group(ranks: list[int]) -> Any:
        """Their test makes different groups on different ranks at a time. NCCL allows that; gloo waits for all."""
        everyone: list[Any] = [None] * nranks
        dist.all_gather_object(everyone, ranks)
        made = {each: make(list(each)) for each in sorted(set(map(tuple, everyone)))}
        return made[tuple(ranks)]

    seen_by_test = types.SimpleNamespace(**vars(dist))
    seen_by_test.new_group = new_group
    item.module.dist = seen_by_test
    sys.modules.setdefault("transformer_engine", types.ModuleType("transformer_engine"))  # _place_ours has seen to it
    parameters = dict(item.callspec.params) if hasattr(item, "callspec") else {}
    try:
        with contextlib.nullcontext() if has_gpu else _on_cpu():
            function = getattr(item.cls(), item.originalname) if item.cls else item.function
            function(**parameters)
        return ""
    except Skipped as why:
        return f"skipped: {why}"
    except BaseException as error:
        return " ".join(traceback.format_exception_only(error)).strip().splitlines()[0][:300]


def _run(item: Any, nranks: int, has_gpu: bool, deadline: float) -> tuple[str, str]:
    """Forks the test's processes, and waits for them."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children: dict[int, int] = {}  # descriptor by which a child tells, and its pid
    sys.stdout.flush()
    sys.stderr.flush()
    for rank in range(nranks):
        here, there = os.pipe()
        pid = os.fork()
        if pid == 0:
            log = os.open(os.devnull, os.O_WRONLY)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.write(there, _rank(item, rank, nranks, port, has_gpu).encode())
            os._exit(0)
        os.close(there)
        children[here] = pid
    told: dict[int, str] = {}
    while len(told) < nranks and (left := deadline - time.monotonic()) > 0:
        for fd in select.select([fd for fd in children if fd not in told], [], [], left)[0]:
            text = os.read(fd, 4096).decode(errors="replace")
            _, status = os.waitpid(children[fd], 0)
            told[fd] = text or (f"ended with status {status}" if status else "")
        if any(told.values()) and not all(text.startswith("skipped") for text in told.values()):
            deadline = min(deadline, time.monotonic() + 5)  # the others wait for it
    for fd, pid in children.items():
        if fd not in told:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(fd)
    failed = [text for text in told.values() if text and not text.startswith("skipped")]
    if failed:
        return "failed", failed[0]
    if len(told) < nranks:
        return "failed", f"{nranks - len(told)} of {nranks} ranks have not ended in time"
    skipped = [text for text in told.values() if text]
    return ("not applicable", skipped[0]) if skipped else ("passed", "")


def _run_and_judge(item: Any, nranks: int, has_gpu: bool, end: float) -> tuple[str, str]:
    """Runs it with ours, and, if it fails, with theirs."""
    global _only_theirs
    found = _run(item, nranks, has_gpu, min(end, time.monotonic() + PATIENCE_S))
    if found[0] != "failed":
        return found
    _only_theirs = True
    theirs = _run(item, nranks, has_gpu, min(end, time.monotonic() + PATIENCE_S))
    _only_theirs = False
    lacks_time = time.monotonic() >= end
    return found if theirs[0] != "failed" or lacks_time else ("not applicable", f"fails with theirs, too: {theirs[1]}")


def run(checkout: str, limit_s: float = 3600.0, is_told: bool = False, only: str = "") -> list[Line]:
    """Runs them, or those that have ``only`` in their names; ``is_told``: prints each as it ends."""
    checkout = str(Path(checkout).resolve())
    sys.path[:] = [path for path in sys.path if Path(path) != HERE]  # where megatron.py is another
    sys.path[:0] = [checkout, str(HERE.parents[1] / "python"), str(HERE.parents[1] / "python" / "tests_torch")]
    end = time.monotonic() + limit_s
    import torch
    import torch._dynamo  # which would be imported by each process
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        _stage(dist)
    try:
        importlib.import_module("transformer_engine")
        has_engine = True
    except ImportError:
        has_engine = False
    with _described_gpu() if has_gpu else contextlib.nullcontext():
        _place_ours(has_engine)
        items = _collect(checkout, ["test_execution", "test_model_swap"])
    where = "on a GPU" if has_gpu else "on the CPU"
    layers = "" if has_engine else ", with Megatron's own layers in the place of Transformer Engine's"
    lines: list[Line] = []
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        way = parameters.get("refit_backend", "")
        name = f"{item.path.name}::{'::'.join(item.nodeid.split('::')[1:])}"
        if way == "nvshmem" or only not in name:
            continue
        if time.monotonic() >= end:
            outcome, why = "failed", "the time was over before it began"
        else:
            nranks = 4 if "non_collocated" in name else _count_ranks(parameters)
            outcome, why = _run_and_judge(item, nranks, has_gpu, end)
        if outcome == "passed" and not way:
            outcome, why = "not applicable", f"their executor, with an imitation of a service; passes {where}"
        elif outcome == "passed":
            why = f"through refit, and through build_local_reshard_plan and CopyService; {where}{layers}"
        elif outcome == "not applicable":
            why = f"{why.removeprefix('skipped: ')}"
        lines.append((name, outcome, why))
        if is_told:
            print(" | ".join(lines[-1]), flush=True)
    return lines


def main() -> int:
    """Prints the lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("checkout", help="of Megatron-LM")
    parser.add_argument("--only", default="", help="tests whose names have this")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for all tests")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = folder
        lines = run(options.checkout, options.limit, is_told=True, only=options.only)
    counts = {outcome: sum(each[1] == outcome for each in lines) for outcome in ("passed", "failed", "not applicable")}
    print(", ".join(f"{n} {outcome}" for outcome, n in counts.items()))
    return 1 if counts["failed"] or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
