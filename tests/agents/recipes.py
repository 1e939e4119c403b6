"""What `recipes.toml` says of each client: how it is installed, pointed at a gateway, and started.

In every text of a recipe `$url` is the gateway, `$key` its key, `$port` a free port, `$home` and
`$work` folders of this run, `$agents` the folder of the installed clients, `$programs` that of our
short programs, and `$prompt` what the user says. In `$work` are `rules.md` and `picture.png`.
"""

import json
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from string import Template
from typing import Any

LAST_TEXT = "All is done."
MODEL = "scripted"


@dataclass(frozen=True, slots=True)
class Recipe:
    """One client in one mode.

    `tool` is the tool of the client that the script calls with `given`, in which `$step` is the
    turn; a client without tools has an empty name there and gets `typed`, a prompt each line.
    `last` is what the engine writes when a run ends. `before` is a command that sets the client up,
    `resumed` are later runs that carry the conversation on, and `after` is a command that ends what
    the client left running. `package` is read for the version, in `place` under the folder of the
    clients: a folder with `node_modules`, or a virtual environment.
    With `mishaps` the script has two calls at once, one that is cut at the limit of tokens, one of
    no known tool, one (`failing`) that fails, and one (`picture_tool` with `picture`) whose result
    is an image. Then the gateway is started anew and the first of `resumed` carries on, as often as
    it takes. `compact` is a command that has the conversation compacted, in `compact_turns` turns
    that offer tools; a client that does it unasked, or begins anew, has `shrinks` alone. A client
    whose tools are `strict` holds the model to them: it can call no unknown one.
    `may_miss` are paths outside of the API that the client asks for and does well without. Less
    than the share `least_read` of turns 2 to n is a failure.
    """

    name: str
    package: str
    command: tuple[str, ...]
    tool: str = ""
    given: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    place: str = "."
    before: tuple[str, ...] = ()
    resumed: tuple[tuple[str, ...], ...] = ()
    after: tuple[str, ...] = ()
    last: str = LAST_TEXT
    typed: str = ""
    may_miss: frozenset[str] = frozenset()
    least_read: float = 0.0
    sees: bool = False
    mishaps: bool = False
    failing: Mapping[str, Any] = field(default_factory=dict)
    picture_tool: str = ""
    picture: Mapping[str, Any] = field(default_factory=dict)
    compact: tuple[str, ...] = ()
    compact_turns: int = 0
    shrinks: bool = False
    strict: bool = False

    def version(self, folder: Path) -> str | None:
        """The installed version, or None where it is not installed."""
        room = folder / self.place
        manifest = room / "node_modules" / self.package / "package.json"
        if manifest.exists():
            return str(json.loads(manifest.read_text())["version"])
        interpreter = room / "bin" / "python"
        if not interpreter.exists():
            return None
        program = f"from importlib.metadata import version; print(version({self.package!r}))"
        process = subprocess.run([interpreter, "-c", program], capture_output=True, text=True)
        return process.stdout.strip() or None


def call(name: str, arguments: Mapping[str, Any]) -> str:
    """A call exactly as the demo model's template has it: strict tools hold the engine to that."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def recipes() -> Iterator[Recipe]:
    """All of `recipes.toml`, in its order."""
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    names = {item.name for item in fields(Recipe)}
    for table in tables["recipe"]:
        common = {**tables["like"].get(table.get("like"), {}), **table}
        for mode, of_mode in common.get("modes", {"": {}}).items():
            values = {"place": ".", "word": mode, "model": MODEL, **common, **of_mode, "mode": mode}
            values["environment"] = {
                **common.get("environment", {}),
                **of_mode.get("environment", {}),
            }
            values["name"] = f"{table['name']}, {mode}" if mode else table["name"]
            texts = {name: text for name, text in values.items() if isinstance(text, str)}
            filled = {
                name: _filled(value, texts) for name, value in values.items() if name in names
            }
            for name in {"command", "before", "after", "compact"} & filled.keys():
                filled[name] = _words(filled[name])
            filled["resumed"] = tuple(_words(item) for item in filled.get("resumed", ()))
            yield Recipe(**{**filled, "may_miss": frozenset(filled.get("may_miss", ()))})


def _filled(value: Any, texts: Mapping[str, str]) -> Any:
    """With the variables of the recipe in their places. One may name another."""
    match value:
        case str():
            once = Template(value).safe_substitute(texts)
            return Template(once).safe_substitute(texts)
        case list():
            return [_filled(item, texts) for item in value]
        case dict():
            return {_filled(k, texts): _filled(item, texts) for k, item in value.items()}
        case _:
            return value


def _words(command: str | list[str]) -> tuple[str, ...]:
    return tuple(command.split() if isinstance(command, str) else command)
