"""The prompts of the sample month: short stand-ins for texts, with the texts' lengths.

Names and fingerprints are made of the stand-ins as of any prompt. No text is kept.
"""

from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import msgspec

from engine.protocol import Message, Prompt, Role, TextPart, Tool, Ttl
from gateway.prompt.fingerprint import (
    Fingerprint,
    digest_parameters,
    kinds_at,
    pack,
    points_of,
)
from gateway.prompt.names import NAMES_RULE, Prefix, find_prefixes
from gateway.prompt.sketch import kinds_of, sketch_of
from gateway.sample.arrivals import Arrival

_BYTES_PER_TOKEN = 4
_TOOLS_PART = 0.45
_SUMMARY_TOKENS = 900
# The lines that stand for a system prompt.
_RULES = 10
# The tokens that a template writes behind the last message.
SCAFFOLD_TOKENS = 6


@dataclass(frozen=True, slots=True)
class MarkedPrefix:
    """A marked prefix: its name, its length in tokens, and the TTL that it was marked with."""

    key: str
    tokens: int
    ttl: Ttl


@dataclass(slots=True)
class Talk:
    """What was said so far: role, stand-in text and tokens."""

    said: list[tuple[Role, str, int]] = field(default_factory=list)
    compactions: int = 0

    def ask(self, arrival: Arrival, tokens: int) -> bool:
        """Add a question. Return whether a summary replaced the history before it."""
        is_compacted = arrival.compactions != self.compactions
        if is_compacted:
            self.compactions = arrival.compactions
            self.said = [("user", f"summary {arrival.talk}.{arrival.turn}", _SUMMARY_TOKENS)]
            self.said.append(("assistant", "understood", 4))
        self.said.append(("user", f"question {arrival.talk}.{arrival.turn}", tokens))
        return is_compacted

    def answer(self, arrival: Arrival, tokens: int) -> None:
        self.said.append(("assistant", f"answer {arrival.talk}.{arrival.turn}", tokens))


@dataclass(frozen=True, slots=True)
class SamplePrompt:
    """A prompt as the gateway sees it.

    `keys` are the names at its segment ends, `marks` those at its breakpoints.
    """

    prompt: Prompt
    prefixes: list[Prefix]
    lengths: list[int]
    marks: list[MarkedPrefix]

    @property
    def tokens(self) -> int:
        return self.lengths[-1] + SCAFFOLD_TOKENS

    @property
    def keys(self) -> list[str]:
        return [prefix.name.digest for prefix in self.prefixes]

    def fingerprint(self, arrival: Arrival, scope: str) -> bytes:
        points = points_of(
            [
                prefix._replace(num_bytes=tokens * _BYTES_PER_TOKEN)
                for prefix, tokens in zip(self.prefixes, self.lengths, strict=True)
            ]
        )
        segments = {prefix.name.digest: prefix.name.segment for prefix in self.prefixes}
        sketch = sketch_of(self.prompt, scope)
        sizes = [after - before for before, after in pairwise([0, *self.lengths])]
        sketched = [size * _BYTES_PER_TOKEN for size in sizes[: len(sketch.sizes)]]
        return pack(
            Fingerprint(
                model=arrival.app.model,
                parameters=digest_parameters(b"", scope),
                num_tools=len(self.prompt.tools),
                num_system=len(self.prompt.system),
                points=points,
                num_tokens=self.tokens,
                is_shared=arrival.app.compares,
                tokens=self.lengths,
                kinds=kinds_at(points, kinds_of(self.prompt)),
                marks=[(segments[mark.key], mark.ttl) for mark in self.marks],
                sketch=msgspec.structs.replace(sketch, sizes=sketched),
                rule=NAMES_RULE,
            )
        )


def write(arrival: Arrival, talk: Talk, version: int, scope: str) -> SamplePrompt:
    """`version` counts the deployments that changed the system prompt."""
    app = arrival.app
    rules = "\n".join(f"{app.name} {arrival.prompt}.{version} rule {n}" for n in range(_RULES))
    stamp = f"now {arrival.ms}\n" if app.stamps else ""
    tools = [Tool(f"{app.name}_{number}", {}) for number in range(app.num_tools)]
    tool_tokens = int(app.system_tokens * _TOOLS_PART / app.num_tools) if tools else 0
    system = app.system_tokens * (1 + arrival.prompt % 5) // 3 - tool_tokens * app.num_tools
    prompt = Prompt(
        messages=[Message(role, [TextPart(text)]) for role, text, _ in talk.said],
        tools=tools,
        system=[TextPart(f"{stamp}{rules}")],
    )
    sizes = [tool_tokens] * len(tools) + [max(system, 400)] + [each[2] for each in talk.said]
    lengths, prefixes = list(accumulate(sizes)), find_prefixes(prompt, scope)
    marks = []
    if app.system_ttl is not None:
        end = app.num_tools
        marks.append(MarkedPrefix(prefixes[end].name.digest, lengths[end], app.system_ttl))
    if app.turn_ttl is not None:
        marks.append(MarkedPrefix(prefixes[-1].name.digest, lengths[-1], app.turn_ttl))
    return SamplePrompt(prompt, prefixes, lengths, marks)
