"""The servers: vLLM by its completions, llama.cpp by its own API, others by chat completions.

OpenAI's API tells with the last event of a stream how much of a prompt was reused, if at all. The
first frame of an answer needs that number. So a request for one token computes the prompt first.
The generation behind it finds the prompt in the cache.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import msgspec

from engine.backends.external import Order, vllm_sampling
from engine.backends.upstream.chat import ChatDelta, conversation
from engine.backends.upstream.server import (
    ANYWHERE,
    Facts,
    Kind,
    ModelFacts,
    Place,
    UpstreamAborted,
    UpstreamBusy,
    UpstreamDenied,
    UpstreamError,
    UpstreamGone,
    UpstreamRefused,
    Wire,
    decoded,
)
from engine.cache.ids import TokenId
from engine.protocol import NATIVE_AND_VLLM, FinishReason

MODELS = "/v1/models"
FAILURES: dict[str, type[UpstreamError]] = {"abort": UpstreamAborted, "error": UpstreamError}
"""Reasons with which an answer is not whole.

- `abort`: vLLM (`vllm.v1.engine.FINISH_REASON_STRINGS`) and SGLang, when they are paused.
- `error`: a router before several servers, such as OpenRouter.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The part of an answer since the last piece."""

    token_ids: Sequence[TokenId] = ()
    # None: not told with this piece.
    cached_tokens: int | None = None
    prompt_tokens: int | None = None
    # Of a server of conversations.
    delta: ChatDelta | None = None
    # Why the server ended the choice, in its own words.
    finish_reason: str | None = None
    # The reason in our words, where our parser sees no end.
    finish: FinishReason | None = None
    # How many the whole answer had.
    sampled_tokens: int | None = None
    # Nothing comes behind it.
    is_last: bool = False

    @property
    def is_answer(self) -> bool:
        """The prompt is computed. A model may end its turn with nothing said."""
        return bool(self.token_ids or self.delta or self.finish_reason or self.is_last)


def failure_by(reason: str) -> UpstreamError:
    """The error that a reason in FAILURES is."""
    return FAILURES[reason](f"the server ended the answer by {reason!r}")


def check_counts(order: Order, counted: int, cached: int | None) -> None:
    """Raise UpstreamError unless the server computed the prompt that we sent."""
    sent = len(order.token_ids)
    if counted != sent:
        raise UpstreamError(f"the server counted {counted} tokens of a prompt of {sent}")
    if cached is not None and not 0 <= cached <= sent:
        raise UpstreamError(f"the server says that it reused {cached} of {sent} tokens")


class Server:
    """One model server, by the API of its kind. All methods are called on one event loop.

    Each raises UpstreamError, or UpstreamGone where the server can't be reached.
    """

    PATH: ClassVar[str]
    EVENT: ClassVar[type[Any]]
    ALIVE: ClassVar[str] = "/health"
    ENDS: ClassVar[Mapping[str, FinishReason]] = {}
    # Notes for people: where the server tells what it reused; what it needs where it does not;
    # whether it keeps scopes apart, where nothing shows that.
    TOLD_BY: ClassVar[str] = "usage.prompt_tokens_details.cached_tokens"
    NOT_TOLD: ClassVar[str] = "its usage has no prompt_tokens_details.cached_tokens"
    UNPROVEN: ClassVar[str] = "the server knows no scopes"
    TAKES_IMAGES: ClassVar[bool] = False
    MAX_TOKEN_EVENT_BYTES: ClassVar[int] = 0

    def __init__(self, wire: Wire, files: ModelFacts, model: str, block_size: int) -> None:
        """`model`: the server's name of it, or empty for its only one.

        `block_size`: the tokens of a block in our books. Not every server has blocks.
        """
        self._wire = wire
        self._files = files
        self._model = model
        self._block_size = block_size
        self.close = wire.close

    async def find_facts(self) -> Facts:
        """Look at the server once. Raises UpstreamRefused where it can't be used."""
        raise NotImplementedError

    async def fingerprint(self) -> str:
        """Raises UpstreamGone where it does not answer with 200."""
        status, _ = await self._wire.look(self.ALIVE)
        if status != 200:
            raise UpstreamGone(f"{self.ALIVE}: status {status}")
        return ""

    async def prefill(self, order: Order, place: Place = ANYWHERE) -> Piece:
        """Compute the prompt alone, for servers that tell only at the end what they reused."""
        raise NotImplementedError

    async def count(self, order: Order) -> int:
        """How many tokens the server counts of a prompt. Raises UpstreamRejected."""
        raise NotImplementedError

    async def generate(self, order: Order, place: Place = ANYWHERE) -> AsyncGenerator[Piece, None]:
        """Run a choice to its end; closing the iterator ends it at the server too."""
        size = 0
        reason = None
        path = self._path(order)
        async for data in self._wire.events(path, await self._sent(order, place)):
            if data == b"[DONE]":
                break
            event = decoded(data, self.EVENT, path)
            if event.error is not None:
                raise UpstreamError("the server ended the stream with an error")
            piece = self._piece(event, order, place)
            if piece is None:
                continue
            # A server that tells no tokens may send so many bytes.
            is_text = self.MAX_TOKEN_EVENT_BYTES > 0
            most = order.max_tokens
            size += len(data) if is_text else len(piece.token_ids)
            if size > ((most + 16) * self.MAX_TOKEN_EVENT_BYTES if is_text else most):
                raise UpstreamError("more than was asked for")
            if piece.finish_reason is not None:
                reason = piece.finish_reason
            # What comes behind it has the counts.
            yield replace(piece, finish_reason=None) if reason in FAILURES else piece
        if reason is None:
            raise UpstreamGone("the stream ended without a reason")
        if reason in FAILURES:
            raise failure_by(reason)
        yield Piece(is_last=True, finish=self.ENDS.get(reason))

    def _path(self, order: Order) -> str:
        return self.PATH

    async def _sent(self, order: Order, place: Place) -> dict[str, Any]:
        # Images have megabytes.
        if order.image_prompt is None:
            return self._body(order, place)
        return await asyncio.to_thread(self._body, order, place)

    def _body(self, order: Order, place: Place) -> dict[str, Any]:
        raise NotImplementedError

    def _piece(self, event: Any, order: Order, place: Place) -> Piece | None:
        raise NotImplementedError


