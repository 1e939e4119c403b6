"""What an engine tells of its model's defaults is what its server is sent where a client says
nothing."""

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import msgspec
import pytest

from engine.protocol import NEUTRAL, Sampling
from engine.settings import DEMO_MODEL
from tests.conformance.engines import prompt
from tests.engine.backends.upstream.conftest import engine_before
from tests.engine.backends.upstream.scripted import Script, ScriptedVllm, serving_script
from tests.engine.backends.upstream.scripted_llamacpp import ScriptedLlamaCpp, SlotScript
from tests.engine.backends.upstream.scripted_openai import ScriptedOpenAi

RECOMMENDED = {
    "temperature": 0.5,
    "top_p": 0.75,
    "top_k": 20,
    "min_p": 0.125,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.25,
    "frequency_penalty": 0.5,
}
DRAWN_BY_LLAMACPP = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
NAMES = {"repetition_penalty": "repeat_penalty"}


@pytest.mark.parametrize(
    ("server", "script", "names"),
    [
        pytest.param(ScriptedVllm, Script(), {name: name for name in NEUTRAL}, id="vllm"),
        pytest.param(
            ScriptedLlamaCpp,
            SlotScript(),
            {name: NAMES.get(name, name) for name in DRAWN_BY_LLAMACPP},
            id="llamacpp",
        ),
        pytest.param(
            ScriptedOpenAi,
            Script(),
            {"temperature": "temperature", "top_p": "top_p"},
            id="openai",
        ),
    ],
)
def test_the_defaults_that_are_told_are_those_that_the_server_is_sent(
    tmp_path: Path, server: type[ScriptedVllm], script: Script, names: dict[str, str]
) -> None:
    """`names` has the server's name of each field that it is told."""
    assert RECOMMENDED.keys() == NEUTRAL.keys()
    model = tmp_path / "model"
    copytree(DEMO_MODEL, model)
    (model / "generation_config.json").write_text(json.dumps(RECOMMENDED))
    with (
        serving_script(script, server) as url,
        engine_before(url, MODEL=str(model)) as engine,
    ):
        template = engine.request(prompt("Count."), engine.scope())
        generate = msgspec.structs.replace(template, sampling=Sampling(max_tokens=3))
        with engine.stream(generate) as stream:
            assert list(stream.frames)
        (*_, body) = (request.body for request in script.seen if "temperature" in request.body)
        recommended: dict[str, Any] = {name: RECOMMENDED[name] for name in names}
        assert engine.description.default_sampling == Sampling(max_tokens=None, **recommended)
        assert {name: body[native] for name, native in names.items()} == recommended
        for name in NEUTRAL.keys() - names.keys():
            assert body.get(name, NEUTRAL[name]) == NEUTRAL[name]
