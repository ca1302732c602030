"""Starts SGLang with Moebius's experts, or says what would be started where SGLang or a GPU is missing.

python sglang_server.py Qwen/Qwen3-30B-A3B --gpu-experts 16
"""

import argparse
import importlib.util
import subprocess
import sys
from importlib.metadata import entry_points

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("--gpu-experts", type=int, default=1, help="of each layer, computed by SGLang on the GPU")
arguments, more = parser.parse_known_args()

command = ["sglang", "serve", "--model-path", arguments.model]
command += [
    "--kt-weight-path",
    arguments.model,
    "--kt-num-gpu-experts",
    str(arguments.gpu_experts),
    "--disable-shared-experts-fusion",
    *more,
]

# SGLang finds Moebius by this entry point, in each of its processes.
(plugin,) = [entry for entry in entry_points(group="sglang.srt.plugins") if entry.name == "moebius"]
print(f"{plugin.value} takes the place of kt_kernel in:\n{' '.join(command)}", flush=True)
if importlib.util.find_spec("sglang") is None:
    sys.exit("SGLang is not installed: pip install sglang")
sys.exit(subprocess.call(command))
