from datetime import UTC, datetime, timedelta

from engine.protocol import BreakpointReport, EntryState, InputUsage, Name, Receipt, Started
from gateway.ledger.reads.prefixes import PrefixUse
from gateway.turn.diagnostics import LastHolders

A = "a" * 16
B = "b" * 16


def holders(epochs: dict[str, str], max_names: int = 10) -> LastHolders:
    return LastHolders(epochs.get, max_names)


def learn(
    known: LastHolders, engine: str, state: EntryState = "leased", name: str = A, segment: int = 0
) -> None:
    """At 0 s, of an engine in its epoch `e1`."""
    report = BreakpointReport(
        segment=segment,
        state=state,
        ttl=None if state == "none" else "5m",
        expires_in_seconds=300.0 if state == "leased" else None,
    )
    started = Started(
        request_id="r",
        epoch="e1",
        usage=InputUsage(input_tokens=1),
        breakpoints=[report],
        receipt=Receipt(name_tokens=[1], num_held=1),
    )
    known.learn(engine, "m", started, [Name(name, segment)], 0.0)


def test_where_no_entry_stands_nothing_is_remembered_and_the_memory_is_bounded() -> None:
    known = holders({}, max_names=2)
    learn(known, "one", "none")
    assert known.explain("one", "m", "e2", [A], 1.0) is None
    digests = [f"{number:016x}" for number in range(3)]
    for digest in digests:
        learn(known, "one", name=digest)
    reasons = [known.explain("one", "m", "e2", [digest], 1.0) for digest in digests]
    assert reasons == [None, "engine_restart", "engine_restart"]


def test_another_model_is_the_reason_wherever_the_prefix_stands() -> None:
    known = holders({"one": "e1", "two": "e1"})
    learn(known, "one")
    assert known.explain("two", "m", "e1", [A], 1.0) == "routed_elsewhere"
    assert known.explain("two", "other", "e1", [A], 1.0) == "model_changed"
    assert known.explain("two", "other", "e1", [B], 1.0) is None


def test_what_the_ledger_knows_outlives_engine_and_gateway() -> None:
    moment = datetime(2026, 11, 28, 12, tzinfo=UTC)
    for age, reason in ((10, "engine_restart"), (299, "engine_restart"), (301, "ttl_expired")):
        known = holders({"one": "e2"})
        use = PrefixUse(A, "m", "one", "e1", moment - timedelta(seconds=age), 300.0)
        known.recall(use, moment, 50.0)
        assert known.explain("one", "m", "e2", [A], 50.0) == reason
