"""``tensorbus explain``: how each parameter of an engine would get its weights from a trainer, before either runs.

Headers of a checkpoint and config.json are enough; vLLM's own loaders are traced, so that vLLM has to be installed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import _values
from ._errors import Error, Invalid, Refused
from ._layout import layout, plan

if TYPE_CHECKING:
    from .engine import Trace

STAGING = 256 << 20  # of each rank, by default

# How PyTorch's tensor parallelism cuts the matrices of transformers; everything else is on all ranks.
_ROWS = re.compile(r"\.(q|k|v|gate|up|gate_up|qkv)_proj\.(weight|bias)$|\.(w1|w3)\.weight$")
_COLUMNS = re.compile(r"\.(o|down)_proj\.weight$|\.w2\.weight$")

Headers = Mapping[str, tuple[tuple[int, ...], Any]]


@dataclass(frozen=True)
class Trainer:
    """Who sends: fsdp ranks by tp ranks, or ``plain`` ranks that all have everything."""

    fsdp: int = 1
    tp: int = 1
    plain: int = 0
    folder: str | None = None

    @property
    def size(self) -> int:
        """How many ranks it has."""
        return self.plain or self.fsdp * self.tp

    def layout(self, name: str, ndim: int) -> str:
        """The layout of a tensor, as PyTorch's FSDP2 and tensor parallelism cut it."""
        if self.plain or ndim == 0:
            return f"mesh={self.size} place=R"
        dim = 0 if _ROWS.search(name) else 1 if _COLUMNS.search(name) and ndim > 1 else None
        if dim is None or self.tp == 1:
            return f"mesh={self.fsdp},{self.tp} place=S0,R"
        ranks = [f * self.tp + t for t in range(self.tp) for f in range(self.fsdp)]  # tensor parallelism cuts first
        return f"mesh={self.tp},{self.fsdp} place=S{dim},S0 ranks={','.join(map(str, ranks))}"


@dataclass
class Parameter:
    """A parameter of the engine."""

    name: str
    way: str  # "direct", "quantised" or "fallback"
    why: str
    dtype: str
    sources: list[str]  # checkpoint tensors
    casts: list[str]
    nbytes: list[int]  # on each rank of the engine


@dataclass
class Explanation:
    """What an update would do."""

    trainer: int  # ranks
    engine: int
    parameters: list[Parameter]
    unused: list[str]
    only_in_trainer: list[str]
    only_in_checkpoint: list[str]
    misshaped: list[str]
    traffic: list[list[int]]  # bytes from each rank of the trainer to each of the engine
    egress: list[int]  # that each rank of the trainer sends; what goes to several ranks at once counts once
    shadow: list[int]  # memory that each rank of the engine needs beside its parameters
    whole: int  # bytes of tensors for the engine's own loader, on each rank
    bandwidth: float  # bytes a second of one rank
    bandwidth_is_measured: bool
    staging: int = STAGING
    notes: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The time of the busiest rank, which sends or receives."""
        received = [sum(row[e] for row in self.traffic) for e in range(self.engine)]
        return max([*self.egress, *received, 0]) / self.bandwidth

    def to_json(self) -> str:
        """All of it."""
        return json.dumps(asdict(self) | {"seconds": self.seconds}, indent=1)


def parse_trainer(text: str) -> Trainer:
    """What --trainer says.

    >>> parse_trainer("fsdp:4,tp:2").size
    8
    """
    if text and Path(text).is_dir():
        return Trainer(plain=1, folder=text)
    sizes: dict[str, int] = {}
    for part in text.split(","):
        kind, _, number = part.partition(":")
        if kind not in ("fsdp", "tp", "plain") or not number.isdecimal() or int(number) < 1 or kind in sizes:
            raise Invalid(f"--trainer {text}: there are fsdp:N, tp:N, fsdp:N,tp:M, plain:N and a checkpoint's folder")
        sizes[kind] = int(number)
    if "plain" in sizes and len(sizes) > 1:
        raise Invalid(f"--trainer {text}: plain stands alone")
    return Trainer(sizes.get("fsdp", 1), sizes.get("tp", 1), sizes.get("plain", 0))


def parse_engine(text: str) -> tuple[Path, int]:
    """What --engine says: the model's folder, and tensor parallelism."""
    kind, _, rest = text.partition(":")
    folder, _, number = rest.rpartition(",tp=")
    if not folder:
        folder, number = rest, "1"
    if kind != "vllm" or not folder or not number.isdecimal() or int(number) < 1:
        raise Invalid(f"--engine {text}: it is vllm:MODEL_DIR,tp=N")
    if not (Path(folder) / "config.json").exists():
        raise Invalid(f"--engine {text}: {folder} has no config.json")
    return Path(folder), int(number)


