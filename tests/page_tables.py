"""The tables of figures on the pages, made from the result files: `python -m tests.page_tables`.

A table stands on a page below a line `<!-- table: NAME -->`, NAME a function of this module.
"""

import functools
import json
import pathlib
import re
import statistics

from jaxspec.audit.controls.faults import FAULTS
from jaxspec.lab.studies.claims import graded

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

TABLES = {}  # by name: the files, and a function of their documents


def of(*files):
    """Enters a function of the documents of `files`, which returns a table's header and rows."""

    def enter(function):
        TABLES[function.__name__] = files, function
        return function

    return enter


# ------------------------------------------------------------------------------------- the pages

PLACE = re.compile(r"<!-- table: (\w+) -->\n(?:\n(?:\|.*\n)+)?(?:\nMeasured at .*\n)?")


def rewritten(page):
    """The text of a page with its tables made anew."""
    text = page.read_text(encoding="utf-8")
    folder = "docs/results" if page.parent == ROOT else "results"
    return PLACE.sub(lambda found: rendered(found[1], folder), text)


def rendered(name, folder):
    """A table below its name, and the line below it: at which commit and where it was measured."""
    files, function = TABLES[name]
    header, rows = function(*map(document, files))
    first, *lines = (" | ".join(["", *line, ""]).strip() for line in [header, *rows])
    table = "\n".join([first, "|" + "---|" * len(header), *lines])
    table = re.sub(r"(?<=\|) +(?=\|)", " ", table)
    places = {}
    for each in files:
        places.setdefault(each.partition("#")[0], []).append(origin(each))
    origins = ", and at ".join(
        f"{' and at '.join(dict.fromkeys(each))} ([{pathlib.Path(file).name}]({folder}/{file}))"
        for file, each in places.items()
    )
    return f"<!-- table: {name} -->\n\n{table}\n\nMeasured at {origins}.\n"


@functools.cache
def document(name):
    """That of a file; of `FILE#PART`, a part of its measurements."""
    file, _, part = name.partition("#")
    found = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    return found["measurements"][part] if part else found


def origin(name):
    """E.g. ``` `c8a4512` on 2 cores of an AMD EPYC, AVX2 kernels, 2026-11-26```. Older files have
    only the day of the commit: ``` `c8a4512` of 2026-11-24 on 2 cores```."""
    devices, commit = document(name)["devices"], document(name)["commit"]
    day = f", {document(name)['date']}" if "date" in document(name) else ""
    of_day = "" if day else f" of {document(name)['commit_date']}"
    if document(name).get("command") == "bench program":  # nothing was run
        return f"`{commit[:7]}` by compiling with JAX {document(name)['versions']['jax']}{day}"
    model = f" of an {devices['cpu_model']}" if devices.get("cpu_model") else ""
    kernels = devices.get("kernels_family") or devices["kernels"]
    place = f"{devices['cpu_count']} cores{model}"
    if devices["platform"] == "gpu":
        place = f"one {devices['kinds'][0]}, JAX {document(name)['versions']['jax']}"
    machine = f" on {place}, {kernels} kernels"
    changed = ", with changes," if commit.endswith("+") else ""
    return f"`{commit[:7]}`{of_day}{changed}{machine}{day}"


def main():
    for page in PAGES:
        page.write_text(rewritten(page), encoding="utf-8")


# --------------------------------------------------------------------------------------- figures


def one(records, **wanted):
    """The only record with these values."""
    [found] = [record for record in records if wanted.items() <= record.items()]
    return found


def times(ratio):
    return f"{ratio:.2f}x"


def ms(value):
    return f"{value:.2f} ms" if value < 10 else f"{value:.1f} ms"


def shares(values):
    """E.g. `.568 .485`."""
    return " ".join(share(value) for value in values)


def share(value):
    return f"{value:.3f}".removeprefix("0")


def interval(found, form="+.2f"):
    return f"{found['value']:{form}} [{found['low']:{form}}, {found['high']:{form}}]"


def batches(sizes):
    return ["", *(f"batch {size}" for size in sizes)]


# ---------------------------------------------------------------------------------------- README


@of("decode-avx512-cpu.json")
def speed(found):
    sizes, runs = (1, 4, 8), found["runs"] + found["adaptive"]
    plain = [one(runs, drafter="none", batch_size=size) for size in sizes]
    rows = [["plain", *(f"{run['tokens_per_s']:,.0f}" for run in plain)]]
    for length in (2, 4, "auto"):
        row = [f'`draft_length="{length}"`' if length == "auto" else f"`draft_length={length}`"]
        for size in sizes:
            own = one(runs, draft_length=length, batch_size=size)
            row.append(f"{own['tokens_per_s']:,.0f} ({times(own['speedup_vs_plain'])})")
        rows.append(row)
    return batches(sizes), rows


# ----------------------------------------------------------------------------------------- heads


@of("heads-cpu.json", "heads-speed-cpu.json")
def drafters(accepted, timed):
    def row(label, reads, name, speed_name):
        found = [f"tree {emitted(accepted, name, nodes):.2f}" for nodes in (4, 16)]
        if name == "n-gram":
            found = [each.removeprefix("tree ") for each in found]
        if name == "draft model, tree":
            chains = (emitted(accepted, "draft model, chain", nodes) for nodes in (4, 16))
            found = [f"{chain:.2f}, {tree}" for chain, tree in zip(chains, found, strict=True)]
        speeds = (one(timed["speeds"], drafter=speed_name, batch_size=size) for size in (1, 8))
        return [label, reads, *found, ", ".join(times(each["speedup"]) for each in speeds)]

    own = "the target's hidden states, and its own earlier proposals"
    return ["", "what it reads", "drafts of 4", "drafts of 16", "speed at batch 1, 8"], [
        row("[`DraftModel`](trees.md)", "tokens; a model of its own", "draft model, tree",
            "draft model"),
        row("`Heads`: Clover", own, "clover", "clover, 4"),
        row("Hydra", "the same", "hydra", "hydra, 4"),
        row("Clover-2", "the same", "clover-2", "clover-2, 4"),
        row("Medusa", "the target's hidden states", "medusa", "medusa, 4"),
        row("`NGram`", "the text so far; no parameters", "n-gram", "n-gram"),
    ]  # fmt: skip


def emitted(found, name, nodes):
    return one(found["acceptance"], drafter=name, num_nodes=nodes)["emitted_per_round"]


# --------------------------------------------------------------------------------------- kernels


