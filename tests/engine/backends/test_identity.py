"""What tells a model from another one of the same name."""

import json
import shutil
from pathlib import Path

import pytest

from engine.backends import identity
from engine.backends.identity import identity_of, weights_digest
from engine.backends.upstream.servers import last_part
from engine.protocol.reports import ModelIdentity
from engine.settings import DEMO_MODEL
from engine.text.renderer import ChatRenderer


def copied(folder: Path) -> Path:
    shutil.copytree(DEMO_MODEL, folder)
    return folder


def model_identity(folder: Path, server: str | None = None) -> ModelIdentity:
    return identity_of(str(folder), ChatRenderer.from_model(str(folder)), server=server)


def change(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def test_a_copy_elsewhere_is_the_same_model(tmp_path: Path) -> None:
    assert model_identity(copied(tmp_path / "a")) == model_identity(
        copied(tmp_path / "under" / "b")
    )


@pytest.mark.parametrize("place", [-1, -100_000, 4_096])
def test_weights_that_differ_in_one_byte_are_others(tmp_path: Path, place: int) -> None:
    ours = copied(tmp_path / "a")
    theirs = copied(tmp_path / "b")
    (file,) = theirs.glob("*.safetensors")
    change(file, place)
    assert weights_digest(ours) != weights_digest(theirs)


def test_another_template_or_vocabulary_is_another_model(tmp_path: Path) -> None:
    ours, template, vocabulary = (copied(tmp_path / name) for name in "abc")
    file = template / "chat_template.jinja"
    file.write_text(file.read_text("utf-8") + "{# changed #}", "utf-8")
    tokenizer = json.loads((vocabulary / "tokenizer.json").read_text("utf-8"))
    words = tokenizer["model"]["vocab"]
    last_but_one, last = list(words)[-2:]
    words[last_but_one], words[last] = words[last], words[last_but_one]
    (vocabulary / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    before = model_identity(ours)
    assert model_identity(template).template != before.template
    assert model_identity(template).vocabulary == before.vocabulary
    assert model_identity(vocabulary).vocabulary != before.vocabulary
    assert model_identity(vocabulary).weights == before.weights


def test_of_a_server_in_front_its_word_counts_and_not_the_files_here(tmp_path: Path) -> None:
    folder = copied(tmp_path / "a")
    assert (
        model_identity(folder, server="org/x").weights
        == model_identity(folder, server="").weights
        == ""
    )
    assert model_identity(folder, server="org/x").server == "org/x"


def test_of_large_weights_pieces_from_end_to_end_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "MAX_READ_BYTES", 1 << 20)
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(16 << 20))
    before = weights_digest(tmp_path)
    for place in (0, -1):
        change(file, place)
        assert weights_digest(tmp_path) != before
        change(file, place)
    assert weights_digest(tmp_path) == before
    # What was trained further differs everywhere.
    file.write_bytes(b"\1" * (16 << 20))
    assert weights_digest(tmp_path) != before
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    assert weights_digest(tmp_path) != before


def test_no_weights_are_not_known(tmp_path: Path) -> None:
    assert weights_digest(tmp_path) == weights_digest(None) == ""


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("org/model", "org/model"),
        ("/models/org/model", "model"),
        ("/models/a.gguf", "a.gguf"),
        ("C:\\models\\a.gguf", "a.gguf"),
        ("./a/", "a"),
        ("", ""),
    ],
)
def test_of_a_path_only_the_end_is_compared(name: str, part: str) -> None:
    assert last_part(name) == part
