"""Leases in the slot files of a server of llama.cpp's shape."""

import stat
from pathlib import Path

import httpx
import msgspec
import pytest

from engine.backends.upstream.slots.loop import RETRY_SECONDS
from engine.protocol import SCOPE_HEADER, PurgeReply
from engine.protocol.reports import EntryInfo
from tests.conformance.engines import Engine, prompt
from tests.engine.backends.upstream.conftest import wait_until
from tests.engine.backends.upstream.slots.conftest import files_of
from tests.engine.backends.upstream.slots.scripted_slots import FileScript


def flood(engine: Engine, script: FileScript) -> None:
    """Other scopes use every slot."""
    for _ in range(2 * len(script.slots)):
        engine.ask(prompt(engine.text(60)), engine.scope())


def saves(script: FileScript) -> list[tuple[str, int]]:
    return [action for action in script.actions if action[0] == "save"]


def test_it_says_what_it_keeps(engine: Engine) -> None:
    assert all(engine.keeps(name) for name in ("exact_read", "exact_write", "hold", "events"))
    assert engine.keeps("isolation") and not engine.keeps("forced_tools")
    assert engine.description.granularity == 1


def test_a_mark_is_read_to_the_token_after_a_flood(engine: Engine, script: FileScript) -> None:
    scope = engine.scope()
    shared = engine.text(101)
    first = engine.ask(prompt(shared, engine.text(20)), scope, (0, "1h"))
    (report,) = first.started.breakpoints
    (end, _) = engine.ends(prompt(shared, engine.text(20)))
    assert (report.state, report.tokens, report.expires_in_seconds) == ("leased", end, 3600)
    assert (first.usage.cache_write_1h_tokens, first.usage.cache_read_tokens) == (end, 0)
    flood(engine, script)
    script.prefills.clear()
    conversation = prompt(shared, engine.text(30))
    second = engine.ask(conversation, scope, (0, "1h"))
    assert (second.usage.cache_read_tokens, second.usage.cache_write_1h_tokens) == (end, 0)
    assert second.usage.computed_tokens == engine.count(conversation).input_tokens - end
    assert sum(script.prefills) == second.usage.computed_tokens
    assert second.started.read_tier == "disk"


def test_a_turn_that_ends_with_nothing_said_keeps_its_lease(
    engine: Engine, script: FileScript
) -> None:
    scope = engine.scope()
    shared = engine.text(80)
    script.is_mute = True
    try:
        answer = engine.ask(prompt(shared, "one"), scope, (0, "1h"), max_tokens=8)
    finally:
        script.is_mute = False
    assert answer.finished[0].reason == "stop"
    assert answer.started.breakpoints[0].state == "leased"
    flood(engine, script)
    again = engine.ask(prompt(shared, "two"), scope, (0, "1h")).usage
    assert again.cache_read_tokens == answer.usage.cache_write_1h_tokens > 0


def test_leases_and_their_files_are_counted(engine: Engine, script: FileScript) -> None:
    engine.ask(prompt(engine.text(60)), engine.scope(), (0, "1h"))
    leased = [entry for entry in engine.get("entries", list[EntryInfo]) if entry.state == "leased"]
    stats = engine.stats()
    assert stats.num_leases == len(leased) > 0
    assert stats.store is not None and stats.store.is_up
    assert stats.store.leases == len(leased)
    assert stats.store.used_bytes > 0


def test_four_marks_are_computed_once_and_read_one_by_one(
    engine: Engine, script: FileScript
) -> None:
    scope = engine.scope()
    texts = [engine.text(count) for count in (41, 53, 67, 71)]
    whole = prompt(*texts, engine.text(9))
    ends = engine.ends(whole)
    script.prefills.clear()
    answer = engine.ask(whole, scope, *((n, "1h") for n in range(4)))
    assert answer.usage.cache_write_1h_tokens == ends[3]
    assert [report.state for report in answer.started.breakpoints] == ["leased"] * 4
    assert sum(script.prefills) == engine.count(whole).input_tokens
    for count in range(4):
        flood(engine, script)
        usage = engine.ask(prompt(*texts[: count + 1], engine.text(15)), scope, (count, "1h")).usage
        assert usage.cache_read_tokens == ends[count]


