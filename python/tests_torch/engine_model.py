"""A model whose loaders behave as those of inference engines do: one rank of a tensor-parallel engine.

Fused query, key and value rows with key heads that several ranks have; gate and up rows in one matrix; experts in one
stack; a vocabulary that is padded and cut; an output layer that is tied to it, or not; a norm whose loader adds one; a
matrix that is stored transposed; one that the checkpoint has fused; one that is repacked after loading; and a bias that
is zero on all ranks but the first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Config:
    hidden: int = 16
    heads: int = 4
    key_heads: int = 2
    head_dim: int = 4
    inner: int = 8
    experts: int = 3
    vocab: int = 10
    layers: int = 2
    tied: bool = False
    dtype: torch.dtype = torch.float32


def checkpoint_shapes(c: Config) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (c.vocab, c.hidden), "rotary.inv_freq": (4,)}
    for i in range(c.layers):
        p = f"layers.{i}."
        shapes |= {
            p + "norm.weight": (c.hidden,),
            p + "q.weight": (c.heads * c.head_dim, c.hidden),
            p + "k.weight": (c.key_heads * c.head_dim, c.hidden),
            p + "v.weight": (c.key_heads * c.head_dim, c.hidden),
            p + "o.weight": (c.hidden, c.heads * c.head_dim),
            p + "gate.weight": (c.inner, c.hidden),
            p + "up.weight": (c.inner, c.hidden),
            p + "down.weight": (c.hidden, c.inner),
            p + "conv.weight": (c.hidden, 1, 4),
            p + "both.weight": (2 * c.inner, c.hidden),
            p + "packed.weight": (c.hidden, c.hidden),
            p + "bias.weight": (c.hidden,),
        }
        for e in range(c.experts):
            shapes[p + f"experts.{e}.w1"] = shapes[p + f"experts.{e}.w3"] = (c.inner, c.hidden)
            shapes[p + f"experts.{e}.w2"] = (c.hidden, c.inner)
    if not c.tied:
        shapes["head.weight"] = (c.vocab, c.hidden)
    return shapes


def random_checkpoint(c: Config, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator).to(c.dtype) for n, s in checkpoint_shapes(c).items()}


class Weights(nn.Module):
    """A module with one parameter, of which ``load`` copies a checkpoint tensor's share."""

    def __init__(self, c: Config, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape, dtype=c.dtype), requires_grad=False)

    def load(self, part: str, loaded: torch.Tensor) -> None:
        assert part == "", part
        self.weight.data.copy_(loaded)


