"""Makes a model's renderer by the settings, in the same way for the engine and for its workers."""

from dataclasses import replace
from typing import TYPE_CHECKING

from engine.backends.prepare.prepared import WorkerSpec
from engine.cache.ids import TokenId
from engine.protocol import Capability
from engine.text.files import read_prompt_files
from engine.text.formats.proof import FormatChoice
from engine.text.renderer import ChatRenderer

if TYPE_CHECKING:
    # A worker needs no settings, and their import would take it 0.1 s.
    from engine.settings import Settings


def chat_worker(settings: "Settings") -> WorkerSpec:
    """What a worker needs to know to load the model's renderer."""
    return WorkerSpec(
        kind="chat",
        model=settings.model,
        tool_format=settings.tool_format,
        reasoning_format=settings.reasoning_format,
    )


def chat_renderer(spec: WorkerSpec) -> ChatRenderer:
    """The renderer of a model. Raises TemplateRefused."""
    files = read_prompt_files(spec.model)
    if spec.template is not None:
        files = replace(files, templates={"default": spec.template})
    ends = frozenset(TokenId(token) for token in spec.end_token_ids)
    files = replace(files, end_token_ids=files.end_token_ids | ends)
    formats = FormatChoice(tools=spec.tool_format, reasoning=spec.reasoning_format)
    return ChatRenderer(files, formats=formats, image_text=spec.image_text)


def capabilities_of(renderer: ChatRenderer, more: dict[Capability, bool]) -> list[Capability]:
    """The capabilities that a renderer has, and those of `more` that are true.

    Calls and thinking can be parsed only if the template's formats are known.
    """
    has_tools = renderer.tool_format is not None
    declared: dict[Capability, bool] = {
        "tools": has_tools,
        "forced_tools": has_tools and renderer.can_constrain,
        "structured_output": renderer.can_constrain,
        "thinking": renderer.reasoning_format is not None,
        **more,
    }
    return [capability for capability, is_there in declared.items() if is_there]
