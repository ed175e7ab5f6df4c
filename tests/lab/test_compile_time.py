"""How compile time grows with the layers."""

import json
import os
import subprocess
import sys

import pytest
from rich.console import Console

from jaxspec.errors import SettingError
from jaxspec.lab.bench import compile_time
from jaxspec.lab.bench.compile_time import CompileTimeBench

QUIET = Console(quiet=True)


@pytest.mark.slow
def test_growth_is_measured_without_the_cache(tmp_path):
    # A cache that holds everything after the first repeat, if it were asked.
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    options = "--layers 1 3 --repeats 1 --width 32 --batch-size 1 --max-length 128 --draft-length 1"
    done = subprocess.run(
        [sys.executable, "-m", "jaxspec", "bench", "compile-time", *options.split(), "--json"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())
    document = json.loads(done.stdout.strip().split("\n")[-1])
    one, three = document["results"]
    assert (one["num_layers"], three["num_layers"]) == (1, 3)
    assert one["programs"].keys() == three["programs"].keys()
    assert {"the prefill", "the decode round"} < one["programs"].keys()
    assert all(each["cpu_s"] > 0 for each in (one, three))
    added_s = three["cpu_s"] - one["cpu_s"]
    assert three["cpu_s_per_added_layer"] == pytest.approx(added_s / 2)


def test_growth_of_a_compiler_that_takes_the_square(monkeypatch):
    def compile(self, target, draft):
        return 0.5 * target.config.num_layers**2, 1.0, {"it": 1.0}

    monkeypatch.setattr(CompileTimeBench, "_compile", compile)
    monkeypatch.setattr(compile_time.jax.config, "update", lambda *_: None)
    results = CompileTimeBench(layers=(1, 2, 4), repeats=2).run(QUIET)["results"]
    assert [each["exponent"] for each in results[1:]] == pytest.approx([2, 2])
    assert [each["cpu_s_per_added_layer"] for each in results[1:]] == pytest.approx([1.5, 3])


@pytest.mark.parametrize("layers", [(4,), (4, 2), (2, 2)])
def test_numbers_of_layers_that_show_no_growth_are_refused(layers):
    with pytest.raises(SettingError, match="two or more, rising"):
        CompileTimeBench(layers=layers).run(QUIET)
