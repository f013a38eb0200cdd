"""`make gpu`: its stages under a stand-in, deadlines, what is run again, and the report's table."""

from __future__ import annotations

import copy
import importlib.metadata
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_report, gpu_stages, gpu_table, report
from rag_windows.attention import backends

HERE = {"commit": "c0ffee", "sources": "5eed", "stand_in": True}
BEGIN, END = f"<!-- bench: {gpu_report.BLOCK} -->", "<!-- /bench -->"
PAGE = f"# Speed\n\n{BEGIN}\nold\n{END}\n\nThe end.\n"
STAGE = """
import json, os, subprocess, sys, time
from pathlib import Path
from benchmarks.gpu import read, write
path = Path(sys.argv[1])
record = read(path)
with Path(path.parent, "started").open("a") as stream:
    stream.write(path.stem + "\\n")
"""
ENDS = "write(path, record | {'status': 'finished', 'error': None})\n"
RUNS_ON = """
record["results"]["one"] = 1.5
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
record["results"]["child"] = child.pid
record["results"]["scratch"] = os.environ["TMPDIR"]
write(path, record)
time.sleep(600)
"""
FAILS = "print('half done'); raise RuntimeError('the device is gone')\n"


def started(out: Path) -> list[str]:
    return (out / "started").read_text().split()


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stages whose programs are made up here, by name."""
    monkeypatch.setattr(gpu, "sources", lambda: {"commit": "c0ffee", "sources": "5eed"})
    monkeypatch.setattr(gpu, "lacking", lambda: None)

    def made(**programs: str) -> list[str]:
        program = tmp_path / "stage.py"
        cases = "".join(
            f"if path.stem == {name!r}:\n    exec({text!r})\n" for name, text in programs.items()
        )
        program.write_text(STAGE + cases)
        monkeypatch.setattr(gpu, "COMMAND", [sys.executable, str(program)])
        monkeypatch.setattr(gpu, "STAGES", dict.fromkeys(programs, (1, "something")))
        return list(programs)

    return made


def test_without_a_gpu_every_stage_says_what_it_would_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(["run", "--out", str(tmp_path / "gpu")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "sees no CUDA device" in lines[0]
    for name, (minutes, does) in gpu.STAGES.items():
        assert f"- {name} (about {minutes} min): {does}." in lines
    assert list(tmp_path.iterdir()) == []
    # Nor where there is not even torch.
    monkeypatch.setitem(sys.modules, "torch", None)
    assert gpu.main(["run", "profile", "--out", str(tmp_path / "gpu")]) == 0
    assert "has no torch" in capsys.readouterr().out


def test_what_the_package_lacks_is_one_line_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def version(name: str, known: Any = importlib.metadata.version) -> str:
        if name == "pydantic":
            raise importlib.metadata.PackageNotFoundError(name)
        return str(known(name))

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setitem(sys.modules, "benchmarks.gpu_stages", None)
    assert gpu.main(["run", "--stand-in", "--out", str(tmp_path / "gpu")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "nothing was installed" in line
    assert line.endswith("-m pip install 'pydantic>=2'")
    assert list(tmp_path.iterdir()) == []


def test_a_stage_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["run", "parties"])
    assert (
        "there is no stage 'parties'; choose among table, environment, tests"
        in capsys.readouterr().err
    )


def test_every_stage_has_a_program() -> None:
    assert list(gpu_stages.RUN) == list(gpu.STAGES)


def test_the_deadline_keeps_what_was_measured_and_leaves_nothing_running(
    tmp_path: Path, stages: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    names = stages(slow=RUNS_ON, quick=ENDS)
    assert gpu.run(names, tmp_path, stand_in=True, deadline=5) == 1
    slow, quick = (gpu.read(tmp_path / f"{name}.json") or {} for name in names)
    assert (slow["status"], slow["error"]) == (
        "unfinished",
        "it was stopped at its deadline of 5 s.",
    )
    assert slow["results"]["one"] == 1.5
    assert 5 <= slow["seconds"] < 30
    assert not Path(slow["results"]["scratch"]).exists()
    assert ended(slow["results"]["child"])
    # The others go on.
    assert quick["status"] == "finished"
    assert "slow: unfinished after 5 s: it was stopped" in capsys.readouterr().out


def ended(process: int) -> bool:
    """Whether a process is gone, or waits for nobody who would ask for it any more."""
    for _ in range(100):
        try:
            os.kill(process, 0)
            if Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


def test_one_that_fails_is_told_and_stops_no_other(tmp_path: Path, stages: Any) -> None:
    assert gpu.run(stages(bad=FAILS, good=ENDS), tmp_path, stand_in=True) == 1
    bad = gpu.read(tmp_path / "bad.json") or {}
    assert bad["status"] == "failed"
    assert bad["error"] == "exit code 1: RuntimeError: the device is gone"
    assert "half done" in (tmp_path / "bad.log").read_text()
    assert (gpu.read(tmp_path / "good.json") or {})["status"] == "finished"


def test_what_has_finished_is_run_again_only_where_that_could_change_it(
    tmp_path: Path, stages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = stages(bad=FAILS, good=ENDS)
    gpu.run(names, tmp_path, stand_in=True)
    assert started(tmp_path) == ["bad", "good"]
    gpu.run(names, tmp_path, stand_in=True)
    assert started(tmp_path)[2:] == ["bad"]
    gpu.run(["good"], tmp_path, stand_in=True, fresh=True)
    assert started(tmp_path)[3:] == ["good"]
    # A record that was torn off is none.
    (tmp_path / "good.json").write_text('{"stage": "good", "status": "fin')
    gpu.run(["good"], tmp_path, stand_in=True)
    assert started(tmp_path)[4:] == ["good"]
    for other in ({"commit": "decaf", "sources": "5eed"}, {"commit": "decaf", "sources": "ed17"}):
        monkeypatch.setattr(gpu, "sources", lambda other=other: other)
        for _ in range(2):
            assert gpu.run(["good"], tmp_path, stand_in=True) == 0
    assert started(tmp_path)[5:] == ["good", "good"]


def test_sources_tell_commit_and_content() -> None:
    known = gpu.sources()
    assert known == gpu.sources()
    assert len(known["sources"] or "") == 12


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the stages write that can run inside of this process."""
    out = tmp_path_factory.mktemp("gpu")
    found = {}
    for name in gpu.STAGES:
        if name != "tests":
            gpu.begin(out / f"{name}.json", HERE)
            gpu_stages.main(out / f"{name}.json")
            found[name] = gpu.read(out / f"{name}.json")
    return found


