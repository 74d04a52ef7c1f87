import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "tests_torch"), str(HERE.parent / "tests_vllm")]
os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

from ran import pytest_runtest_logreport, pytest_sessionfinish  # noqa: E402, F401