@of("kernels-cpu.json")
def kernels(found):
    rows = []
    for dtype in ("float32", "bfloat16"):
        for size in (1, 8):
            for window, context in ((1, 80), (5, 1000)):
                wanted = {"dtype": dtype, "batch_size": size, "window": window, "context": context}
                cell = one(found["results"], **wanted)
                figures = (cell[name] for name in ("xla_ms", "native_ms", "ratio"))
                given = (short(dtype), str(size), str(window), str(context))
                rows.append([*given, *(f"{figure:.2f}" for figure in figures)])
    return ["dtype", "batch", "tokens", "context", "XLA", "C++", "ratio"], rows


def short(dtype):
    return {"float32": "fp32", "bfloat16": "bf16"}[dtype]


REAL_SIZE = {
    "bf16, AMX": "AMX",
    "fp32, AMX": "AMX",
    "bf16, AVX2": "AVX2",
    "fp32, AVX2": "AVX2",
    "bf16, AVX512-BF16 on AMD": "AVX512-BF16",
    "bf16, AVX-512 on Intel": "AVX-512",
}


@of(*(f"decode-635m-cpu.json#{part}" for part in REAL_SIZE))
def real_size(*found):
    rows = []
    for processor, each in zip(REAL_SIZE.values(), found, strict=True):
        for size in each["config"]["batch_sizes"]:
            pair = one(each["against"], hf="hf greedy", ours="plain", batch_size=size)
            drafted = one(each["runs"], draft_length=4, batch_size=size)
            rates = (f"{pair[name]:.1f}" for name in ("hf_tokens_per_s", "tokens_per_s"))
            gains = (times(drafted[name]) for name in ("speedup_vs_plain", "speedup_of_rounds"))
            ratios = f"{min(pair['ratios']):.2f} to {max(pair['ratios']):.2f}"
            ratio = f"{pair['ratio_to_hf']:.2f} ({ratios})"
            dtype = short(each["config"]["dtype"])
            rows.append([processor, dtype, str(size), *rates, ratio, *gains])
    gains = "speculation, whole run", "speculation, rounds alone"
    return ["", "dtype", "batch", "transformers", "plain", "ratio", *gains], rows


@of("kv-cpu.json")
def kv_in_int8(found):
    rows = []
    for dtype in ("bfloat16", "float32"):
        for window, context in ((1, 80), (1, 1000), (5, 1000)):
            cell = one(found["results"], dtype=dtype, window=window, context=context)
            figures = (f"{cell[name]:.2f}" for name in ("own_ms", "int8_ms", "ratio"))
            rows.append([short(dtype), str(window), str(context), *figures])
    return ["dtype", "tokens", "context", "its own KV", "int8 KV", "ratio"], rows


# ---------------------------------------------------------------------------------------- memory


@of("memory-cpu.json")
def memory_of_chats(found):
    header = ["", "without weights", "tokens/s", "speed", "equal turns", "less",
              "less, without draft prompt logits"]  # fmt: skip

    def mib(num_bytes):
        return f"{num_bytes / 2**20:.1f} MiB"

    baseline = mib(found["baseline_bytes"]["generation_bytes"])
    rows = [["baseline policy, reckoned", baseline, "", "", "", "", ""]]
    for label, name in (
        ("engine without a budget", "without a budget"),
        ("the plan, `--keep 0.96`", "plan"),
        ("a plan with int8 KV of the target", "plan, int8 KV"),
    ):
        run = one(found["results"], name=name)
        rows.append([
            label, mib(run["generation_bytes"]), f"{run['tokens_per_s']:,.0f}",
            f"{run['speed']:.2f}", f"{run['num_equal_turns']} of {run['num_turns']}",
            f"{100 * run['less_than_baseline']:.0f} %",
            f"{100 * run['less_without_draft_logits']:.0f} %",
        ])  # fmt: skip
    return header, rows


# ----------------------------------------------------------------------------------------- heads


def accuracy(found, names):
    """A line per kind of heads, then the drafters that have no heads."""
    header = ["@1, first to fourth head", "@5, first to fourth head", "tokens per round, 4 nodes"]
    rows = []
    for label, name in names.items():
        heads = [each for each in found["accuracy"] if each["heads"] == name]
        top = [shares(one(heads, domain="all")[top]) for top in ("top1", "top5")] if heads else []
        per_round = (f"{emitted(found, name, nodes):.2f}" for nodes in (4, 16))
        rows.append([label, *(top or ["", ""]), *per_round])
    return ["", *header, "16 nodes"], rows


OF_DRAFT_MODEL = {
    "draft model, chain": "draft model, chain",
    "draft model, tree": "draft model, tree",
}


@of("heads-cpu.json")
def four_kinds(found):
    kinds = {"Medusa": "medusa", "Hydra": "hydra", "Clover": "clover", "Clover-2": "clover-2"}
    (first, *header), rows = accuracy(found, kinds | OF_DRAFT_MODEL | {"n-gram": "n-gram"})
    params = [f"{found['num_params'][name] / 1e6:.2f} M" for name in kinds.values()]
    params += ["0.82 M", "0.82 M", ""]  # the draft model's, which models.md has
    rows = [[label, size, *row] for (label, *row), size in zip(rows, params, strict=True)]
    return [first, "parameters", *header], rows


@of("heads-ablations-cpu.json")
def ablations(found):
    return accuracy(found, {
        "Clover": "clover",
        "an MLP instead of the attention decoder": "mlp",
        "no regressive connection": "no-connection",
        "no augmenting block": "no-block",
        "Medusa": "medusa",
    })  # fmt: skip


@of("heads-curve-cpu.json")
def learning_curve(found):
    names = {"250,000": "clover-250k", "500,000": "clover-500k", "1,000,000": "clover-1M",
             "2,000,000": "clover-2M"}  # fmt: skip
    (_, *header), rows = accuracy(found, names | OF_DRAFT_MODEL)
    return ["training tokens", *header], rows


@of("heads-speed-cpu.json")
def costs_of_heads(found):
    header = ["", "draft stage, batch 1", "over the target's pass",
              "a level over a draft model's step", "draft stage, batch 8",
              "after the round, batch 1, 8"]  # fmt: skip
    rows = []
    for label, name in {
        "draft model, chain of 4": "draft model, chain",
        "Medusa": "medusa",
        "Hydra": "hydra",
        "Clover": "clover",
        "Clover-2": "clover-2",
        "Clover, 2 M tokens (the same work as Clover)": "clover-2M",
    }.items():
        first, eighth = (one(found["costs"], drafter=name, batch_size=size) for size in (1, 8))
        levels = " (one level)" if first["num_levels"] == 1 else ""
        both = [[each[key] for each in (first, eighth)]
                for key in ("level_over_draft_step", "commit_ms")]  # fmt: skip
        rows.append([
            label, f"{ms(first['draft_ms'])}{levels}",
            f"{first['draft_share']:.2f}",
            ", ".join(f"{ratio:.1f}" for ratio in both[0]), ms(eighth["draft_ms"]),
            ", ".join(f"{each:.2f}" for each in both[1]) + " ms",
        ])  # fmt: skip
    return header, rows


