"""What a model's folder says about prompts, and prompts that a client has put into its form."""

import json
import shutil
from pathlib import Path

import pytest

from engine.protocol import Message, Prompt, TextPart, Tool
from engine.text.conversations import render_text
from engine.text.errors import TemplateRefused
from engine.text.files import read_prompt_files
from engine.text.renderer import ChatRenderer
from engine.text.template.chat_template import ChatTemplate
from tests.engine.text.templates import DEMO_MODEL, decode, demo_renderer


def folder(path: Path, *, tokenizer: bool = True) -> Path:
    path.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        if (tokenizer or name != "tokenizer.json") and Path(DEMO_MODEL, name).exists():
            shutil.copy(Path(DEMO_MODEL, name), path / name)
    (path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return path


def test_templates_of_the_folder_are_read_and_tools_have_their_own(tmp_path: Path) -> None:
    model = folder(tmp_path / "model")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text(
        "TOOLS {{ tools | length }} {{ messages[0].content }}"
    )
    renderer = ChatRenderer(read_prompt_files(str(model)))
    messages = [Message("user", [TextPart("hello")])]
    for tools, text in (([], "hello"), ([Tool("t", {}, "d")], "TOOLS 1 hello")):
        rendered = renderer.render(Prompt(messages, tools), thinking=False)
        assert decode(renderer, rendered.token_ids) == text


@pytest.mark.parametrize("name", ["tekken.json", "tiktoken.model", "tokenizer.model"])
def test_a_vocabulary_that_cannot_be_converted_is_refused_by_name(
    tmp_path: Path, name: str
) -> None:
    model = folder(tmp_path / "model", tokenizer=False)
    (model / name).write_bytes(b"no vocabulary")
    with pytest.raises(TemplateRefused, match=name):
        read_prompt_files(str(model))


def test_a_model_without_any_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TemplateRefused, match=r"tokenizer\.json, nor any of"):
        read_prompt_files(str(folder(tmp_path / "model", tokenizer=False)))


def test_a_sentencepiece_vocabulary_is_converted(tmp_path: Path) -> None:
    trainer = pytest.importorskip("sentencepiece")
    model = folder(tmp_path / "model", tokenizer=False)
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
    tokens = renderer.render(Prompt([Message("user", [TextPart("hello world")])]), thinking=False)
    assert decode(renderer, tokens.token_ids).strip() == "hello world"


def test_a_template_that_does_not_compile_is_refused_with_its_line() -> None:
    with pytest.raises(TemplateRefused, match="does not compile: line 2: "):
        ChatTemplate({"default": "{{ messages }}\n{% for message in messages %}{{ 1"}, {})


CHAT = "<|im_start|>user\nWhat is a lease?<|im_end|>\n<|im_start|>assistant\n"


def test_control_tokens_that_a_raw_prompt_writes_are_control_tokens() -> None:
    renderer = demo_renderer()
    rendered = renderer.render(Prompt([], text=CHAT), thinking=False)
    start = renderer.tokenizer.token_to_id("<|im_start|>")
    assert rendered.token_ids.count(start) == 2
    assert rendered.token_ids == renderer.tokenizer.encode(CHAT).ids


def test_a_point_in_the_text_has_the_offset_of_the_tokens_before_it() -> None:
    tokenizer = demo_renderer().tokenizer
    rendered = render_text(tokenizer, CHAT)
    [span] = rendered.segments
    assert span.offset(None) == len(rendered.token_ids)
    for characters in range(len(CHAT) + 1):
        offset = span.offset(characters)
        assert offset is not None
        before = tokenizer.decode(rendered.token_ids[:offset], skip_special_tokens=False)
        assert CHAT[:characters].startswith(before)
