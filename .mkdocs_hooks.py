"""Pages of the studies, which a build of the documentation makes from their result files."""

import json
import pathlib
import tempfile

from mkdocs.structure.files import File

from jaxspec.lab.studies import report as published
from jaxspec.lab.studies.scaling import report as scaling

STUDIES = {
    "results/study-cpu/study": published.write_html,
    "results/scaling-cpu/scaling": scaling.write_html,
}


def on_files(files, config):
    """Adds the pages to the files of the site."""
    for name, write_html in STUDIES.items():
        document = json.loads(pathlib.Path(config.docs_dir, f"{name}.json").read_text("utf-8"))
        with tempfile.TemporaryDirectory() as directory:
            page = pathlib.Path(directory, "page.html")
            write_html(document, page)
            files.append(File.generated(config, f"{name}.html", content=page.read_bytes()))
    return files


def on_page_markdown(markdown, page, config, files):
    """Adds links to the pages to the table of results."""
    if page.file.src_uri == "study.md":
        for name in STUDIES:
            markdown = markdown.replace(f"({name}.json) |", f"({name}.json), [page]({name}.html) |")
    return markdown
