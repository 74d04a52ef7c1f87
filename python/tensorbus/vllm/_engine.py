"""vLLM's two classes of a weight transfer backend: the worker's engine, and the trainer's."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger

from .. import engine as tb_engine
from .._errors import Invalid, Refused
from ..engine._receiver import Receiver
from . import _reload

logger = init_logger("vllm.tensorbus")


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc] # vLLM has no types here
    """Where the trainer is met."""

    url: str
    group: str = "trainer"
    engine: str = "engine"
    token: str | None = None
    timeout: float = 120.0
    is_in_update: bool = False
    is_same_kind: bool = False


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """An update; version 0 gives up one that is open. With ``give``, the engine sends its version to another one."""

    version: int
    give: dict[str, Any] | None = None


class TensorbusWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """What a worker does: traces its model when it is made, receives beside the parameters, and votes in finish."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        options = (vllm_config.additional_config or {}).get("tensorbus", {})
        if not isinstance(options, dict) or options.keys() - {"shadow"}:
            raise Invalid(f"additional_config['tensorbus'] is {options!r}; it may be {{'shadow': ...}}")
        shadow = options.get("shadow", "device")
        self._refuse()
        self._is_giving = False
        headers = tb_engine.read_headers(Path(self.model_config.model))
        if not headers:
            raise Refused(
                f"{self.model_config.model} is no folder with files *.safetensors, whose headers say what the "
                "engine's loaders take"
            )
        from vllm.config import set_current_vllm_config

        loaded = self._loaded()
        with set_current_vllm_config(vllm_config):
            mine = tb_engine.trace(model, headers, restored=_reload.restored, process=_reload.process, loaded=loaded)
            # Sleep mode unmaps the memory of the parameters, and not what is allocated from here on.
            is_unmapped = shadow == "off" and bool(getattr(self.model_config, "enable_sleep_mode", False))
            rank = get_world_group().rank_in_group
            self._receiver = Receiver(model, self._gather(mine), rank, shadow, is_unmapped=is_unmapped)
            if loaded is not None:  # now, and not when a version is decided
                self._receiver.fill(loaded)
                self._load()
        logger.info("tensorbus: %s", mine.report())
        logger.info("tensorbus: %d bytes of memory for what arrives (shadow=%s)", self._receiver.shadow_nbytes, shadow)

    def _refuse(self) -> None:
        """What has no test is refused, by name."""
        parallel = self.parallel_config
        for is_used, what in (
            (getattr(parallel, "enable_eplb", False), "expert load balancing (enable_eplb) moves experts"),
            (self.vllm_config.lora_config is not None, "LoRA (enable_lora) wraps modules"),
            (parallel.data_parallel_size > 1, "data parallelism has not been tried"),
            (parallel.pipeline_parallel_size > 1, "pipeline parallelism has not been tried"),
        ):
            if is_used:
                raise Refused(f"tensorbus does not update this engine: {what}")

    def _loaded(self) -> dict[str, Any] | None:
        """The tensors of the checkpoint, mapped; None if vLLM has loaded something else."""
        if self.vllm_config.load_config.load_format not in ("auto", "safetensors", "hf"):
            return None
        source = tb_engine.from_checkpoint(self.model_config.model)
        return {name: tensor for name, (tensor, _) in source.tensors.items()}

    def _gather(self, mine: Any) -> list[Any]:
        world = get_world_group()
        if world.world_size == 1:
            return [mine]
        traces: list[Any] = [None] * world.world_size
        torch.distributed.all_gather_object(traces, mine, group=world.cpu_group)
        return traces

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Meets the trainer. Names and shapes that do not agree are named, before a byte moves."""
        self._receiver.join(**vars(init_info))

    def start_weight_update(self) -> None:
        """Nothing changes before ``finish_weight_update``."""
        self._is_giving = False

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receives a version beside the parameters."""
        if update_info.give is not None:
            self._receiver.give(**update_info.give)
            self._is_giving = True
            return
        if update_info.version == 0:
            raise Refused("the update is given up")
        self._receiver.receive()

    def finish_weight_update(self) -> None:
        """Votes: when all workers have, the parameters change. If it raises, keep the engine paused."""
        if self._is_giving:
            return
        done = self._receiver.commit()
        began = time.perf_counter()
        self._load()
        loading = time.perf_counter() - began
        logger.info(
            "tensorbus: version %d, paused for %.1f ms of %.1f ms (%.1f ms to copy, %.1f ms in vLLM's loader)",
            self._receiver.version,
            (done.pause + loading) * 1e3,
            (done.total + loading) * 1e3,
            done.pause * 1e3,
            loading * 1e3,
        )

    def _load(self) -> None:
        """Loads what does not go the direct way. Loaders may write to what they are given, and keep it."""
        weights = [(name, tensor.clone()) for name, tensor in self._receiver.whole.items()]
        _reload.load(self.model, self.model_config, weights, self._receiver.by_loader)

    def hashes(self) -> tb_engine.Hashes:
        """Of what this worker has, for ``tensorbus.engine.verify``. Pause the engine meanwhile."""
        return self._receiver.hashes(self._load_again)

    def compare(self, folder: str) -> tb_engine.Verified:
        """Whether this worker has what a checkpoint has. Pause the engine meanwhile."""
        return self._receiver.compare(folder, self._load_again)

    def _load_again(self) -> None:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):  # as in an update
            self._load()

    def shutdown(self) -> None:
        """Leaves the trainer."""
        self._receiver.close()

    @staticmethod
    def trainer_send_weights(_iterator: Any, _trainer_args: Any) -> None:
        """For vLLM before 0.28, where it is abstract."""
        raise Refused("use TensorbusTrainerWeightTransferEngine")


@dataclass
class TensorbusTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """Where trainer and engine meet, and how many ranks the trainer has."""

    backend: ClassVar[str] = "tensorbus"
    url: str
    world_size: int
    engine: str = "engine"
    token: str | None = None
    timeout: float = 120.0


class TensorbusTrainerWeightTransferEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """The trainer's side, on every rank. ``source`` is a module, a folder, or a ``tensorbus.engine.Source``."""

    init_info_cls = TensorbusTrainerInitInfo

    def __init__(self, *, client: Any, source: Any, is_sender: bool, sender: tb_engine.Sender) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self.sender = sender

    @classmethod
    def trainer_init(
        cls, init_info: TensorbusTrainerInitInfo, *, client: Any, source: Any = None
    ) -> TensorbusTrainerWeightTransferEngine:
        """Meets the engine, on every rank of the trainer."""
        made = tb_engine.as_source(source)
        sender = tb_engine.Sender(
            init_info.url,
            init_info.rank,
            init_info.world_size,
            made,
            client,
            engine=init_info.engine,
            token=init_info.token,
            timeout=init_info.timeout,
        )
        return cls(client=client, source=source, is_sender=init_info.is_sender, sender=sender)

    def send_weights(self, engine: str | None = None) -> None:
        """Sends a version to all engines, and makes their calls meanwhile; or what they have to one that joined late.

        One that fails does not keep the others from it; ``sender.failed`` has the failures. The first is raised.
        """
        self.sender.send(engine=engine)

    def add_engine(self, engine: str, client: Any = None) -> None:
        """Meets one more engine, or one that was started again, on every rank of the trainer; rank 0 has its client."""
        self.sender.add(engine, client)

    def remove_engine(self, engine: str) -> None:
        """Sends nothing to this engine any more."""
        self.sender.remove(engine)

    def shutdown(self) -> None:
        """Leaves the engine."""
        self.sender.close()
