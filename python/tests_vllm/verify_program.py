"""An engine of two workers, compared with a checkpoint before and after an element of one worker has been changed.

verify_program.py MODEL prints a JSON list: differences before, afterwards, and what the workers find themselves.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import tensorbus.vllm
from tensorbus import engine


class WorkerExtension(tensorbus.vllm.WorkerExtension):
    """That of the package, and the change."""

    model_runner: Any
    rank: int

    def poke(self, rank: int, name: str, row: int, column: int) -> None:
        if self.rank == rank:
            dict(self.model_runner.get_model().named_parameters())[name].data[row, column] += 1


def main(model: str) -> None:
    from vllm import LLM

    llm = LLM(
        model,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        weight_transfer_config={"backend": "tensorbus"},
        worker_extension_cls="verify_program.WorkerExtension",
    )

    def verify() -> list[str]:
        return [str(d) for d in engine.verify(llm.collective_rpc("tensorbus_weight_hashes"), model).differences]

    found: list[Any] = [verify()]
    llm.collective_rpc("poke", args=(1, "model.layers.1.mlp.gate_up_proj.weight", 70, 5))
    found += [verify(), llm.collective_rpc("tensorbus_compare", args=(model,))]
    print("found: " + json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
