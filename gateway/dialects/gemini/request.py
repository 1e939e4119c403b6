"""Request bodies of generateContent, streamGenerateContent and countTokens.

The model is in the path; `decode.py` puts it into the request.
"""

from typing import Annotated, Any

import msgspec

from engine.protocol import MAX_LOGPROBS
from gateway.dialects.gemini.content import Content, Shape, Tool, ToolConfig

_MAX_COUNT = 1_000_000_000
MAX_CANDIDATES = 16
ENUM_TYPE = "text/x.enum"
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
Count = Annotated[int, msgspec.Meta(ge=0, le=_MAX_COUNT)]


class ThinkingConfig(Shape):
    """A budget of 0 asks for no thinking, -1 lets the model decide."""

    include_thoughts: bool = False
    thinking_budget: Annotated[int, msgspec.Meta(ge=-1, le=_MAX_COUNT)] | None = None
    thinking_level: str | None = None


class GenerationConfig(Shape):
    """`ask.py` says what is done with each field; what is not done is told or refused by name."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    top_k: Count | None = None
    max_output_tokens: Count | None = None
    stop_sequences: list[str] = msgspec.field(default_factory=list)
    candidate_count: Annotated[int, msgspec.Meta(ge=1, le=MAX_CANDIDATES)] = 1
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    response_mime_type: str = ""
    response_schema: dict[str, Any] | None = None
    response_json_schema: dict[str, Any] | None = None
    thinking_config: ThinkingConfig | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    response_logprobs: bool = False
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    response_modalities: list[str] = msgspec.field(default_factory=list)
    response_format: Any = None
    media_resolution: Any = None
    speech_config: Any = None
    image_config: Any = None
    audio_timestamp: Any = None
    audio_transcription_config: Any = None
    enable_affective_dialog: Any = None
    enable_enhanced_civic_answers: Any = None
    routing_config: Any = None
    model_config: Any = None
    model_selection_config: Any = None
    translation_config: Any = None
    continuation_token: Any = None

    @property
    def is_enum(self) -> bool:
        """Whether the answer is one of a schema's strings, without quotes."""
        return self.response_mime_type == ENUM_TYPE


class Prompted(Shape):
    """What every prompt here is made of: of a request, of a cached content."""

    contents: list[Content] = msgspec.field(default_factory=list)
    system_instruction: Content | None = None
    tools: list[Tool] = msgspec.field(default_factory=list)
    tool_config: ToolConfig | None = None
    model: str = ""


class GenerateRequest(Prompted):
    """`serviceTier` and `store` change nothing here. Of `labels` the `name` alone is kept."""

    generation_config: GenerationConfig = msgspec.field(default_factory=GenerationConfig)
    cached_content: str | None = None
    safety_settings: list[Any] = msgspec.field(default_factory=list)
    labels: Any = None
    service_tier: Any = None
    store: Any = None


class CountRequest(Shape):
    """Contents, or a whole request: one of them."""

    contents: list[Content] = msgspec.field(default_factory=list)
    generate_content_request: GenerateRequest | None = None
    system_instruction: Content | None = None
    tools: list[Tool] = msgspec.field(default_factory=list)
    generation_config: GenerationConfig | None = None
    model: str = ""
