"""Writes into a distribution the commit that it is built from; all else is in pyproject.toml."""

import pathlib
import subprocess

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = pathlib.Path(__file__).resolve().parent


def write_commit(directory: str) -> None:
    """Writes `jaxspec/_commit.txt` under a directory, if this is a checkout: what
    `jaxspec.runtime.environment.commit` reads where there is none."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run([*command, "--dirty=+"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return
    if (ROOT / ".git").exists():  # not only some directory above it
        pathlib.Path(directory, "jaxspec", "_commit.txt").write_text(done.stdout)


class BuildPy(build_py):
    """With the commit in the wheel."""

    def run(self):
        """Builds, then writes."""
        super().run()
        if not self.editable_mode:
            write_commit(self.build_lib)


class Sdist(sdist):
    """With the commit in the source distribution, for wheels that are built from it."""

    def make_release_tree(self, base_dir, files):
        """Copies the files, then writes."""
        super().make_release_tree(base_dir, files)
        write_commit(base_dir)


setup(cmdclass={"build_py": BuildPy, "sdist": Sdist})
