"""Chat templates of the kinds that models come with, and renderers over a small real tokenizer."""

import json
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import engine
from engine.text.files import PromptFiles, read_prompt_files
from engine.text.renderer import ChatRenderer

DEMO_MODEL = str(Path(engine.__file__).with_name("demo_model"))

# As Qwen writes it: the system prompt first, tools inside its message, thinking in the last turn.
QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\n<tool_call>\\n{\\"name\\": <n>, " }}
    {{- "\\"arguments\\": <a>}\\n</tool_call><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content and loop.last %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if (loop.first and message.content) or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' }}{{- tool_call.function.name }}
            {{- '", "arguments": ' }}{{- tool_call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
# Trims everything, and writes tools and arguments key by key: no marks come out of those.
TRIMMING = """\
{{- bos_token }}
{%- for tool in tools or [] %}[TOOL {{ tool.function.name }}:{{ tool.function.description }}]
{% endfor %}
{%- for message in messages %}
{{- message.role | upper }}: {{ message.content | trim }}
{%- for call in message.tool_calls or [] %}
CALL {{ call.function.name }}
{%- for key, value in call.function.arguments.items() %} {{ key }}={{ value }}{% endfor %}
{%- endfor %}
{{ '<|im_end|>' }}
{% endfor %}
"""
# The tools come in the last user message, as Mistral has them: nothing stays where it was.
TOOLS_LAST = """\
{%- for message in messages %}
{%- if loop.last and tools %}TOOLS{{ tools | tojson }}{% endif %}
{{- message.role }}>{{ message.content }}<|im_end|>
{%- endfor %}
"""


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


def decode(renderer: ChatRenderer, token_ids: list[int]) -> str:
    return renderer.tokenizer.decode(token_ids, skip_special_tokens=False)


@cache
def sentencepiece_like() -> Tokenizer:
    """A space before the first word, spaces as U+2581, unknown characters as bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    specials = ["<unk>", "<|im_start|>", "<|im_end|>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator(["hello world, the words of the world\n"] * 4, trainer)
    parts = json.loads(tokenizer.to_str())
    # Byte tokens belong to the vocabulary, not to the control tokens.
    parts["added_tokens"] = parts["added_tokens"][:3]
    tokenizer = Tokenizer.from_str(json.dumps(parts))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


@cache
def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<unk>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
        initial_alphabet=[chr(code) for code in range(32, 127)] + ["\n"],
    )
    tokenizer.train_from_iterator(["hello world, the words of the world\n"] * 4, trainer)
    return tokenizer
