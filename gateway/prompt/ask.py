"""One turn as the gateway understands it, whatever dialect it came in."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NewType

import msgspec

from engine.protocol import (
    TTLS,
    Breakpoint,
    Capability,
    CountRequest,
    GenerateRequest,
    Sampling,
    ToolChoice,
    held_as,
)
from gateway.base.catalogue import CatalogueModel
from gateway.base.grants import DEFAULT_AUTO_CACHE, NO_LIMITS, AutoCache, Limits
from gateway.prompt.fingerprint import Fingerprint, digest_parameters
from gateway.prompt.ignored import Ignored, Notepad
from gateway.prompt.plan import Plan
from gateway.structs.fleet import KeyScope

NAME_CHARACTERS = 64
AGENT_CHARACTERS = 64


@dataclass(frozen=True, slots=True)
class Origin:
    """The HTTP request of a turn. A turn of a batch has none of its own."""

    # The `request-id` header of the response. In a batch it is the id of an error in the result.
    request_id: str | None = None
    # The client's name for itself (`agent_of`).
    user_agent: str | None = None
    # The request's headers. Where turns are traced, the caller's trace is read from them.
    headers: Iterable[tuple[bytes, bytes]] = ()


NO_ORIGIN = Origin()


def agent_of(user_agent: str) -> str | None:
    """The client's own name for itself, without characters that can't be shown, cut to 64."""
    return _printable(user_agent, AGENT_CHARACTERS)


def name_of(metadata: Any) -> str | None:
    """The `name` of a request's metadata, cut to 64 characters; None where it has no such text."""
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return _printable(name, NAME_CHARACTERS) if isinstance(name, str) else None


def camel(name: str) -> str:
    """`system_instruction` as Google writes it: `systemInstruction`."""
    first_word, *words = name.split("_")
    return first_word + "".join(word.capitalize() for word in words)


def _printable(text: str, max_characters: int) -> str | None:
    head = text[: 4 * max_characters]
    printable = "".join(filter(str.isprintable, head))
    return printable.strip()[:max_characters] or None


TurnId = NewType("TurnId", str)
Dialect = Literal["anthropic", "openai", "gemini"]
Api = Literal["anthropic", "openai", "responses", "gemini"]
"""The API of a turn. OpenAI's dialect has two that write different answers."""

SAMPLING_NAMES: dict[Api, dict[str, str]] = {
    "anthropic": {},
    "openai": {"num_choices": "n", "stop_sequences": "stop"},
    "responses": {"max_tokens": "max_output_tokens"},
    "gemini": {
        "max_tokens": "max_output_tokens",
        "num_choices": "candidate_count",
        "logprobs": "response_logprobs",
    },
}
"""The names of fields of Sampling in each API, where they differ from ours."""
_BYTES_PER_TOKEN = 4
_MAX_RESERVED_OUTPUT = 1024
"""Tokens that are reserved for one answer at most."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks: a key of a workspace."""

    workspace: str
    key_id: str
    # The workspace's cache salt.
    scope: str
    key_scope: KeyScope = "inference"
    limits: Limits = NO_LIMITS
    # The part of an engine's lease budget that the workspace may take, 0 to 1. None sets no bound.
    lease_share: float | None = None
    # The policy for requests without markers.
    auto_cache: AutoCache = DEFAULT_AUTO_CACHE
    # Whether the workspace's prompts and answers are stored.
    keeps_contents: bool = False
    # Whether it may ask for approximations.
    may_approximate: bool = False


@dataclass(frozen=True, slots=True)
class Compared:
    """The comparison with an earlier prompt that a client asks for."""

    is_wanted: bool = False
    # The turn to compare with.
    previous: str | None = None
    # What shapes the prompt besides its content.
    parameters: bytes = b""


NOT_COMPARED = Compared()


