"""What the scripts beside this file share; it needs nothing but Python.

A script is started with a file of settings, a JSON object. It loads its engine, prints a
line `PEER {"versions": ..., "arithmetic": ...}`, and then, for each number that it reads, generates
so many tokens for every prompt and prints `PEER {"seconds": ..., "outputs": [[ids], ...], ...}`.
"""

import json
import pathlib
import resource
import sys
import time
from collections.abc import Callable

settings = json.loads(pathlib.Path(sys.argv[1]).read_text()) if len(sys.argv) == 2 else {}


def answer(engine: dict, generate: Callable[[list[list[int]], int], list[list[int]]]) -> None:
    """Serves `generate(prompts, max_tokens)`, which returns the output ids of each prompt."""
    prompts = settings["prompts"]
    generate(prompts[: settings["batch_size"]], 2)  # warms up
    _say(engine)
    for line in sys.stdin:
        start = time.perf_counter()
        outputs = generate(prompts, int(line))
        seconds = time.perf_counter() - start
        peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        _say({"seconds": seconds, "outputs": outputs, "peak_bytes": peak_bytes})


def _say(record: dict) -> None:
    print("PEER " + json.dumps(record), flush=True)
