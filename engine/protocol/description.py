"""What an engine is: its model, its memory, what it can do and what it guarantees."""

from typing import Literal

import msgspec

from engine.protocol.values import PROTOCOL_VERSION, Capability, GuaranteeName


class Guarantee(msgspec.Struct, frozen=True):
    """Whether an engine keeps one promise of this protocol, and by what, or why not.

    `exact_read` and `exact_write`: the counts are what the memory did. `hold`: a lease keeps its
    content until it expires. `isolation`: no scope reads or times another's content. `events`: what
    leaves the memory is told. `forced_tools`: forced calls are guaranteed.
    """

    name: GuaranteeName
    is_kept: bool
    note: str = ""


EngineRole = Literal["prefill", "decode", "both"]
"""What gateways send to an engine: whole turns (`both`), the prompts that other engines answer
(`prefill`), or turns and the answers to prompts that others prefilled (`decode`)."""


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """`granularity`: entries sit at multiples of this many tokens (1 is exact to the token).

    `prefix_order` says whether tools are rendered before the system prompt or where the model's
    own template puts them. `epoch` changes with every start: nothing of an older one is held.
    `max_running` sequences are computed together at most, 0 where the engine does not tell: what is
    sent beyond waits there. `longest_token_bytes` of text, as UTF-8, become one token at most, so a
    prompt of n bytes has n / that many tokens at least; 0 where the engine does not tell, or where
    its tokenizer leaves text out. `upstream` is the kind of the server that an engine of the
    backend `upstream` stands in front of. `kv_dtype` is the type that keys and values are kept in,
    empty where the engine does not tell. `attention` is what computes it on the native engine:
    `sdpa` (torch's own functions), `triton`, or `cpp` and the processor's level that the kernel was
    built for (`cpp x86-64-v4`, `cpp native`); empty where the engine does not tell.
    `guarantees` has each name once. An engine with a `role` shares a store with the others of its
    model. Requests may carry a `record` where it `keeps_records`.
    """

    backend: Literal["native", "vllm", "synthetic", "upstream"]
    model: str
    epoch: str
    max_context_tokens: int
    block_size: int
    num_blocks: int
    granularity: int
    min_cache_tokens: int
    capabilities: list[Capability]
    prefix_order: Literal["tools_first", "template"] = "template"
    tool_format: str | None = None
    reasoning_format: str | None = None
    kv_bytes_per_token: int = 0
    kv_dtype: str = ""
    attention: str = ""
    default_temperature: float = 1.0
    default_top_p: float = 1.0
    default_top_k: int = 0
    ttl_scale: float = 1.0
    max_running: int = 0
    longest_token_bytes: int = 0
    upstream: str | None = None
    guarantees: list[Guarantee] = []
    role: EngineRole = "both"
    keeps_records: bool = False
    protocol_version: int = PROTOCOL_VERSION
