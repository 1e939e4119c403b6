"""The plan of a request: its prompt, breakpoints and names."""

from dataclasses import dataclass

from engine.protocol import Breakpoint, Name, Prompt, Ttl
from gateway.prefix.breakpoints import find_breakpoints
from gateway.prefix.layout import Layout, Slot
from gateway.prefix.names import name_prefixes


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    prompt: Prompt
    slots: list[Slot]
    breakpoints: list[Breakpoint]
    names: list[Name]


def make_plan(layout: Layout, automatic: Ttl | None, scope: str) -> Plan:
    """Raise InvalidRequest where the markers break a rule; `automatic` marks the last slot."""
    breakpoints = find_breakpoints(layout.slots, automatic)
    marked = {breakpoint_.segment for breakpoint_ in breakpoints}
    names = name_prefixes(layout.prompt, scope, marked)
    return Plan(prompt=layout.prompt, slots=layout.slots, breakpoints=breakpoints, names=names)
