"""`jaxspec bench sessions`: what a second turn prefills, and that its token is the same."""

import io

import pytest
from rich.console import Console

from jaxspec.errors import SettingError
from jaxspec.lab.bench.sessions import SessionsBench


def test_a_second_turn_prefills_only_what_is_new():
    console = Console(file=io.StringIO(), width=120)
    bench = SessionsBench(histories=(150,), answer_tokens=20, new_tokens=9, repeats=1)
    found = bench.run(console)
    assert found["holds"]
    without, in_row, on_host = found["results"]
    assert without["num_prefilled"] == without["prompt_tokens"] == 159
    # The newest token of the first turn has no KV yet.
    assert [each["num_prefilled"] for each in (in_row, on_host)] == [10, 10]
    assert [each["num_reread"] for each in (in_row, on_host)] == [0, 0]
    assert without["speedup"] == 1
    assert "session on the host" in console.file.getvalue()


def test_a_history_without_a_prompt_is_refused():
    with pytest.raises(SettingError, match="--histories 64 was given"):
        SessionsBench(histories=(64, 200)).check()
