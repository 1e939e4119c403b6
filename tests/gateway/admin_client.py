"""The admin API as tests use it: every call must succeed, unless a status is expected."""

from dataclasses import dataclass
from typing import Any

import httpx

from tests.gateway.serving import ADMIN_KEY, eventually


@dataclass(frozen=True)
class Admin:
    url: str
    key: str = ADMIN_KEY

    def get(self, path: str, status: int = 200) -> Any:
        return self._call("GET", path, None, status)

    def post(self, path: str, body: Any = None, status: int = 200) -> Any:
        return self._call("POST", path, body, status)

    def delete(self, path: str, status: int = 200) -> Any:
        return self._call("DELETE", path, None, status)

    def workspace(self, workspace: str, **limits: Any) -> None:
        self.post("workspaces", {"id": workspace, **limits})

    def make_key(self, workspace: str, **values: Any) -> tuple[str, str]:
        """The new key's id, and the key."""
        reply = self.post("keys", {"workspace": workspace, **values})
        return reply["info"]["id"], reply["key"]

    def has(self, turn_id: str) -> bool:
        """Whether the ledger has the turn, by its own or by its request's id."""
        return self._reply("GET", f"turns/{turn_id}", None).status_code == 200

    def recorded(self, turn_id: str) -> dict[str, Any]:
        """The turn's row; what was asked for last may not be in the ledger yet."""
        eventually(lambda: self.has(turn_id))
        row: dict[str, Any] = self.get(f"turns/{turn_id}")
        return row

    def _call(self, method: str, path: str, body: Any, status: int) -> Any:
        reply = self._reply(method, path, body)
        assert reply.status_code == status, reply.text
        return reply.json()

    def _reply(self, method: str, path: str, body: Any) -> httpx.Response:
        return httpx.request(
            method,
            f"{self.url}/admin/v1/{path}",
            json=body,
            headers={"x-api-key": self.key},
            timeout=120,
            trust_env=False,
        )
