"""Compares drafters: accuracy of heads, tokens per round, the stages of a round, speed.

Accuracy and tokens per round depend on models and prompts only, not on the machine.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoint.format import weights_digest
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.heads.config import Kind, heads_config
from jaxspec.drafters.heads.drafter import Heads
from jaxspec.drafters.trees import best_static_tree
from jaxspec.engine.engine import Engine
from jaxspec.errors import SettingError
from jaxspec.kernels.base import unpacked
from jaxspec.lab.bench.measure import (
    Bench,
    Repeated,
    Tables,
    fill_mid_decode,
    of_best_fixed,
    over_outputs,
)
from jaxspec.lab.bench.stages import round_stages
from jaxspec.lab.compare import run_candidates
from jaxspec.lab.comparison import Candidate
from jaxspec.lab.intervals import Interval, ratio_interval
from jaxspec.load.drafters import choose_drafter, make_drafter
from jaxspec.load.models import load_model
from jaxspec.models import decoder
from jaxspec.models.base import LanguageModel
from jaxspec.requests.completions import Completion
from jaxspec.requests.prompts import PromptLine, encode_prompts, load_prompts
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.documents import public_name
from jaxspec.runtime.report import Columns, TextTable
from jaxspec.runtime.turns import Turns, time_loops
from jaxspec.schedulers import Static
from jaxspec.telemetry.counters import Acceptance
from jaxspec.training.head_accuracy import accuracy_of, rank_texts
from jaxspec.training.heads import init_heads
from jaxspec.training.texts import Texts, check_writer, read_texts
from jaxspec.verifiers import Verifier, make_verifier

Part: TypeAlias = Literal["accuracy", "acceptance", "costs", "speeds"]
DEMO_DRAFTERS = ("draft_model:demo-draft", "ngram", "flexdraft:demo-flexdraft")
MAX_LENGTH = 512  # more if prompts are longer
MAX_DRAFT = 64  # tokens
STAGES = ("draft", "target", "verify", "commit", "round")
NUM_RANKS = 8  # likeliest tokens that static trees choose from, and most levels of these trees
NUM_HEADS = 4  # of untrained heads
STATIC = re.compile(r"static\[(\d{1,3})\]:(.+)")
UNTRAINED = re.compile(rf"random:({'|'.join(get_args(Kind))})(?:\[(chain)\])?")


def _quartiles(name: str) -> Any:
    return lambda found: "{:.2f} ({:.2f}-{:.2f})".format(*found[name])


ACCURACY: Columns = {
    "heads": "{drafter}",
    "texts": "{domain}",
    "@1 of each head": lambda found: " ".join(f"{share:.3f}" for share in found["top1"]),
    "@5 of each head": lambda found: " ".join(f"{share:.3f}" for share in found["top5"]),
}
ACCEPTANCE: Columns = {
    "drafter": "{drafter}",
    "draft\nlength": "{draft_length}",
    "emitted\n/round": "{emitted_per_round:.3f}",
    "beyond one,\nof the first's": "{over_first:.2f}",
    "difference,\npooled": lambda found: f"{Interval.from_json(found['difference']):+.3f}",
    "equals\nplain": lambda found: {True: "yes", False: "NO", None: "-"}[found["is_equal"]],
}
COSTS: Columns = {
    "batch": "{batch_size}",
    "drafter": "{drafter}",
    "levels": "{num_levels}",
    **{f"{name}\nms": f"{{{name}_ms:.2f}}" for name in STAGES},
    "draft /\ntarget": _quartiles("draft_over_target"),
    "level / the\nfirst's": _quartiles("level_over_first"),
    "round / the\nfirst's": _quartiles("round_over_first"),
}
SPEEDS: Columns = {
    "batch": "{batch_size}",
    "drafter": "{drafter}",
    "tokens/s": "{tokens_per_s:.0f}",
    "speed-up": "{speedup:.2f}x",
    "of best\nfixed": lambda found: (
        "" if found["of_best_fixed"] is None else f"{found['of_best_fixed']:.2f}"
    ),
    "emitted\n/round": "{emitted_per_round:.2f}",
    "rounds by nodes": lambda found: ", ".join(
        f"{nodes}: {count}" for nodes, count in found["rounds_by_draft_length"].items()
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftersBench(Bench):
    """Compare drafters: tokens per round, the stages of a round, speed, and the accuracy of heads.

    Differences and ratios are to the first drafter."""

    NAME: ClassVar[str] = "drafters"
    TABLES: ClassVar[Tables] = {
        "accuracy": ("accuracy on texts of the target", ACCURACY),
        "acceptance": ("tokens per round", ACCEPTANCE),
        "costs": ("stages of a round, and ratios with their quartiles", COSTS),
        "speeds": ("speed, prefill included", SPEEDS),
    }

    target: str = "demo-target"
    """Any model that `load_model` takes."""
    drafters: tuple[str, ...] = ()
    """Drafters, each as LABEL=NAME or a NAME that `jaxspec compare --drafter` takes; default those
    that come with `demo-target`. `static[NODES]:MODEL` is a draft model with the best static tree
    for these prompts; `random:KIND` and `random:KIND[chain]` are untrained heads, to measure what
    heads cost."""
    parts: tuple[Part, ...] = ("accuracy", "acceptance", "costs", "speeds")
    """What to measure; accuracy needs `--texts`."""
    texts: pathlib.Path | None = None
    """Held-out texts that the target wrote (`jaxspec train texts --split held-out`)."""
    prompts: pathlib.Path | None = None
    """Prompt file; default the sample prompts."""
    chat: bool = False
    """Take each text prompt as a user's message, and apply the chat template."""
    draft_length: int | None = None
    """Tokens drafted per round (for a tree: nodes); default the number of nodes of each drafter's
    tree, or 4."""
    temperature: float = 0.0
    """0 is greedy."""
    verifier: Literal["coupled", "rejection", "block", "typical"] = "coupled"
    """Rule that decides how much of a draft is kept."""
    batch_sizes: tuple[int, ...] = (1, 4, 8)
    """Batch sizes of the timed rounds and runs."""
    max_tokens: int = 64
    """Tokens emitted per output; EOS is ignored."""
    repeats: int = 5
    """Turns in which rounds and runs are timed; medians are reported."""

    def check(self) -> None:
        """Raises `SettingError` for options that nothing can be measured with."""
        super().check()
        for label, name in self._names().items():
            is_made_here = STATIC.fullmatch(name) or UNTRAINED.fullmatch(name)
            if not is_made_here and choose_drafter(name) is None:
                raise SettingError(
                    f"{label} of --drafters drafts nothing; leave it out: speeds are compared with "
                    "plain decoding anyway."
                )

    def measure(self) -> dict[str, Any]:
        """The measurements that `parts` select."""
        lines, files = load_prompts(self.prompts)
        texts = None if self.texts is None else read_texts(self.texts)
        target = load_model(self.target)
        prompts = encode_prompts(lines, target, is_chat=self.chat)
        drafters = {
            label: self._drafter(name, target, prompts) for label, name in self._names().items()
        }
        found: dict[str, Any] = {"holds": True}
        if "accuracy" in self.parts and texts is not None:
            found["accuracy"] = self._accuracy(target, drafters, texts)
            found["texts_split"] = texts.header.get("split")
        if "acceptance" in self.parts:
            found["acceptance"], found["holds"] = self._acceptance(target, drafters, lines, prompts)
        if "costs" in self.parts:
            found["costs"] = self._costs(target, drafters, prompts)
        if "speeds" in self.parts:
            found["speeds"], holds = self._speeds(target, drafters, prompts)
            found["holds"] &= holds
        return {
            "prompt_files": files,
            "num_prompts": len(lines),
            "drafters": {
                label: {
                    "name": public_name(one.name),
                    "num_params": sum(leaf.size for leaf in jax.tree.leaves(unpacked(one.params))),
                }
                for label, one in drafters.items()
            },
            **found,
        }

    def document(self, **fields: Any) -> dict[str, Any]:
        """The JSON document, which contains only the labels of drafters."""
        document = super().document(**fields)
        return document | {"config": document["config"] | {"drafters": list(fields["drafters"])}}

    def tables(self, document: Mapping[str, Any]) -> list[TextTable]:
        """A table for each part, and tokens per round by domain."""
        tables = super().tables(document)
        if found := document.get("acceptance"):
            domains = {name: f"{{by_domain[{name}]:.2f}}" for name in found[0]["by_domain"]}
            columns: Columns = {"drafter": "{drafter}", **domains}
            tables.append(TextTable.of_columns("tokens per round by domain", columns, found))
        return tables

    def remarks(self, document: Mapping[str, Any]) -> list[tuple[str, str]]:
        """What the columns mean, and whether outputs equal plain decoding's."""
        notes = (
            "Tokens per round are pooled: all tokens over all rounds. Their differences have 95 % "
            "intervals over prompts. Levels are those that the timed round drafts: a level of a "
            "chain has one node, that of a tree as many as its shape allows, and a tree whose "
            "budget is spent has no more."
        )
        remarks = [(notes, "dim"), *super().remarks(document)]
        if document.get("texts_split") == "train":
            texts = (
                f"{self.texts} was written to train on (its header says so); drafters that were "
                "trained on it are less accurate on other texts."
            )
            remarks.append((texts, "yellow"))
        return remarks

    def _names(self) -> dict[str, str]:
        """The names of the drafters, by label.

        Raises:
          SettingError: there are none, or two have one label.
        """
        given = self.drafters or (DEMO_DRAFTERS if self.target == "demo-target" else ())
        if not given:
            raise SettingError(
                "No --drafters were given; name some, as in --drafters ngram "
                "clover=heads:runs/clover/heads."
            )
        names: dict[str, str] = {}
        for text in given:
            label, is_labelled, name = text.partition("=")
            if not is_labelled:
                label, name = public_name(text), text
            if label in names:
                raise SettingError(
                    f"Two of --drafters are called {label}; label them, as in --drafters one=NAME "
                    "other=NAME."
                )
            names[label] = name
        return names

    def _drafter(
        self, name: str, target: LanguageModel, prompts: Sequence[Sequence[int]]
    ) -> Drafter:
        if match := UNTRAINED.fullmatch(name):
            kind, tree = cast(tuple[Any, Any], match.groups())
            config = heads_config(kind, target.config, num_heads=NUM_HEADS)
            params = init_heads(config, target.config, target.params, jax.random.key(0))
            params = jax.tree.map(lambda leaf: leaf.astype(target.dtype), params)
            return Heads(config, params, tree=tree, name=name)
        if match := STATIC.fullmatch(name):
            num_nodes, draft = int(match[1]), load_model(match[2])
            greedy = SamplingParams(max_tokens=self.max_tokens, ignore_eos=True)
            plain = Engine(target, batch_size=8, max_length=self._max_length(prompts)).generate(
                prompts, greedy
            )
            ranks = np.concatenate(draft_ranks(draft, plain))
            by_rank = [float(np.mean(ranks == rank)) for rank in range(NUM_RANKS)]
            tree = best_static_tree(np.tile(by_rank, (NUM_RANKS, 1)), num_nodes)
            return DraftModel(draft, tree=tree)
        drafter = make_drafter(name, target)
        assert drafter is not None, "it was checked"
        return drafter

    @property
    def _rule(self) -> Verifier:
        return make_verifier(self.verifier)

    def _max_length(self, prompts: Sequence[Sequence[int]]) -> int:
        """Room for the longest prompt, its output and a draft."""
        return max(MAX_LENGTH, max(map(len, prompts)) + self.max_tokens + MAX_DRAFT)

    def _engine(
        self,
        target: LanguageModel,
        drafter: Drafter,
        prompts: Sequence[Sequence[int]],
        **settings: Any,
    ) -> Engine:
        length = self._max_length(prompts)
        settings = {"draft_length": self.draft_length, "max_length": length} | settings
        return Engine(target, drafter, verifier=self._rule, **settings)

    def _run(
        self, engines: Mapping[str, Engine], prompts: Sequence[Sequence[int]], *, repeats: int
    ) -> tuple[tuple[Candidate, ...], bool]:
        """The engines' runs, and whether all outputs are plain decoding's. Those of verifiers that
        keep only the target's distribution are other draws, so they are not compared."""
        params = [
            SamplingParams(
                max_tokens=self.max_tokens,
                temperature=self.temperature,
                seed=seed,
                ignore_eos=True,
            )
            for seed in range(len(prompts))
        ]
        found = run_candidates(engines, prompts, params, repeats=repeats, tell=lambda stage: None)
        return found, all(own.holds for own in found)

    def _accuracy(
        self, target: LanguageModel, drafters: Mapping[str, Drafter], found: Texts
    ) -> list[dict[str, Any]]:
        """How often each head is right, by domain; nothing for drafters that are not heads."""
        assert self.texts is not None
        weights = weights_digest(target.params)
        check_writer(found, self.texts, target=target.name, weights=weights)
        texts = found.texts
        if not texts:
            raise SettingError(f"There is no text in {self.texts}; give --texts a file with some.")
        row_length = max(len(text.prompt) + len(text.output) for text in texts)
        of_target = target.config, target.params
        return [
            {"drafter": label, "domain": domain, **dataclasses.asdict(accuracy)}
            for label, one in drafters.items()
            if isinstance(one, Heads)
            for domain, accuracy in accuracy_of(
                rank_texts(one.config, one.params, of_target, texts, row_length)
            ).items()
        ]

    def _acceptance(
        self,
        target: LanguageModel,
        drafters: Mapping[str, Drafter],
        lines: Sequence[PromptLine],
        prompts: Sequence[Sequence[int]],
    ) -> tuple[list[dict[str, Any]], bool]:
        """Tokens per round, and whether all outputs are plain decoding's."""
        engines = {
            label: self._engine(target, drafter, prompts, batch_size=8)
            for label, drafter in drafters.items()
        }
        found, holds = self._run(engines, prompts, repeats=0)
        domains = [
            str(line.fields.get("domain", line.fields.get("category", "all"))) for line in lines
        ]
        results = [
            {
                "drafter": own.label,
                "draft_length": engines[own.label].shape.verify_length - 1,
                "emitted_per_round": own.acceptance.emitted_per_round,
                "per_position": list(own.acceptance.per_position),
                "over_first": _beyond_one(own) / (_beyond_one(found[0]) or float("nan")),
                "difference": ratio_interval(
                    *own.by_prompt(), minus=found[0].by_prompt()
                ).to_json(),
                "by_domain": by_domain(own, domains),
                "is_equal": own.holds if self._rule.is_coupled else None,
            }
            for own in found
        ]
        return results, holds

    def _costs(
        self,
        target: LanguageModel,
        drafters: Mapping[str, Drafter],
        prompts: Sequence[Sequence[int]],
    ) -> list[dict[str, Any]]:
        """Milliseconds of the stages of a round on rows in mid-decode, in alternation."""
        first, results = next(iter(drafters)), []
        for batch_size in self.batch_sizes:
            stages, num_levels = {}, {}
            for label, drafter in drafters.items():
                stages[label], num_levels[label] = self._stages(
                    target, drafter, batch_size, prompts
                )
            # Those that are compared run one after the other.
            turns = time_loops(
                {(label, stage): stages[label][stage] for stage in STAGES for label in drafters},
                self.repeats,
            )
            for label in drafters:
                levels = num_levels[first] / num_levels[label]
                over_first = _over(turns, (label, "draft"), (first, "draft"))
                results.append(
                    {
                        "batch_size": batch_size,
                        "drafter": label,
                        "num_levels": num_levels[label],
                        **{f"{stage}_ms": 1e3 * turns.median_s((label, stage)) for stage in STAGES},
                        "draft_over_target": _over(turns, (label, "draft"), (label, "target")),
                        "level_over_first": [levels * ratio for ratio in over_first],
                        "round_over_first": _over(turns, (label, "round"), (first, "round")),
                    }
                )
        return results

    def _stages(
        self,
        target: LanguageModel,
        drafter: Drafter,
        batch_size: int,
        prompts: Sequence[Sequence[int]],
    ) -> tuple[dict[str, Repeated], int]:
        """The stages of a round on rows in mid-decode, and how many levels it drafts."""
        engine = self._engine(target, drafter, prompts, batch_size=batch_size, scheduler=Static())
        executor = engine.executor
        fill_mid_decode(
            executor,
            prompts,
            num_tokens=max(self.max_tokens // 2, 1),
            draft_length=executor.shape.verify_length - 1,
        )
        # Of a copy, because the round that follows takes the state over.
        stages = round_stages(executor.parts, jax.tree.map(jnp.copy, executor.state))
        before = np.array(executor.state.counts.drafted_at)
        executor.run(1)
        is_drafted = np.any(np.array(executor.state.counts.drafted_at) > before, axis=0)
        engine.reset()
        return stages, max(int(np.sum(is_drafted)), 1)

    def _speeds(
        self,
        target: LanguageModel,
        drafters: Mapping[str, Drafter],
        prompts: Sequence[Sequence[int]],
    ) -> tuple[list[dict[str, Any]], bool]:
        """Tokens per second of plain decoding and of every drafter, with its draft length and with
        an automatic one, in alternation."""
        results, all_hold = [], True
        for batch_size in self.batch_sizes:
            length = self._max_length(prompts)
            engines = {"plain": Engine(target, batch_size=batch_size, max_length=length)}
            for label, one in drafters.items():
                fixed = engines[label] = self._engine(target, one, prompts, batch_size=batch_size)
                engines[f"{label}, auto"] = self._engine(
                    target,
                    one,
                    prompts,
                    batch_size=batch_size,
                    draft_length="auto",
                    verify_length=fixed.shape.verify_length,
                )
            found, holds = self._run(engines, prompts, repeats=self.repeats)
            all_hold &= holds
            beside_best = of_best_fixed(found, engines.values())
            results += [
                {
                    "batch_size": batch_size,
                    "drafter": own.label,
                    "tokens_per_s": own.tokens_per_s,
                    "speedup": float(np.median(own.speedups(found[0]))),
                    "speedups": own.speedups(found[0]).tolist(),
                    "of_best_fixed": beside_best[own.label],
                    "emitted_per_round": own.acceptance.emitted_per_round,
                    "rounds_by_draft_length": engine.rounds_by_draft_length,
                }
                for own, engine in zip(found, engines.values(), strict=True)
            ]
        return results, all_hold


def _over(turns: Turns[Any], name: Any, first: Any) -> list[float]:
    """Time over that of `first`: the median of the turns' ratios, and their quartiles."""
    return np.quantile(turns.ratios(first, over=name), (0.5, 0.25, 0.75)).tolist()


def _beyond_one(own: Candidate) -> float:
    """Tokens emitted per round beyond the one that plain decoding emits."""
    return own.acceptance.emitted_per_round - 1


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


def draft_ranks(draft: LanguageModel, completions: Sequence[Completion]) -> list[np.ndarray]:
    """For each token of greedy outputs, how many tokens the draft model found likelier, `[n]`."""

    def of_row(params, tokens):
        logits = decoder.training_logits(draft.config, params, tokens, jnp.zeros_like(tokens))[0]
        own = jnp.take_along_axis(logits[:-1], tokens[0, 1:, None], axis=1)
        return jnp.sum(logits[:-1] > own, axis=1, dtype=jnp.int32)

    return over_outputs(of_row, draft.params, completions, f"the ranks that {draft.name} gives")
