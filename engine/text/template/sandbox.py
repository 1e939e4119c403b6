"""The sandbox in which chat templates run: that of transformers, with short ways where it is slow.

The short ways return what the sandbox returns: a dictionary's entry, a namespace's or a loop's
plain value, a method of a text. Chat templates hardly do anything else.
"""

from collections.abc import Callable
from types import BuiltinMethodType
from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_MISSING = object()
_DICT_ATTRIBUTES = frozenset(dir(dict))
_READING_METHODS = frozenset(("get", "items", "keys", "values"))
_TEXT_METHODS = frozenset(
    name for name in dir(str) if not name.startswith("_") and name not in ("format", "format_map")
)
_PLAIN = frozenset((str, int, bool, float, type(None), dict, list))
_GROWING = ("append", "extend", "insert", "pop")


class GivenList(list[Any]):
    """A list that belongs to a message which several renders get."""


class Sandbox(ImmutableSandboxedEnvironment):
    """transformers' sandbox, but for lists that grow: Kimi K2's and DeepSeek V3.2's templates keep
    queues. Dictionaries stay as they are.

    `changes_given` is set when a template comes near to changing a message's own list.
    """

    changes_given = False

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, list) and attr in _GROWING:
            self.changes_given = self.changes_given or isinstance(obj, GivenList)
            return True
        return super().is_safe_attribute(obj, attr, value)

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict:
            if attribute not in _DICT_ATTRIBUTES:
                found = obj.get(attribute, _MISSING)
                return self.undefined(obj=obj, name=attribute) if found is _MISSING else found
            if attribute in _READING_METHODS:
                return getattr(obj, attribute)
        elif kind is str:
            if attribute in _TEXT_METHODS:
                return getattr(obj, attribute)
        elif (kind is Namespace or kind is LoopContext) and not attribute.startswith("_"):
            found = getattr(obj, attribute, _MISSING)
            if type(found) in _PLAIN:
                return found
        return super().getattr(obj, attribute)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(function, BuiltinMethodType) and type(function.__self__) in (str, dict):
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            return function(*args, **kwargs)
        return super().call(context, function, *args, **kwargs)


def new_sandbox(filters: dict[str, Callable[..., Any]], names: dict[str, Any]) -> Sandbox:
    """With these filters and global names beside Jinja's own."""
    sandbox = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"],
    )
    sandbox.filters.update(filters)
    sandbox.globals.update(names)
    return sandbox


class _GenerationBlock(Extension):
    """`{% generation %}`: marks what the assistant says, for training; rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
