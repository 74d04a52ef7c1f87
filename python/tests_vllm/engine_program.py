"""vLLM's offline LLM in a process of its own, which does what clients ask over a Unix socket.

engine_program.py SOCKET MODEL TP SHADOW
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from multiprocessing.connection import Client, Listener
from typing import Any


class Remote:
    """The client of such a process: calls are made one at a time."""

    def __init__(self, socket: str) -> None:
        self._socket = socket

    def call(self, method: str, *args: Any) -> Any:
        with Client(self._socket, "AF_UNIX") as connection:
            connection.send((method, args))
            is_ok, value = connection.recv()
        if not is_ok:
            raise RuntimeError(value)
        return value

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.call("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self.call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.call("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.call("finish_weight_update", weight_version)


class WorkerExtension:
    """What tests ask workers."""

    def tensorbus_hashes(self) -> dict[str, str]:
        import simulate

        return simulate.hashes(self.model_runner.get_model())  # type: ignore[attr-defined]

    def tensorbus_pid(self) -> int:
        return os.getpid()


def main(socket: str, model: str, size: str, shadow: str) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        tensor_parallel_size=int(size),
        distributed_executor_backend="mp" if size != "1" else None,
        weight_transfer_config={"backend": "tensorbus"},
        additional_config={"tensorbus": {"shadow": shadow}},
        worker_extension_cls="engine_program.WorkerExtension",
        enable_prefix_caching=True,
    )

    def generate(prompt: list[int]) -> list[int]:
        sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
        (result,) = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        return list(result.outputs[0].token_ids)

    own = {
        "generate": generate,
        "hashes": lambda: llm.collective_rpc("tensorbus_hashes"),
        "pids": lambda: llm.collective_rpc("tensorbus_pid"),
    }
    with Listener(socket, "AF_UNIX") as listener:
        while True:
            with listener.accept() as connection, contextlib.suppress(EOFError, OSError):  # a client may be killed
                method, args = connection.recv()
                if method == "stop":
                    connection.send((True, None))
                    return
                try:
                    result = (own.get(method) or getattr(llm, method))(*args)
                    connection.send((True, result))
                except Exception:
                    connection.send((False, traceback.format_exc()))


if __name__ == "__main__":
    main(*sys.argv[1:])
