"""The agent: a process of ``tensorbus agent``, which this one waits for."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

from .._c import find

GROUP = "agents"  # which all agents of a store are in; the seat is the agent's rank
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class TensorBusAgent:
    """An agent, from the moment it is made until ``close``, or until this process ends.

    ``lmdb_command_queue_path`` is where its socket is made; ``lmdb_state_path`` is not used. The store is at
    ``store_host`` and ``store_port``: ours, which the first agent on that host serves, or etcd. Agents of other
    namespaces are not met. Under torchrun each run has its own by default; else, in etcd, give each run one.

    Between machines the store wants a token: the variable TENSORBUS_TOKEN_FILE names its file, for agents and clients.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store_host: str,
        store_port: int,
        lmdb_command_queue_path: str,
        lmdb_state_path: str,  # noqa: ARG002
        store_timeout: float = 3600.0,
        store_backend: str = "tcp",
        store_namespace: str | None = None,
    ) -> None:
        if store_backend not in ("tcp", "etcd"):
            raise ValueError(f"store_backend is {store_backend!r}; there are 'tcp' and 'etcd'")
        self.rank, self.world_size = rank, world_size
        self._has_process_group = _init_process_group(rank, world_size)
        if store_namespace is None and self._has_process_group:
            told = [uuid.uuid4().hex]
            sys.modules["torch.distributed"].broadcast_object_list(told, src=0)
            store_namespace = told[0]
        Path(lmdb_command_queue_path).parent.mkdir(parents=True, exist_ok=True)
        store = f"{store_backend}://{store_host}:{store_port}"
        arguments = {
            "--name": GROUP,
            "--rank": str(rank),
            "--size": str(world_size),
            "--store": store if store_namespace is None else f"{store}?namespace={store_namespace}",
            "--socket": str(lmdb_command_queue_path),
            "--timeout": str(min(86400, math.ceil(store_timeout))),
        }
        if token := os.environ.get("TENSORBUS_TOKEN_FILE"):
            arguments["--token-file"] = token
        flat = [word for pair in arguments.items() for word in pair]
        self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
            [find("tensorbus"), "agent", *flat], stdin=subprocess.DEVNULL, preexec_fn=_end_with_parent
        )

    @property
    def pid(self) -> int | None:
        """The number of the agent's process; None: it was closed."""
        return self._process.pid if self._process else None

    def run(self) -> None:
        """Waits until the agent ends; one that fails is a RuntimeError."""
        if self._process is None:
            raise RuntimeError(f"agent {self.rank} is closed")
        code = self._process.wait()
        if code != 0:
            raise RuntimeError(f"agent {self.rank} has ended with status {code}; its last line on stderr says why")

    def close(self, destroy: bool = True) -> None:  # noqa: ARG002
        """Stops the agent, which lets what is under way end."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None
        if self._has_process_group:
            sys.modules["torch.distributed"].destroy_process_group()
            self._has_process_group = False


def _init_process_group(rank: int, world_size: int) -> bool:
    """Agents of Etha are ranks of torch.distributed, and programs that start them rely on that; under torchrun only."""
    if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        return False
    import torch.distributed as dist

    if dist.is_initialized():
        return False
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    return True
