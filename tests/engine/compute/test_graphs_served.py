"""A whole engine with decode graphs: which settings have them, and that requests of all kinds are
answered as without."""

import shutil
from functools import partial

import anyio
import pytest
from pydantic import ValidationError

from engine.backends.base import Parts, Progress
from engine.backends.native import load_native
from engine.compute.errors import ModelRefused
from engine.compute.graphs.capture import PlainCapture
from engine.compute.runner import TorchRunner
from engine.settings import Settings
from tests.engine.compute.test_speculation import answers, frames_of

SECRET = "x" * 16


@pytest.mark.slow  # two engines with their workers; test_graphs.py has the same without them
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_requests_of_all_kinds_are_answered_as_without() -> None:
    """Texts, choices, stop strings, log-probabilities, penalties, calls and schemas together."""
    runners: list[TorchRunner] = []

    def load(settings: Settings, progress: Progress) -> Parts:
        parts = load_native(settings, progress, PlainCapture())
        assert isinstance(parts.runner, TorchRunner)
        runners.append(parts.runner)
        return parts

    plain, _ = anyio.run(answers)
    launched, _ = anyio.run(partial(answers, load, cuda_graphs=True))
    for expected, answered in zip(plain, launched, strict=True):
        assert answered.output_tokens == expected.output_tokens
        assert frames_of(answered) == frames_of(expected)
    graphs = runners[0].graphs
    assert graphs is not None and graphs.num_launched > 20


def test_a_cpu_has_no_graphs() -> None:
    settings = Settings.model_validate({"secret": SECRET, "cuda_graphs": True})
    with pytest.raises(ModelRefused, match="ENGINE_CUDA_GRAPHS: needs a GPU, not cpu"):
        load_native(settings, lambda _stage, _fraction: None)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"backend": "synthetic"}, "ENGINE_CUDA_GRAPHS works with ENGINE_BACKEND native"),
        ({"backend": "vllm"}, "`compilation_config` in ENGINE_VLLM_ARGS"),
        ({"attention": "sdpa"}, "ENGINE_CUDA_GRAPHS needs ENGINE_ATTENTION"),
        ({"kv_dtype": "int8"}, "and ENGINE_KV_DTYPE model"),
    ],
)
def test_what_does_not_go_with_graphs_is_told(settings: dict[str, str], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        Settings.model_validate({"secret": SECRET, "cuda_graphs": True, **settings})


def test_graphs_are_off_unless_asked_for() -> None:
    assert not Settings.model_validate({"secret": SECRET}).cuda_graphs
