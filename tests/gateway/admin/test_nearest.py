"""Which earlier prompt a miss is compared with where nobody names one."""

from collections.abc import Iterator

import httpx
import pytest
from anthropic import Anthropic

from scripts.stack import ADMIN_KEY, Stack, running_stack
from tests.gateway.admin_client import Admin
from tests.gateway.serving import eventually

BOOK = "A lease holds blocks until it ends. " * 60


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("nearest"), "synthetic") as running:
        yield running


def ask(stack: Stack, key: str, system: list[str]) -> str:
    """Send a prompt of these system blocks; its turn's id, once the ledger has it."""
    blocks = [{"type": "text", "text": text} for text in system]
    with Anthropic(base_url=stack.gateway, api_key=key, max_retries=0, timeout=120) as client:
        answer = client.messages.create(
            model="synthetic",
            max_tokens=2,
            system=blocks,  # type: ignore[arg-type]
            messages=[{"role": "user", "content": "Hi"}],
        )
    url = f"{stack.gateway}/admin/v1/turns/{answer.id}"
    headers = {"x-api-key": ADMIN_KEY}
    eventually(lambda: httpx.get(url, headers=headers, timeout=60).status_code == 200)
    return answer.id


def test_a_prompt_that_shares_nothing_is_not_compared(stack: Stack) -> None:
    admin = Admin(stack.gateway, ADMIN_KEY)
    admin.workspace("mixed")
    key = admin.make_key("mixed")[1]
    first = ask(stack, key, [BOOK + "Today is Sunday."])
    ask(stack, key, ["Another program's prompt. " * 400, "It has two blocks."])
    alone = admin.get(f"turns/{ask(stack, key, ['Short and new.', 'b', 'c'])}/divergence")
    assert alone["earlier"] is None and alone["missed_nano"] is None
    again = admin.get(f"turns/{ask(stack, key, [BOOK + 'Today is Monday.'])}/divergence")
    assert (again["earlier"], again["kind"]) == (first, "system_changed")
    assert again["missed_nano"] is None, "how long they are alike is not known"


def test_an_unrelated_prompt_of_about_the_same_size_is_not_compared(stack: Stack) -> None:
    admin = Admin(stack.gateway, ADMIN_KEY)
    admin.workspace("sizes")
    key = admin.make_key("sizes")[1]
    ask(stack, key, [BOOK])
    other = "x" * round(len(BOOK) * 1.08)
    assert admin.get(f"turns/{ask(stack, key, [other])}/divergence")["earlier"] is None
