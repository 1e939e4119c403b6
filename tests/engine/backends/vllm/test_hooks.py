"""Every hook of ours that vLLM calls: an error in it ends our part, and vLLM goes on.

Hooks are found by what our classes define, so that a new one is tried, or named with a reason here.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: scripts/long_tests leases")

from engine.backends.vllm import directive
from engine.backends.vllm.connector import HoldfastConnector
from engine.backends.vllm.loop import StepCounts
from engine.backends.vllm.metrics import HoldfastPromMetrics, HoldfastStatLogger
from engine.backends.vllm.switch import SwitchedOff, guarded
from tests.engine.backends.vllm.simulator import Simulator, tokens_of

PREFIX, OTHER = tokens_of("prefix", 400), tokens_of("other", 400)
# Errors of these end vLLM's start, as its operator must see.
AT_START = {
    *("__init__", "bind_kv_cache_manager", "build_kv_connector_stats", "build_prom_metrics"),
    *("_make", "log_engine_initialized"),
}
# These hold nothing that can fail: a constant, or what `guarded` hooks of the same class call.
CONSTANT = {
    *("start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save", "reset_cache"),
    "requires_kv_delivery",
}
INSIDE = {"_of_scheduler", "_tell"}
CLASSES = (HoldfastConnector, HoldfastPromMetrics, HoldfastStatLogger)


def functions(owner: type) -> dict[str, Any]:
    kinds = (property, classmethod, staticmethod)
    found = {
        name: value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        for name, value in vars(owner).items()
        if inspect.isfunction(value) or isinstance(value, kinds)
    }
    return {name: value for name, value in found.items() if inspect.isfunction(value)}


def hooks(owner: type) -> Iterator[str]:
    yield from (name for name, found in functions(owner).items() if "otherwise" in vars(found))


@pytest.mark.parametrize("owner", CLASSES)
def test_every_method_is_guarded_or_named_with_a_reason(owner: type) -> None:
    excused = AT_START | CONSTANT | INSIDE
    assert set(functions(owner)) - excused == set(hooks(owner))
    for name in CONSTANT & functions(owner).keys():
        [function] = ast.parse(textwrap.dedent(inspect.getsource(functions(owner)[name]))).body
        assert isinstance(function, ast.FunctionDef)
        for line in function.body:
            is_text = isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)
            returned = line.value if isinstance(line, ast.Return) else None
            is_constant = isinstance(line, ast.Return) and (
                returned is None or isinstance(returned, ast.Constant)
            )
            assert is_text or is_constant, f"{name} does something, so it must be guarded"


def _fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("planted")


def _is_called(llama: Path, window: int | None) -> bool:
    """Whether vLLM came to the planted hook; what it did for others is checked."""
    sim = Simulator(llama, window=window, num_blocks=65, max_len=1024, lease_share=0.35)
    sim.add("writer", PREFIX, wants=[("entry", 320, 10.0)])
    sim.add("reader", PREFIX, read=("entry", 320), wants=[("more", 384, 30.0)])
    sim.add("loose", OTHER, wants=[("loose", 384, 20.0)])
    sim.drain()
    for index in range(6):
        sim.run_foreign(f"foreign-{index}", tokens_of(f"foreign-{index}", 500))
    assert all(len(sim.tokens[name]) == 2 for name in ("writer", "reader", "loose"))
    if sim.switch.is_on:
        return False
    assert sim.switch.reason == "RuntimeError"
    with pytest.raises(SwitchedOff, match="RuntimeError"):
        sim.call(directive.LOSSES)
    assert sim.pool.get_num_free_blocks() == sim.leases.total_blocks
    return True


@pytest.mark.parametrize("name", list(hooks(HoldfastConnector)))
def test_vllm_goes_on_when_a_hook_fails(
    llama: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    otherwise = vars(vars(HoldfastConnector)[name])["otherwise"]
    monkeypatch.setattr(HoldfastConnector, name, guarded(otherwise)(_fail))
    # vLLM asks one of two hooks at a request's end, by the number of groups of layers.
    assert any([_is_called(llama, window) for window in (None, 64)])


def test_statistics_that_fail_are_told_and_do_not_reach_vllm() -> None:
    logger = HoldfastStatLogger(None)
    logger.record(SimpleNamespace(kv_connector_stats=7), None)
    assert logger.counts.failure == "AttributeError"
    with pytest.raises(RuntimeError, match="the stat logger is off: AttributeError"):
        logger.counts.check()
    logger.record(SimpleNamespace(kv_connector_stats=7), None)


def test_statistics_that_do_not_fail_are_counted() -> None:
    logger = HoldfastStatLogger(None)
    told = SimpleNamespace(kv_connector_stats={"tracked_running": 3})
    logger.record(told, SimpleNamespace(num_preempted_reqs=2))
    assert logger.counts == StepCounts(running=3, preempted=2)


def test_metrics_that_fail_do_not_reach_vllm() -> None:
    class Metric:
        def __init__(self, **_: Any) -> None:
            self.value = 0.0

        def labels(self, *_: Any) -> "Metric":
            return self

        def set(self, value: Any) -> None:
            self.value = float(value)

        inc = set

    import prometheus_client

    kinds = (prometheus_client.Gauge, prometheus_client.Counter, prometheus_client.Histogram)
    metrics = HoldfastPromMetrics(
        SimpleNamespace(kv_transfer_config=None),
        dict.fromkeys(kinds, Metric),
        ["engine"],
        {0: ["0"]},
    )
    metrics.observe({"num_leases": 4})
    assert metrics._gauges["num_leases"][0].value == 4
    metrics.observe({"num_leases": "planted"})
    assert metrics.switch.reason == "ValueError"
    metrics.observe({"num_leases": 5})
