"""Tables, plots and pages, in which audits, batteries, comparisons and studies show their
results."""

from __future__ import annotations

import base64
import dataclasses
import io
import itertools
import math
import os
import pathlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from jaxspec.errors import SettingError
from jaxspec.runtime.directories import check_can_write, write_atomically
from jaxspec.runtime.extras import import_extra

if TYPE_CHECKING:
    import pandas

Columns: TypeAlias = Mapping[str, str | Callable[[Any], Any]]

NONE = "-"  # a cell without a value
FIGURES = ("", "-", *"0123456789")  # first characters of a cell with a number
GOOD, BAD = "#2a7f62", "#c0392b"


def percent(share: float) -> str:
    """A fraction as text, rounded down, because 9999 of 10000 must not look like all of them."""
    return NONE if math.isnan(share) else f"{math.floor(share * 1000 + 1e-9) / 10:.1f} %"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextTable:
    """A table of text, for a terminal (`rich` prints it) and for a page.

    Attributes:
      title: the line above it.
      header: names of the columns; empty for a table of names and values.
      rows: its cells.
      breaks: indices of rows that have a line above them in a terminal.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    breaks: Collection[int] = ()

    @classmethod
    def of_columns(
        cls,
        title: str,
        columns: Columns,
        records: Iterable[Any],
        *,
        group: Callable[[Any], Any] | None = None,
    ) -> TextTable:
        """A row for each record.

        Args:
          title: the line above it.
          columns: by heading, a format string over the record's fields (`{run_s:.2f}`), or a
            function of the record whose result is shown as text. A field that the record lacks, or
            that is None, is shown as `NONE`.
          records: mappings, or objects with attributes.
          group: a line is drawn between records for which this differs.
        """
        records = list(records)
        pairs = enumerate(itertools.pairwise(records), start=1) if group is not None else ()
        return cls(
            title=title,
            header=tuple(columns),
            rows=[[_cell(column, record) for column in columns.values()] for record in records],
            breaks=[index for index, (a, b) in pairs if group and group(a) != group(b)],
        )

    @classmethod
    def of_frame(cls, title: str, frame: pandas.DataFrame) -> TextTable:
        """A row for each row of a frame: numbers with three digits, `NONE` where there is none."""

        def shown(value: Any) -> str:
            if value is None or value != value:
                return NONE
            if isinstance(value, float):
                return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
            return str(value)

        rows = [[shown(value) for value in row] for row in frame.itertuples(index=False)]
        return cls(title=title, header=list(frame), rows=rows)

    @classmethod
    def of_values(cls, title: str, values: Mapping[str, str]) -> TextTable:
        """A table with a line for each name and its value."""
        return cls(title=title, header=(), rows=list(values.items()))

    def __rich__(self):
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(
            title=self.title,
            title_justify="left",
            title_style="bold",
            show_header=bool(self.header),
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            show_edge=False,
        )
        num_columns = len(self.header) or max(map(len, self.rows), default=0)
        for index, name in enumerate(self.header or ("",) * num_columns):
            cells = [row[index] for row in self.rows if index < len(row)]
            # Text is wrapped between words if the width is too small; numbers never are.
            is_figures = all(cell[:1] in FIGURES and len(cell) < 15 for cell in cells)
            words = " ".join((name, *cells)).split()
            table.add_column(
                name,
                overflow="fold",
                justify="right" if is_figures and self.header else "left",
                no_wrap=is_figures,
                min_width=min(max(map(len, words), default=1), 20),
            )
        for index, row in enumerate(self.rows, start=1):
            table.add_row(*map(Text, row), end_section=index in self.breaks)
        return table


def _cell(column: str | Callable[[Any], Any], record: Any) -> str:
    if callable(column):
        return str(column(record))
    try:
        return column.format_map(record if isinstance(record, Mapping) else vars(record))
    except (KeyError, TypeError):  # no such field, or a None that takes no format
        return NONE


class Printed:
    """Base class of results that print as their tables, and show as these in a notebook.

    Attributes:
      headings: sentences above the tables, and their styles.
      all_tables: the tables.
      remarks: sentences below, and their styles.
    """

    headings: Sequence[tuple[str, str]] = ()
    all_tables: Sequence[TextTable]
    remarks: Sequence[tuple[str, str]] = ()

    def __rich_console__(self, console: Any, options: Any) -> Iterable[Any]:
        from rich.text import Text

        yield from (Text(text, style) for text, style in self.headings)
        yield from self.all_tables
        yield from (Text(text, style) for text, style in self.remarks)

    def __repr__(self) -> str:
        from rich.console import Console

        file = io.StringIO()
        Console(file=file, color_system=None).print(self)
        return "\n".join(line.rstrip() for line in file.getvalue().rstrip().split("\n"))

    def _repr_html_(self) -> str:
        import jinja2

        page = "{% for text, _ in above %}<p>{{ text }}</p>{% endfor %}"
        page += "{% for table in tables %}{{ show(table) }}{% endfor %}"
        page += "{% for text, _ in below %}<p>{{ text }}</p>{% endfor %}"
        return (
            jinja2.Environment(autoescape=True)
            .from_string(_SHOW + page)
            .render(above=self.headings, tables=self.all_tables, below=self.remarks)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plot:
    """A matplotlib figure with its caption for a page.

    Attributes:
      name: that of its file, without a suffix.
      caption: one line.
      figure: the figure.
    """

    name: str
    caption: str
    figure: Any

    def svg(self) -> bytes:
        """The figure as SVG, with the same bytes on every run."""
        return _drawn(self.figure, "svg", metadata={"Date": None})

    def png(self) -> bytes:
        """The figure as PNG."""
        return _drawn(self.figure, "png", dpi=110, metadata={"Software": None})


def _drawn(figure: Any, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, **options)
    return buffer.getvalue()


def new_figure(
    num_rows: int = 1,
    num_columns: int = 1,
    *,
    size: tuple[float, float] = (6.4, 3.6),
    **options: Any,
) -> tuple[Any, Any]:
    """A matplotlib figure and its axes, without the spines above and on the right.

    Nothing is drawn on a screen. A notebook shows the figure, whose width and height `size` are in
    inches. With several rows or columns, the axes are an array as `Figure.subplots` gives it, which
    takes the `options`, such as `width_ratios`.

    Raises:
      SettingError: matplotlib is not installed.
    """
    figures = import_extra("matplotlib.figure", "plots")

    class Shown(figures.Figure):
        """Notebooks draw a figure by themselves only after pyplot has been imported."""

        def _repr_png_(self) -> bytes:
            return _drawn(self, "png")

    figure = Shown(figsize=size, layout="constrained")
    axes = figure.subplots(num_rows, num_columns, **options)
    for each in figure.axes:
        each.spines[["top", "right"]].set_visible(False)
        each.set_axisbelow(True)
    return figure, axes


def check_can_plot(path: pathlib.Path) -> None:
    """Checks, before the work whose results are plotted, that `save_figure` can write a file.

    Raises:
      SettingError: it cannot be written, its suffix names no format, or matplotlib is not
        installed.
    """
    check_can_write(path)
    figure, _ = new_figure()
    _drawn_as(figure, path)


def save_figure(figure: Any, path: pathlib.Path) -> None:
    """Writes a matplotlib figure, whole or not at all, making its directory if needed; the suffix
    of `path` determines the format.

    Raises:
      SettingError: the file cannot be written, or its suffix names no format.
    """
    write_atomically(path, _drawn_as(figure, path))


def _drawn_as(figure: Any, path: pathlib.Path) -> bytes:
    """A figure in the format that the suffix of a file names."""
    try:
        return _drawn(figure, path.suffix[1:] or "none", dpi=120)
    except (ValueError, RuntimeError, ImportError) as error:  # the format, or a program it needs
        reason = str(error).split("\n")[0]
        raise SettingError(
            f"The plot cannot be written to {path} ({reason}); name a file like rates.png."
        ) from error


def write_page(
    path: str | os.PathLike,
    *,
    title: str,
    verdict: str = "",
    holds: bool | None = None,
    summary: TextTable | None = None,
    findings: Sequence[str] = (),
    paragraphs: Sequence[str] = (),
    tables: Sequence[TextTable] = (),
    plots: Sequence[Plot] = (),
) -> None:
    """Writes one self-contained HTML page; it appears whole or not at all.

    Args:
      path: that of the file.
      title: that of the page.
      verdict: the result in one sentence, shown with a bar in the colour of `holds`.
      holds: whether the verdict is good; None if it is neither good nor bad.
      summary: a table before everything else.
      findings: a list of sentences.
      paragraphs: text after these.
      tables: after the plots, each below its title.
      plots: drawn into the page.

    Raises:
      SettingError: the file cannot be written.
    """
    import jinja2

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string(_SHOW + _PAGE).render(
        title=title,
        verdict=verdict,
        colour={True: GOOD, False: BAD, None: "#888"}[holds],
        summary=summary,
        findings=findings,
        paragraphs=paragraphs,
        tables=tables,
        images=[(plot.caption, base64.b64encode(plot.svg()).decode()) for plot in plots],
    )
    write_atomically(pathlib.Path(path), page.encode())


_SHOW = """{% macro show(table) %}
{% if table.title %}<h2>{{ table.title }}</h2>{% endif %}

