"""Adapters as models: official SDKs, a gateway, and two native engines that have other ones."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from openai import NotFoundError, OpenAI

from scripts.bench.load import marked
from scripts.stack import API_KEY, free_port, gateway_environment, url_of
from tests.adapters import INVOCATION, invocation_of, write_adapter
from tests.e2e.fleet import Fleet, Gateway, running_fleet
from tests.fuzz.tiny_model import write_tiny_model
from tests.gateway.process import say_to_gateway
from tests.gateway.serving import eventually

TABLE = """
default = "any"
[[models]]
id = "any"
[[models]]
id = "support"
engine_model = "tiny"
adapter = "blue"
price = "reference"
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`first` has both adapters, `second` one, and one that can't be loaded."""
    data = tmp_path_factory.mktemp("adapters")
    model = write_tiny_model(data / "tiny")
    for engine in ("first", "second"):
        write_adapter(model, data / engine / "blue", 1)
    write_adapter(model, data / "first" / "judge", 2, alora_invocation_tokens=invocation_of(model))
    write_adapter(model, data / "second" / "dora", 3, use_dora=True)
    (data / "models.toml").write_text(TABLE)
    return data


@pytest.fixture(scope="module")
def fleet(folders: Path) -> Iterator[Fleet]:
    settings = {
        "ENGINE_MODEL": str(folders / "tiny"),
        "ENGINE_MIN_CACHE_TOKENS": "32",
        "ENGINE_NUM_BLOCKS": "512",
    }
    per_engine = [{"ENGINE_ADAPTERS": str(folders / name)} for name in ("first", "second")]
    gateway = {"HOLDFAST_MODELS": str(folders / "models.toml")}
    with running_fleet(folders, 2, 1, settings, gateway, "native", per_engine) as fleet:
        yield fleet


@pytest.fixture
def gateway(fleet: Fleet) -> Gateway:
    return fleet.gateways[0]


def ask(gateway: Gateway, model: str, system: str, question: str = "q", **more: Any) -> Any:
    """A turn by the Messages SDK, with a marked system prompt; the turn's row is in the ledger."""
    with Anthropic(base_url=gateway.url, api_key=API_KEY, max_retries=0) as client:
        return client.messages.create(
            model=model,
            max_tokens=4,
            extra_headers={"anthropic-version": "2023-06-01"},
            extra_body={"temperature": 0},
            system=marked(system, "1h"),  # type: ignore[arg-type]
            messages=[{"role": "user", "content": question}],
            **more,
        )


def text(word: str) -> str:
    return " ".join(f"{word} {number}" for number in range(120))


def test_adapters_are_listed_with_the_model_that_they_are_on(gateway: Gateway) -> None:
    with OpenAI(base_url=f"{gateway.url}/v1", api_key=API_KEY) as client:
        models = {model.id: model.model_dump() for model in client.models.list()}
        assert {"any", "support", "tiny", "any:blue", "any:judge"} <= set(models)
        for name, root in (("support", "blue"), ("any:blue", "blue"), ("any:judge", "judge")):
            assert (models[name]["root"], models[name]["parent"]) == (root, "tiny")
        assert "parent" not in models["tiny"]
        for name in models:
            assert client.models.retrieve(name).id == name
        assert client.models.retrieve("tiny:judge").model_dump()["parent"] == "tiny"
    with Anthropic(base_url=gateway.url, api_key=API_KEY) as anthropic:
        assert {model.id for model in anthropic.models.list()} == set(models)


def test_models_with_an_adapter_read_what_the_same_weights_wrote(gateway: Gateway) -> None:
    system = text("apple")
    first = ask(gateway, "tiny:blue", system)
    written_tokens = first.usage.cache_creation_input_tokens
    assert written_tokens > 100 and first.model == "tiny:blue"
    base = ask(gateway, "tiny", system)
    assert base.usage.cache_read_input_tokens == 0
    # By any id of the same adapter, wherever it lies.
    for model in ("tiny:blue", "support", "any:blue"):
        again = ask(gateway, model, system)
        assert again.usage.cache_read_input_tokens == written_tokens
        assert again.content[0].text == first.content[0].text
        row = gateway.recorded(again.id)
        assert (row["model"], row["cache_read_tokens"]) == ("support", written_tokens)
        # Only that id of the table has a price.
        assert (row["cost_nano"] is not None) == (model == "support")
    assert gateway.recorded(base.id)["model"] == "tiny"


