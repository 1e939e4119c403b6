"""The words for why a marker was not read, and for what changed in a prompt.

The engine has its own words (`engine.protocol.MissReason`). The gateway knows more than the engine,
so it adds some.
"""

from typing import Literal

from engine.protocol import MissReason

Section = Literal["tools", "system", "messages"]
"""A part of a prompt."""

Change = Literal["model_changed", "tools_changed", "system_changed", "messages_changed"]
"""A difference from an earlier prompt. A marker behind such a place is not read."""

DivergenceKind = Literal[Change, "unavailable"]
"""The first difference of two prompts. `unavailable`: the place is not known, or only the way of
asking differs. `unavailable` is never the reason of a marker that was not read."""

SECTION_OF: dict[DivergenceKind, Section | None] = {
    "model_changed": None,
    "tools_changed": "tools",
    "system_changed": "system",
    "messages_changed": "messages",
    "unavailable": None,
}
"""The section in which a difference of this kind stands; None: it stands in no section."""

HolderReason = Literal["engine_restart", "routed_elsewhere", "ttl_expired", "model_changed"]
"""What became of the engine or the model that last had a prefix."""

GatewayMissReason = Literal[MissReason, HolderReason, Change]
"""Every reason for which a marker was not read, in answers and in the ledger.

A request's reason is one of these too. `gateway/README.md` explains each reason, and
`dashboard/ui/reasons.toml` has its words for people. Records, rows and answers of the admin API may
be of another version. So a reason that is read from them has the type `str`.
"""
