"""Steps are short while scopes share the engine, and as long as before while one is alone."""

from collections.abc import Sequence

from engine.cache.ids import TokenId
from engine.clock import ManualClock
from engine.protocol import Delta
from engine.schedule.pace import SHARED_SECONDS
from engine.schedule.request import SequenceState
from engine.schedule.runner import Work
from tests.engine.schedule.harness import FakeRunner, Harness, words

STEP_TOKENS = 256
PER_TOKEN = 0.0005
PER_KEY = 0.0000001
FIXED = 0.002
# As many as the longest test needs: every step looks at each.
NUM_BLOCKS = 1536


class TimedRunner(FakeRunner):
    """Takes time like a model: a fixed cost, and more for a token that reads more keys."""

    def __init__(self, clock: ManualClock, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._clock = clock
        self.seconds: list[float] = []

    def execute(self, works: Sequence[Work]) -> list[TokenId | None]:
        seconds = FIXED + sum(
            len(work.token_ids) * (PER_TOKEN + PER_KEY * work.start) for work in works
        )
        self._clock.advance(seconds)
        self.seconds.append(seconds)
        return super().execute(works)


class Timed(Harness):
    """An engine whose steps take time; its clock moves with them."""

    def __init__(self, max_running: int = 8) -> None:
        self.manual = ManualClock()
        self.timed = TimedRunner(self.manual, NUM_BLOCKS, 4)
        super().__init__(
            num_blocks=NUM_BLOCKS,
            max_step_tokens=STEP_TOKENS,
            max_waiting=400,
            max_running=max_running,
            clock=self.manual,
            runner=self.timed,
        )


def computed(works: Sequence[Work]) -> int:
    return sum(len(work.token_ids) for work in works)


def test_a_scope_alone_computes_whole_steps() -> None:
    engine = Timed()
    engine.done(words(0, 2000), scope="a", max_tokens=1)
    assert [computed(works) for works in engine.timed.steps][:7] == [STEP_TOKENS] * 7


def test_a_short_prompt_waits_for_short_steps_beside_a_long_one() -> None:
    engine = Timed()
    engine.done(words(9000, 20), scope="b", max_tokens=1)
    long = engine.send(words(0, 4000), scope="a", max_tokens=1)
    engine.step(12)
    assert long.started is None
    assert max(engine.timed.seconds[-6:]) < 2 * SHARED_SECONDS
    short = engine.send(words(20_000, 20), scope="b", max_tokens=1)
    begun = engine.manual.now()
    while short.started is None:
        engine.step()
    assert engine.manual.now() - begun < 2 * SHARED_SECONDS
    engine.finish(long)


def test_a_long_prompt_gets_on_beside_a_flood_of_short_ones() -> None:
    """It waits for first tokens a few steps in a row and no more."""
    engine = Timed()
    long = engine.send(words(0, 1500), scope="a", max_tokens=1)
    for number in range(300):
        engine.send(words(100_000 + 100 * number, 16), scope=f"b{number % 3}", max_tokens=4)
        engine.step()
        if long.started is not None:
            return
    raise AssertionError("a long prompt starves")


def test_the_running_sequences_of_one_scope_leave_a_place_to_another() -> None:
    engine = Timed(max_running=8)
    turns = [engine.send(words(1000 * n, 20), scope="a", max_tokens=400) for n in range(10)]
    engine.step(10)
    assert len(engine.scheduler.running) == 8
    late = engine.send(words(50_000, 20), scope="b", max_tokens=1)
    engine.step(4)
    assert late.is_over and not any(turn.is_over for turn in turns)
    engine.finish(*turns)


class SlowGrammar:
    """Takes 4 ms for each token; any token may come next."""

    is_ready = True
    is_failed = False

    def compute(self) -> None:
        return


def test_choices_whose_grammar_is_slow_take_turns_beside_another_scope() -> None:
    engine = Timed()
    slow = engine.send(words(0, 20), scope="a", max_tokens=40, choices=8)
    engine.step(4)
    quick = engine.send(words(5000, 20), scope="b", max_tokens=40)
    engine.step(3)
    for sequence in slow.state.sequences:
        bind(engine, sequence)
    engine.step(2)
    before = quick.state.leader.num_output
    begun = engine.manual.now()
    engine.step(16)
    assert quick.state.leader.num_output == before + 16
    assert engine.manual.now() - begun < 16 * 0.02
    outputs = [sequence.num_output for sequence in slow.state.sequences]
    assert min(outputs) >= 6 and max(outputs) - min(outputs) <= 1, "all choices get on"
    engine.finish(slow, quick)


def bind(engine: Timed, sequence: SequenceState) -> None:
    parser = sequence.parser
    feed = parser.feed

    def slowly(token: TokenId) -> Sequence[Delta]:
        engine.manual.advance(0.004)
        return feed(token)

    parser.feed = slowly  # type: ignore[method-assign]
    parser.constraint = SlowGrammar()  # type: ignore[misc]


def test_a_short_prompt_is_in_the_next_step_and_no_long_one_with_it() -> None:
    """Also if its scope has been served as much: it does not wait for a piece of the long one."""
    engine = Timed()
    engine.done(words(9000, 20), scope="b", max_tokens=1)
    for number in range(3):
        engine.send(words(10_000 * number, 4000), scope="a", max_tokens=1)
    engine.step(12)
    for number in range(4):
        short = engine.send(words(50_000 + 100 * number, 20), scope="b", max_tokens=1)
        engine.step()
        assert short.started is not None
        assert computed(engine.timed.steps[-1]) == 21
        engine.step(5)
