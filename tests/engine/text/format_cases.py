"""Templates to prove formats on: this project's own, and real ones where their folder is there."""

import os
import re
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from engine.text.files import PromptFiles
from engine.text.renderer import ChatRenderer
from tests.engine.text.templates import demo_files

HERE = Path(__file__).parent
CHATS = HERE / "chat_templates"
REAL = Path(os.environ.get("HOLDFAST_TEMPLATES") or HERE.parents[3] / "shared" / "templates")
"""Models' own chat templates: see README.md there."""
REAL_PATHS = sorted(REAL.glob("*.jinja"))

# What each template is expected to prove: its format of calls and that of its thinking.
OWN = {
    "command-r7b": ("cohere", "cohere"),
    "deepseek-v3": ("deepseek_v3", None),
    "deepseek-v3.2": ("deepseek_v32", "think"),
    "functionary-v3.1": ("functionary", None),
    "gemma-4": ("gemma4", "gemma4"),
    "glm-4.7": ("glm45", "think"),
    "kimi-k2-ids": ("kimi_k2", "think"),
    "apriel": ("jamba", "apriel"),
    "kimi-k3": ("kimi_k3", "kimi_k3"),
    "minimax-m3": ("minimax_m3", "template"),
    "lfm2": ("lfm2", "think"),
    "llama-4-pythonic": ("pythonic", None),
    "functionary-v3.2": ("functionary_v3", None),
    "gigachat-3": ("gigachat3", None),
    "glm-4-0414": ("glm4", None),
    "hammer": ("xlam", None),
    "hunyuan": ("jamba", "hunyuan"),
    "internlm2": ("internlm2", None),
    "lfm2-told": ("lfm2", None),
    "llama-4-json": ("template", None),
    "minicpm3": ("minicpm3", "template"),
    "minimax-m3-opened": ("minimax_m2", "template"),
    "muse": ("muse", "muse"),
    "phi-4-mini": ("phi4_mini_json", None),
    "phi-4-mini-bare": ("phi4_mini_json", None),
    "smollm3": ("hermes", "think"),
    "xlam": ("xlam", None),
    "typed-arguments": ("template", "think"),
    "cdata-arguments": ("template", None),
    "named-objects": ("template", None),
    "json-lines": ("jamba", None),
    "hermes-3": ("hermes", None),
    "llama-3.1": ("llama3_json", None),
    "magistral": ("mistral", "mistral"),
    "mistral-7b-v0.3": ("mistral", None),
    "qwen3": ("hermes", "think"),
}
OF_REAL = {
    "ByteDance-Seed-OSS": ("seed_oss", "seed_oss"),
    "GLM-4.6": ("glm45", "think"),
    "HuggingFaceTB-SmolLM3-3B": (None, "think"),
    "Kimi-K2-Instruct": ("kimi_k2", None),
    "MiniMax-M2": ("minimax_m2", "think"),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral", None),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", None),
    "Qwen-Qwen3-0.6B": ("hermes", "think"),
    "Qwen3-Coder": ("qwen3_coder", None),
    "Qwen3.5-4B": ("qwen3_coder", "think"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek_v3", "think"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek_v31", "think"),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite", "granite"),
    "microsoft-Phi-3.5-mini-instruct": (None, None),
    "openai-gpt-oss-120b": ("openai", "openai"),
    "unsloth-mistral-Devstral-Small-2507": ("mistral", None),
}
EXPECTED = OWN | OF_REAL
_CONTROL = re.compile(
    r"<\|\"\|>|<\|?/?[\w:]+\|?>|\[/?[A-Z_]+\]|<｜[^｜]+｜>|｜DSML｜|\]~!?b[\]\[]|\[e~\["
)
# Tags that models write as plain text.
_PLAIN = re.compile(r"</?(function|parameter|tools?|invoke|response|functions?|result)\b.*>")


def own_template_paths() -> list[Path]:
    """Those of models' chats, and of further ways to write calls."""
    return [*sorted(CHATS.glob("*.jinja")), *sorted(HERE.glob("call_templates/*.jinja"))]


def source(name: str) -> str | None:
    """A template's text; None where the folder of real ones is not there."""
    folders = (HERE / "call_templates", CHATS, REAL)
    paths = (folder / f"{name}.jinja" for folder in folders)
    return next((path.read_text("utf-8") for path in paths if path.is_file()), None)


def control_tokens(template: str) -> list[AddedToken]:
    """Those of formats of calls among them, which models have as special tokens."""
    texts = sorted(text for text in set(_CONTROL.findall(template)) if not _PLAIN.match(text))
    return [AddedToken(text, normalized=False) for text in texts]


@cache
def renderer(name: str) -> ChatRenderer:
    """The demonstration tokenizer with the template's control tokens, as its model has them."""
    template = source(name)
    assert template is not None
    tokenizer = Tokenizer.from_str(demo_files().tokenizer.to_str())
    tokenizer.add_special_tokens(control_tokens(template))
    return ChatRenderer(
        PromptFiles(
            tokenizer=tokenizer,
            templates={"default": template},
            special_tokens={"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"},
            end_token_ids=frozenset(),
        )
    )
