"""The CPU kernels' library: compiled once, in a directory of the user's, by whatever compiler there
is; and a process of its own for each number of threads."""

import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from test_cpu import CASES, attention_inputs, product_inputs, run

from jaxspec.kernels import cpu

pytestmark = pytest.mark.skipif(cpu.problem() is not None, reason=f"{cpu.problem()}")

CODE = (
    "import logging; logging.basicConfig(level=logging.INFO); "
    "from jaxspec.kernels import cpu; print(cpu.problem())"
)


@pytest.mark.parametrize("given", ["1", "5"])
def test_any_number_of_threads_gives_the_same_bits(given):
    # The number is read once in a process, so this needs one of its own.
    code = (
        "import jax, sys; import test_cpu as t; from jaxspec.kernels import cpu\n"
        "x, weight, settings = t.product_inputs((48, 128, 200), ('norm',), t.jnp.float32)\n"
        "heads, _ = t.run(t.CASES['chain'], t.attention_inputs(t.CASES['chain']))\n"
        "made = cpu.product(x, weight, **settings)\n"
        "sys.stdout.buffer.write(t.np.asarray(made).tobytes() + t.np.asarray(heads).tobytes())\n"
    )
    here = pathlib.Path(__file__).parent
    places = [str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, places)),
            "JAXSPEC_NUM_THREADS": given,
        },
        capture_output=True,
        check=True,
    )
    x, weight, settings = product_inputs((48, 128, 200), ("norm",), jnp.float32)
    heads, _ = run(CASES["chain"], attention_inputs(CASES["chain"]))
    made = cpu.product(x, weight, **settings)
    assert done.stdout == np.asarray(made).tobytes() + np.asarray(heads).tobytes()


def problem_of(tmp_path, compiler):
    environ = {**os.environ, "CXX": str(compiler), "JAXSPEC_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=environ, capture_output=True, text=True, check=True
    )
    return done.stdout.strip(), done.stderr


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_without_a_compiler_or_with_one_that_fails_there_is_a_sentence(tmp_path):
    said, _ = problem_of(tmp_path, tmp_path / "nowhere")
    assert said == f"no C++ compiler was found ({tmp_path / 'nowhere'})"
    old = script(tmp_path / "old", "echo 'x.cc:1: error: unknown option -std=c++17' >&2; exit 1")
    said, _ = problem_of(tmp_path, old)
    assert said == f"{old} could not compile kernels.cc: x.cc:1: error: unknown option -std=c++17"
    said, _ = problem_of(tmp_path, script(tmp_path / "mute", "exit 3"))
    assert said.endswith("could not compile kernels.cc: exit status 3")
    assert not list((tmp_path / "cache" / ".kernels").iterdir())


def test_they_are_compiled_once(tmp_path):
    used = script(tmp_path / "used", f'echo once >> {tmp_path}/log; exec c++ "$@"')
    said, announced = problem_of(tmp_path, used)
    assert said == "None"
    assert "compiling the CPU kernels, once on this machine" in announced
    said, announced = problem_of(tmp_path, used)
    assert said == "None"
    assert announced == ""
    assert (tmp_path / "log").read_text() == "once\n"
    kept = list((tmp_path / "cache" / ".kernels").iterdir())
    assert [path.suffix for path in kept] == [".so"]


def test_a_command_that_loads_no_model_compiles_nothing(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "jaxspec", "cache", "list", "--json"],
        env={**os.environ, "JAXSPEC_CACHE": str(tmp_path)},
        capture_output=True,
        check=True,
    )
    assert not (tmp_path / ".kernels").exists()