def test_a_file_is_the_owners_alone_and_tells_nothing(engine: Engine, script: FileScript) -> None:
    scope = engine.scope()
    before = set(files_of(script.folder))
    engine.ask(prompt(engine.text(80)), scope, (0, "1h"))
    (new,) = set(files_of(script.folder)) - before
    assert new.suffix == ".bin" and scope not in new.name
    assert stat.S_IMODE(new.stat().st_mode) == 0o600
    assert script.folder is not None
    assert stat.S_IMODE(script.folder.stat().st_mode) == 0o700


def test_what_is_dropped_is_unlinked_and_erased(engine: Engine, script: FileScript) -> None:
    scope = engine.scope()
    shared = engine.text(90)
    before = files_of(script.folder)
    engine.ask(prompt(shared, engine.text(5)), scope, (0, "1h"))
    assert len(files_of(script.folder)) == len(before) + 1
    assert engine.drop(scope) == 1
    assert files_of(script.folder) == before
    again = engine.ask(prompt(shared, engine.text(5)), scope, (0, "1h"))
    assert (again.usage.cache_read_tokens, again.usage.automatic_tokens) == (0, 0)
    assert again.started.miss_reason == "dropped"


def test_a_purge_tells_of_a_slot_in_use_which_is_erased_after_its_answer(
    engine: Engine, script: FileScript
) -> None:
    """The reply said that nothing was left."""
    scope = engine.scope()
    conversation = prompt(engine.text(90), "Count.")

    def unpurged(of: str) -> list[str]:
        return engine.post("purge", {"scope": of}, PurgeReply).unpurged

    script.token_seconds = 0.2
    try:
        request = engine.request(conversation, scope, (0, "1h"), max_tokens=100)
        with engine.stream(request) as stream:
            stream.start()
            (left,) = unpurged(scope)
            assert left.startswith("slots in use (1)")
            assert unpurged(engine.scope()) == []
            assert stream.rest().finished[0].reason == "stop"
    finally:
        script.token_seconds = 0.0
    wait_until(lambda: not unpurged(scope))
    usage = engine.ask(conversation, scope, (0, "1h")).usage
    assert (usage.cache_read_tokens, usage.automatic_tokens) == (0, 0)


def test_what_has_expired_is_unlinked_and_erased(engine: Engine, script: FileScript) -> None:
    scope = engine.scope()
    shared = engine.text(90)
    before = files_of(script.folder)
    engine.ask(prompt(shared, engine.text(5)), scope, (0, "5m"))
    engine.advance(300)
    assert engine.entries(scope) == []
    # Turns that arrived before may still read it.
    engine.advance(60)
    wait_until(lambda: len(files_of(script.folder)) <= len(before))
    again = engine.ask(prompt(shared, engine.text(5)), scope, (0, "5m"))
    assert (again.usage.cache_read_tokens, again.usage.automatic_tokens) == (0, 0)
    assert again.started.miss_reason == "ttl_expired"


def test_what_is_written_again_after_its_end_is_leased_again(
    engine: Engine, script: FileScript
) -> None:
    """Its old file is still there, for turns that came before."""
    scope = engine.scope()
    shared = engine.text(90)
    first = engine.ask(prompt(shared, "one"), scope, (0, "5m"))
    engine.advance(300)
    again = engine.ask(prompt(shared, "two"), scope, (0, "1h"))
    assert again.usage.cache_write_1h_tokens == first.usage.cache_write_5m_tokens
    assert again.started.breakpoints[0].state == "leased"
    engine.advance(120)
    flood(engine, script)
    usage = engine.ask(prompt(shared, "three"), scope, (0, "1h")).usage
    assert usage.cache_read_tokens == again.usage.cache_write_1h_tokens


