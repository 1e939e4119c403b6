"""F16: many gateways start over one database that is empty: one schema, one key, all serve."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import sqlalchemy as sa

from scripts.stack import free_port, gateway_environment, python, serving, start
from tests.faults.sizes import number, told
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import ask, eventually, serve


@pytest.mark.timeout(1200)
def test_gateways_start_together_on_one_database(tmp_path: Path, shared_database: str) -> None:
    count = number(3, 10)
    with serve(ScriptedEngine()) as engine, ExitStack() as stack:
        ports = [free_port() for _ in range(count)]

        def run(port: int) -> None:
            shared_settings = {
                "HOLDFAST_DATABASE_URL": shared_database,
                "HOLDFAST_LOG_LEVEL": "error",
            }
            settings = gateway_environment(port, tmp_path / str(port), [engine], shared_settings)
            assert start([*python("gateway"), "migrate"], settings).wait() == 0
            stack.enter_context(serving([*python("gateway"), "serve"], settings, port)).wait()

        with ThreadPoolExecutor(count) as pool:
            list(pool.map(run, ports))
        for port in ports:
            assert ask(f"http://127.0.0.1:{port}").status_code == 200
        eventually(lambda: rows(shared_database, "turns") == count)
        keys = rows(shared_database, "api_keys")
        told("F16", starts=count, database=shared_database.split(":")[0], keys=keys, rows=count)
        assert keys == 1


def rows(url: str, table: str) -> int:
    database = sa.create_engine(url.replace("sqlite+aiosqlite", "sqlite"))
    try:
        with database.connect() as connection:
            return int(connection.execute(sa.text(f"SELECT count(*) FROM {table}")).scalar_one())
    finally:
        database.dispose()
