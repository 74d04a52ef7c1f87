"""Models of vLLM in this process, as one rank of several has them: loaded from a checkpoint, hashed, and updated."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tensorbus.vllm import _offline
from tensorbus.vllm._offline import rank_of


def keep_plain_weights() -> None:
    """vLLM leaves Linear weights as they are, which it packs for oneDNN on CPUs and does not on GPUs."""
    import vllm._custom_ops
    import vllm.model_executor.layers.utils

    vllm._custom_ops._supports_onednn = False
    vllm.model_executor.layers.utils.check_cpu_sgl_kernel = lambda *_: False


@contextlib.contextmanager
def plain_experts() -> Iterator[None]:
    """The same for experts. They can't be used then, for there is no such kernel for CPUs, but they can be loaded."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    kept = CPUUnquantizedExperts.process_weights_after_loading
    CPUUnquantizedExperts.process_weights_after_loading = lambda *_: None
    try:
        yield
    finally:
        CPUUnquantizedExperts.process_weights_after_loading = kept


def begin() -> None:
    """Process groups of one rank, and weights that are left as they are."""
    keep_plain_weights()
    _offline.begin()


def configure(path: Path, size: int, **options: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        str(path),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        tensor_parallel_size=size,
        distributed_executor_backend="mp" if size > 1 else None,
        **options,
    )
    return arguments.create_engine_config()


def cold_load(path: Path, rank: int, size: int, **options: Any) -> tuple[Any, Any]:
    """The model and its configuration; options are those of vLLM's EngineArgs."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    config = configure(path, size, **options)
    with rank_of(rank, size), set_current_vllm_config(config):
        return get_model(vllm_config=config), config


def read(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: t for file in sorted(path.glob("*.safetensors")) for name, t in load_file(file).items()}


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def hashes(model: Any) -> dict[str, str]:
    """Of every parameter and buffer, and of what attention layers have made from them."""
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    for path, module in model.named_modules():
        named |= {
            f"{path}.{k}": v for k, v in vars(module).items() if isinstance(v, torch.Tensor) and k.startswith("W_")
        }
    return {name: digest(t) for name, t in named.items() if t.numel() and t.device.type == "cpu"}