def test_nobody_reads_anothers(engine: Engine, script: FileScript) -> None:
    shared = engine.text(120)
    engine.ask(prompt(shared), engine.scope(), (0, "1h"))
    for _ in range(3):
        usage = engine.ask(prompt(shared), engine.scope(), (0, "1h")).usage
        assert (usage.cache_read_tokens, usage.automatic_tokens) == (0, 0)


def damage(place: Path, how: str) -> None:
    content = bytearray(place.read_bytes())
    match how:
        case "truncated":
            del content[-100:]
        case "flipped":
            content[-50] ^= 1
        case "junk":
            content[:] = b"junk"
        case "gone":
            place.unlink()
            return
    place.write_bytes(content)


@pytest.mark.parametrize("how", ["truncated", "flipped", "junk", "gone"])
def test_a_damaged_file_is_a_miss_and_never_reaches_the_server(
    engine: Engine, script: FileScript, how: str
) -> None:
    scope = engine.scope()
    shared = engine.text(90)
    before = set(files_of(script.folder))
    engine.ask(prompt(shared, engine.text(5)), scope, (0, "1h"))
    (new,) = set(files_of(script.folder)) - before
    damage(new, how)
    flood(engine, script)
    num_restores = script.actions.count(("restore", 0)) + script.actions.count(("restore", 1))
    again = engine.ask(prompt(shared, engine.text(5)), scope, (0, "1h"))
    assert again.usage.cache_read_tokens == 0
    assert again.started.miss_reason == "damaged"
    assert again.started.breakpoints[0].state == "leased", "it is saved anew"
    restores = script.actions.count(("restore", 0)) + script.actions.count(("restore", 1))
    assert restores == num_restores
    assert not new.exists()
    assert engine.stats().counters.leases_damaged >= 1


@pytest.mark.parametrize("gone", [0, 1], ids=["another mark", "hit"])
def test_a_removed_file_is_no_lease_while_a_slot_has_its_tokens(
    engine: Engine, script: FileScript, gone: int
) -> None:
    """The read came from the slot, and the answer and all pages went on to call it leased."""
    scope = engine.scope()
    conversation = prompt(engine.text(60), engine.text(50), "What?")
    marks = ((0, "1h"), (1, "1h"))
    before = set(files_of(script.folder))
    engine.ask(conversation, scope, *marks)
    new = sorted(set(files_of(script.folder)) - before, key=lambda file: file.stat().st_size)
    new[gone].unlink()
    ends = engine.ends(conversation)
    again = engine.ask(conversation, scope, *marks)
    is_hit = gone == 1
    assert again.usage.cache_read_tokens == ends[0 if is_hit else 1]
    assert again.started.miss_reason == ("damaged" if is_hit else None)
    states = [report.state for report in again.started.breakpoints]
    assert states == (["leased", "leased"] if is_hit else ["best_effort", "leased"])
    leased = [entry for entry in engine.entries(scope) if entry.state == "leased"]
    now = set(files_of(script.folder)) - before
    assert len(leased) == len(now) == (2 if is_hit else 1)


def test_less_than_the_mark_after_a_restore_is_a_miss_and_the_file_goes(
    engine: Engine, script: FileScript
) -> None:
    scope = engine.scope()
    shared = engine.text(90)
    before = set(files_of(script.folder))
    engine.ask(prompt(shared, engine.text(5)), scope, (0, "1h"))
    (new,) = set(files_of(script.folder)) - before
    flood(engine, script)
    script.restored_short = True
    again = engine.ask(prompt(shared, engine.text(5)), scope, (0, "1h"))
    (end, _) = engine.ends(prompt(shared, engine.text(5)))
    assert 0 < again.usage.cache_read_tokens < end
    assert again.started.miss_reason == "damaged"
    wait_until(lambda: not new.exists())