class Cut(Weights):
    """Cut along ``dim``."""

    def __init__(self, c: Config, rank: int, size: int, dim: int, *shape: int) -> None:
        super().__init__(c, *(n // size if d == dim else n for d, n in enumerate(shape)))
        self.rank, self.dim = rank, dim

    def load(self, part: str, loaded: torch.Tensor) -> None:
        n = self.weight.shape[self.dim]
        super().load(part, loaded.narrow(self.dim, self.rank * n, n))


class Vocabulary(Weights):
    """Cut, with rows for words that there are not, which are zero."""

    def __init__(self, c: Config, rank: int, size: int) -> None:
        self.rows = (c.vocab + 16) // 16 * 16 // size
        super().__init__(c, self.rows, c.hidden)
        self.first = rank * self.rows

    def load(self, _part: str, loaded: torch.Tensor) -> None:
        own = loaded[self.first : self.first + self.rows] if self.first < len(loaded) else loaded[:0]
        self.weight[: len(own)].data.copy_(own)
        self.weight[len(own) :].data.fill_(0)


class QKV(Weights):
    def __init__(self, c: Config, rank: int, size: int) -> None:
        self.rows = {"q": c.heads // size * c.head_dim}
        self.rows["k"] = self.rows["v"] = max(1, c.key_heads // size) * c.head_dim
        super().__init__(c, sum(self.rows.values()), c.hidden)
        copies = max(1, size // c.key_heads)
        self.at = {"q": rank, "k": rank // copies, "v": rank // copies}

    def load(self, part: str, loaded: torch.Tensor) -> None:
        n = self.rows[part]
        first = {"q": 0, "k": self.rows["q"], "v": self.rows["q"] + n}[part]
        self.weight.data.narrow(0, first, n).copy_(loaded.narrow(0, self.at[part] * n, n))


class GateUp(Weights):
    def __init__(self, c: Config, rank: int, size: int) -> None:
        super().__init__(c, 2 * c.inner // size, c.hidden)
        self.rank, self.size = rank, size

    def load(self, part: str, loaded: torch.Tensor) -> None:
        if part == "both":  # the checkpoint has them in one
            for name, half in zip(("gate", "up"), loaded.chunk(2), strict=True):
                self.load(name, half)
            return
        n = len(self.weight) // 2
        self.weight.data[{"gate": 0, "up": n}[part] :][:n] = loaded.unflatten(0, (self.size, -1)).unbind()[self.rank]


class Experts(nn.Module):
    def __init__(self, c: Config, rank: int, size: int) -> None:
        super().__init__()
        self.n, self.rank = c.inner // size, rank
        self.w13 = nn.Parameter(torch.zeros(c.experts, 2 * self.n, c.hidden, dtype=c.dtype), requires_grad=False)
        self.w2 = nn.Parameter(torch.zeros(c.experts, c.hidden, self.n, dtype=c.dtype), requires_grad=False)

    def load(self, part: str, loaded: torch.Tensor) -> None:
        expert, kind = part.split(".")
        first, n = self.rank * self.n, self.n
        if kind == "w2":
            self.w2.data[int(expert)].copy_(loaded[:, first : first + n].contiguous())
        else:
            rows = slice(0, n) if kind == "w1" else slice(n, None)
            self.w13.data[int(expert), rows].copy_(loaded[first : first + n])


class PlusOne(Weights):
    def load(self, part: str, loaded: torch.Tensor) -> None:
        super().load(part, loaded + 1)


class Bias(Weights):
    """Added by all ranks, so that one has it."""

    def __init__(self, c: Config, rank: int) -> None:
        super().__init__(c, c.hidden)
        self.rank = rank

    def load(self, part: str, loaded: torch.Tensor) -> None:
        if self.rank != 0:
            loaded.zero_()
        super().load(part, loaded)


class Conv(Weights):
    """Stored with other dims in another order."""

    def load(self, part: str, loaded: torch.Tensor) -> None:
        super().load(part, loaded.squeeze(1).t())


class Packed(Weights):
    """Turned over when it has been loaded."""

    def process(self) -> None:
        self.weight = nn.Parameter(self.weight.data.flip(0).contiguous(), requires_grad=False)


class Layer(nn.Module):
    def __init__(self, c: Config, rank: int, size: int) -> None:
        super().__init__()
        self.norm = PlusOne(c, c.hidden)
        self.qkv = QKV(c, rank, size)
        self.o = Cut(c, rank, size, 1, c.hidden, c.heads * c.head_dim)
        self.gate_up = GateUp(c, rank, size)
        self.down = Cut(c, rank, size, 1, c.hidden, c.inner)
        self.experts = Experts(c, rank, size)
        self.conv = Conv(c, 4, c.hidden)
        self.both = GateUp(c, rank, size)
        self.packed = Packed(c, c.hidden, c.hidden)
        self.bias = Bias(c, rank)


class Model(nn.Module):
    def __init__(self, c: Config, rank: int = 0, size: int = 1) -> None:
        super().__init__()
        self.config = c
        self.embed = Vocabulary(c, rank, size)
        self.layers = nn.ModuleList(Layer(c, rank, size) for _ in range(c.layers))
        self.head = Vocabulary(c, rank, size)
        if c.tied:
            self.head.weight = self.embed.weight

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, loaded in weights:
            if name.startswith("rotary."):
                continue
            if not name.startswith("layers."):
                getattr(self, name.split(".")[0]).load("", loaded)
                continue
            _, i, module, rest = name.split(".", 3)
            fused = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}
            part = rest if module == "experts" else module if module in fused or module == "both" else ""
            getattr(self.layers[int(i)], fused.get(module, module)).load(part, loaded)


def process(module: nn.Module) -> None:
    """What the engine does with a module after loading."""
    if isinstance(module, Packed):
        module.process()


def cold_load(c: Config, checkpoint: dict[str, torch.Tensor], rank: int = 0, size: int = 1) -> Model:
    model = Model(c, rank, size)
    model.load_weights((name, t.clone()) for name, t in checkpoint.items())
    for module in model.modules():
        process(module)
    return model


def reload(model: Model, weights: dict[str, torch.Tensor], modules: Iterable[str]) -> None:
    """Loads some modules again, as an engine does with those that are not written directly."""
    model.load_weights(weights.items())
    for name in modules:
        process(model.get_submodule(name))
