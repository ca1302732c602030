"""A conversation, streamed: python chat.py [MODEL]"""

import sys

import moebius

llm = moebius.LLM(sys.argv[1] if len(sys.argv) > 1 else "demo")
messages: list[dict[str, object]] = []
for question in ["What is the capital of France?", "What is 2+2?"]:
    print(">", question)
    messages.append({"role": "user", "content": question})
    stream = llm.stream_chat(messages)
    for chunk in stream:
        print(chunk.text, end="", flush=True)
    print()
    messages.append(stream.output.message)
print(f"{stream.output.stats.completion_tokens} tokens, the first after {1000 * stream.output.stats.prefill_s:.0f} ms")

# An answer that must be one of these, and one that must be JSON.
text = llm.chat(messages[:1], moebius.SamplingParams(choice=["Paris", "Rome"])).text
print("choice:", text)
schema = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["sum"],
    "additionalProperties": False,
}
print("json:", llm.chat(messages[-2:-1], moebius.SamplingParams(temperature=0, json=schema)).text)
