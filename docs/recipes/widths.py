"""What a round takes by how many tokens it scores, in two checkouts in turns.

    python docs/recipes/widths.py TARGET PROMPTS BEFORE AFTER > widths.json

BEFORE and AFTER are directories of jaxspec. In every turn each of them, in a process of its own,
runs rounds of every width with n-grams as the drafter, on the first prompts of a file of JSON lines
with a "prompt", several times; the fastest counts, because a shared machine only ever slows them
down. Compilations are shared if JAX_COMPILATION_CACHE_DIR is set. `TURNS` is an environment
variable.
"""

import json
import os
import subprocess
import sys
import time

import jax
import numpy as np

import jaxspec
from jaxspec.requests.requests import Request

TURNS = int(os.environ.get("TURNS", "3"))
BATCH_SIZES, DRAFT_LENGTH, ROUNDS, PASSES = (1, 4, 8), 4, 24, 5


def rounds(executor, prompts, width):
    """Milliseconds of a round of this width, and tokens of a row that it scores, on average."""
    executor.reset()
    params = jaxspec.SamplingParams(max_tokens=256, ignore_eos=True)
    for row, tokens in enumerate(prompts):
        request = Request(request_id=str(row), prompt_token_ids=tuple(tokens), params=params)
        executor.admit_and_prefill(row, request, draft_length=width - 1, arrival=row)
    executor.run(2, draft_length=width - 1)  # the first find little in the caches
    jax.block_until_ready(executor.state)
    started_s = time.perf_counter()
    executor.run(ROUNDS, draft_length=width - 1)
    jax.block_until_ready(executor.state)
    spent_s = time.perf_counter() - started_s
    counts = jax.device_get(executor.state.counts)
    live = 1 + np.sum(counts.num_draft_tokens) / np.sum(counts.num_rounds)
    return {"ms": 1e3 * spent_s / ROUNDS, "live": float(live)}


def turn(target, file):
    """Prints a turn of the checkout that this process imports."""
    model, found = jaxspec.load_model(target, dtype="bfloat16"), []
    with open(file, encoding="utf-8") as lines:
        prompts = [model.tokenizer.encode(json.loads(line)["prompt"])[:512] for line in lines]
    for size in BATCH_SIZES:
        engine = jaxspec.Engine(
            model,
            jaxspec.NGram(),
            draft_length=DRAFT_LENGTH,
            batch_size=size,
            max_length=1024,
            exactness="ties",  # rounds of several widths; with the C++ kernels no bit changes
        )
        passes = [
            [rounds(engine.executor, prompts[:size], width) for width in engine.verify_lengths]
            for _ in range(1 + PASSES)  # the first compiles
        ]
        for width, cells in zip(engine.verify_lengths, zip(*passes[1:], strict=True), strict=True):
            fastest = min(cells, key=lambda cell: cell["ms"])
            found.append({"batch_size": size, "width": width, **fastest})
    print(json.dumps(found))


def main(target, file, before, after):
    """Prints the document."""
    # Older checkouts, whose turns this file runs, may not have these.
    from jaxspec.runtime.documents import document_text, provenance

    turns = {name: [] for name in ("before", "after")}
    commits = {}
    for index in range(TURNS):
        for name, place in (("before", before), ("after", after)):
            command = [sys.executable, os.path.abspath(__file__), target, file]
            environment = {**os.environ, "PYTHONPATH": os.path.abspath(place)}
            run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
            turns[name].append(json.loads(run.stdout))
            git = ["git", "-C", place, "rev-parse", "--short=7", "HEAD"]
            commits[name] = subprocess.run(git, stdout=subprocess.PIPE, text=True).stdout.strip()
            print(f"turn {index + 1} of {TURNS}, {name}", file=sys.stderr)
    results = []
    for name, of_turns in turns.items():
        for cells in zip(*of_turns, strict=True):
            times = [cell["ms"] for cell in cells]  # the fastest pass of each turn
            results.append(
                {
                    "code": name,
                    "batch_size": cells[0]["batch_size"],
                    "width": cells[0]["width"],
                    "live": cells[0]["live"],
                    "ms": min(times),
                    "range": [min(times), max(times)],
                }
            )
    config = {"target": os.path.basename(target), "prompts": os.path.basename(file)}
    config |= {"rounds": ROUNDS, "passes": PASSES, "turns": TURNS, "commits": commits}
    # An engine notes which kernels this machine uses, for the document.
    jaxspec.Engine(jaxspec.load_model(target, dtype="bfloat16"))
    document = {"command": "docs/recipes/widths.py", "config": config, "results": results}
    print(document_text(document | provenance()))


if __name__ == "__main__":
    (turn if len(sys.argv) == 3 else main)(*sys.argv[1:])