def test_stages_finish_under_a_stand_in(records: dict[str, Any]) -> None:
    assert {one["status"] for one in records.values()} == {"finished"}
    rates = records["environment"]["results"]
    assert min(value for value in rates.values() if isinstance(value, float)) > 0
    assert rates["packages"]["torch>=2.13,<2.16"] == torch.__version__
    profile = records["profile"]["results"]
    assert profile["busy_s"] == pytest.approx(sum(profile["kinds_s"].values()))
    assert min(profile["kinds_s"][kind] for kind in ("attention", "linear layers", "copies")) > 0
    assert profile["token_s"] > 0


def test_the_table_has_every_line_in_the_order_of_what_is_asked_first(
    records: dict[str, Any],
) -> None:
    lines = records["table"]["results"]["lines"]
    names = [line["what"] for line in lines]
    assert [name.partition(",")[0] for name in names[:2]] == ["attention beside float64"] * 2
    timed = ["transformers"]
    for method in ("pcw", "pced"):
        cited = f"{method}, windows, from memory"
        timed += [cited, f"{cited}, no citations", f"{method}, what citations cost a step"]
    longest = [*timed[1:4], "transformers", "first token of pcw from memory, against one prompt"]
    last = ["2 questions, pcw", "pced, a step by windows"]
    assert names[2:] == ["weights of the 8B shape", *timed, *timed, *longest, *last]
    aims = {line["asked"]: line["met"] for line in lines[3:] if line.get("asked")}
    assert set(aims) == {"at least 60% of bandwidth", "at most 1.03x", "at least 300x"}
    assert all(line["met"] for line in lines[:2])
    for line in lines:
        for seconds in (*line.get("first_s", ()), *line.get("decode_s", ())):
            assert seconds > 0
        assert len(gpu_table.cells(line)) == len(gpu_table.HEAD)


