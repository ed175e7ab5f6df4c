"""A host loop over `ServingEngine`, to read and to start from.

    python -m jaxspec.serving.host_loop [MODEL] < prompts.txt

Prompts are read ahead on another thread while the batch is decoded; text is printed as soon as its
characters are final, a line per step and row.
"""

from __future__ import annotations

import collections
import itertools
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import jax

from jaxspec.checkpoint.resolve import load_model
from jaxspec.drafters.ngram import NGram
from jaxspec.errors import JaxspecError, SettingError
from jaxspec.requests.requests import Prompt
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.serving.engine import ServingEngine
from jaxspec.types import Finish


def serve(
    engine: ServingEngine, prompts: Iterable[Prompt], params: SamplingParams
) -> Iterator[tuple[int, str, Finish]]:
    """Yields `(prompt's number, new text, why it ended or RUNNING)` as rows emit tokens.

    A prompt that is refused raises in its turn, when it would be seated; check `prompts` before
    where others must not suffer.
    """
    tokenizer = engine.target.tokenizer
    if tokenizer is None:
        raise SettingError(
            f"The model {engine.target.name} has no tokenizer, so its output cannot be printed as "
            "text; name a model that has one."
        )
    state, seated, coming = engine.init_decode_state(), {}, enumerate(prompts)
    with ThreadPoolExecutor(1) as reader:
        ready = collections.deque()
        while True:
            # As many prompts are being read, or lie ready, as could be seated at once.
            for number, prompt in itertools.islice(coming, engine.shape.seats - len(ready)):
                ready.append((number, reader.submit(engine.prefill, prompt, params)))
            for seat in [seat for seat in range(engine.shape.seats) if seat not in seated]:
                # Nobody waits for a prompt while others could go on.
                if ready and (ready[0][1].done() or not seated):
                    number, prefilled = ready.popleft()
                    state = engine.insert(prefilled.result(), state, seat)
                    seated[seat] = (number, tokenizer.stream())
            if not seated:
                return
            state, result = engine.generate(state)
            result = jax.device_get(result)
            for seat, (number, stream) in list(seated.items()):
                finish = Finish(int(result.finish[seat]))
                new = result.tokens[seat, : result.num_new[seat]].tolist()
                text = stream.push(new[:-1] if finish == Finish.STOP_TOKEN else new)
                if result.done[seat]:
                    text += stream.end()
                    del seated[seat]
                if text or result.done[seat]:
                    yield number, text, finish


def main(model: str = "demo-target") -> int:
    """Decodes the prompts on standard input, one a line, and prints them as they grow."""
    prompts = [line.rstrip("\n") for line in sys.stdin if line.strip()]
    try:
        engine = ServingEngine(load_model(model), NGram(), seats=4)
        for number, text, finish in serve(engine, prompts, SamplingParams(max_tokens=64)):
            ending = "" if finish == Finish.RUNNING else f"  [{finish.name.lower()}]"
            print(f"{number}: {text!r}{ending}", flush=True)
    except JaxspecError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
