"""vLLM's own tests of weight transfer that are written against its interface, with our classes in the place of its own.

upstream.py CHECKOUT: a checkout of vLLM with its tests. What needs its NCCL or IPC engines, or a GPU, is left out.
Where there is no ray, the tests get a stand-in for it. The exit status is 1 if a test failed.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

HERE = Path(__file__).parent
FILES = ("tests/v1/worker/test_gpu_worker_weight_transfer.py", "tests/distributed/test_weight_transfer.py")
CLASSES = (
    "TestEngineRegistry",
    "TestTrainerClients",
    "TestModuleSource",
    "TestTrainerFactory",
    "TestTrainerEngineBase",
)


def make_classes() -> tuple[type, type]:
    """Our engine, recording as their stand-in does, with a receiver that has no trainer; and our trainer's side."""
    from vllm.config import get_current_vllm_config

    import tensorbus.vllm

    class Engine(tensorbus.vllm.TensorbusWeightTransferEngine):  # type: ignore[misc]
        def __init__(self, raise_on_update: bool = False) -> None:
            self.started = self.finished = self.raise_on_update = raise_on_update
            self.reset_count = 0
            self.update_calls: list[Any] = []
            self.seen_configs: list[Any] = []
            self._receiver = MagicMock(whole={}, version=1)
            self._receiver.commit.return_value = MagicMock(pause=0.0, total=0.0)
            self._load = lambda: None
            if raise_on_update:
                self._receiver.receive.side_effect = ValueError("boom")

        def start_weight_update(self) -> None:
            self.seen_configs.append(get_current_vllm_config())
            super().start_weight_update()
            self.started = True

        def parse_update_info(self, update_dict: Any) -> Any:
            self.seen_configs.append(get_current_vllm_config())
            self.update_calls.append(update_dict)
            return super().parse_update_info({"version": 1})

        def finish_weight_update(self) -> None:
            self.seen_configs.append(get_current_vllm_config())
            super().finish_weight_update()
            self.finished = True

        def reset_weight_update_target(self) -> None:
            self.reset_count += 1

    class Trainer(tensorbus.vllm.TensorbusTrainerWeightTransferEngine):  # type: ignore[misc]
        def __init__(self, *, client: Any, source: Any, is_sender: bool = True, sender: Any = None) -> None:
            super().__init__(client=client, source=source, is_sender=is_sender, sender=sender or MagicMock())

        @classmethod
        def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Trainer:
            del init_info
            return cls(client=client, source=source)

    return Engine, Trainer


class Plugin:
    """Puts our classes in, leaves out what is not written against the interface, and prints how each test ended."""

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        engine, trainer = make_classes()
        left_out = [i for i in items if i.cls is not None and i.cls.__name__ not in CLASSES]
        left_out += [i for i in items if i.cls is None and i.path.name == Path(FILES[1]).name]
        left_out += [i for i in items if i.name.startswith("test_reload_parameter_lookup")]  # of LoRA alone
        for item in items:
            for name, ours in ("_RecordingEngine", engine), ("_DummyTrainerEngine", trainer):
                if hasattr(item.module, name):
                    setattr(item.module, name, ours)
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            print(f"\n{report.outcome:8} {report.nodeid}", flush=True)


def main(checkout: str) -> int:
    os.chdir(checkout)
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    import conftest  # noqa: F401 # vLLM's environment
    import torch
    import vllm.v1.worker.gpu_model_runner as runner

    if not hasattr(runner, "_get_parameter_for_reload"):
        runner._get_parameter_for_reload = None  # which tests of August 2026 import, and vLLM 0.32.0 lacks
    torch.accelerator.synchronize = lambda *_: None  # as vLLM's workers for CPUs do

    if importlib.util.find_spec("ray") is None:
        sys.modules["ray"] = MagicMock()
    import tensorbus.vllm

    tensorbus.vllm.register()
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", "-o", "addopts=", "--rootdir", checkout]
    return int(pytest.main([*options, *FILES], plugins=[Plugin()]))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(str(Path(sys.argv[1]).resolve())))
