"""Models of Megatron on CPU processes, with weights that say where they belong."""

from __future__ import annotations

import contextlib
import re
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.hyper_comm_grid import HyperCommGrid
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

_VOCABULARY = 96


class _NoStream:
    """A stream or an event where everything is done at once."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    wait_stream = wait_event = synchronize = record

    def record_event(self, *_: Any) -> _NoStream:
        return self


@contextlib.contextmanager
def without_gpu() -> Iterator[None]:
    """Megatron's executor calls torch.cuda where its tensors may be on the CPU: those calls do nothing."""

    def nothing(*_: Any, **__: Any) -> None: ...

    pin = torch.empty

    def empty(*args: Any, **options: Any) -> Any:
        options.pop("pin_memory", None)
        return pin(*args, **options)

    stubs = {
        "Event": _NoStream,
        "Stream": _NoStream,
        "synchronize": nothing,
        "empty_cache": nothing,
        "set_device": nothing,
        "current_stream": _NoStream,
        "current_device": lambda: torch.device("cpu"),
        "stream": lambda _: contextlib.nullcontext(),
    }
    kept = {name: getattr(torch.cuda, name) for name in stubs}
    for name, stub in stubs.items():
        setattr(torch.cuda, name, stub)
    cuda = torch.Tensor.cuda
    torch.empty = empty  # type: ignore[assignment]
    torch.Tensor.cuda = lambda tensor, *_: tensor  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.empty, torch.Tensor.cuda = pin, cuda  # type: ignore[method-assign]
        for name, function in kept.items():
            setattr(torch.cuda, name, function)


def groups(tp: int, pp: int, ep: int, ranks: int, first: int = 0) -> ProcessGroupCollection:
    """The process groups of a model on ``ranks`` ranks from ``first`` on; every rank of the world calls it."""
    sizes = [tp, 1, ep, pp, ranks // (tp * pp * ep)]
    grid = HyperCommGrid(sizes, ["tp", "cp", "ep", "pp", "dp"], rank_offset=first)
    made = {
        "tp": "tp",
        "cp": "cp",
        "pp": "pp",
        "ep": "ep",
        "dp": "dp",
        "tp_cp": ["tp", "cp"],
        "mp": ["tp", "cp", "ep", "pp"],
        "tp_ep": ["tp", "ep"],
        "tp_ep_pp": ["tp", "ep", "pp"],
        "dp_cp": ["cp", "dp"],
        "tp_dp_cp": ["tp", "cp", "dp"],
    }
    found = {name: grid.create_pg(dims) for name, dims in made.items()}
    ends = sorted({tuple({stages[0], stages[-1]}) for stages in grid.get_rank_enum("pp")})
    embd, _ = dist.new_subgroups_by_enumeration([sorted(each) for each in ends])
    return ProcessGroupCollection(**found, expt_tp=found["tp"], expt_dp=found["dp"], embd=embd, pos_embd=None)


def model(
    pgs: ProcessGroupCollection,
    layers: int = 2,
    experts: int | None = None,
    tied: bool = False,
    first_stage: int | None = None,
    dtype: Any = torch.float32,
    **options: Any,
) -> GPTModel:
    """A small GPTModel; this rank's part of it. ``options`` are more of its configuration, or other values."""
    wanted: dict[str, Any] = dict(
        num_layers=layers,
        hidden_size=96,
        num_attention_heads=12,
        num_query_groups=12,
        ffn_hidden_size=192,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=True,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=pgs.tp.size(),
        pipeline_model_parallel_size=pgs.pp.size(),
        num_layers_in_first_pipeline_stage=first_stage,
        **(
            {}
            if experts is None
            else {
                "num_moe_experts": experts,
                "moe_ffn_hidden_size": 192,
                "expert_model_parallel_size": pgs.ep.size(),
                "moe_router_enable_expert_bias": True,
                "moe_router_score_function": "sigmoid",
                "moe_token_dispatcher_type": "alltoall",
            }
        ),
    )
    config = TransformerConfig(**(wanted | options))
    stage = pgs.pp.rank()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(
                num_experts=experts,
                moe_grouped_gemm=False,
                qk_layernorm=config.qk_layernorm,
                normalization=config.normalization,
            ),
            vocab_size=_VOCABULARY,
            max_sequence_length=8,
            pre_process=stage == 0,
            post_process=stage == pgs.pp.size() - 1,
            parallel_output=True,
            share_embeddings_and_output_weights=tied,
            position_embedding_type="rope",
            pg_collection=pgs,
        )


# ---- Weights --------------------------------------------------------------------------------------------------------


def tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and the buffers that are saved, without extra states."""
    found = dict(module.named_parameters())
    saved = {name for name, each in module.state_dict().items() if isinstance(each, torch.Tensor)}
    return found | {name: each for name, each in module.named_buffers() if name in saved}


def _global_name(name: str, module: GPTModel, tied: bool) -> str:
    """The name in a model that is on one rank, worked out from how layers and experts are dealt out."""
    pgs, config = module.pg_collection, module.config
    if tied and name == "output_layer.weight":
        name = "embedding.word_embeddings.weight"
    if layer := re.match(r"decoder\.layers\.(\d+)\.", name):
        stages, stage = pgs.pp.size(), pgs.pp.rank()
        first = config.num_layers_in_first_pipeline_stage
        if first is None:
            before = config.num_layers // stages * stage
        else:
            before = 0 if stage == 0 else first + (config.num_layers - first) // (stages - 1) * (stage - 1)
        name = f"decoder.layers.{before + int(layer[1])}.{name[layer.end() :]}"
    if expert := re.search(r"(?<=local_experts\.)\d+", name):
        before = config.num_moe_experts // pgs.ep.size() * pgs.ep.rank()
        name = f"{name[: expert.start()]}{before + int(expert[0])}{name[expert.end() :]}"
    return name


def expected(name: str, tensor: torch.Tensor, module: GPTModel, version: int, tied: bool = False) -> torch.Tensor:
    """What this rank's part has to be: every element of the whole has its own value, up to the dtype."""
    width, rank = module.pg_collection.tp.size(), module.pg_collection.tp.rank()
    dim = getattr(tensor, "partition_dim", -1) if getattr(tensor, "tensor_model_parallel", False) else -1
    shape = [n * (width if d == dim else 1) for d, n in enumerate(tensor.shape)]
    count = int(torch.tensor(shape).prod())
    start = zlib.crc32(_global_name(name, module, tied).encode()) % 9973 + 101 * version
    whole = (torch.arange(start, start + count, dtype=torch.float64) % 16381).reshape(shape).to(tensor.dtype)
    if dim < 0:
        return whole
    stripes = whole.chunk(max(1, tensor.partition_stride), dim)
    return torch.cat([stripe.chunk(width, dim)[rank] for stripe in stripes], dim)


def fill(module: GPTModel, version: int, tied: bool = False) -> None:
    """Gives every tensor its values."""
    with torch.no_grad():
        for name, tensor in tensors(module).items():
            tensor.copy_(expected(name, tensor, module, version, tied))


def poison(module: GPTModel) -> None:
    """Gives every element a value that none of ``fill`` has."""
    with torch.no_grad():
        for tensor in tensors(module).values():
            tensor.fill_(-7)


def differing(module: GPTModel, version: int, tied: bool = False) -> list[str]:
    """The names of tensors that are not what they have to be."""
    return [
        name
        for name, tensor in tensors(module).items()
        if not torch.equal(tensor, expected(name, tensor, module, version, tied))
    ]


def _from_checkpoint(name: str, c: dict[str, torch.Tensor], config: TransformerConfig, width: int) -> torch.Tensor:
    """A parameter of Megatron made from a checkpoint: of all tensor-parallel ranks, one after the other."""

    def padded(words: torch.Tensor) -> torch.Tensor:
        return torch.cat([words, torch.zeros(_VOCABULARY - len(words), words.shape[1])])

    if name == "embedding.word_embeddings.weight":
        return padded(c["model.embed_tokens.weight"])
    if name == "output_layer.weight":
        return padded(c["lm_head.weight"])
    if name == "decoder.final_layernorm.weight":
        return c["model.norm.weight"]
    _, _, layer, rest = name.split(".", 3)
    p = f"model.layers.{layer}."

    def of_mlp(stem: str, names: tuple[str, str, str], is_first: bool) -> torch.Tensor:
        gate, up, down = (c[f"{stem}{n}.weight"] for n in names)
        halves = zip(gate.chunk(width), up.chunk(width), strict=True)
        return torch.cat([part for both in halves for part in both]) if is_first else down

    if rest in ("input_layernorm.weight",):
        return c[p + rest]
    if rest == "pre_mlp_layernorm.weight":
        return c[p + "post_attention_layernorm.weight"]
    if rest.startswith("self_attention.linear_qkv."):
        last = rest.rpartition(".")[2]
        q, k, v = (c[f"{p}self_attn.{n}_proj.{last}"].chunk(config.num_query_groups) for n in "qkv")
        return torch.cat([part for group in zip(q, k, v, strict=True) for part in group])
    if rest == "self_attention.linear_proj.weight":
        return c[p + "self_attn.o_proj.weight"]
    if rest.endswith("_layernorm.weight"):
        return c[f"{p}self_attn.{rest.split('.')[1][0]}_norm.weight"]
    moe = p + ("block_sparse_moe." if p + "block_sparse_moe.gate.weight" in c else "mlp.")
    if rest == "mlp.router.weight":
        return c[moe + "gate.weight"]
    is_first = "linear_fc1" in rest
    if "local_experts" in rest:
        names = ("w1", "w3", "w2") if "block" in moe else ("gate_proj", "up_proj", "down_proj")
        return of_mlp(f"{moe}experts.{rest.split('.')[3]}.", names, is_first)
    return of_mlp(p + "mlp.", ("gate_proj", "up_proj", "down_proj"), is_first)


def fill_from_checkpoint(module: GPTModel, c: dict[str, torch.Tensor], is_tied: bool = False) -> None:
    """Gives every parameter the values of a checkpoint of Llama, Qwen3, Qwen3-MoE or Mixtral."""
    tp = module.pg_collection.tp
    with torch.no_grad():
        for name, p in module.named_parameters():
            plain = _global_name(name, module, is_tied)
            found = _from_checkpoint(plain, c, module.config, tp.size())
            dim = p.partition_dim if getattr(p, "tensor_model_parallel", False) else -1
            p.copy_(found.chunk(tp.size(), dim)[tp.rank()] if dim >= 0 else found)
