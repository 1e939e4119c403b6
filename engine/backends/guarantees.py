"""The guarantees of engines whose blocks are their own, or are leased inside vLLM."""

from collections.abc import Collection

from engine.protocol import Capability, Guarantee


def own_guarantees(capabilities: Collection[Capability]) -> list[Guarantee]:
    forced = "forced_tools" in capabilities
    return [
        Guarantee("exact_read", True, "from its blocks"),
        Guarantee("exact_write", True, "from its blocks"),
        Guarantee("hold", True, "leases"),
        Guarantee("isolation", True, "blocks are found by scope"),
        Guarantee("events", True, "leases and names"),
        Guarantee("forced_tools", forced, "grammars" if forced else "not for this template"),
    ]
