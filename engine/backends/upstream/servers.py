"""The servers: vLLM by its completions, llama.cpp by its own API, others by chat completions.

OpenAI's API tells only with the last event of a stream how many of the prompt's tokens were reused.
The first frame of an answer needs that number. So a request for one token computes the prompt
first, and the generation then finds the prompt in the server's cache.
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
"""The finish reasons of an answer that is not whole, and the error of each.

- `abort`: vLLM (`vllm.v1.engine.FINISH_REASON_STRINGS`) and SGLang, when they are paused.
- `error`: a router before several servers, such as OpenRouter.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The part of an answer since the last piece."""

    token_ids: Sequence[TokenId] = ()
    # The prompt's tokens that the server reused; None: this piece does not tell.
    cached_tokens: int | None = None
    # The prompt's tokens by the server's count; None: this piece does not tell.
    prompt_tokens: int | None = None
    # The text and calls of a server of chat completions.
    delta: ChatDelta | None = None
    # Why the server ended the choice, in its own words.
    finish_reason: str | None = None
    # The reason in our words, if our parser can't see the end by itself.
    finish: FinishReason | None = None
    # The tokens of the whole answer; None: this piece does not tell.
    sampled_tokens: int | None = None
    # Whether no piece follows.
    is_last: bool = False

    @property
    def is_answer(self) -> bool:
        """Whether the prompt is computed with this piece. The answer may have no token at all."""
        return bool(self.token_ids or self.delta or self.finish_reason or self.is_last)


def failure_by(reason: str) -> UpstreamError:
    """The error for a reason in FAILURES."""
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
    # A note for people: which field of its answers tells the reused tokens.
    TOLD_BY: ClassVar[str] = "usage.prompt_tokens_details.cached_tokens"
    # A note for people: why the reused tokens are not told, or what would change that.
    NOT_TOLD: ClassVar[str] = "its usage has no prompt_tokens_details.cached_tokens"
    # A note for people: why its isolation of scopes is not proved.
    UNPROVEN: ClassVar[str] = "the server knows no scopes"
    TAKES_IMAGES: ClassVar[bool] = False
    # The most bytes of an event for each token; 0: the server sends token ids, which are counted.
    MAX_TOKEN_EVENT_BYTES: ClassVar[int] = 0

    def __init__(self, wire: Wire, files: ModelFacts, model: str, block_size: int) -> None:
        """`model` is the server's name for the model, or empty for its only one.

        `block_size` are the tokens of a block in our books, since not every server has blocks.
        """
        self._wire = wire
        self._files = files
        self._model = model
        self._block_size = block_size
        self.close = wire.close

    async def find_facts(self) -> Facts:
        """What the server tells of itself. Raises UpstreamRefused if it can't be used."""
        raise NotImplementedError

    async def fingerprint(self) -> str:
        """A text that changes when the server is started anew, if it shows that at all.

        Raises UpstreamGone if the server does not answer with 200.
        """
        status, _ = await self._wire.look(self.ALIVE)
        if status != 200:
            raise UpstreamGone(f"{self.ALIVE}: status {status}")
        return ""

    async def prefill(self, order: Order, place: Place = ANYWHERE) -> Piece:
        """Compute the prompt alone, for servers that tell the reused tokens only at the end."""
        raise NotImplementedError

    async def count(self, order: Order) -> int:
        """The number of a prompt's tokens by the server's count. Raises UpstreamRejected."""
        raise NotImplementedError

    async def generate(self, order: Order, place: Place = ANYWHERE) -> AsyncGenerator[Piece, None]:
        """Run a choice to its end. Closing the iterator ends it at the server as well."""
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
            # Tokens are bounded. If the server tells none, the bytes of its events are.
            is_text = self.MAX_TOKEN_EVENT_BYTES > 0
            most = order.max_tokens
            size += len(data) if is_text else len(piece.token_ids)
            if size > ((most + 16) * self.MAX_TOKEN_EVENT_BYTES if is_text else most):
                raise UpstreamError("more than was asked for")
            if piece.finish_reason is not None:
                reason = piece.finish_reason
            # The reason of a failure is held back, because later events have the counts.
            yield replace(piece, finish_reason=None) if reason in FAILURES else piece
        if reason is None:
            raise UpstreamGone("the stream ended without a reason")
        if reason in FAILURES:
            raise failure_by(reason)
        yield Piece(is_last=True, finish=self.ENDS.get(reason))

    def _path(self, order: Order) -> str:
        return self.PATH

    async def _sent(self, order: Order, place: Place) -> dict[str, Any]:
        # Images have megabytes, so another thread encodes them.
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
    # The context in tokens. vLLM and some other servers tell it.
    max_model_len: int | None = None
    owned_by: str = ""
    # The loaded model, while `id` may be an alias. vLLM and some other servers tell it.
    root: str | None = None

    @property
    def what(self) -> str:
        """The served model's name, for comparing."""
        return last_part(self.root or self.id)