def explain(
    trainer: Trainer,
    traces: Sequence[Trace],
    params: Sequence[Mapping[str, tuple[str, int]]],
    *,
    quantised: Mapping[str, str] | None = None,
    held: Headers | None = None,
    bandwidth: float | None = None,
) -> Explanation:
    """What an update of an engine would do, by the traces of its ranks.

    ``params`` has dtype and bytes of each parameter of each rank. ``held`` are shapes and dtypes of the trainer's
    tensors, if they are not the checkpoint's.
    """
    from .engine import make_targets

    targets = make_targets(traces)
    checkpoint = {name: (traces[0].shapes[name], traces[0].dtypes[name]) for name in traces[0].shapes}
    held = checkpoint if held is None else held
    parameters = _parameters(traces, params, targets, quantised or {}, held)
    traffic = [[0] * len(traces) for _ in range(trainer.size)]
    egress = [0] * trainer.size
    used = {target.source for target in targets.tensors}
    misshaped = sorted(n for n in used & set(held) if tuple(held[n][0]) != tuple(checkpoint[n][0]))
    dtypes = _landing_dtypes(params, targets)
    for target in targets.tensors:
        if target.source not in held or target.source in misshaped:
            continue
        dtype = held[target.source][1]
        lands = dtypes.get(target.name, str(checkpoint[target.source][1]))
        _add_traffic(traffic, egress, trainer, target, dtype, lands)
    whole = sum(_nbytes(t.shape, checkpoint[t.source][1]) for t in targets.tensors if t.pieces is None)
    live = [
        {p.param for t in targets.tensors for r, p in (t.pieces or {}).items() if r == e} for e in range(len(traces))
    ]
    measured = bandwidth is None
    return Explanation(
        trainer.size,
        len(traces),
        parameters,
        targets.unused,
        sorted(set(held) - set(checkpoint)),
        sorted(used - set(held)),
        misshaped,
        traffic,
        egress,
        [sum(params[e][name][1] for name in sorted(names)) + whole for e, names in enumerate(live)],
        whole,
        _measure() if bandwidth is None else bandwidth,
        measured,
        notes=[f"checkpoint tensor '{n}': {why}" for one in traces for n, why in one.failed.items()],
    )


def _parameters(traces: Any, params: Any, targets: Any, quantised: Mapping[str, str], held: Headers) -> list[Parameter]:
    sources: dict[str, set[str]] = {}
    for one in traces:
        for module in one.modules.values():
            for piece in module.pieces:
                sources.setdefault(piece.param, set()).add(piece.source)
    of_module = {module.name: sorted(module.sources) for one in traces for module in one.modules.values()}
    found = []
    for name in dict.fromkeys(name for ranks in params for name in ranks):
        module = name.rpartition(".")[0]
        dtype = next(ranks[name][0] for ranks in params if name in ranks)
        reason = targets.reasons.get(module)
        if module not in of_module:
            way, why = "fallback", "no checkpoint tensor is loaded into it"
        elif reason is not None:
            way, why = "fallback", reason
        elif module in quantised:
            way, why = "quantised", f"{quantised[module]}: its direct copies stand only if it leaves them as they are"
        else:
            way, why = "direct", "each element is copied once, and random bits agree with the loader"
        its = sorted(sources.get(name, ())) if reason is None else of_module.get(module, [])
        casts = sorted(
            {f"{_short(held[s][1])} to {_short(dtype)}" for s in its if s in held}
            - {f"{_short(dtype)} to {_short(dtype)}"}
        )
        found.append(
            Parameter(name, way, why, _short(dtype), its, casts, [ranks.get(name, ("", 0))[1] for ranks in params])
        )
    return found


