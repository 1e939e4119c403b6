"""Probes of what another workspace has warm, and everything a client might widen its scope with."""

import hmac
import random
import re
from hashlib import sha256
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from scripts.stack import MASTER_SECRET
from tests.isolation.conftest import WORKSPACES, House
from tests.isolation.probes import (
    KEEPING_SHAPES,
    NUM_PROBES,
    PLACING_SHAPES,
    SHAPES,
    Seen,
    Shape,
    ask,
    body_of,
    path_of,
    probe_exactly,
    words,
)

MESSAGES = Shape("messages", stream=False, marked=True)
CHAT = Shape("chat", stream=False, marked=True)
OWNER, STRANGER, _ = WORKSPACES
SCOPE = hmac.new(MASTER_SECRET.encode(), OWNER.encode(), sha256).hexdigest()[:32]
"""The owner's real cache salt, which no client can know."""
NAMES = ("workspace", "workspace_id", "scope", "cache_salt", "tenant", "organization", "user")


def test_a_stranger_sees_what_a_cold_prompt_shows_and_the_owner_reads(house: House) -> None:
    report = probe_exactly(house.owner, house.stranger, house.reference, NUM_PROBES)
    assert (report.probes, report.stranger_reads) == (NUM_PROBES, 0)
    assert report.owner_reads == NUM_PROBES, "the owner's own probes must read, or this is no test"
    assert report.hints == []


def test_a_stranger_sees_nothing_of_a_compressed_prefix(house: House) -> None:
    """Asking for the same kind; and of an exact one asking for a compressed one, and back."""
    number = NUM_PROBES // 5
    clients = (house.owner, house.stranger, house.reference)
    report = probe_exactly(*clients, number, KEEPING_SHAPES, seed=5)
    assert (report.probes, report.stranger_reads, report.owner_reads) == (number, 0, number)
    assert report.hints == []
    rng = random.Random(6)
    for keeps in (True, False):
        warming, probing = (Shape("messages", False, True, keeps=k) for k in (keeps, not keeps))
        prefix = words(rng, 120)
        question = words(rng, 3)
        cold = ask(house.reference, probing, body_of(probing, prefix, question))
        assert ask(house.owner, warming, body_of(warming, prefix, "first")).written > 64
        reply = ask(house.stranger, probing, body_of(probing, prefix, question))
        assert (reply.read, reply.body, reply.headers) == (0, cold.body, cold.headers)
        # The owner's own exact blocks may still be there, and are no entry.
        assert ask(house.owner, probing, body_of(probing, prefix, question)).read == 0


def test_a_stranger_finds_no_document_that_stands_anywhere(house: House) -> None:
    """Behind other words than the owner's, which is how documents are found."""
    number = NUM_PROBES // 5
    clients = (house.owner, house.stranger, house.reference)
    report = probe_exactly(*clients, number, PLACING_SHAPES, seed=7)
    assert (report.probes, report.stranger_reads, report.owner_reads) == (number, 0, number)
    assert report.hints == []


def warm(house: House, shape: Shape, rng: random.Random) -> str:
    """A prefix that the owner has cached, and can read."""
    prefix = words(rng, 30)
    assert ask(house.owner, shape, body_of(shape, prefix, "first")).written > 32
    assert ask(house.owner, shape, body_of(shape, prefix, "second")).read > 32
    return prefix


def owners_values(house: House) -> list[str]:
    """What names the owner somewhere: to a client, to an operator, to the engine."""
    reply = house.owner.post(path_of(MESSAGES), json=body_of(MESSAGES, "a", "b"))
    return [OWNER, SCOPE, reply.headers["anthropic-workspace-id"], house.owner_key_id]


@pytest.mark.parametrize("shape", [MESSAGES, CHAT], ids=str)
def test_no_header_and_no_query_widens_a_scope(house: House, shape: Shape) -> None:
    rng = random.Random(f"headers {shape}")
    prefix = warm(house, shape, rng)
    values = owners_values(house)
    prefixes = ("", "x-", "anthropic-", "openai-", "x-holdfast-", "x-litellm-", "x-forwarded-")
    for value in values:
        names = [f"{before}{name}".replace("_", "-") for before in prefixes for name in NAMES]
        extra = {**dict.fromkeys(names, value), "openai-project": value, "x-real-ip": value}
        extra["forwarded"] = f"for={value}"
        reply = house.stranger.post(
            path_of(shape),
            json=body_of(shape, prefix, "third"),
            headers=extra,
            params=dict.fromkeys(NAMES, value),
        )
        assert_unread_or_refused(shape, reply)
        prefix = warm(house, shape, rng)  # the stranger has written the last one itself


def fields(shape: Shape) -> list[dict[str, Any]]:
    """Every place in a body that could mean somebody; VALUE stands for the owner's."""
    known: list[dict[str, Any]] = [{"metadata": {"user_id": "VALUE"}}]
    if shape.dialect == "chat":
        known = [{"metadata": {"workspace": "VALUE"}}, {"prompt_cache_key": "VALUE"}]
        known += [{"user": "VALUE"}, {"safety_identifier": "VALUE"}, {"store": True}]
        known += [{"request_id": "VALUE"}]
    known += [{name: "VALUE"} for name in NAMES if name != "user"]
    known += [{"lease_share": 1.0}, {"extra_body": {"scope": "VALUE"}}, {"container": "VALUE"}]
    return known


