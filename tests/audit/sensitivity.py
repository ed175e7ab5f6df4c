"""What the audit of outputs finds on a real model: nothing in the outputs of healthy engines, and
faults that are planted while decoding.

    python tests/audit/sensitivity.py --model DIRECTORY --prompts PROMPTS.json \
        --engines DIRECTORY --out docs/results/audit-sensitivity-cpu.json

`PROMPTS.json` holds a list of `{"ids": [...]}`. `--engines` is a directory of files of outputs
(`*.jsonl`, see `jaxspec.audit.outputs`) of other engines, of the same prompts. `test_planted.py`
runs the planted part on the embedded pair.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import planted

import jaxspec
from jaxspec.audit.external import OutputsAudit, audit_outputs
from jaxspec.audit.judge import Finding
from jaxspec.audit.noise import BOUND_SCALES, OTHERS_FACTOR
from jaxspec.audit.outputs import Output, OutputsFile, parse_outputs
from jaxspec.audit.scoring import Scorer
from jaxspec.models.base import LanguageModel
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.documents import make_document, write_document

SHARES = (0.1, 0.03)  # of second-best tokens
NUM_SEEDS = 5
SMALL_GAP = 0.5  # logits between the two best tokens
NEAR_SCALES = 4.0  # gaps of so many s, below the bound of a tie, are counted too
COUNTS = ("num_clear", "num_clear_found", "num_near", "num_near_found")


@dataclasses.dataclass(frozen=True)
class Options:
    """What is run."""

    model: str
    dtype: str
    num_prompts: int
    max_tokens: int


def file_of(
    outputs: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]], dtype: str
) -> OutputsFile:
    """The outputs as a file of another engine's."""
    params = SamplingParams(max_tokens=max(map(len, outputs)), ignore_eos=True)
    each = [
        Output(
            number=number,
            prompt_token_ids=tuple(prompt),
            token_ids=tuple(ids),
            after_stop=(),
            params=dataclasses.replace(params, max_tokens=max(len(ids), 1)),
            stop_tokens=(),
        )
        for number, (prompt, ids) in enumerate(zip(prompts, outputs, strict=True), start=2)
    ]
    return OutputsFile(
        engine="planted", version="", dtype=dtype, is_text=False, outputs=tuple(each)
    )


