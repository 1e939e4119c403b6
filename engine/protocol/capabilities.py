"""What an engine may be able to do, and what it may promise.

A *capability* is what engines of one version may have or not, by their kind, model and server. A
*flag* of the `Description`, such as `takes_releases`, is what every engine has since a version: an
older engine's description has none, which means false, and an older gateway ignores it.
`lookback_to` is a capability though all have it: it is older than this rule.
"""

from typing import Literal, get_args

Capability = Literal[
    "copy_on_write",
    "multiple_choices",
    "tools",
    "forced_tools",
    "structured_output",
    "strict_tools",
    "penalties",
    "repetition_penalty",
    "min_p",
    "stop_token_ids",
    "min_tokens",
    "allowed_token_ids",
    "logprobs",
    "thinking",
    "manual_clock",
    "block_map",
    "service_class",
    "own_template",
    "lookback_to",
    "cache_salt",
    "images",
]
CAPABILITIES: tuple[Capability, ...] = get_args(Capability)

GuaranteeName = Literal["exact_read", "exact_write", "hold", "isolation", "events", "forced_tools"]
