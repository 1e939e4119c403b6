"""A vLLM that nobody has read, and settings that can't be, end the start."""

from pathlib import Path

import pytest

vllm = pytest.importorskip("vllm", reason="needs vLLM: scripts/long_tests leases")

from engine.backends.vllm.internals import VllmChangedError, check_version
from tests.engine.backends.vllm.simulator import Simulator


@pytest.mark.parametrize("version", ["0.29.1", "0.34.0", "1.0", "unknown"])
def test_unknown_versions_are_named(version: str) -> None:
    check_version(vllm.__version__)
    with pytest.raises(VllmChangedError, match=version):
        check_version(version)


def test_settings_that_cannot_be_are_refused(llama: Path) -> None:
    with pytest.raises(ValueError, match="lease_share must be between 0 and 1"):
        Simulator(llama, lease_share=1.5)
