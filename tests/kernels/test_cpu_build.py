"""The CPU kernels' library: compiled once, in a directory of the user's, by whatever compiler there
is; and a process of its own for each number of threads."""

import errno
import hashlib
import os
import pathlib
import platform
import re
import stat
import subprocess
import sys
import tempfile

import jax.numpy as jnp
import numpy as np
import pytest
from test_cpu import CASES, attention_inputs, product_inputs, run

from jaxspec.errors import SettingError
from jaxspec.kernels import cpu, registry
from jaxspec.kernels.cpu import build
from jaxspec.kernels.cpu.build import OPTIONS, SOURCE
from jaxspec.runtime.directories import KERNELS_DIRECTORY, cache_directory

pytestmark = pytest.mark.skipif(cpu.problem() is not None, reason=f"{cpu.problem()}")

CODE = (
    "import logging; logging.basicConfig(level=logging.INFO); "
    "from jaxspec.kernels import cpu; print(cpu.problem())"
)


def python_path():
    """With this directory and the one above it, for processes that use these tests' modules."""
    here = pathlib.Path(__file__).parent
    places = [str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, places))


@pytest.mark.parametrize("given", ["1", "5"])
def test_any_number_of_threads_gives_the_same_bits(given):
    # The number is read once in a process, so this needs one of its own.
    code = (
        "import jax, sys; import test_cpu as t; from jaxspec.kernels import cpu\n"
        "x, weight, settings = t.product_inputs((48, 128, 200), ('norm',), t.jnp.float32)\n"
        "heads, _ = t.run(t.CASES['chain'], t.attention_inputs(t.CASES['chain']))\n"
        "made = cpu.product(x, cpu.pack(weight), **settings)\n"
        "sys.stdout.buffer.write(t.np.asarray(made).tobytes() + t.np.asarray(heads).tobytes())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "PYTHONPATH": python_path(),
            "JAXSPEC_NUM_THREADS": given,
        },
        capture_output=True,
        check=True,
    )
    x, weight, settings = product_inputs((48, 128, 200), ("norm",), jnp.float32)
    heads, _ = run(CASES["chain"], attention_inputs(CASES["chain"]))
    made = cpu.product(x, cpu.pack(weight), **settings)
    assert done.stdout == np.asarray(made).tobytes() + np.asarray(heads).tobytes()


@pytest.fixture(scope="module")
def library():
    """The library that this suite has compiled and loaded."""
    return next((cache_directory() / KERNELS_DIRECTORY).glob("kernels-*.so"))


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def copying_compiler(tmp_path, content, *, seconds=0):
    """A compiler that notes its options in `tmp_path/log`, and whose output is always `content`."""
    (tmp_path / "content").write_bytes(content)
    commands = (
        f'echo "$@" >> {tmp_path}/log; sleep {seconds}; for last; do :; done; '
        f'cp {tmp_path}/content "$last"'
    )
    return script(tmp_path / "copying", commands)


def start(tmp_path, compiler, code=CODE, **environ):
    environ = {"CXX": str(compiler), "JAXSPEC_CACHE": str(tmp_path / "cache"), **environ}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def problem_of(tmp_path, compiler, code=CODE, **environ):
    process = start(tmp_path, compiler, code, **environ)
    said, announced = process.communicate(timeout=300)
    assert process.returncode == 0, announced
    return said.strip(), announced


def kept(tmp_path):
    return sorted((tmp_path / "cache" / ".kernels").glob("*.so"))


def times_compiled(tmp_path):
    return (tmp_path / "log").read_text().count("\n")


def _compiler(commands):
    def arrange(tmp_path, monkeypatch):
        monkeypatch.setenv("CXX", str(script(tmp_path / "compiler", commands)))
        monkeypatch.setattr(build, "TIMEOUT_S", 1)

    return arrange


def _cxx(named):
    return lambda tmp_path, monkeypatch: monkeypatch.setenv("CXX", named)


def _without_compilers(tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build, "COMPILERS", ("no-compiler",))


def _link(tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "cache" / ".kernels").symlink_to(tmp_path / "elsewhere")


def _link_to_nothing(tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / ".kernels").symlink_to(tmp_path / "nothing")


