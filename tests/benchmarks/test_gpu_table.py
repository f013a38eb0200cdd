"""`make gpu`: the lines of its table under a stand-in, what fails, and what is left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import gpu_table
from rag_windows.attention import backends

Captured = pytest.CaptureFixture[str]


@pytest.mark.slow
def test_the_table_has_every_line_in_the_order_of_what_is_asked_first(capsys: Captured) -> None:
    assert gpu_table.main(["--stand-in"]) == 0
    about, _, _, head, _, *lines = capsys.readouterr().out.splitlines()
    assert f"torch {torch.__version__}" in about
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (head, *lines)]
    assert {len(row) for row in rows} == {len(gpu_table.HEAD)}
    assert rows.pop(0) == list(gpu_table.HEAD)
    names = [row[1].partition(":")[0] for row in rows]
    assert [name.partition(",")[0] for name in names[:2]] == ["attention beside float64"] * 2
    timed = ["transformers"]
    for method in ("pcw", "pced"):
        cited = f"{method}, windows, from memory"
        timed += [cited, f"{cited}, no citations", f"{method}, what citations cost a step"]
    longest = [*timed[1:4], "transformers", "first token of pcw from memory, against one prompt"]
    last = ["2 questions, pcw", "pced, a step by windows"]
    assert names[2:] == ["weights of the 8B shape", *timed, *timed, *longest, *last]
    assert {row[6] for row in rows[3:]} == {
        *("", "at least 60% of bandwidth", "at most 1.03x", "at least 300x")
    }
    assert all(bool(row[6]) == (row[7] in ("yes", "no")) for row in rows)
    assert [row[7] for row in rows[:2]] == ["yes"] * 2


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu_table.main([])
    assert "sees no CUDA device" in capsys.readouterr().err


@pytest.mark.slow
def test_an_exception_costs_its_line_alone(capsys: Captured) -> None:
    made = gpu_table.Table(60)
    with made.trying(8192, "one thing", 1) as runs:
        assert runs
        raise TypeError("no such | argument")
    with made.trying(None, "another", 1):
        made.add(None, "another", first_s=[0.5, 0.25, 1.0], base_s=[10.0], asked="much", met=True)
    *_, failed, good = capsys.readouterr().out.splitlines()
    assert failed.startswith("| 8,192 | one thing: TypeError('no such / argument') | - |")
    assert good == "|  | another | 0.500 s | 20.0x | - | - | much | yes |"
    assert made.failed
    with made.trying(None, "around", 1), made.trying(None, "inside", 1):
        raise RuntimeError("lost")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("|  | inside: ")


def test_what_has_no_time_left_is_left_out_and_says_so(capsys: Captured) -> None:
    made = gpu_table.Table(5)
    with made.trying(8192, "long", 30) as runs:
        assert not runs
    assert "long: left out: 5 s left of about 30 |" in capsys.readouterr().out


def test_a_kernel_that_differs_is_told(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    exact = backends.reference

    def skewed(requests: Any, query: Any, **options: Any) -> Any:
        # What a kernel is compared with before it serves.
        made = exact(requests, query, **options)
        return made if options else made._replace(lse=made.lse + 1e-3)

    monkeypatch.setattr(backends, "reference", skewed)
    made = gpu_table.Table()
    gpu_table.right(made, torch.device("cpu"), "step", 1, small=True)
    assert capsys.readouterr().out.splitlines()[-1].endswith("| at most 0.02, 0.0002 | no |")
    assert not made.failed


def test_backends_are_told_by_what_a_profiler_saw() -> None:
    seen = {"rag_windows::attend", "torch_attn::_varlen_attn", "aten::add"}
    assert gpu_table.backends_of(seen) == "varlen"
    assert gpu_table.backends_of({"rag_windows::attend", "aten::add"}) == "native"
    mixed = {"rag_windows::attend", "aten::_scaled_dot_product_flash_attention_for_cpu"}
    assert gpu_table.backends_of(mixed) == "fused + native"
    assert gpu_table.backends_of({"aten::add"}) == "reference"
