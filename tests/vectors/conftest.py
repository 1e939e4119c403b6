"""One gateway and two native engines for all vectors; each vector has words of its own."""

from collections.abc import Iterator
from zlib import crc32

import pytest

from scripts.stack import API_KEY
from tests.fuzz.houses import MODELS, running_machines, serving
from tests.vectors.world import Vector, World

# One engine model under several minimum lengths, and another one.
MODELS_TOML = "default = 'v1024'\n" + "".join(
    f"[[models]]\nid = '{name}'\nengine_model = '{engine}'\nmin_cache_tokens = {minimum}\n"
    for name, engine, minimum in [
        ("v1024", MODELS[0], 1024),
        ("v512", MODELS[0], 512),
        ("v4096", MODELS[0], 4096),
        ("other", MODELS[1], 1024),
    ]
)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    data = tmp_path_factory.mktemp("vectors")
    with running_machines(data, "native") as machines:
        with serving(data, machines, MODELS_TOML, ["second", "default"]) as (url, keys):
            named = dict(zip(["second", "again"], keys, strict=True))
            yield World(machines, url, {"default": API_KEY, **named})


@pytest.fixture
def vector(world: World, request: pytest.FixtureRequest) -> Iterator[Vector]:
    name = f"{crc32(request.node.name.encode())} "
    yield Vector(world, name)
    world.machines.clear()
