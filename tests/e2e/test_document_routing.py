"""Documents that stand anywhere are read at the engine that holds most of their tokens."""

from pathlib import Path
from typing import Any

import pytest

from engine.protocol import DEFAULT_RECOMPUTE
from tests.e2e.fleet import Fleet, Gateway, running_fleet
from tests.e2e.test_approximate import ANYWHERE, SETTINGS, Asking, wait_until_measured
from tests.fuzz.tiny_model import write_tiny_model
from tests.gateway.serving import eventually

TEXTS = {
    name: " ".join(f"Item {item} of {name} costs {item * item} coins." for item in range(number))
    for name, number in (("a", 40), ("b", 30), ("c", 20))
}


def post(asking: Asking, names: str, first: str) -> dict[str, Any]:
    """A turn with these documents in this order, behind other words than any other turn."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": f"{first}: read this."}]
    parts += [{"type": "text", "text": TEXTS[n], "cache_control": ANYWHERE} for n in names]
    parts.append({"type": "text", "text": "What is cheap?"})
    reply = asking.said([{"role": "user", "content": parts}])
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def knows(fleet: Fleet, gateway: Gateway) -> bool:
    """Whether the gateway has heard of all that the ready engines hold."""
    ready = [engine for engine in gateway.get("engines") if engine["status"] == "ready"]
    return all(
        engine["routing"]["names"] == len(fleet.held_names(int(engine["name"][-1])))
        for engine in ready
    )


@pytest.mark.timeout(900)
def test_documents_are_read_where_most_of_their_tokens_are(tmp_path: Path) -> None:
    settings = {**SETTINGS, "ENGINE_MODEL": str(write_tiny_model(tmp_path / "tiny"))}
    with running_fleet(tmp_path, 3, 2, settings, backend="native") as fleet:
        eventually(fleet.all_ready)
        wait_until_measured(fleet)
        writer, reader = fleet.gateways
        for gateway in fleet.gateways:
            Asking(gateway.url).allow()
        asking = Asking(reader.url)
        copied = dict[str, int]()
        for number, name in enumerate(TEXTS):
            for index in range(3):
                writer.use(index, "resume" if index == number else "drain")
            first_answer = post(Asking(writer.url), name, f"writing {name}")
            assert first_answer["holdfast"]["engine"] == f"engine-{number}"
            copied[name] = first_answer["usage"]["cache_creation_input_tokens"]
            assert first_answer["holdfast"]["approximate"]["recomputed"] == DEFAULT_RECOMPUTE

        def check(names: str, first: str, engine: int, read_names: str) -> None:
            """What the engine has is read to the token, as was expected; the rest is written."""
            eventually(lambda: knows(fleet, reader))  # by the engines' events alone
            answer = post(asking, names, first)
            assert answer["holdfast"]["engine"] == f"engine-{engine}"
            usage = answer["usage"]
            assert usage["cache_read_input_tokens"] == sum(copied[name] for name in read_names)
            missing = sum(copied[name] for name in set(names) - set(read_names))
            assert usage["cache_creation_input_tokens"] == missing
            assert answer["holdfast"]["automatic_tokens"] == 0
            row = reader.recorded(answer["id"])
            assert row["captured_tokens"] == usage["cache_read_input_tokens"]
            assert row["available_tokens"] == row["captured_tokens"]

        check("cb", "one", 1, "b")
        check("ca", "two", 0, "a")
        check("bca", "three", 0, "ac")
        check("bac", "four", 0, "bac")
        # Another workspace's documents are not looked for, wherever it is sent.
        strange = post(asking.stranger(), "bac", "four")
        assert strange["usage"]["cache_read_input_tokens"] == 0
        assert strange["holdfast"]["automatic_tokens"] == 0
        assert strange["usage"]["cache_creation_input_tokens"] == sum(copied.values())
        row = reader.recorded(strange["id"])
        assert (row["available_tokens"], row["captured_tokens"]) == (0, 0)
        fleet.kill(0)
        eventually(lambda: reader.engine(0)["status"] == "down")
        check("acb", "five", 1, "bc")
