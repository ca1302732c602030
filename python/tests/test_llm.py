"""`moebius.LLM` on the demo model: the same answers as the command, alone and together, whole and as they come."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import moebius
import numpy as np
import pytest
from conftest import ROOT
from moebius import LLM, SamplingParams

COMMAND = str(Path(sys.executable).with_name("moebius"))
PROMPTS = ["What is", "The capital of France", "Count from 1 to 5.", "x"]
SHORT = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def test_an_answer_is_the_commands(llm: LLM, cache: str) -> None:
    command = [COMMAND, "generate", "demo", "What is", "--json", "--max-tokens=12", "--ignore-eos", "--temperature=0"]
    said = subprocess.run([*command, "--device=cpu", "--cache-dir", cache], capture_output=True, text=True, check=True)
    theirs = json.loads(said.stdout)
    ours = llm.generate("What is", SHORT)
    assert (ours.token_ids, ours.text, ours.finish_reason) == (
        theirs["tokens"],
        theirs["text"],
        theirs["finish_reason"],
    )
    assert len(ours.token_ids) == 12 and ours.finish_reason == "length"
    assert ours.stats.completion_tokens == 12 and ours.stats.prompt_tokens == len(ours.prompt_token_ids)


def test_the_command_fails_as_a_command(cache: str) -> None:
    said = subprocess.run([COMMAND, "generate", "/nowhere/at/all", "x"], capture_output=True, text=True)
    assert said.returncode == 1 and said.stderr.startswith("error: ")


def test_a_batch_is_its_prompts_one_by_one(llm: LLM) -> None:
    alone = [llm.generate(prompt, SHORT) for prompt in PROMPTS]
    assert [output.token_ids for output in llm.generate(PROMPTS, SHORT)] == [output.token_ids for output in alone]
    ids = [output.prompt_token_ids for output in alone]
    assert [output.text for output in llm.generate(ids, SHORT)] == [output.text for output in alone]
    assert llm.generate(ids[0], SHORT).text == alone[0].text
    assert llm.generate(np.array(ids[0]), SHORT).text == alone[0].text  # type: ignore[call-overload]
    assert llm.generate(list[str](), SHORT) == []
    lengths = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 2, 3, 4)]
    assert [len(output.token_ids) for output in llm.generate(PROMPTS, lengths)] == [1, 2, 3, 4]


def test_more_prompts_than_may_wait(cache: str) -> None:
    with LLM("demo", quiet=True, cache_dir=cache, device="cpu", max_queue=2, max_sequences=2) as llm:
        outputs = llm.generate(["What is"] * 20, SHORT)
        assert len(outputs) == 20 and len({output.text for output in outputs}) == 1
        streams = []
        with pytest.raises(moebius.Busy, match="try again"):
            for _ in range(10):
                streams.append(llm.stream("x", SamplingParams(max_tokens=None, ignore_eos=True)))
        assert isinstance(moebius.Busy("x"), moebius.Error) and isinstance(moebius.Busy("x"), RuntimeError)


def test_chunks_join_to_the_text(llm: LLM) -> None:
    stream = llm.stream("What is", SHORT)
    chunks = list(stream)
    whole = llm.generate("What is", SHORT)
    assert "".join(map(str, chunks)) == whole.text == stream.output.text
    assert sum((chunk.token_ids for chunk in chunks), []) == whole.token_ids == stream.output.token_ids
    assert len(chunks) > 3 and list(stream) == []


def test_a_closed_stream_is_cancelled(llm: LLM) -> None:
    with llm.stream("What is", SamplingParams(max_tokens=None, ignore_eos=True)) as stream:
        next(stream)
        assert stream.output.finish_reason is None and stream.output.stats.completion_tokens >= 1
    with pytest.raises(moebius.Error, match="closed"):
        next(stream)


def test_sampling(llm: LLM) -> None:
    def text(**how: object) -> str:
        params = SamplingParams(max_tokens=20, ignore_eos=True, **how)  # type: ignore[arg-type]
        return llm.generate("What", params).text

    hot = {"temperature": 5.0}
    assert text(**hot, seed=1) == text(**hot, seed=1) != text(**hot, seed=-2)
    assert text(**hot, top_k=1) == text(temperature=0)
    token = llm.generate("What", SHORT).token_ids[0]
    assert llm.generate("What", SamplingParams(temperature=0, max_tokens=1, logit_bias={token: -100.0})).token_ids != [
        token
    ]
    whole = llm.chat([{"role": "user", "content": "What is the capital of France?"}], SHORT)
    stopped = llm.chat(
        [{"role": "user", "content": "What is the capital of France?"}],
        SamplingParams(temperature=0, stop=whole.text[4:8]),
    )
    assert stopped.text == whole.text[:4] and stopped.finish_reason == "stop"


def test_logprobs(llm: LLM) -> None:
    output = llm.generate("What is", SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=3))
    assert [entry.token_id for entry in output.logprobs] == output.token_ids
    for entry in output.logprobs:
        assert len(entry.top) == 3 and entry.top[entry.token_id] == entry.logprob == max(entry.top.values()) <= 0
    assert llm.generate("What is", SHORT).logprobs == []


def test_forms(llm: LLM) -> None:
    def text(**form: object) -> str:
        params = SamplingParams(temperature=0, max_tokens=200, **form)  # type: ignore[arg-type]
        return llm.generate("What is", params).text

    assert text(choice=["maybe", "perhaps"]) in ("maybe", "perhaps")
    assert text(regex="[0-9]{3}-[0-9]{2}").replace("-", "").isdigit()
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "maximum": 9}},
        "required": ["n"],
        "additionalProperties": False,
    }
    assert isinstance(json.loads(text(json=schema))["n"], int)
    assert isinstance(json.loads(text(json=json.dumps(schema)))["n"], int)
    assert text(grammar='start: "a" "b"') == "ab"
    with pytest.raises(ValueError, match="one format"):
        text(choice=["a"], regex="b")
    with pytest.raises(ValueError, match="enforced"):
        text(regex="(")


def test_chat(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    output = llm.chat(messages, SamplingParams(temperature=0))
    assert "Paris" in output.text and output.finish_reason == "stop"
    assert output.prompt_token_ids == llm.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert "".join(map(str, llm.stream_chat(messages, SamplingParams(temperature=0)))) == output.text
    again = llm.chat([*messages, output.message, messages[0]], SamplingParams(temperature=0, max_tokens=5))
    assert len(again.prompt_token_ids) > len(output.prompt_token_ids)
    picked = llm.chat(messages, SamplingParams(choice=["Rome", "Oslo"]))
    assert picked.text in ("Rome", "Oslo")


def test_tools(llm: LLM) -> None:
    tools = [
        {
            "type": "function",
            "function": {
                "name": "add",
                "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            },
        }
    ]
    messages = [{"role": "user", "content": "What is 2+2?"}]
    try:
        output = llm.chat(messages, SamplingParams(temperature=0, max_tokens=None), tools=tools, tool_choice="required")
    except ValueError as error:
        assert "tools" in str(error)
        return
    assert output.finish_reason == "tool_calls" and output.tool_calls[0].name == "add"
    assert isinstance(json.loads(output.tool_calls[0].arguments)["a"], int)
    assert output.message["tool_calls"][0]["function"]["name"] == "add"


def test_tokenizer(llm: LLM) -> None:
    tokenizer = llm.tokenizer
    ids = tokenizer.encode("naïve 🙂 text")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "naïve 🙂 text"
    assert all(0 <= id < tokenizer.vocab_size for id in ids)
    assert tokenizer.eos_token_ids and tokenizer.decode(tokenizer.eos_token_ids) != ""
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert "Hi" in text and tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}]) == tokenizer.encode(
        text, False
    )


def test_hostile_templates(cache: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "demo/moe-gqa", tmp_path, dirs_exist_ok=True)
    template = tmp_path / "chat_template.jinja"
    template.write_text("{% if messages[0].content == 'x' %}{{ [1]|batch(10**10, 'x')|list }}{% endif %}fine")
    with LLM(str(tmp_path), quiet=True, cache_dir=cache, device="cpu") as llm:
        for _ in range(3):
            with pytest.raises(ValueError, match="more than 192 MiB"):
                llm.chat([{"role": "user", "content": "x"}])
            assert llm.tokenizer.apply_chat_template([{"role": "user", "content": "y"}], tokenize=False) == "fine"
    template.write_text("{{ 1" + "+1" * 100_000 + " }}")
    with pytest.raises(moebius.Error, match="nests too deeply.*chat_template.jinja"):
        LLM(str(tmp_path), quiet=True, cache_dir=cache, device="cpu")


def test_options(llm: LLM, cache: str) -> None:
    names = [name for name, _, _ in moebius._moebius.engine_options()]
    assert sorted(names) == sorted(moebius.EngineOptions.__annotations__)
    assert llm.info["model"] == "demo" and llm.info["device"] == "cpu"
    with LLM(
        "demo",
        quiet=True,
        cache_dir=cache,
        device="cpu",
        max_context=64,
        threads=1,
        experts="bf16",
        no_prefix_cache=True,
        lock=False,
    ) as other:
        assert (other.info["max_context"], other.info["threads"], other.info["experts"]) == (64, 1, "bf16")
        # Two engines in one process do not disturb each other.
        assert other.generate("What is", SHORT).token_ids and llm.generate("What is", SHORT).token_ids


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ({"max_contxt": 64}, TypeError, "did you mean 'max_context'"),
        ({"experts": "int3"}, ValueError, "use auto, bf16"),
        ({"threads": 0}, ValueError, "give at least 1"),
        ({"lock": "yes"}, TypeError, "True or False"),
        ({"max_context": "many"}, ValueError, "invalid value 'many'"),
    ],
)
def test_wrong_options(how: dict[str, object], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        LLM("demo", quiet=True, **how)  # type: ignore[arg-type]


def test_wrong_arguments(llm: LLM) -> None:
    for prompt, kind, words in [
        ("", ValueError, "empty"),
        ([1, 10**6], ValueError, "vocabulary"),
        ([-1], TypeError, "token ids"),
        (3.5, TypeError, "float"),
        (None, TypeError, "None"),
        ([["x"]], TypeError, "token ids"),
        ([0] * (llm.info["max_context"] + 1), ValueError, "context"),
    ]:
        with pytest.raises(kind, match=words):
            llm.generate(prompt, SHORT)  # type: ignore[call-overload]
    for how in [{"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -1}, {"max_tokens": -1}, {"stop": ""}]:
        with pytest.raises(ValueError):
            llm.generate("x", SamplingParams(**how))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        llm.generate("x", SamplingParams(temperature="hot"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 prompts but 1 sampling_params"):
        llm.generate(["x", "y"], [SHORT])
    with pytest.raises(ValueError, match="messages"):
        llm.chat([])
    with pytest.raises(ValueError, match="role"):
        llm.chat([{"role": "nobody", "content": "x"}])
    with pytest.raises(TypeError, match="JSON"):
        llm.chat([{"role": "user", "content": object()}])
    with pytest.raises(ValueError, match="no directory"):
        LLM("/nowhere/at/all", quiet=True)


def test_a_broken_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(moebius.Error):
        LLM(tmp_path, quiet=True)


def test_closed(cache: str) -> None:
    llm = LLM("demo", quiet=True, cache_dir=cache, device="cpu")
    stream = llm.stream("x", SamplingParams(max_tokens=None, ignore_eos=True))
    next(stream)
    llm.close()
    llm.close()
    for use in (lambda: llm.generate("x"), lambda: next(stream), lambda: llm.tokenizer.encode("x"), lambda: llm.info):
        with pytest.raises(moebius.Error, match="closed"):
            use()
