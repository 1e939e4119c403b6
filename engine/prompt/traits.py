"""What a chat template can't take as it comes, found out by rendering small prompts at load.

- Gemma refuses a system prompt: it goes in front of the first user's message.
- Llama 3.1 refuses two calls in one message: each call gets a message of its own.
- Mistral refuses ids that are not 9 letters and digits: ids are hashed to such.
- Magistral wants thinking as a content part, others as `reasoning_content`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import blake2b
from string import ascii_letters, digits

_SHORT_ID_LENGTH = 9
_BASE62 = digits + ascii_letters


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateTraits:
    folds_system: bool = False
    splits_calls: bool = False
    shortens_ids: bool = False
    thinks_in_content: bool = False

    def call_id(self, call_id: str) -> str:
        """The id that the template gets; equal ids stay equal."""
        if not self.shortens_ids:
            return call_id
        number = int.from_bytes(blake2b(call_id.encode(), digest_size=8).digest())
        short = ""
        for _ in range(_SHORT_ID_LENGTH):
            number, index = divmod(number, len(_BASE62))
            short += _BASE62[index]
        return short


@dataclass(frozen=True, slots=True, kw_only=True)
class TraitProbes:
    """Each says whether its kind of prompt renders, and with its content, under given traits."""

    system: Callable[[TemplateTraits], bool]
    call: Callable[[TemplateTraits], bool]
    two_calls: Callable[[TemplateTraits], bool]
    thinking: Callable[[TemplateTraits], bool]


def find_traits(probes: TraitProbes) -> TemplateTraits:
    """The fewest traits with which the probes render. A probe that never does changes nothing."""
    traits = TemplateTraits()
    for probe, changed in (
        (probes.system, {"folds_system": True}),
        (probes.call, {"shortens_ids": True}),
        (probes.two_calls, {"splits_calls": True}),
        (probes.thinking, {"thinks_in_content": True}),
    ):
        other = replace(traits, **changed)
        if not probe(traits) and probe(other):
            traits = other
    return traits
