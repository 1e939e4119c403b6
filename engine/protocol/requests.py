"""A turn for an engine, and a count of its tokens."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from engine.protocol.approximations import DEFAULT_SCORER, LEAST_KEEP, Document, Scorer
from engine.protocol.bounds import MAX_BREAKPOINTS, MAX_DOCUMENTS, MAX_NAMES, NotNegative
from engine.protocol.prompts import Prompt
from engine.protocol.sampling import Sampling
from engine.protocol.ttls import Ttl

ServiceClass = Literal["interactive", "batch"]


class Breakpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A segment end whose prefix the client wants held.

    One breakpoint of a request may be approximate, by `keep` or by `sibling`.
    """

    segment: NotNegative
    # How long the entry lives after its last read, and the class that its write is billed as.
    ttl: Ttl = "5m"
    # The entry lives this long instead of `ttl`, and reads do not prolong it.
    seconds: Annotated[float, Meta(gt=0)] | None = None
    # The part of the prefix's tokens that each layer keeps. Earlier breakpoints then hold nothing.
    keep: Annotated[float, Meta(ge=LEAST_KEEP, lt=1)] | None = None
    # The method that chooses which tokens `keep` keeps.
    scorer: Scorer = DEFAULT_SCORER
    # Whether a sibling model's entry may be read if it is longer than any entry of this model.
    sibling: bool = False
    # Whether to lease the entry. If not, it is best-effort until a breakpoint with `hold` reads it.
    hold: bool = True

    @property
    def is_approximate(self) -> bool:
        """Whether its prefix need not be exact."""
        return self.keep is not None or self.sibling


class Name(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the gateway calls a prefix of the prompt."""

    # The gateway's digest of the prefix, 16 hex digits.
    digest: str
    # The segment in which the prefix ends.
    segment: NotNegative
    # The characters of that segment's text up to the prefix's end; None: the whole segment.
    characters: int | None = None


class ToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether the model may or must call tools, and which."""

    # `any` and `tool` need the capability `forced_tools`. With `none` no calls are parsed.
    mode: Literal["auto", "none", "any", "tool"] = "auto"
    # The tool of mode `tool`.
    name: str | None = None
    # Whether there may be more than one call.
    parallel: bool = True
    # The tools that `any` and `auto` allow; empty: all. `auto` needs `strict_tools` for them.
    names: list[str] = []

    def allows(self, name: str) -> bool:
        """Whether a call may be of this tool."""
        if self.mode == "tool":
            return name == self.name
        return not self.names or name in self.names


class GenerateRequest(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """One turn for an engine."""

    # The idempotence key.
    request_id: Annotated[str, Meta(min_length=1)]
    # The tenant's salt, 32 hex digits.
    scope: Annotated[str, Meta(min_length=1)]
    prompt: Prompt
    sampling: Sampling
    breakpoints: Annotated[list[Breakpoint], Meta(max_length=MAX_BREAKPOINTS)] = []
    documents: Annotated[list[Document], Meta(max_length=MAX_DOCUMENTS)] = []
    names: Annotated[list[Name], Meta(max_length=MAX_NAMES)] = []
    # The time since the turn arrived at the gateway. TTLs count from that moment.
    age_seconds: Annotated[float, Meta(ge=0, lt=86_400)] = 0.0
    # The shortest prefix that is cached; None: the engine's own minimum.
    min_cache_tokens: NotNegative | None = None
    tool_choice: ToolChoice = ToolChoice()
    thinking: bool = False
    # A JSON schema that the text must follow (capability `structured_output`).
    output_schema: dict[str, Any] | None = None
    # A regular expression that the whole text must match (capability `structured_output`).
    output_pattern: str | None = None
    # The scope's part (0 to 1) of the lease budget from now on; None: the engine's setting.
    lease_share: float | None = None
    # `batch` is computed behind the interactive requests (capability `service_class`).
    service_class: ServiceClass = "interactive"
    # The segment at which look-back ends, over any number of positions (capability `lookback_to`).
    lookback_to: NotNegative | None = None
    # The digest of the adapter that answers, one of the description's; empty: no adapter.
    adapter: str = ""
    # Only content with the same salt is read (capability `cache_salt`). 32 bytes in hex, or none.
    salt: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")] = ""
    # The gateway's text. An engine that `keeps_records` has it until the counts are acknowledged.
    record: str = ""

    @property
    def constrains_text(self) -> bool:
        """Whether a schema or a pattern constrains the text."""
        return self.output_schema is not None or self.output_pattern is not None

    @property
    def constrains_calls(self) -> bool:
        """Whether calls among free text are constrained, to some tools or to a schema."""
        if self.tool_choice.mode != "auto" or self.constrains_text:
            return False
        return bool(self.tool_choice.names) or any(
            tool.strict for tool in self.prompt.callable_tools
        )


class CountRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Asks how many tokens a prompt has. The rules are those of a `GenerateRequest`'s prompt.

    The request touches no entry and no lease.
    """

    scope: str
    prompt: Prompt
    thinking: bool = False


class CountReply(msgspec.Struct, frozen=True):
    input_tokens: int
    # The tokens up to each segment's end; None: no token ends there.
    segment_tokens: list[int | None]
