"""What README, the docs and docstrings show runs as it stands, and what they cite exists."""

import contextlib
import doctest
import importlib.metadata
import pathlib
import re
import shlex

import page_tables
import pytest
import test_imports
import tyro
import yaml

import jaxspec
from jaxspec.audit.controls.faults import FAULTS
from jaxspec.cli import load_command

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [README, *sorted(DOCS.glob("*.md"))]


def text_of(page):
    return page.read_text(encoding="utf-8")


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text_of(page), flags=re.DOTALL | re.MULTILINE)


def table_under(page, header):
    """Cells of the rows of the table whose first line begins so."""
    lines = text_of(page).split(header, 1)[1].split("\n\n")[0].split("\n")[2:]
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines if line]


def run(source, namespace, page):
    exec(compile(source, page.name, "exec"), namespace)


# -------------------------------------------------------------------------------------- examples


def test_the_five_lines_of_the_readme_run():
    (example,) = blocks(README, "python")
    *statements, last = example.strip().split("\n")
    namespace = {}
    run("\n".join(statements), namespace, README)
    text, finish_reason, acceptance = eval(last, namespace)
    assert text
    assert finish_reason in ("length", "stop")
    assert acceptance.num_accepted_tokens > 0
    assert len([line for line in statements if line]) == 4


LONG = (
    *("acceptance", "adding-a-drafter", "adding-a-verifier", "exactness", "heads", "sampling"),
    *("serving", "sessions", "trees"),
)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=[pytest.mark.slow] * (page.stem in LONG))
        for page in PAGES[1:]
        if blocks(page, "python")
    ],
)
def test_the_examples_of_a_page_run(page, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "Agg")
    namespace = {"__name__": page.stem}
    for block in blocks(page, "python"):
        run(block, namespace, page)


def modules_with_examples():
    for path in sorted((ROOT / "jaxspec").rglob("*.py")):
        if re.search(r"^ +>>> ", text_of(path), flags=re.MULTILINE):
            yield ".".join(path.relative_to(ROOT).with_suffix("").parts)


# Those whose own tests run their examples.
RUN_ELSEWHERE = {
    "jaxspec.lab.compare": "tests/lab/test_compare.py",
    "jaxspec.models.tokenizer": "tests/models/test_text_stream.py",
    "jaxspec.serving.engine": "tests/serving/test_serving.py",
}


@pytest.mark.parametrize("name", sorted({*modules_with_examples()} - {*RUN_ELSEWHERE}))
def test_docstring_examples_run(name):
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted > 0
    assert results.failed == 0


def test_examples_that_other_tests_run_are_run():
    assert {*RUN_ELSEWHERE} <= {*modules_with_examples()}
    for path in RUN_ELSEWHERE.values():
        assert "doctest.testmod" in text_of(ROOT / path)


def command_lines():
    """Lines of shell blocks, and benches that are named in the text."""
    for page in PAGES:
        lines = [line for block in blocks(page, "shell") for line in block.split("\n")]
        named = re.findall(r"`(jaxspec bench [a-z-]+)`", text_of(page))
        lines += [f"{line} --help" for line in named]
        for line in sorted({line for line in lines if line.startswith("jaxspec ")}):
            yield pytest.param(line, id=f"{page.stem}: {line[8:50]}")


@pytest.mark.parametrize("line", list(command_lines()))
def test_the_commands_of_the_documents_can_be_parsed(line):
    _, name, *options = shlex.split(line, comments=True)
    config = (tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)
    asks_for_help = options[-1:] == ["--help"]
    with pytest.raises(SystemExit, match=r"^0$") if asks_for_help else contextlib.nullcontext():
        tyro.cli(load_command(name), prog=f"jaxspec {name}", args=options, config=config)


# ----------------------------------------------------------------------------------------- links


def anchors(page):
    headings = re.findall(r"^#+ (.*)$", text_of(page), flags=re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip() for heading in headings]
    return {re.sub(r"[\s-]+", "-", heading.lower()) for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(((?!http)[^)]+)\)", text_of(page)):
        path, _, anchor = link.partition("#")
        target = page if not path else page.parent / path
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), link


def test_the_site_has_every_page_and_the_reference_every_public_name():
    config = yaml.safe_load(text_of(ROOT / ".mkdocs.yml"))

    def leaves(node):
        if isinstance(node, str):
            return [node]
        values = node.values() if isinstance(node, dict) else node
        return [leaf for value in values for leaf in leaves(value)]

    assert sorted(leaves(config["nav"])) == [page.name for page in PAGES[1:]]
    listed = set(re.findall(r"^::: (\S+)$", text_of(DOCS / "api.md"), flags=re.MULTILINE))
    listed |= {name.rpartition(".")[0] for name in listed}  # of a module, what it exports
    assert {f"jaxspec.{name}" for name in jaxspec.__all__} <= listed


# ---------------------------------------------------------------------------------------- tables

