"""A pytest plugin for several processes: tests that share servers run in one, the longest first.

A fixture of session scope exists once per process. A folder whose fixtures start engines and
gateways for all its files is therefore one unit of work; any other file is a unit of its own.

A run ends with its longest units and with the CPU time of all processes: whoever adds tests sees
from these what `LONG` lacks, and whether the run computed or waited.
"""

import gc
import os
import time
from collections import defaultdict
from collections.abc import Generator

import pytest
from execnet import XSpec
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from scripts.stack import cpu_seconds
from tests import forked
from tests.zygote import Zygote

NUM_LONGEST = 40
CPU = "cpu_seconds"

# Folders whose files share servers of session scope (their conftest.py).
SHARING = (
    "tests/conformance/",
    "tests/vectors/",
    "tests/isolation/",
)
# The same for files: those of tests/e2e that use its `stack` and `synthetic`.
SHARING_FILES = {
    f"tests/e2e/test_{name}.py": "tests/e2e/conftest.py"
    for name in (
        "caching",
        "conversations",
        "disconnects",
        "forced_tools",
        "openai",
        "structured_output",
        "wire_vectors",
    )
}
# Units that take longest, the longest first. They begin in this order and all others come behind
# them, so that the processes end at about the same time.
LONG = (
    "tests/engine/test_doubling.py",
    "tests/scripts/test_run_stack.py",
    "tests/gateway/test_doubling.py",
    "tests/dashboard/test_browser.py",
    "tests/conformance/",
    "tests/vectors/",
    "tests/isolation/",
    "tests/gateway/admin/test_keys.py",
    "tests/e2e/conftest.py",
    "tests/e2e/test_lost_engine.py",
    "tests/dashboard/test_browser_live.py",
    "tests/engine/compute/test_forced.py",
    "tests/engine/backends/prepare/test_workers.py",
    "tests/dashboard/test_figures_pages.py",
    "tests/e2e/test_roles.py",
    "tests/gateway/admin/test_plan.py",
    "tests/engine/text/test_tokens.py",
    "tests/scripts/test_gpu_check.py",
    "tests/e2e/test_routing.py",
    "tests/gateway/sample/test_sample.py",
    "tests/fuzz/test_fuzz.py",
    "tests/faults/test_rolls.py",
    "tests/gateway/ledger/test_sums.py",
    "tests/dashboard/test_pages.py",
    "tests/engine/text/test_model_templates.py",
    "tests/e2e/test_formats.py",
    "tests/gateway/journal/test_outage.py",
    "tests/dashboard/test_live_pages.py",
    "tests/gateway/http/test_openapi.py",
    "tests/gateway/http/test_slow_prefill.py",
    "tests/faults/test_damages.py",
    "tests/gateway/turn/test_traces.py",
    "tests/e2e/test_engine_pause.py",
    "tests/e2e/test_gateway_kills.py",
    "tests/e2e/test_fair_share.py",
    "tests/engine/serve/test_stopping.py",
    "tests/gateway/turn/test_dispatch.py",
    "tests/e2e/test_miss_reasons.py",
    "tests/faults/test_stalled_readers.py",
    "tests/e2e/test_soak.py",
    "tests/gateway/http/test_access.py",
    "tests/wire/test_wire.py",
    "tests/e2e/test_engine_kills.py",
    "tests/gateway/http/test_neighbours_counting.py",
    "tests/gateway/http/test_neighbours_connections.py",
    "tests/faults/test_engine_restarts.py",
    "tests/gateway/limits/test_limits.py",
    "tests/faults/test_overcommit.py",
    "tests/gateway/routing/test_stream_splits.py",
    "tests/scripts/test_run_errors.py",
    "tests/scripts/test_bench_agent.py",
    "tests/gateway/http/test_damaged_bodies.py",
    "tests/scripts/test_demo.py",
    "tests/e2e/test_store_restarts.py",
    "tests/e2e/test_batches.py",
    "tests/faults/test_parallel_starts.py",
    "tests/e2e/test_cached_contents.py",
    "tests/faults/test_disconnects.py",
    "tests/faults/test_late_completions.py",
    "tests/gateway/ledger/test_migrations.py",
    "tests/scripts/test_bench_routing.py",
    "tests/gateway/base/test_supervisor.py",
    "tests/e2e/test_late_arrival.py",
    "tests/dashboard/test_figures.py",
    "tests/gateway/routing/test_gemini_stream_splits.py",
    "tests/engine/text/test_seen.py",
    "tests/engine/backends/upstream/test_llamacpp_shaped.py",
    "tests/e2e/test_live_admin.py",
)


def unit(nodeid: str) -> str:
    """The unit of work that a test belongs to."""
    file = nodeid.partition("::")[0]
    folder = next((folder for folder in SHARING if file.startswith(folder)), None)
    return folder or SHARING_FILES.get(file, file)


class ByServers(LoadScopeScheduling):
    """xdist's scheduling by scope, where a scope is what shares servers."""

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    return ByServers(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(unit(item.nodeid), len(place)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays: the garbage collector need not look through it, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


class Controller:
    """Of the process that shares the tests out: it starts the zygote, and times all.

    Times are seconds by unit, and CPU seconds of all processes.
    """

    def __init__(self) -> None:
        self._units: defaultdict[str, float] = defaultdict(float)
        self._cpu = 0.0
        self._began = time.monotonic()
        self._zygote: Zygote | None = None

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_setupnodes(self, config: pytest.Config, specs: list[XSpec]) -> None:
        if not forked.CAN_FORK:
            return
        self._zygote = Zygote(config.invocation_params.args)
        for spec in specs:
            spec.python = self._zygote.python

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._units[unit(report.nodeid)] += report.duration

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        self._cpu += getattr(node, "workeroutput", {}).get(CPU, 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        self._stop_zygote()
        seconds, cpu = time.monotonic() - self._began, self._cpu + time.process_time()
        said = f"{seconds:.0f} s, {cpu:.0f} s of CPU time on {os.cpu_count()} cores"
        terminalreporter.section(f"{said}; the longest units")
        longest = sorted(self._units.items(), key=lambda unit: -unit[1])[:NUM_LONGEST]
        for name, took in longest:
            terminalreporter.write_line(f"{took:7.1f} s {name}")

    def pytest_unconfigure(self) -> None:
        self._stop_zygote()

    def _stop_zygote(self) -> None:
        zygote, self._zygote = self._zygote, None
        self._cpu += zygote.stop() if zygote else 0.0


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Controller())


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process that runs tests tells the CPU time of itself and of all that it started."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[CPU] = cpu_seconds(os.getpid())
