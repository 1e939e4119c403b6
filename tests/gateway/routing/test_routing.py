"""Which engine a turn goes to."""

from dataclasses import dataclass, field

import msgspec
import pytest

from engine.protocol import Capability, ChainHeld, HeldName, Snapshot
from engine.protocol.reports import Description
from gateway.base.catalogue import CatalogueModel
from gateway.base.errors import InvalidRequest
from gateway.dialects.lowering import RequestContext
from gateway.dialects.openai.lower import chat_ask_of
from gateway.dialects.openai.request import decode_chat
from gateway.prompt.ask import Ask, Principal
from gateway.routing.breaker import Breaker
from gateway.routing.held import Holdings, PrefixIndex
from gateway.routing.router import Load, Router, TokenRates, kind_of

NOW = 100.0
INDEX = PrefixIndex()


@dataclass
class Candidate:
    url: str
    description: Description | None
    is_draining: bool = False
    holdings: Holdings = field(default_factory=lambda: Holdings(INDEX))
    load: Load = field(default_factory=lambda: Load(600.0))
    breaker: Breaker = field(default_factory=Breaker)

    @property
    def seed(self) -> int:
        return hash(self.url)

    @property
    def kind(self) -> str:
        return kind_of(self.description)

    def hold(self, *digests: str) -> None:
        names = [HeldName(digest, 16) for digest in digests]
        self.holdings.apply(Snapshot(seq=1, epoch="e", chains=[ChainHeld(seq=1, names=names)]), NOW)


def candidate(number: int, *capabilities: Capability) -> Candidate:
    description = Description(
        backend="synthetic",
        model="m",
        epoch="e",
        max_context_tokens=100,
        block_size=16,
        num_blocks=8,
        granularity=1,
        min_cache_tokens=16,
        capabilities=list(capabilities),
    )
    return Candidate(f"http://engine-{number}", description)


def choose(ask: Ask, engines: list[Candidate], tried: tuple[str, ...] = ()) -> Candidate:
    return Router().choose(ask, engines, NOW, tried).engine


ENGINES = [candidate(number) for number in range(8)]


def ask(text: str, key: str | None = None, scope: str = "scope", n: int = 1) -> Ask:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "n": n}
    decoded = decode_chat(msgspec.json.encode({**body, "prompt_cache_key": key}))
    who = Principal("w", "k", scope)
    return chat_ask_of(decoded, RequestContext(who, CatalogueModel(id="m", display_name="m"), 0.0))


def test_a_key_or_else_the_first_segment_decides_and_a_key_counts_within_its_workspace() -> None:
    many = range(64)
    assert len({choose(ask(f"prompt {i}"), ENGINES).url for i in many}) > 1
    assert len({choose(ask("one prompt"), ENGINES).url for _ in range(8)}) == 1
    [url] = {choose(ask(f"prompt {i}", key="k"), ENGINES).url for i in many}
    remaining = [engine for engine in ENGINES if engine.url != url]
    assert len({choose(ask(f"prompt {i}", key="k"), remaining).url for i in many}) == 1
    assert len({choose(ask("p", key="k", scope=f"scope {i}"), ENGINES).url for i in many}) > 1


def test_what_few_engines_can_is_asked_of_those_alone() -> None:
    with pytest.raises(InvalidRequest, match=r"^n: "):
        choose(ask("p", n=2), ENGINES)
    able = candidate(0, "multiple_choices")
    assert choose(ask("p", n=2), [*ENGINES[1:], able]) is able
    thinks = msgspec.structs.replace(ask("p"), thinking=True)
    assert not thinks.count_request([]).thinking
    assert thinks.count_request(["thinking"]).thinking


def test_token_rates_follow_what_long_prompts_had() -> None:
    rates = TokenRates()
    assert rates.of("m") == 0.25
    rates.learn("m", 10, 40)
    assert rates.of("m") < 0.3, "a short prompt is mostly template"
    for _ in range(200):
        rates.learn("m", 100_000, 20_000)
    assert rates.of("m") == pytest.approx(0.2, rel=0.01)
    assert rates.of("other") == 0.25
