"""SGLang's side: the custom weight loader, which every worker runs inside a weight-update session."""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import engine as tb_engine
from .._errors import Refused
from ..engine._record import Recorded
from ._call import Request, decode, tell

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Known:
    """What is there of a model that was traced."""

    traces: list[tb_engine.Trace]  # of all workers
    receiver: tb_engine.Receiver | None = None
    shadow: str = ""


_known: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()


def load(model: Any, named_tensors: Any) -> None:
    """Does what a trainer asks, by ``Trainer``, and tells it what became of that.

    What fails raises nothing here: SGLang would end its processes. The trainer raises it.
    """
    from sglang.srt.runtime_context import get_parallel

    request = decode(named_tensors)
    parallel = get_parallel()
    error = ""
    try:
        if request.version == 0:
            _begin(model, request, parallel)
        else:
            _update(model)
    except Exception as failed:
        logger.exception("tensorbus: version %d of '%s'", request.version, request.group)
        error = f"{type(failed).__name__}: {failed}"
    errors = _gather(error, parallel)
    if parallel.tp_rank == 0:
        try:
            told = "; ".join(f"tensor-parallel rank {rank}: {each}" for rank, each in enumerate(errors) if each)
            tell(request, told)
        except Exception:
            logger.exception("tensorbus: the trainer '%s' was not told what became of its request", request.group)


def _gather(mine: Any, parallel: Any) -> list[Any]:
    if parallel.tp_size == 1:
        return [mine]
    everyone: list[Any] = [None] * parallel.tp_size
    torch.distributed.all_gather_object(everyone, mine, group=parallel.tp_group.cpu_group)
    return everyone


def _begin(model: Any, request: Request, parallel: Any) -> None:
    """Traces the model when a trainer comes first, and meets the trainer."""
    _refuse(model, request.shadow)
    known = _known.get(model)
    if known is None:  # what was loaded from the checkpoint is there as long as no trainer has sent a version
        known = _known[model] = _Known(_trace_all(model, parallel))
        logger.info("tensorbus: %s", known.traces[parallel.tp_rank].report())
    receiver = known.receiver
    if receiver is None or known.shadow != request.shadow:
        if receiver is not None:
            receiver.close()
        receiver = known.receiver = tb_engine.Receiver(model, known.traces, parallel.tp_rank, request.shadow)
        known.shadow = request.shadow
        logger.info(
            "tensorbus: %d bytes of memory for what arrives (shadow=%s)", receiver.shadow_nbytes, request.shadow
        )
    receiver.join(
        request.url,
        request.group,
        request.engine,
        request.token,
        request.timeout,
        is_in_update=request.is_in_update,
    )


def _trace_all(model: Any, parallel: Any) -> list[Any]:
    from sglang.srt.model_loader.loader import post_load_weights

    mine: Any
    try:
        mine = _trace(model)
    except Exception as failed:
        logger.exception("tensorbus: the model could not be traced")
        mine = f"{type(failed).__name__}: {failed}"
    finally:
        post_load_weights(model)  # what loaders derive from weights was derived from random ones, too
    traces = _gather(mine, parallel)
    for rank, each in enumerate(traces):
        if isinstance(each, str):
            raise Refused(f"tensor-parallel rank {rank} has not traced its model: {each}")
    return traces


def _update(model: Any) -> None:
    """Receives a version, votes for it, and takes it when all workers have voted."""
    from sglang.srt.model_loader.loader import post_load_weights

    known = _known.get(model)
    if known is None or known.receiver is None:
        raise Refused("no trainer has been met")
    receiver = known.receiver
    receiver.receive()
    done = receiver.commit()
    began = time.perf_counter()
    if receiver.whole:  # loaders may write to what they are given, and keep it
        model.load_weights([(name, tensor.clone()) for name, tensor in receiver.whole.items()])
    post_load_weights(model)
    loading = time.perf_counter() - began
    logger.info(
        "tensorbus: version %d, paused for %.1f ms of %.1f ms",
        receiver.version,
        (done.pause + loading) * 1e3,
        (done.total + loading) * 1e3,
    )


def _trace(model: Any) -> tb_engine.Trace:
    from sglang.srt.runtime_context import get_context

    leaf = get_context().config_leaf
    folder = Path(leaf("model_path"))
    headers = tb_engine.read_headers(folder) if folder.is_dir() else {}
    if not headers:
        raise Refused(
            f"{folder} is no folder with files *.safetensors, whose headers say what the engine's loaders take"
        )
    loaded = None
    if str(leaf("load_format")) in ("auto", "safetensors"):
        loaded = {name: tensor for name, (tensor, _) in tb_engine.from_checkpoint(folder).tensors.items()}
    with _loading_in_one_thread():
        return tb_engine.trace(model, headers, process=_process, loaded=loaded)


def _refuse(model: Any, shadow: str) -> None:
    """What has no test is refused, by name."""
    from sglang.srt.runtime_context import get_context

    leaf = get_context().config_leaf
    for is_used, what in (
        (leaf("enable_eplb"), "expert load balancing (--enable-eplb) moves experts"),
        (leaf("enable_lora"), "LoRA (--enable-lora) wraps modules"),
        (leaf("pp_size") > 1, "pipeline parallelism has not been tried"),
        (leaf("dp_size") > 1, "data parallelism has not been tried"),
        (leaf("speculative_algorithm"), "speculative decoding has not been tried"),
        (leaf("cpu_offload_gb"), "weights in CPU memory (--cpu-offload-gb) have not been tried"),
        (
            leaf("quantization") or getattr(model, "quant_config", None) is not None,
            "quantised weights have not been tried",
        ),
        (
            shadow == "off" and leaf("enable_memory_saver"),
            "shadow='off' registers memory that --enable-memory-saver unmaps",
        ),
    ):
        if is_used:
            raise Refused(f"tensorbus does not update this engine: {what}")


def _process(module: Any) -> None:
    """What SGLang does with a module at the end of a weight-update session."""
    method = getattr(module, "quant_method", None)
    if method is not None:
        method.process_weights_after_loading(module)


@contextlib.contextmanager
def _loading_in_one_thread() -> Iterator[None]:
    """SGLang's loaders of experts copy CPU tensors in threads, where nothing is recorded, unless tensors say so."""
    Recorded._sglang_runai_streamer_tensor = True
    try:
        yield
    finally:
        del Recorded._sglang_runai_streamer_tensor
