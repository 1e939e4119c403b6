"""What an engine in front of a server keeps of the protocol's promises. Pure."""

from engine.backends.upstream.server import Facts
from engine.protocol import Guarantee


def guarantees_of(facts: Facts) -> list[Guarantee]:
    tells = facts.tells != "never"
    forced = "forced_tools" in facts.capabilities
    return [
        Guarantee("exact_read", tells, facts.tells_note),
        Guarantee(
            "exact_write",
            tells,
            "what was marked less what the server reused"
            if tells
            else "not told: what the server reused is counted as written",
        ),
        Guarantee("hold", False, "no_hold: the server evicts when it wants"),
        Guarantee("isolation", facts.isolation != "none", facts.isolation_note),
        Guarantee("events", False, "evictions are not told; an entry ends when less is reused"),
        Guarantee("forced_tools", forced, facts.forced_note),
    ]