def _landing_dtypes(params: Any, targets: Any) -> dict[str, str]:
    """The engine's dtype of each target that goes the direct way."""
    return {
        t.name: params[e][p.param][0]
        for t in targets.tensors
        for e, p in (t.pieces or {}).items()
        if p.param in params[e]
    }


def _add_traffic(traffic: Any, egress: list[int], trainer: Trainer, target: Any, sent: Any, lands: str) -> None:
    bits = min(
        _values.dtype_bits(_values.dtype("dtype", _short(sent))),
        _values.dtype_bits(_values.dtype("dtype", _short(lands))),
    )
    dst = layout(target.layout)
    text = str(dst).split(" ranks=")[0] + " ranks=" + ",".join(str(rank + trainer.size) for rank in dst.ranks)
    made = plan(trainer.layout(target.source, len(target.shape)), text, target.shape, "u8")
    for seat in dst.ranks:
        for route in made.routes(seat + trainer.size):
            if route.source is not None and seat + trainer.size in route.targets:
                n = bits // 8
                for length in route.lengths:
                    n *= length
                traffic[route.source][seat] += n
    for rank, count in made.stats().egress_bytes.items():
        if rank < trainer.size:
            egress[rank] += count * bits // 8


def _short(dtype: Any) -> str:
    return _values.dtype_name(_values.dtype("dtype", str(dtype).removeprefix("torch.")))


def _nbytes(shape: Sequence[int], dtype: Any) -> int:
    n: int = dtype.itemsize
    for length in shape:
        n *= length
    return n


def _measure() -> float:
    """Bytes a second that one thread copies from memory to memory here: what ranks of one machine can move at most."""
    import torch

    a = torch.ones(64 << 20, dtype=torch.uint8)
    b = torch.empty_like(a)
    best = float("inf")
    for _ in range(4):
        began = time.perf_counter()
        b.copy_(a)
        best = min(best, time.perf_counter() - began)
    return float(a.numel() / best)


# ---- Output ---------------------------------------------------------------------------------------------------------


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError


