"""The routed experts of one layer for your own engine: here a router, a shared part and a loop in numpy."""

import numpy as np

from moebius import MoE

# A layer of a model; "Qwen/Qwen3-30B-A3B", a folder or a GGUF file would do as well.
moe = MoE("demo", layer=0, num_gpu_experts=2)
print(
    f"{moe.num_experts} experts of {moe.hidden_size} x {moe.intermediate_size}, {moe.precision}, {moe.threads} threads"
)

rng = np.random.default_rng(0)
x = rng.standard_normal((5, moe.hidden_size)).astype(np.float32)
router = rng.standard_normal((moe.hidden_size, moe.num_experts)).astype(np.float32)

# The router is yours: here softmax, the best two, weights that add up to one.
logits = x @ router
topk_ids = np.argsort(-logits, axis=1)[:, :2].astype(np.int32)
topk_weights = np.take_along_axis(np.exp(logits), topk_ids, 1)
topk_weights = (topk_weights / topk_weights.sum(1, keepdims=True)).astype(np.float32)

# Experts 0 and 1 are "on your GPU": masked here, computed by you.
y = moe.forward(x, topk_ids, topk_weights)
for t, k in zip(*np.nonzero(topk_ids < 2)):
    gate, up, down = moe.expert_weights(topk_ids[t, k])
    a = gate @ x[t]
    y[t] += topk_weights[t, k] * (down @ (a / (1 + np.exp(-a)) * (up @ x[t])))

# The same with none of them masked: the flags are read at every call.
moe.gpu_experts_mask[:] = False
print("difference:", float(np.abs(moe.forward(x, topk_ids, topk_weights) - y).max()))
