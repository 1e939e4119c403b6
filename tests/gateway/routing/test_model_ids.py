"""An id that was served by one model is not answered by another, however its engine comes."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol.reports import AdapterInfo, Description, ModelIdentity
from gateway.base.errors import AnotherModel
from gateway.base.settings import DatabaseSettings, load
from gateway.ledger.database import Ledger, with_ledger
from gateway.ledger.model_ids import ModelIdsTable
from gateway.routing.model_ids import DEFAULT_ID, ModelIds, differences_of, united
from tests.gateway.admin_client import Admin
from tests.gateway.routing.test_discovery import FakeApi, pod
from tests.gateway.scripted_engine import ScriptedEngine, say
from tests.gateway.serving import API_KEY, HEADERS, ask, eventually, serve, serve_gateway
from tests.migrated import migrate

OURS = ModelIdentity(weights="aa" * 32, template="11" * 32, vocabulary="22" * 32)
OTHER = ModelIdentity(weights="bb" * 32, template="11" * 32, vocabulary="22" * 32)
START = datetime(2026, 11, 1, tzinfo=UTC)
ALIAS = 'default = "house"\n[[models]]\nid = "house"\n'


def engine_of(words: str, **values: Any) -> ScriptedEngine:
    """An engine whose answers show that they are its."""
    description: dict[str, Any] = {
        "model": "tiny",
        "identity": OURS,
        "epoch": f"{words}-1",
        **values,
    }
    return ScriptedEngine(script=say(words), **description)


def said(url: str, model: str = "tiny") -> str:
    reply = ask(url, model=model)
    return (
        reply.json()["content"][0]["text"] if reply.status_code == 200 else str(reply.status_code)
    )


def answers(url: str, model: str, number: int = 8) -> Counter[str]:
    return Counter(said(url, model) for _ in range(number))


def contexts(url: str) -> dict[str, int]:
    listed = httpx.get(f"{url}/v1/models", headers=HEADERS, timeout=60).json()["data"]
    return {entry["id"]: entry["max_input_tokens"] for entry in listed}


def statuses(url: str) -> dict[str, str]:
    return {entry["name"]: entry["status"] for entry in Admin(url).get("engines")}


@contextmanager
def two(first: ScriptedEngine, second: ScriptedEngine) -> Iterator[tuple[str, str]]:
    with serve(first) as first_url, serve(second) as second_url:
        yield first_url, second_url


def test_an_added_engine_of_another_model_answers_under_its_own_id_only(tmp_path: Path) -> None:
    with (
        two(engine_of("ours"), engine_of("other", model="big", context=9_000)) as (ours, theirs),
        serve_gateway(tmp_path, ours, models=None) as url,
    ):
        added = Admin(url).post("engines", {"url": theirs})
        assert added["ids"] == ["big"]
        assert added["notes"] == ["it has another model than tiny, and answers only to big"]
        assert answers(url, "tiny") == {"ours": 8}
        assert answers(url, "big") == {"other": 8}
        assert contexts(url) == {"tiny": 100_000, "big": 9_000}


@pytest.mark.parametrize(
    ("identity", "words"),
    [
        (OTHER, "its digest of weights is bbbbbbbbbbbb, not aaaaaaaaaaaa"),
        (ModelIdentity(template="33" * 32), "its digest of the chat template is 333333333333"),
        (ModelIdentity(vocabulary="33" * 32), "its digest of the vocabulary is 333333333333"),
    ],
)
def test_an_added_engine_of_another_model_of_one_name_is_refused(
    tmp_path: Path, identity: ModelIdentity, words: str
) -> None:
    with (
        two(engine_of("ours"), engine_of("other", identity=identity, context=9)) as (ours, theirs),
        serve_gateway(tmp_path, ours, models=None) as url,
    ):
        refusal = Admin(url).post("engines", {"url": theirs}, status=400)["error"]["message"]
        assert "it has another model than `tiny` here" in refusal and words in refusal
        assert [*statuses(url)] == ["engine-0"]
        assert answers(url, "tiny") == {"ours": 8}
        assert contexts(url) == {"tiny": 100_000}


@pytest.mark.parametrize("identity", [OURS, ModelIdentity(), ModelIdentity(template="11" * 32)])
def test_engines_of_one_model_share_its_id(tmp_path: Path, identity: ModelIdentity) -> None:
    with (
        two(engine_of("one"), engine_of("two", identity=identity)) as (first_url, second_url),
        serve_gateway(tmp_path, first_url, models=None) as url,
    ):
        assert Admin(url).post("engines", {"url": second_url})["ids"] == ["tiny"]
        Admin(url).post("engines/engine-0/drain")
        assert answers(url, "tiny") == {"two": 8}


@pytest.mark.parametrize(
    "identity",
    [
        pytest.param(OTHER, id="weights"),
        pytest.param(ModelIdentity(weights="aa" * 32, template="99" * 32), id="template"),
    ],
)
def test_an_engine_that_comes_back_with_another_model_gets_no_turn(
    tmp_path: Path, identity: ModelIdentity
) -> None:
    engine = engine_of("ours")
    with (
        serve(engine) as place,
        serve_gateway(tmp_path, place, models=None, queue_seconds=0) as url,
    ):
        assert answers(url, "tiny", 2) == {"ours": 2}
        engine.restart(identity=identity, script=say("other"), context=9)
        # At once, before anybody has asked it who it is.
        assert "other" not in answers(url, "tiny")
        eventually(lambda: statuses(url) == {"engine-0": "refused"})
        (health,) = httpx.get(f"{url}/readyz", timeout=60).json()["engines"]
        assert health["status"] == "refused"
        assert "another model than `tiny`" in health["detail"]["error"]
        assert said(url) == "529"
        assert contexts(url) == {"tiny": 100_000}
        engine.restart(identity=OURS, script=say("ours"))
        eventually(lambda: said(url) == "ours")


def test_an_engine_that_comes_back_under_another_name_leaves_the_old_one(tmp_path: Path) -> None:
    engine = engine_of("ours")
    with (
        serve(engine) as place,
        serve_gateway(tmp_path, place, models=None, queue_seconds=0) as url,
    ):
        assert said(url) == "ours"
        engine.restart(model="big", identity=OTHER, script=say("other"))
        assert "other" not in answers(url, "tiny")
        eventually(lambda: said(url, "big") == "other")
        assert said(url) == "404"
        assert {*contexts(url)} == {"big"}


def test_ids_stay_over_a_restart_of_the_gateway(tmp_path: Path) -> None:
    with two(engine_of("ours"), engine_of("other", identity=OTHER)) as (ours, theirs):
        with serve_gateway(tmp_path, ours, models=None) as url:
            assert said(url) == "ours"
            eventually(lambda: Admin(url).get("model-ids") != [])
        with serve_gateway(tmp_path, theirs, models=None, queue_seconds=0) as url:
            assert statuses(url) == {"engine-0": "refused"}
            assert said(url) == "529", "it is known, and its engine may come"
        with serve_gateway(tmp_path, theirs, ours, models=None) as url:
            assert statuses(url) == {"engine-0": "refused", "engine-1": "ready"}
            assert answers(url, "tiny") == {"ours": 8}


def test_an_alias_and_claude_ids_stay_with_the_model_that_was_served_first(tmp_path: Path) -> None:
    table = tmp_path / "models.toml"
    table.write_text(ALIAS, "utf-8")
    changes: dict[str, Any] = {"models": table, "claude_alias": True, "queue_seconds": 0}
    big = engine_of("other", model="big", identity=OTHER, context=9)
    with two(engine_of("ours"), big) as (ours, theirs):
        with serve_gateway(tmp_path, ours, **changes) as url:
            assert {said(url, model) for model in ("house", "claude-sonnet-5")} == {"ours"}
        with serve_gateway(tmp_path, theirs, ours, **changes) as url:
            for model in ("house", "claude-sonnet-5"):
                assert answers(url, model) == {"ours": 8}
            assert contexts(url) == {"house": 100_000, "big": 9, "tiny": 100_000}
            Admin(url).post("engines/engine-1/drain")
            assert said(url, "house") == "529"
            Admin(url).post("engines/engine-0/give-id", {"is_default": True})
            assert answers(url, "house") == {"other": 8}


def test_an_alias_is_shown_as_one_in_each_dialect(tmp_path: Path) -> None:
    table = tmp_path / "models.toml"
    table.write_text(ALIAS + '[[models]]\nid = "named"\nengine_model = "tiny"\n', "utf-8")
    with serve(engine_of("ours")) as place, serve_gateway(tmp_path, place, models=table) as url:
        bearer = {"authorization": f"Bearer {API_KEY}"}

        def listed(headers: dict[str, str], path: str = "/v1/models") -> Any:
            return httpx.get(url + path, headers=headers, timeout=60).json()

        names = {entry["id"]: entry["display_name"] for entry in listed(HEADERS)["data"]}
        assert names["house"] == "house (alias of tiny)"
        assert names["named"] == "named (alias of tiny)"
        assert names["tiny"] == "tiny"
        roots = {entry["id"]: entry.get("root") for entry in listed(bearer)["data"]}
        assert roots == {"house": "tiny", "named": "tiny", "tiny": None}
        google = listed({"x-goog-api-key": API_KEY}, "/v1beta/models")["models"]
        bases = {entry["name"]: entry["baseModelId"] for entry in google}
        assert bases["models/house"] == "tiny"


def test_without_an_alias_there_is_only_the_model_s_own_id(tmp_path: Path) -> None:
    with serve(engine_of("ours")) as place, serve_gateway(tmp_path, place, models=None) as url:
        assert [*contexts(url)] == ["tiny"]
        assert said(url, "holdfast-demo") == "404"


def test_a_found_engine_of_another_model_is_seen_and_gets_no_turn(tmp_path: Path) -> None:
    api = FakeApi()
    with ExitStack() as stack:
        address = stack.enter_context(serve(api))
        ours = stack.enter_context(serve(engine_of("ours")))
        theirs = stack.enter_context(serve(engine_of("other", identity=OTHER)))
        entry = f"kubernetes://prod/engines?api={address}"
        url = stack.enter_context(serve_gateway(tmp_path, engines=(entry,), models=None))
        api.put("a", ours, **pod("pod-a"))
        eventually(lambda: statuses(url) == {"pod-a": "ready"})
        api.put("b", theirs, **pod("pod-b"))
        eventually(lambda: statuses(url) == {"pod-a": "ready", "pod-b": "refused"})
        assert answers(url, "tiny") == {"ours": 8}
        api.put("b")
        eventually(lambda: statuses(url) == {"pod-a": "ready"})


def test_an_operator_gives_an_id_to_another_model(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"models": None, "queue_seconds": 0}
    with two(engine_of("ours"), engine_of("other", identity=OTHER)) as (ours, theirs):
        with serve_gateway(tmp_path, ours, theirs, **changes) as url:
            eventually(lambda: {*statuses(url).values()} == {"ready", "refused"})
            refused = next(name for name, status in statuses(url).items() if status == "refused")
            engine = Admin(url).post(f"engines/{refused}/give-id", {})
            assert (engine["status"], engine["ids"]) == ("ready", ["tiny"])
            assert {*statuses(url).values()} == {"ready", "refused"}
            assert statuses(url)[refused] == "ready"
            (winner,) = answers(url, "tiny")
        with serve_gateway(tmp_path, ours, theirs, **changes) as url:
            assert answers(url, "tiny") == {winner: 8}
            (row,) = [row for row in Admin(url).get("model-ids") if row["id"] == "tiny"]
            weights = OURS.weights if winner == "ours" else OTHER.weights
            assert row["identity"]["weights"] == weights


def test_an_engine_may_be_added_with_the_id_of_another_model(tmp_path: Path) -> None:
    with (
        two(engine_of("ours"), engine_of("other", identity=OTHER)) as (ours, theirs),
        serve_gateway(tmp_path, ours, models=None) as url,
    ):
        assert Admin(url).post("engines", {"url": theirs, "gives_id": True})["ids"] == ["tiny"]
        eventually(lambda: statuses(url)["engine-0"] == "refused")
        assert answers(url, "tiny") == {"other": 8}


def adapter(digest: str) -> AdapterInfo:
    return AdapterInfo(name="legal", digest=digest * 32, rank=4, num_bytes=8)


def test_an_adapter_of_other_weights_is_not_asked_under_its_id(tmp_path: Path) -> None:
    engine = engine_of("ours", adapters=[adapter("aa")])
    with serve(engine) as place:
        with serve_gateway(tmp_path, place, models=None) as url:
            assert said(url, "tiny:legal") == "ours"
            engine.restart(adapters=[adapter("bb")], script=say("other"))
            assert "other" not in answers(url, "tiny:legal")
            eventually(lambda: said(url, "tiny:legal") == "404")
            # The gateway may take the engine for a starting one for another moment.
            eventually(lambda: said(url, "tiny") == "other")  # the model itself is the same
            (report,) = Admin(url).get("engines")
            assert "its adapter `legal` is not used" in report["notes"][0]
            assert report["ids"] == ["tiny"]
        with serve_gateway(tmp_path, place, models=None) as url:
            assert said(url, "tiny:legal") == "404"
            Admin(url).post("engines/engine-0/give-id", {})
            assert said(url, "tiny:legal") == "other"


def described(model: str = "tiny", identity: ModelIdentity = OURS, **more: Any) -> Description:
    return Description(
        backend="synthetic",
        model=model,
        epoch="e",
        max_context_tokens=1,
        block_size=1,
        num_blocks=1,
        granularity=1,
        min_cache_tokens=1,
        capabilities=[],
        identity=identity,
        **more,
    )


def test_gateways_of_one_database_agree_and_the_first_word_stays(
    tmp_path: Path, shared_database: str
) -> None:
    migrate(DatabaseSettings(data=tmp_path, database_url=shared_database))

    async def check(ledger: Ledger) -> None:
        table = ModelIdsTable(ledger)
        first_ids, second_ids = (ModelIds(table, lambda: START) for _ in range(2))
        first_ids.admit(described(identity=ModelIdentity(server="m")))
        second_ids.admit(described(identity=ModelIdentity(server="n")))
        await first_ids.refresh()
        await second_ids.refresh()
        assert first_ids.known == second_ids.known
        assert {*first_ids.known} == {"tiny", DEFAULT_ID}
        with pytest.raises(AnotherModel, match="its server's model is n, not m"):
            second_ids.admit(described(identity=ModelIdentity(server="n")))
        # What one learns, the other compares with.
        first_ids.admit(described(identity=OURS))
        await first_ids.refresh()
        await second_ids.refresh()
        with pytest.raises(AnotherModel, match="weights"):
            second_ids.admit(described(identity=OTHER))
        # An operator's word is not overwritten by what was learned before it.
        second_ids.admit(described(identity=ModelIdentity(server="m", weights=OURS.weights)))
        await first_ids.give_model(described(identity=OTHER))
        await second_ids.refresh()
        assert second_ids.known["tiny"].identity == OTHER
        assert (await table.all()) == second_ids.known

    asyncio.run(with_ledger(shared_database, check))


_FACT = st.sampled_from(["", "a", "b"])
_IDENTITY = st.builds(ModelIdentity, weights=_FACT, template=_FACT, vocabulary=_FACT, server=_FACT)


@given(_IDENTITY, _IDENTITY, _IDENTITY)
def test_what_is_admitted_never_contradicts_what_was_said_before(
    first: ModelIdentity, second: ModelIdentity, third: ModelIdentity
) -> None:
    """Whoever is admitted agrees with all that came before it, not only with the first."""
    ids = ModelIds(None, lambda: START)
    taken = list[ModelIdentity]()
    for identity in (first, second, third):
        try:
            ids.admit(described(identity=identity))
        except AnotherModel:
            continue
        taken.append(identity)
    for fact in ("weights", "template", "vocabulary", "server"):
        assert len({getattr(identity, fact) for identity in taken} - {""}) <= 1


@pytest.mark.parametrize(
    ("name", "other_name", "identity", "is_same"),
    [
        ("org/tiny", "tiny", ModelIdentity(), True),
        ("org/tiny", "more/tiny", ModelIdentity(), False),
        ("org/tiny", "more/tiny", ModelIdentity(template="11" * 32), False),
        ("/models/tiny", "/mnt/tiny", OURS, True),
    ],
)
def test_full_names_count_where_no_weights_are_known(
    name: str, other_name: str, identity: ModelIdentity, is_same: bool
) -> None:
    ids = ModelIds(None, lambda: START)
    ids.admit(described(name, identity))
    assert (differences_of(ids.known["tiny"], described(other_name, identity)) == []) is is_same
    assert united(ModelIdentity(), OURS) == united(OURS, ModelIdentity()) == OURS


def test_before_any_engine_has_said_what_it_has_clients_are_told_to_come_again(
    tmp_path: Path,
) -> None:
    engine = engine_of("ours", is_ready=False)
    with (
        serve(engine) as place,
        serve_gateway(tmp_path, place, models=None, queue_seconds=0) as url,
    ):
        assert said(url) == "529"
        engine.is_ready = True
        eventually(lambda: said(url) == "ours")
        assert said(url, "nothing") == "404"


def test_claude_ids_mean_the_model_that_the_setting_names(tmp_path: Path) -> None:
    """Whatever was served first."""
    big = engine_of("other", model="big", identity=OTHER)
    with two(engine_of("ours"), big) as (ours, theirs):
        changes: dict[str, Any] = {"models": None, "queue_seconds": 0}
        with serve_gateway(tmp_path, ours, **changes) as url:
            assert said(url, "claude-sonnet-5") == "404"
            assert DEFAULT_ID not in {row["id"] for row in Admin(url).get("model-ids")}
        with serve_gateway(tmp_path, ours, theirs, claude_alias="big", **changes) as url:
            assert answers(url, "claude-sonnet-5") == {"other": 8}
            reply = httpx.get(f"{url}/v1/models/claude-sonnet-5", headers=HEADERS, timeout=60)
            assert reply.json()["display_name"] == "claude-sonnet-5 (alias of big)"
        with serve_gateway(tmp_path, ours, theirs, claude_alias=True, **changes) as url:
            (words,) = answers(url, "claude-sonnet-5")
            default = next(r for r in Admin(url).get("model-ids") if r["id"] == DEFAULT_ID)
            assert default["engine_model"] == ("big" if words == "other" else "tiny")


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("0", False), ("my-model", "my-model"), ("On", True)]
)
def test_the_alias_is_a_switch_or_an_id(text: str, value: bool | str) -> None:
    needed = {"HOLDFAST_ENGINE_SECRET": "s" * 32, "HOLDFAST_MASTER_SECRET": "m" * 32}
    assert load({**needed, "HOLDFAST_CLAUDE_ALIAS": text}).claude_alias == value
