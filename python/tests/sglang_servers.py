# mypy: ignore-errors
"""Servers that are started, asked and stopped: SGLang, and `moebius serve`. Prompts and answers are token ids."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

START_LIMIT_S = 400


def missing(device):
    """Why no server of SGLang can run here, or None."""
    for package, install in [("torch", "sglang"), ("sglang", "sglang"), ("moebius", "./python")]:
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed (pip install {install})"
    import torch

    if device != "cpu" and not torch.cuda.is_available():
        return "there is no GPU, and a whole SGLang server is tested on one"
    return None


class Server:
    """A program that serves HTTP on a free port, its log in a file. `cores`: it runs on these."""

    def __init__(self, log, command, ready, environment, cores=None):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self.log, start = f"http://127.0.0.1:{port}", log, time.monotonic()
        limit = ["taskset", "-c", ",".join(map(str, cores))] if cores else []
        with open(log, "w") as out:
            self.process = subprocess.Popen(
                [*limit, *command, "--host", "127.0.0.1", "--port", str(port)],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | environment,
                start_new_session=True,
            )
        try:
            while not ready(self):
                if self.process.poll() is not None or time.monotonic() - start > START_LIMIT_S:
                    lines = [line for line in self.logged() if "server_args=" not in line]
                    raise RuntimeError(f"{log.stem} did not start:\n" + "\n".join(line[:300] for line in lines[-50:]))
                time.sleep(0.5)
        except BaseException:
            self.stop()
            raise
        self.ready_s = time.monotonic() - start

    def logged(self):
        return self.log.read_text(errors="replace").splitlines()

    def stop(self):
        for how in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, how)
            except ProcessLookupError:
                break
            time.sleep(2)
        self.process.wait()

    def post(self, path, body):
        header = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), header)
        return urllib.request.urlopen(request, timeout=300)


class Sglang(Server):
    def __init__(self, log, flags, environment, cores=None):
        def ready(self):
            return any("fired up and ready" in line for line in self.logged())

        super().__init__(log, [sys.executable, "-m", "sglang.launch_server", *flags], ready, environment, cores)

    @staticmethod
    def _body(ids, tokens, more):
        return dict(input_ids=ids, sampling_params=dict(temperature=0, max_new_tokens=tokens, ignore_eos=True), **more)

    def generate(self, ids, tokens, **more):
        return json.load(self.post("/generate", self._body(ids, tokens, more)))

    def stream(self, ids, tokens, **more):
        """The open response, a line `data: ...` for each part. Closing it aborts the request."""
        return self.post("/generate", self._body(ids, tokens, dict(stream=True, **more)))

    def greedy(self, ids, tokens):
        return self.generate(ids, tokens)["output_ids"]

    def read(self, prompt, ids):
        """What the server thinks of `ids` after `prompt`: of each its log probability, the likeliest token instead, and
        how much likelier that is than the second."""
        asked = dict(return_logprob=True, logprob_start_len=len(prompt) - 1, top_logprobs_num=2)
        meta, n = self.generate(prompt + ids, 1, **asked)["meta_info"], len(ids)
        places = zip(meta["input_token_logprobs"][-n:], meta["input_top_logprobs"][-n:])
        return [dict(logprob=own[0], top=two[0][1], margin=two[0][0] - two[1][0]) for own, two in places]


#: The `moebius` command of this Python.
COMMAND = [
    sys.executable,
    "-c",
    "import sys; from moebius._command import main; sys.argv[0] = 'moebius'; sys.exit(main())",
]


class Moebius(Server):
    def __init__(self, log, flags, environment):
        def ready(self):
            try:
                return urllib.request.urlopen(self.url + "/ready", timeout=5).status == 200
            except OSError:
                return False

        super().__init__(log, [*COMMAND, "serve", *flags], ready, environment)

    def greedy(self, ids, tokens):
        body = dict(prompt=ids, max_tokens=tokens, temperature=0, ignore_eos=True)
        json.load(self.post("/v1/completions", body))
