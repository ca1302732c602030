"""OpenAI's package on /v1/responses; its client validates every answer and every event strictly."""

import json

import openai
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from common import ANSWER, QUESTION, TOOLS_URL, URL, WEATHER, is_weather, metric, refused, run, wait_for

client = OpenAI(base_url=URL + "/v1", api_key="none", max_retries=0, _strict_response_validation=True)
tooled = OpenAI(base_url=TOOLS_URL + "/v1", api_key="none", max_retries=0, _strict_response_validation=True)
create = client.responses.create
weather = {"type": "function", "name": "weather", "description": "The weather.", "parameters": WEATHER, "strict": True}
forced = {"model": "tools", "tools": [weather], "tool_choice": "required", "parallel_tool_calls": False}


class Point(BaseModel):
    x: int
    solid: bool


def test_plain():
    answer = create(model="demo", input=QUESTION)
    assert (answer.object, answer.status, answer.model, answer.output_text) == ("response", "completed", "demo", ANSWER)
    [message] = answer.output
    assert (message.type, message.role, message.status, message.content[0].type) == (
        "message",
        "assistant",
        "completed",
        "output_text",
    )
    usage = answer.usage
    assert (
        usage.input_tokens > 5
        and usage.output_tokens > 5
        and usage.total_tokens == usage.input_tokens + usage.output_tokens
    )
    assert (
        answer.error is None and answer.incomplete_details is None and answer.parallel_tool_calls and answer.tools == []
    )
    assert answer.tool_choice == "auto" and answer.text.format.type == "text"
    assert json.loads(answer.model_dump_json())["output"][0]["content"][0]["text"] == ANSWER


def test_fields_are_repeated():
    answer = create(
        model="demo",
        instructions="Be brief.",
        input=QUESTION,
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=40,
        metadata={"a": "b"},
        user="ann",
        store=False,
    )
    assert (answer.instructions, answer.temperature, answer.metadata, answer.max_output_tokens) == (
        "Be brief.",
        0.5,
        {"a": "b"},
        40,
    )
    assert abs(answer.top_p - 0.9) < 1e-6 and answer.user == "ann"


def test_conversation():
    items = [
        {"role": "developer", "content": "You are a helpful assistant."},
        {"role": "user", "content": [{"type": "input_text", "text": "Name the capital of Kenya."}]},
        {"role": "assistant", "content": "The capital of Kenya is Nairobi."},
        {"type": "message", "role": "user", "content": QUESTION},
    ]
    assert create(model="demo", input=items).output_text


def test_items_go_back_as_they_came():
    history = [{"role": "user", "content": QUESTION}]
    first = create(model="demo", input=history)
    history += first.output
    history.append({"role": "user", "content": "Name the capital of Kenya."})
    second = create(model="demo", input=history)
    history += [item.model_dump() for item in second.output]
    history.append({"role": "user", "content": QUESTION})
    third = create(model="demo", input=history)
    assert third.usage.input_tokens > second.usage.input_tokens > first.usage.input_tokens
    # The same as chat completions make of it.
    chat = client.chat.completions.create(
        model="demo",
        messages=[
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "Name the capital of Kenya."},
        ],
    )
    assert (
        chat.choices[0].message.content == second.output_text and chat.usage.prompt_tokens == second.usage.input_tokens
    )


def test_incomplete():
    answer = create(model="demo", input=QUESTION, max_output_tokens=3)
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete" and ANSWER.startswith(answer.output_text) and answer.output_text
    with client.responses.stream(model="demo", input=QUESTION, max_output_tokens=3) as stream:
        kinds = [event.type for event in stream]
    assert kinds[-1] == "response.incomplete", kinds


def test_stream_events():
    events = list(create(model="demo", input=QUESTION, stream=True))
    kinds = [event.type for event in events]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ], kinds
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ], kinds
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert "".join(event.delta for event in events[4:-4]) == ANSWER == events[-4].text
    assert events[0].response.status == "in_progress" and events[0].response.output == []
    assert len({event.item_id for event in events[4:-2]}) == 1 and events[-1].response.output[0].id == events[4].item_id
    assert events[-1].response.output_text == ANSWER and events[-1].response.usage.output_tokens > 5


def test_accumulator():
    with client.responses.stream(model="demo", input=QUESTION) as stream:
        texts = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert texts[-1] == ANSWER == final.output_text and final.status == "completed"
    plain = create(model="demo", input=QUESTION)
    assert plain.output_text == final.output_text and plain.usage.output_tokens == final.usage.output_tokens


def test_a_stream_that_is_closed_frees_its_request():
    stream = create(model="demo", input=QUESTION, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    wait_for(lambda: metric(URL, "requests_running") == 0)


def test_tools():
    answer = tooled.responses.create(**forced, input=QUESTION)
    [call] = [item for item in answer.output if item.type == "function_call"]
    assert call.name == "weather" and call.status == "completed" and call.call_id and call.id.startswith("fc")
    assert (
        is_weather(json.loads(call.arguments))
        and answer.tools[0].name == "weather"
        and answer.tool_choice == "required"
    )
    named = tooled.responses.create(
        **{**forced, "tool_choice": {"type": "function", "name": "weather"}}, input=QUESTION
    )
    assert named.output[-1].name == "weather" and named.tool_choice.name == "weather"
    assert tooled.responses.create(**{**forced, "tool_choice": "none"}, input=QUESTION).output_text == ANSWER
    history = [{"role": "user", "content": QUESTION}, *answer.output]
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": '{"sky": "clear"}'})
    again = tooled.responses.create(model="tools", tools=[weather], input=history, max_output_tokens=50)
    assert again.usage.input_tokens > answer.usage.input_tokens


def test_tools_streamed():
    with tooled.responses.stream(**forced, input=QUESTION) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[2] == "response.output_item.added" and kinds[-3:] == [
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ], kinds
    deltas = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    [call] = final.output
    assert deltas == call.arguments and is_weather(json.loads(deltas))


def test_json_schema():
    form = {"format": {"type": "json_schema", "name": "weather", "schema": WEATHER, "strict": True}}
    answer = create(model="demo", input=QUESTION, text=form)
    assert is_weather(json.loads(answer.output_text)) and answer.text.format.name == "weather"
    parsed = client.responses.parse(model="demo", input=QUESTION, text_format=Point)
    assert isinstance(parsed.output_parsed, Point)
    with client.responses.stream(model="demo", input=QUESTION, text_format=Point) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Point)


def test_errors():
    for fields, param in [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"temperature": 9}, "temperature"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
            "input[0].content",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": []}, "input"),
        ({"extra_body": {"nonsense": 1}}, "nonsense"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nonsense"}}}}, "text.format"),
    ]:
        with refused(openai.BadRequestError, param=param):
            create(**{"model": "demo", "input": QUESTION, **fields})
    with refused(openai.NotFoundError, code="model_not_found"):
        create(model="gpt-5", input=QUESTION)


async def test_async():
    async with AsyncOpenAI(
        base_url=URL + "/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as aclient:
        assert (await aclient.responses.create(model="demo", input=QUESTION)).output_text == ANSWER
        async with aclient.responses.stream(model="demo", input=QUESTION) as stream:
            async for _ in stream:
                pass
            assert (await stream.get_final_response()).output_text == ANSWER


if __name__ == "__main__":
    run(globals())
