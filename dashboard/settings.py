"""The dashboard's settings: environment variables `DASHBOARD_*`, read at each session's start."""

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Raises pydantic.ValidationError, naming every wrong variable at once."""

    model_config = SettingsConfigDict(env_prefix="DASHBOARD_", extra="ignore", frozen=True)

    admin_key: SecretStr = Field(min_length=1, description="The gateway's HOLDFAST_ADMIN_KEY")
    gateway_url: str = Field(
        "http://127.0.0.1:8080", pattern="^https?://", description="Where the gateway listens"
    )
