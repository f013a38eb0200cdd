"""Compiling the kernel: what stands in the way of it never stands in the way of an answer."""

from __future__ import annotations

import logging
import shlex
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rag_windows.attention.backends import Request, cpu
from rag_windows.attention.native import building
from rag_windows.attention.native import kernel as native
from rag_windows.attention.native.building import Kernel, kernel
from rag_windows.attention.native.kernel import Items, call
from rag_windows.attention.segments import Queries, Rows, Segment, Segments

from .asking import NEEDS_COMPILER, SMALL, draw, exact, reading, segment

KIND = SMALL[0]


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Nothing is compiled yet, and no compiler is named; where temporary files are made."""
    monkeypatch.setattr(building, "_built", {})
    monkeypatch.setattr(native, "_agrees", native._agrees.__wrapped__)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv(building.VARIABLE, raising=False)
    made = tmp_path / "temporary files"
    made.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(made))
    return made


def named(folder: Path, code: str, *arguments: str) -> str:
    """A command line, as in CC, of a compiler that does this."""
    script = folder / "our compiler.py"
    script.write_text(code, encoding="utf-8")
    return shlex.join([sys.executable, "-S", str(script), *arguments])


def long_request() -> Request:
    keys = native.LEAST_KEYS + 3
    return Request(
        draw(torch.float32, 1, 4, 2, 16),
        draw(torch.float32, 1, 2, keys, 16, seed=1),
        draw(torch.float32, 1, 2, keys, 16, seed=2),
        0.25,
    )


def answered_by_pytorch() -> bool:
    request = long_request()
    assert not native.available(*KIND)
    whole = Segments("context", [Segment(0, 0, layers={0: [(request.key, request.value)]})], 2)
    query, rows = request.query[0].transpose(0, 1), Rows.at(torch.zeros(2, dtype=torch.int64))
    answers = whole.attend(Queries(0, query, rows, request.scale, None, None))
    expected = [part[0].transpose(0, 1) for part in cpu.attend(request)]
    return all(map(torch.equal, answers, expected))


BROKEN: dict[str, str] = {
    "a compiler that refuses": "import sys; sys.exit('no such processor')",
    "a compiler with odd letters": (
        "import sys; sys.stderr.buffer.write(b'\\xff\\xfe'); sys.exit(1)"
    ),
    "a compiler that makes nothing": "",
    "a compiler that makes rubbish": (
        "import sys; open(sys.argv[sys.argv.index('-o') + 1], 'w').write('rubbish')"
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_compiler_that_fails(
    how: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(building, "_openmp", lambda: "libgomp.so")
    monkeypatch.setenv("CC", named(tmp_path, BROKEN[how]))
    said_once(caplog, "left out")
    if how == "a compiler that refuses":
        assert "no such processor" in caplog.text
    assert list(folder.iterdir()) == []


def said_once(caplog: pytest.LogCaptureFixture, what: str) -> None:
    """PyTorch answers, however often it is asked, and the log has the reason once."""
    with caplog.at_level(logging.INFO, logger=building.__name__):
        assert all(kernel(*KIND) is None for _ in range(3))
        assert answered_by_pytorch()
    records = [record for record in caplog.records if record.name == building.__name__]
    assert [record.levelno for record in records] == [logging.INFO]
    assert what in records[0].getMessage()


def test_a_compiler_that_hangs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(building, "_openmp", lambda: "libgomp.so")
    monkeypatch.setenv("CC", named(tmp_path, "import time; time.sleep(100)"))
    monkeypatch.setattr(building, "_SECONDS", 0.3)
    begun = time.monotonic()
    said_once(caplog, "timed out")
    assert time.monotonic() - begun < 50
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("command", ["/no/such/compiler", "cc 'unclosed"])
def test_a_command_that_is_none(
    command: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(building, "_openmp", lambda: "libgomp.so")
    monkeypatch.setenv("CC", command)
    said_once(caplog, "left out")


def test_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert building._compiler() is None
    said_once(caplog, "no C compiler")


def test_without_openmp(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(building, "_openmp", lambda: None)
    said_once(caplog, "no OpenMP")


MAPS = """\
55d0-55d1 r--p 00000000 08:01 1  /usr/bin/python3
7f00-7f01 r-xp 00000000 08:01 2  /usr/lib/libgomp.so.1.0.0
7f02-7f03 r--p 00000000 08:01 3  /home/a user/torch/lib/libgomp-a34b.so.1
7f02-7f03 r-xp 00000000 08:01 3  /home/a user/torch/lib/libgomp-a34b.so.1
7f04-7f05 r-xp 00000000 08:01 4  /usr/lib/libompare.so
7f06-7f07 rw-p 00000000 00:00 0  [heap]
"""


@pytest.mark.parametrize(
    ("maps", "expected"),
    [
        (MAPS, "/home/a user/torch/lib/libgomp-a34b.so.1"),
        (MAPS.replace("torch", "other"), "/home/a user/other/lib/libgomp-a34b.so.1"),
        (MAPS.replace("libgomp", "libiomp5"), "/home/a user/torch/lib/libiomp5-a34b.so.1"),
        (MAPS.replace("libgomp", "libm"), None),
        ("", None),
        (None, None),
    ],
)
def test_which_openmp(
    maps: str | None, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's own where several are loaded; a whole path, whatever stands in it."""
    path = tmp_path / "maps"
    if maps is not None:
        path.write_text(maps, encoding="utf-8")
    monkeypatch.setattr(building, "_MAPS", path)
    assert building._openmp() == expected


