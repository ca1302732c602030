"""Anthropic's package on /v1/messages; its client validates every answer and every event strictly."""

import asyncio
import json

import anthropic
from anthropic import Anthropic, AsyncAnthropic

from common import (
    ANSWER,
    KEY,
    KEYED_URL,
    QUESTION,
    TIME,
    TOOLS_URL,
    URL,
    WEATHER,
    is_weather,
    metric,
    refused,
    run,
    wait_for,
)

client = Anthropic(base_url=URL, api_key="none", max_retries=0, _strict_response_validation=True)
tooled = Anthropic(base_url=TOOLS_URL, api_key="none", max_retries=0, _strict_response_validation=True)
keyed = Anthropic(base_url=KEYED_URL, api_key=KEY, max_retries=0, _strict_response_validation=True)
ask = {"model": "demo", "max_tokens": 100, "messages": [{"role": "user", "content": QUESTION}]}
weather = {"name": "weather", "description": "The weather.", "input_schema": WEATHER}
clock = {"name": "clock", "input_schema": TIME}
with_tools = {**ask, "model": "tools", "tools": [weather, clock]}


def create(on=client, **fields):
    return on.messages.create(**{**ask, **fields})


def test_plain():
    message = create()
    assert (message.type, message.role, message.model) == ("message", "assistant", "demo") and message.id.startswith(
        "msg"
    )
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    [block] = message.content
    assert (block.type, block.text) == ("text", ANSWER)
    assert message.usage.input_tokens > 0 and message.usage.output_tokens > 5
    assert message.model_dump()["content"][0]["text"] == ANSWER and message._request_id


def test_stream():
    with client.messages.stream(**ask) as stream:
        events = list(stream)
        final = stream.get_final_message()
    kinds = [event.type for event in events if event.type != "text"]
    assert kinds[:2] == ["message_start", "content_block_start"] and kinds[-3:] == [
        "content_block_stop",
        "message_delta",
        "message_stop",
    ], kinds
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert final.content[0].text == ANSWER and final.stop_reason == "end_turn"
    plain = create()
    assert final.usage.output_tokens == plain.usage.output_tokens
    total = lambda usage: usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    assert total(final.usage) == total(plain.usage), (final.usage, plain.usage)
    with client.messages.stream(**ask) as stream:
        assert "".join(stream.text_stream) == ANSWER
        assert stream.get_final_text() == ANSWER


def test_raw_events():
    events = list(create(stream=True))
    assert (
        events[0].message.content == []
        and events[0].message.stop_reason is None
        and events[0].message.usage.output_tokens >= 0
    )
    assert all(type(event).__name__.startswith("Raw") for event in events), events
    assert "".join(event.delta.text for event in events if event.type == "content_block_delta") == ANSWER
    [end] = [event for event in events if event.type == "message_delta"]
    assert end.delta.stop_reason == "end_turn" and end.usage.output_tokens > 5


def test_a_stream_that_is_closed_frees_its_request():
    stream = create(
        stream=True,
        messages=[{"role": "user", "content": "Tell me everything."}],
        max_tokens=3500,
        extra_body={"temperature": 1.0},
    )
    next(iter(stream))
    stream.close()
    wait_for(lambda: metric(URL, "requests_running") == 0)


def test_system_and_blocks():
    text = create(system="You are a helpful assistant.").usage
    blocks = create(
        system=[{"type": "text", "text": "You are a helpful assistant.", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}}]}
        ],
        metadata={"user_id": "ann"},
    ).usage
    total = lambda usage: usage.input_tokens + usage.cache_read_input_tokens
    assert total(text) == total(blocks) > total(create().usage)


def test_stops():
    message = create(stop_sequences=["never", " = "])
    assert (message.stop_reason, message.stop_sequence, message.content[0].text) == ("stop_sequence", " = ", "2 + 2")
    with client.messages.stream(**ask, stop_sequences=[" = "]) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence, final.content[0].text) == ("stop_sequence", " = ", "2 + 2")
    cut = create(max_tokens=3)
    assert cut.stop_reason == "max_tokens" and ANSWER.startswith(cut.content[0].text) and cut.usage.output_tokens == 3


def test_sampling():
    # Servers take them, though this version of the package has no arguments for them.
    assert create(extra_body={"temperature": 1.0, "top_p": 0.9, "top_k": 5}).content


def test_prefill():
    prefill = [*ask["messages"], {"role": "assistant", "content": "2 + 2"}]
    assert create(messages=prefill).content[0].text == " = 4"


def test_turns():
    first = create()
    messages = [*ask["messages"], first.to_param(), {"role": "user", "content": QUESTION}]
    assert create(messages=messages).content
    messages[1] = {"role": "assistant", "content": first.content}
    assert create(messages=messages).content


def test_consecutive_turns_are_one():
    count = lambda *turns: (
        client.messages.count_tokens(
            model="demo", messages=[{"role": role, "content": text} for role, text in turns]
        ).input_tokens
    )
    assert count(("user", "What is"), ("user", "2+2?")) == count(("user", "What is\n\n2+2?"))
    end = ("user", QUESTION)
    assert count(end, ("assistant", "4"), ("assistant", "Four."), end) == count(end, ("assistant", "4\n\nFour."), end)