<table>{% if table.header %}<tr>{% for name in table.header %}<th>{{ name }}</th>{% endfor %}</tr>
{% endif %}
{% for row in table.rows %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table>
{% endmacro %}
"""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem;
  color: #1c1c1c; background: #fff; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; font-size: 14px; }
th, td { border-bottom: 1px solid #ddd; padding: .25rem .8rem .25rem 0; text-align: left;
  vertical-align: top; font-variant-numeric: tabular-nums; }
h2 { font-size: 1rem; margin-top: 2rem; }
.verdict { border-left: .4rem solid {{ colour }}; padding-left: .8rem; font-weight: bold; }
figure { display: inline-block; margin: 0 1rem 1rem 0; }
figure img { max-width: 100%; }
</style></head><body>
<h1>{{ title }}</h1>
{% if verdict %}
<p class="verdict">{{ verdict }}</p>
{% endif %}
{% if summary %}
{{ show(summary) }}
{% endif %}
{% if findings %}
<ul>{% for sentence in findings %}<li>{{ sentence }}</li>{% endfor %}</ul>
{% endif %}
{% for text in paragraphs %}
<p>{{ text }}</p>
{% endfor %}
{% for caption, data in images %}
<figure><figcaption><b>{{ caption }}</b></figcaption>
<img alt="{{ caption }}" src="data:image/svg+xml;base64,{{ data }}"></figure>
{% endfor %}
{% for table in tables %}
{{ show(table) }}
{% endfor %}
</body></html>
"""
