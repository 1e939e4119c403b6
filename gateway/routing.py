"""Which engine takes a turn. For now: rendezvous among the ready ones, over the first prefix or
the key that the client gave."""

from collections.abc import Iterable
from hashlib import blake2b
from typing import Protocol, TypeVar

from engine.protocol import Description
from gateway.ask import Ask
from gateway.errors import DemandRefused, InvalidRequest, NoEngineReady


class Candidate(Protocol):
    url: str
    description: Description | None


Chosen = TypeVar("Chosen", bound=Candidate)


def choose(ask: Ask, ready: Iterable[Chosen]) -> Chosen:
    """Requests that start with the same segment go to the same engine while it is ready.

    So do those of one scope that name the same `routing_key`, whatever they start with.
    """
    key = ask.plan.names[0].digest
    if ask.routing_key is not None:
        key = f"{ask.principal.scope} {ask.routing_key}"

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


def check_capabilities(ask: Ask, description: Description) -> None:
    """Refuse by name what this engine cannot do, rather than do something else."""
    can = description.capabilities
    mode = ask.tool_choice.mode
    if ask.plan.prompt.tools and "tools" not in can:
        raise InvalidRequest("tools: not supported by this model")
    if mode in ("any", "tool") and "forced_tools" not in can:
        raise InvalidRequest("tool_choice: forcing a tool call is not supported by this model")
    if ask.output_schema is not None and "structured_output" not in can:
        raise DemandRefused("output_schema: not supported by this model")
    if ask.sampling.num_choices > 1 and "multiple_choices" not in can:
        raise InvalidRequest("n: more than one choice is not supported by this model")
    if ask.must_think and "thinking" not in can:
        raise InvalidRequest("thinking: not supported by this model")
