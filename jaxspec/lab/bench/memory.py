"""How much memory a plan saves, and at what speed, on questions of two turns.

Three things are compared: our own engine without a budget, which is the fastest that the cost model
finds; plans for the longest chat of that engine, one with the target's KV in its own dtype and one
with int8; and the policy of published code, which is only computed (`lab.cost.baseline`).
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.cache.pages import KvDtype
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.engine.engine import Engine
from jaxspec.engine.memory import bytes_of, in_units
from jaxspec.errors import PromptError
from jaxspec.lab.bench.measure import Dtype, case
from jaxspec.lab.cost.baseline import baseline_bytes
from jaxspec.lab.plan.planner import plan_memory
from jaxspec.lab.plan.request import Search
from jaxspec.load.models import load_model
from jaxspec.models.base import with_kv_dtype
from jaxspec.requests.completions import Completion
from jaxspec.requests.prompts import PromptLine, encode_prompts, load_prompts
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.report import Columns
from jaxspec.runtime.turns import take_turns

LARGE_BUDGET = 2**50  # bytes: no budget at all
WITHOUT, PLAN = "without a budget", "plan"
# By plan, how the KV of the target is stored.
PLANS: Mapping[str, KvDtype | None] = {PLAN: None, "plan, int8 KV": "int8"}


ENGINES: Columns = {
    "engine": "{name}",
    "KV": lambda found: in_units(found["kv_bytes"]),
    "in all,\nwithout weights": lambda found: in_units(found["generation_bytes"]),
    "tokens/s": "{tokens_per_s:.0f}",
    "of the speed": "{speed:.3f}",
    "equal turns": "{num_equal_turns} of {num_turns}",
    "less than the baseline": lambda found: (
        f"{found['less_than_baseline']:.0%}, {found['less_without_draft_logits']:.0%}"
    ),
    "settings": "{sentence}",
}


KEEP = 0.96  # fraction of the fastest plan's predicted speed
ACCEPTANCE = 0.7  # probability that a drafted token is accepted
# Slots per row of the engine without a budget and of the baseline policy; plans are for the longest
# chat of that engine.
MAX_LENGTH = 1024
DRAFT_LENGTHS = (1, 2, 3, 4, 5, 6)  # that the plan may choose


@case("memory", {"results": ("generation memory and speed", ENGINES)})
def memory(
    target: str = "demo-target",
    draft: str = "demo-draft",
    dtype: Dtype = "float32",
    prompts: pathlib.Path | None = None,
    chat: bool = False,
    device: str = "h200",
    max_tokens: int = 128,
    repeats: int = 3,
) -> dict[str, Any]:
    """Compare plans with an engine without a budget and with the baseline policy, on chats of two
    turns.

    Args:
      target: Any model that `load_model` takes.
      draft: Its draft model, named in the same way.
      dtype: Dtype of parameters, compute and cache.
      prompts: File of questions, one per line, with one or more `turns`; default the sample
        prompts, with one turn.
      chat: Put turns and answers through the chat template; otherwise they are lines of one text.
      device: As in `jaxspec plan`; a document of `jaxspec bench decode` from this machine is best.
      max_tokens: Tokens emitted per turn; EOS is ignored.
      repeats: Timed turns of each engine; medians are reported.
    """
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    ask = functools.partial(_ask, params, is_chat=chat)
    lines, files = load_prompts(prompts, turns="all")
    model, draft_model = (load_model(name, dtype=dtype) for name in (target, draft))
    plan_for = functools.partial(
        plan_memory,
        model,
        draft_model,
        LARGE_BUDGET,
        batch=1,
        device=device,
        acceptance=ACCEPTANCE,
        scheduler="static",
    )
    unconstrained = plan_for(
        context=MAX_LENGTH - max(DRAFT_LENGTHS) - 1,
        keep=1.0,
        search=Search(draft_lengths=DRAFT_LENGTHS, kv_dtypes=(None,), draft_kv_windows=(None,)),
    )
    free_length = unconstrained.settings.draft_length
    free = Engine(
        model,
        DraftModel(draft_model),
        batch_size=1,
        max_length=MAX_LENGTH,
        draft_length=free_length,
    )
    free.warm_up()
    asked = ask(free, lines)  # compiles what sessions need, and says how long chats get
    longest_prompt = max(len(done.prompt_token_ids) for done in asked)
    context = longest_prompt + max_tokens
    plans = {
        name: plan_for(
            context=context,
            keep=KEEP,
            search=Search(draft_lengths=DRAFT_LENGTHS, kv_dtypes=(kv_dtype,)),
        )
        for name, kv_dtype in PLANS.items()
    }
    engines = {WITHOUT: free}
    for name, plan in plans.items():
        engines[name] = plan.engine(
            with_kv_dtype(model, plan.settings.kv_dtype),
            DraftModel(draft_model, **plan.settings.drafter_options),
        )
        engines[name].warm_up()
        ask(engines[name], lines[:1])
    turns = take_turns(
        {name: functools.partial(ask, each, lines) for name, each in engines.items()},
        repeats,
    )
    baseline = baseline_bytes(
        model.config,
        draft=draft_model.config,
        itemsize=model.dtype.itemsize,
        context=MAX_LENGTH,
        prompt_tokens=longest_prompt,
        num_nodes=free_length + 1,
        depth=free_length,
    )
    in_all = sum(baseline.values())
    without_draft_logits = in_all - longest_prompt * draft_model.vocab_size * model.dtype.itemsize
    sentences = {WITHOUT: f"defaults, draft length {free_length}"}
    sentences |= {name: plan.settings.sentence for name, plan in plans.items()}
    results = []
    for name, engine in engines.items():
        found, seconds = turns.results[name], turns.median_s(name)
        of_engine = bytes_of(engine.executor.loop)
        needed = of_engine.generation_bytes
        num_tokens = sum(len(done.token_ids) for done in found)
        results.append(
            {
                "name": name,
                **of_engine.to_json(),
                "kv_bytes": of_engine.parts.kv_bytes,
                "num_tokens": num_tokens,
                "tokens_per_s": num_tokens / seconds,
                "speed": turns.speedup(name, over=WITHOUT),
                "speeds": turns.ratios(name, over=WITHOUT),
                "less_than_baseline": 1 - needed / in_all,
                "less_without_draft_logits": 1 - needed / without_draft_logits,
                "num_prompt_tokens": sum(len(done.prompt_token_ids) for done in found),
                "num_reused_tokens": sum(done.num_reused_tokens for done in found),
                "num_reread_tokens": sum(done.num_reread_tokens for done in found),
                "num_turns": len(found),
                "num_equal_turns": _num_equal(found, turns.results[WITHOUT]),
                "sentence": sentences[name],
            }
        )
    notes = (
        f"The baseline policy takes {in_units(in_all)} without weights, of which the logits that a "
        "draft model makes of every prompt position are "
        f"{in_units(in_all - without_draft_logits)}. The last column counts them and leaves them "
        "out. Speeds are medians of the ratios to the engine without a budget, in turns."
    )
    [plan_result] = [each for each in results if each["name"] == PLAN]
    return {
        "prompt_files": files,
        "num_questions": len(lines),
        "longest_prompt": longest_prompt,
        "context": context,
        "results": results,
        "baseline_bytes": {**baseline, "generation_bytes": in_all},
        "without_draft_logits": without_draft_logits,
        "plans": {name: plan.to_json() for name, plan in plans.items()},
        "notes": [notes],
        "holds": plan_result["num_equal_turns"] == plan_result["num_turns"] == len(asked),
    }


def _ask(
    params: SamplingParams, engine: Engine, lines: Sequence[PromptLine], *, is_chat: bool
) -> list[Completion]:
    """Asks all turns of all questions, one question after another; a turn that does not fit,
    and those after it, are left out."""
    found = []
    for line in lines:
        answers: list[str] = []
        with engine.session() as session:
            for _ in range(line.num_turns):
                turn = line.turn(answers, is_chat=is_chat)
                try:
                    [prompt] = encode_prompts([turn], engine.target, is_chat=is_chat)
                    done = session.generate(prompt, params)
                except PromptError:
                    break
                found.append(done)
                answers.append(done.text or "")
    return found


def _num_equal(found: Sequence[Completion], others: Sequence[Completion]) -> int:
    """The number of turns with the same tokens."""
    pairs = zip(found, others, strict=False)
    return sum(one.token_ids == other.token_ids for one, other in pairs)