_LABEL = re.compile(r'\b(\w+)="([^"]*)"')
_START = re.compile(rb"^process_start_time_seconds ([0-9.e+]+)", re.M)
_CACHE = re.compile(rb"^vllm:cache_config_info\{([^}]*)\}", re.M)


class ServedModel(msgspec.Struct):
    """A model, as a server lists it."""

    id: str
    # The context in tokens: vLLM's, and some others'.
    max_model_len: int | None = None
    owned_by: str = ""
    # What the server loaded, where `id` is a name that it was started with. vLLM and some others
    # have it.
    root: str | None = None

    @property
    def what(self) -> str:
        """What is served, for comparing."""
        return last_part(self.root or self.id)


def last_part(name: str) -> str:
    """A path's file or folder, since paths differ between machines. Any other name as it is."""
    is_path = name.startswith(("/", "~", ".")) or "\\" in name
    parts = [part for part in re.split(r"[/\\]", name) if part] if is_path else []
    return (parts[-1] if parts else name)[-256:]


class ServedModels(msgspec.Struct):
    data: list[ServedModel] = []


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct):
    """A piece of one choice."""

    # vLLM's.
    token_ids: list[int] | None = None
    # Of chat completions.
    delta: ChatDelta | None = None
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    """A whole answer, or one event of a stream."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Tokenized(msgspec.Struct):
    tokens: list[int]


class ChatServer(Server):
    """A server of chat completions: it renders and parses by itself, and tells no more than its
    usage. It knows no scopes."""

    PATH = "/v1/chat/completions"
    EVENT = _Answer
    ALIVE = MODELS
    # An event of one token has a few hundred bytes; servers that send several at a time have more.
    MAX_TOKEN_EVENT_BYTES = 4096
    PREFILLS_SEEDED: ClassVar[bool] = False
    READS_TOKENS: ClassVar[bool] = False
    TAKES_IMAGES = True

    async def find_facts(self) -> Facts:
        model = await self._find_model()
        return Facts(
            kind="openai",
            model=model.what,
            fingerprint=model.what,
            max_context_tokens=self._files.context(model.max_model_len),
            max_running=64,
            tells="at_the_end",
            isolation="none",
            isolation_note=self.UNPROVEN,
            forced_note="its formats are not ours",
        )

    async def fingerprint(self) -> str:
        """The server's model. A server that was started anew with another model may look the same
        otherwise."""
        await super().fingerprint()
        models = (await self._wire.ask(MODELS, ServedModels)).data
        return next((model.what for model in models if model.id == self._model), "")

    async def prefill(self, order: Order, place: Place = ANYWHERE) -> Piece:
        body = await self._sent(order, place) | {"max_tokens": 1, "stream": False, "seed": None}
        body |= {"stream_options": None, "structured_outputs": None, "min_tokens": None}
        body = {name: value for name, value in body.items() if value is not None}
        answer = await self._wire.ask(self._path(order), _Answer, body, is_long=True)
        for choice in answer.choices:
            if choice.finish_reason in FAILURES:
                raise failure_by(choice.finish_reason)
        return self._usage(answer.usage, order)

    async def count(self, order: Order) -> int:
        """Counts by a request for one token, since no other call tells."""
        counted = (await ChatServer.prefill(self, order)).prompt_tokens
        if counted is None:
            raise UpstreamError("an answer without usage")
        return counted

    async def generate(self, order: Order, place: Place = ANYWHERE) -> AsyncGenerator[Piece, None]:
        if order.is_seeded and self.PREFILLS_SEEDED:
            await self.prefill(order)
        async with aclosing(super().generate(order, place)) as pieces:
            async for piece in pieces:
                yield piece

    async def _find_model(self) -> ServedModel:
        """The server's model of this name, or its only one where the name is empty.

        Raises UpstreamRefused where it has none or several.
        """
        models = (await self._wire.ask(MODELS, ServedModels)).data
        matches = [model for model in models if self._model in ("", model.id)]
        if len(matches) != 1:
            names = ", ".join(model.id for model in models[:8])
            raise UpstreamRefused(f"ENGINE_UPSTREAM_MODEL must name one of the server's: {names}")
        self._model = matches[0].id
        return matches[0]

    def _body(self, order: Order, place: Place) -> dict[str, Any]:
        sample = order.sample
        body: dict[str, Any] = {
            "model": self._model,
            **conversation(order),
            "max_tokens": order.max_tokens,
            "temperature": sample.temperature,
            "top_p": sample.top_p,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if order.request.tool_choice.mode == "none":
            body.pop("tools", None)
        return body | ({"seed": sample.seed % 2**31} if order.is_seeded else {})

    def _piece(self, event: Any, order: Order, place: Place) -> Piece | None:
        answer: _Answer = event
        if len(answer.choices) > 1:
            raise UpstreamError("more choices than were asked for")
        usage = self._usage(answer.usage, order)
        if not answer.choices:
            return usage
        (choice,) = answer.choices
        tokens = choice.token_ids if self.READS_TOKENS else None
        return Piece(
            token_ids=self._files.check_tokens(tokens or []),
            delta=None if self.READS_TOKENS else choice.delta,
            finish_reason=choice.finish_reason,
            sampled_tokens=usage.sampled_tokens,
        )

    def _usage(self, usage: _Usage | None, order: Order) -> Piece:
        """How many of our tokens were reused. 0 where the server counts the prompt's tokens in
        another way."""
        if usage is None:
            return Piece()
        details = usage.prompt_tokens_details
        sampled = usage.completion_tokens
        cached = None if details is None else details.cached_tokens
        if self._is_ours(usage, order):
            check_counts(order, usage.prompt_tokens, cached)
        elif cached is not None:
            cached = 0
        if sampled is not None and not 0 <= sampled <= order.max_tokens:
            raise UpstreamError(f"the server counted {sampled} tokens of its answer")
        return Piece(
            cached_tokens=cached, prompt_tokens=usage.prompt_tokens, sampled_tokens=sampled
        )

    def _is_ours(self, usage: _Usage, order: Order) -> bool:
        """Whether the server must have computed just our tokens."""
        return usage.prompt_tokens == len(order.token_ids)


class VllmServer(ChatServer):
    """An unmodified `vllm serve`: token ids to `/v1/completions`, token ids back.

    It tells what it reused only with `--enable-prompt-tokens-details`.
    """

    PATH = "/v1/completions"
    ALIVE = "/health"
    NOT_TOLD = "start the server with --enable-prompt-tokens-details"
    UNPROVEN = "cache_salt is sent, and nothing shows whether the server heeds it"
    # vLLM's CPU build ends when a prompt with a seed is computed in several steps.
    PREFILLS_SEEDED = True
    READS_TOKENS = True
    MAX_TOKEN_EVENT_BYTES = 0

    async def find_facts(self) -> Facts:
        model = await self._find_model()
        status, answer = await self._wire.look("/version")
        version = decoded(answer, dict[str, Any], "/version") if status == 200 else {}
        for text, ours in self._files.probes.items():
            body = {"model": self._model, "prompt": text, "add_special_tokens": False}
            if (await self._wire.ask("/tokenize", _Tokenized, body)).tokens != ours:
                raise UpstreamRefused(
                    "the server has another tokenizer than ENGINE_MODEL; name the same model"
                )
        labels, started = await self._metrics()
        return Facts(
            kind="vllm",
            model=model.what,
            version=str(version.get("version", ""))[:64],
            max_context_tokens=self._files.context(model.max_model_len),
            # vLLM does not tell its `--max-num-seqs`. Requests that it has no room for wait there.
            max_running=256,
            tells="at_the_end",
            isolation="salt",
            block_size=_number(labels.get("block_size")),
            num_blocks=_number(labels.get("num_gpu_blocks")),
            fingerprint=f"{model.what} {started}",
            capabilities=frozenset({"multiple_choices", *NATIVE_AND_VLLM}),
        )

    async def fingerprint(self) -> str:
        model = await super().fingerprint()
        return f"{model} {(await self._metrics())[1]}"

    async def count(self, order: Order) -> int:
        body = {"model": self._model, **await asyncio.to_thread(conversation, order)}
        return len((await self._wire.ask("/tokenize", _Tokenized, body, is_long=True)).tokens)

    async def prefill(self, order: Order, place: Place = ANYWHERE) -> Piece:
        piece = await super().prefill(order, place)
        if piece.prompt_tokens is None:
            raise UpstreamError("an answer without usage")
        return piece

    def _path(self, order: Order) -> str:
        """No images come with token ids, so the server renders a prompt that has some."""
        return self.PATH if order.image_prompt is None else ChatServer.PATH

    def _body(self, order: Order, place: Place) -> dict[str, Any]:
        prompt: dict[str, Any] = {"prompt": list(order.token_ids)}
        if order.image_prompt is not None:
            thinking = order.request.thinking
            is_open = order.request.prompt.messages[-1].role == "assistant"
            prompt = {
                **conversation(order),
                "tool_choice": "none",  # calls are parsed here
                "chat_template_kwargs": {"enable_thinking": thinking, "thinking": thinking},
                "add_generation_prompt": not is_open,
                "continue_final_message": is_open,
            }
        if order.grammar is not None:
            prompt["structured_outputs"] = {"grammar": order.grammar}
        return {
            **vllm_sampling(order, self._files.vocabulary_size),
            "model": self._model,
            **prompt,
            "add_special_tokens": False,
            "return_token_ids": True,
            "cache_salt": order.cache_salt,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def _is_ours(self, usage: _Usage, order: Order) -> bool:
        return order.image_prompt is None or super()._is_ours(usage, order)

    async def _metrics(self) -> tuple[dict[str, str], str]:
        """The labels of the cache's configuration, and when the process was started."""
        status, answer = await self._wire.look("/metrics")
        if status != 200:
            return {}, ""
        start = _START.search(answer)
        cache = _CACHE.search(answer)
        labels = {} if cache is None else dict(_LABEL.findall(cache[1].decode("utf-8", "replace")))
        return labels, "" if start is None else start[1].decode()


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and 0 < int(text) < 2**31 else None


