"""An engine of two workers, compared with a checkpoint before and after an element of one worker has been changed.

verify_program.py MODEL PARAMETER INDEX... prints a JSON list: differences and modules that were not compared before,
differences afterwards, and what the workers find themselves.
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

    def poke(self, rank: int, name: str, at: list[int]) -> None:
        if self.rank == rank:
            dict(self.model_runner.get_model().named_parameters())[name].data[tuple(at)] += 1


def main(model: str, parameter: str, *at: str) -> None:
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

    def verify() -> engine.Verified:
        return engine.verify(llm.collective_rpc("tensorbus_weight_hashes"), model)

    before = verify()
    found: list[Any] = [[str(d) for d in before.differences], before.unchecked]
    llm.collective_rpc("poke", args=(1, parameter, [int(i) for i in at]))
    found += [[str(d) for d in verify().differences], llm.collective_rpc("tensorbus_compare", args=(model,))]
    print("found: " + json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
