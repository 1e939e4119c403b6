from engine.protocol import BreakpointReport, EntryState, InputUsage, Name, Receipt, Started
from gateway.turn.why_missed import LastHolders

A = "a" * 16
NAMES = [Name(A, 0)]


def started(epoch: str, state: EntryState | None = "leased", segment: int = 0) -> Started:
    """`state` None: no entry stands at that segment."""
    report = BreakpointReport(
        segment=segment,
        state=state or "none",
        ttl="5m" if state else None,
        expires_in_seconds=300.0 if state == "leased" else None,
    )
    return Started(
        request_id="r",
        epoch=epoch,
        usage=InputUsage(input_tokens=1),
        breakpoints=[report],
        receipt=Receipt(name_tokens=[1], num_held=1),
    )


def make(epochs: dict[str, str], max_names: int = 10) -> LastHolders:
    return LastHolders(epochs.get, max_names)


def test_a_new_epoch_is_a_restart_until_the_entry_would_have_expired() -> None:
    residency = make({})
    residency.learn("one", started("e1"), NAMES, 0.0)
    assert residency.explain("one", "e2", [A], 299.0) == "engine_restart"
    assert residency.explain("one", "e2", [A], 300.0) == "ttl_expired"


def test_another_engine_holds_it_unless_it_was_restarted_too() -> None:
    epochs = {"one": "e1"}
    residency = make(epochs)
    residency.learn("one", started("e1"), NAMES, 0.0)
    assert residency.explain("two", "x", [A], 1.0) == "routed_elsewhere"
    epochs["one"] = "e2"
    assert residency.explain("two", "x", [A], 1.0) == "engine_restart"
    assert residency.explain("two", "x", [A], 301.0) == "ttl_expired"


def test_an_entry_without_a_lease_is_remembered_for_its_ttl() -> None:
    residency = make({})
    residency.learn("one", started("e1", "best_effort"), NAMES, 0.0)
    assert residency.explain("one", "e2", [A], 299.0) == "engine_restart"
    assert residency.explain("one", "e2", [A], 300.0) == "ttl_expired"


def test_the_deepest_known_prefix_decides() -> None:
    residency = make({"one": "e1"})
    residency.learn("one", started("e1"), NAMES, 0.0)
    residency.learn("two", started("x", segment=1), [Name("b" * 16, 1)], 0.0)
    assert residency.explain("two", "x", ["b" * 16, A], 1.0) is None
    assert residency.explain("two", "x", ["c" * 16, A], 1.0) == "routed_elsewhere"


def test_where_no_entry_stands_nothing_is_remembered_and_the_memory_is_bounded() -> None:
    residency = make({}, max_names=2)
    residency.learn("one", started("e1", None), NAMES, 0.0)
    assert residency.explain("one", "e2", [A], 1.0) is None
    digests = [f"{number:016x}" for number in range(3)]
    for digest in digests:
        residency.learn("one", started("e1"), [Name(digest, 0)], 0.0)
    found = [residency.explain("one", "e2", [digest], 1.0) for digest in digests]
    assert found == [None, "engine_restart", "engine_restart"]