MAX_SLOTS = 1024


class _Generation(msgspec.Struct):
    n_ctx: int


class _Props(msgspec.Struct):
    total_slots: int
    default_generation_settings: _Generation
    model_path: str = ""
    build_info: str = ""


class _Text(msgspec.Struct):
    content: str


class _Timings(msgspec.Struct, frozen=True):
    cache_n: int | None = None


class _Event(msgspec.Struct):
    """One event of llama.cpp's stream."""

    # In an event with `prompt_progress` they were not sampled.
    tokens: list[int] = []
    stop: bool = False
    stop_type: str = ""
    tokens_evaluated: int | None = None
    timings: _Timings = _Timings()
    prompt_progress: Any = None
    error: Any = None


class LlamaCppServer(Server):
    """An unmodified `llama-server`: token ids to `/completion`, a slot for each scope.

    A slot keeps what was computed in it last, and tells with the first token how much of that it
    used again (`timings.cache_n`). What another scope left in a slot is computed over
    (`cache_prompt`).
    """

    PATH = "/completion"
    EVENT = _Event
    ENDS: ClassVar[Mapping[str, FinishReason]] = {"eos": "stop", "limit": "length"}
    TOLD_BY = "timings.cache_n"

    async def find_facts(self) -> Facts:
        props = await self._wire.ask("/props", _Props)
        if not 0 < props.total_slots <= MAX_SLOTS:
            raise UpstreamRefused(f"the server says that it has {props.total_slots} slots")
        context = self._files.context(props.default_generation_settings.n_ctx)
        for text, ours in self._files.probes.items():
            # Ids must mean the same text there. How text becomes ids is decided here alone.
            if (await self._wire.ask("/detokenize", _Text, {"tokens": ours})).content != text:
                raise UpstreamRefused(
                    "the server has another vocabulary than ENGINE_MODEL; name the same model"
                )
        return Facts(
            kind="llamacpp",
            model=last_part(props.model_path),
            fingerprint=last_part(props.model_path),
            version=props.build_info[:64],
            max_context_tokens=context,
            max_running=props.total_slots,
            tells="with_tokens",
            isolation="slots",
            block_size=self._block_size,
            num_blocks=max(props.total_slots * context // self._block_size, 8),
            capabilities=frozenset(
                {"multiple_choices", "min_p", "stop_token_ids", "repetition_penalty"}
            ),
            forced_note="its grammars are of another form than ours",
        )

    async def fingerprint(self) -> str:
        await super().fingerprint()
        return last_part((await self._wire.ask("/props", _Props)).model_path)

    async def prefill(self, order: Order, place: Place = ANYWHERE) -> Piece:
        async with aclosing(self.generate(order, place)) as pieces:
            return await anext(pieces)

    def _piece(self, event: Any, order: Order, place: Place) -> Piece | None:
        progress: _Event = event
        if progress.prompt_progress is not None:
            return None
        cached = progress.timings.cache_n
        num_prompt = progress.tokens_evaluated
        if num_prompt is None or cached is None:
            raise UpstreamError("an answer without counts")
        check_counts(order, num_prompt, cached)
        if cached and not place.may_reuse:
            raise UpstreamError("the server reused what it was told to compute")
        return Piece(
            token_ids=self._files.check_tokens(progress.tokens),
            cached_tokens=cached,
            prompt_tokens=num_prompt,
            finish_reason=progress.stop_type if progress.stop else None,
        )

    def _body(self, order: Order, place: Place) -> dict[str, Any]:
        sample = order.sample
        off = dict.fromkeys(
            ("presence_penalty", "frequency_penalty", "mirostat", "n_cache_reuse"), 0
        )
        return {
            **off,
            # The order of the protocol. The server's own draws by the temperature last.
            "samplers": ["penalties", "temperature", "min_p", "top_k", "top_p"],
            "prompt": list(order.token_ids),
            "n_predict": order.max_tokens,
            "stream": True,
            "id_slot": place.slot,
            "cache_prompt": place.may_reuse,
            "return_tokens": True,
            "return_progress": True,
            "timings_per_token": True,
            # Of the last event, which has the whole prompt else.
            "response_fields": ["tokens", "stop", "stop_type", "tokens_evaluated", "timings"],
            "temperature": sample.temperature,
            "top_p": sample.top_p,
            "top_k": sample.top_k,
            "min_p": sample.min_p,
            # Each token of prompt and answer counts once, as in Hugging Face's processor.
            "repeat_penalty": sample.repetition_penalty,
            "repeat_last_n": len(order.token_ids) + order.max_tokens,
            "seed": sample.seed % 2**32 if order.is_seeded else -1,
            # It makes the server's own ends of a turn impossible, so it is set only where nothing
            # may end the turn.
            "ignore_eos": not order.end_token_ids,
        }


SERVERS: Mapping[Kind, type[Server]] = {
    "vllm": VllmServer,
    "llamacpp": LlamaCppServer,
    "openai": ChatServer,
}


async def find_kind(wire: Wire, model: str) -> Kind:
    """The server's kind, by the owner that `/v1/models` names and by llama.cpp's own `/props`. Any
    other server is one of chat completions, if it lists its models or the setting names its model.
    Raises UpstreamRefused, UpstreamDenied, and UpstreamBusy where it is not ready yet.
    """
    status, answer = await wire.look(MODELS)
    owners = set[str]()
    if status == 200:
        try:
            models = decoded(answer, ServedModels, MODELS).data
            owners = {model.owned_by.lower() for model in models}
        except UpstreamError:
            pass  # another server's page
    if "vllm" in owners:
        return "vllm"
    props, _ = await wire.look("/props")
    if props == 200 or "llamacpp" in owners:
        return "llamacpp"
    if owners:
        return "openai"
    if {status, props} & {401, 403}:
        raise UpstreamDenied("the server wants a key: ENGINE_UPSTREAM_KEY")
    if 429 in (status, props) or max(status, props) >= 500:
        raise UpstreamBusy(f"the server is not ready: status {max(status, props)}")
    if model:
        return "openai"
    raise UpstreamRefused(
        "ENGINE_UPSTREAM_MODEL: the server lists no models; one of Chat Completions needs the name"
    )
