"""Random conversations that grow, are edited, cut and forked, and where markers go in them."""

import random
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from engine.protocol import (
    Document,
    Message,
    Part,
    Prompt,
    TextPart,
    ThinkingPart,
    Tool,
    ToolResultPart,
    ToolUsePart,
    Ttl,
)
from tests.conformance.oracle import B

Kind = Literal["text", "thinking", "tool_use", "tool_result"]

# One token each for the demo model's tokenizer and, with the space, for the synthetic engine's.
_WORDS = (
    "add all and any are ask bit but can car day did dig end eye fin for get had has hex hit hot"
    " how its job key let log low man map may min mix new non nor not now off old one our out own"
).split()


SHORTEST = 5
KEEP = 0.5


@dataclass
class Piece:
    """`call` is the id that a tool's use and its result share."""

    kind: Kind
    text: str
    call: str = ""


class Marks(NamedTuple):
    """Explicit markers by segment, and the automatic one."""

    explicit: dict[int, Ttl]
    automatic: Ttl | None = None


@dataclass
class Talk:
    """`name` is in all its words: no prefix of it is one of another talk, unless it is a fork.

    New blocks have SHORTEST to `longest` tokens, short ones more often, and their scaffold. Behind
    that come `padding` words: where entries sit at multiples of so many tokens, what tells two
    blocks apart must not be in what is cut off.
    """

    rng: random.Random
    name: str
    longest: int
    has_tools: bool = True
    serial: int = 0
    tools: list[str] = field(default_factory=list)
    system: list[str] = field(default_factory=list)
    turns: list[list[Piece]] = field(default_factory=list)
    padding: int = 0

    def begin(self) -> None:
        if self.has_tools:
            self.tools = [self._words() for _ in range(self.rng.choice([0, 0, 0, 1, 1, 2, 3, 22]))]
        self.system = [self._words() for _ in range(self.rng.randint(0, 3))]
        self.turns = [[Piece("text", self._words())]]

    def fork(self, name: str) -> "Talk":
        """The same so far; what it says from now on is its own."""
        return Talk(
            self.rng,
            name,
            self.longest,
            self.has_tools,
            0,
            list(self.tools),
            list(self.system),
            deepcopy(self.turns),
            self.padding,
        )

    def grow(self) -> None:
        """An answer, perhaps with calls, and what the user says to it."""
        answer = [Piece("thinking", self._words())] if self.rng.random() < 0.2 else []
        reply: list[Piece] = []
        if self.has_tools and self.rng.random() < 0.5:
            calls = self.rng.choice([1, 1, 1, 2, 2, 12])
            ids = [f"call_{len(self.turns)}_{i}" for i in range(calls)]
            answer += [Piece("tool_use", self._words(12), call) for call in ids]
            reply += [Piece("tool_result", self._words(), call) for call in ids]
        else:
            answer += [Piece("text", self._words()) for _ in range(self.rng.randint(1, 3))]
        texts = self.rng.choice([1, 1, 1, 1, 1, 2, 2, 17, 18, 19])
        reply += [Piece("text", self._words()) for _ in range(texts)]
        self.turns += [answer, reply]

    def edit(self) -> None:
        """Another block in the place of one."""
        lists: list[list[str]] = [texts for texts in (self.tools, self.system) if texts]
        if lists and self.rng.random() < 0.4:
            texts = self.rng.choice(lists)
            texts[self.rng.randrange(len(texts))] = self._words()
        else:
            piece = self.rng.choice(self.rng.choice(self.turns))
            piece.text = self._words(12 if piece.kind == "tool_use" else None)

    def cut(self) -> None:
        """Back by one turn."""
        if len(self.turns) > 2:
            del self.turns[-2:]

    @property
    def kinds(self) -> list[Kind]:
        head: list[Kind] = ["text"] * (len(self.tools) + len(self.system))
        return head + [piece.kind for turn in self.turns for piece in turn]

    @property
    def texts(self) -> dict[int, str]:
        """The messages' texts and results of tools, by segment."""
        begin = len(self.tools) + len(self.system)
        pieces = enumerate((piece for turn in self.turns for piece in turn), begin)
        return {at: piece.text for at, piece in pieces if piece.kind in ("text", "tool_result")}

    def _words(self, longest: int | None = None) -> str:
        """The serial number takes two tokens or three; never the same words twice."""
        self.serial += 1
        limit = (longest or self.longest) / SHORTEST
        size = int(SHORTEST * limit ** (self.rng.random() ** 1.5))
        return f"{self.name}:{self.serial}" + "".join(
            f" {word}" for word in self.rng.choices(_WORDS, k=max(size - 5, 1) + self.padding)
        )

    # The same prompt for an engine, for a gateway and for the reference model.

    def prompt(self) -> Prompt:
        return Prompt(
            messages=[
                Message(
                    "assistant" if turn % 2 else "user",
                    [_part(piece) for piece in pieces],
                )
                for turn, pieces in enumerate(self.turns)
            ],
            system=[TextPart(text) for text in self.system],
            tools=[Tool(f"t{i}", _schema(text)) for i, text in enumerate(self.tools)],
        )

    def body(
        self, marks: Marks, keep: int | None = None, document: Document | None = None
    ) -> dict[str, Any]:
        """Of `POST /v1/messages`. Of the prefix to segment `keep` a part is kept."""
        tools: list[dict[str, Any]] = [
            {"name": f"t{i}", "input_schema": _schema(text)} for i, text in enumerate(self.tools)
        ]
        system: list[dict[str, Any]] = [{"type": "text", "text": text} for text in self.system]
        turns = [[_block(piece) for piece in pieces] for pieces in self.turns]
        blocks = tools + system + [block for turn in turns for block in turn]
        for index, ttl in marks.explicit.items():
            blocks[index]["cache_control"] = {"type": "ephemeral", "ttl": ttl}
        if keep is not None:
            blocks[keep]["cache_control"]["holdfast"] = {"keep": KEEP, "scorer": "keydiff"}
        if document is not None:
            wish = {"block": "anywhere", "recompute": document.recompute}
            marker = {"type": "ephemeral", "ttl": document.ttl, "holdfast": wish}
            blocks[document.segment]["cache_control"] = marker
        body: dict[str, Any] = {
            "messages": [
                {"role": "assistant" if turn % 2 else "user", "content": content}
                for turn, content in enumerate(turns)
            ]
        }
        if tools:
            body["tools"] = tools
        if system:
            body["system"] = system
        if marks.automatic is not None:
            body["cache_control"] = {"type": "ephemeral", "ttl": marks.automatic}
        return body

    def blocks(self, ends: list[int], marks: Marks, document: Document | None = None) -> list[B]:
        """`ends`: the token offset of each segment's end, as the engine counts. A document is
        another block than the same text."""
        keys = [("tools", "text", text, 0) for text in self.tools]
        keys += [("system", "text", text, 0) for text in self.system]
        keys += [
            ("messages", piece.kind, piece.text, turn)
            for turn, pieces in enumerate(self.turns)
            for piece in pieces
        ]
        before = 0
        blocks = []
        for index, (section, kind, text, turn) in enumerate(keys):
            size = ends[index] - before
            if document is not None and index == document.segment:
                text += f" anywhere {document.recompute}"
            blocks.append(B(section, text, size, marks.explicit.get(index), kind, turn))
            before = ends[index]
        return blocks


