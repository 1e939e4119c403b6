"""What a chat template can't take as it comes, found out by rendering small prompts at load.

- Gemma refuses a system prompt: it goes in front of the first user's message.
- Most refuse a system message within the conversation, drop it or move it to the top: it is told in
  the user's turn beside it, where it stays.
- Llama 3.1 refuses two calls in one message: each call gets a message of its own.
- Mistral refuses ids that are not 9 letters and digits: ours are cut to their end, others hashed.
- Mistral refuses a user's text behind results: it is appended to the last of them.
- Magistral wants thinking as a content part, others as `reasoning_content`.
- Mistral puts the tools before the last question, wherever that is: what they precede in one turn
  they follow in the next. They get no boundary, so that the system prompt's is its own.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from string import ascii_letters, digits

from engine.text.template.replay import Replay

SHORT_ID_LENGTH = 9
"""Of the ids that Mistral's models write and their templates demand."""
_OURS = re.compile(r"toolu_[0-9a-zA-Z]{24}")
_BASE62 = digits + ascii_letters


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateTraits:
    folds_system: bool = False
    splits_calls: bool = False
    shortens_ids: bool = False
    joins_results: bool = False
    thinks_in_content: bool = False
    moves_tools: bool = False
    folds_late_system: bool = False
    replay: Replay = field(default_factory=Replay)

    def call_id(self, call_id: str) -> str:
        """The id that the template gets; equal ids stay equal.

        The end of an id of ours is kept: it is the model's own where that wrote one.
        """
        if not self.shortens_ids:
            return call_id
        if _OURS.fullmatch(call_id):
            return call_id[-SHORT_ID_LENGTH:]
        number = int.from_bytes(blake2b(call_id.encode(), digest_size=8).digest())
        short = ""
        for _ in range(SHORT_ID_LENGTH):
            number, index = divmod(number, len(_BASE62))
            short += _BASE62[index]
        return short


@dataclass(frozen=True, slots=True, kw_only=True)
class TraitProbes:
    """Each says whether its kind of prompt renders, and with its content, under given traits."""

    system: Callable[[TemplateTraits], bool]
    call: Callable[[TemplateTraits], bool]
    two_calls: Callable[[TemplateTraits], bool]
    result_and_text: Callable[[TemplateTraits], bool]
    moves_tools: Callable[[TemplateTraits], bool]
    late_system: Callable[[TemplateTraits], bool]


def find_traits(probes: TraitProbes, traits: TemplateTraits | None = None) -> TemplateTraits:
    """The fewest traits beyond those given with which the probes render.

    A probe that never does changes nothing.
    """
    traits = traits or TemplateTraits()
    for probe, changed in (
        (probes.system, {"folds_system": True}),
        (probes.call, {"shortens_ids": True}),
        (probes.two_calls, {"splits_calls": True}),
        (probes.result_and_text, {"joins_results": True}),
        (probes.late_system, {"folds_late_system": True}),
    ):
        other = replace(traits, **changed)  # type: ignore[arg-type]
        if not probe(traits) and probe(other):
            traits = other
    return replace(traits, moves_tools=probes.moves_tools(traits))
