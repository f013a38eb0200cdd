"""Fresh environments in which the built wheels are installed by the names that users type."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from tests.test_repository import ROOT

WHEELS = sorted((ROOT / "dist").glob("*.whl"))


def constraints(folder: Path) -> Path:
    """The repository's pins, and for our own names the wheels."""
    path = folder / "constraints.txt"
    ours = [f"{parse_wheel_filename(wheel.name)[0]} @ {wheel.as_uri()}\n" for wheel in WHEELS]
    path.write_text((ROOT / "constraints.txt").read_text(encoding="utf-8") + "".join(ours))
    return path


def torch_alone(folder: Path) -> Path:
    """Links to the torch of these tests and to what torch itself requires, and to nothing else.

    Hundreds of megabytes need not be installed for every environment, and no dependency of ours can
    be missed: rag-windows requires torch, so all of it is there anyway.
    """
    folder.mkdir()
    for name in sorted(_required("torch", set(), set())):
        found = metadata.distribution(name)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            link = folder / top
            if not link.exists():
                link.symlink_to(Path(str(found.locate_file(top))))
    return folder


def _required(name: str, extras: set[str], seen: set[str]) -> set[str]:
    """A distribution and all that it requires."""
    seen.add(canonicalize_name(name))
    for requirement in map(Requirement, metadata.requires(name) or ()):
        marker = requirement.marker
        wanted = marker is None or any(marker.evaluate({"extra": one}) for one in {"", *extras})
        if wanted and (canonicalize_name(requirement.name) not in seen or requirement.extras):
            _required(requirement.name, requirement.extras, seen)
    return seen


class Environment:
    """A virtual environment with torch and nothing else, and a working folder of its own."""

    def __init__(self, folder: Path, torch: Path, pins: Path) -> None:
        """Make it in an empty folder."""
        self.folder, self._pins = folder / "work", pins
        self.folder.mkdir(parents=True)
        builder = venv.EnvBuilder(symlinks=True)
        builder.create(folder / "env")
        context = builder.ensure_directories(folder / "env")
        self.bin, self.executable = Path(context.bin_path), context.env_exe
        (site,) = (folder / "env").glob("lib/python*/site-packages")
        (site / "torch.pth").write_text(f"{torch}\n")

    def install(self, *requirements: str) -> None:
        """As a user does it; the names of our own distributions mean the built wheels."""
        self.run_pip(shlex.join(["pip", "install", *requirements]))

    def run_pip(self, command: str, folder: Path | None = None) -> None:
        """Run a command "pip install ..." in a folder, here by default."""
        program, verb, *requirements = shlex.split(command)
        assert (program, verb) == ("pip", "install")
        pip = [sys.executable, "-m", "pip", "--python", self.executable, "install", "--quiet"]
        done = self._run(*pip, "-c", str(self._pins), *requirements, folder=folder)
        assert done.returncode == 0, f"{command}\n{done.stderr}"

    def installed(self) -> set[str]:
        """The names of what is installed."""
        names = self.python(
            "from importlib.metadata import distributions\n"
            "for distribution in distributions(): print(distribution.name)"
        )
        return set(map(canonicalize_name, names.split()))

    def python(self, code: str) -> str:
        """Run code and return what it prints."""
        done = self._run(self.executable, "-c", code)
        assert done.returncode == 0, f"{code}\n{done.stderr}"
        return done.stdout

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `rag-windows`."""
        return self._run(str(self.bin / "rag-windows"), *arguments)

    def _run(self, *command: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        variables = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}
        here = {"HF_HUB_OFFLINE": "1", "RAG_WINDOWS_CACHE_DIR": str(self.folder / "windows")}
        return subprocess.run(
            command,
            cwd=folder or self.folder,
            env={**variables, **here},
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )


def members(archive: Path) -> Iterator[str]:
    """Names of the files in a wheel or an sdist, those of the latter without its folder."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            yield from wheel.namelist()
    else:
        with tarfile.open(archive) as sdist:
            yield from (name.partition("/")[2] for name in sdist.getnames())
