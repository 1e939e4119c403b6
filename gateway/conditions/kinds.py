"""What all conditions of one kind share, and what is found of one condition. Pure."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, get_args

import msgspec

from gateway.structs.conditions import ConditionKind, Severity

RECENT_SECONDS = 600.0
"""How long a momentary event, such as a lost lease, stays in the list of conditions."""
LULL_SECONDS = 60.0
"""What happens again and again has ended if it has not happened for this long."""
_TABLE = Path(__file__).with_name("kinds.toml")


class Kind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How conditions of one kind are told."""

    severity: Severity
    # How many seconds a condition must last before it is told.
    seconds: float
    # The alert of `monitoring/alerts.yml` that fires for it.
    alert: str
    # Whether keys of one workspace see it too.
    for_all: bool
    # How the sentence about a condition goes on while it lasts.
    state: str
    # What an operator does.
    remedy: str
    # Replaces `state` once the condition has ended; empty for kinds that are told only while they
    # last.
    past: str = ""


class Finding(NamedTuple):
    """A condition as one look found it."""

    kind: ConditionKind
    about: str
    cause: str
    engine: str | None = None
    # When it began, in monotonic seconds; None where it began with the first look that found it.
    since: float | None = None
    # The cause as keys of one workspace see it; None where they see the same.
    cause_for_all: str | None = None
    # When it ended, in monotonic seconds; None while it lasts.
    ended: float | None = None


KINDS: Mapping[ConditionKind, Kind] = msgspec.convert(
    tomllib.loads(_TABLE.read_text("utf-8")), dict[ConditionKind, Kind]
)
assert set(KINDS) == set(get_args(ConditionKind)), "kinds.toml has other kinds than the struct"
