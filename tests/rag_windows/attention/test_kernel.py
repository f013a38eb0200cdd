"""The compiled kernel: its numbers, what it refuses, when it serves, what stands in its way."""

from __future__ import annotations

import ctypes
import logging
import mmap
import platform
import shlex
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rag_windows import RagWindowsError
from rag_windows.attention import backends, segments
from rag_windows.attention.native import build, linear
from rag_windows.attention.native import kernel as native

from . import asked, stand_in
from .asked import Pair, exact

Kind = tuple[torch.dtype, int, int]
"""Dtype, head dim and value dim: each is compiled once a process."""

SMALL: tuple[Kind, ...] = tuple(
    (dtype, 16, 16) for dtype in (torch.float32, torch.bfloat16, torch.float16)
)
# Sizes of several vectors, with and without a remainder, and beyond 128, where tiles are smaller.
KINDS: tuple[Kind, ...] = (
    *SMALL,
    (torch.float32, 48, 80),
    (torch.bfloat16, 144, 80),
    (torch.float16, 32, 64),
)
# Rounding to the dtype; many rows in bf16 have weights in bf16, too. The lse is float32.
OUTPUT_TOLERANCE = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 1.2e-2}
LSE_TOLERANCE = 1e-5
# Where there are many rows, keys and values of 8 bits are rounded to bf16.
PACKED_TOLERANCE = {torch.float32: 5e-5, torch.float16: 1e-3, torch.bfloat16: 3e-2}
PACKED_LSE_TOLERANCE = {torch.float32: 5e-5, torch.float16: 5e-5, torch.bfloat16: 2e-2}

Layout = Literal["dense", "tokens first", "within others"]
LAYOUTS: tuple[Layout, ...] = ("dense", "tokens first", "within others")

EACH = pytest.mark.parametrize("kind", SMALL, ids=str)
# As few, and as many.
ROWS = pytest.mark.parametrize("rows", [3, 40])


@pytest.fixture(autouse=True)
def compiled(request: pytest.FixtureRequest) -> Iterator[None]:
    """There is a kernel, but where a test is of its building; threads are as many as before."""
    if "anew" not in request.fixturenames and native.kernel(*SMALL[0]) is None:
        pytest.skip("needs a C compiler, and PyTorch with OpenMP")
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def draw(dtype: torch.dtype, *size: int, seed: int = 0) -> Tensor:
    """Normal numbers, the same whatever was drawn before."""
    generator = torch.Generator().manual_seed(seed + sum(size))
    return torch.randn(*size, generator=generator).to(dtype)


def pair(kind: Kind, heads: int, keys: int, seed: int = 0) -> Pair:
    """Keys and values."""
    dtype, dim, value_dim = kind
    key = draw(dtype, heads, keys, dim, seed=seed)
    return key, draw(dtype, heads, keys, value_dim, seed=seed + 1)


def laid(tensor: Tensor, layout: Layout) -> Tensor:
    """The same (heads, tokens, dim) numbers, in memory in one of the ways that windows are.

    What stands around them is NaN: nobody may read it.
    """
    heads, tokens, dim = tensor.shape
    if layout == "dense":
        return tensor.contiguous()
    if layout == "tokens first":
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    whole = tensor.new_full((heads + 1, tokens + 5, dim + 3), torch.nan)
    part = whole[1:, 2:-3, 1:-2]
    part.copy_(tensor)
    return part


def before_a_wall(tensor: Tensor) -> Tensor:
    """The same numbers, right before a page of memory that stops who reads it."""
    size = -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    wall = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + size
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(wall), mmap.PAGESIZE, 0):
        raise OSError("no page could be closed")
    made = torch.frombuffer(
        memory, dtype=tensor.dtype, count=tensor.numel(), offset=size - tensor.nbytes
    )
    return made.view(tensor.shape).copy_(tensor)


def item(
    parts: Sequence[Pair],
    tokens: Sequence[int] = (0,),
    scale: float = 0.3,
    softcap: float | None = None,
    temperature: float = 1.0,
    causal: bool = False,
) -> Any:
    """One group, whose parts have no dimension of groups."""
    whole = [(key.unsqueeze(0), value.unsqueeze(0)) for key, value in parts]
    return asked.request(whole, tokens, softcap, temperature, scale=scale, causal=causal)


BACKEND = native.NativeBackend()


def call(items: Sequence[Any], query: Tensor) -> Pair:
    output, lse, _ = native.NativeCall(items, query)(query)
    return output, lse


