"""What a purge says of an engine that does not answer it."""

from contextlib import ExitStack
from pathlib import Path

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
    (told,) = report["engines"]
    assert (told["engine"], told["purged"]) == ("engine-0", False)
    (left,) = report["left"]
    assert left.startswith("pending for engine-0: not known, it did not answer.")
