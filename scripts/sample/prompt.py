"""The prompts of the sample month, as gateway and engine see them."""

from itertools import accumulate, pairwise

import msgspec

from engine.protocol import (
    Breakpoint,
    GenerateRequest,
    Message,
    Prompt,
    Role,
    Sampling,
    TextPart,
    Tool,
)
from gateway.prompt.fingerprint import Fingerprint, digest_parameters, kinds_at, pack, points_of
from gateway.prompt.names import NAMES_RULE, find_prefixes
from gateway.prompt.sketch import kinds_of, sketch_of
from scripts.sample.arrivals import Arrival
from scripts.sample.cache import MarkedPrefix

_BYTES_PER_TOKEN = 4
_TOOLS_PART = 0.45
# The lines that stand for a system prompt.
_RULES = 10
# The tokens that a template writes behind the last message.
_SCAFFOLD_TOKENS = 6


class SamplePrompt:
    """A prompt as the gateway sees it.

    `keys` are the names at its segment ends, `lengths` the tokens there, `marks` the breakpoints.
    """

    def __init__(
        self, arrival: Arrival, messages: list[tuple[Role, str, int]], version: int, scope: str
    ) -> None:
        """`messages` are roles, stand-in texts and tokens. `version` counts the deployments that
        changed the system prompt."""
        app = arrival.app
        rules = "\n".join(f"{app.name} {arrival.prompt}.{version} rule {n}" for n in range(_RULES))
        stamp = f"now {arrival.ms}\n" if app.stamps else ""
        tools = [Tool(f"{app.name}_{number}", {}) for number in range(app.num_tools)]
        tool_tokens = int(app.system_tokens * _TOOLS_PART / app.num_tools) if tools else 0
        system = app.system_tokens * (1 + arrival.prompt % 5) // 3 - tool_tokens * app.num_tools
        self.num_tools = app.num_tools
        self._arrival = arrival
        self._scope = scope
        self._prompt = Prompt(
            messages=[Message(role, [TextPart(text)]) for role, text, _ in messages],
            tools=tools,
            system=[TextPart(f"{stamp}{rules}")],
        )
        sizes = (
            [tool_tokens] * len(tools) + [max(system, 400)] + [message[2] for message in messages]
        )
        self.lengths = list(accumulate(sizes))
        self._prefixes = find_prefixes(self._prompt, scope)
        self.keys = [prefix.name.digest for prefix in self._prefixes]
        self.tokens = self.lengths[-1] + _SCAFFOLD_TOKENS
        ends = [(app.num_tools, app.system_ttl), (-1, app.turn_ttl)]
        self.marks = [
            MarkedPrefix(self.keys[end], self.lengths[end], ttl) for end, ttl in ends if ttl
        ]

    def request(self, request_id: str, scope: str, max_tokens: int) -> GenerateRequest:
        """The same for an engine: its texts are as long as they are said to be. `scope` is the
        workspace's with that engine."""
        prompt = self._prompt
        num_tools = len(prompt.tools)
        sizes = [end - begin for begin, end in pairwise([0, *self.lengths])]
        segments = {prefix.name.digest: prefix.name.segment for prefix in self._prefixes}
        tools = zip(prompt.tools, sizes[:num_tools], strict=True)
        messages = zip(prompt.messages, sizes[num_tools + 1 :], strict=True)
        return GenerateRequest(
            request_id=request_id,
            scope=scope,
            prompt=Prompt(
                tools=[_sized_tool(tool, size) for tool, size in tools],
                system=[_sized(prompt.system[0], sizes[num_tools])],
                messages=[
                    Message(message.role, [_sized(part, size)])
                    for message, size in messages
                    for part in message.parts
                    if isinstance(part, TextPart)
                ],
            ),
            sampling=Sampling(max_tokens=max_tokens, temperature=0),
            breakpoints=[Breakpoint(segments[mark.key], mark.ttl) for mark in self.marks],
            names=[prefix.name for prefix in self._prefixes],
        )

    def fingerprint(self) -> bytes:
        app = self._arrival.app
        prompt = self._prompt
        points = points_of(
            [
                prefix._replace(num_bytes=tokens * _BYTES_PER_TOKEN)
                for prefix, tokens in zip(self._prefixes, self.lengths, strict=True)
            ]
        )
        segments = {prefix.name.digest: prefix.name.segment for prefix in self._prefixes}
        sketch = sketch_of(prompt, self._scope)
        sizes = [after - before for before, after in pairwise([0, *self.lengths])]
        sketched = [size * _BYTES_PER_TOKEN for size in sizes[: len(sketch.sizes)]]
        return pack(
            Fingerprint(
                model=app.model,
                parameters=digest_parameters(b"", self._scope),
                num_tools=len(prompt.tools),
                num_system=len(prompt.system),
                points=points,
                num_tokens=self.tokens,
                is_shared=app.compares,
                tokens=self.lengths,
                kinds=kinds_at(points, kinds_of(prompt)),
                marks=[(segments[mark.key], mark.ttl) for mark in self.marks],
                sketch=msgspec.structs.replace(sketch, sizes=sketched),
                rule=NAMES_RULE,
            )
        )


def _sized(part: TextPart, num_tokens: int) -> TextPart:
    return TextPart(part.text.ljust(num_tokens * _BYTES_PER_TOKEN, "."))


def _sized_tool(tool: Tool, num_tokens: int) -> Tool:
    bare = len(msgspec.json.encode(msgspec.structs.replace(tool, description="")))
    described = "." * (num_tokens * _BYTES_PER_TOKEN - bare)
    return msgspec.structs.replace(tool, description=described)
