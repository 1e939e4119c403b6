"""What a scope may claim of the lease budget is what its requests say, or the engine's own share.

The tiny engine has sixteen blocks; leases may hold eight, and a scope claims four of them.
"""

import msgspec
import pytest

from engine.protocol import EntryState
from tests.conformance.engines import Engine, prompt
from tests.conformance.test_access import refuse


def write(engine: Engine, scope: str, num_tokens: int, share: float | None) -> EntryState:
    """What becomes of a new system text of about that many tokens."""
    request = engine.request(prompt("Why?", system=(engine.text(num_tokens),)), scope, 0)
    with engine.stream(msgspec.structs.replace(request, lease_share=share)) as stream:
        (report,) = stream.start().breakpoints
        stream.rest()
    return report.state


def leases(engine: Engine, scope: str) -> int:
    return sum(entry.state == "leased" for entry in engine.entries(scope))


def fill(engine: Engine, scope: str, share: float | None) -> None:
    """Lease all that the budget has room for."""
    for _ in range(8):
        write(engine, scope, 40, share)
    assert leases(engine, scope) >= 2
    assert write(engine, scope, 60, share) == "best_effort", "there is no room left"


@pytest.mark.parametrize(
    ("rich", "poor", "expected"),
    [
        pytest.param(None, None, "leased", id="both-the-engines"),
        pytest.param(1.0, None, "best_effort", id="who-has-it-may-keep-it-all"),
        pytest.param(None, 0.0, "best_effort", id="who-asks-may-claim-nothing"),
        pytest.param(0.0, 1.0, "leased", id="who-has-it-may-keep-nothing"),
    ],
)
def test_a_scopes_share_decides_who_yields(
    tiny_engine: Engine, rich: float | None, poor: float | None, expected: EntryState
) -> None:
    tiny_engine.require("hold")
    rich_scope = tiny_engine.scope()
    poor_scope = tiny_engine.scope()
    fill(tiny_engine, rich_scope, rich)
    before = leases(tiny_engine, rich_scope)
    assert write(tiny_engine, poor_scope, 40, poor) == expected
    assert (leases(tiny_engine, rich_scope) < before) == (expected == "leased")


def test_a_share_of_its_own_ends_with_the_next_request_that_names_none(tiny_engine: Engine) -> None:
    tiny_engine.require("hold")
    rich = tiny_engine.scope()
    poor = tiny_engine.scope()
    fill(tiny_engine, rich, 1.0)
    assert write(tiny_engine, poor, 40, None) == "best_effort"
    tiny_engine.ask(prompt("unmarked"), rich)
    assert write(tiny_engine, poor, 40, None) == "leased"


def test_a_share_is_no_bound_while_nobody_else_asks(tiny_engine: Engine) -> None:
    tiny_engine.require("hold")
    scope = tiny_engine.scope()
    assert write(tiny_engine, scope, 60, 0.0) == "leased"


def test_what_leases_hold_and_may_hold_is_told(tiny_engine: Engine) -> None:
    tiny_engine.require("hold")
    empty = tiny_engine.stats().leases
    assert empty is not None
    assert (empty.blocks, empty.max_blocks) == (0, tiny_engine.description.num_blocks // 2)
    scope = tiny_engine.scope()
    assert write(tiny_engine, scope, 60, None) == "leased"
    (entry,) = tiny_engine.entries(scope)
    full = tiny_engine.stats().leases
    assert full is not None
    assert (full.blocks, full.max_blocks) == (entry.blocks, empty.max_blocks)
    tiny_engine.drop(scope)
    assert tiny_engine.stats().leases == empty


@pytest.mark.parametrize("share", [-0.1, 1.1, 1e300])
def test_what_is_no_share_is_refused(engine: Engine, share: float) -> None:
    request = engine.request(prompt("one two"), engine.scope(), 0)
    reply = refuse(engine, msgspec.json.encode(msgspec.structs.replace(request, lease_share=share)))
    assert reply == {"code": "invalid_request", "message": "lease_share: must be 0 to 1"}
