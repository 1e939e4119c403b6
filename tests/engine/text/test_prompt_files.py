"""What a model's folder says about prompts, and prompts that a client has put into its form."""

import json
import shutil
from pathlib import Path

import pytest

from engine.protocol import Prompt, Tool
from engine.text.files import read_prompt_files
from engine.text.rendered import TemplateRefused
from engine.text.renderer import ChatRenderer
from engine.text.template.chat_template import ChatTemplate
from tests.engine.backends.local import prompt
from tests.engine.text.templates import DEMO_MODEL, decode, demo_renderer

CHAT = "<|im_start|>user\nWhat is a lease?<|im_end|>\n<|im_start|>assistant\n"


def folder(path: Path, *, tokenizer: bool = True) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        if tokenizer or name != "tokenizer.json":
            shutil.copy(Path(DEMO_MODEL, name), path / name)
    (path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return path


def test_templates_of_the_folder_are_read_and_tools_have_their_own(tmp_path: Path) -> None:
    templates_folder = folder(tmp_path) / "additional_chat_templates"
    templates_folder.mkdir()
    templates_folder.joinpath("tool_use.jinja").write_text(
        "TOOLS {{ tools | length }} {{ messages[0].content }}"
    )
    renderer = ChatRenderer(read_prompt_files(str(tmp_path)))
    for tools, text in (([], "hello"), ([Tool("t", {}, "d")], "TOOLS 1 hello")):
        rendered = renderer.render(prompt("hello", tools=tools), thinking=False)
        assert decode(renderer, rendered.token_ids) == text


@pytest.mark.parametrize("name", ["tekken.json", "tiktoken.model", "tokenizer.model", ""])
def test_a_vocabulary_that_is_missing_or_cannot_be_converted_is_refused_by_name(
    tmp_path: Path, name: str
) -> None:
    model = folder(tmp_path, tokenizer=False)
    if name:
        (model / name).write_bytes(b"no vocabulary")
    with pytest.raises(TemplateRefused, match=name or r"tokenizer\.json, nor any of"):
        read_prompt_files(str(model))


def test_a_sentencepiece_vocabulary_is_converted(tmp_path: Path) -> None:
    trainer = pytest.importorskip("sentencepiece")
    model = folder(tmp_path, tokenizer=False)
    text = tmp_path / "text"
    text.write_text("\n".join(f"hello world of {n} words" for n in range(500)))
    trainer.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(model / "tokenizer"), vocab_size=300,
        model_type="bpe", byte_fallback=True,
    )  # fmt: skip
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 2}))
    renderer = ChatRenderer(read_prompt_files(str(model)))
    tokens = renderer.render(prompt("hello world"), thinking=False)
    assert decode(renderer, tokens.token_ids).strip() == "hello world"


def test_a_template_that_does_not_compile_is_refused_with_its_line() -> None:
    with pytest.raises(TemplateRefused, match="does not compile: line 2: "):
        ChatTemplate({"default": "{{ messages }}\n{% for message in messages %}{{ 1"}, {})


def test_a_raw_prompt_has_control_tokens_and_offsets_of_its_points() -> None:
    tokenizer = demo_renderer().tokenizer
    rendered = demo_renderer().render(Prompt([], text=CHAT), thinking=False)
    assert rendered.token_ids.count(tokenizer.token_to_id("<|im_start|>")) == 2
    assert rendered.token_ids == tokenizer.encode(CHAT).ids
    [span] = rendered.segments
    assert span.offset(None) == len(rendered.token_ids)
    for characters in range(len(CHAT) + 1):
        offset = span.offset(characters)
        assert offset is not None
        before = tokenizer.decode(rendered.token_ids[:offset], skip_special_tokens=False)
        assert CHAT[:characters].startswith(before)
