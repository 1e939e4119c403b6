"""Where a dialect's usage tells writes by TTL, it tells all of them."""

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import TTLS, WRITE_FIELDS, InputUsage, Ttl
from gateway.dialects.anthropic.request import AnthropicTtl, CacheTtl
from gateway.dialects.anthropic.response import CacheCreation
from gateway.dialects.anthropic.response import usage_of as messages_usage_of
from gateway.dialects.openai.response import WriteDetails
from gateway.dialects.openai.response import usage_of as openai_usage_of

SHORTEST = next(iter(TTLS))
COUNTS = st.sampled_from([0, 0, 7, 300, 5000])
WRITES = st.fixed_dictionaries({WRITE_FIELDS[ttl]: COUNTS for ttl in TTLS})


def messages_split(usage: InputUsage) -> dict[str, int]:
    split: dict[str, int] = msgspec.to_builtins(messages_usage_of(usage, 0).cache_creation)
    return split


def openai_split(usage: InputUsage) -> dict[str, int] | None:
    details: dict[str, Any] = msgspec.to_builtins(openai_usage_of(usage, 0, 0))
    split: dict[str, int] | None = details["prompt_tokens_details"].get(
        "cache_write_tokens_details"
    )
    return split


def test_every_class_that_a_dialect_accepts_stands_in_its_split() -> None:
    """A marker of a class is a write of that class."""
    for ttl in get_args(AnthropicTtl):
        split = messages_split(InputUsage(**{WRITE_FIELDS[ttl]: 100}))
        assert split.pop(f"ephemeral_{ttl}_input_tokens") == 100
        assert not any(split.values())
    for ttl in get_args(CacheTtl):
        shares = openai_split(InputUsage(**{WRITE_FIELDS[ttl]: 100}))
        assert shares is not None
        assert shares.pop(f"ttl_{ttl}_tokens") == 100
        assert not any(shares.values())
    assert len(CacheCreation.__struct_fields__) == len(get_args(AnthropicTtl))
    assert len(WriteDetails.__struct_fields__) == len(get_args(CacheTtl))


@given(WRITES)
def test_the_split_of_messages_adds_up_to_all_writes(writes: dict[str, int]) -> None:
    usage = InputUsage(**writes)
    assert sum(messages_split(usage).values()) == sum(writes.values())
    assert messages_usage_of(usage, 0).cache_creation_input_tokens == sum(writes.values())


@given(WRITES, st.sampled_from([0, 0, 3, 250, 9000]))
def test_the_split_of_openai_adds_up_to_all_writes_or_is_left_out(
    writes: dict[str, int], automatic: int
) -> None:
    usage = InputUsage(**writes, automatic_tokens=automatic)
    split = openai_split(usage)
    if writes[WRITE_FIELDS[SHORTEST]]:
        assert split is None, "what is held for less than 30 minutes has no place in it"
        return
    assert split is not None
    written_tokens = openai_usage_of(usage, 0, 0).prompt_tokens_details.cache_write_tokens
    assert sum(split.values()) == written_tokens == max(0, sum(writes.values()) - automatic)


@pytest.mark.parametrize(("held_for", "counted_as"), [("30m", "5m"), ("12h", "1h")])
def test_messages_tells_another_class_as_the_longest_for_which_it_is_held_at_least(
    held_for: Ttl, counted_as: Ttl
) -> None:
    split = messages_split(InputUsage(**{WRITE_FIELDS[held_for]: 100}))
    assert split[f"ephemeral_{counted_as}_input_tokens"] == 100
