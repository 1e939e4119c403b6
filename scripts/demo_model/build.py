"""What the demo model is made of: its tokenizer, chat template, shape and files."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from scripts.demo_model import data, turns

VOCAB = 4096
END = "<|im_end|>"
CONTROL = ("<|endoftext|>", "<|im_start|>", END)
# Not "special": a caller parses them, so decoding must keep them where control tokens are skipped.
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# A space or underscore belongs to a lower-case word only, and digits stand alone: a name or an id
# is then the same tokens in a question as behind a quote in JSON, so that the model can copy it.
SPLIT = (
    r"[ _]?\p{Ll}+|\p{Lu}+(?!\p{Ll})|\p{Lu}\p{Ll}*|\p{L}|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s"
)
TEMPLATE = r"""
{%- macro text(content) -%}
    {%- if content is string -%}{{ content }}
    {%- elif content -%}{%- for part in content -%}{{ part.text }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
    {{- '<|im_start|>tools\n' -}}
    {%- for tool in tools -%}{{ tool | tojson }}{{ '\n' }}{%- endfor -%}
    {{- NOTE -}}{{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\n' -}}
    {%- if message.role == 'tool' -%}
        {{- '<tool_response>' -}}{{ text(message.content) }}{{- '</tool_response>' -}}
    {%- else -%}
        {{- text(message.content) -}}
        {%- for call in message.tool_calls or [] -%}
            {%- set f = call.function if call.function is defined else call -%}
            {{- '<tool_call>{"name": ' -}}{{ f.name | tojson }}{{- ', "arguments": ' -}}
            {%- if f.arguments is string -%}{{ f.arguments }}
            {%- else -%}{{ f.arguments | tojson }}{%- endif -%}
            {{- '}</tool_call>' -}}
        {%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""


def build_tokenizer(out: Path, seed: int) -> None:
    """Train the byte-level BPE on the project's own text and write the three tokenizer files."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(t, special=True, normalized=False) for t in CONTROL]
    marks = [AddedToken(t, special=False, normalized=False) for t in MARKS]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(MARKS),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(turns.corpus(random.Random(seed)), trainer)
    tokenizer.add_tokens(marks)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    note = "{{- '" + data.TOOL_NOTE + "' -}}"
    (out / "chat_template.jinja").write_text(
        TEMPLATE.strip().replace("{{- NOTE -}}", note), "utf-8"
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": CONTROL[0],
        "model_max_length": 16384,
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")


def build_model(seed: int) -> LlamaForCausalLM:
    """A four-layer Llama without weights worth anything."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=16384,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=CONTROL.index(END),
        pad_token_id=0,
    )
    model: LlamaForCausalLM = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    return model


def save(model: LlamaForCausalLM, out: Path) -> None:
    """Write the weights in half the bytes; users load them as float32."""
    state = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    copy = LlamaForCausalLM(model.config)  # type: ignore[no-untyped-call]
    copy.bfloat16()
    copy.load_state_dict(state)
    copy.generation_config.do_sample = False
    copy.save_pretrained(out)


@dataclass
class Example:
    """Token ids of one conversation, and which of them are answers."""

    ids: list[int] = field(default_factory=list)
    learned: list[bool] = field(default_factory=list)


class Encoder:
    """Turns chunks into rows; a chunk begins with a control token, so it can be encoded alone."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def ids(self, text: str) -> list[int]:
        """The token ids of a text; nothing is added to it."""
        return list(self.tokenizer(text)["input_ids"])

    def add(self, row: Example, chunks: list[data.Chunk]) -> None:
        """Append messages, and mark the tokens of the answers among them."""
        for text, learned in chunks:
            ids = self.ids(text)
            # Not the header, which the prompt ends with, nor the line break after the end.
            row.learned += [learned and 3 <= i < len(ids) - 1 for i in range(len(ids))]
            row.ids += ids

    def add_ids(self, row: Example, ids: list[int]) -> None:
        """Append tokens that are not learned."""
        row.ids += ids
        row.learned += [False] * len(ids)

    def systems(self, rng: random.Random, tokens: int) -> list[int]:
        """One to three system blocks of about `tokens` tokens in all."""
        blocks = rng.choice([1, 1, 2, 3])
        ids: list[int] = []
        for _ in range(blocks):
            size = max(1, tokens // blocks - 5)
            if rng.random() < 0.1:
                body = [rng.randrange(len(CONTROL), VOCAB - len(MARKS)) for _ in range(size)]
            else:
                body = self.ids(data.distractor(rng, size * 5))[:size]
            ids += self.ids("<|im_start|>system\n") + body + self.ids(END + "\n")
        return ids