def guarantees_calls(choice: ToolChoice, *, has_schema: bool) -> bool:
    """Whether every call of an answer fits its tool's schema (protocol, rules 10 and 11).

    With `auto` and no output schema the model writes calls freely.
    """
    return choice.mode != "auto" or has_schema


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request for an answer, in no dialect."""

    principal: Principal
    model: CatalogueModel
    plan: Plan
    sampling: Sampling
    # On the monotonic clock. The prompt's TTLs count from it.
    arrived: float
    tool_choice: ToolChoice = ToolChoice()
    # Whether the model is to think, if it can.
    thinking: bool = False
    # Whether the model's thinking is left out of the answer.
    omit_thinking: bool = False
    stream: bool = False
    # Whether a stream of OpenAI's dialect ends with the usage.
    include_usage: bool = False
    # A workspace's requests with one key go to one engine.
    routing_key: str | None = None
    comparison: Compared = NOT_COMPARED
    dialect: Api = "anthropic"
    # How many nonces were left out of the prompt.
    num_removed: int = 0
    # These two constrain the answer's text, as in the engine protocol.
    output_schema: dict[str, Any] | None = None
    output_pattern: str | None = None
    is_batch: bool = False
    # The fields that engines may ignore.
    notes: Notepad = msgspec.field(default_factory=Notepad)
    # What the client calls this request.
    name: str | None = None
    # The names of functions whose calls go out as a text.
    custom_tools: frozenset[str] = frozenset()

    def path_of(self, name: str) -> str:
        """Where in the request a field of the sampling stands."""
        native = SAMPLING_NAMES[self.dialect].get(name, name)
        return f"generationConfig.{camel(native)}" if self.dialect == "gemini" else native

    @property
    def estimated_tokens(self) -> int:
        """The tokens to reserve for the turn: bytes / 4 of the prompt, and at most 1,024 for each
        answer, because clients ask for far more output than models write."""
        num_choices = self.sampling.num_choices
        return self.prompt_tokens + min(self.max_output, _MAX_RESERVED_OUTPUT * num_choices)

    @property
    def max_output(self) -> int:
        """The most tokens of all answers. Without a bound 1,024 are assumed for each."""
        max_tokens = self.sampling.max_tokens
        if max_tokens is None:
            max_tokens = _MAX_RESERVED_OUTPUT
        return max_tokens * self.sampling.num_choices

    @property
    def prompt_tokens(self) -> int:
        """The estimated tokens of the prompt, at 4 bytes a token."""
        return self.plan.num_bytes // _BYTES_PER_TOKEN

    def fingerprint(self, num_tokens: int, name_tokens: Sequence[int] = ()) -> Fingerprint:
        """The fingerprint that is kept of this turn's prompt; see `Plan.fingerprint`."""
        parameters = digest_parameters(self.comparison.parameters, self.principal.scope)
        is_shared = self.comparison.is_wanted
        return self.plan.fingerprint(
            self.model.id, parameters, num_tokens, name_tokens, is_shared=is_shared
        )

    def generate_request(
        self,
        request_id: str,
        now: float,
        capabilities: Collection[Capability],
        ttls: Collection[str] = tuple(TTLS),
    ) -> GenerateRequest:
        """The request for an engine with these capabilities and TTL classes, at `now` on the
        monotonic clock."""
        can_wait = "service_class" in capabilities
        choice = self.tool_choice
        if choice.mode == "auto" and "strict_tools" not in capabilities:
            choice = msgspec.structs.replace(choice, names=[])
        approximate = self.plan.approximate
        return GenerateRequest(
            request_id=request_id,
            scope=self.principal.scope,
            prompt=self.plan.prompt,
            # Where leaving a field out would make the answer wrong, routing has already refused the
            # turn. An engine of an earlier version may refuse a field that it does not know.
            sampling=self.sampling.within(capabilities),
            breakpoints=[_held_at(point, ttls) for point in self.plan.breakpoints],
            documents=[] if approximate is None else approximate.documents,
            names=self.plan.names,
            # A manual clock stands still, so on it no time has passed.
            age_seconds=0.0 if "manual_clock" in capabilities else max(0.0, now - self.arrived),
            min_cache_tokens=self.model.min_cache_tokens,
            tool_choice=choice,
            thinking=self._thinks(capabilities),
            output_schema=self.output_schema,
            output_pattern=self.output_pattern,
            lease_share=self.principal.lease_share,
            service_class="batch" if self.is_batch and can_wait else "interactive",
            adapter=self.model.digest,
            salt=self.plan.salt,
            lookback_to=self.plan.lookback_to if "lookback_to" in capabilities else None,
        )

    def shortened(self, ttls: Collection[str]) -> list[Ignored]:
        """The markers that an engine with these TTL classes holds for a shorter time."""
        notes: list[Ignored] = []
        for point in self.plan.breakpoints:
            ttl = held_as(point.ttl, ttls)
            if ttl != point.ttl:
                path = self.plan.slots[point.segment].path
                asked_time = TTLS[point.ttl].words
                held_time = TTLS[ttl].words
                reason = f"this engine can't hold it for {asked_time}: it holds it for {held_time}"
                notes.append(Ignored(path, reason))
        return notes

    def count_request(self, capabilities: Collection[Capability]) -> CountRequest:
        return CountRequest(self.principal.scope, self.plan.prompt, self._thinks(capabilities))

    def _thinks(self, capabilities: Collection[Capability]) -> bool:
        return self.thinking and "thinking" in capabilities


def _held_at(point: Breakpoint, ttls: Collection[str]) -> Breakpoint:
    """The breakpoint as an engine with these TTL classes holds it."""
    ttl = held_as(point.ttl, ttls)
    return point if ttl == point.ttl else msgspec.structs.replace(point, ttl=ttl)