def choose_marks(rng: random.Random, talk: Talk, ttls: tuple[Ttl, ...] = ("1h", "5m")) -> Marks:
    """Up to four, the automatic one included, mostly near the end, as clients do.

    The one-hour ones first, none on thinking. Of one TTL where `ttls` has one only.
    """
    places = [index for index, kind in enumerate(talk.kinds) if kind != "thinking"]
    num_marks = rng.choice([0, 1, 1, 1, 2, 2, 3, 4])
    is_automatic = num_marks > 0 and rng.random() < 0.4
    last = [places[-1]] if num_marks and not is_automatic and rng.random() < 0.7 else []
    others = rng.sample(places, min(max(num_marks - 1, 0), len(places)))
    chosen = sorted({*last, *others})[-4:]
    if is_automatic:
        chosen = [place for place in chosen if place != places[-1]][-3:]
    num_hours = rng.randint(0, len(chosen)) if len(ttls) > 1 else len(chosen) * (ttls[0] == "1h")
    explicit: dict[int, Ttl] = {
        place: "1h" if i < num_hours else "5m" for i, place in enumerate(chosen)
    }
    if not is_automatic:
        return Marks(explicit)
    short = [*ttls] if num_hours == len(chosen) else ["5m"]
    return Marks(explicit, rng.choice(short))


def break_marks(rng: random.Random, talk: Talk) -> Marks:
    """Against a rule of the contract: five, or a long TTL behind a short one."""
    places = [index for index, kind in enumerate(talk.kinds) if kind != "thinking"]
    if len(places) >= 5 and rng.random() < 0.5:
        return Marks(dict.fromkeys(sorted(rng.sample(places, 5)), "5m"))
    if len(places) >= 2 and rng.random() < 0.5:
        first, second = sorted(rng.sample(places, 2))
        return Marks({first: "5m", second: "1h"})
    return Marks({places[-1]: "5m"}, "1h")


def resolved(talk: Talk, marks: Marks) -> dict[int, Ttl]:
    """Markers as an engine gets them, the automatic one in its place."""
    if marks.automatic is None:
        return marks.explicit
    kinds = talk.kinds
    last = max(index for index, kind in enumerate(kinds) if kind != "thinking")
    return {**marks.explicit, last: marks.automatic}


def _schema(text: str) -> dict[str, Any]:
    return {"type": "object", "title": text}


def _part(piece: Piece) -> Part:
    match piece.kind:
        case "text":
            return TextPart(piece.text)
        case "thinking":
            return ThinkingPart(piece.text)
        case "tool_use":
            return ToolUsePart(piece.call, "t0", {"q": piece.text})
        case "tool_result":
            return ToolResultPart(piece.call, piece.text)


def _block(piece: Piece) -> dict[str, Any]:
    match piece.kind:
        case "text":
            return {"type": "text", "text": piece.text}
        case "thinking":
            return {"type": "thinking", "thinking": piece.text, "signature": "s"}
        case "tool_use":
            return {"type": "tool_use", "id": piece.call, "name": "t0", "input": {"q": piece.text}}
        case "tool_result":
            return {"type": "tool_result", "tool_use_id": piece.call, "content": piece.text}
