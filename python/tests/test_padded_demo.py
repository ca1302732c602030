# mypy: ignore-errors
"""The models that SGLang's GPU kernels take compute what the demo models compute."""

from __future__ import annotations

from pathlib import Path

import moebius
import numpy as np
import padded_demo
import pytest

DEMO = Path(__file__).resolve().parents[2] / "demo"
PROMPT = "<|bos|><|user|>What is the capital of France?<|end|><|assistant|>The capital of France is Paris.<|end|>" * 8


@pytest.mark.parametrize("name", ["moe-gqa", "moe-mla"])
def test_a_padded_model_is_the_same_function(name: str, cache: str, tmp_path: Path) -> None:
    padded_demo.pad(DEMO / name, tmp_path / name)
    logits = []
    for folder in (DEMO / name, tmp_path / name):
        with moebius.LLM(
            str(folder), quiet=True, cache_dir=cache, device="cpu", experts="bf16", kv="bf16x2"
        ) as llm:
            logits.append(llm.logits(PROMPT))
    assert np.abs(logits[0]).max() > 10
    assert np.abs(logits[0] - logits[1]).max() < 0.01
