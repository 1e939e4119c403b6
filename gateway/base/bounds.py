"""Bounds and times that suit nearly every installation. HOLDFAST_TUNING changes any of them.

A request beyond a bound is refused before any work is done for it. The error comes in the dialect's
envelope and names the field and the bound.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MEBIBYTE = 1 << 20
# The longest time. A moment that is so far ahead still has a date.
TEN_YEARS = 10 * 365 * 86_400.0

Count = Annotated[int, Field(ge=1, le=1 << 50)]
Host = Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})+$")]
Seconds = Annotated[float, Field(gt=0, le=TEN_YEARS)]


class RequestBounds(BaseModel):
    """Bounds of one request. A length of a text is in characters, unless the name says bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # Objects, lists, strings and numbers of a body.
    max_json_values: Count = 400_000
    # Keys of one JSON object.
    max_object_keys: Count = 16_000
    # The input of one tool call in the messages, as JSON.
    max_call_bytes: Count = MEBIBYTE
    # Content blocks of system, messages and tool results. A text counts as one block.
    max_blocks: Count = 20_000
    max_tools: Count = 512
    # The schema of a tool or of the output, as JSON.
    max_schema_bytes: Count = 128 * 1024
    # Levels of JSON that contain each other.
    max_schema_depth: Annotated[int, Field(ge=4, le=64)] = 64
    max_schema_values: Count = 10_000
    # Properties of all levels together.
    max_schema_properties: Count = 1000
    # Stop sequences of one request of any dialect. OpenAI documents a bound of four.
    max_stop_sequences: Count = 64
    max_stop_characters: Count = 1024
    max_choices: Annotated[int, Field(ge=1, le=16)] = 16
    # Log probabilities of an answer in one piece, in all choices: those of its tokens and those of
    # the likeliest other tokens. The Responses API has the bound for streamed answers, too.
    max_logprobs: Count = 200_000
    # The name or id of a model, a tool or a tool call.
    max_name_characters: Count = 256
    max_metadata_bytes: Count = 16 * 1024
    # Turns, or sums of turns, that one export of usage may read.
    max_export_rows: Count = 1_000_000


class Tuning(RequestBounds):
    """The bounds of one request, the bounds of many, and times.

    The bounds of many are of all requests together, of one workspace or of one address.
    """

    # All request bodies that are read or held at one time. The bodies of one workspace may take at
    # most as many bytes as are still free.
    bodies_bytes: Count = 512 * MEBIBYTE
    # Bodies longer than 1 MiB, of one workspace. A body beyond the rate waits up to 10 seconds.
    large_body_bytes_per_minute: Count = 128 * MEBIBYTE
    # Calls of `count_tokens`, of one workspace.
    count_requests_per_minute: Count = 1000
    # Bodies of these calls.
    count_bytes_per_minute: Count = 32 * MEBIBYTE
    # Such calls at one time.
    count_concurrency: Count = 8
    # Connections of clients. They never get more than three quarters of the descriptors that the
    # process may have.
    connections: Count = 16_384
    # Connections of one address that have not shown a valid key yet.
    connections_per_address: Count = 256
    # Unknown keys from one address that are looked up in the database.
    key_lookups_per_minute: Count = 1200
    # How long a known API key still works while the database is away.
    keys_stale_seconds: Seconds = 3600.0
    # The time for a request's headers, and again for its body. A body gets another second for each
    # 16 KiB.
    request_seconds: Seconds = 30.0
    # A client that does not read its answer for this long is cut off.
    stall_seconds: Seconds = 60.0
    # The hosts from which images are fetched, over `https`, if a request gives an image's address.
    # Each request fetches its images anew.
    image_hosts: tuple[Host, ...] = ()
    # Batches of one workspace that have not ended.
    batches: Count = 100
    # Rows of one batch.
    batch_rows: Count = 100_000
    # Rows of all batches of one workspace. They count until the batches are deleted. A row counts
    # 512 bytes more than it has, and a batch counts 16 KiB.
    batch_bytes: Count = 1024 * MEBIBYTE
    # After this time the rows of a batch that have not run expire.
    batch_seconds: Seconds = 86_400.0
    # Cached contents of one workspace.
    cached_contents: Count = 1000
    # Bytes of the cached contents of one workspace.
    cached_content_bytes: Count = 256 * MEBIBYTE
    # The longest lifetime of a cached content.
    cached_content_seconds: Seconds = 7 * 86_400.0
    # Responses and conversations of one workspace, compressed as they are stored.
    response_bytes: Count = 1024 * MEBIBYTE
    # Tokens of prefill that may wait at one engine. Further turns wait at the gateway, in fair
    # order.
    engine_queue_tokens: Count = 16_384
    # An engine is down if it has not answered for this long. Before that, turns wait for it as they
    # wait for a full engine. An engine that refuses connections is down at once.
    engine_down_seconds: Annotated[float, Field(ge=0, le=86_400)] = 30.0
    # Memory for the names of the prefixes that all engines hold, at 160 bytes a name.
    routing_index_bytes: Count = 640 * MEBIBYTE
    # The time in which recent load fades to 1/e.
    routing_fade_seconds: Seconds = 600.0
    # Weights of the cost by which an engine is chosen (`Weights` in `routing/router.py`).
    routing_host_cost: Annotated[float, Field(ge=0, le=1)] = 0.1
    routing_delay_cost: Annotated[float, Field(ge=0, le=1000)] = 0.25


DEFAULT_BOUNDS = RequestBounds()
