"""What is the same of every condition of a kind, and how a condition is found. Pure."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, get_args

import msgspec

from gateway.structs.conditions import ConditionKind, Severity

RECENT_SECONDS = 600.0
"""So long a condition tells of what happened at once, as something that ended."""
LULL_SECONDS = 60.0
"""What happens again and again has ended when it did not happen for so long."""
_TABLE = Path(__file__).with_name("kinds.toml")


class Kind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How conditions of one kind are told."""

    severity: Severity
    # A condition must last so long before it is told.
    seconds: float
    alert: str
    # Whether keys of one workspace see it too.
    for_all: bool
    state: str
    remedy: str
    # In the place of `state` where it has ended, of kinds that are told then.
    past: str = ""


class Finding(NamedTuple):
    """What one look found."""

    kind: ConditionKind
    about: str
    cause: str
    engine: str | None = None
    # When it began, in monotonic seconds; None where only the looks tell that.
    since: float | None = None
    # The cause as keys of one workspace see it; None where they see the same.
    cause_for_all: str | None = None
    # When it ended; None while it lasts.
    ended: float | None = None


KINDS: Mapping[ConditionKind, Kind] = msgspec.convert(
    tomllib.loads(_TABLE.read_text("utf-8")), dict[ConditionKind, Kind]
)
assert set(KINDS) == set(get_args(ConditionKind)), "kinds.toml has other kinds than the struct"
