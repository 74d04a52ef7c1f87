"""Models of vLLM in this process, without weights or engine: traced as one rank after the other has them."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .. import engine


def trace(folder: Path, size: int) -> tuple[list[engine.Trace], list[dict[str, tuple[str, int]]], dict[str, str]]:
    """Of each rank of ``size``: its trace, and dtype and bytes by parameter. And quantising methods by module.

    The checkpoint's headers and config.json are read. What vLLM does with modules after loading is not tried.
    """
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    headers = engine.read_headers(folder)
    begin()
    traces, params, methods = [], [], dict[str, str]()
    for rank in range(size):
        # anew: a configuration knows the layers of the models that were made with it
        config = EngineArgs(
            str(folder),
            skip_tokenizer_init=True,
            tensor_parallel_size=size,
            distributed_executor_backend="mp" if size > 1 else None,
        ).create_engine_config()
        with (
            rank_of(rank, size),
            set_current_vllm_config(config),
            set_default_torch_dtype(config.model_config.dtype),
        ):
            model = initialize_model(vllm_config=config)
            with torch.no_grad():
                traces.append(engine.trace(model, headers))
        params.append({n: (str(p.dtype), p.numel() * p.element_size()) for n, p in model.named_parameters()})
        for name, module in model.named_modules():
            method = type(getattr(module, "quant_method", None)).__name__
            if method != "NoneType" and "Unquantized" not in method:
                methods[name] = method
        del model
    return traces, params, methods


def begin() -> None:
    """Makes process groups of one rank, which ``rank_of`` then takes for others."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel, model_parallel_is_initialized

    if model_parallel_is_initialized():
        return
    with set_current_vllm_config(VllmConfig()), tempfile.TemporaryDirectory(prefix="tensorbus-") as store:
        init_distributed_environment(1, 0, f"file://{store}/store", 0, "gloo")
        initialize_model_parallel()


@contextlib.contextmanager
def rank_of(rank: int, size: int) -> Iterator[None]:
    """Tensor parallelism as rank ``rank`` of ``size`` sees it while it makes and loads a model."""
    from vllm.distributed import parallel_state

    group = parallel_state.get_tp_group()
    kept = group.world_size, group.rank_in_group
    group.world_size, group.rank_in_group = size, rank
    try:
        yield
    finally:
        group.world_size, group.rank_in_group = kept
