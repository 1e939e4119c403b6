"""python -m scripts.bench: the list has every benchmark, and what each needs is known."""

import re

import pytest

from scripts.bench.__main__ import BENCHMARKS, ELSEWHERE
from scripts.setup.install_needs import ROOT, read_project, requirements_of


def test_every_benchmark_is_listed() -> None:
    # Beside the list stand the gateway benchmark's own servers, which it starts.
    servers = {"__main__", "gateway_engine", "gateway_floor", "openai_engine", "peers"}
    programs = {
        path.stem
        for path in (ROOT / "scripts" / "bench").glob("*.py")
        if re.search(r"^if __name__ ==", path.read_text("utf-8"), re.MULTILINE)
    }
    assert programs - servers == BENCHMARKS.keys() | ELSEWHERE.keys()


@pytest.mark.parametrize("name", BENCHMARKS)
def test_what_a_benchmark_needs_is_an_extra_or_a_group(name: str) -> None:
    project = read_project()
    assert all(requirements_of(need, project) for need in BENCHMARKS[name].needs)