@of("heads-costs-cpu.json")
def costs_without_training(found):
    def cells(records, ratio, quartiles):
        pairs = ((record[ratio], *record[quartiles]) for record in records)
        return [f"{ratio:.2f} ({low:.2f} to {high:.2f})" for ratio, low, high in pairs]

    chain, tree = (
        [one(found["costs"], drafter=name, batch_size=size) for size in (1, 8)]
        for name in ("random:clover, chain", "random:clover")
    )
    level = "level_over_draft_step", "level_quartiles"
    return ["over one step of the draft model", "batch 1", "batch 8"], [
        ["a step of a chain of heads, one node as the draft model's step has",
         *cells(chain, *level)],
        ["a level of a tree, up to three nodes", *cells(tree, *level)],
        ["a round with the target's hidden states handed out, over one without",
         *cells(found["taps"], "ratio", "quartiles")],
    ]  # fmt: skip


def speed_ups(found, sizes, names, *, key="drafter", plain="plain, tokens per second"):
    """Rates of plain decoding, then a line of speed-ups for each label's drafters."""

    def cell(name, size):
        return one(found["speeds"], **{key: name, "batch_size": size})

    rows = [[plain, *(f"{cell('plain', size)['tokens_per_s']:,.0f}" for size in sizes)]]
    for label, drafters in names.items():
        rows.append([label, *("; ".join(times(cell(name, size)["speedup"]) for name in drafters)
                              for size in sizes)])  # fmt: skip
    return rows


@of("heads-speed-cpu.json")
def speeds_of_heads(found):
    sizes = 1, 4, 8
    names = {"draft model, chain of 4": ["draft model"], "n-gram": ["n-gram"]}
    for label, name in {
        "Medusa, 4 nodes; `auto`": "medusa",
        "Hydra": "hydra",
        "Clover": "clover",
        "Clover-2": "clover-2",
        "Clover, 2 M tokens": "clover-2M",
    }.items():
        names[label] = [f"{name}, 4", f"{name}, auto"]
    return batches(sizes), speed_ups(found, sizes, names)


# ------------------------------------------------------------------------------------- FlexDraft


@of("flexdraft-cpu.json")
def flexdraft_by_domain(found):
    domains = "fairy_tales", "math", "code", "tech_docs"
    rows = []
    for label, name in {
        "FlexDraft, 7 drafts at most": "FlexDraft",
        "n-gram": "n-gram",
        "draft model": "draft model",
    }.items():
        own = one(found["acceptance"], drafter=name)
        each = [own["emitted_per_round"], *(own["by_domain"][domain] for domain in domains)]
        rows.append([label, *(f"{value:.2f}" for value in each)])
    return ["", "all", "fairy tales", "math", "code", "technical documents"], rows


@of("flexdraft-cpu.json")
def flexdraft_parts(found):
    def gain(change):
        if change is None:
            return ""
        low, high = (f"{change[end]:+.2f}".replace("+0.00", "0.00") for end in ("low", "high"))
        return f"{change['mean']:+.2f} [{low} .. {high}]"

    header = ["", "tokens per round", "gain over the line before, mean over prompts",
              "verified drafts per round", "speed over plain decoding",
              "gain over the line before"]  # fmt: skip
    return header, [
        [each["parts"], f"{each['emitted_per_round']:.2f}", gain(each["emitted_gain"]),
         f"{each['drafted_per_round']:.2f}", times(each["speedup"]["mean"]),
         gain(each["speedup_gain"])]
        for each in found["ablation"]
    ]  # fmt: skip


@of("flexdraft-cpu.json")
def flexdraft_rounds(found):
    header = ["time of a round", "plain", "parallel, 3 drafts", "sequential, 3 drafts",
              "parallel, 7", "sequential, 7"]  # fmt: skip
    rows = []
    for size in (1, 4, 8):
        three, seven = (one(found["rounds"], batch_size=size, draft_length=n) for n in (3, 7))
        figures = (three[name] for name in ("plain_ms", "parallel_ms", "sequential_ms"))
        figures = *figures, seven["parallel_ms"], seven["sequential_ms"]
        rows.append([f"batch {size}", *map(ms, figures)])
    return header, rows


@of("flexdraft-speed-cpu.json")
def flexdraft_speeds(found):
    sizes = 1, 2, 4, 8, 16
    names = {
        "parallel, 3 drafts": ["parallel"],
        "sequential, 3 drafts": ["sequential"],
        '`draft_length="auto"`': ["auto"],
    }
    header = ["speed-up over plain decoding", "batch 1", *map(str, sizes[1:])]
    return header, speed_ups(found, sizes, names)


# ----------------------------------------------------------------------------------------- trees


def trees_beside_chains(found):
    def cells(nodes, verifier="coupled", temperature=0.0):
        own = [each for each in found["acceptance"] if each["num_nodes"] == nodes
               and each["verifier"] == verifier and each["temperature"] == temperature]  # fmt: skip
        by_tree = {each["tree"]: each for each in own}
        trees = [by_tree.get(tree) for tree in ("chain", "static", "beam")]
        best = trees[2] or trees[1]
        ratio = f"{best['over_chain']:.2f}" + ("" if trees[2] else " (static)")
        return [*(f"{tree['emitted_per_round']:.2f}" if tree else "" for tree in trees), ratio]

    sampled = "16, temperature 0.8"
    header = ["nodes", "chain", "best static tree", "beam tree", "beam over chain"]
    return header, [
        *([str(nodes), *cells(nodes)] for nodes in (4, 8, 12, 16)),
        [f"{sampled}, `Coupled`", *cells(16, temperature=0.8)],
        [f"{sampled}, `Rejection`", *cells(16, "rejection", 0.8)],
    ]


TABLES["trees"] = ("trees-cpu.json",), trees_beside_chains
TABLES["trees_held_out"] = ("trees-held-out-cpu.json",), trees_beside_chains


@of("trees-speed-cpu.json")
def speeds_of_trees(found):
    sizes = 1, 2, 4, 8
    names = {name: [name] for name in ("chain of 2", "chain of 4", "tree of 8", "tree of 16")}
    names['`draft_length="auto"` on the tree of 16'] = ["auto"]
    return batches(sizes), speed_ups(found, sizes, names, key="drafts")