# Tables with numbers that are no measurements, by the beginnings of their headers: words, options,
# layouts, claims of papers, and counts that follow from sizes.
NO_MEASUREMENTS = {
    "README": ["| | |"],
    "adding-a-drafter": ["| attribute |", "| field of `rows` |"],
    "auditing-your-engine": ["| field |"],
    "exactness": ["| level |"],
    "flexdraft": ["| mode |", "| N drafts |", "| layout |"],
    "gpu": ["| machine |"],
    "glossary": ["| word |", "| ours |"],
    "heads": ["| | the first head reads |", "| layout |", '| `"tree"` |'],
    "kernels": ["| kernels |"],
    "memory": ["| setting |"],
    "models": ["| | what is supported |", "| file |", "| a prompt is |"],
    "real-model": ["| | what is read |"],
    "sampling": ["| verifier |"],
    "scaling": ["| claim |", "| curve |", "| gate |"],
    "security": ["| input |"],
    "server": ["| route |", "| name |"],
    "study": ["| file |"],
    "trees": ["| | what it drafts |"],
}


def without_a_file(page):
    """The headers of tables with figures of ours that no file has; their section may say so."""
    for section in re.split(r"^#", text_of(page), flags=re.MULTILINE):
        if re.search(r"No result file\s+is\s+kept", section, flags=re.IGNORECASE):
            continue
        for before, table in re.findall(
            r"(?:^(.*)\n\s*)((?:^\|.*\n)+)", section, flags=re.MULTILINE
        ):
            header, _, rows = table.partition("\n|-")
            is_known = header.startswith(tuple(NO_MEASUREMENTS.get(page.stem, ())))
            if re.search(r"\d", rows) and not is_known and not before.startswith("<!-- table: "):
                yield header


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_of_figures_are_made_from_the_result_files(page):
    assert page_tables.rewritten(page) == text_of(page), "run python -m tests.page_tables"
    assert not list(without_a_file(page))


def test_every_table_of_figures_is_on_one_page():
    places = [name for page in PAGES for name in page_tables.PLACE.findall(text_of(page))]
    assert sorted(places) == sorted(page_tables.TABLES)
    for page in PAGES:
        for header in NO_MEASUREMENTS.get(page.stem, ()):
            assert f"\n{header}" in text_of(page)


def test_tables_that_no_file_has_are_seen(tmp_path):
    """Sabotage: another figure, and a table whose place is not marked."""
    page = tmp_path / "README.md"
    text = text_of(README)
    row = next(line for line in text.splitlines() if line.startswith("| jaxspec, plain | "))
    page.write_text(text.replace(row, row.replace("plain | ", "plain | 1")), encoding="utf-8")
    assert row in page_tables.rewritten(page)
    page.write_text(text_of(README).replace("<!-- table: peers_speed -->\n", ""), encoding="utf-8")
    headers = list(without_a_file(page))
    assert headers == ["| | batch 1 | batch 4 | batch 8 | batch 16 | outputs that stay the same |"]


# ----------------------------------------------------------------------------------------- facts


def test_the_readme_is_short_and_has_the_test_command():
    assert len(text_of(README).split("\n")) <= 150
    assert re.search(r"^python3 -m venv .*pytest$", text_of(README), flags=re.MULTILINE)


def test_the_audit_has_as_many_controls_as_the_readme_says():
    assert f"injecting {len(FAULTS)} faults" in text_of(README)


def test_the_rooms_of_the_design_are_those_that_imports_are_held_to():
    rows = table_under(DOCS / "design.md", "| rooms | what they hold |")
    found = [(names.replace("`", ""), words) for names, words in rows]
    assert found == [(names, words) for names, words in test_imports.ROOMS if words]


def test_the_names_in_the_changelog_exist():
    names = re.findall(r"`(jaxspec(?:\.\w+)+)[`(]", text_of(ROOT / "CHANGELOG.md"))
    assert len(names) >= 5
    for name in names:
        assert resolve(name) is not None, name
    for made_up in ("jaxspec.no_such_name", "jaxspec.testing.check_weather"):
        assert resolve(made_up) is None


def resolve(name):
    """What a dotted name stands for; None if it is nothing."""
    try:
        return importlib.import_module(name)
    except ImportError:
        owner, _, last = name.rpartition(".")
        return getattr(resolve(owner), last, None) if owner else None


def test_every_public_name_is_documented_and_listed():
    for name in jaxspec.__all__:
        assert getattr(jaxspec, name).__doc__, name
    public = {name for name in dir(jaxspec) if name[0].isupper() and name != "TYPE_CHECKING"}
    assert public - {"Any"} <= set(jaxspec.__all__)


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load(text_of(ROOT / "CITATION.cff"))
    assert citation["version"] == jaxspec.__version__
    assert citation["license"] == "Apache-2.0"


def test_the_namesake_on_pypi_is_reported(monkeypatch, recwarn, tmp_path):
    for name in ("jaxspec-main", "jaxspec_decoding-0.1.0.dist-info"):  # a clone, and this package
        (tmp_path / name).mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "absent")
    jaxspec._warn_of_namesake()
    assert not recwarn.list
    (tmp_path / "jaxspec-0.4.1.dist-info").mkdir()
    (tmp_path / "jaxspec-0.4.1.dist-info" / "METADATA").write_text("Name: jaxspec\nVersion: 0.4.1")
    assert importlib.metadata.version("jaxspec") == "0.4.1"
    jaxspec._warn_of_namesake()
    assert "'jaxspec' 0.4.1 (X-ray spectral fitting)" in str(recwarn.pop().message)
