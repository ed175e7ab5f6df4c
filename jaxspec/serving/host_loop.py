"""A host loop over `ServingEngine`, as an example and a starting point.

    python -m jaxspec.serving.host_loop [MODEL] < prompts.txt

Prompts are prefilled ahead of time on another thread while the batch is decoded; text is printed as
soon as its characters are final, one line per step and row.
"""

from __future__ import annotations

import collections
import itertools
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import jax

from jaxspec.drafters.ngram import NGram
from jaxspec.errors import JaxspecError, SettingError
from jaxspec.models.base import Model
from jaxspec.requests.requests import Prompt
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.serving.engine import ServingEngine
from jaxspec.types import Finish


def serve(
    engine: ServingEngine, prompts: Iterable[Prompt], params: SamplingParams
) -> Iterator[tuple[int, str, Finish]]:
    """Yields `(index of the prompt, new text, finish reason or RUNNING)` as rows emit tokens.

    A prompt that is refused raises when its turn comes; check `prompts` beforehand if that must not
    interrupt the others.
    """
    tokenizer = engine.target.tokenizer
    if tokenizer is None:
        raise SettingError(
            f"The model {engine.target.name} has no tokenizer, so its output cannot be printed as "
            "text; name a model that has one."
        )
    prompts = [prompts] if isinstance(prompts, str) else prompts
    state, active, coming = engine.init_decode_state(), {}, enumerate(prompts)
    with ThreadPoolExecutor(1) as reader:
        ready = collections.deque()
        while True:
            # At most as many prompts are being prefilled, or are ready, as can be active at once.
            for number, prompt in itertools.islice(coming, engine.shape.batch_size - len(ready)):
                ready.append((number, reader.submit(engine.prefill, prompt, params)))
            for row in [row for row in range(engine.shape.batch_size) if row not in active]:
                # Never waits for a prompt while other rows can continue.
                if ready and (ready[0][1].done() or not active):
                    number, prefilled = ready.popleft()
                    prefilled = prefilled.result()
                    state = engine.insert(prefilled, state, row)
                    active[row] = (number, tokenizer.stream(prefilled.request.prompt_token_ids))
            if not active:
                return
            state, result = engine.generate(state)
            result = jax.device_get(result)
            for row, (number, stream) in list(active.items()):
                finish = Finish(int(result.finish[row]))
                new = result.tokens[row, : result.num_new[row]].tolist()
                text = stream.push(new[:-1] if finish == Finish.STOP_TOKEN else new)
                if result.done[row]:
                    text += stream.end()
                    del active[row]
                if text or result.done[row]:
                    yield number, text, finish


def main(model: Model | str = "demo-target") -> int:
    """Decodes the prompts on standard input, one per line, and prints the output as it grows."""
    prompts = [line.rstrip("\n") for line in sys.stdin if line.strip()]
    try:
        engine = ServingEngine(model, NGram(), batch_size=4)
        for number, text, finish in serve(engine, prompts, SamplingParams(max_tokens=64)):
            ending = "" if finish == Finish.RUNNING else f"  [{finish.name.lower()}]"
            print(f"{number}: {text!r}{ending}", flush=True)
    except JaxspecError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
