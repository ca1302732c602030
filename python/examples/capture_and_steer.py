"""A direction from the residual stream, and what adding it does: python capture_and_steer.py [MODEL]"""

import sys

import moebius
import numpy as np

llm = moebius.LLM(sys.argv[1] if len(sys.argv) > 1 else "demo")
layer = llm.info["layers"] // 2

# The residual stream after the middle layer, at the last token of prompts of two kinds.
sums = [f"What is {n}+{m}?" for n in range(1, 4) for m in range(1, 4)]
places = [f"What is the capital of {country}?" for country in ("France", "Italy", "Spain", "Japan", "Germany")]
ends = [np.array([hidden[layer][-1] for hidden in llm.capture(prompts, layer)]) for prompts in (sums, places)]
print("captured", [rows.shape for rows in ends])

# The difference of their means is a direction. Added while a prompt of one kind is read, it pulls the answer towards the other.
direction = ends[1].mean(0) - ends[0].mean(0)
question = [{"role": "user", "content": "What is 2+2?"}]
greedy = moebius.SamplingParams(temperature=0, max_tokens=24)
for coefficient in (0, 1, 4, -4):
    steer = [moebius.Steer(layer, direction, coefficient, "prompt")]
    print(f"{coefficient:+d}", llm.chat(question, greedy, steer=steer).text)

# How far the steered stream has gone, layer by layer: nothing before, the direction itself where it was added.
plain, steered = (llm.capture(sums[0], steer=steer) for steer in ([], [moebius.Steer(layer, direction)]))
for at in plain:
    print(f"layer {at}: moved by {np.linalg.norm(steered[at] - plain[at], axis=1).mean() / np.linalg.norm(direction):.2f}")
