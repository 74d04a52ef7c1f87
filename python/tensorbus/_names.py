"""Models: how a rank's parameters are called in the whole model, and what they become. Nothing is sent here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import byref, c_char_p, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

from . import _values
from ._c import (
    lib,
    take_text,
    tb_match,
    tb_match_opts,
    tb_names_opts,
    tb_parts,
    tb_rule,
    tb_shape,
    tb_tie,
)
from ._errors import Invalid
from ._layout import Layout, layout


@dataclass(frozen=True, slots=True)
class Part:
    """A canonical tensor that is in a parameter; ``Batch.add`` takes its name and view."""

    param: str
    name: str
    view: str | None


def _texts(parameter: str, values: Any) -> list[bytes]:
    return [_values.text(f"an item of {parameter}", value) for value in _values.items(parameter, values)]


def _rule(rule: Any) -> tb_rule:
    if isinstance(rule, str | bytes) or not isinstance(rule, Sequence) or not 2 <= len(rule) <= 3:
        raise Invalid(f"a rule is a pattern, a name, and a view or none, not {rule!r}")
    match, name, view = (*rule, None)[:3]
    return tb_rule(
        _values.text("the pattern of a rule", match),
        _values.optional_text("the name of a rule", name),
        _values.optional_text("the view of a rule", view),
    )


def _numbers(parameter: str, values: Any) -> Any:
    listed = enumerate(_values.items(parameter, values))
    numbers = [_values.integer(f"item {i} of {parameter}", n, 0, _values.MOST_I64) for i, n in listed]
    return (c_int64 * len(numbers))(*numbers)


class Names:
    r"""How the parameters of one rank become canonical tensors, which both programs name alike.

    In this order: layers are numbered, experts are numbered, rules are applied. A rule is (pattern, name, view): ``*``
    in the pattern stands for any characters, ``\1`` to ``\9`` in the name for what the wildcards matched; without a
    name the old one stays. Rules in a row with the same pattern make several tensors of one parameter. The options are
    those of ``tb_names_opts``; docs/models.md explains them.

    >>> import tensorbus as tb
    >>> names = tb.Names(
    ...     [("*.gate_up", r"\1.gate", "slice(0, 0, 8)"), ("*.gate_up", r"\1.up", "slice(0, 8, 8)")],
    ...     layer_pattern="layers.#.", stage=1, nstages=2, nlayers=8,
    ... )
    >>> for part in names.resolve(["layers.0.gate_up"]):
    ...     print(part.name, part.view)
    layers.4.gate slice(0, 0, 8)
    layers.4.up slice(0, 8, 8)
    """

    def __init__(
        self,
        rules: Iterable[Sequence[str | None]] = (),
        *,
        layer_pattern: str | None = None,
        stage: int = 0,
        nstages: int = 0,
        chunk: int = 0,
        nchunks: int = 0,
        nlayers: int = 0,
        first_layers: Iterable[int] | None = None,
        expert_pattern: str | None = None,
        expert_rank: int = 0,
        nexpert_ranks: int = 0,
        nexperts: int = 0,
        expert_map: Iterable[int] | None = None,
    ) -> None:
        self._handle = c_void_p()
        c_rules = [_rule(rule) for rule in _values.items("rules", rules)]
        most, large = _values.MOST_I32, _values.MOST_I64
        opts = tb_names_opts(
            layer_pattern=_values.optional_text("layer_pattern", layer_pattern),
            stage=_values.integer("stage", stage, 0, most),
            nstages=_values.integer("nstages", nstages, 0, most),
            chunk=_values.integer("chunk", chunk, 0, most),
            nchunks=_values.integer("nchunks", nchunks, 0, most),
            nlayers=_values.integer("nlayers", nlayers, 0, large),
            expert_pattern=_values.optional_text("expert_pattern", expert_pattern),
            expert_rank=_values.integer("expert_rank", expert_rank, 0, most),
            nexpert_ranks=_values.integer("nexpert_ranks", nexpert_ranks, 0, most),
            nexperts=_values.integer("nexperts", nexperts, 0, large),
            rules=(tb_rule * len(c_rules))(*c_rules),
            nrules=len(c_rules),
        )
        if first_layers is not None:
            first = _numbers("first_layers", first_layers)
            wanted = max(opts.nchunks, 1) * opts.nstages  # the library can't see how many there are
            if len(first) != wanted:
                raise Invalid(f"first_layers has {len(first)} numbers; {wanted} stages of all chunks have one each")
            opts.first_layers = first
        if expert_map is not None:
            numbers = _numbers("expert_map", expert_map)
            opts.expert_map, opts.nexpert_map = numbers, len(numbers)
        lib.tb_names_create(byref(opts), byref(self._handle))

    def resolve(self, params: Iterable[str]) -> list[Part]:
        """The tensors that are in these parameters, in their order, then in that of the rules."""
        params = _values.items("params", params)
        c_params = _texts("params", params)
        parts = tb_parts()
        lib.tb_names_resolve(self._handle, (c_char_p * len(c_params))(*c_params), len(c_params), byref(parts))
        try:
            return [
                Part(params[p.param], p.name.decode(), p.text.decode() if p.text else None)
                for p in parts.part[: parts.count]
            ]
        finally:
            lib.tb_parts_fini(byref(parts))

    def __del__(self, destroy: Callable[..., None] = lib.tb_names_destroy) -> None:
        if handle := getattr(self, "_handle", None):
            destroy(handle)


@dataclass(frozen=True, slots=True)
class Match:
    """Which tensors of two sides belong together."""

    pairs: list[tuple[str, str]]  # source and target, in the targets' order; a source may serve several
    only_source: list[str]  # without what is ignored, or tied to something that matches
    only_target: list[str]


def match_names(
    source: Iterable[str],
    target: Iterable[str],
    *,
    ties: Mapping[str, str] | None = None,
    ignored: Iterable[str] = (),
    allow_unmatched: bool = False,
) -> Match:
    """Matches the names of two sides as a batch does. What is on one side only is ``Invalid``, unless it is allowed.

    ``ties`` maps names of tied weights to canonical ones: a target that the source lacks takes the canonical one, or
    another that is tied to it. ``ignored`` has patterns of names that may be on one side only.

    >>> import tensorbus as tb
    >>> tb.match_names(["embed", "norm"], ["embed", "head"], ties={"head": "embed"}, ignored=["norm"]).pairs
    [('embed', 'embed'), ('embed', 'head')]
    """
    ties = _values.mapping("ties", ties)
    c_source, c_target, c_ignored = _texts("source", source), _texts("target", target), _texts("ignored", ignored)
    c_ties = [tb_tie(_values.text("a tie", name), _values.text("a tie", other)) for name, other in ties.items()]
    opts = tb_match_opts(
        ties=(tb_tie * len(c_ties))(*c_ties),
        nties=len(c_ties),
        ignored=(c_char_p * len(c_ignored))(*c_ignored),
        nignored=len(c_ignored),
        allow_unmatched=_values.flag("allow_unmatched", allow_unmatched),
    )
    found = tb_match()
    lib.tb_match_names(
        (c_char_p * len(c_source))(*c_source),
        len(c_source),
        (c_char_p * len(c_target))(*c_target),
        len(c_target),
        byref(opts),
        byref(found),
    )
    try:
        sources, targets = [name.decode() for name in c_source], [name.decode() for name in c_target]
        n = found.nmatched
        return Match(
            [(sources[i], targets[j]) for i, j in zip(found.source[:n], found.target[:n], strict=True)],
            [sources[i] for i in found.only_source[: found.nonly_source]],
            [targets[i] for i in found.only_target[: found.nonly_target]],
        )
    finally:
        lib.tb_match_fini(byref(found))


def apply_view(view: str, shape: Any, its_layout: str | Layout) -> tuple[tuple[int, ...], Layout]:
    """The global shape and the layout of a stored tensor as a view shows it: those of the canonical tensor.

    >>> import tensorbus as tb
    >>> tb.apply_view("split(0, 4, 8)", (32, 16), "mesh=2 place=Shard(0)")
    ((4, 8, 16), tensorbus.layout('mesh=2 place=Shard(0)'))
    """
    parsed, made, out = c_void_p(), c_void_p(), tb_shape()
    c_shape, c_layout = _values.shape("shape", shape), layout(its_layout)
    lib.tb_view_parse(_values.text("view", view), byref(parsed))
    try:
        lib.tb_view_apply(parsed, byref(c_shape), c_layout._handle, byref(out), byref(made))
        return tuple(out.dim[: out.ndim]), layout(take_text(lib.tb_layout_format, made))
    finally:
        lib.tb_layout_destroy(made)
        lib.tb_view_destroy(parsed)
