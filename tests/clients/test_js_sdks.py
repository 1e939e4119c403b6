"""The AI SDK and both official JavaScript SDKs: every answer passes their schemas.

And the other way round: each request field of the JavaScript SDK's types is known to ours.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.conversation import Service

HERE = Path(__file__).resolve().parent / "js"
# Beside the clients' other environments; installed once.
INSTALLED = HERE.parents[2] / ".venv-clients-js"


@pytest.fixture(scope="module")
def packages() -> Path:
    if shutil.which("npm") is None:
        pytest.skip("needs Node and npm")
    INSTALLED.mkdir(exist_ok=True)
    for file in ("package.json", "answers.mjs"):
        shutil.copyfile(HERE / file, INSTALLED / file)
    command = ["npm", "install", "--no-audit", "--no-fund", "--silent"]
    subprocess.run(command, cwd=INSTALLED, check=True, timeout=600)
    return INSTALLED


def test_every_answer_passes_the_javascript_sdks_schemas(service: Service, packages: Path) -> None:
    process = subprocess.run(
        ["node", "answers.mjs", service.url, service.key],
        cwd=packages,
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "AI_SDK_LOG_WARNINGS": "false"},
    )
    results = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    assert len(results) >= 20, process.stdout + process.stderr
    assert [result for result in results if not result["ok"]] == []
    assert process.returncode == 0


FIELD = re.compile(r"^    (\w+)\??:", re.MULTILINE)


def fields_of(declarations: str, interface: str) -> set[str]:
    """The fields that an interface of a .d.ts file declares itself."""
    body = re.search(
        rf"export interface {interface}\b[^{{]*\{{\n(.*?)\n\}}", declarations, re.DOTALL
    )
    assert body is not None, interface
    return set(FIELD.findall(body[1]))


def message_of(service: Service, path: str, field: str) -> str:
    """What the gateway says to a request with this field alone as an impossible value."""
    import urllib.error
    import urllib.request

    body = {"model": "holdfast-demo", "messages": [{"role": "user", "content": "hi"}]}
    body |= {"max_tokens": 1, field: {"holdfast": ["no such value"]}}
    request = urllib.request.Request(
        f"{service.url}{path}",
        json.dumps(body).encode(),
        {
            "x-api-key": service.key,
            "content-type": "application/json",
            "anthropic-version": "2023-06-01",
        },
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as reply:
            return str(reply.read().decode())
    except urllib.error.HTTPError as error:
        assert error.code == 400
        return str(error.read().decode())


@pytest.mark.parametrize(
    ("file", "interfaces", "path", "unknown", "elsewhere"),
    [
        (
            "@anthropic-ai/sdk/resources/messages/messages.d.ts",
            ["MessageCreateParamsBase"],
            "/v1/messages",
            "{}: Extra inputs are not permitted",
            {"user_profile_id", "workspace_id"},
        ),
        (
            "@anthropic-ai/sdk/resources/beta/messages/messages.d.ts",
            ["MessageCreateParamsBase"],
            "/v1/messages",
            "{}: Extra inputs are not permitted",
            {"betas", "user_profile_id", "workspace_id"},
        ),
        (
            "openai/resources/chat/completions/completions.d.ts",
            ["ChatCompletionCreateParamsBase"],
            "/v1/chat/completions",
            "Unrecognized request argument supplied: {}",
            set(),
        ),
    ],
)
def test_every_request_field_of_the_javascript_types_is_known(
    service: Service,
    packages: Path,
    file: str,
    interfaces: list[str],
    path: str,
    unknown: str,
    elsewhere: set[str],
) -> None:
    """Headers in our dialect are `elsewhere`."""
    declarations = (packages / "node_modules" / file).read_text("utf-8")
    fields = set().union(*(fields_of(declarations, name) for name in interfaces)) - elsewhere
    assert len(fields) > 10
    refused = [
        field
        for field in ("no_such_field", *sorted(fields))
        if f'"{unknown.format(field)}"' in message_of(service, path, field)
    ]
    assert refused == ["no_such_field"]