# ---------------------------------------------------------------------- draft length, verifiers


@of("study-cpu/study.json")
def whole_curve(found):
    sizes = found["config"]["batch_sizes"]
    cells = [found["cells"][f"decode-ragged-continuous-speculative-b{size}"] for size in sizes]
    length = found["config"]["draft_length"]
    return ["batch size", *map(str, sizes)], [
        ["plain decoding", *(f"{cell['plain_tokens_per_s']:,.0f}" for cell in cells)],
        [f"draft length {length}, `bitwise`", *(f"{cell['tokens_per_s']:,.0f}" for cell in cells)],
    ]


PEERS = {
    "jaxspec": "jaxspec",
    "vllm": "vLLM",
    "openvino": "OpenVINO GenAI",
    "transformers": "transformers",
    "llama_cpp": "llama.cpp",
}
DRAFTED = {"none": "plain", "ngram": "n-grams", "ngram+smollm2-clover": "n-grams + Clover"}


@of("peers-cpu.json")
def peers_speed(found):
    sizes = found["config"]["batch_sizes"]
    runs = {(run["engine"], run["drafter"], run["batch_size"]): run for run in found["results"]}
    rows = []
    for engine, drafter in dict.fromkeys((name, drafter) for name, drafter, _ in runs):
        own = [runs[cell] for size in sizes if (cell := (engine, drafter, size)) in runs]
        if len(own) < len(sizes):  # transformers has no prompt lookup for batches
            continue
        equal = [run.get("equal_to_batch_1") for run in own]
        number = found["config"]["num_prompts"][0]
        rows.append(
            [f"{PEERS[engine]}, {DRAFTED.get(drafter, drafter)}"]
            + [f"{run['tokens_per_s']:.0f}" if "why" not in run else "crashed" for run in own]
            + [", ".join("-" if n is None else str(n) for n in equal) + f" of {number}"]
        )
    return [*batches(sizes), "outputs that stay the same"], rows


TABLES["peers_in_float32"] = ("peers-fp32-cpu.json",), peers_speed


@of("peers-cpu.json")
def peers_parts(found):
    rows = []
    for run in found["results"]:
        speed = [f"{run['batch_size']}", PEERS[run["engine"]], run["drafter"].replace("none", "-")]
        if "why" in run:
            rows.append([*speed, *["crashed"] * 2, "", "", ""])
            continue
        low, high = run["range"]
        compared = run.get("num_compared", {})
        equal = [
            f"{run[key]} of {compared[key]}" if key in compared else ""
            for key in ("equal_to_plain", "equal_to_batch_1")
        ]
        speed.append(f"{run['tokens_per_s']:.0f} ({low:.0f} to {high:.0f})")
        parts = (f"{run['prefill_s']:.2f}", f"{run['decode_tokens_per_s']:.0f}")
        peak = f"{run['peak_bytes'] / 1e9:.1f}"
        rows.append([*speed, *parts, peak, ", ".join(filter(None, equal))])
    header = ["batch", "engine", "drafter", "tokens/s (range)", "prefill, s"]
    return [*header, "decoding, tokens/s", "peak GB", "as own plain, there and at batch 1"], rows


@of("widths-cpu.json")
def rounds_by_width(found):
    by_code = {"before": {}, "after": {}}
    for run in found["results"]:
        by_code[run["code"]][run["batch_size"], run["width"]] = run
    rows = []
    for cell, after in by_code["after"].items():
        before = by_code["before"][cell]
        scored = f"{before['live']:.2f}, {after['live']:.2f}"
        rows.append([*map(str, cell), scored, f"{before['ms']:.1f} ms", f"{after['ms']:.1f} ms"])
    before, after = (f"`{found['config']['commits'][name]}`" for name in ("before", "after"))
    return ["batch", "width", "live tokens per row, before and after", before, after], rows


@of("ngram-cpu.json")
def ngram_rules(found):
    rows = []
    for kind in ("mt", "translation", "qa", "math", "all"):
        row = [kind]
        for rule in ("whole draft length", "as long as the match"):
            runs = [run for run in found["decoded"] if run["rule"] == rule]
            row += ngram_counts([run for run in runs if kind in ("all", run["category"])])
        rows.append(row)
    columns = ("tokens per round", "drafted per round", "accepted share")
    return ["", *columns, *(f"{column}, after" for column in columns)], rows


@of("ngram-cpu.json")
def ngram_replay(found):
    header = ["tokens matched, tokens drafted", "tokens per round", "drafted per round"]
    header += ["accepted share", *(f"speed at batch {size}" for size in (1, 4, 8))]
    rows = [
        [run["rule"], *ngram_counts([run]), *map(times, run["speed_by_batch"].values())]
        for run in found["replayed"]
    ]
    return header, rows


def ngram_counts(runs):
    """Tokens and drafts per round, and the share of the drafts that was accepted."""
    rounds, drafted, accepted, emitted = (
        sum(run[f"num_{name}"] for run in runs)
        for name in ("rounds", "draft_tokens", "accepted_tokens", "emitted_tokens")
    )
    return [f"{emitted / rounds:.2f}", f"{drafted / rounds:.2f}", share(accepted / drafted)]


REAL_DRAFTERS = [f"smollm2-clover-cpu.json#batch {size}" for size in (1, 4, 8)]


@of(REAL_DRAFTERS[0])
def real_heads(found):
    """Tokens per round by task, at batch 1."""
    prompts = found["comparison"]["prompts"]
    tasks = dict.fromkeys(one["category"] for one in prompts)
    rows = []
    for own in found["comparison"]["candidates"]:
        row = [drafter_of(own)]
        for task in tasks:
            of_task = [one for one in prompts if one["category"] == task]
            row.append(emitted_per_round(of_task, own["label"]))
        rows.append([*row, emitted_per_round(prompts, own["label"])])
    return ["tokens per round", *(task.replace("_", " ") for task in tasks), "all"], rows


@of(*REAL_DRAFTERS)
def real_drafters(*found):
    """Speeds at every batch size."""
    by_batch = [one["comparison"] for one in found]
    rows = []
    for candidates in zip(*(each["candidates"] for each in by_batch), strict=True):
        own = candidates[0]
        row = [drafter_of(own), emitted_per_round(by_batch[0]["prompts"], own["label"])]
        for each in candidates:
            low, *_, high = sorted(each["speedup"])
            speed = statistics.median(each["tokens_per_s"])
            ratio = f"{times(statistics.median(each['speedup']))} ({low:.2f} to {high:.2f})"
            row.append(f"{speed:.0f}" + ("" if own["label"] == "none" else f", {ratio}"))
        rows.append(row)
    batches = (f"batch {size}" for size in (1, 4, 8))
    return ["tokens/s, and over plain", "tokens per round", *batches], rows


