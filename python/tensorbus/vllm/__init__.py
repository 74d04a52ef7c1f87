"""vLLM's weight transfer by tensorbus, as the backend "tensorbus"; docs/engines.md tells how.

``register`` is what the entry point ``vllm.general_plugins`` calls in every process of vLLM, and a trainer by itself.
"""

from typing import Any

__all__ = ["WorkerExtension", "register"]

_NAMES = {
    "TensorbusTrainerInitInfo",
    "TensorbusTrainerWeightTransferEngine",
    "TensorbusWeightTransferEngine",
}


def register() -> None:
    """Makes the backend known to vLLM; a second call does nothing."""
    from vllm.distributed.weight_transfer import factory

    for registry, name in (
        (factory.WeightTransferEngineFactory, "TensorbusWeightTransferEngine"),
        (factory.WeightTransferTrainerFactory, "TensorbusTrainerWeightTransferEngine"),
    ):
        if "tensorbus" not in registry._registry:
            registry.register_engine("tensorbus", "tensorbus.vllm._engine", name)


class WorkerExtension:
    """For ``worker_extension_cls="tensorbus.vllm.WorkerExtension"``: methods that ``collective_rpc`` calls."""

    weight_transfer_engine: Any  # of vLLM's worker

    def tensorbus_weight_hashes(self) -> dict[str, Any]:
        """The hashes of what this worker has, for ``tensorbus.engine.verify``."""
        hashes: dict[str, Any] = _engine_of(self).hashes()
        return hashes

    def tensorbus_compare(self, folder: str) -> list[str]:
        """Compares what this worker has with a checkpoint: a sentence for each difference, or module not compared."""
        sentences: list[str] = _engine_of(self).compare(folder).sentences
        return sentences


def _engine_of(worker: Any) -> Any:
    from .._errors import Refused
    from ._engine import TensorbusWeightTransferEngine

    if not isinstance(worker.weight_transfer_engine, TensorbusWeightTransferEngine):
        raise Refused("this worker has no weight transfer engine 'tensorbus'; set weight_transfer_config")
    return worker.weight_transfer_engine


def __getattr__(name: str) -> Any:
    """The classes, which need vLLM."""
    if name in _NAMES:
        from . import _engine

        return getattr(_engine, name)
    raise AttributeError(f"module 'tensorbus.vllm' has no attribute '{name}'")