def test_turns_of_an_adapter_go_to_engines_that_have_it(gateway: Gateway) -> None:
    turns = [ask(gateway, "tiny:judge", text(f"pear {number}")) for number in range(8)]
    engines = {gateway.recorded(turn.id)["engine"] for turn in turns}
    assert engines == {"engine-0"}


def test_an_activated_adapter_reads_what_the_base_wrote(gateway: Gateway) -> None:
    """Names in front of the invocation are the base's, so the turn finds the engine that has it."""
    for number in range(4):
        system = text(f"plum {number}")
        base = ask(gateway, "tiny", system)
        judged = ask(gateway, "tiny:judge", system, f"Well,{INVOCATION} is it so?")
        wrote = gateway.recorded(base.id)["engine"]
        expected = base.usage.cache_creation_input_tokens if wrote == "engine-0" else 0
        assert judged.usage.cache_read_input_tokens == expected
        back = ask(gateway, "tiny", system, f"Well,{INVOCATION} is it so?")
        assert back.usage.cache_read_input_tokens == base.usage.cache_creation_input_tokens


@pytest.mark.parametrize("model", ["tiny:nobody", "nobody:blue", "support:blue", "tiny:", ":blue"])
def test_an_unknown_adapter_is_a_404_in_each_dialect(gateway: Gateway, model: str) -> None:
    asking = replace(gateway, model=model)
    messages = [{"role": "user", "content": "hi"}]
    replies = {
        path: asking.send(path, messages=messages, max_tokens=1)
        for path in ("/v1/messages", "/v1/chat/completions")
    }
    for path, reply in replies.items():
        assert reply.status_code == 404, path
        assert model in reply.json()["error"]["message"]
    error = replies["/v1/messages"].json()
    assert (error["type"], error["error"]["type"]) == ("error", "not_found_error")
    with OpenAI(base_url=f"{gateway.url}/v1", api_key=API_KEY) as client:
        with pytest.raises(NotFoundError, match="model"):
            client.responses.create(model=model, input="hi")
    url = f"{gateway.url}/v1beta/models/{model}"
    contents = [{"parts": [{"text": "hi"}]}]
    headers = {"x-goog-api-key": API_KEY}
    gemini = httpx.post(f"{url}:generateContent", json={"contents": contents}, headers=headers)
    assert gemini.status_code == 404 and gemini.json()["error"]["status"] == "NOT_FOUND"


def test_adapters_come_and_go_under_turns(fleet: Fleet, gateway: Gateway, folders: Path) -> None:
    for name, why in (("dora", "`use_dora`: not supported"), ("../first", "")):
        refused = gateway.post("engines/engine-1/adapters", {"name": name}, 400)
        assert why in refused["error"]["message"]
    gateway.delete("engines/engine-1/adapters/judge", 400)
    # From one engine to the other, and turns follow.
    model = folders / "tiny"
    tokens = invocation_of(model)
    write_adapter(model, folders / "second" / "judge", 2, alora_invocation_tokens=tokens)
    loaded = gateway.post("engines/engine-1/adapters", {"name": "judge"})
    assert {adapter["name"] for adapter in loaded["description"]["adapters"]} == {"blue", "judge"}
    gateway.delete("engines/engine-0/adapters/judge")
    turn = ask(gateway, "tiny:judge", text("cherry"))
    assert gateway.recorded(turn.id)["engine"] == "engine-1"
    # By the command, beside the gateway.
    environment = gateway_environment(8080, gateway.data, fleet.engines)
    lines = say_to_gateway(environment, "adapters", "unload", "engine-1", "judge").splitlines()
    assert all(line.startswith("engine-1 tiny:") for line in lines)

    def is_gone() -> bool:
        output = say_to_gateway(environment, "adapters", "list")
        return "judge" not in output and output.count("tiny:blue") == 2

    eventually(is_gone)
    eventually(lambda: "any:judge" not in _models(gateway))
    assert replace(gateway, model="tiny:judge").ask([]).status_code == 404
    say_to_gateway(environment, "adapters", "load", "engine-0", "judge")
    eventually(lambda: "any:judge" in _models(gateway))
    assert ask(gateway, "tiny:judge", text("cherry")).model == "tiny:judge"
    # An engine that does not answer has not none.
    nowhere = url_of(free_port())
    environment = gateway_environment(8080, gateway.data, [nowhere])
    *_, line = say_to_gateway(environment, "adapters", "list", status=1).splitlines()
    assert line == "engine-0 not known: cannot connect"


def _models(gateway: Gateway) -> set[str]:
    with OpenAI(base_url=f"{gateway.url}/v1", api_key=API_KEY) as client:
        return {model.id for model in client.models.list()}
