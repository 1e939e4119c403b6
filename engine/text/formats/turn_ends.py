"""Which tokens end a turn, by what a template writes behind a call and within a turn."""

import re
from collections.abc import Iterable

from engine.text.formats.harmony import TURN_ENDS
from engine.text.formats.reasoning import HARMONY


def behind_call(shown: str, last: str, controls: "re.Pattern[str] | None", markers: Iterable[str],
                ) -> str | None:  # fmt: skip
    """The control token's text right behind a call's own markup; None where something else stands.

    `last` is a text inside the call. Functionary ends a turn of calls with another token than an
    answer, GLM with the next role's.
    """
    if controls is None:
        return None
    at = shown.rfind(last) + len(last)
    own = sorted((marker for marker in markers if marker), key=len, reverse=True)
    while (found := controls.search(shown, at)) is not None:
        if not any(found.group() in marker for marker in own):
            between = shown[at : found.start()]
            for marker in own:
                between = between.replace(marker, "")
            return None if re.search(r"\w", between) else found.group()
        at = found.end()
    return None


def within_turn(inside: str, controls: "re.Pattern[str] | None") -> frozenset[str]:
    """The control tokens between a turn's thinking and the rest of the turn: they end no turn."""
    return frozenset() if controls is None else frozenset(controls.findall(inside))


def declared(tool_format: str | None, reasoning: str | None) -> frozenset[str]:
    """The turn ends that a format itself declares."""
    return TURN_ENDS if HARMONY in (tool_format, reasoning) else frozenset()