def test_two_that_ask_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Kernel] = []

    def slow(*_: object) -> Kernel:
        time.sleep(0.1)
        made.append(Kernel(lambda *_: None, False))
        return made[-1]

    monkeypatch.setattr(building, "_compiled", slow)
    gate = threading.Barrier(8)

    def ask(_: int) -> Kernel | None:
        gate.wait(timeout=30)
        return kernel(*KIND)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    assert len(made) == 1
    assert all(answer is made[0] for answer in answers)
    assert kernel(torch.bfloat16, 16, 16) is not made[0]


# Each call of the compiler goes on to the real one; the last argument is the file of what it saw.
PASSED_ON = """
import os, subprocess, sys
*real, seen = sys.argv[1].split("|")
made = sys.argv[sys.argv.index("-o") + 1]
with open(seen, "a") as file:
    print(oct(os.stat(os.path.dirname(made)).st_mode & 0o777), made, file=file)
sys.exit(subprocess.call([*real, *sys.argv[2:]]))
"""


@NEEDS_COMPILER
def test_a_named_compiler_with_arguments(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It works in a folder that nobody else may enter, and that is gone before the kernel runs."""
    seen = tmp_path / "seen"
    real = building._compiler()
    assert real is not None
    monkeypatch.setenv("CC", named(tmp_path, PASSED_ON, "|".join([*real, str(seen)])))
    assert kernel(*KIND) is not None
    assert kernel(*KIND) is not None
    lines = seen.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"0o700 {folder}/") for line in lines)
    assert list(folder.iterdir()) == []
    query, one = draw(torch.float32, 2, 4, 16), reading([segment(KIND, 2, 500)], [1, 0])
    lse = call(Items([one]), query)[1]
    torch.testing.assert_close(lse.double(), exact([one], query)[1], atol=1e-5, rtol=0)
    assert native.available(*KIND)


@NEEDS_COMPILER
def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it is built already; other values leave it on."""
    monkeypatch.setenv(building.VARIABLE, "1")
    assert native.available(*KIND)
    monkeypatch.setenv(building.VARIABLE, "0")
    assert kernel(*KIND) is None
    assert answered_by_pytorch()


@NEEDS_COMPILER
@pytest.mark.parametrize("text", ["int nothing;", "this is no C"])
def test_a_source_without_the_kernel(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "other.c"
    source.write_text(text, encoding="utf-8")
    monkeypatch.setattr(building, "_SOURCE", source)
    said_once(caplog, "left out")


@NEEDS_COMPILER
def test_sizes_that_the_source_refuses() -> None:
    assert kernel(torch.float32, 24, 16) is None
    assert kernel(torch.float32, 16, 0) is None
