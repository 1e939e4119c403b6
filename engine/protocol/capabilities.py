"""What an engine may be able to do, and what it may promise.

A *capability* depends on an engine's kind, model and server: of two engines of one version one may
have it, and the other not. A *flag* of the `Description`, such as `takes_releases`, is true of
every engine since some version. An older engine's description lacks it, which means false. An older
gateway ignores it. Every engine has the capability `lookback_to`, which is older than this rule.
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
