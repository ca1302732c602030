# mypy: ignore-errors
"""A whole SGLang server with Moebius's experts beside the same server with all experts on the GPU: `make sglang`.

python whole_sglang.py [--layers N] [--gpu-experts N] [--thresholds N,0] [--method M] [-- SGLANG_FLAG...]

Makes a model of random weights in the shape of Qwen3-30B-A3B, with N of its layers, and asks every server the same: 20
greedy answers and their log probabilities, those of a prompt of 1,500 tokens, decode of 1, 8 and 32 requests, prompts
of 512 and 8,192 tokens. Fails where a server does not start, does not answer, or takes the first one's tokens for less
likely than that one's own noise explains: random weights have near-ties everywhere. Skips by name without SGLang or a
GPU.
"""

import argparse
import concurrent.futures
import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDTH, EXPERTS, TOP_K, VOCABULARY = 2048, 32, 4, 128, 768, 128, 8, 4096


def make_model(folder, layers):
    """A checkpoint of random weights in the Hugging Face layout, in BF16."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    index = {}

    def numbers(rows, cols, gain=1.0):
        return (torch.randn(rows, cols, device="cuda") * gain * cols**-0.5).to(torch.bfloat16)

    def save(name, tensors):
        tensors = {key: tensor.cpu().contiguous() for key, tensor in tensors.items()}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, name))

    def ones(n):
        return torch.ones(n, dtype=torch.bfloat16)

    def layer(prefix):
        attention, experts = prefix + "self_attn.", prefix + "mlp.experts."
        tensors = {
            prefix + "input_layernorm.weight": ones(HIDDEN),
            prefix + "post_attention_layernorm.weight": ones(HIDDEN),
            prefix + "mlp.gate.weight": numbers(EXPERTS, HIDDEN, 2.0),
            attention + "q_norm.weight": ones(HEAD_DIM),
            attention + "k_norm.weight": ones(HEAD_DIM),
            attention + "q_proj.weight": numbers(HEADS * HEAD_DIM, HIDDEN),
            attention + "k_proj.weight": numbers(KV_HEADS * HEAD_DIM, HIDDEN),
            attention + "v_proj.weight": numbers(KV_HEADS * HEAD_DIM, HIDDEN),
            attention + "o_proj.weight": numbers(HIDDEN, HEADS * HEAD_DIM),
        }
        for expert in range(EXPERTS):
            # So that the sum of eight weighs as much as the stream it is added to.
            for name, rows, cols, gain in [
                ("gate", WIDTH, HIDDEN, 1.5),
                ("up", WIDTH, HIDDEN, 1.5),
                ("down", HIDDEN, WIDTH, 2.0),
            ]:
                tensors[f"{experts}{expert}.{name}_proj.weight"] = numbers(rows, cols, gain)
        return tensors

    for i in range(layers):
        save(f"model-{i:05}.safetensors", layer(f"model.layers.{i}."))
    rest = {
        "model.embed_tokens.weight": numbers(VOCABULARY, HIDDEN, HIDDEN**0.5),
        "model.norm.weight": ones(HIDDEN),
        "lm_head.weight": numbers(VOCABULARY, HIDDEN, 4.0),
    }
    save("model-rest.safetensors", rest)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config = dict(
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        attention_bias=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        decoder_sparse_step=1,
        head_dim=HEAD_DIM,
        hidden_act="silu",
        hidden_size=HIDDEN,
        intermediate_size=6144,
        max_position_embeddings=16384,
        max_window_layers=layers,
        mlp_only_layers=[],
        moe_intermediate_size=WIDTH,
        norm_topk_prob=True,
        num_attention_heads=HEADS,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        num_hidden_layers=layers,
        num_key_value_heads=KV_HEADS,
        output_router_logits=False,
        rms_norm_eps=1e-6,
        rope_scaling=None,
        rope_theta=1000000.0,
        sliding_window=None,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        use_cache=True,
        use_sliding_window=False,
        vocab_size=VOCABULARY,
    )
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(dict(bos_token_id=1, eos_token_id=2)))
    # Prompts are given as numbers; SGLang wants a tokenizer all the same.
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(dict(tokenizer_class="PreTrainedTokenizerFast", eos_token="<eos>", pad_token="<pad>"))
    )


class Server:
    """SGLang on a free port, its log in a file."""

    def __init__(self, log, flags, environment):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self.log, start = f"http://127.0.0.1:{port}", log, time.monotonic()
        with open(log, "w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(port), *flags],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | environment,
                start_new_session=True,
            )
        while "fired up and ready" not in log.read_text(errors="replace"):
            if self.process.poll() is not None or time.monotonic() - start > 400:
                self.stop()
                lines = [line for line in log.read_text(errors="replace").splitlines() if "server_args=" not in line]
                raise SystemExit("the server did not start:\n" + "\n".join(line[:300] for line in lines[-50:]))
            time.sleep(0.5)
        self.ready_s = time.monotonic() - start

    def stop(self):
        for how in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, how)
            except ProcessLookupError:
                break
            time.sleep(2)
        self.process.wait()

    def generate(self, ids, tokens, **more):
        body = dict(input_ids=ids, sampling_params=dict(temperature=0, max_new_tokens=tokens, ignore_eos=True), **more)
        header = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + "/generate", json.dumps(body).encode(), header)
        return json.load(urllib.request.urlopen(request, timeout=300))

    def seconds(self, ids, tokens):
        start = time.perf_counter()
        self.generate(ids, tokens)
        return time.perf_counter() - start


def prompt(tokens, seed):
    numbers = random.Random(seed)
    return [numbers.randrange(3, VOCABULARY) for _ in range(tokens)]


def long_prompt(server):
    """The log probabilities of the last 256 tokens of 1,500."""
    reply = server.generate(prompt(1500, 77), 1, return_logprob=True, logprob_start_len=1500 - 257)
    return [entry[0] for entry in reply["meta_info"]["input_token_logprobs"][-256:]]


def mean_difference(a, b):
    return sum(abs(x - y) for x, y in zip(a, b)) / len(b)


def ask(server, given):
    """Answers, and how much less likely this server takes `given` answers to be than who gave them, in the mean."""
    answers = []
    for i in range(20):
        reply = server.generate(prompt(8 + 3 * i, i), 48, return_logprob=True)
        logprobs = [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
        answers.append(dict(ids=reply["output_ids"], logprobs=logprobs))
    same, differences = 0, []
    for i, (own, other) in enumerate(zip(answers, given or answers)):
        same += sum(a == b for a, b in zip(own["ids"], other["ids"]))
        ids = prompt(8 + 3 * i, i)
        reply = server.generate(ids + other["ids"], 1, return_logprob=True, logprob_start_len=len(ids) - 1)
        seen = [entry[0] for entry in reply["meta_info"]["input_token_logprobs"]][-len(other["ids"]) :]
        differences += [abs(a - b) for a, b in zip(seen, other["logprobs"])]
    return answers, same / sum(len(answer["ids"]) for answer in answers), sum(differences) / len(differences)


def speeds(server):
    """Tokens per second: of three prompts the last, of three rounds of decode the best."""
    rates = {}
    for tokens in (512, 8192):
        for seed in range(3):
            rates[f"prompt_{tokens}"] = tokens / server.seconds(prompt(tokens, 1000 * tokens + seed), 1)
    for requests in (1, 8, 32):
        with concurrent.futures.ThreadPoolExecutor(requests) as pool:
            took = {1: [], 129: []}
            for seed in range(3):
                seeds = [100_000 * requests + 1000 * seed + i for i in range(requests)]
                for tokens, times in took.items():
                    start = time.perf_counter()
                    list(pool.map(lambda i: server.generate(prompt(64, i + tokens), tokens), seeds))
                    times.append(time.perf_counter() - start)
            rates[f"decode_{requests}"] = 128 * requests / (min(took[129]) - min(took[1]))
    return rates


def main():
    own, flags = sys.argv[1:], []
    if "--" in own:
        own, flags = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--gpu-experts", type=int, default=16, help="of each layer, on the GPU")
    parser.add_argument("--thresholds", default="1024,0", help="of --kt-gpu-prefill-token-threshold, a server each")
    parser.add_argument("--method", default="BF16", help="--kt-method; AMXINT4 computes in INT4")
    parser.add_argument("--model", type=Path, help="made by an earlier run, and kept; made there if it is not")
    parser.add_argument("--out", type=Path, help="folder of logs and results")
    given = parser.parse_args(own)

    for package, command in [("torch", "sglang"), ("sglang", "sglang"), ("moebius", "./python")]:
        if importlib.util.find_spec(package) is None:
            return print(f"skipped: {package} is not installed (pip install {command})")
    import torch

    if not torch.cuda.is_available():
        return print("skipped: there is no GPU, and a whole SGLang server is tested on one")
    del torch

    scratch = tempfile.TemporaryDirectory()
    model, out = given.model or Path(scratch.name) / "model", given.out or Path(scratch.name)
    out.mkdir(parents=True, exist_ok=True)
    if not (model / "config.json").exists():
        start = time.monotonic()
        # In a process of its own, which gives the GPU's memory back.
        program = "import sys, pathlib, whole_sglang as s; s.make_model(pathlib.Path(sys.argv[1]), int(sys.argv[2]))"
        command = [sys.executable, "-c", program, str(model), str(given.layers)]
        subprocess.run(command, check=True, cwd=Path(__file__).parent)
        print(f"{given.layers} layers were made in {time.monotonic() - start:.0f} s", flush=True)
    common = ["--model-path", str(model), "--max-running-requests", "32", "--cuda-graph-max-bs-decode", "32"]
    common += ["--chunked-prefill-size", "8192", "--mem-fraction-static", "0.6", "--disable-radix-cache", *flags]
    ours = ["--kt-weight-path", str(model), "--kt-num-gpu-experts", str(given.gpu_experts), "--kt-method", given.method]
    servers = [("gpu", ["--disable-prefill-cuda-graph"], {"SGLANG_PLUGINS": "none"})]
    for threshold in given.thresholds.split(","):
        name = f"moebius-{given.method}-{threshold}"
        servers.append((name, [*ours, "--kt-gpu-prefill-token-threshold", threshold], {}))
    first, noise, long, wrong = None, None, None, False
    saved = model / "gpu.json"
    for name, more, environment in servers:
        if name == "gpu" and saved.exists():
            first, noise, long = json.loads(saved.read_text())
            continue
        server = Server(out / f"{name}.log", [*common, *more], environment)
        try:
            answers, same, difference = ask(server, first)
            own_long = long_prompt(server)
            long_difference = mean_difference(own_long, long or own_long)
            rates = speeds(server)
        finally:
            server.stop()
        differences = dict(logprob_difference=difference, long_difference=long_difference)
        result = dict(server=name, ready_s=server.ready_s, same_tokens=same, **differences, **rates)
        result = {key: value if isinstance(value, str) else round(value, 3) for key, value in result.items()}
        print(json.dumps(result), flush=True)
        with open(out / "results.jsonl", "a") as file:
            file.write(json.dumps(result) + "\n")
        if name == "gpu":
            first, noise, long = answers, difference, own_long
            saved.write_text(json.dumps([first, noise, long]))
        else:
            lines = server.log.read_text(errors="replace").splitlines()
            print("\n".join(line[:160] for line in lines if " moebius " in line or "prompts of" in line), flush=True)
            # INT4 weights are others; BF16 ones differ by rounding, as the server itself does between batches.
            got = max(difference, long_difference)
            if given.method == "BF16" and got > 1.5 * noise + 0.05:
                print(f"{name}: log probabilities differ by {got:.3f}, the GPU's own by {noise:.3f}")
                wrong = True
    sys.exit(wrong)


if __name__ == "__main__":
    main()
