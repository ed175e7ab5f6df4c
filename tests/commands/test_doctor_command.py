"""`jaxspec doctor`: its screen, its document and its exit status."""

import pytest
from rich.console import Console

from jaxspec.commands import doctor as doctor_command
from jaxspec.commands.doctor import DoctorCommand
from jaxspec.lab import doctor


@pytest.mark.slow
@pytest.mark.as_shipped
def test_the_command(cli, monkeypatch):
    monkeypatch.setattr(doctor, "REPEATS", 1)
    result = cli("doctor", "--kernels", "mosaic", "--json")
    assert result.status == 0
    found = result.document
    assert found["holds"] is True
    assert [each["outcome"] for each in found["tried_kernels"]] == ["not for this device"]
    outputs = found["outputs"]
    assert outputs["num_equal"] == outputs["num_equal_alone"] == outputs["num_prompts"] == 8
    assert all(value > 0 for value in found["costs"].values())
    for cell in found["cells"]:
        assert cell["measured_ms"] > 0
        assert cell["predicted_ms"] > 0
    assert "Engine, ms" in result.out


def test_outputs_that_differ_are_an_alarm(cli, monkeypatch):
    wrong = {"num_prompts": 8, "num_equal": 7, "num_equal_alone": 8, "num_accepted_tokens": 9}
    costs = {
        "call_s": 1e-5,
        "kernel_s": 1e-6,
        "trip_s": 1e-6,
        "read_result_s": 1e-5,
        "bytes_per_s": 1e10,
        "flops_per_s": 1e11,
    }
    monkeypatch.setattr(doctor, "compare_with_plain", lambda _: wrong | {"exactness": "bitwise"})
    monkeypatch.setattr(doctor, "measure_costs", lambda _: costs)
    monkeypatch.setattr(doctor, "measure_cells", lambda _: [])
    result = cli("doctor", "--kernels", "mosaic")
    assert result.status == 3
    assert "7 of 8 in a batch" in " ".join(result.out.split())
    assert "Something is wrong" in result.out


def test_a_failed_build_is_not_kept(monkeypatch):
    """So a compiler that is installed later is used at once."""
    tried = {"kernels": "native", "outcome": "fails", "why": "there is no compiler", "seconds": 1.0}
    kept = []
    monkeypatch.setattr(doctor, "try_kernels", lambda *_, **__: dict(tried))
    monkeypatch.setattr(doctor_command, "keep_verdicts", kept.append)
    command = DoctorCommand(kernels=("native",))
    for problem in ("there is no compiler", None):
        monkeypatch.setattr(doctor_command, "native_problem", lambda problem=problem: problem)
        assert command._try_kernels(Console(quiet=True)) == [tried]
    assert kept == [{}, {"native": "there is no compiler"}]


def test_a_time_limit_out_of_range_is_refused(refused):
    assert "--timeout-s" in refused("doctor", "--timeout-s", "0")
