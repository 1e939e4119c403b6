"""A native engine and a gateway with three workspaces, which only this folder's tests use."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from scripts.stack import Stack, running_stack
from tests.fuzz.tiny_model import write_tiny_model
from tests.gateway.admin_client import Admin
from tests.gateway.process import new_key
from tests.gateway.serving import eventually
from tests.isolation.probes import ENGINE, KINDS, client_of

WORKSPACES = ("owner-of-it", "stranger-to-it", "reference-of-it")


@dataclass(frozen=True)
class House:
    """One client for each workspace, and what an operator knows."""

    stack: Stack
    data: Path
    owner_key_id: str
    owner: httpx.Client
    stranger: httpx.Client
    reference: httpx.Client


@pytest.fixture(scope="session")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    data = tmp_path_factory.mktemp("isolation")
    with ExitStack() as stack:
        settings = {**ENGINE, **KINDS, "ENGINE_MODEL": str(write_tiny_model(data / "tiny"))}
        running = stack.enter_context(running_stack(data, engine_settings=settings))
        keys = [new_key(data, workspace) for workspace in WORKSPACES]
        admin = Admin(running.gateway)
        for workspace in WORKSPACES:
            admin.post(f"workspaces/{workspace}", {"may_approximate": True})
        # What may be asked for is measured behind exact turns.
        eventually(
            lambda: not any(row["description"]["is_measuring"] for row in admin.get("engines")),
            seconds=240,
        )
        clients = [stack.enter_context(client_of(running.gateway, key)) for _, key in keys]
        yield House(running, data, keys[0][0], *clients)
