"""What is not known at a moment is not drawn as nothing."""

from pathlib import Path

from dashboard.client import AdminClient
from dashboard.ui import conditions
from gateway.structs.usage import JUDGED_TTLS
from tests.dashboard.conftest import Show
from tests.dashboard.signed_in import said
from tests.gateway.ledger.test_prefixes import turn
from tests.gateway.ledger.test_sums import START, at
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import ADMIN_KEY, eventually, fill, make_settings, serve, serve_gateway


def test_what_an_engine_held_that_has_just_begun_to_load_is_not_known(
    show: Show, tmp_path: Path
) -> None:
    """No condition tells of it yet: it must last for a minute."""
    loading = ScriptedEngine(is_ready=False)
    with serve(loading) as engine, serve_gateway(tmp_path, engine) as url:
        client = AdminClient(url, ADMIN_KEY)

        def kinds() -> list[str]:
            return [condition.kind for condition in conditions.silent(client)]

        eventually(lambda: kinds() == ["engine_starting"])
        assert conditions.read(client) == []
        client.close()
        app = show(url, "prefixes")
        assert "What is promised is not known" in said(app)
        assert "No prefix is promised" not in said(app)


def test_savings_say_of_which_prefixes_nothing_is_judged_and_of_what_their_sums_are(
    show: Show, tmp_path: Path
) -> None:
    settings = make_settings(tmp_path)
    mixed = [
        turn(1, "m", cache_write_1h_tokens=2000),
        turn(2, "n", cache_write_1h_tokens=2000),
    ]
    long = [
        at(number, 0, model="m", cache_write_12h_tokens=900, prefix_ttl="12h", prefix="1" * 16)
        for number in (3, 4)
    ]
    fill(settings, [*mixed, *long])
    with serve_gateway(tmp_path, "http://127.0.0.1:9") as url:
        day = {"range": "custom", "from": f"{START:%Y-%m-%dT00:00}", "to": "2026-11-22T00:00"}
        words = said(show(url, "savings", **day))
        assert "1 prefix is of several models" in words
        assert "not of the chosen one" not in words
        unjudged = f"1 prefix has another TTL than {' and '.join(JUDGED_TTLS)}"
        assert unjudged in words
        words = said(show(url, "savings", **day, model="m"))
        assert "The sums of such a row are of all its models, not of the chosen one." in words
        assert unjudged in words
        words = said(show(url, "savings", **day, model="n"))
        assert "not of the chosen one" in words and unjudged not in words