@of("smollm2-drafters-cpu.json")
def tasks_of_drafters(found):
    """Tokens per round by task, of all drafters of the real model."""
    return real_heads(found)


def drafter_of(candidate):
    return {"none": "plain", "ngram": "n-grams"}.get(candidate["label"], candidate["label"])


def emitted_per_round(prompts, label):
    tokens, rounds = (sum(one[name][label] for one in prompts) for name in ("tokens", "rounds"))
    return f"{tokens / rounds:.2f}"


# ------------------------------------------------------------------------------------- papers.md


@of("smollm2-study-cpu.json")
def claims_of_eqspec(found):
    return ["what the paper claims", "the paper", "here", "reproduced"], [
        [each["claim"], each["paper"], each["ours"], each["reproduced"]] for each in found["claims"]
    ]


@of("smollm2-heads-cpu.json")
def clover_over_medusa(found):
    names = {"Medusa": "medusa", "Hydra": "hydra", "Clover": "clover"}
    shares_of = [one(found["accuracy"], drafter=name, domain="all") for name in names.values()]
    emitted_by = [one(found["acceptance"], drafter=name) for name in names.values()]
    rows = [
        [label, shares(own["top1"]), shares(own["top5"]), f"{per_round['emitted_per_round']:.2f}"]
        for label, own, per_round in zip(names, shares_of, emitted_by, strict=True)
    ]
    medusa, _, clover = shares_of
    leads = (
        ", ".join(
            f"{100 * (ours / theirs - 1):+.0f} %"
            for ours, theirs in zip(clover[top], medusa[top], strict=True)
        )
        for top in ("top1", "top5")
    )
    beyond = (emitted_by[2]["emitted_per_round"] - 1) / (emitted_by[0]["emitted_per_round"] - 1)
    rows.append(["Clover over Medusa", *leads, f"{100 * (beyond - 1):+.0f} % beyond the first"])
    heads = "first to fourth head"
    return ["", f"@1, {heads}", f"@5, {heads}", "tokens per round, 4 nodes"], rows


CLAIMS = ["what the paper claims", "the paper", "here", "reproduced"]


@of("smollm2-heads-cpu.json", *REAL_DRAFTERS)
def claims_of_clover(found, *by_batch):
    medusa, clover = (
        one(found["accuracy"], drafter=name, domain="all")["top5"] for name in ("medusa", "clover")
    )
    leads = [100 * (ours / theirs - 1) for ours, theirs in zip(clover, medusa, strict=True)]
    more, less = (
        one(found["acceptance"], drafter=name)["emitted_per_round"] - 1
        for name in ("clover", "medusa")
    )
    speeds = [
        statistics.median(one(each["comparison"]["candidates"], label="Clover")["speedup"])
        for each in by_batch
    ]
    at = (f"{times(speed)} at batch {size}" for speed, size in zip(speeds, (1, 4, 8), strict=True))
    return CLAIMS, [
        ["a head that reads earlier proposals is right more often, and its lead grows with depth",
         "@5 +12 to +26 %", ", ".join(f"{lead:+.0f} %" for lead in leads),
         "yes" if leads == sorted(leads) and leads[0] > 0 else "no"],
        ["it emits more tokens beyond the first of each round, with 4 nodes", "+50 to +76 %",
         f"{100 * (more / less - 1):+.0f} %", graded(more / less, yes=1.5, in_part=1.1)],
        ["Clover is faster than plain decoding, in small batches most",
         "1.4x to 2.5x at batch 4, 0.6x to 1.4x at 48",
         f"{', '.join(at)} (the heads of the package)",
         "in part" if speeds[0] > 1 and speeds == sorted(speeds)[::-1] else "no"],
    ]  # fmt: skip


@of("smollm2-flexdraft-cpu.json#parts")
def parts_of_flexdraft(found):
    header = ["", "tokens per round", "beyond one, of the first line's", "difference, 95 %"]
    rows = []
    for own in found["acceptance"]:
        name = {"draft": "`smollm2-draft`"}.get(own["drafter"], own["drafter"])
        more = ["", ""]
        if own is not found["acceptance"][0]:
            more = [f"{own['over_first']:.2f}", interval(own["difference"], "+.3f")]
        rows.append([name, f"{own['emitted_per_round']:.2f}", *more])
    return header, rows


@of("smollm2-flexdraft-cpu.json#modes")
def modes_of_flexdraft(found):
    sizes = 1, 2, 4, 8
    rows = []
    for mode in ("sequential", "parallel"):
        timed = [one(found["costs"], drafter=mode, batch_size=size) for size in sizes]
        rows.append([mode, *(ms(each["round_ms"]) for each in timed)])
    over = [one(found["costs"], drafter="parallel", batch_size=size) for size in sizes]
    ratios = ("{:.2f} ({:.2f} to {:.2f})".format(*each["round_over_first"]) for each in over)
    return batches(sizes), [*rows, ["parallel over sequential", *ratios]]


@of(*(f"smollm2-flexdraft-cpu.json#{part}" for part in ("parts", "speeds", "modes")))
def claims_of_flexdraft(parts, speeds, modes):
    calibrated = one(parts["acceptance"], drafter="calibration")
    gain = calibrated["difference"]
    whole, selected = (
        one(speeds["speeds"], drafter=name)["speedup"]
        for name in ("calibration", "selective verification")
    )
    over = [
        one(modes["costs"], drafter="parallel", batch_size=size)["round_over_first"][0]
        for size in (1, 2, 4, 8)
    ]
    listed = ", ".join(f"{ratio:.2f}" for ratio in over)
    is_seen = over[0] < 1 and over[-1] > 1
    return CLAIMS, [
        ["calibration makes more drafts right", "speed-up 3.0 to 3.3 times",
         f"{calibrated['over_first']:.2f} times the tokens beyond one of each round",
         "yes" if gain["low"] > 0 else "no" if gain["high"] < 0 else "not shown"],
        ["selective verification gains too", "3.3 to 3.5 times",
         f"{times(whole)} without, {times(selected)} with it, at batch 1",
         graded(selected / whole, yes=1.05, in_part=1.01)],
        ["parallel rounds are faster in small batches, sequential ones from a batch of 2 to 4 on",
         "A100", f"parallel over sequential: {listed} at batch 1, 2, 4, 8",
         "yes" if is_seen else "in part" if over[0] < 1.05 < over[-1] else "no"],
    ]  # fmt: skip