def planted_files(
    target: LanguageModel,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    num_seeds: int = NUM_SEEDS,
) -> Iterator[tuple[str, int, list[planted.Output]]]:
    """Each fault's name, its seed, and outputs with it."""
    decoder = planted.Decoder(target, prompts, max_tokens)
    healthy = decoder.outputs()
    yield "nothing", 0, healthy
    name = f"the second best where the gap is below {SMALL_GAP}"
    yield name, 0, decoder.outputs(small_gap=SMALL_GAP)
    for seed in range(num_seeds):
        for share in SHARES:
            name = f"the second best at {share:.0%} of positions"
            yield name, seed, decoder.outputs(share_planted=share, seed=seed)
        yield (
            "one second-best token in each output",
            seed,
            decoder.outputs(one_each=True, seed=seed),
        )
        rng = np.random.default_rng(seed)
        places = rng.integers(max_tokens // 8, max_tokens * 7 // 8, size=len(prompts))
        ids = [output.token_ids for output in healthy]
        for name, damaged in (
            ("a dropped token", [planted.dropped(*pair) for pair in zip(ids, places, strict=True)]),
            (
                "another prompt's tail",
                [
                    planted.with_tail_of(own, other, at)
                    for own, other, at in zip(ids, ids[1:] + ids[:1], places, strict=True)
                ],
            ),
        ):
            marks = [
                [index == at for index in range(len(own))]
                for own, at in zip(damaged, places, strict=True)
            ]
            yield name, seed, [planted.Output(*pair) for pair in zip(damaged, marks, strict=True)]
    yield "stale KV of a rejected draft every 8 tokens", 0, decoder.outputs(stale_kv=True)
    for name, positions in planted.POSITIONS.items():
        yield name, 0, decoder.outputs(positions=positions)


def row(name: str, audit: OutputsAudit, marks: Sequence[Sequence[bool]] = ()) -> dict[str, Any]:
    """What the audit found in a file, as a row of the table.

    `num_clear` counts outputs with a planted token whose margin exceeds the bound of a tie, and
    `num_clear_found` those of them in which a fault was found; `num_near` and `num_near_found`
    count the same for `NEAR_SCALES`. `num_beyond` is the expected number of healthy tokens beyond
    the bound, and `num_beyond_most` that in an engine whose changes are `OTHERS_FACTOR` times ours.
    """
    num_tokens = sum(own.num_tokens for own in audit.judged)
    other = [d for own in audit.judged for d in own.divergences]
    noise = audit.noise
    gaps = np.concatenate([own.gaps for own in audit.judged])
    beyond = gaps[gaps > noise.bound]
    counts = collections.Counter()
    for own, chosen in zip(audit.judged, marks, strict=False):
        margin = max((d.margin for d in own.divergences if chosen[d.index]), default=0.0)
        for kind, scales in (("num_clear", BOUND_SCALES), ("num_near", NEAR_SCALES)):
            if margin > scales * noise.scale:
                counts[kind] += 1
                counts[f"{kind}_found"] += own.first is not None
    return {
        "what": name,
        "outputs": len(audit.outputs),
        "tokens": num_tokens,
        "not_the_best": len(other),
        "beyond_90": sum(d.margin > float(np.quantile(noise.changes, 0.9)) for d in other),
        "explained": audit.tie_tests[0].expected,
        "p": audit.tie_p_value,
        "num_beyond": audit.num_beyond,
        "num_beyond_most": float(noise.flips(beyond, factor=OTHERS_FACTOR).sum()),
        "faults": sum(d.finding == Finding.FAULT for d in other),
        "outputs_with_faults": sum(own.first is not None for own in audit.judged),
        "largest_margin": max((d.margin for d in other), default=0.0),
        **{kind: counts[kind] for kind in COUNTS},
        "is_found": audit.holds is False,
    }


def planted_rows(
    target: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    scorer: Scorer,
) -> Iterator[dict[str, Any]]:
    """A row for each file of planted faults."""
    for name, seed, outputs in planted_files(target, prompts, max_tokens):
        file = file_of([output.token_ids for output in outputs], prompts, scorer.dtype.name)
        audit = audit_outputs(target, file, scorer=scorer)
        yield row(name, audit, [output.is_planted for output in outputs]) | {"seed": seed}


def main() -> None:
    """Runs everything and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True, type=pathlib.Path)
    parser.add_argument("--engines", type=pathlib.Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--num-prompts", default=24, type=int)
    parser.add_argument("--max-tokens", default=96, type=int)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    given = parser.parse_args()
    target = jaxspec.load_model(given.model, dtype=given.dtype)
    prompts = [line["ids"] for line in json.loads(given.prompts.read_text())][: given.num_prompts]
    longest = max(map(len, prompts)) + given.max_tokens + 1
    scorer = Scorer(target, max_length=longest, dtype=given.dtype)
    options = Options(
        model=pathlib.Path(given.model).name,
        dtype=given.dtype,
        num_prompts=len(prompts),
        max_tokens=given.max_tokens,
    )
    engines, rows, noise = [], [], {}
    for found in planted_rows(target, prompts, max_tokens=given.max_tokens, scorer=scorer):
        rows.append(found)
        _tell(found)
    for path in sorted(given.engines.glob("*.jsonl")) if given.engines else ():
        started_s = time.perf_counter()
        (file,) = parse_outputs(path.read_text(), target, name=path.name)
        audit = audit_outputs(target, file, scorer=scorer)
        seconds = time.perf_counter() - started_s
        engines.append(row(path.stem, audit) | {"engine": file.label, "seconds": seconds})
        _tell(engines[-1])
        noise = noise or audit.noise.to_json() | {"tokens_needed": audit.tokens_needed}
    document = make_document(
        "audit sensitivity", options, noise=noise, engines=engines, planted=rows
    )
    write_document(document, given.out)


def _tell(found: Mapping[str, Any]) -> None:
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