def _file(tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / ".kernels").touch()


def _cache_is_a_file(tmp_path, monkeypatch):
    (tmp_path / "cache").touch()


def _shared(tmp_path, monkeypatch):
    (tmp_path / "cache" / ".kernels").mkdir(parents=True)
    (tmp_path / "cache" / ".kernels").chmod(0o777)


def _full_disk(tmp_path, monkeypatch):
    def refuse(path, *args, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(build, "only_writer", refuse)


def _no_temporary_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))


def _program_cannot_be_run(tmp_path, monkeypatch):
    (tmp_path / "rubbish").write_bytes(b"\0")
    (tmp_path / "rubbish").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "rubbish"))


COULD_NOT = "{}/../compiler could not compile kernels.cc: "


@pytest.mark.parametrize(
    ("arrange", "reason"),
    [
        (
            _compiler("echo 'x.cc:1: error: unknown option -std=c++17' >&2; exit 1"),
            COULD_NOT + "x.cc:1: error: unknown option -std=c++17...",
        ),
        (_compiler("exit 3"), COULD_NOT + "exit status 3; name another compiler with CXX"),
        (_compiler("head -c 99999 /dev/urandom >&2; exit 4"), COULD_NOT + "..."),
        (
            _compiler("exit 0"),
            "{}/../compiler wrote no library; name another compiler with CXX",
        ),
        (
            _compiler('for last; do :; done; echo rubbish > "$last"'),
            "{}/../compiler made no library that can be loaded (...",
        ),
        (
            _compiler("sleep 1000 & wait"),
            "{}/../compiler took longer than 1 s; try again when the machine is less busy...",
        ),
        (
            _cxx("/nowhere/c++"),
            "CXX is /nowhere/c++, and there is no such program; correct it, or leave it out",
        ),
        (
            _cxx("'c++"),
            'CXX is "\'c++", which is no command (No closing quotation); correct it...',
        ),
        (_without_compilers, "no C++ compiler was found (no-compiler); install one"),
        (
            _link,
            "{}/.kernels cannot be used (it is a symbolic link, and code is not loaded through "
            "one); remove the link, or {own}",
        ),
        (
            _link_to_nothing,
            "{}/.kernels cannot be used (it is a symbolic link, and code is not loaded through "
            "one); remove the link, or {own}",
        ),
        (_file, "{}/.kernels cannot be used (Not a directory); {own}"),
        (_cache_is_a_file, "{}/.kernels cannot be used (Not a directory); {own}"),
        (
            _shared,
            "other users may write to {}/.kernels, and code is not loaded from there; remove it, "
            "or {own}",
        ),
        (_full_disk, "{}/.kernels cannot be used (No space left on device); {own}"),
        (
            _no_temporary_directory,
            "no temporary directory can be made (No such file or directory); name a directory with "
            "room for one with TMPDIR",
        ),
        (
            _program_cannot_be_run,
            "{}/../rubbish cannot be run (Exec format error); name another compiler with CXX",
        ),
    ],
)
def test_every_reason_has_its_own_advice(tmp_path, monkeypatch, arrange, reason):
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))
    arrange(tmp_path, monkeypatch)
    with pytest.raises(build.BuildError) as refused:
        build.load_library()
    own = "set JAXSPEC_CACHE to a directory of your own"
    wanted = reason.format(tmp_path / "cache", own=own).replace("/cache/../", "/")
    found = str(refused.value)
    assert found.startswith(wanted[:-3]) if wanted.endswith("...") else found == wanted
    assert "\n" not in found
    assert not kept(tmp_path)
    monkeypatch.setattr(cpu, "problem", lambda: found)
    with pytest.raises(SettingError) as refused:
        registry.check_kernels("native")
    assert str(refused.value) == f"kernels='native' was given, but {found}, or choose 'xla'."


