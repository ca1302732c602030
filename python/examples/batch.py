"""Many prompts at once, then many tasks at once: python batch.py [MODEL]"""

import asyncio
import sys
import time

import moebius

llm = moebius.LLM(sys.argv[1] if len(sys.argv) > 1 else "demo", max_sequences=32)
prompts = [f"Count from {n} to {n + 4}." for n in range(40)]
params = moebius.SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)

# All prompts share each step of the model, which reads the weights once for all of them.
for batch in (prompts[:1], prompts):
    start = time.monotonic()
    outputs = llm.generate(batch, params)
    tokens = sum(output.stats.completion_tokens for output in outputs)
    print(f"{len(batch)} prompts: {tokens} tokens, {tokens / (time.monotonic() - start):.0f} a second")


# The same from tasks, as a server has them. A task that is cancelled cancels its request.
async def ask(prompt: str) -> str:
    return (await llm.agenerate(prompt, params)).text


async def ask_all() -> list[str]:
    return await asyncio.gather(*(ask(prompt) for prompt in prompts))


print("tasks say the same:", asyncio.run(ask_all()) == [output.text for output in outputs])