def compare(items: Sequence[Any], query: Tensor) -> None:
    """Output, log-sum-exp and, where an item is not causal, those of its parts by themselves."""
    output, lse, parts = native.NativeCall(items, query)(query, per_part=True)
    expected, expected_lse, expected_parts = exact(items, query)
    packed = any(one.peaks is not None for one in items)
    tolerance = (PACKED_TOLERANCE if packed else OUTPUT_TOLERANCE)[query.dtype]
    of_lse = PACKED_LSE_TOLERANCE[query.dtype] if packed else LSE_TOLERANCE
    assert output.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, atol=of_lse, rtol=1e-6)
    assert parts is not None
    assert expected_parts is not None
    for item, found, wanted in zip(items, parts, expected_parts, strict=True):
        assert (found is None) == (len(item.parts) == 1)
        if found is not None and not item.causal:
            torch.testing.assert_close(found.double(), wanted, atol=of_lse, rtol=1e-6)


ASKED = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.integers(1, 700), min_size=1, max_size=4),
        "tokens": st.integers(1, 24),
        "layouts": st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)),
        "numbers": st.tuples(
            st.sampled_from([None, 2.0, 30.0]), st.sampled_from([1.0, 0.5, 1.3]), st.booleans()
        ),
    }
)
"""Of an item; its numbers are the soft cap, the temperature, and whether it is causal."""


