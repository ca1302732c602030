"""Capture and steering against what Hugging Face's transformers compute with hooks."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from typing import Any

import moebius
import numpy as np
import pytest
from conftest import ROOT
from moebius import LLM, Capture, SamplingParams, Steer

FIXTURES = ROOT / "tests/fixtures"
TYPES = {"F32": np.float32, "I64": np.int64}


def tensors(model: str, file: str) -> dict[str, Any]:
    """A safetensors file."""
    data = (FIXTURES / model / file).read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    body = memoryview(data)[8 + length :]
    return {
        name: np.frombuffer(body[slice(*t["data_offsets"])], TYPES[t["dtype"]]).reshape(t["shape"])
        for name, t in header.items()
    }


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v2_lite"])
def model(request: pytest.FixtureRequest, cache: str) -> Iterator[tuple[str, LLM]]:
    # As exact as it gets, and in chunks that cut prompts.
    with LLM(
        FIXTURES / request.param,
        quiet=True,
        cache_dir=cache,
        device="cpu",
        experts="bf16",
        kv="bf16x2",
        max_batch_tokens=32,
    ) as llm:
        yield request.param, llm


def error(got: Any, want: Any) -> float:
    """The largest, relative to the largest magnitude of its row."""
    assert got.shape == want.shape and got.dtype == np.float32
    return float((np.abs(got - want).max(-1) / np.abs(want).max(-1)).max())


def test_what_is_captured_is_transformers(model: tuple[str, LLM]) -> None:
    name, llm = model
    reference = tensors(name, "reference.safetensors")
    prompts = [reference[f"{prompt}.input_ids"].tolist() for prompt in ("short", "mid")]
    alone = [llm.capture(prompt) for prompt in prompts]
    for prompt, ids, hidden, logits, beside in zip(
        ("short", "mid"), prompts, alone, llm.logits(prompts), llm.capture(prompts)
    ):
        assert sorted(hidden) == list(range(llm.info["layers"]))
        for layer, rows in hidden.items():
            assert rows.shape == (len(ids), llm.info["hidden_size"])
            assert error(rows, reference[f"{prompt}.hidden_states"][layer + 1]) < 1e-4
            assert (rows == beside[layer]).all()
        assert error(logits, reference[f"{prompt}.logits"]) < 1e-4
    some = llm.capture(prompts[1], 1, positions=[(3, 5), (20, None)])
    assert list(some) == [1] and (some[1] == alone[1][1][[3, 4, *range(20, 35)]]).all()


def test_what_steering_does_is_transformers(model: tuple[str, LLM]) -> None:
    name, llm = model
    steered = tensors(name, "reference_steered.safetensors")
    ids, vectors = steered["input_ids"].tolist(), steered["vectors"]
    steer = [
        Steer(layer, vectors[vector], float(coefficient), [(start, end)])
        for (layer, vector, start, end), coefficient in zip(steered["steers"].tolist(), steered["coefficients"])
    ]
    output = llm.generate(
        ids, SamplingParams(max_tokens=0), steer=steer, capture=Capture(logits=True, positions=[(12, 16)])
    )
    for layer, want in enumerate(steered["hidden_states"]):
        assert error(output.hidden[layer], want) < 1e-4
    assert output.logits is not None and error(output.logits, steered["logits"]) < 1e-4
    assert output.token_ids == [] and output.finish_reason == "length"


def test_generated_tokens(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    plain = llm.generate("What is", params, capture=Capture("all", logits=True))
    read = plain.prompt_token_ids + plain.token_ids[:-1]
    again = llm.capture(read)
    assert plain.logits is not None and plain.logits[-6:].argmax(-1).tolist() == plain.token_ids
    for layer, rows in plain.hidden.items():
        # The last token is never read.
        assert rows.shape == (len(read), llm.info["hidden_size"])
        assert (rows == again[layer]).all()
    generated = llm.generate("What is", params, capture=Capture([0], "generated"))
    assert (generated.hidden[0] == plain.hidden[0][-5:]).all() and generated.logits is None
    routed = llm.generate("What is", params, capture=Capture([], router=True))
    assert not routed.hidden and routed.token_ids == plain.token_ids and routed.router
    for ids, weights in routed.router.values():
        assert ids.shape == weights.shape and len(ids) == len(read) and ids.min() >= 0 and weights.min() > 0
        assert all(len(set(row)) == len(row) for row in ids.tolist())
    chat = llm.chat([{"role": "user", "content": "Hi"}], params, capture=0)
    assert len(chat.hidden[0]) == len(chat.prompt_token_ids) + len(chat.token_ids) - 1


def test_steering_changes_its_own_request_only(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    size = llm.info["hidden_size"]
    steer = Steer(1, np.random.default_rng(1).normal(size=size), 20.0)
    plain, steered = llm.generate("What is", params), llm.generate("What is", params, steer=[steer])
    assert plain.text != steered.text
    streams = [llm.stream("What is", params, steer=[steer] * (n % 2)) for n in range(6)]
    assert [stream.finish().text for stream in streams] == [plain.text, steered.text] * 3
    assert llm.generate("What is", params, steer=[Steer(1, [0.0] * size)]).text == plain.text
    assert llm.generate("What is", params).text == plain.text


def test_arrays_are_of_the_rows_themselves(llm: LLM) -> None:
    rows = llm.capture("What is", [0])[0]
    assert rows.flags.c_contiguous and rows.flags.writeable and not rows.flags.owndata, (
        "Rust's memory, not a copy of it"
    )
    stream = llm.stream("What is", SamplingParams(max_tokens=2), capture=0)
    next(stream)
    output = stream.finish()
    assert output.hidden[0] is stream.output.hidden[0]


def test_wrong_arguments(llm: LLM) -> None:
    size = llm.info["hidden_size"]
    wrong: list[tuple[Callable[[], Steer], type[Exception], str]] = [
        (lambda: Steer(99, [0.0] * size), ValueError, "layer 99"),
        (lambda: Steer(0, [0.0] * (size + 1)), ValueError, "numbers"),
        (lambda: Steer(0, [float("nan")] * size), ValueError, "finite"),
        (lambda: Steer(0, [0.0] * size, float("inf")), ValueError, "coefficient"),
        (lambda: Steer(0, [0.0] * size, positions="here"), ValueError, "'prompt'"),  # type: ignore[arg-type]
        (lambda: Steer(0, [0.0] * size, positions=[(5, 3)]), ValueError, "positions"),
        (lambda: Steer(0, [[0.0] * size]), ValueError, "one dimension"),
        (lambda: Steer(0, "x"), ValueError, "float"),
    ]
    for steer, kind, words in wrong:
        with pytest.raises(kind, match=words):
            llm.generate("x", steer=[steer()])
    with pytest.raises(ValueError, match="layer"):
        llm.capture("x", 99)
    with pytest.raises(ValueError, match="nothing"):
        llm.capture("x", [])
    assert isinstance(moebius.Capture(0), Capture)
