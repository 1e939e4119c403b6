"""What we use of vLLM is what is installed; where it is not, the start fails and names it."""

from pathlib import Path

import pytest

vllm = pytest.importorskip("vllm", reason="needs vLLM: scripts/long_tests leases")

from engine.backends.vllm.internals import (
    REQUEST_ATTRIBUTES,
    SCHEDULER_ATTRIBUTES,
    Used,
    VllmChangedError,
    check_callables,
    check_objects,
    check_request,
    check_scheduler,
    check_version,
)
from tests.engine.backends.vllm.simulator import Simulator, tokens_of

POOL = "vllm.v1.core.block_pool:BlockPool."


def test_the_installed_vllm_is_as_we_know_it(llama: Path) -> None:
    check_version(vllm.__version__)
    check_callables()
    sim = Simulator(llama)
    check_objects(sim.scheduler.kv_cache_manager)
    check_scheduler(sim.scheduler)
    check_request(sim.add("request", tokens_of("request", 40)))


@pytest.mark.parametrize("version", ["0.29.1", "0.34.0", "1.0", "unknown"])
def test_unknown_versions_are_named(version: str) -> None:
    with pytest.raises(VllmChangedError, match=version):
        check_version(version)


@pytest.mark.parametrize(
    ("used", "named"),
    [
        pytest.param(Used(POOL + "pin", ("self",)), "BlockPool.pin any more", id="gone"),
        pytest.param(
            Used(POOL + "touch", ("self", "block_ids")), "BlockPool.touch takes", id="renamed"
        ),
        pytest.param(
            Used(POOL + "unpin_blocks", ("self", "on_reuse", "blocks")),
            "BlockPool.unpin_blocks takes",
            id="reordered",
        ),
    ],
)
def test_what_moved_is_named(used: Used, named: str) -> None:
    with pytest.raises(VllmChangedError, match=named):
        check_callables([used])


@pytest.mark.parametrize("name", REQUEST_ATTRIBUTES)
def test_a_missing_attribute_is_named(name: str) -> None:
    request = type("Request", (), {other: 0 for other in REQUEST_ATTRIBUTES if other != name})()
    with pytest.raises(VllmChangedError, match=f"Request has no {name}"):
        check_request(request)


@pytest.mark.parametrize("name", SCHEDULER_ATTRIBUTES)
def test_what_the_scheduler_lacks_is_named(name: str) -> None:
    scheduler = type("Scheduler", (), {other: 0 for other in SCHEDULER_ATTRIBUTES if other != name})
    with pytest.raises(VllmChangedError, match=f"Scheduler has no {name}"):
        check_scheduler(scheduler())


def test_settings_that_cannot_be_are_refused(llama: Path) -> None:
    with pytest.raises(ValueError, match="lease_share must be between 0 and 1"):
        Simulator(llama, lease_share=1.5)
