"""Many JSON schemas through response_format: whatever ends by itself validates, and nearly all do end.

Arguments: a file with [{"name", "schema"}]. A schema that the server refuses by name counts as a failure.
"""

import collections
import concurrent.futures
import json
import sys
import urllib.request

import jsonschema
from openai import OpenAI

from common import URL

SEEDS = 5
client = OpenAI(base_url=URL + "/v1", api_key="none", max_retries=20, timeout=600)


def tokens(text):
    request = urllib.request.Request(
        URL + "/tokenize", data=json.dumps({"prompt": text, "add_special_tokens": False}).encode()
    )
    return json.load(urllib.request.urlopen(request))["tokens"]


# The demo has never seen JSON and would fill a string for ever: what closes one, or ends the answer, is made likelier.
ENDS = {
    str(token): bias
    for bias, ends in ((8, ":Z0"), (14, ('"', "}", "]", "<|end|>")))
    for end in ends
    for token in tokens(end)
}


def answer(case, seed):
    form = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": case["schema"]}}
    [choice] = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": f"An example of: {case['name']}"}],
        response_format=form,
        temperature=1.0,
        logit_bias=ENDS,
        seed=seed,
        max_tokens=1500,
    ).choices
    return choice.finish_reason, choice.message.content


def check(case, seed):
    """ "stop", "length", or what is wrong."""
    try:
        reason, text = answer(case, seed)
        if reason == "stop":
            jsonschema.validate(json.loads(text), case["schema"], cls=jsonschema.Draft202012Validator)
        return reason
    except Exception as error:
        return f"{case['name']}, seed {seed}: {type(error).__name__}: {str(error)[:300]}"


cases = json.load(open(sys.argv[1]))
assert len(cases) >= 40
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    jobs = [(case, seed) for case in cases for seed in range(SEEDS)]
    results = list(pool.map(lambda job: check(*job), jobs))
counts = collections.Counter(result if result in ("stop", "length") else "wrong" for result in results)
wrong = [result for result in results if result not in ("stop", "length")]
print("\n".join(wrong), file=sys.stderr)
cut = collections.Counter(case["name"] for (case, _), result in zip(jobs, results) if result == "length")
print(
    f"{len(cases)} schemas, {len(results)} answers: {counts['stop']} valid, {counts['length']} cut off {dict(cut)}, "
    f"{counts['wrong']} wrong"
)
sys.exit(1 if wrong or counts["stop"] < 0.95 * len(results) else 0)
