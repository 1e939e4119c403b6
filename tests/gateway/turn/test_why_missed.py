from engine.protocol import BreakpointReport, EntryState, InputUsage, Name, Receipt, Started
from gateway.turn.diagnostics import LastHolders

A, B = "a" * 16, "b" * 16


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
    known.learn(engine, started, [Name(name, segment)], 0.0)


def test_a_new_epoch_is_a_restart_until_the_entry_would_have_expired() -> None:
    for state in ("leased", "best_effort"):
        known = holders({})
        learn(known, "one", state)
        assert known.explain("one", "e2", [A], 299.0) == "engine_restart"
        assert known.explain("one", "e2", [A], 300.0) == "ttl_expired"


def test_the_deepest_known_prefix_decides() -> None:
    epochs = {"one": "e1"}
    known = holders(epochs)
    learn(known, "one")
    learn(known, "two", name=B, segment=1)
    assert known.explain("two", "e1", [B, A], 1.0) is None
    assert known.explain("two", "e1", ["c" * 16, A], 1.0) == "routed_elsewhere"
    epochs["one"] = "e2"
    assert known.explain("two", "e1", [A], 1.0) == "engine_restart", "there too"


def test_where_no_entry_stands_nothing_is_remembered_and_the_memory_is_bounded() -> None:
    known = holders({}, max_names=2)
    learn(known, "one", "none")
    assert known.explain("one", "e2", [A], 1.0) is None
    digests = [f"{number:016x}" for number in range(3)]
    for digest in digests:
        learn(known, "one", name=digest)
    found = [known.explain("one", "e2", [digest], 1.0) for digest in digests]
    assert found == [None, "engine_restart", "engine_restart"]
