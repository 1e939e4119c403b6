"""Bounds and times that hold for nearly every installation. HOLDFAST_TUNING changes single ones.

A request beyond a bound is refused before any work is done for it. The error comes in the dialect's
envelope and names the field and the bound.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MEBIBYTE = 1 << 20
# A time that is so far ahead still has a date.
TEN_YEARS = 10 * 365 * 86_400.0

Count = Annotated[int, Field(ge=1, le=1 << 50)]
Host = Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})+$")]
Seconds = Annotated[float, Field(gt=0, le=TEN_YEARS)]


class RequestBounds(BaseModel):
    """Bounds of one request. Lengths of texts are in characters unless a field says bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_json_values: Count = 400_000  # objects, lists, strings and numbers of a body
    max_object_keys: Count = 16_000  # of one JSON object
    max_call_bytes: Count = MEBIBYTE  # JSON of the input of one tool call in the messages
    max_blocks: Count = 20_000  # content blocks of system, messages and tool results; a text is one
    max_tools: Count = 512
    max_schema_bytes: Count = 128 * 1024  # JSON of the schema of a tool or of the output
    max_schema_depth: Annotated[int, Field(ge=4, le=64)] = 64  # levels of JSON
    max_schema_values: Count = 10_000
    max_schema_properties: Count = 1000  # at all levels together
    max_stop_sequences: Count = 64  # in Messages; OpenAI documents four
    max_stop_characters: Count = 1024
    max_choices: Annotated[int, Field(ge=1, le=16)] = 16
    # Of an answer that is not streamed: of its tokens and the likeliest others, in all choices.
    # In the Responses API also where it is streamed.
    max_logprobs: Count = 200_000
    max_name_characters: Count = 256  # of the name or id of a model, a tool or a tool's call
    max_metadata_bytes: Count = 16 * 1024
    max_export_rows: Count = 1_000_000  # turns, or their sums, that one export of usage may read


class Tuning(RequestBounds):
    """Besides: bounds of all requests together, of one workspace or of one address; and times."""

    bodies_bytes: Count = 512 * MEBIBYTE
    """All request bodies that are read or held at one time. A workspace may hold as many bytes as
    are left for others."""
    large_body_bytes_per_minute: Count = 128 * MEBIBYTE
    """Of a workspace in bodies longer than 1 MiB. A body beyond it waits up to 10 seconds."""
    count_requests_per_minute: Count = 1000
    """Calls of `count_tokens` of a workspace. The next two bound the same calls."""
    count_bytes_per_minute: Count = 32 * MEBIBYTE
    count_concurrency: Count = 8
    connections: Count = 16_384
    """Clients never get more than three quarters of the descriptors that the process may have."""
    connections_per_address: Count = 256
    """On which no valid key was shown yet."""
    key_lookups_per_minute: Count = 1200
    """Unknown keys of one address that are looked up in the database."""
    keys_stale_seconds: Seconds = 3600.0
    """For so long known API keys still work while the database is away."""
    request_seconds: Seconds = 30.0
    """The time for a request's headers, and then for its body, which gets one more for each
    16 KiB."""
    stall_seconds: Seconds = 60.0
    """After so long a client that does not read its answer is cut off."""
    image_hosts: tuple[Host, ...] = ()
    """From which `https` images by address are fetched, each time; from no others."""
    batches: Count = 100
    """Of a workspace that have not ended."""
    batch_rows: Count = 100_000
    batch_bytes: Count = 1024 * MEBIBYTE
    """Rows of all batches of a workspace, until they are deleted. A row counts 512 bytes more and a
    batch 16 KiB."""
    batch_seconds: Seconds = 86_400.0
    """Rows of a batch that have not run then expire."""
    cached_contents: Count = 1000
    """Of a workspace, as the next one."""
    cached_content_bytes: Count = 256 * MEBIBYTE
    cached_content_seconds: Seconds = 7 * 86_400.0
    """The longest lifetime."""
    response_bytes: Count = 1024 * MEBIBYTE
    """Of a workspace's responses and conversations as they are kept, compressed."""
    engine_queue_tokens: Count = 16_384
    """Tokens of prefill that may wait at one engine. Further turns wait here, in fair order."""
    engine_down_seconds: Annotated[float, Field(ge=0, le=86_400)] = 30.0
    """After so long without an answer an engine is down. Before, turns wait for it as for a full
    one. One that refuses connections is down at once."""
    routing_index_bytes: Count = 640 * MEBIBYTE
    """Memory for the names of prefixes that engines hold, of all engines together, at 160 bytes."""
    routing_fade_seconds: Seconds = 600.0
    """The time constant with which load fades. The weights are those of `routing/router.py`."""
    routing_host_cost: Annotated[float, Field(ge=0, le=1)] = 0.1
    routing_delay_cost: Annotated[float, Field(ge=0, le=1000)] = 0.25


DEFAULT_BOUNDS = RequestBounds()
