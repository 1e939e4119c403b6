"""What a purge says of an engine that does not do it."""

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.stack import probe
from tests.gateway.admin_client import Admin
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import eventually, serve, serve_gateway


def test_an_engine_that_is_away_is_not_taken_for_purged(tmp_path: Path) -> None:
    with ExitStack() as engines:
        engine = engines.enter_context(serve(ScriptedEngine()))
        with serve_gateway(tmp_path, engine) as url:
            eventually(lambda: probe(f"{url}/readyz").ready)
            engines.close()
            report = Admin(url).post("purge", {"workspace": "default"})
    (engine_report,) = report["engines"]
    assert (engine_report["engine"], engine_report["purged"]) == ("engine-0", False)
    (line,) = report["left"]
    assert line.startswith("pending for engine-0: not known, ")
    assert engine_report["detail"] in line


@dataclass
class _Refusing(ScriptedEngine):
    """It answers each purge with 404, as the scripted engine does with paths that it lacks."""

    num_purges: int = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.num_purges += scope.get("path") == "/v1/purge"
        await super().__call__(scope, receive, send)


def test_an_engine_that_refuses_a_purge_is_told_so_and_not_asked_without_end(
    tmp_path: Path,
) -> None:
    engine = _Refusing()
    with serve(engine) as engine_url, serve_gateway(tmp_path, engine_url) as url:
        eventually(lambda: probe(f"{url}/readyz").ready)
        admin = Admin(url)
        (engine_report,) = admin.post("purge", {"workspace": "default"})["engines"]
        assert (engine_report["purged"], engine_report["pending"]) == (False, True)

        def cause() -> str:
            conditions = admin.get("conditions")
            causes = [entry["cause"] for entry in conditions if entry["kind"] == "purge_pending"]
            return "".join(causes)

        eventually(lambda: "it refuses: " in cause())
        num_before = engine.num_purges
        time.sleep(3)  # the engine is polled each second
        assert engine.num_purges == num_before
        assert "`default`" in cause()


def test_a_models_purge_names_engines_whose_model_is_not_known(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    away = "http://127.0.0.1:9"
    with serve(engine) as engine_url, serve_gateway(tmp_path, engine_url, away) as url:
        eventually(lambda: probe(f"{url}/readyz").ready)
        report = Admin(url).post("purge", {"model": engine.model})
    assert [entry["engine"] for entry in report["engines"]] == ["engine-0"]
    assert any(text.startswith("engine-1 has not answered since") for text in report["left"])