def table_of(tmp_path: Path, budget_s: float) -> tuple[gpu_table.Table, gpu_stages.Stage]:
    gpu.begin(tmp_path / "table.json", HERE)
    stage = gpu_stages.Stage(tmp_path / "table.json")
    return gpu_table.Table(stage, budget_s), stage


def test_an_exception_costs_its_line_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, stage = table_of(tmp_path, 60)
    with made.trying(8192, "one thing", 1) as runs:
        assert runs
        raise TypeError("no such | argument")
    with made.trying(None, "another", 1):
        made.add(None, "another", first_s=[0.5, 0.25, 1.0], base_s=[10.0], asked="much", met=True)
    *_, failed, good = capsys.readouterr().out.splitlines()
    assert failed.startswith("| 8,192 | one thing: one thing: no such / argument | - |")
    assert good == "|  | another | 0.500 s | 20.0x | - | - | much | yes |"
    with made.trying(None, "around", 1), made.trying(None, "inside", 1):
        raise RuntimeError("lost")
    assert [line["what"] for line in (gpu.read(stage.path) or {})["results"]["lines"]] == [
        "one thing",
        "another",
        "inside",
    ]


def test_what_has_no_time_left_is_left_out_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, _ = table_of(tmp_path, 5)
    with made.trying(8192, "long", 30) as runs:
        assert not runs
    assert "long: left out: 5 s left of about 30 |" in capsys.readouterr().out


def test_lines_of_tables_are_shown_while_a_stage_runs(
    tmp_path: Path, stages: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    says = "print('| a | b |', flush=True); print('noise', flush=True); print('| 1 | ', end='')\n"
    assert gpu.run(stages(says=says + ENDS), tmp_path, stand_in=True) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "| a | b |" in shown
    assert "noise" not in shown


def test_wheels_are_what_is_imported_and_no_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[str]] = []

    def downloads(command: list[str], **_: Any) -> Any:
        asked.append(command)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr("subprocess.run", downloads)
    assert gpu.main(["wheels", "--out", str(tmp_path), "--python", "3.12"]) == 0
    (command,) = asked
    assert {"--no-deps", "--python-version=3.12", f"--dest={tmp_path}"} <= set(command)
    names = {word.partition("==")[0] for word in command if "==" in word}
    assert {"transformers", "tokenizers", "safetensors", "pydantic-core", "typer"} <= names
    assert not {"torch", "rag-windows", "pytest", "scipy", "colorama"} & names
    assert "--no-index --no-deps --target site" in capsys.readouterr().out


def test_peaks_stand_beside_what_is_needed(records: dict[str, Any]) -> None:
    rows = records["memory"]["results"]["rows"]
    assert [row["way"] for row in rows] == ["transformers", "windows, cold"] * 2
    for row in rows:
        # A prompt of 128 tokens, with 2 layers, keys and values, 2 heads of 32 numbers.
        assert row["kv"] == 128 * 2 * 2 * 2 * 32 * 4
        assert row["weights"] > row["kv"]


def test_parity_asks_every_kind_and_says_what_answered(records: dict[str, Any]) -> None:
    rows = records["parity"]["results"]["rows"]
    asked = {(row["kind"], row["groups"], row["dtype"], row["softcap"]) for row in rows}
    assert ("texts", 4, "bfloat16", 30.0) in asked
    assert len(asked) == len(rows) == 3 * (2 * 2 + 2)
    answered = {row["backend"] for row in rows}
    assert answered <= {"native", "fused", "reference"}
    assert all(0 < row["output"] < 2e-2 and row["lse"] < 2e-4 for row in rows)