@pytest.mark.parametrize("shape", [MESSAGES, CHAT], ids=str)
def test_no_field_widens_a_scope(house: House, shape: Shape) -> None:
    rng = random.Random(f"fields {shape}")
    served = 0
    for value in owners_values(house):
        for field in fields(shape):
            prefix = warm(house, shape, rng)
            filled: Any = {
                name: value if sample == "VALUE" else sample for name, sample in field.items()
            }
            for name, content in filled.items():
                if isinstance(content, dict):
                    filled[name] = dict.fromkeys(content, value)
            body = {**body_of(shape, prefix, "third"), **filled}
            reply = house.stranger.post(path_of(shape), json=body)
            served += assert_unread_or_refused(shape, reply)
    assert served, "some of these are accepted, without effect"


@pytest.mark.parametrize("shape", [MESSAGES, CHAT], ids=str)
def test_nor_do_marked_blocks_that_name_a_scope(house: House, shape: Shape) -> None:
    rng = random.Random(f"blocks {shape}")
    for name in (*NAMES, "key", "ttl_scope"):
        prefix = warm(house, shape, rng)
        body = body_of(shape, prefix, "third")
        system = body["system"] if shape.dialect == "messages" else body["messages"][0]["content"]
        system[0]["cache_control"] = {"type": "ephemeral", name: SCOPE}
        assert not assert_unread_or_refused(
            shape, house.stranger.post(path_of(shape), json=body)
        ), f"{name} is no field of cache_control"


def assert_unread_or_refused(shape: Shape, reply: httpx.Response) -> bool:
    """True where it was served, and then nothing came out of memory. A refusal has the envelope."""
    if reply.status_code == 400:
        error = reply.json()["error"]
        assert set(error) >= {"type", "message"}
        return False
    assert reply.status_code == 200, reply.text
    body = reply.json()
    assert body["holdfast"]["automatic_tokens"] == 0
    assert body["holdfast"]["miss_reason"] == "cold"
    usage = body["usage"]
    if shape.dialect == "messages":
        assert usage["cache_read_input_tokens"] == 0
    else:
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    return True


def test_a_turn_that_is_anothers_answers_like_one_that_is_not_there(house: House) -> None:
    rng = random.Random("turns")
    shape = Shape("messages", stream=False, marked=True, compares=True)
    theirs = ask(house.owner, shape, body_of(shape, words(rng, 30), "a"))
    replies: list[Seen] = []
    for previous in (theirs.turn, "msg_" + 28 * "0"):
        body = body_of(shape, "the same words", "and the same question", previous=previous)
        replies.append(ask(house.stranger, shape, body))
        ask(house.stranger, shape, body)  # from here on both would be read
    assert replies[0].body.partition('"usage"')[0] == replies[1].body.partition('"usage"')[0]
    diagnostics = [re.search(r'"diagnostics":\{[^}]*\}', s.body) for s in replies]
    assert all(diagnostics) and diagnostics[0][0] == diagnostics[1][0]  # type: ignore[index]


def test_labels_are_bounded_and_name_nobody(house: House) -> None:
    """Whatever clients send, no series comes into being for it."""
    values = owners_values(house)
    probe_series(house, "before")
    before = series(house)
    probe_series(house, "after")
    after = series(house)
    new = after - before
    # A status may come that was not there before (an overload, say); nothing else can.
    assert {name for name, labels in new if "status" not in dict(labels)} == set()
    labels = {value for _, labels in after for _, value in labels}
    assert not labels & {*values, STRANGER}
    text = " ".join(labels)
    assert all(value not in text for value in (*values, STRANGER, "zanzibar"))


def probe_series(house: House, word: str) -> None:
    """Paths, models, keys and fields that nobody has; the same statuses every time."""
    for index in range(10):
        name = f"zanzibar-{word}-{index}"
        house.stranger.get(f"/v1/{name}")
        house.stranger.get(f"/{name}/metrics")
        house.stranger.request("PATCH", "/v1/messages")
        house.stranger.post("/v1/messages", json={"model": name, "max_tokens": 1, "messages": []})
        house.stranger.post("/v1/messages", json={name: 1})
        house.stranger.get(f"/v1/models/{name}")
        house.stranger.get("/v1/models", headers={"authorization": f"Bearer {name}"})
        house.stranger.get("/admin/v1/turns", headers={"authorization": f"Bearer {name}"})


def series(house: House) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    """Every series of both programs, by name and labels."""
    labelled = set()
    for url in (house.stack.gateway, house.stack.engine):
        text = httpx.get(f"{url}/metrics", timeout=120).text
        for family in text_string_to_metric_families(text):
            labelled |= {(s.name, tuple(sorted(s.labels.items()))) for s in family.samples}
    return labelled


def test_every_shape_is_probed() -> None:
    assert len(set(SHAPES)) == 12 and NUM_PROBES >= 3 * len(SHAPES)
