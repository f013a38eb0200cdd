"""Who compiles a kernel, who waits for it, and what a forked child has of it."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rag_windows.attention.native import build
from rag_windows.attention.native import kernel as native

# Passes each call on to the real compiler; bfloat16 waits for a file, and what is compiled is
# written down.
COMPILER = """
import os, pathlib, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
real, given = sys.argv[2].split("|"), sys.argv[3:]
if "-c" in given:
    with open(folder / "compiled", "a") as file:
        print(next(one for one in given if one.startswith("-DELEMENT")), file=file)
    while "-DELEMENT=1" in given and not (folder / "go").exists():
        time.sleep(0.01)
sys.exit(subprocess.call([*real, *given]))
"""
SLOW, QUICK = (torch.bfloat16, 16, 16), (torch.float32, 16, 16)


def compiled(folder: Path) -> Counter[str]:
    """How often each dtype was compiled."""
    seen = folder / "compiled"
    return Counter(seen.read_text(encoding="utf-8").split() if seen.exists() else [])


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture
def compiler(
    anew: Path, real_compiler: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Path:
    """Nothing is compiled yet, and the compiler is `COMPILER`; the folder that it looks at."""
    script = tmp_path / "compiler.py"
    script.write_text(COMPILER, encoding="utf-8")
    command = [sys.executable, "-S", str(script), str(tmp_path), "|".join(real_compiler)]
    monkeypatch.setenv("CC", shlex.join(command))
    return tmp_path


@pytest.mark.slow
def test_a_slow_compilation_is_waited_for_by_those_who_need_it(compiler: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        slow = [pool.submit(native.kernel, *SLOW) for _ in range(3)]
        until(lambda: bool(compiled(compiler)))
        try:
            assert native.kernel(*QUICK) is not None
            assert native.kernel(*QUICK) is native.kernel(*QUICK)
            assert not any(one.done() for one in slow)
        finally:
            (compiler / "go").touch()
        first, *others = (one.result() for one in slow)
    assert first is not None
    assert all(other is first for other in others)
    assert compiled(compiler) == {"-DELEMENT=0": 1, "-DELEMENT=1": 1}


@pytest.mark.slow
def test_many_threads_compile_each_kernel_once(compiler: Path) -> None:
    (compiler / "go").touch()
    asked = [(dtype, 16, 16) for dtype in build.ELEMENTS] * 8
    together = threading.Barrier(len(asked))

    def ask(one: tuple[torch.dtype, int, int]) -> native.Kernel | None:
        together.wait()
        return native.kernel(*one)

    with ThreadPoolExecutor(len(asked)) as pool:
        made = list(pool.map(ask, asked))
    assert None not in made
    assert len(set(map(id, made))) == 3
    assert compiled(compiler) == {"-DELEMENT=0": 1, "-DELEMENT=1": 1, "-DELEMENT=2": 1}


def test_a_failure_is_remembered_but_an_interruption_is_not() -> None:
    asked: list[str] = []

    def make(key: str) -> None:
        asked.append(key)
        if len(asked) == 1:
            raise KeyboardInterrupt

    flight = build.SingleFlight(make)
    with pytest.raises(KeyboardInterrupt):
        flight("one")
    assert [flight("one") for _ in range(3)] == [None] * 3
    assert asked == ["one", "one"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system that forks")
def test_a_forked_child_has_what_was_made_and_makes_the_rest() -> None:
    begun, go = threading.Event(), threading.Event()
    parent, made = os.getpid(), []

    def make(key: str) -> str:
        made.append(key)
        if key == "slow" and os.getpid() == parent:
            begun.set()
            assert go.wait(60)
        return f"{key} made"

    flight = build.SingleFlight(make)
    assert flight("ready") == "ready made"
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(flight, "slow")
        try:
            assert begun.wait(60)
            if (child := os.fork()) == 0:
                right = False
                try:
                    signal.alarm(30)
                    right = (flight("ready"), flight("slow")) == ("ready made", "slow made")
                    right = right and made == ["ready", "slow", "slow"]
                finally:
                    os._exit(0 if right else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        finally:
            go.set()
        assert slow.result() == "slow made"
    assert made == ["ready", "slow"]


def again(monkeypatch: pytest.MonkeyPatch) -> native.Kernel | None:
    """The kernel as a new process would get it."""
    monkeypatch.setattr(native, "_kernels", build.SingleFlight(native._checked))
    return native.kernel(*QUICK)


def stored(compiler: Path) -> list[Path]:
    return sorted((compiler / "cache" / "kernels").glob("*"))


@pytest.mark.slow
def test_a_later_process_loads_what_an_earlier_one_compiled(
    compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert native.kernel(*QUICK) is not None
    (made,) = stored(compiler)
    assert made.parent.stat().st_mode & 0o777 == 0o700
    assert again(monkeypatch) is not None
    assert compiled(compiler) == {"-DELEMENT=0": 1}
    # Another compiler may make other code.
    monkeypatch.setenv("CC", os.environ["CC"] + " -pipe")
    assert again(monkeypatch) is not None
    assert compiled(compiler) == {"-DELEMENT=0": 2}
    assert len(stored(compiler)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("how", ["torn", "empty", "changed", "a link", "open to others", "open"])
def test_what_may_not_be_its_own_is_compiled_again(
    how: str, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert native.kernel(*QUICK) is not None
    (made,) = stored(compiler)
    whole = made.read_bytes()
    if how == "torn":
        made.write_bytes(whole[: len(whole) // 2])
    elif how == "empty":
        made.write_bytes(b"")
    elif how == "changed":
        made.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    elif how == "a link":
        (compiler / "elsewhere").write_bytes(whole)
        made.unlink()
        made.symlink_to(compiler / "elsewhere")
    elif how == "open to others":
        made.chmod(0o666)
    else:
        made.parent.chmod(0o777)
    assert again(monkeypatch) is not None
    assert compiled(compiler) == {"-DELEMENT=0": 2}


@pytest.mark.slow
def test_where_nothing_can_be_stored_each_process_compiles(
    compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (compiler / "cache").write_text("a file", encoding="utf-8")
    assert native.kernel(*QUICK) is not None
    assert again(monkeypatch) is not None
    assert compiled(compiler) == {"-DELEMENT=0": 2}


@pytest.mark.slow
def test_what_nobody_loads_any_more_goes(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.kernel(*QUICK) is not None
    (old,) = stored(compiler)
    os.utime(old, (0, 0))
    monkeypatch.setenv("CC", os.environ["CC"] + " -pipe")
    assert again(monkeypatch) is not None
    (left,) = stored(compiler)
    assert left != old
