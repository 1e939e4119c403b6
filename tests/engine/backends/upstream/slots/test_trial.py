"""Whether a server keeps what leases need: each flag that it lacks is named."""

from pathlib import Path
from typing import Any

import pytest

from engine.backends.prepare.renderers import chat_renderer, chat_worker
from engine.backends.upstream.server import ModelFacts, Wire
from engine.backends.upstream.slots.gguf import read_model
from engine.backends.upstream.slots.server import SlotServer
from engine.backends.upstream.slots.trial import NoLeases, SlotTrial, try_leases
from engine.settings import DEMO_MODEL, Settings
from engine.text.renderer import ChatRenderer
from scripts.stack import ENGINE_SECRET
from tests.engine.backends.upstream.scripted import serving_script
from tests.engine.backends.upstream.slots.scripted_slots import (
    FileScript,
    ScriptedSlots,
    write_model,
)

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def renderer() -> ChatRenderer:
    settings = Settings(secret=ENGINE_SECRET, backend="upstream", upstream="http://127.0.0.1:1")
    return chat_renderer(chat_worker(settings))


async def tried(root: Path, renderer: ChatRenderer, **script: Any) -> SlotTrial:
    if not (root / "model.gguf").exists():
        write_model(root / "model.gguf")
    script = {"folder": root, "model_file": str(root / "model.gguf")} | script
    with serving_script(FileScript(**script), ScriptedSlots) as url:
        wire = Wire(url, "", 30.0)
        server = SlotServer(wire, ModelFacts.of(str(DEMO_MODEL), renderer), "", 16)
        try:
            return await try_leases(server, renderer, await server.find_facts(), root)
        finally:
            await wire.close()


async def test_a_server_as_it_must_be(tmp_path: Path, renderer: ChatRenderer) -> None:
    first = await tried(tmp_path, renderer)
    assert first.may_trim
    assert first.sizes.token_bytes == 256 + 4
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"], "nothing is left"
    # The same server again has the same fingerprint; other weights behind the same file do not.
    assert (await tried(tmp_path, renderer)).fingerprint == first.fingerprint
    assert (await tried(tmp_path, renderer, weights=2)).fingerprint != first.fingerprint
    write_model(tmp_path / "model.gguf", architecture="qwen3")
    assert (await tried(tmp_path, renderer)).fingerprint != first.fingerprint


@pytest.mark.parametrize(
    ("script", "named"),
    [
        ({"shares_ram": True}, "--cache-ram 0"),
        ({"clears_idle": True}, "--no-cache-idle-slots"),
        ({"is_unified": True}, "--kv-unified"),
        ({"folder": None}, "--slot-save-path"),
        ({"has_window": True}, "--swa-full"),
        ({"speculates": True}, "drafts"),
        ({"num_adapters": 1}, "adapters"),
        ({"sees": True}, "images"),
        ({"model_file": "model.gguf"}, "start it with -m"),
        ({"model_file": "/nowhere/model.gguf"}, "/nowhere/model.gguf"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_is_wrong_is_named(
    tmp_path: Path, renderer: ChatRenderer, script: dict[str, Any], named: str
) -> None:
    with pytest.raises(NoLeases, match=named):
        await tried(tmp_path, renderer, **script)
    assert not list(tmp_path.glob("hf-*"))


async def test_another_directory_is_named(tmp_path: Path, renderer: ChatRenderer) -> None:
    elsewhere = tmp_path / "other"
    elsewhere.mkdir()
    with pytest.raises(NoLeases, match=f"--slot-save-path {tmp_path}"):
        await tried(tmp_path, renderer, folder=elsewhere)


async def test_only_full_attention_is_cut_back(tmp_path: Path, renderer: ChatRenderer) -> None:
    """A file that is longer than a prefix of it is silently wrong with sliding windows, also where
    the server cuts it."""
    assert not (await tried(tmp_path, renderer, is_exact_only=True)).may_trim
    write_model(tmp_path / "model.gguf", window=512)
    assert not (await tried(tmp_path, renderer)).may_trim
    write_model(tmp_path / "model.gguf", architecture="gemma3")
    assert not (await tried(tmp_path, renderer)).may_trim


@pytest.mark.parametrize("content", [b"", b"GGUF", b"junk" * 100])
def test_what_is_no_model_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(ValueError, match="it"):
        read_model(tmp_path / "model.gguf")