def test_a_kernel_that_differs_fails_parity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = backends.reference

    def skewed(requests: Any, query: Any, **options: Any) -> Any:
        # What a kernel is compared with before it serves.
        if options:
            return exact(requests, query, **options)
        if requests[0].causal:
            raise RuntimeError("no memory")
        made = exact(requests, query)
        return made._replace(lse=made.lse + 1e-3)

    monkeypatch.setattr(backends, "reference", skewed)
    gpu.begin(tmp_path / "parity.json", HERE)
    gpu_stages.main(tmp_path / "parity.json")
    kept = gpu.read(tmp_path / "parity.json") or {}
    assert kept["status"] == "failed"
    assert kept["error"].count("lies beyond (0.02, 0.0002)") == 6
    assert kept["error"].count("no memory") == 6
    # What fails takes nothing else with it.
    assert len(kept["results"]["rows"]) == 12


def test_a_profile_of_a_device_counts_its_kernels_alone() -> None:
    def row(key: str, count: int, us: float, kind: str = "CUDA", note: bool = False) -> Any:
        device = SimpleNamespace(name=kind)
        times = {"self_device_time_total": us, "self_cpu_time_total": 7 * us}
        return SimpleNamespace(
            key=key, count=count, device_type=device, is_user_annotation=note, **times
        )

    rows = [
        row("void flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits>(params)", 64, 3000),
        row("nvjet_tst_64x8_64x16_4x1_v_bz_TNN", 400, 20_000),
        row("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_gemm>(Params)", 20, 1000),
        row("Memcpy DtoH (Device -> Pageable)", 2, 4),
        row("Memcpy HtoD (Pinned -> Device)", 6, 6),
        row("void at::native::CatArrayBatchedCopy<int>(long)", 4, 10),
        row("void at::native::elementwise_kernel<add>(int)", 100, 500),
        row("rag_windows::attend", 64, 9999, note=True),
        row("aten::mm", 420, 21_000, kind="CPU"),
        row("cudaLaunchKernel", 500, 0, kind="CPU"),
        row("cuLaunchKernelEx", 90, 0, kind="CPU"),
        row("cudaStreamSynchronize", 2, 0, kind="CPU"),
        row("cudaDeviceSynchronize", 2, 0, kind="CPU"),
    ]
    found = gpu_stages.summed(rows, 2, "cuda")
    kinds = {"attention": 1.5, "linear layers": 10.5, "copies": 0.01, "other": 0.25}
    assert {name: 1000 * s for name, s in found["kinds_s"].items()} == pytest.approx(kinds)
    assert found["busy_s"] == pytest.approx(0.01226)
    assert found["counts"] == {
        "launches": 295,
        "waits": 1,
        "copies_to_host": 1,
        "copies_to_device": 3,
    }
    assert [one["calls"] for one in found["top"][:2]] == [200, 32]


def test_backends_are_told_by_what_a_profiler_saw() -> None:
    seen = {"rag_windows::attend", "torch_attn::_varlen_attn", "aten::add"}
    assert gpu_stages.backends_of(seen) == "varlen"
    assert gpu_stages.backends_of({"rag_windows::attend", "aten::add"}) == "native"
    mixed = {"rag_windows::attend", "aten::_scaled_dot_product_flash_attention_for_cpu"}
    assert gpu_stages.backends_of(mixed) == "fused + native"
    assert gpu_stages.backends_of({"aten::add"}) == "reference"


def test_the_tests_stage_runs_pytest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu.run(["tests"], tmp_path, stand_in=True, deadline=120) == 0
    outcomes = (gpu.read(tmp_path / "tests.json") or {})["results"]["tests"]
    assert any("test_backends.py" in name and "cuda" in name for name in outcomes)
    if not torch.cuda.is_available():
        assert set(outcomes.values()) == {"skipped"}
    # Where it is not installed, that is said.
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    gpu.begin(tmp_path / "tests.json", HERE)
    gpu_stages.main(tmp_path / "tests.json")
    told = gpu.read(tmp_path / "tests.json") or {}
    assert told["status"] == "not run"
    assert "install pytest and hypothesis" in told["error"]


def documents(root: Path) -> dict[str, str]:
    """The texts of a checkout's documents by their form; they are made where there are none."""
    paths = {form: root / name for name, form in report.DOCUMENTS.items()}
    for name in report.DOCUMENTS:
        if not (root / name).exists():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(PAGE, encoding="utf-8")
    return {form: path.read_text(encoding="utf-8") for form, path in paths.items()}


