"""What the paper claims and measured, what this study finds, and why they differ where they do.

Each claim is one function of the study's cells. The paper's figures are of an A100 and of models of
7 to 9 billion parameters; rounds, grouping and equality of outputs can be compared with them, times
only in their direction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from jaxspec.studies import published_figures as theirs
from jaxspec.studies.published import BROKEN
from jaxspec.studies.workload import PLAIN

Cells: TypeAlias = Mapping[str, dict[str, Any]]
Answer: TypeAlias = Literal["yes", "no", "in part", "not measured"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """One line of the table.

    Attributes:
      claim: in a sentence.
      paper: its figures, and where they stand.
      ours: what this study measured.
      reproduced: whether ours agree.
      why: why not, or what the figures mean; may be empty.
    """

    claim: str
    paper: str
    ours: str
    reproduced: Answer
    why: str = ""


class _Missing(Exception):
    """The study has no cell for a claim."""


def check_claims(cells: Cells) -> list[Claim]:
    """All claims, as far as the study's cells answer them."""
    checks: Sequence[Callable[[Cells], Claim]] = (
        _broken_systems,
        _eqspec_is_exact,
        _exspec_is_exact,
        _realignment_is_needed,
        _realignment_costs,
        _exspec_is_faster,
        _grouping_is_why,
        _grouping_rates,
        _exspec_scales,
        _speculation_pays,
        _serving,
    )
    return [check(cells) for check in checks]


def _decoding(cells: Cells, system: str, near: int | None = None) -> list[dict[str, Any]]:
    """The cells of a system by batch size, or the one whose batch size is nearest."""
    found = [
        cell
        for name, cell in cells.items()
        if name.startswith("decode-") and cell["system"] == system
    ]
    if not found:
        raise _Missing(system)
    if near is not None:
        return [min(found, key=lambda cell: abs(cell["batch_size"] - near))]
    return sorted(found, key=lambda cell: cell["batch_size"])


def _claim(claim: str, paper: str, measure: Callable[[], tuple[str, Answer, str]]) -> Claim:
    """The claim with what `measure` finds: ours, reproduced, why."""
    try:
        ours, reproduced, why = measure()
    except _Missing as missing:
        ours, reproduced, why = "", "not measured", f"no cell of {missing} in this study"
    return Claim(claim=claim, paper=paper, ours=ours, reproduced=reproduced, why=why)


def _range(system: str) -> str:
    """The paper's lowest and highest exact match of a system."""
    exact = [found[0] for found in theirs.EQUIVALENCE[system].values()]
    return f"{min(exact):.1f} to {max(exact):.1f} %"


def _broken_systems(cells: Cells) -> Claim:
    def measure() -> tuple[str, Answer, str]:
        controls = [cell for name, cell in cells.items() if name.startswith("controls-")]
        if not controls:
            raise _Missing("BSP and DSD")
        found = [
            (name, cell["batch_size"], cell["systems"][name]["exact_tokens"])
            for cell in controls
            for name in BROKEN
        ]
        ours = "exact match: " + ", ".join(
            f"{name} {share:.0%} at batch {size}" for name, size, share in found
        )
        worst = max(share for _, _, share in found)
        answer: Answer = "yes" if worst < 0.1 else "in part" if worst < 0.5 else "no"
        why = (
            "Their mistakes are rebuilt as faults of this package's loop. The same program without "
            "them is the control run. A model that takes its positions from the attention mask "
            "(OPT) would not suffer from BSP's."
        )
        return ours, answer, why

    paper = f"exact match: BSP {_range('BSP')}, DSD {_range('DSD')} (table 1)"
    return _claim("BSP and DSD do not emit the target's output", paper, measure)


def _is_exact(cells: Cells, system: str, why: str) -> Claim:
    def measure() -> tuple[str, Answer, str]:
        found = [cell["equivalence"] for cell in _decoding(cells, system)]
        num_faults = sum(each["num_faults"] for each in found)
        lowest = min(each["exact_tokens"] for each in found)
        ours = f"at least {lowest:.1%} exact; {num_faults} outputs differ otherwise than at ties"
        return ours, "yes" if num_faults == 0 else "no", why

    claim = f"{system} emits the target's output, up to rounding"
    return _claim(claim, f"exact match: {_range(system)} (table 1)", measure)


