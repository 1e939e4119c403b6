"""Chat templates of the kinds that models come with, and renderers over a small real tokenizer."""

from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

import engine
from engine.text.files import PromptFiles, read_prompt_files
from engine.text.renderer import ChatRenderer

DEMO_MODEL = str(Path(engine.__file__).with_name("holdfast-demo"))


@cache
def demo_files() -> PromptFiles:
    return read_prompt_files(DEMO_MODEL)


@cache
def demo_renderer() -> ChatRenderer:
    return ChatRenderer(demo_files())


def renderer_for(template: str, tokenizer: Tokenizer | None = None) -> ChatRenderer:
    """The demonstration tokenizer, or another, with a template."""
    return ChatRenderer(
        PromptFiles(
            tokenizer=tokenizer or demo_files().tokenizer,
            templates={"default": template},
            special_tokens={"bos_token": "<|endoftext|>"},
            end_token_ids=frozenset(),
        )
    )


@cache
def renderer_of(name: str) -> ChatRenderer:
    """The demonstration tokenizer with a template of the folders here."""
    (path,) = Path(__file__).parent.glob(f"*_templates/{name}.jinja")
    return renderer_for(path.read_text("utf-8"))


def decode(renderer: ChatRenderer, token_ids: list[int]) -> str:
    return renderer.tokenizer.decode(token_ids, skip_special_tokens=False)
