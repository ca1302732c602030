# mypy: ignore-errors
"""The naive twin of `moebius.MoE`."""

import numpy as np


def reference(weights, x, ids, topk_weights, mask=None):
    """The sum in float64, token by token; `weights[e]` is gate, up, down."""
    x = np.asarray(x, np.float64)
    out = np.zeros_like(x)
    for t in range(x.shape[0]):
        for e, w in zip(ids[t], topk_weights[t]):
            if 0 <= e < len(weights) and not (mask is not None and mask[e]):
                gate, up, down = weights[e]
                a = gate @ x[t]
                out[t] += w * (down @ (a / (1 + np.exp(-a)) * (up @ x[t])))
    return out


def random_weights(rng, experts, intermediate, hidden):
    shapes = (experts, intermediate, hidden), (experts, intermediate, hidden), (experts, hidden, intermediate)
    return tuple((rng.standard_normal(s) / np.sqrt(s[-1])).astype(np.float32) for s in shapes)


def random_batch(rng, tokens, top_k, experts, hidden, dtype=np.float32):
    x = rng.standard_normal((tokens, hidden)).astype(dtype)
    ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)]) if tokens else np.zeros((0, top_k))
    return x, ids.astype(np.int32), rng.random((tokens, top_k)).astype(np.float32)


def error(got, expected):
    """The distance as a share of what is expected; where nothing is, the distance."""
    got = np.asarray(got, np.float64)
    return np.linalg.norm(got - expected) / (np.linalg.norm(expected) or 1.0)


# BF16 weights leave 16 bits of mantissa in activations; INT8 and INT4 weights quantize them to 8 bits.
TOLERANCE = {"bf16": 1e-4, "int8": 0.02, "int4": 0.02}
# What storing the sum adds.
ROUNDING = {"float32": 0.0, "float16": 1e-3, "bfloat16": 5e-3}
