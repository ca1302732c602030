"""The packages of OpenAI and Anthropic over several turns with tools, with the chat templates of models.

MOEBIUS_TEMPLATES: the servers by the names of their templates. The demo model knows no tools, so its calls are forced;
what it says of a result is free.
"""

import json
import os

from anthropic import Anthropic
from openai import OpenAI

from common import QUESTION, WEATHER, is_weather, run

SERVERS = json.loads(os.environ["MOEBIUS_TEMPLATES"])
NO_THOUGHTS = {"enable_thinking": False, "thinking": False}
weather = {"name": "weather", "description": "The weather.", "parameters": WEATHER}


def openai_turns(url):
    create = OpenAI(base_url=url + "/v1", api_key="none", max_retries=0).chat.completions.create
    common = {
        "model": "tools",
        "tools": [{"type": "function", "function": weather}],
        "parallel_tool_calls": False,
        "extra_body": {"chat_template_kwargs": NO_THOUGHTS},
    }
    messages = [{"role": "user", "content": QUESTION}]
    for turn in range(2):
        if turn == 0:
            [choice] = create(messages=messages, tool_choice="required", **common).choices
            [call] = choice.message.tool_calls
            assert choice.finish_reason == "tool_calls" and not choice.message.content, choice
            arguments, name, id = call.function.arguments, call.function.name, call.id
            messages.append(choice.message)
        else:
            name, id, arguments = "", "", ""
            named = {"type": "function", "function": {"name": "weather"}}
            for chunk in create(messages=messages, tool_choice=named, stream=True, **common):
                assert not chunk.choices[0].delta.content, chunk
                for call in chunk.choices[0].delta.tool_calls or []:
                    name += call.function.name or ""
                    id += call.id or ""
                    arguments += call.function.arguments or ""
            function = {"name": name, "arguments": arguments}
            call = {"id": id, "type": "function", "function": function}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        assert name == "weather" and id and is_weather(json.loads(arguments)), (name, id, arguments)
        messages.append({"role": "tool", "tool_call_id": id, "content": '{"sky": "clear"}'})
        answer = create(messages=messages, max_tokens=4, **common)
        assert answer.usage.prompt_tokens > 20 and answer.choices[0].finish_reason in ("stop", "length", "tool_calls")
        messages += [{"role": "assistant", "content": "Clear."}, {"role": "user", "content": "And now?"}]


def anthropic_turns(url):
    client = Anthropic(base_url=url, api_key="none", max_retries=0)
    tool = {"name": "weather", "description": "The weather.", "input_schema": WEATHER}
    common = {"model": "tools", "max_tokens": 500, "tools": [tool], "thinking": {"type": "disabled"}}
    messages = [{"role": "user", "content": QUESTION}]
    for turn in range(2):
        if turn == 0:
            choice = {"type": "any", "disable_parallel_tool_use": True}
            message = client.messages.create(messages=messages, tool_choice=choice, **common)
        else:
            choice = {"type": "tool", "name": "weather"}
            with client.messages.stream(messages=messages, tool_choice=choice, **common) as stream:
                message = stream.get_final_message()
        [use] = [block for block in message.content if block.type == "tool_use"]
        assert use.name == "weather" and is_weather(use.input) and message.stop_reason == "tool_use", message
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "clear"}
        messages += [{"role": "assistant", "content": [use.model_dump()]}, {"role": "user", "content": [result]}]
        assert client.messages.create(messages=messages, **common | {"max_tokens": 4}).usage.input_tokens > 20
        messages += [{"role": "assistant", "content": "Clear."}, {"role": "user", "content": "And now?"}]


class Turns:
    """A test with a name, which `run` wants."""

    def __init__(self, turns, name, url):
        self.__name__, self.turns, self.url = f"test_{turns.__name__} of {name}", turns, url

    def __call__(self):
        self.turns(self.url)


if __name__ == "__main__":
    both = (openai_turns, anthropic_turns)
    tests = [Turns(turns, name, url) for name, url in SERVERS.items() for turns in both]
    run({test.__name__: test for test in tests})
