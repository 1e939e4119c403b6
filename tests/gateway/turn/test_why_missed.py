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
    known.learn(engine, "m", started, [Name(name, segment)], 0.0)


def test_where_no_entry_stands_nothing_is_remembered_and_the_memory_is_bounded() -> None:
    known = holders({}, max_names=2)
    learn(known, "one", "none")
    assert known.explain("one", "m", "e2", [A], 1.0) is None
    digests = [f"{number:016x}" for number in range(3)]
    for digest in digests:
        learn(known, "one", name=digest)
    found = [known.explain("one", "m", "e2", [digest], 1.0) for digest in digests]
    assert found == [None, "engine_restart", "engine_restart"]
