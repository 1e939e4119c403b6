"""What a gateway asks of an engine: one turn with its breakpoints, or a count of tokens."""

from typing import Any, Literal

import msgspec

from engine.protocol.prompt import Prompt
from engine.protocol.values import ServiceClass, Ttl


class Breakpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A segment end whose prefix the client wants held for `ttl`.

    With `seconds` the entry lives that long instead, and reads do not prolong it; `ttl` is the
    class that its write is billed as.
    """

    segment: int
    ttl: Ttl = "5m"
    seconds: float | None = None


class Name(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The gateway's digest (16 hex digits) of the prefix that ends in `segment`.

    `characters` None means at the segment's end, else after that many characters of its text.
    """

    digest: str
    segment: int
    characters: int | None = None


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`max_tokens` 0 pre-warms: the prompt is read and written, nothing is generated; None is
    what the prompt leaves of the context.

    `temperature` 0 is greedy, `top_p` 1 and `top_k` 0 are off; what is None is the model's own
    default, see `Description`. `seed` makes sampling repeatable on one engine build.
    `ignore_eos` goes on past the tokens that end a turn, for measurements of a given length.

    The next three need the capability `penalties`. Each logit is raised by its token's `logit_bias`
    and lowered by `presence_penalty` where the choice has the token, and by `frequency_penalty` for
    each time that it has it; the prompt does not count.

    With `logprobs` (needs the capability of that name) the text's deltas have the log-probabilities
    of their tokens, and of so many of the most likely ones, `MAX_LOGPROBS` at most.
    """

    max_tokens: int | None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] = []
    seed: int | None = None
    num_choices: int = 1
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.logit_bias)


class ToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`any` and `tool` need the capability `forced_tools`; `none` parses no calls.

    Without `parallel` there is at most one call. With mode `any`, `names` are the tools that may be
    called; none is all of them.
    """

    mode: Literal["auto", "none", "any", "tool"] = "auto"
    name: str | None = None
    parallel: bool = True
    names: list[str] = []

    def allows(self, name: str) -> bool:
        """Whether a forced call may be of this tool."""
        if self.mode == "tool":
            return name == self.name
        return not self.names or name in self.names


class GenerateRequest(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """One turn for an engine.

    `request_id` is the turn's id and the idempotence key; `scope` the tenant salt (32 hex digits);
    `age_seconds` the time since the turn arrived at the gateway: TTLs count from then.
    `min_cache_tokens` None means the engine's own minimum. With an `output_schema` (JSON Schema;
    needs the capability `structured_output`) the text is JSON of that schema. `lease_share` is the
    part (0 to 1) of the lease budget that the scope gets even where others have it all, from this
    request on; None is the engine's own. A `service_class` of `batch` needs the capability
    `service_class`: the engine computes the request behind the interactive ones. `record` is the
    gateway's own, `MAX_RECORD_BYTES` of UTF-8 at most: an engine that `keeps_records` gives it back
    until the request's final counts are acknowledged.
    """

    request_id: str
    scope: str
    prompt: Prompt
    sampling: Sampling
    breakpoints: list[Breakpoint] = []
    names: list[Name] = []
    age_seconds: float = 0.0
    min_cache_tokens: int | None = None
    tool_choice: ToolChoice = ToolChoice()
    thinking: bool = False
    output_schema: dict[str, Any] | None = None
    lease_share: float | None = None
    service_class: ServiceClass = "interactive"
    record: str = ""


class CountRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Same prompt rules as `GenerateRequest`; touches no entry and no lease."""

    scope: str
    prompt: Prompt
    thinking: bool = False


class CountReply(msgspec.Struct, frozen=True):
    """`segment_tokens[i]` is the offset of segment i's end, None where it has no boundary."""

    input_tokens: int
    segment_tokens: list[int | None]