def _stars(text: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", text)


def to_text(e: Explanation) -> str:
    """For people: parameters whose names differ in numbers only are one line."""
    groups: dict[tuple[str, ...], list[Parameter]] = {}
    for p in e.parameters:
        key = (_stars(p.name), p.way, _stars(p.why), p.dtype, ", ".join(p.casts))
        groups.setdefault(key, []).append(p)
    total = sum(sum(p.nbytes) for p in e.parameters) or 1
    direct = sum(sum(p.nbytes) for p in e.parameters if p.way == "direct")
    lines = [f"{direct / total:.1%} of the engine's bytes go the direct way", ""]
    width = max((len(name) for name, *_ in groups), default=0)
    for (name, way, why, dtype, casts), its in groups.items():
        count = f"{len(its)} x" if len(its) > 1 else ""
        nbytes = _size(max(sum(p.nbytes[r] for p in its) for r in range(e.engine)))
        cast = f"; cast from {casts}" if casts else ""
        sources = dict.fromkeys(_stars(source) for p in its for source in p.sources)
        lines.append(f"{name:{width}}  {count:>5}  {way:9}  {dtype:5} {nbytes:>10} a rank{cast}")
        lines.append(f"    from {', '.join(sources) or 'nothing'}")
        if way != "direct":
            lines.append(f"    {why}")
    for title, names in (
        ("not used by the engine", e.unused),
        ("the trainer has, and the checkpoint does not", e.only_in_trainer),
        ("the trainer lacks, and the engine needs: registration fails", e.only_in_checkpoint),
        ("the trainer has these in another shape: registration fails", e.misshaped),
        ("notes", e.notes),
    ):
        if names:
            lines += ["", f"{title}: {', '.join(names[:8])}{f', {len(names) - 8} more' if len(names) > 8 else ''}"]
    received = [sum(row[r] for row in e.traffic) for r in range(e.engine)]
    lines += ["", "trainer rank   sends"] + [f"{r:12}   {_size(n)}" for r, n in enumerate(e.egress)]
    lines += ["", "engine rank    receives     shadow memory"]
    lines += [f"{r:11}    {_size(n):11}  {_size(m)}" for r, (n, m) in enumerate(zip(received, e.shadow, strict=True))]
    how = "measured here, a copy in memory by one thread" if e.bandwidth_is_measured else "given"
    lines += [
        "",
        f"staging        at most {_size(e.staging)} a rank, where memory is not read in place",
        f"time           {e.seconds:.3g} s at {e.bandwidth / 1e9:.1f} GB/s a rank ({how}), by the busiest rank",
        "What vLLM does with modules after loading was not tried: the engine does, when it starts, and logs it.",
    ]
    return "\n".join(lines) + "\n"


def to_svg(e: Explanation) -> str:
    """A picture: bytes from each rank of the trainer (rows) to each rank of the engine (columns)."""
    cell_w, cell_h, left, top = 90, 28, 110, 50
    most = max((n for row in e.traffic for n in row), default=0) or 1
    width, height = left + cell_w * e.engine + 10, top + cell_h * e.trainer + 10
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<text x="{left}" y="18">bytes from trainer to engine</text>',
    ]
    out += [f'<text x="{left + cell_w * c + 8}" y="{top - 8}">engine {c}</text>' for c in range(e.engine)]
    for r, row in enumerate(e.traffic):
        y = top + cell_h * r
        out.append(f'<text x="8" y="{y + 18}">trainer {r}</text>')
        for c, n in enumerate(row):
            x, shade = left + cell_w * c, 255 - round(155 * n / most)
            out.append(
                f'<rect x="{x}" y="{y}" width="{cell_w - 2}" height="{cell_h - 2}" fill="rgb({shade},{shade},255)"/>'
            )
            out.append(f'<text x="{x + 8}" y="{y + 18}">{_size(n)}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def main(arguments: Sequence[str]) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser("tensorbus explain", description=__doc__.split("\n")[0].partition(": ")[2])
    parser.add_argument("--trainer", required=True, help="fsdp:N, tp:N, fsdp:N,tp:M, plain:N, or a checkpoint's folder")
    parser.add_argument("--engine", required=True, help="vllm:MODEL_DIR,tp=N; config.json and headers are read")
    parser.add_argument(
        "--bandwidth", metavar="GB", type=float, help="10^9 bytes a second of one rank; default: measured here"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--svg", metavar="FILE", help="write a picture of the bytes between ranks")
    given = parser.parse_args(arguments)
    try:
        if given.bandwidth is not None and not 0 < given.bandwidth < float("inf"):
            raise Invalid(f"--bandwidth {given.bandwidth}: it must be a number more than 0")
        trainer = parse_trainer(given.trainer)
        folder, size = parse_engine(given.engine)
        made = _explain_vllm(trainer, folder, size, given.bandwidth)
        if given.svg is not None:
            Path(given.svg).write_text(to_svg(made))
        sys.stdout.write(made.to_json() + "\n" if given.json else to_text(made))
    except (Error, OSError) as error:
        print(f"tensorbus explain: {error}", file=sys.stderr)
        return 2 if isinstance(error, Invalid) else 1
    return 0


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Keeps what vLLM logs, and libraries below it write to the descriptor, out of our own output."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _explain_vllm(trainer: Trainer, folder: Path, size: int, bandwidth: float | None) -> Explanation:
    try:
        with _stdout_to_stderr():
            import vllm  # noqa: F401
    except ImportError:
        raise Refused("vLLM is not installed here, whose loaders say where weights go; run it where vLLM is") from None
    from .engine import read_headers
    from .vllm import _offline

    held = None if trainer.folder is None else read_headers(Path(trainer.folder))
    for found, option in (held, f"--trainer {trainer.folder}"), (read_headers(folder), f"--engine vllm:{folder}"):
        if found == {}:
            raise Invalid(f"{option}: the folder has no files *.safetensors, whose headers are read")
    try:
        with _stdout_to_stderr():
            traces, params, quantised = _offline.trace(folder, size)
    except Exception as error:
        raise Refused(f"vLLM can't make the model of {folder}: {type(error).__name__}: {error}") from error
    return explain(
        trainer,
        traces,
        params,
        quantised=quantised,
        held=held,
        bandwidth=None if bandwidth is None else bandwidth * 1e9,
    )
