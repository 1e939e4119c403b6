"""Which entries get the leases of a contended budget: static prefixes, what was read, tails."""

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.leases import CONTENDED_SHARE, RANK_SHARES
from engine.protocol import BreakpointReport
from tests.engine.cache.world import World

BLOCK = 4
BUDGET = 40
"""In blocks."""


def new_world() -> World:
    return World(num_blocks=400, lease_share=BUDGET / 400, rank_shares=RANK_SHARES)


def content(name: int, num_blocks: int) -> list[int]:
    return [1000 * name + position for position in range(num_blocks * BLOCK)]


def ask(world: World, *segments: list[int], marked: tuple[int, ...]) -> list[BreakpointReport]:
    """A whole request; what is told of its breakpoints."""
    life = world.arrive("red", segments, dict.fromkeys(marked, "5m"), scaffold=())
    assert world.begin(life)
    world.compute(life, len(life.tokens))
    reports = world.start(life).breakpoints
    world.end(life)
    world.check()
    return reports


def tail(world: World, name: int, num_blocks: int) -> BreakpointReport:
    """A single question: one text, marked at its end."""
    return ask(world, content(name, num_blocks), marked=(0,))[0]


def fill_with_tails(world: World) -> int:
    """Ask until a tail is refused; the number that were leased."""
    for name in range(1, 100):
        if tail(world, name, 4).state != "leased":
            return name - 1
    raise AssertionError("no tail was refused")


def test_tails_that_nobody_read_get_half_of_a_contended_budget_and_prefixes_the_rest() -> None:
    world = new_world()
    # The sixth goes beyond half: the budget is contended once more than half was asked for.
    assert fill_with_tails(world) == 6
    for name in range(200, 204):
        prefix, question = ask(world, content(name, 4), content(name + 50, 1), marked=(0, 1))
        assert (prefix.state, question.state) == ("leased", "best_effort"), name
    assert ask(world, content(300, 1), content(301, 1), marked=(0,))[0].state == "best_effort"


def test_a_tail_that_was_read_gets_more_than_one_that_was_not() -> None:
    world = new_world()
    num_leased = fill_with_tails(world)
    unread = num_leased + 1
    (again,) = ask(world, content(unread, 4), marked=(0,))
    assert again.state == "leased" and again.expires_in_seconds == 300
    # 28 of 40 blocks are leased now, and three quarters are 30.
    states = [ask(world, content(160, 4), marked=(0,))[0].state for _ in range(3)]
    assert states == ["best_effort", "best_effort", "leased"]


def test_a_budget_that_is_asked_for_slowly_is_leased_to_tails() -> None:
    world = new_world()
    fill_with_tails(world)
    assert tail(world, 150, 24).state == "best_effort"
    world.wait(900.0)
    assert tail(world, 151, 24).state == "leased"


def test_a_scope_within_its_own_part_gets_its_leases() -> None:
    """Another scope's tails may fill half of the budget; this one's part is kept for it."""
    world = new_world()
    fill_with_tails(world)
    world.end(world.run("blue", [content(1, 4)], {0: "5m"}))
    entry = world.entry_at("blue", tuple(content(1, 4)))
    assert entry is not None and entry.is_leased


requests = st.lists(
    st.tuples(
        st.integers(0, 5),  # the system text, 0 for none
        st.integers(6, 20),  # the question, so that some are asked again
        st.integers(1, 12),  # its blocks
    ),
    max_size=40,
)


@settings(max_examples=50)
@given(requests)
def test_no_lease_ends_for_another_and_none_is_given_beyond_its_ranks_part(
    asked: list[tuple[int, int, int]],
) -> None:
    """In one moment the demand is what distinct blocks were asked for, so it is known exactly."""
    world = new_world()
    told: set[bytes] = set()
    wanted: set[tuple[int, ...]] = set()
    for system, question, num_blocks in asked:
        segments = [content(system, 3)] if system else []
        segments.append(content(question, num_blocks))
        before = world.pool.num_leased
        was_contended = len(wanted) > CONTENDED_SHARE * BUDGET
        ask(world, *segments, marked=tuple(range(len(segments))))
        whole = [token for segment in segments for token in segment]
        wanted |= {tuple(whole[:end]) for end in range(BLOCK, len(whole) + 1, BLOCK)}
        leased = {entry.key for entry in world.entries.leases}
        assert told <= leased, "a lease ended early"
        assert world.pool.num_leased <= BUDGET
        entry = world.entry_at("red", tuple(whole))
        assert entry is not None
        if entry.key in leased - told and entry.uses == 0 and was_contended:
            gained = world.pool.num_leased - before
            assert not gained or world.pool.num_leased <= RANK_SHARES[0] * BUDGET or system
        told |= leased