def _eqspec_is_exact(cells: Cells) -> Claim:
    return _is_exact(
        cells,
        "EQSPEC",
        "Here each difference is proven to be a tie within rounding; the paper attributes its own "
        "to fp16, and counts text after the end of an output as a difference.",
    )


def _exspec_is_exact(cells: Cells) -> Claim:
    return _is_exact(cells, "EXSPEC", "As for EQSPEC.")


def _realignment_is_needed(cells: Cells) -> Claim:
    def measure() -> tuple[str, Answer, str]:
        found = _decoding(cells, "jaxspec")
        moved = sum(cell["schedule"]["num_realignments"] for cell in found)
        faults = sum(cell["equivalence"]["num_faults"] for cell in found)
        ours = f"jaxspec: {moved} realignments, {faults} wrong outputs"
        why = (
            "With an offset per row nothing has to be moved: slot i of a row holds position i, and "
            "rejected slots are overwritten."
        )
        return ours, "no" if moved == faults == 0 else "in part", why

    return _claim(
        "Realignment is an inherent cost of correct batched speculation",
        "stated (section 3)",
        measure,
    )


def _realignment_costs(cells: Cells) -> Claim:
    def measure() -> tuple[str, Answer, str]:
        found = [cell for cell in _decoding(cells, "EQSPEC") if "time_breakdown" in cell]
        if not found:
            raise _Missing("EQSPEC with a time breakdown")
        shares = {
            cell["batch_size"]: cell["time_breakdown"]["seconds"]["align"]
            / cell["time_breakdown"]["wall_s"]
            for cell in found
        }
        ours = ", ".join(f"{share:.1%} at batch {size}" for size, share in shares.items())
        why = (
            "Their code copies rows one by one with several waits for the device per row and "
            "layer; here a realignment is one compiled gather. The paper's own figures differ from "
            "section to section."
        )
        return ours, "yes" if max(shares.values()) > 0.2 else "no", why

    paper = "EQSPEC: 27.7 % of the time at batch 4 (table 2), up to 40 % at 8 or 32 (1, 3.2, 5b)"
    return _claim("Realignment takes a large share of the time", paper, measure)


def _exspec_is_faster(cells: Cells) -> Claim:
    def measure() -> tuple[str, Answer, str]:
        (ours_eq,), (ours_ex,) = (_decoding(cells, name, near=4) for name in ("EQSPEC", "EXSPEC"))
        ratio = ours_ex["tokens_per_s"] / ours_eq["tokens_per_s"]
        rounds = ours_ex["schedule"]["num_rounds"] / ours_eq["schedule"]["num_rounds"]
        ours = f"{ratio:.2f}x at batch {ours_eq['batch_size']}, in {rounds:.2f}x the rounds"
        answer: Answer = "yes" if ratio > 1.3 else "in part" if ratio > 1.05 else "no"
        return ours, answer, "The rounds saved do not depend on the machine; the time saved does."

    there = theirs.TIME_BREAKDOWN
    ratio = there["EXSPEC"]["tokens_per_s"] / there["EQSPEC"]["tokens_per_s"]
    calls = there["EXSPEC"]["calls"] / there["EQSPEC"]["calls"]
    paper = f"{ratio:.2f}x at batch 4, in {calls:.2f}x the rounds (table 2)"
    return _claim("EXSPEC is faster than EQSPEC", paper, measure)


def _grouping_is_why(cells: Cells) -> Claim:
    def measure() -> tuple[str, Answer, str]:
        rounds = [cell for name, cell in cells.items() if name.startswith("rounds-")]
        if not rounds:
            raise _Missing("rounds")
        cell = rounds[0]
        counts = {
            name: system["schedule"]["num_rounds"] for name, system in cell["systems"].items()
        }
        schedule = cell["systems"]["EXSPEC"]["schedule"]
        grouped = schedule["num_grouped_rounds"] / schedule["num_rounds"]
        ours = (
            f"batch {cell['batch_size']}: {grouped:.1%} of EXSPEC's rounds are groups; rounds: "
            f"EQSPEC {counts['EQSPEC']}, EXSPEC {counts['EXSPEC']}, jaxspec, which groups nothing, "
            f"{counts['jaxspec']}"
        )
        why = (
            "Rounds are saved by filling a row as soon as it is free. The log in the paper's "
            "repository says the same: 40 of 952 calls were groups."
        )
        return ours, "no" if grouped < 0.5 else "yes", why

    return _claim("EXSPEC gains by grouping rows of one length", "stated (section 3.3)", measure)


