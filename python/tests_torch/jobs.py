"""Jobs: groups of ranks with torch.distributed over gloo, each started by a command of its own, as torchrun would.

A test names a function of its file for each job; every rank of the job calls it with a Seat. torch is imported once in
a job, and the ranks are forked from that process. Where importing takes long, one job can be forked from the test's own
process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PATIENCE_S = 600.0


@dataclass(frozen=True)
class Seat:
    """What a rank gets."""

    url: str
    group: str
    index: int
    size: int
    args: dict[str, Any]

    def join(self, **options: Any) -> Any:
        import tensorbus as tb

        return tb.join(self.url, group=self.group, **{"timeout": 60.0, **options})


def run(
    folder: Path, file: str, functions: dict[str, tuple[int, str]], patience: float = PATIENCE_S, **args: Any
) -> dict[str, list[Any]]:
    """Starts a job for each group, {group: (number of ranks, function)}; returns what its ranks have returned."""
    env = os.environ | {
        "PYTHONPATH": f"{Path(file).parent}:{HERE}:{HERE.parent}",
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    jobs = {}
    for group, (size, function) in functions.items():
        command = [sys.executable, __file__, str(folder), Path(file).stem, group, str(size), function, json.dumps(args)]
        log = (folder / f"{group}.log").open("w")
        jobs[group] = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
    until = time.monotonic() + patience
    try:
        codes = {group: job.wait(max(0.1, until - time.monotonic())) for group, job in jobs.items()}
    finally:
        for job in jobs.values():
            job.kill()
    logs = "\n".join(f"{group}:\n{(folder / f'{group}.log').read_text()[-6000:]}" for group in jobs)
    assert set(codes.values()) == {0}, logs
    return {
        group: [json.loads((folder / f"{group}.{i}.json").read_text()) for i in range(size)]
        for group, (size, _) in functions.items()
    }


def run_forked(folder: Path, file: str, size: int, function: str, **args: Any) -> list[Any]:
    """One job, group "all", without a command of its own: a child of this process, which has imported everything."""

    def main() -> None:
        os.setsid()
        log = os.open(folder / "all.log", os.O_CREAT | os.O_WRONLY)
        for descriptor in 1, 2:
            os.dup2(log, descriptor)
        import torch

        torch.set_num_threads(1)
        os._exit(_main(str(folder), Path(file).stem, "all", str(size), function, json.dumps(args)))

    job = multiprocessing.get_context("fork").Process(target=main)
    job.start()
    assert job.pid is not None
    job.join(PATIENCE_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(job.pid, signal.SIGKILL)  # its own session: itself and its ranks
    job.join()
    assert job.exitcode == 0, (folder / "all.log").read_text()[-6000:]
    return [json.loads((folder / f"all.{i}.json").read_text()) for i in range(size)]


def _rank(folder: str, module: str, group: str, index: int, size: int, function: str, args: dict[str, Any]) -> None:
    import torch.distributed as dist

    logging.disable(logging.WARNING)  # torch tells at length that several collectives take longer than one
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(index), str(size)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{group}.store", rank=index, world_size=size)
    seat = Seat(f"unix:{folder}/bus", group, index, size, args)
    result = getattr(import_module(module), function)(seat)
    Path(folder, f"{group}.{index}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def _main(folder: str, module: str, group: str, size: str, function: str, args: str) -> int:
    import_module(module)
    import_module("torch._dynamo")  # which DTensors import when they are first used, in every rank
    children = []
    for index in range(int(size)):
        child = os.fork()
        if child == 0:
            try:
                _rank(folder, module, group, index, int(size), function, json.loads(args))
                code = 0
            except BaseException:
                print(f"{group} {index}: {traceback.format_exc()}", flush=True)
                code = 1
            sys.stdout.flush()
            os._exit(code)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
