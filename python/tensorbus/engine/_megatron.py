"""Models of megatron-core as sources: names of checkpoints, and layouts for tensor, pipeline and expert parallelism."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .._errors import Invalid, Refused
from .._module import Watch, plain_name
from .._tensors import View, read
from ._source import EXPERTS, RENAMED, Source

_Seat = tuple[int, int, int, int, int, int]  # of tp, pp and ep: a rank's tensor-parallel rank and size, its stage, ...

# Names in a layer of a checkpoint. What is fused with a norm, as Transformer Engine has it, has two names.
_IN_LAYER: Mapping[str, str] = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
    "mlp.shared_experts.linear_fc2.weight": "mlp.shared_experts.down_proj.weight",
}
_BESIDE: Mapping[str, str] = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.linear_fc([12])\.weight|linear_fc([12])\.weight(\d+))")


@dataclass(slots=True)
class _Ranks:
    """Which ranks of the trainer have what this rank has."""

    seats: Sequence[_Seat]
    mine: int

    def layout(self, placement: str, *, is_expert: bool) -> str:
        """Of a parameter of this rank: ``placement`` over tensor parallelism, or "R"; the others have copies."""
        me = self.seats[self.mine]
        by_place: dict[int, list[int]] = {}
        for rank, seat in enumerate(self.seats):
            if seat[2] == me[2] and (not is_expert or seat[3] == me[3]):
                by_place.setdefault(seat[4] if is_expert else seat[0], []).append(rank)
        copies = {len(ranks) for ranks in by_place.values()}
        size = me[5] if is_expert else me[1]
        if len(copies) != 1 or sorted(by_place) != list(range(size)):
            raise Refused(f"stage {me[2]} of the pipeline has tensor-parallel groups that differ")
        ranks = [by_place[place][copy] for copy in range(copies.pop()) for place in range(size)]
        mesh = f"mesh={len(ranks) // size},{size} place=R,{placement}"
        return f"{mesh} ranks={','.join(map(str, ranks))}"


@dataclass(slots=True)
class _Maker:
    """What is made of one rank's part of a model."""

    config: Any
    ranks: _Ranks
    kind: str
    vocabulary: int | None
    source: Source = field(default_factory=Source)

    def add(self, name: str, view: View, parameter: Any, first_expert: int) -> None:
        """Adds a parameter, whose name has the layer's number in the whole model."""
        if name in _BESIDE:
            self._add_rows(_BESIDE[name], view, parameter)
            return
        found = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name)
        layer, own = (f"model.layers.{found[1]}.", found[2]) if found else ("", name)
        if found and (expert := _EXPERT.fullmatch(own)):
            number = first_expert + int(expert[1] or expert[4])
            gate, up, down = EXPERTS.get(self.kind, ("gate_proj", "up_proj", "down_proj"))
            stem = f"{layer}mlp.experts.{number}"
            if (expert[2] or expert[3]) == "1":
                self._add_halves((f"{stem}.{gate}.weight", f"{stem}.{up}.weight"), view, parameter, is_expert=True)
            else:
                self._put(f"{stem}.{down}.weight", self._whole(view, parameter, is_expert=True))
        elif found and own in _IN_LAYER:
            self._put(layer + _IN_LAYER[own], self._whole(view, parameter))
        elif found and (part := re.fullmatch(r"mlp\.(shared_experts\.)?linear_fc1\.weight", own)):
            stem = f"{layer}mlp.{part[1] or ''}"
            self._add_halves((f"{stem}gate_proj.weight", f"{stem}up_proj.weight"), view, parameter)
        elif found and (part := re.fullmatch(r"self_attention\.linear_qkv\.(weight|bias)", own)):
            names = tuple(f"{layer}self_attn.{n}_proj.{part[1]}" for n in "qkv")
            self._add_heads(names, view, parameter)
        else:
            raise Refused(f"no name in checkpoints is known for megatron-core's parameter '{name}'")

    def _put(self, name: str, view: View, text: str | None = None) -> None:
        old, new = RENAMED.get(self.kind, ("", ""))
        self.source.tensors[name.replace(old, new, 1) if old else name] = (view, text)

    def _whole(self, view: View, parameter: Any, *, is_expert: bool = False) -> View:
        """A parameter that is in checkpoints as it is, cut over tensor parallelism as it says itself."""
        size = self.ranks.seats[self.ranks.mine][5 if is_expert else 1]
        dim = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else -1
        if dim < 0 or size == 1:
            whole, placement = view.shape, "R"
        else:
            whole = tuple(n * (size if d == dim else 1) for d, n in enumerate(view.shape))
            placement = f"S{dim}"
        return replace(view, global_shape=whole, layout=self.ranks.layout(placement, is_expert=is_expert))

    def _add_rows(self, name: str, view: View, parameter: Any) -> None:
        """A matrix of the vocabulary, which may be padded."""
        made = self._whole(view, parameter)
        rows = (made.global_shape or made.shape)[0]
        padding = 0 if self.vocabulary is None or len(made.shape) < 2 else rows - self.vocabulary
        if padding < 0:
            raise Invalid(f"'{name}' has {rows} rows, fewer than vocabulary={self.vocabulary}")
        self._put(name, made, f"pad(0,0,{padding})" if padding else None)

    def _add_halves(self, names: tuple[str, str], view: View, parameter: Any, *, is_expert: bool = False) -> None:
        """Gate and up: each tensor-parallel rank has its rows of the one, then those of the other."""
        if not self.config.gated_linear_unit:
            raise Refused(f"'{names[0]}' and '{names[1]}' are not in one parameter without gated_linear_unit")
        made = self._whole(view, parameter, is_expert=is_expert)
        half, size = view.shape[0] // 2, (made.global_shape or made.shape)[0] // view.shape[0]
        for i, name in enumerate(names):
            self._put(name, made, f"split(0,{size},{2 * half}) slice(1,{i * half},{half}) merge(0,1)")

    def _add_heads(self, names: Sequence[str], view: View, parameter: Any) -> None:
        """Query, key and value: for each group of heads its queries, its key, its value.

        Where a rank has several groups, the rows of one name lie apart; they are copied together before each version.
        """
        config, made = self.config, self._whole(view, parameter)
        groups, heads = config.num_query_groups, config.num_attention_heads
        size = (made.global_shape or made.shape)[0] // view.shape[0]
        if groups % size:
            raise Refused(f"'{names[0]}': {groups} groups of heads are not cut into whole ones by {size} ranks")
        one = config.kv_channels
        rows = (heads // groups * one, one, one)
        if sum(rows) * groups != view.shape[0] * size:
            raise Refused(f"'{names[0]}': linear_qkv has {view.shape[0] * size} rows, and not {sum(rows) * groups}")
        at = 0
        for name, n in zip(names, rows, strict=True):
            if groups == size:
                self._put(name, made, f"split(0,{groups},{sum(rows)}) slice(1,{at},{n}) merge(0,1)")
            else:
                self._copy(name, made, parameter, sum(rows), at, n)
            at += n

    def _copy(self, name: str, made: View, parameter: Any, group: int, at: int, n: int) -> None:
        rest = tuple(parameter.shape[1:])
        copied = torch.empty((len(parameter) // group * n, *rest), dtype=parameter.dtype, device=parameter.device)

        def copy() -> None:
            with torch.no_grad():
                copied.view(-1, n, *rest).copy_(parameter.detach().view(-1, group, *rest)[:, at : at + n])

        copy()
        self.source.copies.append(copy)
        whole = ((made.global_shape or made.shape)[0] // group * n, *rest)
        self._put(name, replace(read(copied), global_shape=whole, layout=made.layout))


def from_megatron(model: Any, *, kind: str = "", vocabulary: int | None = None, group: Any = None) -> Source:
    """A GPTModel of megatron-core, or the list of this rank's chunks of it, under tensor, pipeline, expert and data
    parallelism: its parameters under the names that checkpoints have.

    Every rank of the trainer calls it, at the same time; ranks are those of ``group``, by default of all processes of
    ``torch.distributed``. ``kind`` is the
    ``model_type`` of the checkpoint's configuration, where names depend on it ("mixtral"). ``vocabulary`` is the size
    of the vocabulary without Megatron's padding.
    """
    chunks = list(model) if isinstance(model, list | tuple) else [model]
    cores = [_core(chunk) for chunk in chunks]
    config = cores[0].config
    for is_used, what in (
        (config.multi_latent_attention, "multi-latent attention"),
        (getattr(config, "rotary_interleaved", False), "rotary_interleaved: rows are in another order in checkpoints"),
        (getattr(config, "layernorm_zero_centered_gamma", False), "layernorm_zero_centered_gamma"),
    ):
        if is_used:
            raise Refused(f"no checkpoint's form is known for a model with {what}")
    seats = _exchange(_seat(cores[0].pg_collection), group)
    maker = _Maker(config, seats, kind, vocabulary)
    for core in cores:
        watch = Watch(core, buffers=True, reshard=False, ranks=None, mesh=None)
        maker.source.watches.append(watch)
        parameters = {plain_name(n): t for n, t in [*core.named_parameters(), *core.named_buffers()]}
        numbers = [layer.layer_number - 1 for layer in core.decoder.layers]
        is_tied = core.share_embeddings_and_output_weights
        first = 0
        if config.num_moe_experts:
            _, _, _, ep, _, _ = seats.seats[seats.mine]
            first = ep * (config.num_moe_experts // core.pg_collection.ep.size())
        for name, view in watch.views.items():
            if name.endswith(".router.local_tokens_per_expert") or (is_tied and _is_copy(core, name)):
                continue
            maker.add(_in_whole(name, numbers), view, parameters[name], first)
    return maker.source


def _core(chunk: Any) -> Any:
    """The GPTModel in what wraps it: DistributedDataParallel, Float16Module."""
    while not hasattr(chunk, "decoder") and hasattr(chunk, "module"):
        chunk = chunk.module
    if not hasattr(chunk, "decoder") or getattr(chunk, "pg_collection", None) is None:
        raise Invalid(f"the model must be a GPTModel of megatron-core, not {type(chunk).__name__}")
    return chunk


def _is_copy(core: Any, name: str) -> bool:
    """Whether this is the last stage's copy of the embeddings, or the name of nothing."""
    return name == "output_layer.weight" or (name.startswith("embedding.") and not core.pre_process)


def _in_whole(name: str, numbers: Sequence[int]) -> str:
    """A parameter's name with the number that its layer has in the whole model."""
    change: Callable[[re.Match[str]], str] = lambda found: f"decoder.layers.{numbers[int(found[1])]}."  # noqa: E731
    return re.sub(r"^decoder\.layers\.(\d+)\.", change, name)


def _seat(groups: Any) -> _Seat:
    expert, ep = getattr(groups, "expt_tp", None) or groups.tp, getattr(groups, "ep", None)
    return (
        groups.tp.rank(),
        groups.tp.size(),
        groups.pp.rank(),
        ep.rank() if ep is not None else 0,
        expert.rank(),
        expert.size(),
    )


def _exchange(mine: _Seat, group: Any) -> _Ranks:
    seats: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(seats, mine, group=group)
    return _Ranks(seats, torch.distributed.get_rank(group))
