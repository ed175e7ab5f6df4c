"""Compares heads with each other, a draft model and n-grams: accuracy, acceptance and cost.

Accuracy and tokens per round depend on models and prompts only, not on the machine. All heads draft
the same trees, so that only their predictions differ.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoint.format import weights_digest
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.growth import Tree
from jaxspec.drafters.heads.config import Kind, heads_config
from jaxspec.drafters.heads.drafter import Heads
from jaxspec.drafters.ngram import NGram
from jaxspec.drafters.trees import BeamTree, BudgetTree
from jaxspec.engine.engine import Engine
from jaxspec.errors import SettingError
from jaxspec.kernels.base import unpacked
from jaxspec.lab.bench.measure import (
    PairBench,
    Repeated,
    fill_mid_decode,
)
from jaxspec.lab.bench.speeds import SPEEDS, speed_rows
from jaxspec.lab.bench.stages import round_stages
from jaxspec.lab.compare import Candidate, mean_interval, run_candidates
from jaxspec.lab.cost import model as cost
from jaxspec.lab.cost.heads import predicted_draft
from jaxspec.load.drafters import load_drafter
from jaxspec.models.base import LAST, LanguageModel
from jaxspec.models.registry import PRESETS
from jaxspec.requests.prompts import PromptLine, encode_prompts, load_prompts
from jaxspec.requests.requests import Prompt
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.documents import public_name
from jaxspec.runtime.report import Columns, TextTable
from jaxspec.runtime.turns import K, Turns, time_loops
from jaxspec.schedulers import Static
from jaxspec.telemetry.counters import Acceptance
from jaxspec.training.head_accuracy import measure_head_accuracy
from jaxspec.training.heads import init_heads
from jaxspec.training.texts import Texts, check_writer, read_texts

Part: TypeAlias = Literal["accuracy", "acceptance", "costs", "speeds", "predicted"]
# Targets and draft models of the papers' sizes, for which the draft stage is predicted.
PAIRS = (("vicuna-7b", "vicuna-68m"), ("qwen3-8b", "qwen3-0.6b"), ("glm-4-9b", "glm-4-draft-0.6b"))
DEVICE = "h200"
BUDGET = 8  # largest tree from Clover's budget; larger ones are from beam search
WIDTH = 4  # of the beam
DEPTH = 8  # of the draft model's beam, at most
MOST_NODES = WIDTH + (DEPTH - 1) * WIDTH**2  # candidates of that beam
ACCURACY: Columns = {
    "heads": "{heads}",
    "texts": "{domain}",
    "@1 of each head": lambda found: " ".join(f"{share:.3f}" for share in found["top1"]),
    "@5 of each head": lambda found: " ".join(f"{share:.3f}" for share in found["top5"]),
}
ACCEPTANCE: Columns = {
    "nodes": "{num_nodes}",
    "drafter": "{drafter}",
    "emitted\n/round": "{emitted_per_round:.3f}",
    "beyond the first\nover {first}": "{over_first:.2f}",
    "difference per prompt": lambda found: "{mean:+.3f} [{low:+.3f} .. {high:+.3f}]".format_map(
        found["difference"]
    ),
    "equals\nplain": lambda found: "yes" if found["is_equal"] else "NO",
}
COSTS: Columns = {
    "batch": "{batch_size}",
    "drafter": "{drafter}",
    "levels": "{num_levels}",
    "draft\nms": "{draft_ms:.2f}",
    "target\nms": "{target_ms:.2f}",
    "commit\nms": "{commit_ms:.2f}",
    "draft/\ntarget": "{draft_share:.2f}",
    "level/\nstep": "{level_over_draft_step:.2f}",
    "quartiles": lambda found: quartiles(found["level_quartiles"]),
}
TAPS: Columns = {
    "batch": "{batch_size}",
    "round ms": "{plain_ms:.3f}",
    "with taps": "{taps_ms:.3f}",
    "ratio": "{ratio:.3f}",
    "quartiles": lambda found: quartiles(found["quartiles"]),
}
PREDICTED: Columns = {
    "target": "{target}",
    "batch": "{batch_size}",
    "heads": "{kind}",
    "draft ms": "{heads_ms:.3f}",
    "block ms": "{block_ms:.3f}",
    "draft model ms": "{draft_model_ms:.3f}",
    "target ms": "{target_ms:.3f}",
}


@dataclasses.dataclass(frozen=True)
class _TappedNGram(NGram):
    """An n-gram drafter that is given features, `width` numbers of `dtype` each, and keeps those of
    the last round; XLA would not compute features that nothing keeps."""

    width: int = 0
    dtype: Any = None
    taps: ClassVar[tuple[int, ...]] = (LAST,)

    def init(self, shape):
        """No features yet, `[B, T, 1, E]`."""
        return jnp.zeros((shape.batch_size, shape.verify_length, 1, self.width), self.dtype)

    def commit(self, shape, params, state, rows, info):
        """The features of the round."""
        return state.at[:, : info.features.shape[1]].set(info.features)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadsBench(PairBench):
    """Compare heads, a draft model and an n-gram: accuracy, acceptance, costs, speed."""

    NAME: ClassVar[str] = "heads"

    heads: tuple[str, ...] = ()
    """Heads, each as LABEL=NAME or a NAME that `load_drafter` takes; the others are compared with
    the first. `random:KIND` is untrained heads, to measure what heads cost."""
    parts: tuple[Part, ...] = ("accuracy", "acceptance", "costs", "speeds", "predicted")
    """What to measure; accuracy needs `--texts`."""
    texts: pathlib.Path | None = None
    """Held-out texts that the target wrote (`jaxspec train texts --split held-out`)."""
    prompts: pathlib.Path | None = None
    """Prompt file; default the sample prompts."""
    nodes: tuple[int, ...] = (4, 16)
    """Sizes of the trees; up to 8 nodes they are Clover's with that budget, larger ones are from
    beam search."""
    batch_sizes: tuple[int, ...] = (1, 4, 8)
    """Batch sizes of the timed runs."""
    max_tokens: int = 64
    """Tokens emitted per output; EOS is ignored."""
    repeats: int = 3
    """Timed runs of each kind; the median is reported."""
    turns: int = 25
    """Turns in which stages and rounds are timed; medians are reported."""

    def check(self) -> None:
        """Raises `SettingError` for options that nothing can be measured with."""
        super().check()
        if max(self.nodes) > MOST_NODES:
            raise SettingError(
                f"--nodes {max(self.nodes)} was given; the draft model's beam of width {WIDTH} and "
                f"depth {DEPTH} has {MOST_NODES} candidates, so give at most {MOST_NODES}."
            )
        if not self.heads:
            raise SettingError(
                "No --heads were given; name some that jaxspec train heads wrote, as in "
                "--heads medusa=runs/medusa/heads clover=runs/clover/heads, or for their costs "
                "untrained ones, as in random:clover."
            )

    def measure(self) -> dict[str, Any]:
        """The measurements that `parts` select."""
        names = {}
        for text in self.heads:
            label, is_labelled, name = text.partition("=")
            if not is_labelled:
                label, name = public_name(text), text
            if label in names:
                raise SettingError(
                    f"Two of --heads are called {label}; label them, as in --heads one=NAME "
                    "other=NAME."
                )
            names[label] = name
        lines, files = load_prompts(self.prompts)
        texts = None if self.texts is None else read_texts(self.texts)
        target, draft = self.load()
        heads = {label: self._heads(label, name, target) for label, name in names.items()}
        found: dict[str, Any] = {"holds": True, "first": next(iter(heads))}
        if "accuracy" in self.parts and texts is not None:
            found["accuracy"] = self._accuracy(target, heads, texts)
        if "acceptance" in self.parts:
            found["acceptance"], holds = self._acceptance(target, draft, heads, lines)
            found["holds"] &= holds
        prompts = [line.prompt for line in lines]
        if "costs" in self.parts:
            ids = encode_prompts(lines, target)
            found["costs"] = self._costs(target, draft, heads, ids)
            found["taps"] = self._taps(target, ids)
        if "speeds" in self.parts:
            found["speeds"], holds = self._speeds(target, draft, heads, prompts)
            found["holds"] &= holds
        if "predicted" in self.parts:
            found["predicted"] = self._predicted()
        sizes = {
            label: sum(leaf.size for leaf in jax.tree.leaves(one.params))
            for label, one in heads.items()
        }
        return {
            "prompt_files": files,
            "num_prompts": len(lines),
            "drafters": {label: one.config.to_json() for label, one in heads.items()},
            "num_params": sizes,
            **found,
        }

    def document(self, **fields: Any) -> dict[str, Any]:
        """The JSON document, which contains only the labels of heads."""
        document = super().document(**fields)
        return document | {"config": document["config"] | {"heads": list(fields["drafters"])}}

    def tables(self, document: Mapping[str, Any]) -> list[TextTable]:
        """A table for each part."""
        first = document["first"]
        columns = {
            "accuracy": ("accuracy on held-out texts of the target", ACCURACY),
            "acceptance": (
                "tokens per round",
                {name.format(first=first): value for name, value in ACCEPTANCE.items()},
            ),
            "costs": ("stages of a round", COSTS),
            "taps": ("a round with taps, beside the same without", TAPS),
            "speeds": ("speed, prefill included", SPEEDS),
            "predicted": (
                f"drafts of {min(self.nodes)} tokens on an {DEVICE}: inferred",
                PREDICTED,
            ),
        }
        tables = [
            TextTable.of_columns(title, of_part, document[part])
            for part, (title, of_part) in columns.items()
            if part in document
        ]
        if "acceptance" in document:
            found = document["acceptance"]
            domains = {name: f"{{by_domain[{name}]:.2f}}" for name in found[0]["by_domain"]}
            by_domain: Columns = {"nodes": "{num_nodes}", "drafter": "{drafter}", **domains}
            tables.append(TextTable.of_columns("tokens per round by domain", by_domain, found))
        return tables

    def remarks(self, document: Mapping[str, Any]) -> list[tuple[str, str]]:
        """What the columns mean, and whether outputs equal plain decoding's."""
        found = [
            (
                f"Differences in tokens per round are to {document['first']}, means over prompts "
                "with their 95% bootstrap intervals. A draft step is one of the draft model's "
                "chain. A level of a chain has one node, that of a tree as many as its shape "
                "allows; levels are those that the timed round drafts, and a tree whose budget is "
                "spent has no more. Ratios are medians over turns, beside their quartiles.",
                "dim",
            )
        ]
        if not document["holds"]:
            found.append(("Some outputs differ from plain decoding's: this is a bug.", "bold red"))
        return found

    def _heads(self, label: str, name: str, target: LanguageModel) -> Heads:
        """The heads of this name; untrained ones have one for each node of the smallest tree."""
        kind: Any = name.removeprefix("random:")
        if kind != name:
            if kind not in get_args(Kind):
                raise SettingError(
                    f"{name} of --heads was given; untrained heads are random:KIND, where KIND is "
                    f"one of {', '.join(get_args(Kind))}."
                )
            config = heads_config(kind, target.config, num_heads=min(self.nodes))
            params = init_heads(config, target.config, unpacked(target.params), jax.random.key(0))
            params = jax.tree.map(lambda leaf: leaf.astype(target.dtype), params)
            return Heads(config, params, name=name)
        found = load_drafter(name, target, kind="heads")
        if not isinstance(found, Heads):
            raise SettingError(f"{label} of --heads is no heads but {found.name}; leave it out.")
        return found

    @property
    def _params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, ignore_eos=True)

    def _accuracy(
        self, target: LanguageModel, heads: Mapping[str, Heads], found: Texts
    ) -> list[dict[str, Any]]:
        assert self.texts is not None
        weights = weights_digest(target.params)
        check_writer(found, self.texts, target=target.name, weights=weights)
        texts = found.texts
        if not texts:
            raise SettingError(f"There is no text in {self.texts}; give --texts a file with some.")
        row_length = max(len(text.prompt) + len(text.output) for text in texts)
        return [
            {"heads": label, "domain": domain, **dataclasses.asdict(accuracy)}
            for label, one in heads.items()
            for domain, accuracy in measure_head_accuracy(
                one.config,
                unpacked(one.params),
                (target.config, unpacked(target.params)),
                texts,
                row_length,
            ).items()
        ]

    def _acceptance(
        self,
        target: LanguageModel,
        draft: LanguageModel,
        heads: Mapping[str, Heads],
        lines: Sequence[PromptLine],
    ) -> tuple[list[dict[str, Any]], bool]:
        """Tokens per round of every drafter and tree size, and whether all outputs equal plain
        decoding's."""
        results, holds = [], True
        domains = [str(line.fields.get("domain", "all")) for line in lines]
        for nodes in self.nodes:
            drafters: dict[str, Drafter] = {
                **{label: with_nodes(one, nodes) for label, one in heads.items()},
                "draft model, chain": DraftModel(draft),
                "draft model, tree": DraftModel(
                    draft, tree=BeamTree(WIDTH, min(nodes, DEPTH), nodes)
                ),
                "n-gram": NGram(),
            }
            engines = {
                label: Engine(target, drafter, draft_length=nodes, batch_size=8, max_length=512)
                for label, drafter in drafters.items()
            }
            found = run_candidates(
                engines,
                [line.prompt for line in lines],
                self._params,
                repeats=1,
                tell=lambda stage: None,
            )
            for own in found:
                holds &= own.holds
                results.append(
                    {
                        "num_nodes": nodes,
                        "drafter": own.label,
                        "emitted_per_round": own.acceptance.emitted_per_round,
                        "is_equal": own.holds,
                        "by_domain": by_domain(own, domains),
                        **beside(own, found[0]),
                    }
                )
        return results, holds

    def _costs(
        self,
        target: LanguageModel,
        draft: LanguageModel,
        heads: Mapping[str, Heads],
        prompts: Sequence[Sequence[int]],
    ) -> list[dict[str, Any]]:
        """Stages of rounds of the smallest tree, of a chain of the heads, and of the draft model's
        chain of as many nodes, in alternation."""
        nodes, first = min(self.nodes), "draft model, chain"
        results = []
        for batch in sorted({min(self.batch_sizes), max(self.batch_sizes)}):
            drafters: dict[str, Drafter] = {first: DraftModel(draft)}
            for label, one in heads.items():
                chain = Heads(one.config, one.params, tree="chain", name=one.label)
                drafters |= {f"{label}, chain": chain, label: with_nodes(one, nodes)}
            stages, num_levels = {}, {}
            for label, drafter in drafters.items():
                stages[label], num_levels[label] = self._round(
                    target, drafter, nodes, batch, prompts
                )
            # Those that are compared run one after the other.
            runs = {
                (label, stage): stages[label][stage]
                for stage in ("draft", "target", "commit")
                for label in drafters
            }
            turns = time_loops(runs, self.turns)
            for label in drafters:
                ms = {
                    f"{stage}_ms": 1e3 * turns.median_s((label, stage))
                    for stage in ("draft", "target", "commit")
                }
                times_step = num_levels[first] / num_levels[label]
                draft_share, _ = _over(turns, (label, "draft"), (label, "target"))
                over_chain, quarters = _over(turns, (label, "draft"), (first, "draft"))
                results.append(
                    {
                        "batch_size": batch,
                        "drafter": label,
                        "num_nodes": nodes,
                        "num_levels": num_levels[label],
                        **ms,
                        "draft_share": draft_share,
                        "level_over_draft_step": times_step * over_chain,
                        "level_quartiles": [times_step * quarter for quarter in quarters],
                    }
                )
        return results

    def _taps(
        self, target: LanguageModel, prompts: Sequence[Sequence[int]]
    ) -> list[dict[str, Any]]:
        """Rounds of one drafter with and without taps."""
        results = []
        for batch in sorted({min(self.batch_sizes), max(self.batch_sizes)}):
            tapped = _TappedNGram(width=target.config.width, dtype=target.dtype)
            drafters = {"plain": NGram(), "taps": tapped}
            runs = {
                label: self._round(target, drafter, 4, batch, prompts)[0]["round"]
                for label, drafter in drafters.items()
            }
            turns = time_loops(runs, 2 * self.turns + 1)
            ratio, quarters = _over(turns, "taps", "plain")
            results.append(
                {
                    "batch_size": batch,
                    **{f"{label}_ms": 1e3 * turns.median_s(label) for label in runs},
                    "ratio": ratio,
                    "quartiles": quarters,
                }
            )
        return results

    def _round(
        self,
        target: LanguageModel,
        drafter: Drafter,
        nodes: int,
        batch: int,
        prompts: Sequence[Sequence[int]],
    ) -> tuple[dict[str, Repeated], int]:
        """The stages of a round on rows in mid-decode, and the levels that it drafts; of heads with
        fewer than `nodes` in a chain, as many as there are."""
        nodes = min(nodes, drafter.num_nodes or nodes)
        engine = Engine(
            target,
            drafter,
            draft_length=nodes,
            batch_size=batch,
            max_length=512,
            scheduler=Static(),
        )
        fill_mid_decode(
            engine.executor, prompts, num_tokens=max(self.max_tokens // 2, 1), draft_length=nodes
        )
        executor = engine.executor
        # Of a copy, because the round that follows takes the state over.
        stages = round_stages(executor.loop, jax.tree.map(jnp.copy, executor.state))
        before = np.array(executor.state.counts.drafted_at)
        executor.run(1)
        is_drafted = np.any(np.array(executor.state.counts.drafted_at) > before, axis=0)
        engine.reset()
        return stages, int(np.sum(is_drafted))

    def _speeds(
        self,
        target: LanguageModel,
        draft: LanguageModel,
        heads: Mapping[str, Heads],
        prompts: Sequence[Prompt],
    ) -> tuple[list[dict[str, Any]], bool]:
        """Tokens per second of plain decoding and of every drafter, in alternation; for heads also
        with an automatic tree size."""
        results, holds = [], True
        few, many = min(self.nodes), max(self.nodes)
        for batch_size in self.batch_sizes:
            shape: dict[str, Any] = {"batch_size": batch_size, "max_length": 512}
            engines = {"plain": Engine(target, **shape)}
            engines["draft model"] = Engine(target, DraftModel(draft), draft_length=few, **shape)
            engines["n-gram"] = Engine(target, NGram(), draft_length=few, **shape)
            for label, one in heads.items():
                small = with_nodes(one, few)
                large = with_nodes(one, many)
                engines[f"{label}, {few}"] = Engine(target, small, **shape)
                engines[f"{label}, auto"] = Engine(target, large, draft_length="auto", **shape)
            found = run_candidates(
                engines,
                prompts,
                self._params,
                repeats=self.repeats,
                tell=lambda stage: None,
            )
            holds &= all(own.holds for own in found)
            results += speed_rows(found, engines, batch_size=batch_size)
        return results, holds

    def _predicted(self) -> list[dict[str, Any]]:
        """The cost model's predictions for chains of heads and of draft models of real sizes."""
        device = cost.DEVICES[DEVICE]
        results = []
        for (target, draft), batch in itertools.product(PAIRS, (1, 8)):
            pair = cost.Pair(
                target=PRESETS[target],
                target_device=device,
                draft=PRESETS[draft],
                draft_device=device,
                itemsize=2,
                block=None,
            )
            for kind in get_args(Kind):
                shape = {"batch": batch, "context": 1024, "num_levels": min(self.nodes)}
                found = predicted_draft(kind, pair, device, **shape)
                results.append({"target": target, "batch_size": batch, "kind": kind, **found})
        return results


def _over(turns: Turns[K], name: K, first: K) -> tuple[float, list[float]]:
    """Time over that of `first`: the median of the turns' ratios, and their quartiles."""
    low, median, high = np.quantile(turns.ratios(first, over=name), (0.25, 0.5, 0.75)).tolist()
    return median, [low, high]


def quartiles(found: Sequence[float]) -> str:
    """As a table shows them."""
    low, high = found
    return f"{low:.2f}-{high:.2f}"


def with_nodes(heads: Heads, nodes: int) -> Heads:
    """The same heads with a tree of `nodes` nodes, or of all candidates if there are fewer."""
    depth = heads.config.num_heads
    tree: Tree = BudgetTree(nodes=nodes, depth=min(depth, nodes))
    if nodes > BUDGET:
        tree = BeamTree(WIDTH, depth, min(nodes, WIDTH + (depth - 1) * WIDTH**2))
    return Heads(heads.config, heads.params, tree=tree, name=heads.label)


def beside(own: Candidate, first: Candidate) -> dict[str, Any]:
    """Ratio to another's tokens emitted beyond the first of each round, and the difference in
    emitted tokens per round on each prompt."""
    difference = own.values("emitted per round") - first.values("emitted per round")
    beyond = own.acceptance.emitted_per_round - 1, first.acceptance.emitted_per_round - 1
    return {
        "over_first": beyond[0] / beyond[1] if beyond[1] else float("nan"),
        "difference": mean_interval(difference).to_json(),
    }


def by_domain(own: Candidate, domains: Sequence[str]) -> dict[str, float]:
    """Tokens emitted per round on the prompts of each domain."""
    return {
        domain: Acceptance.total(
            [
                one.acceptance
                for one, other in zip(own.completions, domains, strict=True)
                if other == domain
            ]
        ).emitted_per_round
        for domain in dict.fromkeys(domains)
    }
