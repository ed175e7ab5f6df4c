"""`jaxspec audit`: is this output the target's own, and where it is not, why?"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any, ClassVar, Literal

from rich.console import Console

from jaxspec.audit.controls.runner import controls_table, run_controls
from jaxspec.audit.external import audit_outputs
from jaxspec.audit.outputs import parse_outputs, read_outputs_text
from jaxspec.audit.report import AuditReport, report_of_engine, report_of_outputs
from jaxspec.audit.scoring import parameter_dtype, with_dtype
from jaxspec.audit.self_audit import audit_engine
from jaxspec.audit.snippets import snippet
from jaxspec.commands.options import (
    DrafterOptions,
    DtypeName,
    EngineArgs,
    EngineOptions,
    JsonOption,
    PromptOptions,
    SamplingOptions,
)
from jaxspec.commands.progress import working
from jaxspec.decode.settings import check_draft_length
from jaxspec.engine.engine import Engine
from jaxspec.errors import SettingError
from jaxspec.requests.prompts import encode_prompts
from jaxspec.runtime.directories import check_can_write
from jaxspec.runtime.documents import make_document
from jaxspec.runtime.options import check_counts
from jaxspec.runtime.report import new_figure
from jaxspec.verifiers import VerifierName, make_verifier


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditCommand(
    JsonOption, EngineArgs, EngineOptions, SamplingOptions, PromptOptions, DrafterOptions
):
    """Audit output token by token: jaxspec's own on a workload, another system's from a file
    (--outputs), or the audit itself (--controls)."""

    FIRST: ClassVar = (
        "target", "draft", "drafter", "drafter_args", "prompts", "max_tokens", "temperature",
        "batch_size", "outputs", "snippet", "controls", "html",
    )  # fmt: skip

    target: str | None = None
    """Hub id, Hugging Face directory, converted directory, `demo-target`, or `random:PRESET`."""
    outputs: pathlib.Path | None = None
    """Audit this file of another system's outputs (see --snippet) instead of a run."""
    snippet: Literal["vllm", "sglang", "hf"] | None = None
    """Only print a script that writes this system's outputs in the format of --outputs."""
    controls: bool = False
    """Audit the audit: inject faults of published systems one at a time, each with a control run
    without the fault."""
    html: pathlib.Path | None = None
    """Write the report, with plots, to this HTML file."""

    dtype: DtypeName | None = None
    """Dtype of parameters and compute, and of KV unless --kv-dtype is given; default: the
    checkpoint's (on a CPU float32 for float16, for the embedded pair and for random presets). With
    --outputs, the dtype that the other system had; default: what the file's header says."""
    limit: int | None = None
    """Audit this many requests: the first prompts of the file, repeated with other seeds if there
    are fewer. Default: every prompt once."""
    verifier: VerifierName = "coupled"
    """Which rule decides how much of a draft is kept."""
    draft_length: int | None = None
    """Tokens drafted per round (for a tree: nodes); default: the number of nodes of the drafter's
    tree, or 4."""

    def run(self, console: Console) -> dict[str, Any]:
        """Audits; returns the JSON document."""
        if self.snippet is not None:
            text = snippet(self.snippet)
            console.print(text, markup=False, highlight=False, soft_wrap=True, end="")
            return make_document("audit", self, snippet=text)
        if self.controls:
            return self._run_controls(console)
        if self.target is None:
            raise SettingError("No target was given; name the model to audit against, --target.")
        if self.html is not None:  # fails before hours of decoding
            new_figure()
            check_can_write(self.html)
        if self.outputs is not None:
            return self._audit_outputs(console, self.target, self.outputs)
        return self._audit_run(console, self.target)

    def _refuse(self, option: str, reason: str, *others: str) -> None:
        """Raises `SettingError` for the first of these fields that was given together with
        `option`."""
        for name in others:
            if getattr(self, name) is not None:
                other = name.replace("_", "-")
                raise SettingError(
                    f"Both {option} and --{other} were given; {reason}, so leave one of them out."
                )

    def _run_controls(self, console: Console) -> dict[str, Any]:
        self._refuse("--controls", "the controls are separate runs", "outputs", "html")
        is_default = self.target is None and self.is_plain
        options = DrafterOptions(draft="demo-draft") if is_default else self
        make_drafter = options.choose_drafter(dtype=self.dtype, verify=self.verify)
        if make_drafter is None:
            raise SettingError(
                "No drafter was given for the negative controls; add --draft MODEL, or leave out "
                "--target for the embedded pair."
            )
        target = self.load(self.target or "demo-target")
        with working("loading the drafter") as status:
            results = run_controls(
                target,
                make_drafter(target),
                on_progress=lambda name: status.update(f"negative control {name}"),
            )
        console.print(controls_table(results))
        num_good = sum(result.is_good for result in results)
        is_sound = num_good == len(results)
        console.print(
            f"{num_good} of {len(results)} controls are classified correctly, with their control "
            "runs passing.",
            style="bold green" if is_sound else "bold red",
            highlight=False,
        )
        return make_document(
            "audit",
            self,
            holds=is_sound,
            controls=[result.to_json() for result in results],
        )

    def _audit_outputs(
        self, console: Console, target_name: str, path: pathlib.Path
    ) -> dict[str, Any]:
        others = ("draft", "drafter", "prompts", "limit")
        self._refuse("--outputs", "an outputs file is audited without decoding", *others)
        text, checksum = read_outputs_text(path)
        target = dataclasses.replace(self, dtype=None).load(target_name)
        file = parse_outputs(text, target, name=str(path))
        # The weights as the other system had them: rounded to its dtype, then exact.
        target = with_dtype(target, self.dtype or file.dtype or parameter_dtype(target))
        num = len(file.outputs)
        with working(f"judging {num} outputs") as status:
            audit = audit_outputs(
                target,
                file,
                dtype=self.dtype,
                on_output=lambda done: status.update(f"judging {num} outputs: {done} done"),
            )
        return self._show(console, report_of_outputs(audit), {str(path): checksum})

    def _audit_run(self, console: Console, target_name: str) -> dict[str, Any]:
        check_counts(self, "batch_size", "max_length")
        each, settings = self.sampling_params(), self.given_engine()
        make_drafter = self.choose_drafter(dtype=self.dtype, verify=self.verify)
        if make_drafter is None:
            raise SettingError(
                "No drafter was given, so there is nothing to audit; add --draft MODEL or "
                "--drafter ngram, or name a file of --outputs."
            )
        if self.draft_length is not None:
            check_draft_length(self.draft_length, settings.get("verify_length"))
        lines, inputs = self.read_prompts()
        target = self.load(target_name)
        encoded = encode_prompts(lines, target, max_prompt_tokens=self.max_prompt_tokens)
        num_requests = self.limit or len(encoded)
        prompts = [encoded[i % len(encoded)] for i in range(num_requests)]
        params = self.with_seeds(each, num_requests)
        with working("loading the drafter"):
            drafter = make_drafter(target)
        engine = Engine(
            target,
            drafter,
            verifier=make_verifier(self.verifier),
            draft_length=self.draft_length,
            batch_size=min(self.batch_size, num_requests),
            max_length=self.max_length,
            max_logprobs=0,
            **settings,
        )
        with working("auditing") as status:
            audit = audit_engine(
                engine, prompts, params, seed=self.seed, on_stage=lambda stage: status.update(stage)
            )
        return self._show(console, report_of_engine(audit), inputs)

    def _show(
        self, console: Console, report: AuditReport, inputs: dict[str, str]
    ) -> dict[str, Any]:
        """Prints the report, and writes it to a file if requested; returns the JSON document."""
        audit = report.audit
        console.print(report.title, style="bold", markup=False, highlight=False)
        console.print(f"Promise: {audit.promise}.", markup=False, highlight=False)
        for table in report.all_tables:
            console.print(table)
        style = "bold green" if audit.holds else "bold red"
        console.print(audit.sentence, style=style, markup=False, highlight=False)
        if self.html is not None:
            report.write_html(self.html)
            console.print(f"report written to {self.html}", markup=False, highlight=False)
        found = {"holds": audit.holds, "inputs": inputs, "audit": audit.to_json()}
        return make_document("audit", self, **found, html=self.html)
