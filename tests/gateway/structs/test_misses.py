"""Each reason of a miss is told wherever people read of it, and each dialect has a word for it."""

import re
import tomllib
from pathlib import Path
from typing import get_args

import pytest
from anthropic.types import beta

from gateway.dialects.anthropic.response import CacheMissType
from gateway.dialects.anthropic.response import diagnostics_of as messages_diagnostics
from gateway.dialects.responses.response import diagnostics_of as responses_diagnostics
from gateway.prompt.fingerprint import Diagnosis, Divergence
from gateway.structs.misses import SECTION_OF, DivergenceKind, GatewayMissReason

ROOT = Path(__file__).parents[3]
REASONS = set(get_args(GatewayMissReason))
KINDS = set(get_args(DivergenceKind))


def test_the_page_names_every_reason() -> None:
    page = (ROOT / "gateway" / "README.md").read_text("utf-8")
    _, _, table = page.partition("\n| `miss_reason`, `missed` | said by |")
    rows, _, _ = table.partition("\n\n")
    named = re.findall(r"`(\w+)`", " ".join(row.split("|")[1] for row in rows.splitlines()[2:]))
    assert sorted(named) == sorted(REASONS)


def test_the_dashboard_has_words_for_every_reason_and_difference() -> None:
    words = tomllib.loads((ROOT / "dashboard" / "ui" / "reasons.toml").read_text("utf-8"))
    assert words.keys() == REASONS | KINDS


def test_every_kind_of_difference_has_its_section() -> None:
    assert SECTION_OF.keys() == KINDS


def test_messages_has_the_types_of_the_sdk_and_no_others() -> None:
    variants = get_args(get_args(beta.BetaCacheMissReason)[0])
    types = {get_args(variant.model_fields["type"].annotation)[0] for variant in variants}
    assert types == set(get_args(CacheMissType))


@pytest.mark.parametrize("kind", get_args(DivergenceKind))
def test_every_kind_of_difference_has_its_word_in_each_dialect(kind: DivergenceKind) -> None:
    diagnosis = Diagnosis("compared", Divergence(kind, 0, 7, 0))
    diagnostics = messages_diagnostics(diagnosis)
    assert diagnostics is not None and diagnostics.cache_miss_reason is not None
    assert diagnostics.cache_miss_reason.type in get_args(CacheMissType)
    answer = responses_diagnostics(diagnosis, has_read=False)
    assert answer is not None
    assert answer.type == ("unavailable" if kind == "unavailable" else "cache_miss")
