"""Mixtures in the other dialects: Responses, Gemini with its cached contents, and batches.

The sizes are drawn as in `mixes.py`.
"""

import asyncio
import random
from typing import Any

from scripts.faults.attacks import Kind, Neighbour
from scripts.faults.drawing import Json, drawn_schema, leaving, size, words_of
from scripts.faults.houses import text

_FUNCTION_MODES = ("AUTO", "ANY", "NONE")


async def mixed_responses(who: Neighbour, rng: random.Random) -> int:
    """A mixture in the Responses API: items, calls and their outputs, forms, stored turns."""
    items: list[Json] = [{"role": "user", "content": words_of(who, rng)}]
    for number in range(size(rng, 300)):
        call = {"type": "function_call", "call_id": f"c{number}", "name": "f0", "arguments": "{}"}
        output = {"type": "function_call_output", "call_id": f"c{number}", "output": text(rng, 2)}
        items += [call, output]
    body: Json = {"model": who.model, "input": items, "stream": rng.random() < 0.6}
    form = {"type": "json_schema", "name": "form", "schema": drawn_schema(who, rng)}
    functions = [
        {"type": "function", "name": f"f{number}", "parameters": drawn_schema(who, rng)}
        for number in range(size(rng, 16))
    ]
    extras: list[Json] = [
        {"input": words_of(who, rng)},
        {"instructions": words_of(who, rng)},
        {"max_output_tokens": size(rng, 200)},
        {"tools": functions, "tool_choice": rng.choice(("auto", "required", "none"))},
        {"text": {"format": form}},
        {"previous_response_id": f"resp_{rng.getrandbits(112):028x}"},
        {"prompt_cache_key": f"{rng.random()}" * size(rng, 50)},
        {"reasoning": {"effort": rng.choice(("low", "high", "x" * 500))}},
        {"metadata": {f"{rng.random()}": "v" * size(rng, 1000)}},
    ]
    for extra in rng.sample(extras, rng.randrange(5)):
        body |= extra
    return await leaving(who, rng, "/v1/responses", body)


async def mixed_gemini(who: Neighbour, rng: random.Random) -> int:
    """A mixture in generateContent, streamed, whole or counted."""
    contents: list[Json] = [
        {"role": ("user", "model")[number % 2], "parts": _parts(rng)}
        for number in range(2 * size(rng, 100) - 1)
    ]
    contents[-1]["parts"].append({"text": words_of(who, rng)})
    functions = [
        {"name": f"f{number}", "parametersJsonSchema": drawn_schema(who, rng)}
        for number in range(size(rng, 16))
    ]
    extras: list[Json] = [
        {"systemInstruction": {"parts": [{"text": words_of(who, rng)}]}},
        {
            "tools": [{"functionDeclarations": functions}],
            "toolConfig": {"functionCallingConfig": {"mode": rng.choice(_FUNCTION_MODES)}},
        },
        {
            "generationConfig": {
                "maxOutputTokens": size(rng, 200),
                "stopSequences": ["x" * size(rng, 1024)] * rng.randrange(6),
                "responseMimeType": "application/json",
                "responseJsonSchema": drawn_schema(who, rng),
            }
        },
        {"generationConfig": {"candidateCount": size(rng, who.bounds.max_choices)}},
        {"cachedContent": f"cachedContents/{rng.getrandbits(64):x}"},
    ]
    body: Json = {"contents": contents}
    for extra in rng.sample(extras, rng.randrange(4)):
        body |= extra
    verb = rng.choice(("generateContent", "streamGenerateContent?alt=sse", "countTokens"))
    if verb == "countTokens":
        body = {"contents": contents}
    path = f"/v1beta/models/{who.model}:{verb}"
    return await leaving(who, rng, path, body)


def _parts(rng: random.Random) -> list[Json]:
    return [{"text": text(rng, 2)} for _ in range(size(rng, 20))]


async def cached_content(who: Neighbour, rng: random.Random) -> int:
    """A named content of up to a third of the context, for any time; most are never read."""
    body = {
        "model": f"models/{who.model}",
        "contents": [{"role": "user", "parts": [{"text": words_of(who, rng)}]}],
        "ttl": f"{size(rng, 7200)}s",
        "displayName": "n" * size(rng, 200),
    }
    return await leaving(who, rng, "/v1beta/cachedContents", body)


async def batch(who: Neighbour, rng: random.Random) -> int:
    """A batch of short rows behind one prefix, of which some can't be read; soon cancelled."""
    system = text(rng, size(rng, 400))
    rows = [_row(who, rng, number, system) for number in range(size(rng, 300))]
    reply = await who.client.post("/v1/messages/batches", json={"requests": rows})
    if reply.status_code == 200:
        await asyncio.sleep(rng.uniform(0, 5))
        await who.client.post(f"/v1/messages/batches/{reply.json()['id']}/cancel")
    return reply.status_code


def _row(who: Neighbour, rng: random.Random, number: int, system: str) -> dict[str, Any]:
    params: Json = {
        "model": who.model,
        "max_tokens": size(rng, 8),
        "system": system,
        "messages": [{"role": "user", "content": text(rng, 3)}],
    }
    if rng.random() < 0.05:
        params["messages"] = "none"
    return {"custom_id": f"row-{number}", "params": params}


DIALECTS: dict[str, Kind] = {
    "mixtures in Responses": Kind(mixed_responses, 4),
    "mixtures in Gemini": Kind(mixed_gemini, 4),
    "cached contents": Kind(cached_content, 2),
    "batches": Kind(batch, 1),
}