def test_tools():
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"}):
        message = create(tooled, **with_tools | {"tool_choice": choice})
        assert message.stop_reason == "tool_use", message
        [use] = [block for block in message.content if block.type == "tool_use"]
        assert use.id and (is_weather(use.input) if use.name == "weather" else use.input["zone"] in ("UTC", "CET"))
    none = create(tooled, **with_tools | {"tool_choice": {"type": "none"}})
    assert none.content[0].text == ANSWER and none.stop_reason == "end_turn"
    assert create(tooled, **with_tools | {"tool_choice": {"type": "auto"}}).content


def test_tools_streamed():
    with tooled.messages.stream(**with_tools, tool_choice={"type": "tool", "name": "weather"}) as stream:
        events = list(stream)
        final = stream.get_final_message()
    [use] = final.content
    assert is_weather(use.input) and final.stop_reason == "tool_use"
    partial = "".join(event.partial_json for event in events if event.type == "input_json")
    assert partial and events[-1].type == "message_stop"


def test_results_go_back():
    called = create(tooled, **with_tools | {"tool_choice": {"type": "tool", "name": "weather"}})
    use = called.content[-1]
    for content in ("clear", [{"type": "text", "text": "clear"}]):
        result = {"type": "tool_result", "tool_use_id": use.id, "content": content, "is_error": False}
        turns = [
            *ask["messages"],
            {"role": "assistant", "content": called.content},
            {"role": "user", "content": [result]},
        ]
        again = create(tooled, **with_tools | {"messages": turns})
        assert again.content is not None and again.stop_reason in ("end_turn", "max_tokens", "tool_use")
    turns[-1]["content"].append({"type": "text", "text": "And now?"})
    assert create(tooled, **with_tools | {"messages": turns}).usage.input_tokens > 0


def test_count_tokens():
    count = client.messages.count_tokens(model="demo", messages=ask["messages"]).input_tokens
    usage = create().usage
    assert count == usage.input_tokens + usage.cache_read_input_tokens
    fields = {"model": "tools", "messages": ask["messages"], "tools": [weather], "system": "Be brief."}
    assert tooled.messages.count_tokens(**fields).input_tokens > count


def test_structured_output():
    form = {"format": {"type": "json_schema", "schema": WEATHER}}
    assert is_weather(json.loads(create(output_config=form).content[0].text))


def test_models():
    [model] = client.models.list().data
    assert (model.id, model.type) == ("demo", "model") and model.display_name and model.created_at.year == 1970
    assert client.models.retrieve("demo").id == "demo"


def test_errors():
    for fields in [
        {"extra_body": {"temperature": 9}},
        {"max_tokens": -1},
        {"messages": []},
        {"messages": [{"role": "oracle", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x"}}]}]},
        {"tools": [weather]},  # the demo has no tools
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"extra_body": {"nonsense": 1}},
        {"messages": [{"role": "user", "content": "word " * 5000}]},
    ]:
        try:
            create(**fields)
        except anthropic.BadRequestError as error:
            assert (
                error.body["type"] == "error"
                and error.body["error"]["type"] == "invalid_request_error"
                and error.body["error"]["message"]
            ), error.body
            assert error.type == "invalid_request_error" and error.request_id == error.body["request_id"], error.body
            continue
        raise AssertionError(fields)
    with refused(anthropic.NotFoundError, type="not_found_error"):
        create(model="claude-x")
    with refused(anthropic.AuthenticationError, type="authentication_error"):
        keyed.with_options(api_key="wrong").messages.create(**ask)
    assert create(keyed).content[0].text == ANSWER
    assert Anthropic(base_url=KEYED_URL, auth_token=KEY, api_key=None).messages.create(**ask).content[0].text == ANSWER


def test_a_full_queue():
    long = {
        **ask,
        "messages": [{"role": "user", "content": "Tell me everything."}],
        "max_tokens": 4000,
        "stream": True,
        "extra_body": {"temperature": 1.0},
    }
    stop = []
    try:
        seen = 0
        while not seen:  # an answer at random may end early
            for _ in range(3):
                try:
                    stop.append(keyed.messages.create(**long))
                except anthropic.RateLimitError as error:
                    assert error.type == "rate_limit_error" and int(error.response.headers["retry-after"]) >= 1
                    seen += 1
    finally:
        for stream in stop:
            stream.close()
    assert create(keyed.with_options(max_retries=5)).content[0].text == ANSWER


async def test_async():
    async with AsyncAnthropic(base_url=URL, api_key="none", max_retries=0, _strict_response_validation=True) as aclient:
        answers = await asyncio.gather(*(aclient.messages.create(**ask) for _ in range(8)))
        assert {answer.content[0].text for answer in answers} == {ANSWER}
        async with aclient.messages.stream(**ask) as stream:
            assert (await stream.get_final_message()).content[0].text == ANSWER


if __name__ == "__main__":
    run(globals())
