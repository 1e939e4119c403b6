"""The commands that fill an empty page: a request, and what starts an engine. Pure."""

import json

MODEL = "holdfast-demo"
START = "scripts/run"


def curl(gateway_url: str, model: str = MODEL) -> str:
    """A marked prompt that is long enough to be cached. The second run reads what the first wrote.

    The key is the shell's HOLDFAST_API_KEY, so that it stands in no history.
    """
    block = {
        "type": "text",
        "text": "$BOOK",
        "cache_control": {"type": "ephemeral"},
    }
    body = {
        "model": model,
        "max_tokens": 32,
        "system": [block],
        "messages": [{"role": "user", "content": "What is done in fog?"}],
    }
    written = json.dumps(body).replace('"', '\\"')
    return (
        "BOOK=$(printf 'The lamp is lit at dusk. In fog the horn sounds. %.0s' $(seq 300))\n"
        f"for turn in 1 2; do curl -s {gateway_url}/v1/messages \\\n"
        '  -H "x-api-key: $HOLDFAST_API_KEY" -H "anthropic-version: 2023-06-01" \\\n'
        '  -H "content-type: application/json" \\\n'
        f'  -d "{written}"; echo; done'
    )
