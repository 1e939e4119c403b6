import pytest

from gateway.base.errors import InvalidRequest
from gateway.dialects.anthropic.request import decode_messages


@pytest.mark.parametrize(
    "raw, message",
    [
        (b"", "The request body is not valid JSON"),
        (b"{", "The request body is not valid JSON"),
        (b"[]", "Input should be a valid object"),
        (b'{"model":"\xff"}', "The request body is not valid UTF-8"),
        (b'{"model":"\\ud800"}', "The request body is not valid JSON"),
        (b'{"model":"\\udc00x"}', "The request body is not valid JSON"),
        (b'{"model":NaN}', "The request body is not valid JSON"),
        (b"\xef\xbb\xbf{}", "The request body is not valid JSON"),
        (b'{"tools":' + b"[" * 100_000, "tools.0: Input should be a valid object"),
        (
            b'{"tools":[{"name":"t","input_schema":' + b'{"a":' * 100_000,
            "The request body is nested too deeply",
        ),
        (b'{"model":"m","messages":[]}', "max_tokens: Field required"),
        (b'{"model":"m","messages":[],"max_tokens":-1}', "max_tokens: Input should be greater"),
        (
            b'{"model":"m","messages":[],"max_tokens":"1"}',
            "max_tokens: Input should be a valid int",
        ),
        (b'{"model":"m","messages":[],"max_tokens":true}', "max_tokens: Input should be a valid"),
        (b'{"model":"m","messages":[],"max_tokens":1e999}', "max_tokens: Input is not valid"),
        (b'{"model":"m","messages":[],"max_tokens":1,"stream":0}', "stream: Input should be a v"),
        (b'{"model":"m","messages":[],"max_tokens":1,"top_p":2}', "top_p: Input should be less"),
        (b'{"model":"m","foo":1}', "foo: Extra inputs are not permitted"),
        (
            b'{"thread":{"type":"new"}}',
            "thread: Input tag 'new' found using 'type' does not match any of the expected tags:"
            " 'create', 'continue'",
        ),
        (b'{"messages":[{"role":"bot"}]}', "messages.0.role: Input should be 'user', 'assistant'"),
        (
            b'{"model":"m","max_tokens":1,"messages":[{"role":"user"}]}',
            "messages.0.content: Field required",
        ),
        (b'{"messages":[{"role":"user","content":1}]}', "messages.0.content: Input should be a "),
        (
            b'{"messages":[{"role":"user","content":[{"type":"text","text":1}]}]}',
            "messages.0.content.0.text.text: Input should be a valid string",
        ),
        (
            b'{"messages":[{"role":"user","content":[{"type":"song"}]}]}',
            "messages.0.content.0: Input tag 'song' found using 'type' does not match",
        ),
        (
            b'{"messages":[{"role":"user","content":[{}]}]}',
            "messages.0.content.0: Unable to extract",
        ),
        (b'{"thinking":{"type":"enabled","budget_tokens":1}}', "thinking.budget_tokens: Input sho"),
        (b'{"service_tier":"gold"}', "service_tier: Input should be 'auto' or 'standard_only'"),
    ],
    ids=lambda value: repr(value[:40]) if isinstance(value, bytes) else "",
)
def test_a_bad_body_is_answered_with_where_and_why(raw: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_messages(raw)
    assert str(caught.value).startswith(message)


def test_of_duplicate_keys_the_last_one_counts() -> None:
    raw = b'{"model":"a","model":"b","max_tokens":1,"messages":[]}'
    assert decode_messages(raw).model == "b"