def reported(out: Path, records: dict[str, Any]) -> dict[str, str]:
    for name, record in records.items():
        gpu.write(out / f"{name}.json", record)
    documents(out)
    assert gpu_report.write_report(out, out) == 0
    texts = documents(out)
    for text in texts.values():
        assert text.startswith(f"# Speed\n\n{BEGIN}\n")
        assert text.endswith(f"{END}\n\nThe end.\n")
        assert "\nold\n" not in text
    return texts


def on_a_gpu(records: dict[str, Any]) -> dict[str, Any]:
    """The records of the stand-in as a GPU's, with figures of the targets that are known."""
    found = copy.deepcopy(records)
    for record in found.values():
        record |= {"stand_in": False, "device": "NVIDIA H200", "driver": "580.1", "seconds": 7.0}
    return found


def test_the_table_shows_targets_and_every_stage(records: dict[str, Any], tmp_path: Path) -> None:
    found = on_a_gpu(records)
    found["profile"]["results"]["top"][0]["name"] = "void flash<Traits, 128>(a | b)"
    texts = reported(tmp_path, found)
    text = texts["whole"]
    assert "NVIDIA H200, driver 580.1 (python" in text
    assert "| tests | not run | - | - | - |" in text
    assert "| parity | finished |" in text
    targets = [line for line in text.splitlines() if "| at most 1.03x |" in line]
    assert targets
    assert all(line in texts["short"] for line in targets)
    assert "NVIDIA H200" in texts["short"]
    for name in records:
        assert f"\n### {name}\n" in text
        assert f"\n### {name}\n" not in texts["short"]
    assert "Bounded: three rounds of 32 tokens" in text
    assert "| 64 | 4 | bfloat16 | 30 |" in text
    assert "| linear layers | " in text
    assert "| `void flash<Traits, 128>(a / b)` | " in text


def test_what_did_not_finish_is_shown_as_such(records: dict[str, Any], tmp_path: Path) -> None:
    found = on_a_gpu(records)
    lines = found["table"]["results"]["lines"]
    found["table"] |= {"status": "unfinished", "error": "it was stopped at its deadline of 480 s."}
    found["table"]["results"]["lines"] = lines[:5]
    found["memory"] |= {"status": "failed", "error": "exit code 1: out | of\nmemory", "results": {}}
    found["profile"]["results"] = {"token_s": 0.0123}
    del found["parity"]
    text = reported(tmp_path, found)["whole"]
    assert "| table | unfinished: it was stopped at its deadline of 480 s. |" in text
    assert "\n### table (unfinished)\n" in text
    assert "| memory | failed: exit code 1: out / of memory |" in text
    assert "| parity | not run |" in text
    assert "### memory" not in text
    assert "### parity" not in text
    assert "A decode step took 12.30 ms; no profile was taken." in text
    found["table"]["results"]["lines"] = lines[2:5]
    assert "has not reached what is asked for" in reported(tmp_path, found)["short"]


def test_there_must_be_something_to_report(
    records: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = documents(tmp_path)

    def refusal() -> str:
        assert gpu.main(["report", "--out", str(tmp_path)]) == 2
        assert documents(tmp_path) == before
        return capsys.readouterr().err

    assert refusal().startswith(f"There is nothing to report: {tmp_path} holds no record; do")
    gpu.write(tmp_path / "parity.json", records["parity"])
    assert "no record but of stand-ins, which say nothing about a GPU" in refusal()
    table = on_a_gpu(records)["table"]
    gpu.write(tmp_path / "table.json", table | {"results": {"lines": [{"context": 1}]}})
    assert "holds records of another version" in refusal()


def test_the_log_and_the_page_of_results_have_a_place_for_the_table() -> None:
    texts = {name: (gpu.ROOT / name).read_text(encoding="utf-8") for name in report.DOCUMENTS}
    holding = {name for name, text in texts.items() if f"{BEGIN}\n" in text}
    assert {report.DOCUMENTS[name] for name in holding} == {"short", "whole"}


def test_records_are_json_that_others_can_read(records: dict[str, Any]) -> None:
    for record in records.values():
        assert json.loads(json.dumps(record, allow_nan=False)) == record
