"""A direction from the residual stream, and what adding it does: python capture_and_steer.py [MODEL]"""

import sys

import moebius
import numpy as np

llm = moebius.LLM(sys.argv[1] if len(sys.argv) > 1 else "demo")
layer = llm.info["layers"] // 2


def prompts(questions: list[str]) -> list[list[int]]:
    return [
        llm.tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
        for text in questions
    ]


# The residual stream after the middle layer, where the answer begins, of questions of two kinds.
sums = prompts([f"What is {n}+{m}?" for n in range(1, 4) for m in range(1, 4)])
places = prompts([f"What is the capital of {country}?" for country in ("France", "Italy", "Spain", "Japan", "Germany")])
ends = [np.array([hidden[layer][-1] for hidden in llm.capture(kind, layer)]) for kind in (sums, places)]
print("captured", [rows.shape for rows in ends])

# The difference of their means is a direction. Added to the stream, it pulls the answer of one kind towards those of
# the other.
direction = ends[1].mean(0) - ends[0].mean(0)
greedy = moebius.SamplingParams(temperature=0, max_tokens=16)
for coefficient in (0.0, 0.5, 1.0, 2.0):
    steer = [moebius.Steer(layer, direction, coefficient, "prompt")]
    print(coefficient, llm.generate(sums[4], greedy, steer=steer).text)

# How far the steered stream has gone, layer by layer: nothing before, the direction itself where it was added.
plain, steered = (llm.capture(sums[0], steer=steer) for steer in ([], [moebius.Steer(layer, direction)]))
for at in plain:
    print(
        f"layer {at}: moved by {np.linalg.norm(steered[at] - plain[at], axis=1).mean() / np.linalg.norm(direction):.2f}"
    )
