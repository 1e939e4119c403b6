"""The gateway's bounds: what one request may ask for, and what all requests together may hold.

Each bound is a setting. A request beyond a bound is refused before any work is done for it. The
error comes in the dialect's envelope and names the field and the bound. `gateway/README.md` has the
table; a test compares the two.
"""

from pydantic import BaseModel, Field

from gateway.base.setting_types import TEN_YEARS, Bytes, Count

MEBIBYTE = 1 << 20


class RequestBounds(BaseModel):
    """Bounds of one request. Lengths of texts are in characters unless a field says bytes."""

    body_limit_bytes: Bytes = Field(
        default=32 * MEBIBYTE, ge=1024, description="Largest request body, in bytes"
    )
    max_json_values: Count = Field(
        default=400_000,
        ge=100,
        description="Most JSON values in a body: objects, lists, strings, numbers",
    )
    max_object_keys: Count = Field(
        default=16_000, ge=16, description="Most keys of one JSON object in a body"
    )
    max_call_bytes: Bytes = Field(
        default=MEBIBYTE,
        ge=1024,
        description="Longest input of one tool call in the messages, in bytes of JSON",
    )
    max_blocks: Count = Field(
        default=20_000,
        ge=1,
        description="Most content blocks in a request: of the system prompt, of messages and of"
        " tool results; a string is one",
    )
    max_tools: Count = Field(default=512, ge=1, description="Most tools in a request")
    max_schema_bytes: Bytes = Field(
        default=128 * 1024,
        ge=256,
        description="Longest schema of a tool or of the output, in bytes of JSON",
    )
    max_schema_depth: int = Field(
        default=64, ge=4, le=64, description="Deepest nesting of a schema, in levels of JSON"
    )
    max_schema_values: Count = Field(
        default=10_000, ge=16, description="Most JSON values in one schema"
    )
    max_schema_properties: Count = Field(
        default=1000, ge=1, description="Most properties in one schema, at all levels together"
    )
    max_stop_sequences: Count = Field(
        default=64,
        ge=1,
        description="Most stop sequences in Messages; Chat Completions and Completions take four,"
        " as OpenAI documents",
    )
    max_stop_characters: Count = Field(
        default=1024, ge=1, description="Longest stop sequence, in characters"
    )
    max_choices: int = Field(
        default=16, ge=1, le=16, description="Most choices (`n`) that a request may ask for"
    )
    max_logprobs: Count = Field(
        default=200_000,
        ge=1000,
        description="Most log probabilities in an answer that is not streamed: of its tokens and"
        " the likeliest others, in all choices; in the Responses API also where it is streamed",
    )
    max_name_characters: Count = Field(
        default=256,
        ge=64,
        description="Longest name or id of a model, a tool or a tool's call, in characters",
    )
    max_metadata_bytes: Bytes = Field(
        default=16 * 1024, ge=256, description="Longest metadata of a request, in bytes of JSON"
    )
    max_export_rows: Count = Field(
        default=1_000_000,
        ge=1,
        description="Most rows, of turns or of their sums, that one export of usage may read",
    )


class LoadBounds(BaseModel):
    """Bounds of all requests together, of one workspace, or of one address."""

    bodies_bytes: Bytes = Field(
        default=512 * MEBIBYTE,
        ge=MEBIBYTE,
        description="Bytes of all request bodies that are read or held at one time; a workspace may"
        " hold as many as are left for others",
    )
    large_body_bytes_per_minute: Bytes = Field(
        default=128 * MEBIBYTE,
        ge=MEBIBYTE,
        description="Bytes a minute that a workspace may send in bodies longer than 1 MiB; a body"
        " beyond it waits up to 10 seconds",
    )
    count_requests_per_minute: Count = Field(
        default=1000, ge=1, description="Calls of `count_tokens` a minute, for each workspace"
    )
    count_bytes_per_minute: Bytes = Field(
        default=32 * MEBIBYTE,
        ge=1024,
        description="Bytes that a workspace may have counted a minute",
    )
    count_concurrency: Count = Field(
        default=8, ge=1, description="Calls of `count_tokens` that run at one time in a workspace"
    )
    connections: Count = Field(
        default=0,
        ge=0,
        description="Most connections of clients; 0 is 16,384. Clients never get more than three"
        " quarters of the descriptors that the process may have",
    )
    connections_per_address: Count = Field(
        default=256,
        ge=1,
        description="Most connections of one address on which no valid key was shown yet",
    )
    key_lookups_per_minute: Count = Field(
        default=1200,
        ge=1,
        description="Unknown keys of one address that are looked up in the database a minute",
    )
    batches: Count = Field(
        default=100, ge=1, description="Most batches of a workspace that have not ended"
    )
    batch_rows: Count = Field(default=100_000, ge=1, description="Most rows of a batch of messages")
    batch_bytes: Bytes = Field(
        default=1024 * MEBIBYTE,
        ge=1024,
        description="Bytes of rows that all batches of a workspace may have together, until they"
        " are deleted; a row counts 512 bytes more and a batch 16 KiB",
    )
    batch_seconds: float = Field(
        default=86_400.0,
        gt=0,
        le=TEN_YEARS,
        description="For how many seconds a batch may run; rows that have not run then expire; at"
        " most ten years",
    )
    batch_concurrency: Count = Field(
        default=8,
        ge=1,
        description="Most rows of batches that a gateway has at engines at one time",
    )
    cached_contents: Count = Field(
        default=1000, ge=1, description="Most cached contents (Google's dialect) of a workspace"
    )
    cached_content_bytes: Bytes = Field(
        default=256 * MEBIBYTE,
        ge=1024,
        description="Bytes of prompts that the cached contents of a workspace may have together",
    )
    cached_content_seconds: float = Field(
        default=7 * 86_400.0,
        gt=0,
        le=TEN_YEARS,
        description="Longest lifetime of a cached content, in seconds; at most ten years",
    )
    routing_index_bytes: Bytes = Field(
        default=256 * MEBIBYTE,
        ge=MEBIBYTE,
        description="Memory for what engines hold, of all engines together, in bytes",
    )


DEFAULT_BOUNDS = RequestBounds()