def last_part(name: str) -> str:
    """The last part of a path, since paths differ between machines. Other names are returned whole.

    The result has at most its last 256 characters.
    """
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
    """A server of chat completions. It renders and parses by itself, and knows no scopes.

    Its usage is all that it tells about tokens.
    """

    PATH = "/v1/chat/completions"
    EVENT = _Answer
    ALIVE = MODELS
    # An event of one token has a few hundred bytes. Events with several tokens have more.
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
        """The name of the served model. All else may be the same after a start with another
        model."""
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
        """The count in the usage of a request for one token, since no other call tells it."""
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
        """The server's model of this name, or its only one if the name is empty.

        Raises UpstreamRefused if it has none or several.
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
        """The usage as a piece. The reused tokens are 0 if the server did not compute our tokens.

        Raises UpstreamError for impossible counts.
        """
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
        """Whether the server computed exactly our tokens, as far as its count shows."""
        return usage.prompt_tokens == len(order.token_ids)


class VllmServer(ChatServer):
    """An unmodified `vllm serve`, which gets token ids at `/v1/completions` and answers with ids.

    It tells the reused tokens only with `--enable-prompt-tokens-details`.
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
            # vLLM does not tell its `--max-num-seqs`. Requests beyond that wait in vLLM.
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
        """Token ids can't carry images, so the server itself renders a prompt that has some."""
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
        """The labels of the cache's configuration, and the time of the process's start as text.

        Both are empty if the server has no metrics.
        """
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

    # The sampled tokens. In an event with `prompt_progress` they are the prompt's.
    tokens: list[int] = []
    stop: bool = False
    stop_type: str = ""
    tokens_evaluated: int | None = None
    timings: _Timings = _Timings()
    prompt_progress: Any = None
    error: Any = None


class LlamaCppServer(Server):
    """An unmodified `llama-server`, which gets token ids at `/completion`. A slot is one scope's.

    A slot keeps its last prompt. The first event of an answer tells how many of its tokens were
    reused (`timings.cache_n`). For another scope than the last one nothing is reused
    (`cache_prompt` is false).
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
            # An id must mean the same text in the server. Text becomes ids only in this engine.
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
            # The protocol's order. In the server's own order the temperature comes last.
            "samplers": ["penalties", "temperature", "min_p", "top_k", "top_p"],
            "prompt": list(order.token_ids),
            "n_predict": order.max_tokens,
            "stream": True,
            "id_slot": place.slot,
            "cache_prompt": place.may_reuse,
            "return_tokens": True,
            "return_progress": True,
            "timings_per_token": True,
            # The fields of the last event. By default it has the whole prompt.
            "response_fields": ["tokens", "stop", "stop_type", "tokens_evaluated", "timings"],
            "temperature": sample.temperature,
            "top_p": sample.top_p,
            "top_k": sample.top_k,
            "min_p": sample.min_p,
            # Each token of prompt and answer counts once, as in Hugging Face's processor.
            "repeat_penalty": sample.repetition_penalty,
            "repeat_last_n": len(order.token_ids) + order.max_tokens,
            "seed": sample.seed % 2**32 if order.is_seeded else -1,
            # It forbids all tokens that end a turn. So it is set only if no token may end the turn.
            "ignore_eos": not order.end_token_ids,
        }


SERVERS: Mapping[Kind, type[Server]] = {
    "vllm": VllmServer,
    "llamacpp": LlamaCppServer,
    "openai": ChatServer,
}


async def find_kind(wire: Wire, model: str) -> Kind:
    """The server's kind, by the owner that `/v1/models` names and by llama.cpp's own `/props`.

    Any other server is one of chat completions, if it lists its models or if `model` is given.
    Raises UpstreamRefused, UpstreamDenied, and UpstreamBusy if it is not ready yet.
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
