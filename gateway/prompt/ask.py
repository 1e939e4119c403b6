"""One turn as the gateway understands it, whatever dialect it came in."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NewType

import msgspec

from engine.protocol import (
    TTLS,
    Capability,
    CountRequest,
    GenerateRequest,
    Sampling,
    ToolChoice,
    held_as,
)
from gateway.base.catalogue import Model
from gateway.base.grants import DEFAULT_AUTO_CACHE, NO_LIMITS, AutoCache, Limits
from gateway.prompt.fingerprint import Fingerprint, digest_parameters
from gateway.prompt.ignored import Ignored, Notepad
from gateway.prompt.plan import Plan
from gateway.structs.fleet import KeyScope

NAME_CHARACTERS = 64
AGENT_CHARACTERS = 64


@dataclass(frozen=True, slots=True)
class Origin:
    """`request_id` is the id in the response's `request-id` header; `user_agent` is the client's.

    A turn of a batch has the id that an error in its result would have, and no user agent.
    `headers` are the request's, of which the caller's trace is read where turns are traced.
    """

    request_id: str | None = None
    user_agent: str | None = None
    headers: Iterable[tuple[bytes, bytes]] = ()


NO_ORIGIN = Origin()


def agent_of(user_agent: str) -> str | None:
    """The client's own name for itself, without characters that can't be shown, cut to 64."""
    return _shown(user_agent, AGENT_CHARACTERS)


def name_of(metadata: Any) -> str | None:
    """The `name` of a request's metadata, cut to 64 characters; None where it has no such text."""
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return _shown(name, NAME_CHARACTERS) if isinstance(name, str) else None


def camel(name: str) -> str:
    """`system_instruction` as Google writes it: `systemInstruction`."""
    first, *rest = name.split("_")
    return first + "".join(map(str.capitalize, rest))


def _shown(text: str, most: int) -> str | None:
    head = text[: 4 * most]
    return "".join(letter for letter in head if letter.isprintable()).strip()[:most] or None


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
"""What APIs call fields of Sampling, where they have other names."""
_BYTES_PER_TOKEN = 4
_MAX_RESERVED_OUTPUT = 1024


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks: a key of a workspace. `scope` is the workspace's cache salt.

    `lease_share` is the part, 0 to 1, of an engine's lease budget that the workspace may take;
    None is no bound of its own. `auto_cache` is for requests without markers. `keeps_contents`: its
    workspace keeps prompts and answers. `may_approximate`: it may ask for approximations.
    """

    workspace: str
    key_id: str
    scope: str
    key_scope: KeyScope = "inference"
    limits: Limits = NO_LIMITS
    lease_share: float | None = None
    auto_cache: AutoCache = DEFAULT_AUTO_CACHE
    keeps_contents: bool = False
    may_approximate: bool = False


@dataclass(frozen=True, slots=True)
class Compared:
    """What a client wants its prompt compared with, and what shapes it besides its content."""

    is_wanted: bool = False
    previous: str | None = None
    parameters: bytes = b""


NOT_COMPARED = Compared()


def guarantees_calls(choice: ToolChoice, *, has_schema: bool) -> bool:
    """Whether every call of an answer is held to its tool's schema (protocol, rules 10 and 11).

    With `auto` and no output schema the model writes calls freely.
    """
    return choice.mode != "auto" or has_schema


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """`arrived` is on the monotonic clock: the prompt's TTLs count from it. `thinking` means: if
    the model can. Requests of a workspace with one `routing_key` go to one engine. `num_removed`
    nonces were left out of the prompt. `include_usage`: a stream of OpenAI's dialect ends with the
    usage. `output_schema` and `output_pattern` bind the text as in the engine protocol. `notes` are
    the fields that only ask for better. `name` is what the client calls this request.
    `custom_tools` are the functions of the prompt whose calls go out as a text."""

    principal: Principal
    model: Model
    plan: Plan
    sampling: Sampling
    arrived: float
    tool_choice: ToolChoice = ToolChoice()
    thinking: bool = False
    omit_thinking: bool = False
    stream: bool = False
    include_usage: bool = False
    routing_key: str | None = None
    comparison: Compared = NOT_COMPARED
    dialect: Api = "anthropic"
    num_removed: int = 0
    output_schema: dict[str, Any] | None = None
    output_pattern: str | None = None
    is_batch: bool = False
    notes: Notepad = msgspec.field(default_factory=Notepad)
    name: str | None = None
    custom_tools: frozenset[str] = frozenset()

    def path_of(self, name: str) -> str:
        """Where in the request a field of the sampling stands."""
        native = SAMPLING_NAMES[self.dialect].get(name, name)
        return f"generationConfig.{camel(native)}" if self.dialect == "gemini" else native

    @property
    def estimated_tokens(self) -> int:
        """The tokens to reserve for the turn: bytes / 4, and at most 1,024 of each answer.

        Clients ask for far more output than models write.
        """
        choices = self.sampling.num_choices
        return self.prompt_tokens + min(self.most_output, _MAX_RESERVED_OUTPUT * choices)

    @property
    def most_output(self) -> int:
        """The most tokens that may be written; without a bound 1,024 of each answer are assumed."""
        longest = self.sampling.max_tokens
        output = _MAX_RESERVED_OUTPUT if longest is None else longest
        return output * self.sampling.num_choices

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
        sampling = self.sampling
        can_wait = "service_class" in capabilities
        if sampling.logprobs is not None and "logprobs" not in capabilities:
            # Where that is an error, routing has refused the turn. So it is with the next.
            sampling = msgspec.structs.replace(sampling, logprobs=None)
        if "own_template" not in capabilities:
            sampling = msgspec.structs.replace(sampling, top_k=None)
        choice = self.tool_choice
        if choice.mode == "auto" and "strict_tools" not in capabilities:
            choice = msgspec.structs.replace(choice, names=[])
        approximate = self.plan.approximate
        return GenerateRequest(
            request_id=request_id,
            scope=self.principal.scope,
            prompt=self.plan.prompt,
            sampling=sampling,
            breakpoints=[
                msgspec.structs.replace(point, ttl=held_as(point.ttl, ttls))
                for point in self.plan.breakpoints
            ],
            documents=[] if approximate is None else approximate.documents,
            names=self.plan.names,
            # A manual clock stands still while this one goes on: no time has passed on it.
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
        paths = self.plan.paths
        shortened: list[Ignored] = []
        for point in self.plan.breakpoints:
            ttl = held_as(point.ttl, ttls)
            if ttl != point.ttl:
                reason = f"this engine holds nothing for longer than {TTLS[ttl].words}"
                shortened.append(Ignored(paths[point.segment], reason))
        return shortened

    def count_request(self, capabilities: Collection[Capability]) -> CountRequest:
        return CountRequest(self.principal.scope, self.plan.prompt, self._thinks(capabilities))

    def _thinks(self, capabilities: Collection[Capability]) -> bool:
        return self.thinking and "thinking" in capabilities
