"""The cost and gain of trees: passes compared with those of chains, tokens per round, tokens per
second.

Tokens per round depend on the models and the prompts only, not on the machine. A tree of n nodes is
compared with a chain of n nodes: both take the same window.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.drafters.base import Drafter
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.trees import BeamTree, StaticTree, best_static_tree
from jaxspec.engine.engine import Engine
from jaxspec.kernels.registry import KernelsName, default_kernels
from jaxspec.lab.bench.measure import (
    PairBench,
    fill_mid_decode,
)
from jaxspec.lab.bench.speeds import SPEED, speed_rows
from jaxspec.lab.bench.stages import forward_runs, round_stages
from jaxspec.lab.compare import Candidate, mean_interval, run_candidates
from jaxspec.load.models import load_model
from jaxspec.models import decoder
from jaxspec.models.base import LanguageModel
from jaxspec.requests.completions import Completion
from jaxspec.requests.prompts import load_prompts
from jaxspec.requests.requests import Prompt
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.compilation import Program
from jaxspec.runtime.report import Columns, TextTable
from jaxspec.runtime.turns import time_loops
from jaxspec.schedulers import Static
from jaxspec.verifiers import Coupled, Rejection, Verifier

RANKS = 8  # number of likeliest draft tokens that static trees choose from
DEPTH = 8  # levels of beam trees; the most levels of static trees
Part: TypeAlias = Literal["costs", "acceptance", "speeds"]

COSTS: Columns = {
    "kernels": "{kernels}",
    "context": "{context}",
    "batch": "{batch_size}",
    "window": "{window}",
    "chain ms": "{chain_ms:.3f}",
    "tree ms": "{tree_ms:.3f}",
    "tree / chain": "{ratio:.2f}",
}
STAGES: Columns = {
    "batch": "{batch_size}",
    "nodes": "{num_nodes}",
    "draft ms": "{draft_ms:.3f}",
    "target ms": "{target_ms:.3f}",
    "verify ms": "{verify_ms:.3f}",
    "commit ms": "{commit_ms:.3f}",
    "(verify + commit)\n/ target": "{share:.3f}",
}
ACCEPTANCE: Columns = {
    "rule": "{verifier}",
    "temp.": "{temperature:g}",
    "nodes": "{num_nodes}",
    "tree": "{tree}",
    "emitted\n/round": "{emitted_per_round:.2f}",
    "by its\nranks": "{predicted:.2f}",
    "over the\nchain": "{over_chain:.3f}",
    "difference\nper prompt": lambda found: with_interval(
        None if found["tree"] == "chain" else found["difference"]
    ),
    "equals\nplain": lambda found: {None: "-", True: "yes", False: "NO"}[found["is_equal"]],
}
OVER_STATIC: Columns = {
    "rule": "{verifier}",
    "temperature": "{temperature:g}",
    "nodes": "{num_nodes}",
    "emitted\n/round": "{emitted_per_round:.2f}",
    "difference per prompt": lambda found: with_interval(found["over_static"]),
}
SPEEDS: Columns = {"batch": "{batch_size}", "drafts": "{drafts}", **SPEED}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreesBench(PairBench):
    """Compare trees with chains: cost of a pass, tokens per round, speed."""

    NAME: ClassVar[str] = "trees"

    parts: tuple[Part, ...] = ("costs", "acceptance", "speeds")
    """What to measure."""
    prompts: pathlib.Path | None = None
    """Prompt file; default the sample prompts."""
    windows: tuple[int, ...] = (5, 9, 17, 33)
    """Tokens per row of the timed passes."""
    contexts: tuple[int, ...] = (80, 1000)
    """Committed tokens per row of these passes."""
    pass_batch_sizes: tuple[int, ...] = (1, 4, 8)
    """Batch sizes of these passes."""
    nodes: tuple[int, ...] = (4, 8, 12, 16)
    """Sizes of the trees, and lengths of the chains that they are compared with."""
    width: int = 4
    """For beam trees: nodes expanded per level, and children of each."""
    temperature: float = 0.8
    """Temperature of the sampled outputs."""
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8)
    """Batch sizes of the timed runs."""
    chains: tuple[int, ...] = (2, 4, 8)
    """Draft lengths of the chains in these runs."""
    trees: tuple[int, ...] = (8, 16)
    """Sizes of the trees in these runs; the largest also runs with draft length `auto`."""
    max_tokens: int = 64
    """Tokens emitted per output; EOS is ignored."""
    repeats: int = 3
    """Timed runs of each kind; the median is reported."""

    def measure(self) -> dict[str, Any]:
        """Costs, acceptance and speeds."""
        lines, files = load_prompts(self.prompts)
        target, draft = self.load()
        prompts = [line.prompt for line in lines]
        plain = Engine(target, batch_size=8, max_length=512).generate(
            prompts, self._params(prompts, 0.0)
        )
        ranks = draft_ranks(draft, plain)
        of_rank = [float(np.mean(np.concatenate(ranks) == rank)) for rank in range(RANKS)]
        static = {n: best_static_tree(np.tile(of_rank, (DEPTH, 1)), n) for n in self._sizes}
        found: dict[str, Any] = {"holds": True}
        if "costs" in self.parts:
            found["costs"] = self._costs(static)
            found["stages"] = self._stages(target, draft, plain, static[max(self._sizes)])
        if "acceptance" in self.parts:
            found["acceptance"], is_equal = self._acceptance(target, draft, prompts, static, ranks)
            found["holds"] &= is_equal
        if "speeds" in self.parts:
            found["speeds"], is_equal = self._speeds(target, draft, prompts)
            found["holds"] &= is_equal
        return {
            "prompt_files": files,
            "num_prompts": len(prompts),
            "acceptance_by_rank": of_rank,
            "static_trees": {n: static[n].choices for n in self.nodes},
            **found,
        }

    def tables(self, document: Mapping[str, Any]) -> list[TextTable]:
        """A table for each part, and for acceptance one more."""
        acceptance = document.get("acceptance", [])
        beams = [found for found in acceptance if found["over_static"] is not None]
        tables = [
            ("a pass of the target", COSTS, document.get("costs")),
            ("a round of the largest tree", STAGES, document.get("stages")),
            ("tokens per round", ACCEPTANCE, acceptance),
            ("beam trees over static trees", OVER_STATIC, beams),
            ("speed, prefill included", SPEEDS, document.get("speeds")),
        ]
        return [
            TextTable.of_columns(title, columns, rows) for title, columns, rows in tables if rows
        ]

    def remarks(self, document: Mapping[str, Any]) -> list[tuple[str, str]]:
        """What the columns mean, and whether outputs equal plain decoding's."""
        found = [
            (
                "By its ranks: what a static tree would emit, from the ranks that the draft model "
                "gave the target's tokens. Differences are to the chain, in the second table to "
                "the static tree, of as many nodes: means over prompts with their 95% bootstrap "
                "intervals.",
                "dim",
            )
        ]
        if not document["holds"]:
            found.append(("Some outputs differ from plain decoding's: this is a bug.", "bold red"))
        return found

    @property
    def _sizes(self) -> list[int]:
        return sorted({*self.nodes, *(window - 1 for window in self.windows)})

    def _params(self, prompts: Sequence[Prompt], temperature: float) -> list[SamplingParams]:
        return [
            SamplingParams(
                max_tokens=self.max_tokens, temperature=temperature, seed=seed, ignore_eos=True
            )
            for seed in range(len(prompts))
        ]

    def _beam(self, nodes: int) -> BeamTree:
        return BeamTree(width=self.width, depth=min(DEPTH, nodes), nodes=nodes)

    def _costs(self, trees: Mapping[int, StaticTree]) -> list[dict[str, Any]]:
        """Milliseconds of forward passes of a tree and of a chain with the same number of tokens,
        in alternation."""
        default_kernels()  # the document names them, and their family of instructions
        names: tuple[KernelsName, ...] = ("native", "xla")
        results = []
        for kernels, batch, window in itertools.product(names, self.pass_batch_sizes, self.windows):
            model = load_model(self.target, dtype=self.dtype, kernels=kernels)
            passes = {
                kind: forward_runs(
                    model,
                    batch=batch,
                    window=window,
                    contexts=self.contexts,
                    max_length=max(self.contexts) + window,
                    parents=parents,
                )
                for kind, parents in (("chain", None), ("tree", trees[window - 1].parents))
            }
            for index, context in enumerate(self.contexts):
                runs = {kind: made[index][1] for kind, made in passes.items()}
                turns = time_loops(runs, self.repeats)
                results.append(
                    {
                        "kernels": kernels,
                        "context": context,
                        "batch_size": batch,
                        "window": window,
                        **{f"{kind}_ms": 1e3 * turns.median_s(kind) for kind in runs},
                        "ratio": turns.speedup("chain", over="tree"),
                    }
                )
        return results

    def _stages(
        self,
        target: LanguageModel,
        draft: LanguageModel,
        plain: Sequence[Completion],
        tree: StaticTree,
    ) -> list[dict[str, Any]]:
        """Milliseconds of the stages of a round that drafts `tree`, on rows in mid-decode."""
        prompts = [one.prompt_token_ids for one in plain]
        results = []
        for batch in self.pass_batch_sizes:
            engine = Engine(
                target,
                DraftModel(draft, tree=tree),
                batch_size=batch,
                max_length=512,
                scheduler=Static(),
            )
            num_tokens = max(self.max_tokens // 2, 1)
            fill_mid_decode(
                engine.executor, prompts, num_tokens=num_tokens, draft_length=tree.num_nodes
            )
            stages = round_stages(engine.executor.parts, engine.executor.state)
            engine.reset()
            turns = time_loops(stages, self.repeats)
            ms = {f"{name}_ms": 1e3 * turns.median_s(name) for name in stages}
            share = (ms["verify_ms"] + ms["commit_ms"]) / ms["target_ms"]
            results.append({"batch_size": batch, "num_nodes": tree.num_nodes, **ms, "share": share})
        return results

    def _acceptance(
        self,
        target: LanguageModel,
        draft: LanguageModel,
        prompts: Sequence[Prompt],
        static: Mapping[int, StaticTree],
        ranks: Sequence[np.ndarray],
    ) -> tuple[list[dict[str, Any]], bool]:
        """Tokens per round of chains and trees under each rule, and whether all coupled outputs
        equal plain decoding's."""
        chain = DraftModel(draft)
        largest = max(self.nodes)
        cases: list[tuple[Verifier, float, int, Mapping[str, Drafter]]] = [
            (
                Coupled(),
                0.0,
                nodes,
                {
                    "chain": chain,
                    "static": DraftModel(draft, tree=static[nodes]),
                    "beam": DraftModel(draft, tree=self._beam(nodes)),
                },
            )
            for nodes in self.nodes
        ]
        of_beam = {"chain": chain, "beam": DraftModel(draft, tree=self._beam(largest))}
        of_static = {"chain": chain, "static": DraftModel(draft, tree=static[largest])}
        cases.append((Coupled(), self.temperature, largest, of_beam))
        cases.append((Rejection(), self.temperature, largest, of_static))
        results, all_equal = [], True
        for verifier, temperature, nodes, drafters in cases:
            engines = {
                name: Engine(
                    target,
                    drafter,
                    verifier=verifier,
                    draft_length=nodes,
                    batch_size=8,
                    max_length=512,
                )
                for name, drafter in drafters.items()
            }
            found = run_candidates(
                engines,
                prompts,
                self._params(prompts, temperature),
                repeats=1,
                is_judged=verifier.is_coupled,
                tell=lambda stage: None,
            )
            by_name = {candidate.label: candidate for candidate in found}
            for name, own in by_name.items():
                all_equal &= own.holds or not verifier.is_coupled
                tree = static[nodes] if name == "static" else chain_tree(nodes)
                chain = by_name["chain"].acceptance.emitted_per_round
                beside_static = name == "beam" and "static" in by_name
                is_predicted = verifier.is_coupled and not temperature and name != "beam"
                results.append(
                    {
                        "verifier": verifier.name,
                        "temperature": temperature,
                        "num_nodes": nodes,
                        "tree": name,
                        "emitted_per_round": own.acceptance.emitted_per_round,
                        "predicted": emitted_by_ranks(tree, ranks) if is_predicted else None,
                        "is_equal": own.holds if verifier.is_coupled else None,
                        "over_chain": own.acceptance.emitted_per_round / chain,
                        "difference": _difference(own, by_name["chain"]),
                        "over_static": _difference(own, by_name["static"])
                        if beside_static
                        else None,
                    }
                )
        return results, all_equal

    def _speeds(
        self, target: LanguageModel, draft: LanguageModel, prompts: Sequence[Prompt]
    ) -> tuple[list[dict[str, Any]], bool]:
        """Plain decoding, chains, trees, and trees with automatic size, in alternation."""
        results, holds = [], True
        params = self._params(prompts, 0.0)
        for batch_size in self.batch_sizes:
            shape: dict[str, Any] = {"batch_size": batch_size, "max_length": 512}
            largest = DraftModel(draft, tree=self._beam(max(self.trees)))
            engines = {
                "plain": Engine(target, **shape),
                **{
                    f"chain of {n}": Engine(target, DraftModel(draft), draft_length=n, **shape)
                    for n in self.chains
                },
                **{
                    f"tree of {n}": Engine(target, DraftModel(draft, tree=self._beam(n)), **shape)
                    for n in self.trees
                },
                "auto": Engine(target, largest, draft_length="auto", **shape),
            }
            found = run_candidates(
                engines, prompts, params, repeats=self.repeats, tell=lambda stage: None
            )
            holds &= all(own.holds for own in found)
            results += speed_rows(found, engines, batch_size=batch_size, label="drafts")
        return results, holds


def _difference(own: Candidate, other: Candidate) -> dict[str, Any]:
    """Emitted tokens per round minus those of another candidate, over prompts."""
    values = own.values("emitted per round") - other.values("emitted per round")
    return mean_interval(values).to_json()


def with_interval(found: Mapping[str, float] | None) -> str:
    """A difference as a table shows it."""
    return "-" if found is None else "{mean:+.3f} [{low:+.3f} .. {high:+.3f}]".format_map(found)


def chain_tree(nodes: int) -> StaticTree:
    """The likeliest token after the likeliest token, and so on."""
    return StaticTree(tuple((0,) * depth for depth in range(1, nodes + 1)))


def draft_ranks(draft: LanguageModel, completions: Sequence[Completion]) -> list[np.ndarray]:
    """For each token of greedy outputs, how many tokens the draft model found likelier, `[n]`."""

    @jax.jit
    def of_row(params, tokens):
        segments = jnp.zeros_like(tokens)
        logits = decoder.training_logits(draft.config, params, tokens, segments)[0, :-1]
        own = jnp.take_along_axis(logits, tokens[0, 1:, None], axis=1)
        return jnp.sum(logits > own, axis=1, dtype=jnp.int32)

    rank = Program(of_row, f"the ranks that {draft.name} gives")
    longest = max(len(c.prompt_token_ids + c.token_ids) for c in completions)
    found = []
    for one in completions:
        ids = one.prompt_token_ids + one.token_ids
        tokens = np.pad(np.array([ids], np.int32), ((0, 0), (0, longest - len(ids))))
        each = np.asarray(rank(draft.params, tokens))
        found.append(each[len(one.prompt_token_ids) - 1 : len(ids) - 1])
    return found


def emitted_by_ranks(tree: StaticTree, ranks: Sequence[np.ndarray]) -> float:
    """Tokens per round that a static tree would emit on outputs whose tokens have these `ranks`."""
    choices, num_rounds = set(tree.choices), 0
    for own in ranks:
        first = 0
        while first < len(own):
            depth = 0
            # The last token that may be emitted is never drafted.
            while first + depth + 1 < len(own) and tuple(own[first : first + depth + 1]) in choices:
                depth += 1
            first, num_rounds = first + depth + 1, num_rounds + 1
    return sum(map(len, ranks)) / num_rounds
