"""What plans made lately of segments, so that the next turn of a conversation finds it again."""

from dataclasses import dataclass, field

from gateway.prompt.names import NamedText
from gateway.prompt.recent import Recent
from gateway.prompt.sketch import Sketched

_MAX_SKETCHED = 10_000
"""At some 500 bytes each."""
_MAX_TEXTS = 1024
"""At 2 to 15 KB each."""


@dataclass(frozen=True, slots=True)
class PlanMemory:
    """The same for all workspaces, each of which finds its own: the keys depend on its scope."""

    sketched: Recent[Sketched] = field(default_factory=lambda: Recent(_MAX_SKETCHED))
    texts: Recent[NamedText] = field(default_factory=lambda: Recent(_MAX_TEXTS))
