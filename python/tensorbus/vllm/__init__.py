"""vLLM's weight transfer by tensorbus, as the backend "tensorbus"; docs/engines.md tells how.

``register`` is what the entry point ``vllm.general_plugins`` calls in every process of vLLM, and a trainer by itself.
"""

from typing import Any

__all__ = ["register"]

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


def __getattr__(name: str) -> Any:
    """The classes, which need vLLM."""
    if name in _NAMES:
        from . import _engine

        return getattr(_engine, name)
    raise AttributeError(f"module 'tensorbus.vllm' has no attribute '{name}'")
