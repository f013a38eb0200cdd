"""What a first hour with a GPU should tell, in stages: `make gpu`, and `make gpu-report`.

    python -m benchmarks.gpu run [STAGE ...] [--fresh] [--out runs/gpu]
    python -m benchmarks.gpu report [--out runs/gpu]
    python -m benchmarks.gpu wheels [--out build/gpu-wheels] [--python 3.12]

Each stage is a process of its own, ends at a deadline and writes <stage>.json, in which stands what
it measured so far, and <stage>.log. One that has finished is left out the next time, unless sources
or commit are others. Without a CUDA device `run` says what each stage would do.
"""

# Nothing but the standard library up here: this runs where neither torch nor the package is.
from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parent.parent
PARTS = [str(ROOT / name) for name in (".", "retrievers", "integrations/eval")]
"""Where what is imported stands in a checkout of which nothing is installed."""
sys.path += [part for part in PARTS if part not in sys.path]
DEADLINE_S = 480.0
STAGES = {
    "table": (7, "what matters most: attention beside float64; the 8B shape over 8,192, 32,768 and "
              "131,072 tokens, citations on and off; 32 questions together; rows"),
    "environment": (1, "versions, driver, and rates of memory, matrix products and launches"),
    "tests": (3, "the tests that are marked gpu"),
    "parity": (3, "attention over segments beside float64: head sizes 64, 128, 256; 1, 4, 8 heads "
               "a kv head; windows of 1 to 4,096 tokens; fp16 and bf16"),
    "memory": (4, "peak memory of plain transformers and of windows over 32,768 and 131,072"),
    "profile": (2, "one decoded token over 32,768 tokens: kernels, launches, copies, gaps"),
}  # fmt: skip
"""By name, about how many minutes it takes on an H200 (guessed, not measured), and what it does."""

COMMAND = [sys.executable, "-m", "benchmarks.gpu_stages"]
"""Runs the stage of a record."""

Record = dict[str, Any]
"""What <stage>.json holds.

- stage, date, seconds, commit, sources (a digest), stand_in
- status: "finished", "failed", "unfinished" (stopped, at the deadline for one) or "not run"
- error: why it is not finished
- device, driver, versions
- bounded: what was measured less often or shorter than elsewhere
- results: what was measured, by name
"""


def write(path: Path, record: Record) -> None:
    """Replace the file at once: who reads it finds the old record or the new one whole."""
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, path)


def read(path: Path) -> Record | None:
    """The record of a stage; None where there is none, or no whole one."""
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict) and found.get("stage") == path.stem:
            return found
    return None


def sources() -> dict[str, str | None]:
    """The commit, where git tells it, and a digest of the sources, which may differ from it."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    commit = None
    with suppress(OSError, subprocess.CalledProcessError):
        # A copy without history that lies inside of another repository has none either.
        own = {**os.environ, "GIT_CEILING_DIRECTORIES": str(ROOT.parent)}
        done = subprocess.run(git, check=True, capture_output=True, text=True, env=own)  # noqa: S603 - fixed words
        commit = done.stdout.strip()
    digest = hashlib.sha256()
    for path in sorted(ROOT.glob("*/**/*.*")):
        folder = path.relative_to(ROOT).parts[0]
        if folder in ("rag_windows", "benchmarks", "tests") and path.suffix in (".py", ".c", ".h"):
            digest.update(path.read_bytes())
    return {"commit": commit, "sources": digest.hexdigest()[:12]}


def no_gpu() -> str | None:
    """Why there is no CUDA device for this interpreter; None where there is one."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return f"{sys.executable} has no torch; name one with a CUDA build of it by PYTHON_GPU=."
    if torch.cuda.is_available():
        return None
    return f"torch {torch.__version__} of {sys.executable} sees no CUDA device."


def lacking() -> str | None:
    """One line with the pip command for what the package needs and does not find; else None."""
    try:
        importlib.import_module("benchmarks.gpu_stages")
    except ImportError as error:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        absent = []
        for line in project["dependencies"]:
            try:
                importlib.metadata.version(re.split(r"[^\w.-]", line)[0])
            except importlib.metadata.PackageNotFoundError:
                absent.append(f"'{line}'")
        wanted = " ".join(absent) or f"--upgrade {(error.name or 'transformers').split('.')[0]}"
        return f"{error}; nothing was installed. Do: {sys.executable} -m pip install {wanted}"
    return None


WHEELS = ("rag-windows", "typer")
"""Of which `wheels` are what the stages import, with all that they need but torch."""


def wheels(folder: Path, python: str) -> int:
    """Download what a machine needs that has torch and no network; the exit code is pip's.

    Versions are those of this environment; ``python`` is the other machine's, such as "3.12".
    """
    requirement = importlib.import_module("packaging.requirements").Requirement
    needed: dict[str, str] = {}
    waiting = [*WHEELS]
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in needed or name == "torch":
            continue
        found = importlib.metadata.distribution(name)
        needed[name] = found.version
        for one in map(requirement, found.requires or ()):
            if one.marker is None or one.marker.evaluate({"extra": ""}):
                waiting.append(one.name)
    del needed["rag-windows"]
    lines = [f"{name}=={version}" for name, version in sorted(needed.items())]
    print("\n".join(lines))
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    only = ["--only-binary=:all:", f"--python-version={python}", f"--dest={folder}"]
    code = subprocess.run([*pip, *only, *lines], check=False).returncode  # noqa: S603 - fixed words
    size = sum(path.stat().st_size for path in folder.glob("*.whl"))
    print(f"{len(lines)} wheels, {size / 2**20:.0f} MiB, in {folder}. There, without a network:")
    print(f"  python3 -m pip install --no-index --no-deps --target site {folder}/*.whl")
    print("  PYTHONPATH=site:. python3 -m benchmarks.gpu run table")
    return code


