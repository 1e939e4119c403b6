"""A request as code to copy: curl, Python and JavaScript. The key is never in it. Pure."""

import json
import shlex
from typing import Any

KEY = "HOLDFAST_API_KEY"


def curl(url: str, path: str, body: dict[str, Any]) -> str:
    written = shlex.quote(json.dumps(body, indent=2, ensure_ascii=False))
    return (
        f'curl {shlex.quote(url + path)} \\\n  -H "x-api-key: ${KEY}" \\\n'
        '  -H "anthropic-version: 2023-06-01" -H "content-type: application/json" \\\n'
        f"  -d {written}"
    )


def python(url: str, path: str, body: dict[str, Any]) -> str:
    """Anthropic's SDK for its own API; plain HTTP for the others."""
    if path == "/v1/messages":
        fields = "".join(f"    {name}={value!r},\n" for name, value in body.items())
        return (
            "import os\n\nfrom anthropic import Anthropic\n\n"
            f'client = Anthropic(base_url={url!r}, api_key=os.environ["{KEY}"])\n'
            f"answer = client.messages.create(\n{fields})\nprint(answer.usage)\n"
        )
    return (
        "import os\n\nimport httpx\n\n"
        f"body = {body!r}\n"
        f"answer = httpx.post(\n    {url + path!r},\n    json=body,\n"
        f'    headers={{"x-api-key": os.environ["{KEY}"]}},\n    timeout=600,\n)\n'
        "print(answer.json())\n"
    )


def javascript(url: str, path: str, body: dict[str, Any]) -> str:
    written = json.dumps(body, indent=2, ensure_ascii=False)
    if path == "/v1/messages":
        return (
            'import Anthropic from "@anthropic-ai/sdk";\n\n'
            f"const client = new Anthropic({{\n  baseURL: {json.dumps(url)},\n"
            f"  apiKey: process.env.{KEY},\n}});\n"
            f"const answer = await client.messages.create({written});\n"
            "console.log(answer.usage);\n"
        )
    return (
        f'const answer = await fetch({json.dumps(url + path)}, {{\n  method: "POST",\n'
        f'  headers: {{ "x-api-key": process.env.{KEY}, "content-type": "application/json" }},\n'
        f"  body: JSON.stringify({written}),\n}});\nconsole.log(await answer.json());\n"
    )
