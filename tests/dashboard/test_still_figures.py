"""What a page says of requests that came stays the same while no others come."""

import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from tests.dashboard.conftest import Show
from tests.dashboard.ledgers import Row, fill, turn
from tests.dashboard.test_figures import alts, bars, card
from tests.gateway.serving import serve_gateway

NUM_TURNS = 3000
START = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(hours=20)


def turns() -> Iterator[Row]:
    """Bursts of an hour; of later ones less is read, and the gateway adds more."""
    chance = random.Random(8)
    for number in range(NUM_TURNS):
        hour = chance.randrange(10)
        read_tokens = 5000 if chance.random() > hour / 10 else 0
        yield turn(
            number,
            START + timedelta(hours=hour, seconds=chance.randrange(3600)),
            id=f"msg_0123abcd{chance.getrandbits(80):020x}",
            read=read_tokens,
            input=5100 - read_tokens,
            available_tokens=5000,
            captured_tokens=read_tokens,
            first_token_seconds=0.11 + hour / 100,
            queue_seconds=0.0,
        )


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    data = tmp_path_factory.mktemp("still") / "data"
    fill(data, turns())
    with serve_gateway(data, "http://127.0.0.1:9") as url:
        yield url


def opened(show: Show, url: str, name: str, minutes: int) -> AppTest:
    """The page of all requests, so many minutes after the last one."""
    since = START
    until = START + timedelta(hours=10, minutes=minutes)
    moments = {"from": f"{since:%Y-%m-%dT%H:%M}", "to": f"{until:%Y-%m-%dT%H:%M}"}
    return show(url, name, range="custom", **moments)


def test_where_hits_are_lost_stands_still_without_traffic(show: Show, gateway: str) -> None:
    def seen(minutes: int) -> Any:
        app = opened(show, gateway, "fleet", minutes)
        [note] = [element.value for element in app.caption if "sample" in element.value]
        return alts(app)[0], note, bars(app, 0)["tokens"].tolist()

    first = seen(1)
    assert "2,000 requests" in first[1] and "3,000 requests of this range" in first[1]
    assert [seen(minutes) for minutes in (2, 17, 240)] == [first] * 3


def test_latency_and_overhead_stand_still_without_traffic(show: Show, gateway: str) -> None:
    def seen(minutes: int) -> Any:
        app = opened(show, gateway, "latency", minutes)
        return card(app, "Gateway overhead"), sorted(bars(app, 0)["id"]), alts(app)[0]

    first = seen(1)
    assert len(first[1]) == 600
    assert [seen(minutes) for minutes in (2, 17, 240)] == [first] * 3
