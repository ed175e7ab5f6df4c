"""`jaxspec audit`: is this output the target's own, and where it is not, why?"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any, ClassVar, Literal

from rich.console import Console

from jaxspec.audit.controls.runner import controls_table, run_controls
from jaxspec.audit.external import OutputsAudit
from jaxspec.audit.files import FilesAudit, audit_files
from jaxspec.audit.levels import EngineAudit
from jaxspec.audit.outputs import OutputsFile, parse_outputs, read_outputs_text
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
from jaxspec.commands.progress import tell, working
from jaxspec.convert.known import is_gguf
from jaxspec.decode.settings import check_draft_length
from jaxspec.engine.engine import Engine
from jaxspec.errors import SettingError
from jaxspec.requests.prompts import encode_prompts
from jaxspec.runtime.directories import check_can_write
from jaxspec.runtime.documents import make_document
from jaxspec.runtime.files import expand_user
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
        "target", "draft", "drafter", "prompts", "max_tokens", "temperature", "batch_size",
        "outputs", "against", "snippet", "controls", "html",
    )  # fmt: skip

    target: str | None = None
    """Hub id, Hugging Face or converted directory, GGUF file, `demo-target`, `random:PRESET`."""
    outputs: pathlib.Path | None = None
    """Audit this file of another system's outputs (see --snippet) instead of a run; or every
    *.jsonl of this directory."""
    against: pathlib.Path | None = None
    """With --outputs: compare them with the outputs of this file, prompt by prompt."""
    reference_weights: DtypeName | None = None
    """With --outputs: the dtype that the target's weights are rounded to for the reference, which
    computes in fp32; default: the dtype of the outputs."""
    snippet: Literal["vllm", "sglang", "hf", "openvino", "llama_cpp"] | None = None
    """Only print a script that writes this system's outputs in the format of --outputs."""
    controls: tuple[str, ...] | None = None
    """Audit the audit: inject these faults of published systems (all if none is named) one at a
    time, each with a control run without the fault."""
    html: pathlib.Path | None = None
    """Write the report, with plots, to this HTML file."""
    chat: bool = False
    """Take each text prompt as a user's message, and apply the chat template."""

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
        if self.controls is not None:
            return self._run_controls(console, self.controls)
        if self.target is None:
            raise SettingError("No target was given; name the model to audit against, --target.")
        if self.html is not None:  # fails before hours of decoding
            new_figure()
            check_can_write(self.html)
        if self.outputs is not None:
            return self._audit_outputs(console, self.target, self.outputs)
        if self.against is not None or self.reference_weights is not None:
            raise SettingError(
                "--against and --reference-weights are for files of outputs; name one, --outputs."
            )
        return self._audit_run(console, self.target)

    def _refuse(self, option: str, reason: str, *others: str) -> None:
        """Raises `SettingError` for the first of these fields that was given together with
        `option`."""
        for name in others:
            if getattr(self, name) not in (None, False):
                other = name.replace("_", "-")
                raise SettingError(
                    f"Both {option} and --{other} were given; {reason}, so leave one of them out."
                )

    def _run_controls(self, console: Console, names: tuple[str, ...]) -> dict[str, Any]:
        self._refuse("--controls", "the controls are separate runs", "outputs", "against", "html")
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
                names=names or None,
                on_progress=lambda name: tell(status, f"negative control {name}"),
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
        others = ("draft", "drafter", "prompts", "limit", "chat")
        self._refuse("--outputs", "an outputs file is audited without decoding", *others)
        paths = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not paths:
            raise SettingError(f"The directory {path} has no file *.jsonl; name files of outputs.")
        if self.against is not None:  # one of them or another, however it is written
            paths = [each for each in paths if each.resolve() != self.against.resolve()]
            paths.append(self.against)
        texts = {each: read_outputs_text(each) for each in paths}
        # Of quantized weights in full, because the other system may not have rounded them.
        dtype = "float32" if is_gguf(expand_user(target_name)) else None
        target = dataclasses.replace(self, dtype=dtype).load(target_name)
        files: dict[str, OutputsFile] = {}
        against = None
        has_same_names = len({each.stem for each in texts}) < len(texts)
        for each, (text, _) in texts.items():
            parts = parse_outputs(text, target, name=str(each))
            name = str(each) if has_same_names else each.stem
            names = [f"{name}, {part.label}" if parts[1:] else name for part in parts]
            files |= dict(zip(names, parts, strict=True))
            if each == self.against:
                against = names[0]
                if names[1:]:
                    raise SettingError(
                        f"The file {each} was given to compare with, and holds outputs of "
                        f"{parts[0].label} and of {parts[1].label}; give one of one setting."
                    )
        with working("compiling what scores outputs") as status:
            audit = audit_files(
                target,
                files,
                against=against,
                dtype=self.dtype,
                reference_weights=self.reference_weights,
                on_output=lambda name, done: tell(
                    status, f"judged {done} of {len(files[name].outputs)} outputs of {name}"
                ),
            )
        only, *others = audit.audits.values()
        inputs = {str(each): checksum for each, (_, checksum) in texts.items()}
        return self._show(console, audit if others else only, inputs)

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
        encoded = encode_prompts(
            lines, target, max_prompt_tokens=self.max_prompt_tokens, is_chat=self.chat
        )
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
        return self._show(console, audit, inputs)

    def _show(
        self,
        console: Console,
        audit: EngineAudit | OutputsAudit | FilesAudit,
        inputs: dict[str, str],
    ) -> dict[str, Any]:
        """Prints the audit, and writes it to a file if requested; returns the JSON document."""
        console.print(audit)
        if self.html is not None:
            audit.write_html(self.html)
            console.print(f"report written to {self.html}", markup=False, highlight=False)
        found = {"holds": audit.holds, "inputs": inputs, "audit": audit.to_json()}
        return make_document("audit", self, **found, html=self.html)
