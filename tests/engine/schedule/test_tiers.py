"""The host tier in the engine's loop: copies are bounded, and nobody's decoding waits for them."""

from tests.engine.schedule.harness import Harness, words


def test_decoding_goes_on_in_every_step_while_blocks_come_back() -> None:
    engine = Harness(num_blocks=32, host_blocks=64, max_copies=2)
    engine.finish(engine.send(words(0, 40), max_tokens=1))
    for start in range(1000, 5000, 200):
        engine.finish(engine.send(words(start, 8), max_tokens=1))
    talker = engine.send(words(9000, 4), max_tokens=60)
    engine.step()
    reader = engine.send(words(0, 40), max_tokens=1)
    assert engine.host is not None
    before = engine.host.num_promoted
    while not reader.is_over:
        promoted, said = engine.host.num_promoted, len(talker.answer())
        engine.step()
        assert engine.host.num_promoted - promoted <= 2
        assert len(talker.answer()) == said + 1
    assert engine.host.num_promoted > before
    engine.finish(talker, reader)
    engine.check_idle()


def test_a_best_effort_entry_survives_a_flood_on_the_host() -> None:
    engine = Harness(num_blocks=16, host_blocks=64, max_copies=16, lease_share=0.0)
    engine.finish(engine.send(words(0, 22), marks={0: "5m"}, max_tokens=1))
    for start in range(1000, 3000, 100):
        engine.finish(engine.send(words(start, 50), max_tokens=1))
        if start == 1200:
            again = engine.send(words(0, 22), marks={0: "5m"}, max_tokens=1)
            engine.finish(again)
            assert again.started is not None
            assert again.started.usage.cache_read_tokens == 22
            assert again.started.miss_reason is None