@pytest.mark.slow
@settings(max_examples=40)
@given(
    kind=st.sampled_from(KINDS),
    heads=st.tuples(st.integers(1, 3), st.integers(1, 8)),
    width=st.integers(1, 4),
    asked=st.lists(ASKED, min_size=1, max_size=3),
    threads=st.sampled_from([1, 2]),
    packed=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_items(
    kind: Kind,
    heads: tuple[int, int],
    width: int,
    asked: list[Any],
    threads: int,
    packed: bool,
    seed: int,
) -> None:
    """Few rows and more than a tile of them, over parts of any length, anywhere in memory."""
    torch.set_num_threads(threads)
    dtype, dim, _ = kind
    query = draw(dtype, width, heads[0] * heads[1], dim, seed=seed)
    items = []
    for one in asked:
        parts = []
        for index, length in enumerate(one["lengths"]):
            key, value = map(laid, pair(kind, heads[0], length, seed + index), one["layouts"])
            parts.append((key, value))
        tokens = [(seed + 3 * place) % width for place in range(one["tokens"])]
        items.append(item(parts, tokens, dim**-0.5, *one["numbers"]))
    compare([*map(backends.in_8_bits, items)] if packed else items, query)


# A remainder of a block of rows, and both sides of what is served as many, and of a tile.
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 17, 65, 129, 300])
def test_rows_of_a_question_and_of_texts_that_see_themselves(kind: Kind, rows: int) -> None:
    """In one part, and cut; a text stands beside others."""
    dtype, dim, _ = kind
    parts = [pair(kind, 1, 300), pair(kind, 1, 33, seed=5)]
    compare([item(parts, range(rows), dim**-0.5, temperature=0.7)], draw(dtype, rows, 1, dim))
    key, value = pair(kind, 1, rows)
    cut = max(1, rows // 3)
    halves = [(key[:, :cut], value[:, :cut]), (key[:, cut:], value[:, cut:])]
    items = [
        item([(key, value)], range(7, 7 + rows), dim**-0.5, causal=True),
        item([pair(kind, 1, 7, seed=1)], range(7), dim**-0.5, 5.0, causal=True),
        item(halves[: rows // cut], range(rows), dim**-0.5, causal=True),
    ]
    compare(items, draw(dtype, rows + 7, 3, dim))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("rows", [1, 20])
def test_nothing_behind_the_last_number_is_read(kind: Kind, rows: int) -> None:
    """The process would end. Both sides of a vector, of what is laid out at once, of a chunk."""
    dtype, dim, _ = kind
    query = before_a_wall(draw(dtype, rows, 1, dim))
    for keys in (1, 15, 17, 33, 63, 65, native.CHUNK, native.CHUNK + 1, 2 * native.CHUNK + 1):
        key, value = map(before_a_wall, pair(kind, 1, keys))
        whole = item([(key, value)], range(rows), dim**-0.5)
        compare([whole], query)
        small = backends.in_8_bits(whole)
        (part,), (peaks,) = small.parts, small.peaks or ()
        walled: list[Any] = [[[*map(before_a_wall, one)]] for one in (part, peaks)]
        compare([replace(small, parts=walled[0], peaks=walled[1])], query)


def test_items_are_asked_again_and_keep_what_they_point_at() -> None:
    query = draw(torch.float32, 1, 2, 16)
    made = native.NativeCall([item([pair(SMALL[0], 2, 5000)])], query)
    expected = exact([item([pair(SMALL[0], 2, 5000)])], query).lse
    # What would have been freed is taken again.
    others = [torch.full((2, 5000, 16), torch.nan) for _ in range(4)]
    first, again = made(query), made(query)
    torch.testing.assert_close(first[1].double(), expected, atol=1e-5, rtol=0)
    assert torch.equal(first[0], again[0])
    assert len(others) == 4


@EACH
@ROWS
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("where", ["key", "value"])
def test_nan_stays_where_it_is_read(
    kind: Kind, rows: int, softcap: float | None, where: str
) -> None:
    """In the rows of its kv head and its item; of a value, in its dimension."""
    dtype, dim, _ = kind
    query = draw(dtype, rows, 4, dim)
    for place in (0, 299, 300, 599):
        key, value = pair(kind, 2, 600)
        (key if where == "key" else value)[1, place, 3] = torch.nan
        other = item([pair(kind, 2, 400, seed=1)], range(rows), 0.3, softcap)
        output, lse = call([item([(key, value)], range(rows), 0.3, softcap), other], query)
        expected = torch.zeros_like(output, dtype=torch.bool)
        expected[:rows, 2:, slice(None) if where == "key" else 3] = True
        assert torch.equal(output.isnan(), expected)
        assert torch.equal(lse.isnan(), expected.all(-1))


@EACH
@ROWS
@pytest.mark.parametrize("case", ["infinite values", "some hidden", "a chunk", "all hidden"])
def test_infinities_are_as_in_the_reference(kind: Kind, rows: int, case: str) -> None:
    """Values of both signs give NaN; keys of logit -inf weigh nothing, and all of them zero."""
    dtype, dim, _ = kind
    key, value = pair(kind, 2, 600)
    query = draw(dtype, rows, 4, dim)
    query[..., 0] = 1.0
    if case == "infinite values":
        value[0, [17, 290], 3] = torch.inf
        value[1, 5, 0], value[1, 280, 0] = torch.inf, -torch.inf
    else:
        end = {"some hidden": 5, "a chunk": 256, "all hidden": 600}[case]
        key[:, :end, 0] = -torch.inf
    one = item([(key, value)], range(rows), 0.1)
    output, lse = call([one], query)
    expected, expected_lse, _ = exact([one], query, dtype)
    assert bool(expected.isnan().any()) == (case == "infinite values")
    tolerance = OUTPUT_TOLERANCE[dtype]
    torch.testing.assert_close(
        output, expected.float(), atol=tolerance, rtol=tolerance, equal_nan=True
    )
    torch.testing.assert_close(lse, expected_lse, atol=LSE_TOLERANCE, rtol=1e-6)
    key[0, 300, 0] = torch.inf
    assert bool(call([one], query)[0][:, :2].isnan().all())


def long_part(dtype: torch.dtype = torch.float32, keys: int = native.LEAST_KEYS) -> Pair:
    return draw(dtype, 1, 2, keys, 16), draw(dtype, 1, 2, keys, 16, seed=1)


def asking(tokens: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    """A query of 8 heads."""
    return draw(dtype, tokens, 8, 16, seed=2)


def takes(query: Tensor, *parts: Pair, causal: bool = False) -> bool:
    return BACKEND.serves(asked.request(parts, range(len(query)), causal=causal), query)


def attend(query: Tensor, part: Pair) -> Pair:
    one = segments.Segment("context", 0, 0, layers={0: [part]})
    rows = segments.Rows(torch.zeros(len(query), dtype=torch.int64))
    asked = segments.Queries(0, query, rows, 0.25, None, None)
    (attended,) = segments.Segments([one], len(query)).attend(asked)
    return attended.output, attended.lse


KEY, VALUE = GOOD = long_part()
UNFIT: dict[str, tuple[Tensor, Sequence[Pair]]] = {
    "no key": (asking(), [long_part(keys=0)]),
    "head dim of no vectors": (asking()[..., :8], [(KEY[..., :8], VALUE)]),
    "too large a value dim": (asking(), [(KEY, VALUE.repeat(1, 1, 1, native.MAX_DIM // 16 + 1))]),
    "doubles": (asking(dtype=torch.float64), [long_part(torch.float64)]),
    "a query across": (asking().mT.contiguous().mT, [GOOD]),
    "keys across": (asking(), [(KEY.mT.contiguous().mT, VALUE)]),
    "values across": (asking(), [GOOD, (KEY, VALUE.mT.contiguous().mT)]),
}


@pytest.mark.parametrize("what", UNFIT)
def test_what_it_does_not_take(what: str) -> None:
    query, parts = UNFIT[what]
    assert not takes(query, *parts)


def test_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    key, value = long_part()
    assert takes(asking(), (key, value))
    assert takes(asking(), (key, value), (key, value))
    query = asking()
    for tensor in (key, query):
        tensor.requires_grad_()
    assert not takes(asking(), (key, value))
    assert not takes(query, GOOD)
    with torch.no_grad():
        assert takes(query, (key, value))
    attend(asking(), (key, value))[0].sum().backward()
    assert key.grad is not None


def test_another_query_than_it_was_made_for() -> None:
    query = asking(3)
    made = native.NativeCall([item([(KEY[0], VALUE[0])], [0, 2])], query)
    made(query)
    for other in (query.half(), query.repeat(1, 1, 2), query[:2], query[:, :5], query[..., :8]):
        with pytest.raises(RagWindowsError, match="another query"):
            made(other)


def test_rows_where_the_processor_has_products_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    for many in (True, False):
        made = native.Kernel(lambda *_: None, many)
        monkeypatch.setattr(native, "kernel", lambda *_, made=made: made)
        assert takes(asking(native.MOST_ROWS // 4), long_part())
        assert takes(asking(native.MOST_ROWS // 4 + 1), long_part()) == many
        key, value = long_part()
        text = key[:, :, :2], value[:, :, :2]
        assert takes(asking(2), text, causal=True) == many
    monkeypatch.setattr(native, "kernel", lambda *_: None)
    assert not takes(asking(), long_part())


def test_it_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = native.NativeCall.__call__

    def recorded(self: native.NativeCall, query: Tensor, *, per_part: bool) -> Any:
        calls.append(len(query))
        return real(self, query, per_part=per_part)

    monkeypatch.setattr(native.NativeCall, "__call__", recorded)
    answer = attend(asking(), long_part())
    with stand_in.forced("cpu"):
        expected = attend(asking(), long_part())
    with stand_in.forced("native"):
        attend(asking(), long_part(keys=5))  # what it does not take is the reference's
    assert calls == [4]
    for part, wanted in zip(answer, expected, strict=True):
        torch.testing.assert_close(part, wanted, atol=5e-6, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the options are those of x86")
@pytest.mark.parametrize("without", ["-mno-avx512bf16", "-mno-avx512f", "-mno-avx512f -mno-avx"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_processors_with_shorter_vectors(
    anew: Path,
    real_compiler: list[str],
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    without: str,
) -> None:
    monkeypatch.setenv("CC", shlex.join([*real_compiler, *without.split()]))
    made = native.kernel(dtype, 80, 48)  # compared with the reference before it serves
    assert made is not None
    assert not made.many
    assert native.kernel(dtype, 32, 32, packed=True) is not None
    assert linear.kernel(dtype) is not None


def left_out(caplog: pytest.LogCaptureFixture, what: str, level: int = logging.INFO) -> None:
    """PyTorch answers, however often it is asked, and the log has the reason once."""
    with caplog.at_level(logging.INFO, logger="rag_windows"):
        assert not any(native.kernel(*SMALL[0]) for _ in range(3))
        answer = attend(asking(), long_part())
    with stand_in.forced("cpu"):
        assert all(map(torch.equal, answer, attend(asking(), long_part())))
    (record,) = [record for record in caplog.records if "CPU kernel" in record.msg]
    assert record.levelno == level
    assert what in record.getMessage()


@pytest.mark.slow
@pytest.mark.usefixtures("anew", "real_compiler")
@pytest.mark.parametrize(
    "fault", ["output", "lse", "parts", "softcap", "many rows", "causal", "NaN"]
)
def test_a_kernel_that_errs_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    real = native.NativeCall.__call__

    def bad(self: native.NativeCall, query: Tensor, *, per_part: bool) -> Any:
        made = real(self, query, per_part=per_part)
        output, lse, parts = made
        if fault == "NaN":
            output[-1, -1, -1] = torch.nan
        wrong = {
            "softcap": self.settings[0, 1] != 0,
            "many rows": bool(self.table[0, 4] > 1),
            "causal": bool(self.table[:, 5].any()),
        }.get(fault, fault == "output")
        if parts is not None and parts[0] is not None and fault == "parts":
            parts[0][1] += 0.001
        lse = lse + 0.001 * (fault == "lse")
        return made._replace(output=output + 0.01 * float(wrong), lse=lse)

    monkeypatch.setattr(native.NativeCall, "__call__", bad)
    left_out(caplog, "differs from the reference", logging.WARNING)


COMPILERS: dict[str, tuple[str, str]] = {
    "refuses": ("import sys; sys.exit('no such processor')", "no such processor"),
    "odd letters": ("import sys; sys.stderr.buffer.write(b'\\xff\\xfe'); sys.exit(1)", "left out"),
    "makes nothing": ("", "left out"),
    "rubbish": ("import sys; open(sys.argv[sys.argv.index('-o') + 1], 'w').write('x')", "left out"),
    "hangs": ("import time; time.sleep(100)", "timed out"),
}


def named(folder: Path, code: str, *arguments: str) -> str:
    """A command line, as in CC, of a compiler that does this."""
    script = folder / "our compiler.py"
    script.write_text(code, encoding="utf-8")
    return shlex.join([sys.executable, "-S", str(script), *arguments])


@pytest.mark.parametrize(
    "how", [*COMPILERS, "/no/such/compiler", "cc 'unclosed", "no compiler", "no OpenMP"]
)
def test_without_a_compiler_that_works(
    how: str,
    anew: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    code, said = COMPILERS.get(how, ("", how if how == "no OpenMP" else "left out"))
    monkeypatch.setattr(build, "_openmp", lambda: None if how == "no OpenMP" else "libgomp.so")
    monkeypatch.setattr(build, "_SECONDS", 0.5 if how == "hangs" else 60)
    if how == "no compiler":
        monkeypatch.setenv("PATH", str(tmp_path))
    elif how != "no OpenMP":
        monkeypatch.setenv("CC", named(tmp_path, code) if how in COMPILERS else how)
    left_out(caplog, said)
    assert list(anew.iterdir()) == []


@pytest.mark.parametrize(("known", "expected"), [("libgomp", "torch"), ("libm", None)])
def test_which_openmp(
    known: str, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's own where several are loaded; a whole path, whatever stands in it."""
    maps = tmp_path / "maps"
    line = "7f00-7f01 r-xp 00000000 08:01 2  "
    names = f"/usr/lib/{known}.so.1", f"/home/a user/torch/{known}-a34b.so.1", "/usr/libompare.so"
    maps.write_text("".join(f"{line}{name}\n" for name in names), encoding="utf-8")
    monkeypatch.setattr(build, "_MAPS", maps)
    assert build._openmp() == (names[1] if expected else None)
    monkeypatch.setattr(build, "_MAPS", tmp_path / "missing")
    assert build._openmp() is None


# Each call of the compiler goes on to the real one; the last argument is the file of what it saw.
PASSED_ON = """
import os, subprocess, sys
*real, seen = sys.argv[1].split("|")
made = sys.argv[sys.argv.index("-o") + 1]
with open(seen, "a") as file:
    print(oct(os.stat(os.path.dirname(made)).st_mode & 0o777), made, file=file)
sys.exit(subprocess.call([*real, *sys.argv[2:]]))
"""


def test_a_named_compiler_with_arguments(
    anew: Path, real_compiler: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It works in a folder that nobody else may enter and that is gone before the kernel runs.

    Threads that ask at once have it compiled once.
    """
    seen = tmp_path / "seen"
    monkeypatch.setenv("CC", named(tmp_path, PASSED_ON, "|".join([*real_compiler, str(seen)])))
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: native.kernel(*SMALL[0]), range(4)))
    assert made[0] is not None
    assert made == made[:1] * 4
    lines = seen.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"0o700 {anew}/") for line in lines)
    assert list(anew.iterdir()) == []
    compare([item([pair(SMALL[0], 2, 500)], [1, 0])], draw(torch.float32, 2, 4, 16))
    monkeypatch.setenv(build.VARIABLE, "0")
    assert native.kernel(*SMALL[0]) is None
