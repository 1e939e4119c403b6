"""Whatever ended a turn, the conversation goes on in its dialect, and reads what was written.

A real model answers; each answer goes back as the SDK holds it, with the results of its calls.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from anthropic import Anthropic
from google import genai
from google.genai import types
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from openai import OpenAI

from scripts.stack import API_KEY, Stack
from tests.clients.conversation import ABOUT_WEATHER, EPHEMERAL, QUESTIONS
from tests.e2e.prompts import MODEL, handbook
from tests.gateway.admin_client import Admin

NUM_EXAMPLES = int(os.environ.get("SENT_BACK_EXAMPLES", "3"))
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ABOUT = {"name": "get_weather", "description": ABOUT_WEATHER}
RESULT = "sunny"


@dataclass(frozen=True)
class Cut:
    """How a turn is asked for, and so how it may end: a limit of tokens, a stop sequence, the
    client that leaves after so many events, or the end of a grammar, that of a forced call."""

    limit: int = 40
    stop: str = ""
    events: int | None = None
    is_forced: bool = False


CUTS = st.builds(
    Cut,
    limit=st.integers(1, 40),
    stop=st.sampled_from(["", "e", "get", '"']),
    events=st.none() | st.integers(1, 12),
    is_forced=st.booleans(),
)


@dataclass
class Usage:
    """Tokens read from what was kept, and what a later turn must find: these and what is new."""

    reused: int
    kept: int


@dataclass
class Talk(ABC):
    """A conversation in one dialect. `history` is what the client sends."""

    stack: Stack
    system: str = field(default_factory=lambda: handbook(60))
    history: list[Any] = field(default_factory=list)

    @abstractmethod
    def say(self, question: str) -> None: ...

    @abstractmethod
    def ask(self, cut: Cut) -> Usage | None:
        """Ask, and put the answer and the results of its calls into the history. None where the
        client left before it heard of the usage."""


def usage_of(read_tokens: int, extension: dict[str, Any]) -> Usage:
    """`read_tokens` are without what was reused unmarked."""
    return Usage(
        read_tokens + extension["automatic_tokens"], read_tokens + extension["written_tokens"]
    )


class InMessages(Talk):
    def sdk(self) -> Anthropic:
        return Anthropic(base_url=self.stack.gateway, api_key=API_KEY, timeout=300, max_retries=0)

    def say(self, question: str) -> None:
        self.history.append({"role": "user", "content": [{"type": "text", "text": question}]})

    def ask(self, cut: Cut) -> Usage | None:
        body: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": cut.limit,
            "system": self.system,
            "tools": [{**ABOUT, "input_schema": CITY}],
            "tool_choice": {"type": "any" if cut.is_forced else "auto"},
            "messages": self.history,
            "cache_control": EPHEMERAL,
        }
        if cut.stop:
            body["stop_sequences"] = [cut.stop]
        with self.sdk() as sdk, sdk.messages.stream(**body) as events:
            for number, _ in enumerate(events, 1):
                if number == cut.events:
                    break
            answer = events.current_message_snapshot
            is_whole = answer.stop_reason is not None
        self.history.append({"role": "assistant", "content": answer.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": RESULT}
            for block in answer.content
            if block.type == "tool_use"
        ]
        if results:
            self.history.append({"role": "user", "content": results})
        if not is_whole:
            return None
        extension: Any = (answer.model_extra or {})["holdfast"]
        usage = answer.usage
        read_tokens = usage.cache_read_input_tokens or 0
        written_tokens = usage.cache_creation_input_tokens or 0
        return Usage(read_tokens + extension["automatic_tokens"], read_tokens + written_tokens)


class InChat(Talk):
    def sdk(self) -> OpenAI:
        url = f"{self.stack.gateway}/v1"
        return OpenAI(base_url=url, api_key=API_KEY, timeout=300, max_retries=0)

    def say(self, question: str) -> None:
        if not self.history:
            self.history.append({"role": "system", "content": self.system})
        self.history.append({"role": "user", "content": question})

    def ask(self, cut: Cut) -> Usage | None:
        body: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": cut.limit,
            "tools": [{"type": "function", "function": {**ABOUT, "parameters": CITY}}],
            "tool_choice": "required" if cut.is_forced else "auto",
            "messages": self.history,
            "stop": cut.stop or None,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        holdfast: dict[str, Any] = {}
        usage = None
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        calls: dict[int, dict[str, Any]] = {}
        with self.sdk() as sdk, sdk.chat.completions.create(**body) as chunks:
            for number, chunk in enumerate(chunks, 1):
                holdfast |= (chunk.model_extra or {}).get("holdfast") or {}
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    message["content"] += choice.delta.content or ""
                    for piece in choice.delta.tool_calls or []:
                        call = calls.setdefault(
                            piece.index,
                            {
                                "id": piece.id,
                                "type": "function",
                                "function": {"name": piece.function.name, "arguments": ""},
                            },
                        )
                        call["function"]["arguments"] += piece.function.arguments or ""
                if number == cut.events:
                    break
        if calls:
            message["tool_calls"] = [*calls.values()]
        self.history.append(message)
        self.history += [
            {"role": "tool", "tool_call_id": call["id"], "content": RESULT}
            for call in calls.values()
        ]
        if usage is None:
            return None
        return usage_of(
            usage.prompt_tokens_details.cached_tokens - holdfast["automatic_tokens"], holdfast
        )


class InResponses(Talk):
    def sdk(self) -> OpenAI:
        url = f"{self.stack.gateway}/v1"
        return OpenAI(base_url=url, api_key=API_KEY, timeout=300, max_retries=0)

    def say(self, question: str) -> None:
        self.history.append({"role": "user", "content": question})

    def ask(self, cut: Cut) -> Usage | None:
        items: dict[int, Any] = {}
        response = None
        body: dict[str, Any] = {
            "model": MODEL,
            "instructions": self.system,
            "input": self.history,
            "tools": [{"type": "function", **ABOUT, "parameters": CITY}],
            "tool_choice": "required" if cut.is_forced else "auto",
            "max_output_tokens": cut.limit,
            "store": False,
            "stream": True,
        }
        with self.sdk() as sdk, sdk.responses.create(**body) as events:
            for number, event in enumerate(events, 1):
                match event.type:
                    case "response.output_item.added" | "response.output_item.done":
                        items[event.output_index] = event.item.model_dump(exclude_none=True)
                    case "response.function_call_arguments.delta":
                        items[event.output_index]["arguments"] += event.delta
                    case "response.completed" | "response.incomplete":
                        response = event.response
                if number == cut.events:
                    break
        self.history += items.values()
        self.history += [
            {"type": "function_call_output", "call_id": item["call_id"], "output": RESULT}
            for item in items.values()
            if item["type"] == "function_call"
        ]
        if response is None:
            return None
        holdfast = response.model_extra["holdfast"]
        cached = response.usage.input_tokens_details.cached_tokens
        return usage_of(cached - holdfast["automatic_tokens"], holdfast)


class InGemini(Talk):
    def say(self, question: str) -> None:
        self.history.append(types.UserContent(question))

    def ask(self, cut: Cut) -> Usage | None:
        parts: list[types.Part] = []
        last = None
        with google(self.stack) as sdk:
            chunks = sdk.models.generate_content_stream(
                model=MODEL, contents=self.history, config=self.config(cut)
            )
            for number, last in enumerate(chunks, 1):
                for candidate in last.candidates or []:
                    parts += (candidate.content and candidate.content.parts) or []
                if number == cut.events:
                    break
            chunks.close()
        if parts:
            self.history.append(types.Content(role="model", parts=parts))
        results = [
            types.Part.from_function_response(
                name=part.function_call.name or "", response={"output": RESULT}
            )
            for part in parts
            if part.function_call
        ]
        if results:
            self.history.append(types.Content(role="user", parts=results))
        if last is None or last.usage_metadata is None:
            return None
        # The SDK leaves out what it does not know: the turn's row says what was written.
        row = Admin(self.stack.gateway).recorded(last.response_id or "")
        read_tokens = row["cache_read_tokens"]
        assert (last.usage_metadata.cached_content_token_count or 0) == read_tokens
        written_tokens = sum(row[f"cache_write_{ttl}_tokens"] for ttl in ("5m", "1h", "12h"))
        return Usage(read_tokens + row["automatic_tokens"], read_tokens + written_tokens)

    def config(self, cut: Cut) -> types.GenerateContentConfig:
        function = types.FunctionDeclaration(**ABOUT, parameters_json_schema=CITY)
        mode = types.FunctionCallingConfigMode.ANY if cut.is_forced else None
        calling = types.FunctionCallingConfig(mode=mode)
        return types.GenerateContentConfig(
            system_instruction=self.system,
            tools=[types.Tool(function_declarations=[function])],
            tool_config=types.ToolConfig(function_calling_config=calling),
            max_output_tokens=cut.limit,
            stop_sequences=[cut.stop] if cut.stop else None,
            automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
        )


class InInteractions(Talk):
    """The SDK's stream has no snapshot, so no client leaves one here."""

    def say(self, question: str) -> None:
        content = [{"type": "text", "text": question}]
        self.history.append({"type": "user_input", "content": content})

    def ask(self, cut: Cut) -> Usage | None:
        generation: dict[str, Any] = {
            "max_output_tokens": cut.limit,
            "tool_choice": "any" if cut.is_forced else "auto",
        }
        if cut.stop:
            generation["stop_sequences"] = [cut.stop]
        with google(self.stack) as sdk:
            create: Any = sdk.interactions.create
            answer = create(
                model=MODEL,
                input=self.history,
                system_instruction=self.system,
                tools=[{"type": "function", **ABOUT, "parameters": CITY}],
                generation_config=generation,
                store=False,
            )
        self.history += [step.model_dump(exclude_none=True) for step in answer.steps]
        self.history += [
            {"type": "function_result", "call_id": step.id, "result": RESULT}
            for step in answer.steps
            if step.type == "function_call"
        ]
        return usage_of(answer.usage.total_cached_tokens, answer.model_extra["holdfast"])


def google(stack: Stack) -> genai.Client:
    options = types.HttpOptions(base_url=stack.gateway, timeout=300_000)
    return genai.Client(api_key=API_KEY, http_options=options)


@pytest.mark.filterwarnings("ignore:Pydantic serializer")
@pytest.mark.parametrize("kind", [InMessages, InChat, InResponses, InGemini, InInteractions])
def test_any_turn_is_gone_on_from_and_read(stack: Stack, kind: type[Talk]) -> None:
    # A turn takes a second or more: what fails is shown as it was drawn.
    @settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(cuts=st.lists(CUTS, min_size=3, max_size=5))
    def goes_on(cuts: Sequence[Cut]) -> None:
        talk = kind(stack)
        num_kept = 0
        for number, cut in enumerate(cuts):
            talk.say(QUESTIONS[number])
            usage = talk.ask(cut)
            if usage is not None:
                assert usage.reused >= num_kept, (number, cuts)
                assert usage.kept > max(num_kept, 1024)
                num_kept = usage.kept

    goes_on()
