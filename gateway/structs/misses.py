"""Why markers are not read: every word of it, and what of a prompt changed.

The engine has words of its own (`engine.protocol.MissReason`). The gateway knows more, and adds
some.
"""

from typing import Literal

from engine.protocol import MissReason

Section = Literal["tools", "system", "messages"]
"""A part of a prompt."""

Change = Literal["model_changed", "tools_changed", "system_changed", "messages_changed"]
"""What differs from an earlier prompt, so that a marker behind it is not read."""

DivergenceKind = Literal[Change, "unavailable"]
"""The first difference of two prompts. `unavailable`: where they differ is not known, or how they
are asked for differs. No marker is unread for that."""

SECTION_OF: dict[DivergenceKind, Section | None] = {
    "model_changed": None,
    "tools_changed": "tools",
    "system_changed": "system",
    "messages_changed": "messages",
    "unavailable": None,
}
"""The section in which a difference of this kind stands; None where it stands in none."""

HolderReason = Literal["engine_restart", "routed_elsewhere", "ttl_expired", "model_changed"]
"""What became of the engine, or of the model, that had a prefix last."""

GatewayMissReason = Literal[MissReason, HolderReason, Change]
"""Every reason that answers and the ledger have for a marker that was not read, and so for a
request. `gateway/README.md` tells each, and `dashboard/ui/reasons.toml` has its words for people.
What is read back (the journal, rows, the admin API's answers) is typed `str`: it may be of another
version.
"""
