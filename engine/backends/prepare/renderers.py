"""A model's renderer as a `WorkerSpec` describes it: the same in the engine and in its workers."""

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime

from engine.backends.prepare.prepared import WorkerSpec
from engine.cache.ids import TokenId
from engine.text.files import read_prompt_files
from engine.text.formats.proof import FormatChoice
from engine.text.renderer import ChatRenderer


def chat_renderer(spec: WorkerSpec) -> ChatRenderer:
    """Raises TemplateRefused."""
    files = read_prompt_files(spec.model)
    if spec.template is not None:
        files = replace(files, templates={"default": spec.template})
    ends = frozenset(TokenId(token) for token in spec.end_token_ids)
    files = replace(files, end_token_ids=files.end_token_ids | ends)
    formats = FormatChoice(tools=spec.tool_format, reasoning=spec.reasoning_format)
    return ChatRenderer(files, formats=formats, now=clock_of(spec.template_date))


def clock_of(template_date: str) -> Callable[[], datetime]:
    """The time that templates write: a fixed day's beginning, else the clock's."""
    if template_date in ("session", "today"):
        return datetime.now
    moment = datetime.fromisoformat(template_date)
    return lambda: moment
