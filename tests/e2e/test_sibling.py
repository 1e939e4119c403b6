"""Two engines of sibling models with one store behind a gateway: what one wrote the other reads."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.protocol.reports import Description, EntryInfo
from scripts.stack import ROOT
from tests.e2e.fleet import Fleet, running_fleet
from tests.e2e.test_approximate import Asking, refused, wait_until_measured
from tests.fuzz.tiny_model import write_tiny_model
from tests.gateway.serving import eventually, metric

SIBLING = {"sibling": True}
QUESTION = "What does line 7 say?"


def write_siblings(path: Path) -> None:
    """Two models that differ in their weights alone, a little."""
    model_path = write_tiny_model(path / "own")
    config = AutoConfig.from_pretrained(model_path)
    config.num_hidden_layers = 3
    torch.manual_seed(5)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config)
    model.save_pretrained(model_path)
    shutil.copytree(model_path, path / "theirs")
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * weight.std(correction=0) * torch.randn_like(weight))
    model.save_pretrained(path / "theirs")


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """The first engine reads what the second wrote."""
    write_siblings(tmp_path)
    settings = {
        "ENGINE_MIN_CACHE_TOKENS": "32",
        "ENGINE_NUM_BLOCKS": "512",
        "ENGINE_STORE": str(tmp_path / "store"),
        "ENGINE_STORE_SHARED": "true",
    }
    profile = tmp_path / "profile.json"
    subprocess.run(
        [
            *(sys.executable, "-m", "engine", "profile-variant"),
            *(tmp_path / "own", tmp_path / "theirs", "--write", profile),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=600,
    )
    reads = {"ENGINE_APPROXIMATE": "true", "ENGINE_SIBLING": str(profile)}
    per_engine = [{"ENGINE_MODEL": str(tmp_path / "own"), **reads}]
    per_engine.append({"ENGINE_MODEL": str(tmp_path / "theirs")})
    with running_fleet(
        tmp_path, 2, 1, settings, backend="native", per_engine=per_engine
    ) as running:
        wait_until_measured(running)
        yield running


@pytest.mark.slow  # tests/engine/backends/test_sibling.py reads them on every commit
@pytest.mark.timeout(900)
def test_a_siblings_turn_writes_and_a_turn_that_asks_for_it_reads(fleet: Fleet) -> None:
    asking, theirs = (Asking(fleet.gateway.url, model=model) for model in ("own", "theirs"))
    path = "system.0.cache_control.holdfast"
    assert refused(asking.marked(QUESTION, SIBLING)).startswith(
        f"{path}: this workspace may not ask"
    )
    asking.allow()
    message = f"{path}.sibling: this engine does not read entries of a sibling"
    assert refused(theirs.marked(QUESTION, SIBLING)) == message
    techniques = fleet.told("describe", Description).techniques
    measured = [technique for technique in techniques if technique.method == "sibling"]
    assert [technique.parameter for technique in measured] == [0, 1, 2, 3]
    exact = asking.read(QUESTION, text="Nobody wrote this. " * 60, holdfast=SIBLING)
    assert exact["usage"]["cache_read_input_tokens"] == 0
    assert exact["usage"]["cache_creation_input_tokens"] > 100
    nothing = {"kind": "sibling", "reused": 0, "recomputed_layers": 0, "of_layers": 0}
    assert exact["holdfast"]["approximate"] == nothing

    num_tokens = theirs.read(QUESTION)["usage"]["cache_creation_input_tokens"]
    assert num_tokens > 400

    def is_known() -> bool:
        entries = fleet.told("entries", list[EntryInfo])
        return any(
            entry.approximate == "sibling" and entry.tokens == num_tokens for entry in entries
        )

    eventually(is_known)
    first = asking.read(QUESTION, SIBLING)
    usage = first["usage"]
    assert usage["cache_read_input_tokens"] == num_tokens
    assert usage["cache_creation_input_tokens"] == 0 < usage["input_tokens"] < 100
    least = next(technique.parameter for technique in measured if technique.is_allowed)
    approximate = {**nothing, "reused": num_tokens, "recomputed_layers": least, "of_layers": 3}
    assert first["holdfast"]["approximate"] == approximate
    assert first["holdfast"]["read_tier"] == "disk"
    assert asking.kind(first) == f"sibling: {num_tokens} reused, {least} of 3 layers recomputed"
    series = 'holdfast_gateway_approximate_turns_total{method="sibling"}'
    assert metric(asking.url, series) == 2
    warm = asking.read(QUESTION, SIBLING)
    assert warm["usage"] == usage and warm["content"] == first["content"]
    assert warm["holdfast"]["read_tier"] == "device"
    stranger = asking.stranger().read(QUESTION, SIBLING)
    assert stranger["usage"]["cache_read_input_tokens"] == 0
    assert stranger["holdfast"]["automatic_tokens"] == 0
    plain = asking.read(QUESTION)
    assert plain["usage"]["cache_creation_input_tokens"] == num_tokens
    assert "approximate" not in plain["holdfast"] and plain["content"] == stranger["content"]

    # Of equally long entries the exact one is read, from now on.
    again = asking.read(QUESTION, SIBLING)
    assert again["usage"] == usage and again["holdfast"]["approximate"] == nothing
    assert again["content"] == plain["content"]