@of("smollm2-scaling-cpu.json")
def scaling_of_smollm2(found):
    rows = []
    for size in ("1x128", "2x128", "4x128"):
        main, greedy = (axes[f"tokens, {size}"] for axes in axes_of(found))
        figures = (
            each
            for axis in (main, greedy)
            for each in (*taus(axis), interval(axis["slope_per_decade"]))
        )
        rows.append([size.replace("x", " x "), *figures])
    tokens = [f"{point['x'] / 1e3:.0f} k" for point in main["points"]]
    slope = "slope per decade"
    header = ["layers x width", f"`rejection`: {tokens[0]}", *tokens[1:], slope]
    return [*header, f"greedy: {tokens[0]}", *tokens[1:], slope], rows


TABLES["memory_of_smollm2"] = ("smollm2-memory-cpu.json",), TABLES["memory_of_chats"][1]


@of("smollm2-memory-cpu.json")
def claims_of_specmemo(found):
    plan = one(found["results"], name="plan")
    less, without, speed = (
        f"{100 * plan[name]:.0f} %"
        for name in ("less_than_baseline", "less_without_draft_logits", "speed")
    )
    is_seen = plan["less_without_draft_logits"] >= 0.65 and plan["speed"] >= 0.96
    return CLAIMS, [
        ["most of the memory of generation can be saved at nearly the same speed",
         "65 % less, 96 % of the speed",
         f"{less} less, {without} without the logits that a draft model makes of the prompt; "
         f"{speed} of the speed", "yes" if is_seen else "in part"],
        ["batched speculation of a 70B model on eight GPUs pays",
         "twice as fast, 8 times at batch 10", "", "not tested"],
    ]  # fmt: skip


@of("smollm2-scaling-cpu.json")
def claims_of_scylla(found):
    main, _ = axes_of(found)
    of_tokens = [axis for axis in main.values() if axis["axis"] == "tokens"]
    layers = one(main.values(), axis="layers")
    slopes = [axis["slope_per_decade"] for axis in of_tokens]
    best = [
        f"{each['best']} at batch {each['batch']} ({times(each['speedup'])} plain)"
        for each in found["batch"][0]["batches"]
    ]
    grows = all(slope["low"] > 0 for slope in slopes)
    is_law = all(axis["word"] == "law" for axis in of_tokens)
    return ["what the paper claims", "here", "reproduced"], [
        ["tokens per round grow linearly in the logarithm of the training tokens",
         ", ".join(f"{slope['value']:+.2f}" for slope in slopes) + " for ten times the tokens, in "
         f"{len(slopes)} sizes; {'a law' if is_law else 'a trend'}",
         "yes" if is_law else "in part" if grows else "no"],
        ["they grow linearly in the logarithm of the drafter's size",
         f"layers: {interval(layers['slope_per_decade'])} for ten times as many",
         "in part" if layers["slope_per_decade"]["low"] > 0 else "no"],
        ["the best number of drafts shrinks as the batch grows", ", ".join(best),
         "yes" if found["batch"][0]["falls"] else "no"],
    ]  # fmt: skip


@of("demo-cpu.json")
def demo(found):
    rows = []
    for size in (1, 8):
        plain = one(found["runs"], label="plain", batch_size=size)
        drafted = (one(found["runs"], label=name, batch_size=size)
                   for name in ("draft model", "n-gram"))  # fmt: skip
        rows.append([str(size), f"{plain['tokens_per_s']:,.0f}", *(
            f"{run['tokens_per_s']:,.0f} ({times(run['speedup_vs_plain'])}), "
            f"{run['emitted_per_round']:.2f}" for run in drafted
        )])  # fmt: skip
    return ["batch size", "plain", "draft model", "n-gram"], rows


@of("verifiers-cpu.json")
def acceptance_of_verifiers(found):
    domains = {"fairy tales": "fairy_tales", "math": "math", "code": "code", "docs": "tech_docs",
               "all": "all"}  # fmt: skip
    rows = []
    for label, name in {
        "`Coupled()`": "coupled",
        "`Coupled(is_noise_shared=False)`": "coupled:independent",
        "`Rejection()`": "rejection",
        "`Block()`": "block",
        "`Typical()`, lossy": "typical (lossy)",
    }.items():
        own = (one(found["results"], verifier=name, domain=each) for each in domains.values())
        rows.append([label, *(f"{each['emitted_per_round']:.2f} "
                              f"({each['accepted_per_tested']:.2f})" for each in own)])  # fmt: skip
    overlaps = (one(found["results"], verifier="rejection", domain=each)["sum_min_p_q"]
                for each in domains.values())  # fmt: skip
    rows.append(["sum of min(p, q)", *(f"{overlap:.2f}" for overlap in overlaps)])
    return ["", *domains], rows


# ------------------------------------------------------------------ exactness, sessions, the study


@of("controls-cpu.json")
def controls(found):
    rows = []
    for name, fault in FAULTS.items():
        control = one(found["controls"], name=name)
        answers = ("yes" if control["caught"] else "no",
                   "passes" if control["healthy_passes"] else "fails")  # fmt: skip
        rows.append([name.replace("_", " "), fault.source, fault.invariant, *answers])
    return ["fault", "as in", "breaks", "caught", "control run"], rows


@of("sessions-cpu.json")
def first_tokens(found):
    names = "no session", "session in its row", "session on the host"
    rows = []
    for history in (200, 400, 800):
        runs = [one(found["results"], history=history, name=name) for name in names]
        gains = (f" ({times(run['speedup'])})" if run is not runs[0] else "" for run in runs)
        each = zip(runs, gains, strict=True)
        rows.append(
            [str(history), *(f"{run['first_token_ms']:.1f} ms{gain}" for run, gain in each)]
        )
    return ["history", *names], rows


@of("streams-cpu.json")
def streams(found):
    names = "lag_p99_ms", "gap_p50_ms", "gap_p99_ms", "first_p50_ms"
    header = ["who steps", "`rounds_per_piece`", "lag p99", "gap p50", "gap p99", "first token p50"]
    rows = []
    for run in found["results"]:
        figures = (f"{run[name]:.1f} ms" for name in names)
        setting = run["who"], str(run["rounds_per_piece"])
        rows.append([*setting, *figures, f"{run['tokens_per_s']:.0f}"])
    return [*header, "tokens/s"], rows


