"""OpenAI's package on /v1/chat/completions, /v1/completions and /v1/models.

Its client validates strictly here: a field that its types do not allow, in an answer or in any event, is an error.
"""

import asyncio
import json
import urllib.request
from typing import Literal

import openai
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

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

client = OpenAI(base_url=URL + "/v1", api_key="none", max_retries=0, _strict_response_validation=True)
tooled = OpenAI(base_url=TOOLS_URL + "/v1", api_key="none", max_retries=0, _strict_response_validation=True)
keyed = OpenAI(base_url=KEYED_URL + "/v1", api_key=KEY, max_retries=0, _strict_response_validation=True)
ask = [{"role": "user", "content": QUESTION}]
chat = client.chat.completions
weather = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": WEATHER}}
clock = {"type": "function", "function": {"name": "clock", "parameters": TIME}}


class Point(BaseModel):
    x: int
    color: Literal["red", "green"]
    solid: bool


def test_plain():
    answer = chat.create(model="demo", messages=ask)
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion" and answer.model == "demo"
    [choice] = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (choice.message.role, choice.message.content, choice.message.tool_calls) == ("assistant", ANSWER, None)
    usage = answer.usage
    assert usage.prompt_tokens > 5 and usage.completion_tokens > 5
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    dumped = answer.model_dump()
    assert (
        dumped["choices"][0]["message"]["content"] == ANSWER
        and dumped["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    )


def test_roles_and_parts():
    messages = [
        {"role": "developer", "content": "You are a helpful assistant."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Name the capital of "}, {"type": "text", "text": "Kenya."}],
        },
        {"role": "assistant", "content": "The capital of Kenya is Nairobi."},
        {"role": "user", "content": QUESTION, "name": "ann"},
    ]
    assert chat.create(model="demo", messages=messages).choices[0].message.content


def test_stream():
    chunks = list(chat.create(model="demo", messages=ask, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1 and all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    assert all(chunk.usage is None for chunk in chunks)


def test_stream_options():
    *chunks, last = chat.create(model="demo", messages=ask, stream=True, stream_options={"include_usage": True})
    assert last.choices == [] and last.usage == chat.create(model="demo", messages=ask).usage.model_copy(
        update={"prompt_tokens_details": last.usage.prompt_tokens_details}
    )
    assert all(chunk.usage is None for chunk in chunks)


def test_stream_helper():
    with chat.stream(model="demo", messages=ask) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert kinds == {"chunk", "content.delta", "content.done"}, kinds
    assert final.choices[0].message.content == ANSWER


def test_a_stream_that_is_closed_frees_its_request():
    stream = chat.create(model="demo", messages=ask, stream=True, max_tokens=3000, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    wait_for(lambda: metric(URL, "requests_running") == 0)


def test_n_stop_seed_limit():
    answer = chat.create(model="demo", messages=ask, n=3, temperature=1.5, seed=7, max_tokens=12)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    again = chat.create(model="demo", messages=ask, n=3, temperature=1.5, seed=7, max_tokens=12)
    assert [c.message.content for c in answer.choices] == [c.message.content for c in again.choices]
    other = chat.create(
        model="demo", messages=[{"role": "user", "content": "Tell me"}], n=8, temperature=2, seed=8, max_tokens=12
    )
    assert len({c.message.content for c in other.choices}) > 1
    streamed = ["", "", ""]
    for chunk in chat.create(model="demo", messages=ask, n=3, temperature=1.5, seed=7, max_tokens=12, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == [c.message.content for c in answer.choices]

    [stopped] = chat.create(model="demo", messages=ask, stop=[" = ", "never"]).choices
    assert (stopped.message.content, stopped.finish_reason) == ("2 + 2", "stop")
    [cut] = chat.create(model="demo", messages=ask, max_completion_tokens=3).choices
    assert cut.finish_reason == "length" and ANSWER.startswith(cut.message.content)


def test_logprobs():
    [choice] = chat.create(model="demo", messages=ask, logprobs=True, top_logprobs=3).choices
    tokens = choice.logprobs.content
    spelled = b"".join(bytes(token.bytes) for token in tokens).decode()
    assert spelled.startswith(ANSWER), spelled
    for token in tokens:
        assert token.logprob <= 0 and len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob >= token.top_logprobs[2].logprob
        assert token.token == token.top_logprobs[0].token  # greedy
    streamed = []
    for chunk in chat.create(model="demo", messages=ask, logprobs=True, stream=True):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content
    assert [token.token for token in streamed] == [token.token for token in tokens]


def test_logit_bias_and_penalties():
    first = chat.create(model="demo", messages=ask, logprobs=True, max_tokens=1).choices[0].logprobs.content[0].token
    request = urllib.request.Request(
        URL + "/tokenize", data=json.dumps({"prompt": first, "add_special_tokens": False}).encode()
    )
    body = json.load(urllib.request.urlopen(request))
    [token] = body["tokens"]
    without = (
        chat.create(model="demo", messages=ask, max_tokens=1, logit_bias={str(token): -100}).choices[0].message.content
    )
    assert without != first
    assert chat.create(
        model="demo",
        messages=ask,
        presence_penalty=1,
        frequency_penalty=-1,
        user="ann",
        metadata={"a": "b"},
        store=False,
    ).choices


def test_json():
    prompt = [{"role": "user", "content": "JSON"}]
    [choice] = chat.create(
        model="demo", messages=prompt, response_format={"type": "json_object"}, max_tokens=2000
    ).choices
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)
    schema = {"name": "weather", "strict": True, "schema": WEATHER}
    [choice] = chat.create(
        model="demo", messages=prompt, response_format={"type": "json_schema", "json_schema": schema}
    ).choices
    assert choice.finish_reason == "stop" and is_weather(json.loads(choice.message.content))


def test_parse():
    [choice] = chat.parse(model="demo", messages=ask, response_format=Point).choices
    assert isinstance(choice.message.parsed, Point), choice
    with chat.stream(model="demo", messages=ask, response_format=Point) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Point)


def test_parse_tells_what_is_cut_off():
    with refused(openai.LengthFinishReasonError):
        chat.parse(model="demo", messages=ask, response_format=Point, max_tokens=2)


def call_of(message, name):
    [call] = message.tool_calls
    assert call.type == "function" and call.function.name == name and call.id
    return json.loads(call.function.arguments)


def test_tools():
    create = tooled.chat.completions.create
    [choice] = create(
        model="tools",
        messages=ask,
        tools=[weather, clock],
        tool_choice={"type": "function", "function": {"name": "weather"}},
    ).choices
    assert choice.finish_reason in ("stop", "tool_calls") and choice.message.content is None
    assert is_weather(call_of(choice.message, "weather"))
    [choice] = create(
        model="tools", messages=ask, tools=[weather], tool_choice="required", parallel_tool_calls=False
    ).choices
    assert choice.finish_reason == "tool_calls", choice
    assert is_weather(call_of(choice.message, "weather"))
    [free] = create(model="tools", messages=ask, tools=[weather], tool_choice="none").choices
    assert free.message.tool_calls is None and free.message.content == ANSWER
    [free] = create(model="tools", messages=ask, tools=[weather], max_tokens=200).choices
    assert free.message.content or free.message.tool_calls
    [strict] = create(
        model="tools",
        messages=ask,
        tools=[{"type": "function", "function": {**weather["function"], "strict": True}}],
        tool_choice="required",
        parallel_tool_calls=False,
    ).choices
    assert is_weather(call_of(strict.message, "weather"))


def test_tools_streamed():
    stream = tooled.chat.completions.create(
        model="tools",
        messages=ask,
        tools=[weather, clock],
        tool_choice="required",
        parallel_tool_calls=False,
        stream=True,
    )
    ids, name, arguments, ends = [], "", "", []
    for chunk in stream:
        [choice] = chunk.choices
        ends += [choice.finish_reason] if choice.finish_reason else []
        for call in choice.delta.tool_calls or []:
            assert call.index == 0
            ids += [call.id] if call.id else []
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    assert len(ids) == 1 and ends == ["tool_calls"], (ids, ends)
    assert is_weather(json.loads(arguments)) if name == "weather" else json.loads(arguments)["zone"] in ("UTC", "CET")


def test_tools_with_the_helper():
    strict = openai.pydantic_function_tool(Point, name="draw")
    with tooled.chat.completions.stream(
        model="tools", messages=ask, tools=[strict], tool_choice={"type": "function", "function": {"name": "draw"}}
    ) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds, kinds
    assert isinstance(message.tool_calls[0].function.parsed_arguments, Point)


def test_a_result_goes_back():
    create = tooled.chat.completions.create
    first = (
        create(model="tools", messages=ask, tools=[weather], tool_choice="required", parallel_tool_calls=False)
        .choices[0]
        .message
    )
    messages = [*ask, first, {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": '{"sky": "clear"}'}]
    answer = create(model="tools", messages=messages, tools=[weather], max_tokens=50)
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")
    assert answer.usage.prompt_tokens > 40
    dumped = [
        *ask,
        first.model_dump(),
        {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": [{"type": "text", "text": "x"}]},
    ]
    assert create(model="tools", messages=dumped, tools=[weather], max_tokens=5).choices


def test_tools_without_a_template_are_refused():
    with refused(openai.BadRequestError, param="tools"):
        chat.create(model="demo", messages=ask, tools=[weather])


def test_errors():
    for fields, param, code in [
        ({"temperature": 9}, "temperature", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "oracle", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, "messages", "context_length_exceeded"),
        ({"modalities": ["audio"]}, "modalities", "unsupported_parameter"),
        ({"extra_body": {"temprature": 1}}, "temprature", "unknown_parameter"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}},
            "response_format",
            None,
        ),
        ({"logprobs": False, "top_logprobs": 3}, "top_logprobs", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ]:
        with refused(
            openai.BadRequestError,
            param=param,
            status_code=400,
            type="invalid_request_error",
            **({"code": code} if code else {}),
        ):
            chat.create(**{"model": "demo", "messages": ask, **fields})
    with refused(openai.NotFoundError, code="model_not_found", param="model"):
        chat.create(model="gpt-4", messages=ask)
    with refused(openai.NotFoundError, code="unknown_url"):
        client.embeddings.create(model="demo", input="x")


def test_keys():
    assert keyed.models.list().data
    with refused(openai.AuthenticationError, code="invalid_api_key", status_code=401):
        keyed.with_options(api_key="wrong").chat.completions.create(model="demo", messages=ask)


def test_a_full_queue():
    """One runs, one waits, the third is told when to come back; with retries the package waits for as long itself."""
    long = {"model": "demo", "messages": ask, "stream": True, "max_tokens": 3500, "extra_body": {"ignore_eos": True}}
    stop = []
    try:
        for place in ("requests_running", "requests_waiting"):
            stop.append(keyed.chat.completions.create(**long))
            wait_for(lambda: metric(KEYED_URL, place, KEY) == 1)
        with refused(openai.RateLimitError, code="rate_limit_exceeded", status_code=429) as _:
            keyed.chat.completions.create(model="demo", messages=ask)
        try:
            keyed.chat.completions.create(model="demo", messages=ask)
        except openai.RateLimitError as error:
            assert int(error.response.headers["retry-after"]) >= 1
    finally:
        for stream in stop:
            stream.close()
    patient = keyed.with_options(max_retries=5)
    assert patient.chat.completions.create(model="demo", messages=ask).choices[0].message.content == ANSWER


def test_raw_responses():
    raw = chat.with_raw_response.create(model="demo", messages=ask, extra_headers={"X-Request-Id": "mine-1"})
    assert raw.headers["x-request-id"] == "mine-1" and raw.request_id == "mine-1"
    answer = raw.parse()
    assert answer.choices[0].message.content == ANSWER and answer._request_id == "mine-1"
    with chat.with_streaming_response.create(model="demo", messages=ask) as streamed:
        assert json.loads(streamed.read())["choices"][0]["message"]["content"] == ANSWER


def test_timeouts():
    with refused(openai.APITimeoutError):
        client.with_options(timeout=0.05).chat.completions.create(
            model="demo", messages=ask, max_tokens=3500, extra_body={"ignore_eos": True}
        )
    wait_for(lambda: metric(URL, "requests_running") == 0)


def test_completions():
    create = client.completions.create
    prompt = "<|bos|><|user|>" + QUESTION + "<|end|><|assistant|>"
    answer = create(model="demo", prompt=prompt, max_tokens=32)
    [choice] = answer.choices
    assert answer.object == "text_completion" and choice.text.strip().startswith("2"), choice
    # OpenAI sends null until the end, which the package's own types do not allow.
    lenient = OpenAI(base_url=URL + "/v1", api_key="none").completions.create
    *chunks, last = (chunk.choices[0] for chunk in lenient(model="demo", prompt=prompt, max_tokens=32, stream=True))
    assert "".join(chunk.text for chunk in [*chunks, last]) == choice.text
    assert last.finish_reason == choice.finish_reason and not any(chunk.finish_reason for chunk in chunks)
    [echoed] = create(model="demo", prompt="2 + 2", max_tokens=2, echo=True).choices
    assert echoed.text.startswith("2 + 2")
    several = create(model="demo", prompt=["a", "b"], n=2, max_tokens=3)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    [logged] = create(model="demo", prompt=prompt, max_tokens=4, logprobs=2).choices
    assert len(logged.logprobs.tokens) == len(logged.logprobs.token_logprobs) == len(logged.logprobs.top_logprobs) == 4
    assert "".join(logged.logprobs.tokens) == logged.text and logged.finish_reason == "length"
    assert create(model="demo", prompt=[5, 6, 7], max_tokens=1).choices
    with refused(openai.BadRequestError, param="suffix", code="unsupported_parameter"):
        create(model="demo", prompt="a", suffix="b")


def test_models():
    [model] = client.models.list().data
    assert model.id == "demo" and model.object == "model" and model.owned_by == "moebius"
    assert client.models.retrieve("demo").id == "demo"
    with refused(openai.NotFoundError, code="model_not_found"):
        client.models.retrieve("other")


async def test_async():
    async with AsyncOpenAI(
        base_url=URL + "/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as aclient:
        create = aclient.chat.completions.create
        answers = await asyncio.gather(*(create(model="demo", messages=ask) for _ in range(16)))
        assert {answer.choices[0].message.content for answer in answers} == {ANSWER}
        text = ""
        async for chunk in await create(model="demo", messages=ask, stream=True):
            text += chunk.choices[0].delta.content or ""
        assert text == ANSWER
        task = asyncio.create_task(create(model="demo", messages=ask, max_tokens=3500, extra_body={"ignore_eos": True}))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    wait_for(lambda: metric(URL, "requests_running") == 0)


if __name__ == "__main__":
    run(globals())
