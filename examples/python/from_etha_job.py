"""The job of from_etha_theirs.py and from_etha_ours.py: a matrix that a trainer has by rows, and an engine by columns.

Each rank of the two programs has an agent, so that there are four, which are started first:

    torchrun --nproc-per-node 4 --master-port 29501 from_etha_ours.py agent &
    torchrun --nproc-per-node 2 --master-port 29502 from_etha_ours.py trainer &
    AGENT_RANK_OFFSET=2 torchrun --nproc-per-node 2 --master-port 29503 from_etha_ours.py engine
"""

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

FOLDER = os.environ.get("AGENT_FOLDER", "/tmp")
STORE = "127.0.0.1", int(os.environ.get("STORE_PORT", "40001"))
ROWS, COLUMNS = 6, 4


def paths(rank: int) -> tuple[str, str]:
    """Where an agent and its client meet."""
    return f"{FOLDER}/agent{rank}_command", f"{FOLDER}/agent{rank}_state"


def serve(make_agent: Callable[..., Any]) -> None:
    """An agent, until it is stopped."""
    rank = int(os.environ["RANK"])
    agent = make_agent(rank, int(os.environ["WORLD_SIZE"]), *STORE, *paths(rank))
    try:
        agent.run()
    finally:
        agent.close()


def values(version: int) -> torch.Tensor:
    """All of the matrix."""
    return torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS) + 100 * version


def move(bootstrap: Callable[..., Any], role: str) -> None:
    """Three versions, as the trainer or as the engine."""
    sends = role == "trainer"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rank, dim = int(os.environ["RANK"]), 0 if sends else 1
    client, _ = bootstrap(path_naming_fn=paths)
    mesh = DeviceMesh(device, torch.arange(2))
    part = torch.full_like(values(0).chunk(2, dim)[rank], -1.0, device=device)
    names = ("trainer", "engine") if sends else ("engine", "trainer")
    client.init_pair("weights", *names, 2, device_mesh=mesh, placements=(Shard(dim),))
    handler = client.register_tensors("step", [(part, "weights")])
    for version in (1, 2, 3):
        wanted = values(version).chunk(2, dim)[rank].to(device)
        if sends:
            part.copy_(wanted)
            done = handler.transfer("send")
            done.acquire(timeout=30)
            done.close()
        else:
            while not handler.query_transfer_signal():
                time.sleep(0.01)
            handler.transfer("recv", blocking=True, timeout=30)
            print(f"engine {rank}: version {version}, {'equal' if torch.equal(part, wanted) else 'wrong'}", flush=True)
    handler.close()
    client.close()
