"""Two engines behind two gateways: prefixes are found wherever they live; a death is no error."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.fleet import Fleet, Gateway, running_fleet
from tests.gateway.serving import eventually

SETTINGS = {"ENGINE_MIN_CACHE_TOKENS": "64", "ENGINE_SYNTHETIC_PREFILL_US": "300"}
# A few long prompts make much load: where it counted, short prompts would rightly avoid it.
GATEWAY_SETTINGS = {"HOLDFAST_ROUTING_LOAD_WEIGHT": "0"}
NUM_PROMPTS = 6


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    data = tmp_path_factory.mktemp("fleet")
    with running_fleet(data, 2, 2, SETTINGS, GATEWAY_SETTINGS) as running:
        yield running


@pytest.fixture
def fleet(shared: Fleet) -> Fleet:
    return shared.restored()


def prompt(name: str, num_rules: int = 60) -> str:
    """The same for the same name; about 15 tokens a rule."""
    return " ".join(f"Rule {i} of {name}: file form {i * 7}." for i in range(num_rules))


def place(gateway: Gateway, name: str, onto: int) -> None:
    """Have prompts written on one engine, by taking the other one out of use meanwhile."""
    gateway.use(1 - onto, "drain")
    for number in range(NUM_PROMPTS):
        answer = gateway.answer(prompt(f"{name} {number}"))
        assert answer["holdfast"]["engine"] == f"engine-{onto}"
    gateway.use(1 - onto, "resume")


@pytest.mark.parametrize("onto", [0, 1])
def test_what_one_gateway_placed_the_other_finds(fleet: Fleet, onto: int) -> None:
    """Rendezvous alone would send half of them to the other engine."""
    here, there = fleet.gateways
    place(here, f"found on {onto}", onto)
    names = fleet.held_names(onto)
    assert len(names) >= NUM_PROMPTS
    eventually(lambda: there.engine(onto)["routing"]["names"] == len(names))
    for number in range(NUM_PROMPTS):
        reply = there.answer(prompt(f"found on {onto} {number}"), "another question")
        assert reply["holdfast"]["engine"] == f"engine-{onto}"
        assert reply["usage"]["cache_read_input_tokens"] > 0
        assert reply["usage"]["cache_creation_input_tokens"] == 0
    row = there.recorded(reply["id"])
    assert row["available_tokens"] == row["captured_tokens"]
    assert row["captured_tokens"] >= row["cache_read_tokens"] > 0


def test_what_one_gateway_sent_is_load_to_the_other(fleet: Fleet) -> None:
    here, there = fleet.gateways

    def recent(engine: int) -> int:
        tokens: int = there.engine(engine)["routing"]["recent_tokens"]
        return tokens

    loads = [recent(0), recent(1)]
    reply = here.answer(prompt("someone else's load", 200))
    written_tokens = reply["usage"]["cache_creation_input_tokens"]
    engine = int(reply["holdfast"]["engine"][-1])
    assert written_tokens > 1000

    def has_risen() -> bool:
        # What others sent before fades meanwhile: it is a step that is looked for, not a level.
        earlier = loads[engine]
        loads[engine] = recent(engine)
        return loads[engine] > earlier + written_tokens / 2

    eventually(has_risen)


def test_a_draining_holder_is_named_as_the_reason_of_a_miss(fleet: Fleet) -> None:
    gateway = fleet.gateways[0]
    place(gateway, "drained", 0)
    gateway.use(0, "drain")
    reply = gateway.answer(prompt("drained 0"))
    gateway.use(0, "resume")
    assert reply["holdfast"]["engine"] == "engine-1"
    assert reply["holdfast"]["miss_reason"] == "routed_elsewhere"


@pytest.mark.parametrize("stream", [False, True])
def test_the_holder_dies_in_its_prefill_and_the_other_answers(fleet: Fleet, stream: bool) -> None:
    """No client hears of it, and the turns after it go around the hole."""
    gateway = fleet.gateways[0]
    name = f"dies {stream}"
    place(gateway, name, 1)
    question = prompt("a long question", 2000)
    with ThreadPoolExecutor() as pool:
        future = pool.submit(
            gateway.ask, prompt(f"{name} 0"), question, stream=stream, max_tokens=4
        )
        eventually(lambda: fleet.stats(1)["running"] == 1)
        fleet.kill(1)
        reply = future.result(120)
    assert reply.status_code == 200
    assert "event: error" not in reply.text and '"engine":"engine-0"' in reply.text
    assert "message_stop" in reply.text if stream else reply.json()["stop_reason"] == "max_tokens"
    turn_ids = re.findall(r"msg_\w+", reply.text)[:1]
    for number in range(NUM_PROMPTS):
        after = gateway.answer(prompt(f"{name} {number}"), "afterwards")
        assert after["holdfast"]["engine"] == "engine-0"
        turn_ids.append(after["id"])
    assert {gateway.recorded(turn_id)["outcome"] for turn_id in turn_ids} == {"length"}
    assert len(turn_ids) == 1 + NUM_PROMPTS

    fleet.restart(1)
    eventually(fleet.all_ready)
    # Both gateways: the tests after this one count from what the other one knows.
    for peer in fleet.gateways:
        eventually(lambda peer=peer: peer.engine(1)["routing"]["names"] == 0)
    assert gateway.engine(1)["breaker"] == "closed"