def test_a_full_disk_leases_nothing_and_serves_all(engine: Engine, script: FileScript) -> None:
    script.is_full = True
    before = files_of(script.folder)
    answer = engine.ask(prompt(engine.text(90)), engine.scope(), (0, "1h"), max_tokens=4)
    assert answer.started.breakpoints[0].state == "best_effort"
    assert answer.started.breakpoints[0].reason == "no_hold"
    assert answer.finished[0].output_tokens == 4
    wait_until(lambda: files_of(script.folder) == before)
    script.is_full = False
    num_saves = len(saves(script))
    for _ in range(2):
        marked = engine.ask(prompt(engine.text(90)), engine.scope(), (0, "1h"))
        assert marked.started.breakpoints[0].state == "best_effort", "it waits a while"
    assert len(saves(script)) == num_saves
    engine.advance(RETRY_SECONDS)
    marked = engine.ask(prompt(engine.text(90)), engine.scope(), (0, "1h"))
    assert marked.started.breakpoints[0].state == "leased"


def test_a_lease_is_read_where_a_longer_entry_without_a_file_is_gone(
    engine: Engine, script: FileScript
) -> None:
    """The whole prompt was computed anew, since the longer entry was the hit."""
    scope = engine.scope()
    system = engine.text(60)
    first = prompt(system, engine.text(50), "What?")
    num_leased = engine.ask(prompt(system, "one"), scope, (0, "1h")).usage.cache_write_1h_tokens
    script.is_full = True
    longer = engine.ask(first, scope, (0, "1h"), (1, "1h"))
    assert [point.state for point in longer.started.breakpoints] == ["leased", "best_effort"]
    script.is_full = False
    engine.advance(RETRY_SECONDS)
    flood(engine, script)
    again = engine.ask(first, scope, (0, "1h"), (1, "1h"))
    assert again.usage.cache_read_tokens == num_leased
    assert again.started.miss_reason == "best_effort_evicted"
    assert [point.state for point in again.started.breakpoints] == ["leased", "leased"]


def test_a_clients_leaving_ends_its_request_and_frees_the_slot(
    engine: Engine, script: FileScript
) -> None:
    script.token_seconds = 0.05
    try:
        for _ in range(4):
            conversation = prompt(engine.text(50))
            request = engine.request(conversation, engine.scope(), (0, "1h"), max_tokens=200)
            with engine.stream(request) as stream:
                stream.start()
        engine.wait_until_idle()
    finally:
        script.token_seconds = 0.0
    flood(engine, script)


def test_a_client_that_leaves_before_the_answer_ends_its_own_request_alone(
    engine: Engine, script: FileScript
) -> None:
    """What came behind its leaving was taken for its answer, which ended the engine."""
    script.prefill_seconds = 0.5
    try:
        for marks in ((), ((0, "1h"),)):
            request = engine.request(prompt(engine.text(50)), engine.scope(), *marks)
            content = msgspec.json.encode(request)
            with pytest.raises(httpx.ReadTimeout):
                headers = {SCOPE_HEADER: request.scope}
                engine.client.post("/v1/generate", content=content, headers=headers, timeout=0.2)
        engine.wait_until_idle()
    finally:
        script.prefill_seconds = 0.0
    assert engine.process.poll() is None
    flood(engine, script)


def test_many_at_once_never_touch_a_busy_slot(engine: Engine, script: FileScript) -> None:
    from concurrent.futures import ThreadPoolExecutor

    scopes = [engine.scope() for _ in range(3)]
    shared = [engine.text(60 + n) for n in range(3)]
    tails = [engine.text(5 + n % 7) for n in range(24)]

    def ask(number: int) -> tuple[int, int]:
        mine = number % 3
        answer = engine.ask(
            prompt(shared[mine], tails[number]), scopes[mine], (0, "1h"), max_tokens=3
        )
        usage = answer.usage
        return usage.cache_read_tokens, usage.cache_write_1h_tokens

    with ThreadPoolExecutor(8) as pool:
        counts = list(pool.map(ask, range(24)))
    ends = [engine.ends(prompt(text, "x"))[0] for text in shared]
    for number, (read_tokens, written_tokens) in enumerate(counts):
        assert sorted((read_tokens, written_tokens)) == [0, ends[number % 3]]
