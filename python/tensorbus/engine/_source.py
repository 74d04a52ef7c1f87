"""What a trainer sends: parameters of a module, or a checkpoint's files, under the names of the checkpoint."""

from __future__ import annotations

import json
import math
import mmap
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from .._batch import Batch
from .._dtensor import RankMap
from .._errors import Invalid
from .._module import Watch, copy_moved
from .._pair import Pair
from .._tensors import read

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in a file."""

    dtype: Any
    shape: tuple[int, ...]
    begin: int  # of its bytes in the file


def _files(folder: Path) -> Iterator[tuple[Path, dict[str, _Stored]]]:
    """The files of a checkpoint in safetensors' format, and their tensors."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Invalid(f"{index} has no weight_map that could be read: {type(error).__name__}: {error}") from error
    else:
        files = sorted(folder.glob("*.safetensors"))
    for file in files:
        with file.open("rb") as opened:
            nbytes = int.from_bytes(opened.read(8), "little")
            total = file.stat().st_size
            if total < 8 or nbytes > total - 8:
                raise Invalid(f"{file} is no whole file in safetensors' format: it has {total} bytes")
            text = opened.read(nbytes)
        try:
            header = json.loads(text)
            header.pop("__metadata__", None)
            stored = {name: _read_entry(name, entry, 8 + nbytes, total) for name, entry in header.items()}
        except Invalid as error:
            raise Invalid(f"{file}: {error}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Invalid(f"{file} has no header that could be read: {type(error).__name__}: {error}") from error
        yield file, stored


def _read_entry(name: str, entry: Any, first: int, total: int) -> _Stored:
    dtype, shape = _DTYPES.get(entry["dtype"]), tuple(map(int, entry["shape"]))
    begin, end = (first + int(offset) for offset in entry["data_offsets"])
    if dtype is None:
        raise Invalid(f"tensor '{name}' has dtype {entry['dtype']}, which is none of {', '.join(_DTYPES)}")
    if not first <= begin <= end <= total:
        raise Invalid(f"the bytes of tensor '{name}' end at {end}, and the file at {total}")
    if math.prod(shape) * dtype.itemsize != end - begin:
        raise Invalid(f"tensor '{name}' has {end - begin} bytes, which are not {list(shape)} {entry['dtype']}")
    return _Stored(dtype, shape, begin)


def read_headers(folder: Path) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shape and dtype of each tensor of a checkpoint, by name; empty if the folder has none in safetensors' format."""
    return {name: (each.shape, each.dtype) for _, stored in _files(folder) for name, each in stored.items()}


@dataclass(slots=True)
class Source:
    """Something that can be added to a batch, on every rank of the trainer."""

    tensors: dict[str, tuple[Any, str | None]] = field(default_factory=dict)  # and a view; by the checkpoint's name
    ties: dict[str, str] = field(default_factory=dict)
    keep: list[Any] = field(default_factory=list)
    watches: list[Watch] = field(default_factory=list)  # modules that the tensors are parameters of
    copies: list[Callable[[], None]] = field(default_factory=list)  # what is done before each version

    def refresh(self) -> None:
        """Looks at parameters again, which may have moved; one that can't be sent as it was added is refused."""
        for watch in self.watches:
            copy_moved(watch.look(is_send=True), True, None)
        for copy in self.copies:
            copy()

    def add_to(self, batch: Batch, pair: Pair) -> None:
        """Adds its tensors; those that bring no layout are the same on all ranks."""
        for name, (tensor, view) in self.tensors.items():
            text = (read(tensor).layout or "mesh=SIZE place=R").replace("SIZE", str(pair.size))
            batch.add(pair, name, tensor, layout=text, view=view)


def from_checkpoint(folder: str | Path) -> Source:
    """A checkpoint in safetensors' format, whose files are mapped. Every rank of the trainer has the folder."""
    made = Source()
    for file, stored in _files(Path(folder)):
        with file.open("rb") as opened:
            data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        for name, each in stored.items():
            count = math.prod(each.shape)
            flat = torch.frombuffer(data, dtype=each.dtype, count=count, offset=each.begin) if count else None
            made.tensors[name] = (torch.empty(0, dtype=each.dtype) if flat is None else flat).view(each.shape), None
        made.keep.append(data)
    if not made.tensors:
        raise Invalid(f"{folder} has no files *.safetensors")
    return made


# Names of one expert's matrices in checkpoints, by model_type; transformers has them packed as gate_up_proj and
# down_proj. The default is that of Qwen, OLMoE, DeepSeek and others.
EXPERTS: Mapping[str, tuple[str, str, str]] = {"mixtral": ("w1", "w3", "w2")}
_PACKED_IN_CHECKPOINT = ("gpt_oss", "llama4_text")
RENAMED: Mapping[str, tuple[str, str]] = {"mixtral": (".mlp.", ".block_sparse_moe.")}


def from_module(module: Any, *, mesh: Any = None, ranks: RankMap | None = None, reshard: bool = False) -> Source:
    """A module's parameters: DTensors, of FSDP2 or tensor parallelism or both, and plain tensors, which all ranks have.

    Experts that transformers keeps packed get the names that checkpoints have for each. Nothing is gathered.
    """
    watch = Watch(module, buffers=False, reshard=reshard, ranks=ranks, mesh=mesh)
    kind = getattr(getattr(module, "config", None), "model_type", "")
    gate, up, down = EXPERTS.get(kind, ("gate_proj", "up_proj", "down_proj"))
    old, new = RENAMED.get(kind, ("", ""))
    made = Source(watches=[watch])
    made.ties = dict(watch.ties)
    for plain, view in watch.views.items():
        name = plain.replace(old, new, 1) if old else plain
        stem, _, last = name.rpartition(".")
        shape = view.global_shape or view.shape
        if last in ("gate_up_proj", "down_proj") and len(shape) == 3 and kind not in _PACKED_IN_CHECKPOINT:
            for e in range(shape[0]):
                one = f"slice(0,{e},1)"
                if last == "down_proj":
                    made.tensors[f"{stem}.{e}.{down}.weight"] = (view, f"{one} merge(0,1)")
                    continue
                half = shape[1] // 2
                made.tensors[f"{stem}.{e}.{gate}.weight"] = (view, f"{one} slice(1,0,{half}) merge(0,1)")
                made.tensors[f"{stem}.{e}.{up}.weight"] = (view, f"{one} slice(1,{half},{half}) merge(0,1)")
        else:
            made.tensors[name] = (view, None)
    return made


# Names of torchtitan's Llama in checkpoints.
_TORCHTITAN = (
    (r"tok_embeddings\.", "model.embed_tokens."),
    (r"norm\.", "model.norm."),
    (r"output\.", "lm_head."),
    (r"layers\.(\d+)\.attention\.w([qkvo])\.", r"model.layers.\1.self_attn.\2_proj."),
    (r"layers\.(\d+)\.feed_forward\.w1\.", r"model.layers.\1.mlp.gate_proj."),
    (r"layers\.(\d+)\.feed_forward\.w2\.", r"model.layers.\1.mlp.down_proj."),
    (r"layers\.(\d+)\.feed_forward\.w3\.", r"model.layers.\1.mlp.up_proj."),
    (r"layers\.(\d+)\.attention_norm\.", r"model.layers.\1.input_layernorm."),
    (r"layers\.(\d+)\.ffn_norm\.", r"model.layers.\1.post_attention_layernorm."),
)


def from_torchtitan(
    module: Any,
    *,
    heads: int,
    key_heads: int,
    mesh: Any = None,
    ranks: RankMap | None = None,
    reshard: bool = False,
) -> Source:
    """The parameters of torchtitan's Llama, as ``from_module``, under the names of checkpoints.

    Rotary embeddings turn neighbouring rows of a head there, and rows that lie half a head apart in checkpoints. The
    layout of query and key says where each row belongs, so that nothing is copied.
    """
    made = from_module(module, mesh=mesh, ranks=ranks, reshard=reshard)
    tensors = {}
    for plain, (view, text) in made.tensors.items():
        name = _rename(plain)
        if ".attention.wq." in plain or ".attention.wk." in plain:
            view = _in_halves(plain, view, heads if ".wq." in plain else key_heads)
        tensors[name] = (view, text)
    made.tensors = tensors
    made.ties = {_rename(name): _rename(canonical) for name, canonical in made.ties.items()}
    return made


def _rename(plain: str) -> str:
    for pattern, name in _TORCHTITAN:
        if re.match(pattern, plain):
            return re.sub(pattern, name, plain, count=1)
    raise Invalid(f"torchtitan's Llama has no parameter '{plain}'")


def _in_halves(name: str, view: Any, heads: int) -> Any:
    """The view with a layout in which rows 0, 1, 2, ... of a head are rows 0, n/2, 1, ... of the checkpoint's."""
    shape = view.global_shape or view.shape
    rows, odd = divmod(shape[0], heads)
    if odd or rows % 2:
        raise Invalid(
            f"parameter '{name}' has {shape[0]} rows, which are not {heads} heads with an even number of them"
        )
    order = (h * rows + half * (rows // 2) + i for h in range(heads) for i in range(rows // 2) for half in (0, 1))
    lists = ",".join(f"{at}-{at + 1}" for at in order)
    # The first placement is applied first: what follows cuts the list of rows by position, as it has cut the rows.
    whole = view.layout or "mesh=SIZE place=R"
    text = whole.replace("mesh=", "mesh=1,", 1).replace("place=", f"place=Explicit(0,{lists}),", 1)
    return replace(view, layout=text)


def as_source(source: Any) -> Source:
    """What a trainer may have: a module, a checkpoint's folder, or a source."""
    if isinstance(source, torch.nn.Module):
        return from_module(source)
    if isinstance(source, str | Path):
        return from_checkpoint(source)
    if isinstance(source, Source):
        return source
    raise Invalid(
        "source must be a torch.nn.Module, a checkpoint's folder or a tensorbus.engine.Source, not "
        f"{type(source).__name__}"
    )