def load_rows(found):
    """Servers beside the engine, by the number of clients; see docs/recipes/load.py."""
    header = ["clients", "", "tokens/s", "over `Engine.generate`", "first token p50, p99",
              "gap between pieces p50, p99"]  # fmt: skip
    rows = []
    for run in found["results"]:
        row = [str(run["clients"]), f"`{run['who']}`", f"{run['tokens_per_s']:.0f}"]
        if run["who"] == "Engine.generate":
            rows.append([*row, "", f"prefill alone {run['prefill_ms']:.0f} ms", ""])
            continue
        row.append(f"{run['ratio']:.2f} ({min(run['ratios']):.2f} to {max(run['ratios']):.2f})")
        for name in ("first_ms", "gap_ms"):
            row.append(f"{run[f'{name}_p50']:.0f}, {run[f'{name}_p99']:.0f} ms")
        rows.append(row)
    return header, rows


@of("server-load-cpu.json#SmolLM2-135M-Instruct, bf16")
def load_of_smollm2(found):
    return load_rows(found)


@of("server-load-cpu.json#635M random weights, bf16")
def load_of_635m(found):
    return load_rows(found)


@of("server-clients-cpu.json#vllm bench serve")
def vllm_bench_serve(found):
    header = ["clients", "requests", "tokens/s", "over `Engine.generate`", "first token p50, p99",
              "gap between pieces p50, p99", "acceptance length"]  # fmt: skip
    rows = []
    for run in found["results"]:
        pairs = (
            f"{run[f'{name}_p50']:.0f}, {run[f'{name}_p99']:.0f} ms"
            for name in ("first_ms", "gap_ms")
        )
        ratio = f"{run['ratio']:.2f} ({min(run['ratios']):.2f} to {max(run['ratios']):.2f})"
        counts = str(run["clients"]), str(run["requests"]), f"{run['tokens_per_s']:.0f}"
        rows.append([*counts, ratio, *pairs, f"{run['acceptance_length']:.2f}"])
    return header, rows


@of("schedulers-cpu.json")
def rounds_of_schedulers(found):
    def run(name, size):
        return one(found["results"], system=name, batch_size=size)

    header = ["", "rounds, batch 4", "rounds, batch 8", "KV slots moved, batch 8",
              "positions read by the draft model, batch 8"]  # fmt: skip
    rows = []
    for label, name in {
        "ragged + continuous, the default": "jaxspec",
        "ragged + static": "ragged + static",
        "ragged + pool of 32": "ragged + pool",
        "aligned + static": "aligned + static",
        "aligned + pool of 32": "aligned + pool",
        "EQSPEC": "EQSPEC",
        "EXSPEC": "EXSPEC",
    }.items():
        of_four, of_eight = (run(name, size) for size in (4, 8))
        rounds = (each["schedule"]["num_rounds"] for each in (of_four, of_eight))
        moved, read = of_eight["schedule"]["num_slots_moved"], of_eight["draft_positions"]
        rows.append([label, *map(str, rounds), f"{moved:,}", f"{read:,}"])
    listed = (str(run("jaxspec", size)["ideal_rounds"]) for size in (4, 8))
    rows.insert(1, ["list schedule of the same requests", *listed, "", ""])
    return header, rows


@of("decode-hf-cpu.json")
def beside_hf(found):
    sizes = 1, 4, 8

    def pair(ours, size):
        return one(found["against"], hf="hf greedy", ours=ours, batch_size=size)

    rates = (f"{pair('plain', size)['hf_tokens_per_s']:,.0f}" for size in sizes)
    rows = [["`transformers`, greedy, tokens per second", *rates]]
    for label, ours in {
        "plain": "plain",
        "`draft_length=2`": "drafted 2",
        '`draft_length="auto"`': "auto, bitwise",
    }.items():
        pairs = [pair(ours, size) for size in sizes]
        rows.append([label, *(f"{each['ratio_to_hf']:.1f}x ({min(each['ratios']):.1f} to "
                              f"{max(each['ratios']):.1f})" for each in pairs)])  # fmt: skip
    return batches(sizes), rows


# --------------------------------------------------------------------------------------- scaling

MAIN = "tokens per round, `rejection`, temperature 1, drafts of 8"


def axes_of(found):
    """Axes of the main way of decoding, and of the same greedily, by their titles."""
    main = found["main_decoding"]
    both = (main, main | {"verifier": "coupled", "temperature": 0})
    return [
        {axis["title"]: axis for axis in found["axes"] if axis["decoding"] == each} for each in both
    ]


def taus(axis):
    return [f"{point['tau']:.2f}" for point in axis["points"]]


def losses(axis):
    return [f"{point['held_out_loss']:.2f}" for point in axis["points"]]


@of("scaling-cpu/scaling.json")
def scaling_tokens(found):
    rows = []
    for label, axes in zip((MAIN, "the same, greedy"), axes_of(found), strict=True):
        own, of_seeds = axes["tokens, 2x128"], axes["tokens, 2x128, where all seeds were trained"]
        slopes = (interval(axis["slope_per_decade"]) for axis in (of_seeds, own))
        slope = "{} to 2 M, {} to 4 M".format(*slopes)
        unit = ", in logits of the rate" if own["response"] == "logit" else ""
        rows.append([label, *taus(own), slope + unit, of_seeds["word"]])
    own = axes_of(found)[0]["tokens, 2x128"]
    overlaps = (share(point["overlap"]) for point in own["points"])
    rows.append(["sum of min(p, q) on held-out text", *overlaps, "", ""])
    rows.append(["held-out loss (the target's is 3.49)", *losses(own), "", ""])
    tokens = [point["x"] for point in own["points"]]
    sizes = [f"{each / 1e3:.0f} k" if each < 999_000 else f"{each / 1e6:.1f} M" for each in tokens]
    header = ["2 layers, training tokens", *sizes[:-1], f"{sizes[-1]} (one seed)"]
    return [*header, "slope per decade", "law?"], rows


@of("scaling-cpu/scaling.json")
def scaling_sizes(found):
    counts = ["500 k", "1.0 M"]
    slope = "slope per decade"
    header = ["layers x width", "`rejection`: 125 k", *counts, slope, "greedy: 125 k", *counts]
    header += [slope, "held-out loss: 125 k", *counts]
    rows = []
    for size in ("1x128", "3x128", "4x128", "6x128", "2x64", "2x192"):
        main, greedy = (axes[f"tokens, {size}"] for axes in axes_of(found))
        figures = (each for axis in (main, greedy)
                   for each in (*taus(axis), interval(axis["slope_per_decade"])))  # fmt: skip
        rows.append([size.replace("x", " x "), *figures, *losses(main)])
    return header, rows


