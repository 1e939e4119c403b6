"""One turn as the gateway understands it, whatever dialect it came in."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, NewType

from engine.protocol import Capability, CountRequest, GenerateRequest, Sampling, ToolChoice
from gateway.catalogue import Model
from gateway.prefix.fingerprint import Fingerprint, digest_parameters, points_of
from gateway.prefix.plan import Plan

TurnId = NewType("TurnId", str)
Dialect = Literal["anthropic", "openai"]


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks: a key of a workspace. `scope` is the workspace's cache salt."""

    workspace: str
    key_id: str
    scope: str


@dataclass(frozen=True, slots=True)
class Compared:
    """What a client wants its prompt compared with, and what shapes it besides its content."""

    is_wanted: bool = False
    previous: str | None = None
    parameters: bytes = b""


def guarantees_calls(choice: ToolChoice, *, has_schema: bool) -> bool:
    """Whether every call that an engine may make is held to its tool's schema (protocol, rules 10
    and 11): with `auto` and no output schema the model writes calls freely."""
    return choice.mode != "auto" or has_schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """`arrived` is on the monotonic clock: the prompt's TTLs count from it.

    `must_think` refuses engines that can't, where `thinking` alone means: if it can. Requests of a
    workspace with one `routing_key` go to one engine; None routes by the prompt's first segment.
    `num_removed` nonces were left out of the prompt. With an `output_schema` the text is JSON of
    that schema.
    """

    principal: Principal
    model: Model
    plan: Plan
    sampling: Sampling
    tool_choice: ToolChoice
    thinking: bool
    must_think: bool
    omit_thinking: bool
    stream: bool
    arrived: float
    routing_key: str | None = None
    comparison: Compared = Compared()
    dialect: Dialect = "anthropic"
    num_removed: int = 0
    output_schema: dict[str, Any] | None = None

    def fingerprint(self, num_tokens: int) -> Fingerprint:
        """What is kept of this turn's prompt, which has `num_tokens`."""
        return Fingerprint(
            model=self.model.id,
            parameters=digest_parameters(self.comparison.parameters, self.principal.scope),
            num_tools=len(self.plan.prompt.tools),
            num_system=len(self.plan.prompt.system),
            points=points_of(self.plan.prefixes),
            num_tokens=num_tokens,
            is_shared=self.comparison.is_wanted,
        )

    def generate_request(
        self, turn_id: TurnId, now: float, capabilities: Collection[Capability]
    ) -> GenerateRequest:
        """For an engine with these capabilities, at `now` on the monotonic clock."""
        return GenerateRequest(
            request_id=turn_id,
            scope=self.principal.scope,
            prompt=self.plan.prompt,
            sampling=self.sampling,
            breakpoints=self.plan.breakpoints,
            names=self.plan.names,
            age_seconds=max(0.0, now - self.arrived),
            min_cache_tokens=self.model.min_cache_tokens,
            tool_choice=self.tool_choice,
            thinking=self._thinks(capabilities),
            output_schema=self.output_schema,
        )

    def count_request(self, capabilities: Collection[Capability]) -> CountRequest:
        return CountRequest(self.principal.scope, self.plan.prompt, self._thinks(capabilities))

    def _thinks(self, capabilities: Collection[Capability]) -> bool:
        return self.thinking and "thinking" in capabilities