def test_they_are_compiled_once_with_the_options_of_cxx(tmp_path, library):
    compiler = copying_compiler(tmp_path, library.read_bytes())
    said, announced = problem_of(tmp_path, f"{compiler} -DSOME_OPTION")
    assert said == "None"
    assert "compiling the CPU kernels, once on this machine" in announced
    assert (tmp_path / "log").read_text().startswith("-DSOME_OPTION -std=c++17")
    said, announced = problem_of(tmp_path, f"{compiler} -DSOME_OPTION")
    assert (said, announced) == ("None", "")
    assert times_compiled(tmp_path) == 1
    assert len(kept(tmp_path)) == 1
    assert problem_of(tmp_path, compiler)[0] == "None"  # other options are another library
    assert times_compiled(tmp_path) == 2


def test_processes_that_start_together_compile_once(tmp_path, library):
    compiler = copying_compiler(tmp_path, library.read_bytes(), seconds=3)
    processes = [start(tmp_path, compiler) for _ in range(4)]
    said = [process.communicate(timeout=300)[0].strip() for process in processes]
    assert said == ["None"] * 4
    assert times_compiled(tmp_path) == 1


@pytest.mark.parametrize(
    "damage",
    [
        *("cut short", "flipped bit"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("emptied", "no such symbols")),
    ],
)
def test_a_damaged_library_is_compiled_again(tmp_path, library, damage):
    compiler = copying_compiler(tmp_path, library.read_bytes())
    assert problem_of(tmp_path, compiler)[0] == "None"
    (path,) = kept(tmp_path)
    healthy = path.read_bytes()
    if damage == "cut short":
        path.write_bytes(healthy[: len(healthy) // 3])
    elif damage == "emptied":
        path.write_bytes(b"")
    elif damage == "flipped bit":
        path.write_bytes(healthy[:5000] + bytes([healthy[5000] ^ 1]) + healthy[5001:])
    else:
        other = compiled(tmp_path, 'extern "C" int something() { return 1; }')
        path.unlink()
        path.with_name(name_of(path, other)).write_bytes(other)
    assert problem_of(tmp_path, compiler)[0] == "None"
    assert times_compiled(tmp_path) == 2
    (path,) = kept(tmp_path)
    assert path.read_bytes() == healthy


def compiled(tmp_path, source):
    (tmp_path / "other.cc").write_text(source)
    command = ["c++", "-shared", "-fPIC", str(tmp_path / "other.cc"), "-o", str(tmp_path / "o.so")]
    subprocess.run(command, check=True)
    return (tmp_path / "o.so").read_bytes()


def name_of(path, content):
    """What a library of this content is called, where `path` is one of the same key."""
    return f"{path.stem.rpartition('-')[0]}-{hashlib.sha256(content).hexdigest()}.so"


def planted(tmp_path, path):
    """Someone's library under the name that would be loaded; it leaves a trace when it is."""
    source = f"""#include <cstdio>
    __attribute__((constructor)) static void run() {{ fclose(fopen("{tmp_path}/trace", "w")); }}"""
    content = compiled(tmp_path, source)
    path.unlink()
    chosen = path.with_name(name_of(path, content))
    chosen.write_bytes(content)
    return chosen


@pytest.mark.parametrize(
    "way",
    [
        *("file", "owner", "link"),
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("directory", "owner of the directory")),
    ],
)
def test_what_others_could_have_written_is_not_loaded(tmp_path, library, way):
    if way.startswith("owner") and os.getuid() != 0:
        pytest.skip("only root can give files away")
    compiler = copying_compiler(tmp_path, library.read_bytes())
    assert problem_of(tmp_path, compiler)[0] == "None"
    (path,) = kept(tmp_path)
    directory = path.parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path = planted(tmp_path, path)
    if way == "directory":
        directory.chmod(0o777)
    elif way == "file":
        path.chmod(0o666)
    elif way == "owner":
        os.chown(path, 12345, 12345)
    elif way == "owner of the directory":
        os.chown(directory, 12345, 12345)
    else:
        directory.rename(tmp_path / "elsewhere")
        directory.symlink_to(tmp_path / "elsewhere")
    said, _ = problem_of(tmp_path, compiler)
    if way == "link":
        assert said.startswith(f"{directory} cannot be used (")
    else:
        assert said == (
            f"other users may write to {path if way in ('file', 'owner') else directory}, and code "
            "is not loaded from there; remove it, or set JAXSPEC_CACHE to a directory of your own"
        )
    assert not (tmp_path / "trace").exists()
    assert times_compiled(tmp_path) == 1


def test_the_check_above_would_see_a_planted_library_run(tmp_path, library):
    compiler = copying_compiler(tmp_path, library.read_bytes())
    assert problem_of(tmp_path, compiler)[0] == "None"
    planted(tmp_path, kept(tmp_path)[0])  # by the user: loaded, found to lack symbols, rebuilt
    assert problem_of(tmp_path, compiler)[0] == "None"
    assert (tmp_path / "trace").exists()


THREADS = """
import resource, psutil, numpy as np
from jaxspec.kernels import cpu
import test_cpu as t
x, weight, settings = t.product_inputs((48, 128, 200), ("norm",), t.jnp.float32)
weight = t.native.pack(weight)
{}
print(np.asarray(t.native.product(x, weight, **settings)).sum())
"""
LIMIT = """
resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 2**28,) * 2)
"""


def test_threads_that_cannot_start_are_done_without(tmp_path, library):
    # Each thread's stack takes 8 MiB of the address space, of which 256 are left.
    compiler = copying_compiler(tmp_path, library.read_bytes())
    environ = {"PYTHONPATH": python_path(), "JAXSPEC_NUM_THREADS": "1000"}
    limited, _ = problem_of(tmp_path, compiler, THREADS.format(LIMIT), **environ)
    environ["JAXSPEC_NUM_THREADS"] = "1"
    assert limited == problem_of(tmp_path, compiler, THREADS.format(""), **environ)[0]


FORK = """
import os
made = np.asarray(t.native.product(x, weight, **settings))
child = os.fork()
if child == 0:
    again = np.asarray(t.native.product(x, weight, **settings))
    os._exit(0 if np.array_equal(made, again) else 3)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
"""


def test_a_forked_child_works_alone(tmp_path, library):
    compiler = copying_compiler(tmp_path, library.read_bytes())
    environ = {"PYTHONPATH": python_path(), "JAXSPEC_NUM_THREADS": "3"}
    problem_of(tmp_path, compiler, THREADS.format(FORK), **environ)


# What is loaded before Python: the runtime, and the library that it must find when it starts.
SANITIZERS = {
    "undefined": (("libubsan.so",), "-fsanitize=undefined -fno-sanitize-recover=all"),
    "address": (("libasan.so", "libstdc++.so.6"), "-fsanitize=address"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SANITIZERS)
def test_under_a_sanitizer(tmp_path, name):
    runtimes, options = SANITIZERS[name]
    preloaded = []
    for runtime in runtimes:
        asked = ["c++", f"-print-file-name={runtime}"]
        found = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
        if not os.path.isabs(found):
            pytest.skip(f"this compiler has no {runtime}")
        preloaded.append(found)
    here = pathlib.Path(__file__).with_name("test_cpu.py")
    environ = {
        "CXX": f"c++ -g {options}",
        "JAXSPEC_CACHE": str(tmp_path),
        "JAXSPEC_NUM_THREADS": "3",
        "LD_PRELOAD": " ".join(preloaded),
        "ASAN_OPTIONS": "detect_leaks=0",
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", str(here)],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " skipped" not in done.stdout
    assert len(list((tmp_path / ".kernels").glob("*.so"))) == 1


def test_a_command_that_loads_no_model_compiles_nothing(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "jaxspec", "cache", "list", "--json"],
        env={**os.environ, "JAXSPEC_CACHE": str(tmp_path)},
        capture_output=True,
        check=True,
    )
    assert not (tmp_path / ".kernels").exists()


PRODUCTS = """
#include "product.h"

namespace jaxspec {
template void Product<float, float>(const float*, const float*, float, bool, const float*,
                                    const float*, float*, int64_t, int64_t, int64_t, int64_t);
template void Product<uint16_t, uint16_t>(const uint16_t*, const uint16_t*, float, bool,
                                          const uint16_t*, const uint16_t*, uint16_t*, int64_t,
                                          int64_t, int64_t, int64_t);
}  // namespace jaxspec
"""
PROCESSORS = ("haswell", "znver3", "skylake-avx512", "icelake-server", "sapphirerapids")
PRODUCT = re.compile(r"\tv(fmadd|dpbf16)")
STORE = re.compile(r"\tvmov\w+\t%[yz]mm\d+, .*\(")


def count(pattern, lines):
    return sum(pattern.match(line) is not None for line in lines)


def loops_of_tiles(assembly):
    """Of each function of a product's tile, its loop with the most products, as lines."""
    found, function, lines, start, loops = {}, "", [], {}, []
    for line in [*assembly.splitlines(), "end:"]:
        if (label := re.match(r"(\w+):", line)) is not None:
            if "4TileI" in function:
                found[function] = max(loops, key=lambda loop: count(PRODUCT, loop))
            function, lines, start, loops = label[1], [], {}, []
        lines.append(line)
        if (label := re.match(r"(\.L\w+):", line)) is not None:
            start[label[1]] = len(lines)
        jump = re.match(r"\tj\w+\t(\.L\w+)", line)
        if jump is not None and jump[1] in start:
            loops.append(lines[start[jump[1]] :])
    return found


@pytest.mark.parametrize("processor", PROCESSORS)
def test_the_sums_of_a_product_stay_in_registers(tmp_path, processor):
    """A compiler that does not unroll the loops over them stores all of them after every input, and
    a product takes four times as long."""
    if platform.machine() != "x86_64":
        pytest.skip("this reads the assembly of x86-64")
    source, made = tmp_path / "products.cc", tmp_path / "products.s"
    source.write_text(PRODUCTS)
    options = [option for option in OPTIONS if option not in ("-march=native", "-shared")]
    options += [f"-march={processor}", f"-I{SOURCE.parent}", "-S", "-o", str(made)]
    done = subprocess.run(
        ["c++", *options, str(source)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"this compiler does not know {processor}")
    tiles = loops_of_tiles(made.read_text())
    assert len(tiles) >= 8
    for name, loop in tiles.items():
        num_products = count(PRODUCT, loop)
        assert num_products > 0, name
        assert count(STORE, loop) < num_products / 4, name


@pytest.mark.parametrize(
    ("vendor", "flags", "options"),
    [
        ("GenuineIntel", "avx512_bf16", ("-mno-avx512bf16",)),
        ("GenuineIntel", "avx512_bf16 amx_tile amx_bf16", ()),
        ("GenuineIntel", "", ()),
        ("AuthenticAMD", "avx512_bf16", ()),
    ],
)
def test_pairs_of_bf16_are_taken_apart_where_that_is_faster(monkeypatch, vendor, flags, options):
    lines = f"flags\t\t: fpu avx512f {flags}\nvendor_id\t: {vendor}"
    monkeypatch.setattr(build, "_cpu", lambda: lines)
    assert build.processor_options() == options


# Options that leave a processor's newer instructions out, and the family that is left on x86.
FAMILIES = {
    "AVX512-BF16": "-mno-amx-tile -mno-amx-bf16 -mno-amx-int8",
    "AVX512": "-mno-amx-tile -mno-amx-bf16 -mno-amx-int8 -mno-avx512bf16",
    "AVX2": "-march=haswell",
    "generic": "-march=x86-64",
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_of_instructions(tmp_path, family):
    """All tests of the kernels, on each that this machine can run."""
    if platform.machine() != "x86_64":
        pytest.skip("these are options for x86-64")
    # What this processor is compiled for otherwise must not undo an option.
    compiler = script(
        tmp_path / "c++",
        "for word; do shift; case $word in -mno-avx512bf16) ;; "
        f'-march=native) set -- "$@" -march=native {FAMILIES[family]} ;; '
        '*) set -- "$@" "$word" ;; esac; done; exec g++ "$@"',
    )
    environ = {
        **os.environ,
        "CXX": str(compiler),
        "JAXSPEC_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": python_path(),
    }
    code = "from jaxspec.kernels import cpu; print(cpu.problem(), cpu.family())"
    found = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    problem, family_found = found.stdout.split(maxsplit=1)
    expected = {family, "AVX512"} if family == "AVX512-BF16" else {family}
    assert problem == "None"
    assert family_found.strip() in expected
    tests = [str(pathlib.Path(__file__).with_name("test_cpu.py")), "-m", "", "-n", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
