"""The dashboard's settings: environment variables `DASHBOARD_*`, which are read once at start."""

from functools import cache
from ipaddress import ip_network
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

_URL_MUST_BE = "must be http:// or https://, a host, and no more than a port and a path"


class Settings(BaseSettings):
    """The settings. A wrong variable raises pydantic.ValidationError, which names every wrong
    variable at once."""

    model_config = SettingsConfigDict(
        env_prefix="DASHBOARD_", env_ignore_empty=True, extra="ignore", frozen=True
    )

    gateway_url: str = Field("http://127.0.0.1:8080", description="Where the gateway listens")
    host: str = Field("127.0.0.1", description="Address to listen on")
    port: int = Field(8501, ge=1, le=65535, description="Port to listen on")
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = Field(
        ("127.0.0.1", "localhost"),
        min_length=1,
        description="Host names by which browsers reach the dashboard, separated by commas."
        " Requests for other names are refused",
    )
    trusted_proxies: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Addresses or networks of reverse proxies, separated by commas. The dashboard"
        " believes X-Forwarded-For and X-Forwarded-Proto from these addresses only",
    )
    session_hours: float = Field(
        12.0, gt=0, le=720, description="How long a sign-in lasts, in hours"
    )

    @field_validator("allowed_hosts", "trusted_proxies", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("gateway_url")
    @classmethod
    def _is_a_url(cls, value: str) -> str:
        """Raise ValueError for a URL to which no request can be sent."""
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(_URL_MUST_BE)
        if not value.isascii() or not value.isprintable() or " " in value:
            raise ValueError(_URL_MUST_BE)
        return value

    @field_validator("trusted_proxies")
    @classmethod
    def _are_networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """Raise ValueError for a text that is neither an address nor a network."""
        for network in value:
            ip_network(network)
        return value


@cache
def settings() -> Settings:
    """The settings of this process."""
    return Settings.model_validate({})
