"""The engine's settings: environment variables `ENGINE_*`, read once at start."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, Json, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

LOOPBACK = {"127.0.0.1", "localhost", "::1"}
# The folder in which Docker, Compose and Podman put secrets as files. The file `engine_secret` has
# ENGINE_SECRET.
_SECRETS = Path("/run/secrets")
DEMO_MODEL = str(Path(__file__).with_name("holdfast-demo"))

PREFIX = "ENGINE_"

Share = Annotated[float, Field(ge=0, le=1)]


class Settings(BaseSettings):
    """Raises pydantic.ValidationError, naming every wrong variable at once."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_ignore_empty=True,
        secrets_dir=_SECRETS if _SECRETS.is_dir() else None,
        extra="forbid",
        frozen=True,
    )

    secret: SecretStr = Field(
        description="Shared secret that every call carries, of 16 characters or more. The file"
        " `/run/secrets/engine_secret` can hold it instead"
    )
    host: str = Field("127.0.0.1", description="Address to listen on")
    port: int = Field(8100, ge=0, le=65535, description="Port to listen on")
    grace_seconds: int = Field(
        10,
        ge=0,
        le=86_400,
        description="How many seconds running generations may go on after SIGTERM",
    )
    load_seconds: int = Field(
        3600,
        ge=5,
        le=86_400,
        description="How many seconds one stage of the start, such as loading the model, may take "
        "without progress. After that the process ends with a line that names the stage",
    )
    backend: Literal["native", "synthetic", "vllm", "upstream"] = Field(
        "native", description="The backend that computes"
    )
    model: str = Field(DEMO_MODEL, description="Hugging Face directory or hub id of the model")
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None,
        description="Type of the weights and of KV memory. Default: bfloat16 on a GPU, else "
        "float32",
    )
    kv_dtype: Literal["model", "float16", "bfloat16", "fp8_e4m3", "int8", "int4"] = Field(
        "model",
        description="Type in which the native engine keeps keys and values. `model` is the "
        "model's own type. A type of fewer bits holds more tokens, and its answers differ a "
        "little",
    )
    attention: Literal["auto", "sdpa", "cpp", "triton"] = Field(
        "auto",
        description="How the native engine computes attention: with torch's own functions "
        "(`sdpa`), with a paged kernel in C++ on a CPU (`cpp`; compiled at the start if it was "
        "not built before), or with a paged kernel in Triton on a GPU (`triton`). `auto` takes "
        "the kernel if there is one",
    )
    cuda_graphs: bool = Field(
        False,
        description="Whether the native engine captures decode steps as CUDA graphs. This needs a "
        "GPU and the kernel in Triton, and has not been measured",
    )
    adapters: str = Field(
        "",
        description="Directory whose folders are LoRA adapters, as PEFT writes them (native "
        "engine and vLLM). All of them are loaded at the start. Default: none",
    )
    adapter_bytes: int = Field(
        8 * 2**30,
        ge=1,
        le=2**50,
        description="Most bytes that the files of all loaded adapters' weights may have together",
    )
    block_size: int = Field(16, ge=1, le=1024, description="Tokens per KV block")
    num_blocks: int | None = Field(
        None,
        ge=8,
        le=2**24,
        description="Blocks in the pool. Default: 8 contexts, but at most a quarter of free memory",
    )
    host_blocks: int = Field(
        0,
        ge=0,
        le=2**24,
        description="Blocks in host memory for content that the pool has no room for",
    )
    store: str = Field(
        "",
        description="Directory of the store on disk, in which leases outlive a restart (native and "
        "synthetic engines). Default: none",
    )
    store_shared: bool = Field(
        False,
        description="Whether several engines of one model share the directory, for example on a "
        "volume or NFS. Each engine writes its own folder and reads the folders of the others",
    )
    store_bytes: int = Field(
        2 * 2**30, ge=2**20, le=2**50, description="Most bytes that blocks may take on disk"
    )
    role: Literal["prefill", "decode", "both"] = Field(
        "both",
        description="What gateways send to this engine. `both`: whole turns. `prefill`: long new "
        "prompts, which another engine answers. `decode`: whole turns, and answers to prompts that "
        "a `prefill` engine computed. `prefill` and `decode` need a shared store",
    )
    min_cache_tokens: int = Field(
        1024,
        ge=1,
        le=2**24,
        description="Tokens of the shortest prefix that is cached, if the request does not say",
    )
    lease_share: Share = Field(0.5, description="Share of the pool that leases may hold, 0 to 1")
    clock: Literal["monotonic", "manual"] = Field(
        "monotonic",
        description="`manual`: a clock that stands still until a test moves it, on loopback only",
    )
    max_step_tokens: int | None = Field(
        None,
        ge=16,
        le=2**20,
        description="Most tokens that one step computes. Default: 256 on a CPU, 2048 on a GPU",
    )
    max_running: int = Field(
        32, ge=1, le=2**16, description="Most sequences that are computed together"
    )
    speculation: Literal["off", "ngram"] = Field(
        "off",
        description="Where proposed tokens come from (native engine). One forward pass verifies "
        "them, so answers stay the same. `ngram` proposes the tokens that followed the same "
        "tokens earlier in the prompt or the answer",
    )
    approximate: bool = Field(
        False,
        description="Whether requests may ask for compressed prefixes and for blocks that are "
        "placed anywhere (native engine)",
    )
    sibling: str = Field(
        "",
        description="File that `python -m engine profile-variant --write` wrote. It names a "
        "sibling of the model, whose entries in the shared store requests may ask for",
    )
    max_waiting: int = Field(
        256, ge=1, le=2**20, description="Most requests that may wait. Further requests are refused"
    )
    tool_format: str = Field(
        "auto",
        description="How the model writes tool calls: a name from engine/README.md, or `none`. "
        "`auto`: the format that its chat template proves",
    )
    reasoning_format: str = Field(
        "auto",
        description="How the model marks its thinking: a name from engine/README.md, or `none`. "
        "`auto`: the format that its chat template proves",
    )
    synthetic_model: str = Field(
        "synthetic",
        pattern=r"^[\w.-]{1,64}$",
        description="Synthetic engine: the name of the model that it imitates",
    )
    synthetic_prefill_us: float = Field(
        50.0, ge=0, le=1e6, description="Synthetic engine: microseconds per prefilled token"
    )
    synthetic_decode_ms: float = Field(
        20.0, ge=0, le=60_000, description="Synthetic engine: milliseconds per decode step"
    )
    vllm_args: Json[dict[str, Any]] = Field(
        {},
        description="vLLM engine: any of vLLM's engine arguments, as JSON",
        validate_default=False,
    )
    vllm_shares_kv_across_scopes: bool = Field(
        False,
        description="vLLM engine: whether to serve beside a connector that may give one scope the "
        "content of another scope. The engine then does not declare isolation",
    )
    upstream: str = Field(
        "",
        description="Upstream engine: the URL of an unmodified model server, such as "
        "http://127.0.0.1:8000. ENGINE_MODEL must name the directory of the model that the server "
        "has",
    )
    upstream_model: str = Field(
        "",
        description="Upstream engine: the server's name of the model. Default: the server's only "
        "model",
    )
    upstream_key: SecretStr = Field(
        SecretStr(""), description="Upstream engine: the server's API key, if it wants one"
    )
    upstream_slots: str = Field(
        "",
        description="Upstream engine: the directory of llama.cpp's `--slot-save-path`, on this "
        "machine or on a common volume. Files there hold the leases of marked prefixes, in at "
        "most ENGINE_STORE_BYTES. Default: nothing is leased",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info",
        description="Least severe log line that is written. `debug` adds a line for each call "
        "that a gateway makes for a client's request",
    )
    vllm_metrics: bool = Field(
        True,
        description="Whether `/metrics` also shows some of its counts under the names of vLLM's "
        "metrics, for boards, autoscalers and planners that read these names",
    )

    @field_validator("secret")
    @classmethod
    def _fits_in_a_header(cls, value: SecretStr) -> SecretStr:
        text = value.get_secret_value()
        if len(text) < 16 or text != text.strip() or not (text.isascii() and text.isprintable()):
            raise ValueError("must be 16 or more printable ASCII characters, no blank at an end")
        return value

    @model_validator(mode="after")
    def _fit_together(self) -> "Settings":
        native = ("native",)
        in_vllm = "; vLLM takes `{}` in ENGINE_VLLM_ARGS"
        for name, backends, hint in (
            ("store", ("native", "synthetic"), ""),
            ("speculation", native, in_vllm.format("speculative_config")),
            ("approximate", native, ""),
            ("kv_dtype", native, in_vllm.format("kv_cache_dtype")),
            ("cuda_graphs", native, in_vllm.format("compilation_config")),
        ):
            is_given = getattr(self, name) != type(self).model_fields[name].default
            if is_given and self.backend not in backends:
                where = " or ".join(backends)
                raise ValueError(f"{PREFIX}{name.upper()} works with ENGINE_BACKEND {where}{hint}")
        for is_wrong, message in (
            (
                self.backend == "upstream"
                and not self.upstream.startswith(("http://", "https://")),
                "ENGINE_BACKEND=upstream needs a URL in ENGINE_UPSTREAM",
            ),
            (
                bool(self.upstream_slots) and self.backend != "upstream",
                "ENGINE_UPSTREAM_SLOTS works with ENGINE_BACKEND upstream",
            ),
            (
                self.adapters
                and not (self.backend in ("native", "vllm") and Path(self.adapters).is_dir()),
                "ENGINE_ADAPTERS needs ENGINE_BACKEND native or vllm, and a directory that exists",
            ),
            (
                self.role != "both" and not (self.store and self.store_shared),
                "ENGINE_ROLE needs ENGINE_STORE and ENGINE_STORE_SHARED=true",
            ),
            (
                self.sibling and not (self.approximate and self.store and self.store_shared),
                "ENGINE_SIBLING needs ENGINE_APPROXIMATE, ENGINE_STORE and ENGINE_STORE_SHARED",
            ),
            (
                self.kv_dtype != "model" and self.attention in ("triton", "cpp"),
                "ENGINE_KV_DTYPE needs ENGINE_ATTENTION auto or sdpa",
            ),
            (
                self.cuda_graphs
                and (self.kv_dtype != "model" or self.attention not in ("auto", "triton")),
                "ENGINE_CUDA_GRAPHS needs ENGINE_ATTENTION auto or triton, and ENGINE_KV_DTYPE "
                "model",
            ),
            (
                self.clock == "manual" and self.host not in LOOPBACK,
                "ENGINE_CLOCK=manual needs a loopback address in ENGINE_HOST",
            ),
        ):
            if is_wrong:
                raise ValueError(message)
        return self


def problems_of(error: ValidationError) -> list[str]:
    """One line for each setting that is missing or wrong, without its value."""
    lines = []
    for problem in error.errors(include_input=False, include_url=False):
        name = "_".join(map(str, problem["loc"]))
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "missing":
            message = f"is not set; it is needed: {Settings.model_fields[name].description}"
        lines.append(f"{PREFIX}{name.upper()}: {message}")
    return lines
