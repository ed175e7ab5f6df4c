"""Reports: tables, plots, and one HTML file that appears whole or not at all."""

import base64
import dataclasses
import os
import re

import numpy as np
import pytest
from rich.console import Console

from jaxspec.audit import report as reports
from jaxspec.audit.judge import Divergence, Finding
from jaxspec.audit.report import Audit, prefix_shares
from jaxspec.conformance.report import Check, ConformanceReport, Outcome
from jaxspec.errors import SettingError
from jaxspec.runtime.report import NONE, TextTable, percent, write_page


def divergence(index, margin, finding):
    return Divergence(
        index=index,
        token=-1 if finding == Finding.FAULT else 5,
        expected=6,
        gap=margin,
        margin=margin,
        bound=0.1,
        finding=finding,
    )


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class MadeAudit(Audit):
    promise: str
    sentence: str
    holds: bool
    title: str
    result_tables: list
    located: list
    curves: dict


REPORT = MadeAudit(
    promise="bit-exact",
    sentence="The promise is broken.",
    holds=False,
    title="Audit <of> something",
    result_tables=[TextTable(title="Run", header=("what", "value"), rows=[("target", "a & b")])],
    located=[
        ("line 2", divergence(3, 0.02, Finding.TIE)),
        ("line 4", divergence(9, float("inf"), Finding.FAULT)),
        ("line 5", divergence(9, 2.0, Finding.SAMPLING)),
    ],
    curves={
        "all": prefix_shares([(10, divergence(3, 0.02, Finding.TIE)), (12, None), (4, None)]),
    },
)


def test_the_prefix_match_curve():
    shares = REPORT.curves["all"]
    assert len(shares) == 13
    assert shares[:4].tolist() == [1, 1, 1, 1]  # its first three tokens are equal
    assert np.allclose(shares[4:], 2 / 3)


def test_faults_are_listed_first_and_missing_tokens_are_named():
    rows = REPORT.divergence_table.rows
    assert [row[0] for row in rows] == ["line 4", "line 5", "line 2"]
    assert rows[0][2] == "(end)"
    assert rows[0][-1] == "fault"


def test_long_lists_are_cut_and_say_so(monkeypatch):
    monkeypatch.setattr(reports, "MAX_LISTED", 2)
    table = REPORT.divergence_table
    assert len(table.rows) == 2
    assert table.title == "Divergences, 2 of 3"


def test_the_page_is_self_contained(tmp_path):
    path = tmp_path / "below" / "report.html"
    REPORT.write_html(path)
    page = path.read_text()
    assert "Audit &lt;of&gt; something" in page
    assert "a &amp; b" in page
    images = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page)
    assert len(images) == 2
    assert all(b"<svg" in base64.b64decode(image) for image in images)
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert os.listdir(path.parent) == ["report.html"]


def test_a_report_without_divergences_has_a_curve_only(tmp_path):
    clean = MadeAudit(
        promise="p",
        sentence="s",
        holds=True,
        title="t",
        result_tables=[],
        located=[],
        curves={"all": prefix_shares([(5, None)])},
    )
    assert [plot.caption for plot in clean.plots()] == ["Prefix match"]
    clean.write_html(tmp_path / "r.html")
    assert "Divergences" not in (tmp_path / "r.html").read_text()


def test_an_interrupted_write_leaves_the_old_report(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("old")

    def fail(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        REPORT.write_html(path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["report.html"]


def test_a_report_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match="cannot be written"):
        REPORT.write_html(tmp_path / "file" / "report.html")


def test_tables_fit_a_terminal(capsys):
    console = Console(width=80, force_terminal=False)
    for table in REPORT.all_tables:
        console.print(table)
    shown = capsys.readouterr().out
    assert "sampling" in shown
    assert all(len(row) <= 80 for row in shown.splitlines())


def test_a_report_prints_as_its_tables_and_makes_a_frame():
    battery = ConformanceReport(
        kind="drafter",
        subject="mine",
        checks=(Check("shapes", "C1", "must <fit>", run=str, outcome=Outcome.FAILED, detail="no"),),
    )
    for report, shown, escaped in (
        (REPORT, ("Audit <of> something", "The promise is broken.", "line 4"), "a &amp; b"),
        (battery, ("drafter mine: 0 passed, 1 failed", "must <fit>"), "must &lt;fit&gt;"),
    ):
        printed, page = str(report), report._repr_html_()
        for each in shown:
            assert each in printed
        assert max(map(len, printed.split("\n"))) <= 80
        assert escaped in page
        assert page.count("<table>") == len(report.all_tables)
    frame = REPORT.to_frame()
    assert frame["where"].tolist() == ["line 2", "line 4", "line 5"]
    assert frame.margin.tolist() == [0.02, float("inf"), 2.0]
    assert battery.to_frame().outcome.tolist() == ["FAILED"]
    assert list(dataclasses.replace(REPORT, located=[]).to_frame()) == list(frame)


def test_shares_are_never_rounded_up():
    assert percent(0.9999) == "99.9 %"
    assert percent(1.0) == "100.0 %"
    assert percent(float("nan")) == NONE


def test_a_page_shows_values_as_text(tmp_path, capsys):
    mine = TextTable.of_values("Mine", {"rounds": "3", "markup": "[red]4"})
    theirs = TextTable(title="Theirs", header=("rounds",), rows=[("5",)])
    write_page(tmp_path / "p.html", title="t", findings=["<found>"], tables=[mine, theirs])
    page = (tmp_path / "p.html").read_text()
    assert page.index("Mine") < page.index("Theirs")
    assert page.count("<th>") == 1
    assert "<li>&lt;found&gt;</li>" in page
    Console(width=40, force_terminal=False).print(mine)
    assert "[red]4" in capsys.readouterr().out