def run(
    asked: Sequence[str],
    out: Path,
    *,
    fresh: bool = False,
    stand_in: bool = False,
    deadline: float = DEADLINE_S,
) -> int:
    """Run stages one after the other; the exit code: 0 where all have finished."""
    if not stand_in and (reason := no_gpu()) is not None:
        print(f"Nothing was measured: {reason}")
        print(
            f"With a GPU, each stage would run in a process of its own, {deadline:.0f} s at most:"
        )
        for name in asked:
            minutes, does = STAGES[name]
            print(f"- {name} (about {minutes} min): {does}.")
        return 0
    if (reason := lacking()) is not None:
        print(reason, file=sys.stderr)
        return 2
    same = {**sources(), "stand_in": stand_in}
    statuses = []
    for name in asked:
        path = out / f"{name}.json"
        known = read(path) or {}
        if known.get("status") == "finished" and not fresh and same.items() <= known.items():
            print(f"{name}: finished at {known['date']}; --fresh (FRESH=1) runs it again.")
            statuses.append("finished")
            continue
        print(f"{name}: at most {deadline:.0f} s; {path.with_suffix('.log')}", flush=True)
        record = run_apart(path, same, deadline)
        reason = f": {record['error']}" if record["error"] else ""
        print(f"{name}: {record['status']} after {record['seconds']:.0f} s{reason}", flush=True)
        statuses.append(record["status"])
    return 0 if set(statuses) == {"finished"} else 1


def begin(path: Path, same: Record) -> Record:
    """Write the record of a stage that starts now: "unfinished" until it says otherwise."""
    record: Record = {
        **{"stage": path.stem, "status": "unfinished", "error": "it was stopped from outside."},
        **{"date": datetime.now(UTC).isoformat(timespec="seconds"), "seconds": None, **same},
        **{"device": None, "driver": None, "versions": {}, "bounded": [], "results": {}},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, record)
    return record


def run_apart(path: Path, same: Record, deadline: float) -> Record:
    """Run a stage in a process of its own until its end or the deadline; its record."""
    record = begin(path, same)
    log, begun = path.with_suffix(".log"), time.monotonic()
    # What a stage leaves behind when it is stopped, windows on disk above all, lies in this folder.
    with tempfile.TemporaryDirectory(prefix="rag-windows-gpu-") as scratch, log.open("w") as stream:
        quiet = dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "PYTHONUNBUFFERED"), "1")
        path_ = os.pathsep.join([*PARTS, os.environ.get("PYTHONPATH", "")])
        folders = {"TMPDIR": scratch, "RAG_WINDOWS_CACHE_DIR": scratch, "PYTHONPATH": path_}
        process = subprocess.Popen(  # noqa: S603 - this program itself
            [*COMMAND, str(path)],
            cwd=ROOT,
            env={**os.environ, **quiet, **folders},
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        try:
            with log.open(encoding="utf-8", errors="replace") as written:
                while code is None and time.monotonic() - begun < deadline:
                    with suppress(subprocess.TimeoutExpired):
                        code = process.wait(timeout=0.2)
                    _show(written)
        finally:
            _end(process)
    record = read(path) or record
    record["seconds"] = round(time.monotonic() - begun, 1)
    if code is None and record["status"] == "unfinished":
        record["error"] = f"it was stopped at its deadline of {deadline:.0f} s."
    elif code:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "")
        record.update(status="failed", error=f"exit code {code}: {said[:500]}")
    write(path, record)
    return record


def _show(written: TextIO) -> None:
    """Print the lines of tables that were added to a log."""
    while line := written.readline():
        if not line.endswith("\n"):
            written.seek(written.tell() - len(line.encode()))
            return
        if line.startswith("|"):
            print(line, end="", flush=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started: politely, then for certain."""
    for number, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=patience)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code is that of the process."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=(__doc__ or "")[:77])
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run", help="run stages, or say what they would do")
    runner.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(STAGES)}")
    runner.add_argument("--fresh", action="store_true", help="finished stages, too")
    runner.add_argument("--deadline", type=float, default=DEADLINE_S, help="seconds of a stage")
    runner.add_argument(
        "--stand-in",
        action="store_true",
        help="tiny sizes on the CPU: tries the stages; no report takes what they write",
    )
    reporter = commands.add_parser("report", help="write the tables into the documents")
    for one in (runner, reporter):
        one.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu", help="records")
    carried = commands.add_parser("wheels", help="download what a machine needs that has torch")
    carried.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-wheels", help="folder")
    carried.add_argument("--python", default=".".join(map(str, sys.version_info[:2])))
    given = parser.parse_args(arguments)
    if given.command == "wheels":
        return wheels(given.out, given.python)
    if given.command == "report":
        from benchmarks.gpu_report import write_report

        return write_report(given.out, ROOT)
    if unknown := [name for name in given.stages if name not in STAGES]:
        parser.error(f"there is no stage {unknown[0]!r}; choose among {', '.join(STAGES)}")
    options = {"fresh": given.fresh, "stand_in": given.stand_in, "deadline": given.deadline}
    return run(given.stages or list(STAGES), given.out, **options)


if __name__ == "__main__":
    # A program that ends this one, such as `timeout`, ends the stage under way with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
