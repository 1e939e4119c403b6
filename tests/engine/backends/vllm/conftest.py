"""vLLM on a CPU, where it is installed: in one process unless a test starts its own."""

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.engine.backends.vllm.simulator import Simulator

Make = Callable[..., "Simulator"]

if find_spec("vllm") is not None:
    # vLLM reads this when it is imported, so it is set before any test module. Other tests don't
    # see it.
    os.environ.update(
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1",
        TRANSFORMERS_OFFLINE="1",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="0",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="WARNING",
        VLLM_NO_USAGE_STATS="1",
    )


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.engine.backends.vllm.models import write_llama

    return write_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.engine.backends.vllm.models import write_gemma

    return write_gemma(tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="session")
def qwen3_next(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.engine.backends.vllm.models import write_qwen3_next

    return write_qwen3_next(tmp_path_factory.mktemp("qwen3_next"))


@pytest.fixture(params=[1, 2], ids=["scheduler", "async-scheduler"])
def make(request: pytest.FixtureRequest, llama: Path) -> Iterator[Make]:
    """Makes simulators of vLLM's synchronous scheduler, and then of its asynchronous one.

    At the end every reference in their pools is a lease's.
    """
    from tests.engine.backends.vllm.simulator import Simulator

    simulators: list[Simulator] = []

    def make(**options: Any) -> Simulator:
        simulators.append(Simulator(llama, depth=request.param, **options))
        return simulators[-1]

    yield make
    for sim in simulators:
        sim.check_refs()
