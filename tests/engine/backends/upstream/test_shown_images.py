"""An engine before a scripted server of chat completions that sees images, or says that it does."""

import hashlib
import json
import shutil
from base64 import b64decode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from engine.protocol import Image, Message, Prompt, TextPart
from engine.settings import DEMO_MODEL
from tests.conformance.engines import Engine
from tests.e2e.prompts import png
from tests.engine.backends.upstream.conftest import engine_before
from tests.engine.backends.upstream.scripted import Script, serving_script
from tests.engine.backends.upstream.scripted_openai import ScriptedOpenAi

IMAGE_TOKENS = 40


class Sees(ScriptedOpenAi):
    """An image is 40 tokens of its content's, behind `num_before` tokens if a text is before it."""

    num_before = 0

    def _tokens(self, contents: list[Any]) -> Sequence[int] | None:
        texts = list[str]()
        spans = list[list[int]]()
        for content in contents:
            parts = [{"text": content}] if isinstance(content, str) else content
            texts.append("".join(part.get("text", "\0") for part in parts))
            spans += [self._of(part["image_url"]["url"]) for part in parts if "image_url" in part]
        tokens = list[int]()
        for number, text in enumerate("\n".join(texts).split("\0")):
            if number:
                tokens += [0] * (self.num_before if texts[0][0] != "\0" else 0) + spans[number - 1]
            tokens += self.tokenizer.encode(text, add_special_tokens=False).ids
        whole = self._renderer.render(Prompt([Message("user", [TextPart("")])]), thinking=False)
        return [*whole.token_ids, *tokens]

    def _of(self, url: str) -> list[int]:
        digest = hashlib.sha256(b64decode(url.partition(",")[2])).digest()
        return [4100 + digest[place % 32] for place in range(IMAGE_TOKENS)]


class SeesNone(Sees):
    def _of(self, url: str) -> list[int]:
        return []


class SeesAllAlike(Sees):
    def _of(self, url: str) -> list[int]:
        return [4100] * IMAGE_TOKENS


class CountsOtherwise(Sees):
    num_before = 3


class Refuses(Sees):
    def _tokens(self, contents: list[Any]) -> Sequence[int] | None:
        is_seen = any(isinstance(content, list) for content in contents)
        return None if is_seen else super()._tokens(contents)


@contextmanager
def engine_of(kind: type[Sees], directory: Path) -> Iterator[Engine]:
    """The model's files name an image's token."""
    model = directory / "eyes"
    shutil.copytree(DEMO_MODEL, model, ignore=lambda *_: ["model.safetensors"])
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(model / "tokenizer.json"))
    config = json.loads((model / "config.json").read_text())
    config["image_token_id"] = tokenizer.token_to_id("<image>")
    (model / "config.json").write_text(json.dumps(config))
    with serving_script(Script(), kind) as url, engine_before(url, MODEL=str(model)) as engine:
        yield engine


def image_prompt(file: bytes, scope: str, *texts: str) -> Prompt:
    digest = hashlib.sha256(scope.encode() + file).hexdigest()
    image = Image(digest, "image/png", file, 112, 84)
    parts = [TextPart(text) for text in (*texts, image.reference)]
    return Prompt([Message("user", [*parts])], images=[image])


def test_an_image_is_read_again_and_another_pixel_is_another_image(tmp_path: Path) -> None:
    with engine_of(Sees, tmp_path) as engine:
        assert engine.has("images")
        scope = engine.scope()
        about = engine.text(60)
        counted = engine.count(image_prompt(png(), scope, about))
        first = engine.ask(image_prompt(png(), scope, about), scope, 1).usage
        again = engine.ask(image_prompt(png(), scope, about), scope, 1).usage
        assert first.prompt_tokens == counted.input_tokens
        assert first.cache_write_5m_tokens == again.cache_read_tokens
        assert again.cache_read_tokens > engine.floor(counted.segment_tokens[0] or 0)
        changed = engine.ask(image_prompt(png(first=1), scope, about), scope, 0, 1).usage
        assert changed.cache_read_tokens <= (counted.segment_tokens[0] or 0)


@pytest.mark.parametrize("kind", [SeesNone, SeesAllAlike, Refuses])
def test_a_server_that_does_not_see_them_is_shown_none(kind: type[Sees], tmp_path: Path) -> None:
    with engine_of(kind, tmp_path) as engine:
        assert engine.keeps("exact_read") and not engine.has("images")


def test_where_the_server_counts_otherwise_an_image_is_no_read(tmp_path: Path) -> None:
    with engine_of(CountsOtherwise, tmp_path) as engine:
        assert engine.has("images")
        (note,) = (g.note for g in engine.description.guarantees if g.name == "exact_read")
        assert "not told of prompts with images: it counts" in note
        scope = engine.scope()
        about = engine.text(60)
        for _ in range(2):
            usage = engine.ask(image_prompt(png(), scope, about), scope, 1).usage
            assert usage.cache_read_tokens == 0