def _grouping_rates(cells: Cells) -> Claim:
    def measure() -> tuple[str, Answer, str]:
        grouping = cells.get("grouping")
        if not grouping or not grouping["rates"]:
            raise _Missing("grouping")
        window = min({rate["window_size"] for rate in grouping["rates"]}, key=lambda w: abs(w - 50))
        rates = {
            rate["batch_size"]: rate["by_calls"]
            for rate in grouping["rates"]
            if rate["window_size"] == window
            and rate["layout"] == "aligned"
            and rate["lengths"] == "random lengths"
        }
        ours = ", ".join(f"{rate:.1%} at {size}" for size, rate in rates.items())
        sizes = sorted(rates)
        falls = len(sizes) > 1 and rates[sizes[0]] > rates[sizes[-1]]
        why = "Which rows meet at one length depends on prompts and acceptance."
        return f"pool of {window}: {ours}", "yes" if falls else "no", why

    found = theirs.GROUPING["random lengths"]
    paper = ", ".join(f"{rate:.1f} % at {size}" for size, rate in found.items())
    return _claim("Groups become rare as the batch grows", f"{paper} (figure 5c)", measure)


def _exspec_scales(cells: Cells) -> Claim:
    def measure() -> tuple[str, Answer, str]:
        found = {cell["batch_size"]: cell for cell in _decoding(cells, "EXSPEC")}
        if not {1, 8} <= set(found):
            raise _Missing("EXSPEC at batch 1 and 8")
        own = found[8]["tokens_per_s"] / found[1]["tokens_per_s"]
        plain = found[8]["plain_tokens_per_s"] / found[1]["plain_tokens_per_s"]
        ours = f"{own:.1f}x its own batch 1 at batch 8; plain decoding {plain:.1f}x"
        answer: Answer = "yes" if own > 2.5 else "in part" if own > 1.5 else "no"
        return ours, answer, "What a batch gains depends on how many cores stand idle at batch 1."

    paper = "3x its own batch 1 at batch 8 (figure 1); plain decoding not shown"
    return _claim("EXSPEC's throughput grows with the batch", paper, measure)


def _speculation_pays(cells: Cells) -> Claim:
    def measure() -> tuple[str, Answer, str]:
        ratios = {c["batch_size"]: c["ratio_to_plain"] for c in _decoding(cells, "jaxspec")}
        ours = "jaxspec over plain: " + ", ".join(
            f"{ratio:.2f}x at {size}" for size, ratio in ratios.items()
        )
        wins = [ratio > 1 for ratio in ratios.values()]
        answer: Answer = "no" if all(wins) else "yes" if not any(wins) else "in part"
        why = (
            "Speculation trades arithmetic for memory traffic; it pays until the batch alone keeps "
            "the machine busy, here from the batch size on where the ratio falls below 1."
        )
        return ours, answer, why

    return _claim(
        "With continuous batching, speculation is slower than plain decoding at every batch size",
        "vLLM and SGLang (figure 6); its own systems beside plain decoding not shown",
        measure,
    )


def _serving(cells: Cells) -> Claim:
    def measure() -> tuple[str, Answer, str]:
        found = {
            cell["system"]: cell for name, cell in cells.items() if name.startswith("serving-")
        }
        if not {"EQSPEC", "EXSPEC", "jaxspec", PLAIN} <= set(found):
            raise _Missing("serving")
        p90 = {name: cell["latency_s"]["p90"] for name, cell in found.items()}
        ours = f"batch {found['EXSPEC']['batch_size']}, P90 s: " + ", ".join(
            f"{'plain' if name == PLAIN else name} {p90[name]:.2f}"
            for name in ("EQSPEC", "EXSPEC", "jaxspec", PLAIN)
        )
        why = "Arrivals here are a Poisson process at 70 % of the slowest system's throughput."
        return ours, "yes" if p90["EXSPEC"] > p90["EQSPEC"] else "no", why

    there = {name: by_size[4]["p90"] for name, by_size in theirs.SERVING.items()}
    paper = f"batch 4, P90 s: EQSPEC {there['EQSPEC']:.2f}, EXSPEC {there['EXSPEC']:.2f} (table 4)"
    return _claim("EXSPEC's throughput costs tail latency when serving", paper, measure)
