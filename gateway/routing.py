"""Which engine takes a turn. For now: rendezvous over the first prefix, among the ready ones."""

from collections.abc import Iterable
from dataclasses import replace
from hashlib import blake2b
from typing import Protocol, TypeVar

from engine.protocol import Description
from gateway.ask import Ask
from gateway.errors import InvalidRequest, NoEngineReady


class Candidate(Protocol):
    url: str
    description: Description | None


Chosen = TypeVar("Chosen", bound=Candidate)


def choose(ask: Ask, ready: Iterable[Chosen]) -> Chosen:
    """Requests that start with the same segment go to the same engine while it is ready."""
    key = ask.plan.names[0].digest

    def weight(engine: Chosen) -> bytes:
        return blake2b(f"{key} {engine.url}".encode(), digest_size=8).digest()

    able = [
        engine
        for engine in ready
        if engine.description and ask.model.is_served_by(engine.description.model)
    ]
    if not able:
        raise NoEngineReady
    engine = max(able, key=weight)
    assert engine.description is not None
    check_capabilities(ask, engine.description)
    return engine


def fit(ask: Ask, description: Description) -> Ask:
    """The ask as this engine can serve it: thinking "if it can" is no thinking where it cannot."""
    return ask if "thinking" in description.capabilities else replace(ask, thinking=False)


def check_capabilities(ask: Ask, description: Description) -> None:
    """Refuse by name what this engine cannot do, rather than do something else."""
    can = description.capabilities
    mode = ask.tool_choice.mode
    if ask.plan.prompt.tools and "tools" not in can:
        raise InvalidRequest("tools: not supported by this model")
    if mode in ("any", "tool") and "forced_tools" not in can:
        raise InvalidRequest(f"tool_choice: '{mode}' is not supported by this model")
    if ask.must_think and "thinking" not in can:
        raise InvalidRequest("thinking: not supported by this model")
