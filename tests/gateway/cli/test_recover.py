"""A gateway that will not come back is settled by another: with its journal, and without."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from engine.protocol import FinalCounts, InputUsage
from gateway.admission.keyring import KeyRing
from gateway.base.clock import Clock
from gateway.base.errors import JournalUnavailable
from gateway.base.settings import Settings
from gateway.cli.main import main
from gateway.cli.recover import count_open_turns, recover_instance, recover_journal
from gateway.journal.store import Journal
from gateway.ledger.access import Keys
from gateway.ledger.database import Ledger
from gateway.prices.files import SHIPPED, PriceBook, load_prices
from tests.gateway.journal.test_journal import record
from tests.gateway.records import counts_of, ledger_rows
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import make_settings, serve
from tests.migrated import migrate


def counts(turn_id: str, scope: str = "") -> FinalCounts:
    usage = InputUsage(input_tokens=10, cache_read_tokens=90, computed_tokens=10)
    return counts_of(turn_id, reason="cancelled", usage=usage, output_tokens=7, scope=scope)


def settings_with_prices(folder: Path, url: str) -> Settings:
    """Migrated, with prices of the operator's own."""
    shipped = SHIPPED.read_text("utf-8")
    prices_file = folder / "prices.toml"
    prices_file.write_text(shipped.replace('input = "', 'input = "10'), "utf-8")
    assert prices_file.read_text("utf-8") != shipped
    settings = make_settings(folder, url, prices=prices_file)
    migrate(settings)
    return settings


def costs_what_own_prices_say(settings: Settings, row: dict[str, Any]) -> bool:
    price = PriceBook(settings.prices).own.with_id(row["price"])
    assert price is not None
    assert load_prices().with_id(row["price"]) is None, "no price of the shipped sheet"
    usage = InputUsage(input_tokens=10, cache_read_tokens=90)
    return bool(row["cost_nano"] == price.cost(usage, 7).actual)


def test_a_moved_journal_is_settled_with_the_engines_counts(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    directory = tmp_path / "moved"
    with serve(engine) as url:
        settings = settings_with_prices(tmp_path, url)

        async def check() -> None:
            journal = Journal(directory).start()
            known, unknown, closed = (record(journal, number) for number in range(3))
            for turn in (known, unknown, closed):
                await journal.open(turn)
            closed.outcome = "stop"
            await journal.close(closed)
            engine.final[known.id] = counts(known.id)
            with pytest.raises(JournalUnavailable, match="used by another process"):
                await recover_journal(settings, directory)
            await journal.stop()
            recovery = await recover_journal(settings, directory)
            assert recovery == (3, 2, 0, {})
            # Again, with nothing left to do.
            assert (await recover_journal(settings, directory)).turns == 0

        asyncio.run(check())
    rows = {row["id"][-1]: row for row in ledger_rows(settings.ledger_url)}
    assert [rows[n]["outcome"] for n in "012"] == ["gateway_killed", "gateway_killed", "stop"]
    assert (rows["0"]["cache_read_tokens"], rows["0"]["output_tokens"]) == (90, 7)
    assert rows["0"]["stop_reason"] == "cancelled"
    assert costs_what_own_prices_say(settings, rows["0"])
    assert rows["1"]["output_tokens"] == 0 and rows["1"]["id"] in engine.cancelled
    assert set(engine.acked) >= {row["id"] for row in rows.values()}


def test_without_its_journal_the_engines_counts_become_rows_of_their_workspace(
    tmp_path: Path,
) -> None:
    engine = ScriptedEngine()
    with serve(engine) as url:
        settings = settings_with_prices(tmp_path, url)

        async def check() -> None:
            ledger = Ledger(settings.ledger_url)
            keys = Keys(ledger)
            await keys.create("secret", "lost-and-found", "one", Clock().wall())
            ring = KeyRing(keys, settings, Clock())
            scope = ring.scope_of("lost-and-found")
            await ledger.close()
            ids = ["msg_deadbeef01", "msg_deadbeef02", "msg_deadbeef02.2", "msg_0123456701"]
            for turn_id, of in zip(ids, (scope, "f" * 32, "f" * 32, scope), strict=True):
                engine.final[turn_id] = counts(turn_id, of)
            open_turns = await count_open_turns(settings)
            assert open_turns.by_instance == {"deadbeef": 3, "01234567": 1}
            assert await recover_instance(settings, "deadbeef") == (2, 3, {})
            again = await recover_instance(settings, "deadbeef")
            assert again in ((2, 3, {}), (0, 0, {}))

        asyncio.run(check())
    first, second = ledger_rows(settings.ledger_url)
    assert (first["workspace_id"], second["workspace_id"]) == ("lost-and-found", "unknown")
    assert first["outcome"] == "gateway_lost" and first["cache_read_tokens"] == 90
    assert costs_what_own_prices_say(settings, first)
    assert set(engine.acked) == {first["id"], second["id"], f"{second['id']}.2"}


@pytest.mark.parametrize("words", [[], ["--instance", "deadbeef"], ["--journal", "DIRECTORY"]])
def test_an_engine_that_does_not_answer_is_named_and_no_number_stands_for_it(
    tmp_path: Path,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = ScriptedEngine()
    engine.final["msg_deadbeef01"] = counts("msg_deadbeef01", "f" * 32)
    asyncio.run(Journal(tmp_path / "moved").start().stop())
    with serve(engine) as url:
        settings = settings_with_prices(tmp_path, url)
        two = settings.model_copy(update={"engines": (f"near={url}", "away=http://127.0.0.1:9")})
        monkeypatch.setattr("gateway.cli.recover.load", lambda: two)
        named = [str(tmp_path / "moved") if word == "DIRECTORY" else word for word in words]
        assert main(["recover", *named]) == 1
        output = capsys.readouterr()
        assert "away was not asked (cannot connect): " in output.err
        assert "near was" not in output.err
        monkeypatch.setattr("gateway.cli.adapters.load", lambda: two)
        assert main(["adapters", "list"]) == 1
        assert "away not known: cannot connect" in capsys.readouterr().out
        all_there = two.model_copy(update={"engines": (f"near={url}",)})
        monkeypatch.setattr("gateway.cli.recover.load", lambda: all_there)
        assert main(["recover", *named]) == 0
        assert "was not asked" not in capsys.readouterr().err


def test_engines_that_a_source_names_are_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = ScriptedEngine()
    engine.final["msg_deadbeef01"] = counts("msg_deadbeef01")
    with serve(engine) as url:
        settings = settings_with_prices(tmp_path, url)
        source = url.replace("http://127.0.0.1", "dns://localhost")
        sourced = settings.model_copy(update={"engines": (source,)})
        monkeypatch.setattr("gateway.cli.recover.load", lambda: sourced)
        monkeypatch.setattr("gateway.cli.adapters.load", lambda: sourced)
        main(["recover"])
        assert "deadbeef 1" in capsys.readouterr().out
        assert main(["adapters", "list"]) == 0
        assert "has none" in capsys.readouterr().out
        nowhere = settings.model_copy(update={"engines": ("dns://no-such-host.invalid:8100",)})
        monkeypatch.setattr("gateway.cli.adapters.load", lambda: nowhere)
        assert main(["adapters", "list"]) == 1
        assert "HOLDFAST_ENGINES: dns://no-such-host.invalid:8100: " in capsys.readouterr().err
