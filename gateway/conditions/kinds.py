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
    """`seconds`: so long it must last before it is told. `for_all`: keys of one workspace see it
    too. `past` is in the place of `state` where it has ended, of kinds that are told then."""

    severity: Severity
    seconds: float
    alert: str
    for_all: bool
    state: str
    remedy: str
    past: str = ""


class Finding(NamedTuple):
    """What a look found. `since` is when it began (monotonic seconds), None where only the looks
    tell that, and `ended` when it ended, None while it lasts. Keys of one workspace get
    `cause_for_all` in the place of the cause, where there is one."""

    kind: ConditionKind
    about: str
    cause: str
    engine: str | None = None
    since: float | None = None
    cause_for_all: str | None = None
    ended: float | None = None


KINDS: Mapping[ConditionKind, Kind] = msgspec.convert(
    tomllib.loads(_TABLE.read_text("utf-8")), dict[ConditionKind, Kind]
)
assert set(KINDS) == set(get_args(ConditionKind)), "kinds.toml has other kinds than the struct"