def scaling_at_a_million(label, name, unit=1):
    """The table of the drafters of a million tokens along an axis."""

    def made(found):
        both = [one(axes.values(), axis=name) for axes in axes_of(found)]
        rows = [
            [label, *taus(axis), interval(axis["slope_per_decade"]), axis["word"]]
            for label, axis in zip((MAIN, "the same, greedy"), both, strict=True)
        ]
        rows.append(["held-out loss", *losses(both[0]), "", ""])
        along = (f"{point['x'] / unit:.0f}" for point in both[0]["points"])
        return [f"1,000,000 tokens, {label}", *along, "slope per decade", "law?"], rows

    return ("scaling-cpu/scaling.json",), made


PARAMETERS = "thousand parameters without the embedding"
TABLES["scaling_layers"] = scaling_at_a_million("layers", "layers")
TABLES["scaling_width"] = scaling_at_a_million("width", "width")
TABLES["scaling_parameters"] = scaling_at_a_million(PARAMETERS, "parameters", unit=1000)


@of("scaling-cpu/scaling.json")
def scaling_batch(found):
    [drafter] = found["batch"]
    cells = drafter["batches"]
    best = [f"{each['best']} ({times(each['speedup'])})" if each["best"] else "0" for each in cells]
    best[0] = best[0].replace("x)", "x plain)")
    return batches(each["batch"] for each in cells), [
        ["best draft length", *best],
    ]


# ------------------------------------------------------------------------ auditing-your-engine.md


@of("audit-sensitivity-cpu.json")
def audit_engines(found):
    rows = [
        [
            each["what"],
            each["engine"],
            str(each["tokens"]),
            str(each["not_the_best"]),
            f"{each['explained']:.1f}",
            f"{each['largest_margin']:.2g}",
            f"{each['p']:.2g}",
            f"{each['faults']} faults"
            if each["faults"]
            else "too many ties"
            if each["is_found"]
            else "nothing",
        ]
        for each in found["engines"]
    ]
    header = ["file", "outputs of", "tokens", "not the target's", "ties explained"]
    return [*header, "largest margin", "p", "found"], rows


@of("audit-sensitivity-cpu.json")
def audit_planted(found):
    by_kind = {}
    for each in found["planted"]:
        by_kind.setdefault(each["what"], []).append(each)
    rows = []
    for what, files in by_kind.items():
        total = {key: sum(each[key] for each in files) for key in files[0] if key != "what"}
        rows.append(
            [
                what,
                f"{total['is_found']} of {len(files)}",
                *(
                    f"{total[f'{kind}_found']} of {total[kind]}" if total[kind] else ""
                    for kind in ("num_clear", "num_near")
                ),
                f"{total['not_the_best'] / total['tokens']:.1%}",
                f"{total['beyond_90'] / total['tokens']:.1%}",
            ]
        )
    header = ["planted", "files found", "outputs found with a gap above 5 s", "above 4 s"]
    return [*header, "tokens not the best", "and beyond the 90 % quantile of the noise"], rows


@of("doctor-cpu.json")
def doctor_kernels(found):
    return ["kernels, against XLA's", "outcome", "why"], [
        [f"`{each['kernels']}`", each["outcome"], each["why"] or ""]
        for each in found["tried_kernels"]
    ]


@of("doctor-cpu.json")
def doctor_costs(found):
    costs = found["costs"]
    header = ["a call", "a kernel in a program", "a trip of a loop", "reading memory", "products"]
    names = ("call_s", "kernel_s", "trip_s")
    return header, [
        [
            *(f"{1e6 * costs[name]:.1f} us" for name in names),
            f"{costs['bytes_per_s'] / 1e9:.1f} GB/s",
            f"{costs['flops_per_s'] / 1e9:.0f} GFLOP/s",
        ]
    ]


@of("doctor-cpu.json")
def doctor_cells(found):
    header = ["", "model", "batch", "context", "measured", "predicted", "ratio"]
    return header, [
        [
            each["what"],
            f"`{each['model']}`",
            str(each["batch_size"]),
            str(each["context"]),
            f"{each['measured_ms']:.2f}",
            f"{each['predicted_ms']:.2f}",
            f"{each['measured_over_predicted']:.2f}",
        ]
        for each in found["cells"]
    ]


@of("gpu-first-run.json#h100")
def gpu_attention(found):
    by_kind = {}
    for each in found["attention"]:
        by_kind.setdefault((each["kernels"], each["dtype"]), []).append(each)
    header = ["kernels", "dtype", "shapes", "heads", "keys", "values", "equal alone"]
    return header, [
        [
            f"`{kernels}`",
            dtype,
            str(len(cases)),
            *(f"{max(case[part] for case in cases):.1e}" for part in ("heads", "keys", "values")),
            f"{sum(case['equal_alone'] for case in cases)} of {len(cases)}",
        ]
        for (kernels, dtype), cases in by_kind.items()
    ]


@of("gpu-first-run.json#h100")
def gpu_outputs(found):
    header = ["kernels", "drafter", "equal to plain", "alone", "sampled", "accepted of drafted"]
    return header, [
        [
            f"`{each['kernels']}`",
            {"int8": "draft model, KV in int8", "draft": "draft model", "tree": "n-gram tree"}.get(
                each["drafter"], "n-grams"
            ),
            *(
                f"{each[part]} of {each['num_prompts']}"
                for part in ("equal_to_plain", "equal_alone", "sampled_equal_to_plain")
            ),
            " ".join(share(value) for value in each["accepted_of_drafted"]),
        ]
        for each in found["engines"]
    ]


@of("gpu-first-run.json#h200")
def gpu_prefill(found):
    runs = found["prefill"]["runs"]
    lengths = list(runs[0]["ms"])
    return ["attention of a chunk", *(f"{length} tokens" for length in lengths)], [
        [
            run["attention"],
            *(
                f"{sorted(run['ms'][length])[2]:.1f} ms ({min(run['ms'][length]):.1f} to "
                f"{max(run['ms'][length]):.1f})"
                for length in lengths
            ),
        ]
        for run in runs
    ]


@of("programs.json")
def programs(found):
    counts = {
        "CUDA graphs": "num_graphs",
        "in graphs": "num_nodes",
        "one by one": "num_kernels",
        "predicates": "num_predicates",
    }
    header = ["device", "kernels", "what", *counts, "KV copied", "weights copied"]
    return header, [
        [
            each["device"],
            f"`{each['kernels']}`",
            {
                "any": "a round",
                "prefill": "prefill",
                "prefill_target": "prefill, target",
                "catch_up": "prefill, drafter",
            }.get(each["rows"], f"a round, {each['rows']}"),
            *(
                str(each["launches"][name]) if "launches" in each else ""
                for name in counts.values()
            ),
            str(len(each["cache_moves"])),
            str(len(each["weight_moves"])),
        ]
        for each in found["results"]
    ]


if __name__ == "__main__":
    main()
