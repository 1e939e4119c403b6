"""What somebody pastes: a JSON body of any dialect, or a curl command. Pure."""

import json
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from dashboard.playground.shell import words

Dialect = Literal["messages", "chat", "completions", "responses", "gemini"]
NAMES: dict[Dialect, str] = {
    "messages": "Anthropic Messages",
    "chat": "OpenAI Chat Completions",
    "completions": "OpenAI Completions",
    "responses": "OpenAI Responses",
    "gemini": "Google generateContent",
}
_PATHS: dict[Dialect, str] = {
    "messages": "/v1/messages",
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
}
MAX_CHARACTERS = 1_000_000
_DATA = ("-d", "--data", "--data-raw", "--data-binary", "--data-ascii", "--json")


class Unreadable(ValueError):
    """The pasted text is no request; the message says why, without quoting it."""


@dataclass(frozen=True, slots=True)
class Pasted:
    dialect: Dialect
    body: dict[str, Any]

    def path(self, model: str) -> str:
        """Where it is sent. Google's dialect has the model in the path."""
        if self.dialect == "gemini":
            return f"/v1beta/models/{model}:generateContent"
        return _PATHS[self.dialect]

    def to_send(self, model: str) -> dict[str, Any]:
        """The body for one answer in one piece, with a model that is served here."""
        body = {name: value for name, value in self.body.items() if name != "stream"}
        if self.dialect == "gemini":
            return body
        return {**body, "model": model}


def read(text: str, dialect: Dialect | None = None) -> Pasted:
    """Raise Unreadable. `dialect` None is told from the URL, or from the body's fields."""
    if len(text) > MAX_CHARACTERS:
        raise Unreadable(f"It has more than {MAX_CHARACTERS:,} characters.")
    stripped = text.strip()
    url = ""
    if stripped.startswith("curl"):
        stripped, url = _of_curl(stripped)
    try:
        body = json.loads(stripped)
    except (ValueError, RecursionError):
        raise Unreadable("It is neither a JSON object nor a curl command with one.") from None
    if not isinstance(body, dict):
        raise Unreadable("The JSON is no object.")
    return Pasted(dialect or _by_url(url) or _by_fields(body), body)


def _of_curl(text: str) -> tuple[str, str]:
    """The data and the URL of a command."""
    try:
        typed = list(words(text.replace("\\\n", " ").replace("\\\r\n", " ")))
    except ValueError:
        raise Unreadable("The curl command's quotes do not match.") from None
    data, url = "", ""
    for word, following in zip(typed, [*typed[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if word in _DATA:
            data = following
        elif name in _DATA and equals:
            data = value
        elif word.startswith(("http://", "https://")):
            url = word
    if data.startswith("@"):
        raise Unreadable("The command reads its body from a file: paste the file's content.")
    return data, url


def _by_url(url: str) -> Dialect | None:
    try:
        path = urlsplit(url).path
    except ValueError:  # a host in brackets that do not match
        return None
    for dialect, own in _PATHS.items():
        if path.endswith(own.removeprefix("/v1")):
            return dialect
    return "gemini" if "generateContent" in path else None


def _by_fields(body: dict[str, Any]) -> Dialect:
    if "contents" in body:
        return "gemini"
    if "input" in body:
        return "responses"
    if "prompt" in body:
        return "completions"
    told = (message.get("role") for message in _objects(body.get("messages")))
    roles = {role for role in told if isinstance(role, str)}
    is_chat = roles & {"system", "developer", "tool"} or "max_completion_tokens" in body
    has_functions = any(tool.get("type") == "function" for tool in _objects(body.get("tools")))
    return "chat" if is_chat or has_functions else "messages"


def _objects(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def text_of(dialect: Dialect, answer: dict[str, Any]) -> str:
    """The text of a whole answer; empty where it has none."""
    match dialect:
        case "messages":
            return "".join(_texts(answer.get("content")))
        case "chat":
            choices = answer.get("choices") or [{}]
            return str((choices[0].get("message") or {}).get("content") or "")
        case "completions":
            return str((answer.get("choices") or [{}])[0].get("text") or "")
        case "responses":
            items = [item for item in answer.get("output") or [] if item.get("type") == "message"]
            return "".join(text for item in items for text in _texts(item.get("content")))
        case "gemini":
            found = (answer.get("candidates") or [{}])[0].get("content") or {}
            return "".join(str(part.get("text") or "") for part in found.get("parts") or [])


def _texts(content: Any) -> list[str]:
    if not isinstance(content, list):
        return []
    return [str(each["text"]) for each in content if isinstance(each, dict) and "text" in each]


def carried_on(pasted: Pasted, answer: str, question: str) -> dict[str, Any]:
    """The body with the answer and the next question behind it. Raise Unreadable for others."""
    body = dict(pasted.body)
    if pasted.dialect in ("messages", "chat"):
        turns = [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
        body["messages"] = [*body.get("messages", []), *turns]
    elif pasted.dialect == "responses":
        said = body.get("input", [])
        items = [{"role": "user", "content": said}] if isinstance(said, str) else list(said)
        body["input"] = [
            *items,
            {"role": "assistant", "content": answer},
            {"role": "user", "content": question},
        ]
    elif pasted.dialect == "gemini":
        body["contents"] = [
            *body.get("contents", []),
            {"role": "model", "parts": [{"text": answer}]},
            {"role": "user", "parts": [{"text": question}]},
        ]
    else:
        raise Unreadable("This API has no conversations.")
    return body
