"""vLLM's own loading, module by module: models in the form that loaders want, processing, and layerwise reload."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from .._errors import Refused


@contextlib.contextmanager
def restored(model: Any) -> Iterator[None]:
    """The model with parameters as they were before they were loaded: meta tensors with their loaders."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta

    kept = [
        (layer, dict(layer._parameters), dict(layer._buffers), set(layer._non_persistent_buffers_set))
        for layer in model.modules()
    ]
    try:
        for layer in model.modules():
            restore_layer_on_meta(layer, get_layerwise_info(layer))
        yield
    finally:
        for layer, parameters, buffers, non_persistent in kept:
            for now, then in (layer._parameters, parameters), (layer._buffers, buffers):
                now.clear()
                now.update(then)
            layer._non_persistent_buffers_set = non_persistent


def process(module: Any) -> None:
    """What vLLM does with a module when its weights are loaded."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    method = getattr(module, "quant_method", None)
    if isinstance(method, QuantizeMethodBase):
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None  # all of it is done the first time only
        if hasattr(module, "_already_called_process_weights_after_loading"):
            del module._already_called_process_weights_after_loading
        method.process_weights_after_loading(module)
        if hasattr(module, "update_param_tp_status"):
            module.update_param_tp_status()


@torch.no_grad()  # type: ignore[untyped-decorator] # torch has no types here
def load(model: Any, model_config: Any, weights: Iterable[tuple[str, Any]], modules: Iterable[str] = ()) -> None:
    """Loads some checkpoint tensors by vLLM's layerwise reload; modules that need none of them stay as they are.

    ``modules`` are those that have to be loaded: models whose loaders go round the layerwise reload are refused.
    Attention layers are processed in any case: they may keep tensors that are made from weights of other modules.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    weights = list(weights)
    if weights:
        _pack_experts_again(model)
    initialize_layerwise_reload(model)
    try:
        model.load_weights(weights)
        for name in modules:
            info = get_layerwise_info(model.get_submodule(name))
            if info.can_load() and info.load_numel <= 0:
                raise Refused(f"vLLM's layerwise reload does not load module '{name}'")
    finally:
        finalize_layerwise_reload(model, model_config)


def _pack_experts_again(model: Any) -> None:
    """On CPUs vLLM packs weights of experts only when it makes their kernel; a reload would leave them plain."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        for module in model.modules():
            method: Any = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None
