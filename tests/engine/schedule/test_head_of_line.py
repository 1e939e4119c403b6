"""A prompt that does not fit keeps no other waiting, and is not kept waiting for ever."""

from engine.schedule.scheduler import MAX_OVERTAKEN
from tests.engine.schedule.harness import Harness, Sent, words


def occupied(engine: Harness, blocks: int, max_tokens: int) -> Sent:
    """A request of scope a that runs and holds about so many blocks of four tokens."""
    sent = engine.send(words(0, 4 * blocks - 2), scope="a", max_tokens=max_tokens)
    for _ in range(100):
        engine.step()
        if sent.started is not None:
            return sent
    raise AssertionError("it never began")


def test_a_short_prompt_runs_while_a_long_one_of_another_scope_does_not_fit() -> None:
    engine = Harness(num_blocks=64, max_step_tokens=64)
    running = occupied(engine, 40, max_tokens=60)
    long = engine.send(words(1000, 158), scope="b", max_tokens=1)
    short = engine.send(words(2000, 10), scope="c", max_tokens=1)
    engine.step(5)
    assert short.is_over, "22 blocks were free, and it needs 3"
    assert long.started is None and not running.is_over
    engine.finish(running, long)
    engine.check_idle()


def test_a_long_prompt_is_overtaken_a_bounded_number_of_times() -> None:
    engine = Harness(num_blocks=64, max_step_tokens=64, max_waiting=1000, max_running=4)
    running = occupied(engine, 20, max_tokens=10)
    long = engine.send(words(1000, 240), scope="b", max_tokens=1)
    sents = [running, long]
    overtaking: list[Sent] = []
    for number in range(400):
        # A flood that never ends: there is always one that would fit.
        overtaking.append(
            engine.send(words(3000 + 40 * number, 30), scope="c", max_tokens=12, seed=number)
        )
        engine.step()
        if long.started is not None:
            break
    assert long.started is not None, "the flood kept it out"
    ahead = [sent for sent in overtaking if sent.started is not None]
    assert len(ahead) <= MAX_OVERTAKEN + 1
    engine.finish(*sents, *overtaking)
    engine.check_idle()


def test_what_does_not_fit_is_not_looked_through_again_while_nothing_was_freed() -> None:
    """A step's cost must not grow with what waits: each try walks over its whole prompt."""
    engine = Harness(num_blocks=64, max_step_tokens=64, max_waiting=1000)
    running = occupied(engine, 40, max_tokens=100)
    sents = [engine.send(words(1000 * i, 120 + i), scope=f"s{i}", max_tokens=1) for i in range(20)]
    engine.step(8)
    tried = 0
    begin = engine.cache.begin

    def counted(*given):  # type: ignore[no-untyped-def]
        nonlocal tried
        tried += 1
        return begin(*given)

    engine.cache.begin = counted  # type: ignore[method-assign]
    engine.step(10)
    assert tried <= 10, "the first in order alone, once a step"
    engine.cache.begin = begin  # type: ignore[method-assign]
    engine.finish(running, *sents)
