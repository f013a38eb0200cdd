"""The stages of `make gpu`, each in a process of its own: python -m benchmarks.gpu_stages RECORD.

RECORD is the file that `benchmarks.gpu` has begun for a stage; what is measured is kept there at
once, so that a deadline takes nothing away. With a stand-in, sizes are tiny and the device the CPU.
"""

from __future__ import annotations

import itertools
import platform
import re
import statistics
import subprocess
import sys
import tomllib
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiling

from benchmarks.gpu import ROOT, read, write
from rag_windows.attention import backends
from rag_windows.attention.native import kernel as native
from rag_windows.attention.segments import Queries, Reading, Rows, Segment, Segments
from rag_windows.attention.segments import read as attention
from rag_windows_eval.benchmark.answers import Clock, plain, seconds, warm_cache, windowed
from rag_windows_eval.benchmark.result import (
    COLD,
    SEQUENTIAL,
    BenchPlan,
)
from rag_windows_eval.benchmark.run import peak_bytes, wrapped
from rag_windows_eval.benchmark.workload import BenchTexts, token_bytes, weight_bytes

BIG = BenchPlan("llama-3.1-8b", device="cuda", dtype="bfloat16", window=256, rounds=3, memory=False)
SMALL = BenchPlan(
    "tiny", dtype="float32", context=64, window=16, new_tokens=4, rounds=1, memory=False
)
LIMITS = {"float16": (3e-3, 2e-4), "bfloat16": (2e-2, 2e-4)}
"""How far an output, by the largest one, and a log-sum-exp may lie from float64."""


class Stage:
    """A stage under way: its record, in which it keeps what it measured.

    ``stand_in`` asks for tiny sizes on the CPU; ``device`` is where everything lies; ``errors``
    say what went wrong, whatever else was measured.
    """

    def __init__(self, path: Path) -> None:
        found = read(path)
        if found is None:
            raise SystemExit(
                f"{path} is no record; start stages by `python -m benchmarks.gpu run`."
            )
        self.path, self.record = path, found
        self.errors: list[str] = []
        self.stand_in = bool(found["stand_in"])
        self.device = torch.device("cpu" if self.stand_in else "cuda")
        found["versions"] = {"python": platform.python_version()} | {
            name: metadata.version(name) for name in ("torch", "transformers")
        }
        found["device"] = "the CPU, as a stand-in"
        if not self.stand_in:
            found["versions"]["torch"] = torch.__version__
            found["device"] = torch.cuda.get_device_name()
            found["driver"] = smi("driver_version").get("driver_version")

    def keep(self, name: str, value: Any) -> None:
        """Add a result to the record, and the record to the disk."""
        self.record["results"][name] = value
        write(self.path, self.record)

    def bounded(self, text: str) -> None:
        """Say what was measured less often or shorter than elsewhere."""
        self.record["bounded"].append(text)

    @contextmanager
    def trying(self, name: str) -> Iterator[None]:
        """Let what fails here be told and stop nothing else."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - it costs what is inside alone
            traceback.print_exc()
            self.errors.append(f"{name}: {' '.join(str(error).split())[:300]}")

    def end(self, left_out: str | None) -> None:
        """Write down how it ended: not run for that reason, failed or finished."""
        error = left_out or "; ".join(self.errors) or None
        status = "not run" if left_out else "failed" if error else "finished"
        write(self.path, self.record | {"status": status, "error": error})


def smi(*fields: str) -> dict[str, str]:
    """What the driver's own tool says of the first device; nothing where it is not there."""
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    with suppress(OSError, subprocess.CalledProcessError):
        done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 - fixed words
        return dict(zip(fields, done.stdout.strip().split(", "), strict=False))
    return {}


def environment(stage: Stage) -> None:
    """Versions beside those asked for, the device, and what it can do at best."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = {}
    for line in project["dependencies"]:
        with suppress(metadata.PackageNotFoundError):
            found[line] = metadata.version(re.split(r"[^\w.-]", line)[0])
    stage.keep("packages", {line: found.get(line) for line in project["dependencies"]})
    device, whole = stage.device, 2**12 if stage.stand_in else 2**31
    if not stage.stand_in:
        fields = "driver_version memory.total clocks.max.sm clocks.max.mem power.limit".split()
        about = torch.cuda.get_device_properties(0)
        stage.keep(
            "device",
            smi(*fields)
            | {"compute capability": f"{about.major}.{about.minor}", "CUDA": torch.version.cuda}
            | {"multiprocessors": about.multi_processor_count, "bytes": about.total_memory}
            | {"cuDNN": torch.backends.cudnn.version()},
        )
    numbers = torch.ones(whole, device=device, dtype=torch.bfloat16)
    stage.keep("memory_bytes_per_s", numbers.nbytes / quickest(numbers.sum))
    other = torch.empty_like(numbers)
    stage.keep("copy_bytes_per_s", 2 * numbers.nbytes / quickest(lambda: other.copy_(numbers)))
    side = 64 if stage.stand_in else 8192
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    stage.keep("bf16_flop_per_s", 2 * side**3 / quickest(lambda: a @ b))
    one, launches = torch.zeros(1, device=device), 1000

    def launch() -> None:
        for _ in range(launches):
            one.add_(1.0)

    stage.keep("launch_s", quickest(launch) / launches)


def quickest(work: Callable[[], object]) -> float:
    """Seconds of a call, the least of several after a first one."""
    work()
    return min(seconds(work) for _ in range(10))


def tests(stage: Stage) -> str | None:
    """The tests that are marked gpu, from the files that have such."""
    try:
        import hypothesis  # noqa: F401 - tests/conftest.py needs it
        import pytest
    except ModuleNotFoundError as error:
        return f"{error}; install pytest and hypothesis to run the tests."
    outcomes: dict[str, str] = {}

    class Outcomes:
        """Told by pytest of each test's phases."""

        def pytest_runtest_logreport(self, report: Any) -> None:
            """Keep how a test went: of its phases the one that did not pass, if any."""
            if outcomes.get(report.nodeid, "passed") == "passed":
                outcomes[report.nodeid] = report.outcome
                if report.when == "teardown" or report.outcome != "passed":
                    stage.keep("tests", outcomes)

    files = [
        str(path)
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if re.search(r"\bmark\.gpu\b", path.read_text(encoding="utf-8"))
    ]
    # The project's own options name plugins that need not be here.
    options = [
        *("-o", "addopts=", "-o", "minversion=7.0"),
        "--import-mode=importlib",
        "-m",
        "gpu",
        "-ra",
        "-p",
        "no:cacheprovider",
    ]
    code = int(pytest.main([*options, *files], plugins=[Outcomes()]))
    failed = [name for name, outcome in outcomes.items() if outcome == "failed"]
    if failed or code:
        stage.errors.append(f"pytest ended with {code}; failed: {', '.join(failed) or 'no test'}")
    return None


@dataclass(frozen=True, slots=True)
class Case:
    """What attention is asked; ``groups`` heads read one kv head.

    A "step" is one token over all windows, a "query" 33 of them, and "texts" see themselves.
    """

    kind: str
    dim: int
    groups: int
    dtype: str
    softcap: float | None


def parity(stage: Stage) -> None:
    """Attention over segments on the device, beside float64 on the same numbers."""
    dims: tuple[int, ...] = (64,) if stage.stand_in else (64, 128, 256)
    groups: tuple[int, ...] = (1, 4) if stage.stand_in else (1, 4, 8)
    rows: list[dict[str, Any]] = []
    product = itertools.product(("step", "query", "texts"), dims, groups, LIMITS, (None, 30.0))
    for case in itertools.starmap(Case, product):
        # Soft caps compile something for each size: one size is enough to know whether they serve.
        if case.softcap is not None and (case.dim, case.groups) != (dims[len(dims) // 2], 4):
            continue
        name, limits = str(case).removeprefix("Case"), LIMITS[case.dtype]
        with stage.trying(name):
            row = compared(stage.device, 300 if stage.stand_in else 4096, case)
            rows.append(asdict(case) | row)
            stage.keep("rows", rows)
            if not (row["output"] <= limits[0] and row["lse"] <= limits[1]):
                stage.errors.append(f"{name} lies beyond {limits}")


def compared(device: torch.device, most: int, case: Case) -> dict[str, Any]:
    """The largest errors of output, by its largest number, and log-sum-exps; what answered.

    Windows are of 1 to ``most`` tokens.
    """
    dim, texts = case.dim, case.kind == "texts"
    generator = torch.Generator().manual_seed(dim * case.groups)
    drawn = (most ** torch.rand(14, generator=generator)).long().tolist()
    lengths = [1, *drawn, most, most]
    kv_heads, tokens = 2, {"step": 1, "query": 33, "texts": sum(lengths)}[case.kind]
    heat, scale = 1.0 if texts else 0.9, dim**-0.5

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(device, getattr(torch, case.dtype))

    query = draw(tokens, kv_heads * case.groups, dim)
    parts = [(draw(1, kv_heads, n, dim), draw(1, kv_heads, n, dim)) for n in lengths]
    # Texts see themselves alone; windows are parts of one segment that every token reads.
    places = torch.arange(tokens).split(lengths) if texts else [torch.arange(tokens)] * len(parts)
    whole = Segment("context", 0, most - 1, starts=[0] * len(parts), layers={0: parts})
    whole.temperature = heat
    made = [whole]
    if texts:
        made = [
            Segment("query", 0, len(own) - 1, own, seen="causal", layers={0: [part]})
            for own, part in zip(places, parts, strict=True)
        ]
    segments = Segments(made, tokens, static=True)
    rows = Rows(torch.arange(most, most + tokens))
    asked = Queries(0, query, rows, scale, case.softcap)
    with torch.inference_mode():
        segments.attend(asked, per_part=True)
        with profiling(activities=activities(device)) as profiled:
            ((_, _, by_text, by_window),) = segments.attend(asked, per_part=True)
        output, _ = attention(Reading(rows, [segments]), asked)
    answered = {row.key for row in profiled.key_averages()}
    # The same in float64, window by window, and their merge.
    outputs, lses = [], []
    for own, part in zip(places, parts, strict=True):
        key, value = (one.double() for one in part)
        request = backends.AttentionRequest(
            [(key, value)], scale, case.softcap, heat, own, causal=texts
        )
        found = backends.reference([request], query.double())
        outputs.append(found.output)
        lses.append(found.lse)
    exact = torch.cat(outputs)
    if not texts:
        shares = torch.softmax(torch.stack(lses), dim=0).unsqueeze(-1)
        exact = (torch.stack(outputs) * shares).sum(dim=0)
    lse = by_text
    if not texts:  # the windows are parts of the one segment
        lse = torch.cat([one for one in by_window or () if one is not None]).flatten(0, 1)
    return {
        "output": ((output.double() - exact).abs().max() / exact.abs().max()).item(),
        "lse": (lse.double() - torch.cat(lses)).abs().max().item(),
        "backend": backends_of(answered),
    }


BACKENDS = {
    "varlen": r"varlen",
    "fused": r"_scaled_dot_product_\w+",
    "native": re.escape(native.NAME),
}
"""What a profiler shows of each; on a device "native" is only what the others are called by."""


def backends_of(names: set[str]) -> str:
    """Which backends answered, by what a profiler saw."""
    found = [name for name, words in BACKENDS.items() if any(re.search(words, n) for n in names)]
    if "varlen" in found:
        found = [name for name in found if name != "native"]
    return " + ".join(found) or "reference"


def table(stage: Stage) -> None:
    """What matters most, in seven minutes."""
    from benchmarks.gpu_table import table as lines  # which needs this module

    lines(stage)


def memory(stage: Stage) -> None:
    """Peaks of one prefill and two tokens, without a cache."""
    rows: list[dict[str, Any]] = []
    for context, window in ((32_768, 256), (131_072, 1024)):
        plan = SMALL if stage.stand_in else replace(BIG, context=context, window=window)
        lm = wrapped(plan)
        asked = BenchTexts(lm, plan.context, plan.window).workload()
        for name, answer in ((SEQUENTIAL, plain(lm.model)), (COLD, windowed(lm))):
            with stage.trying(f"{name}, {context:,} tokens"):
                answer(asked.shortened(1), 3, Clock())
                peak = peak_bytes(partial(answer, asked, 2, Clock()), plan.device)
                sizes = {"weights": weight_bytes(lm.model), "peak": peak}
                sizes["kv"] = len(asked.prompt) * token_bytes(lm.model)
                rows.append({"context": plan.context, "way": name, **sizes})
                stage.keep("rows", rows)


class Profiled(Clock):
    """Profiles the steps behind the first ``skipped`` tokens of an answer, so many as asked for."""

    def __init__(self, profiler: profiling, skipped: int, steps: int) -> None:
        super().__init__()
        self._profiler, self._first, self._last = profiler, skipped, skipped + steps

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Called by transformers after every token."""
        done = super().__call__(input_ids, scores, **kwargs)
        if len(self.stamps) == self._first:
            self._profiler.start()
        elif len(self.stamps) == self._last:
            self._profiler.stop()
        return done


KINDS = {
    "attention": r"attend|attention|flash|fmha|varlen",
    "linear layers": r"gemm|gemv|cublas|cutlass|nvjet|xmma|splitk|::(add)?mm\b|::linear",
    "copies": r"memcpy|memset|copy|cat(array|_)|::cat\b|::fill",
}
"""By the names of kernels, in the order in which they are looked for; all else is "other"."""


def profile(stage: Stage) -> None:
    """One decoded token of an answer over warm windows."""
    plan = SMALL if stage.stand_in else replace(BIG, context=32_768)
    steps, tokens = 4, 16
    profiled, clock = profiling(activities=activities(stage.device)), Clock()
    lm = wrapped(plan)
    asked = BenchTexts(lm, plan.context, plan.window).workload()
    with warm_cache(plan, lm) as cache:
        answer = windowed(lm.with_cache(cache))
        for one in (Clock(), clock, Profiled(profiled, tokens // 2, steps)):
            answer(asked, tokens, one)
    pairs = itertools.pairwise(clock.stamps)
    stage.keep("token_s", statistics.median(after - before for before, after in pairs))
    for name, value in summed(list(profiled.key_averages()), steps, stage.device.type).items():
        stage.keep(name, value)


def activities(device: torch.device) -> list[ProfilerActivity]:
    """What a profiler looks at."""
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]


def summed(rows: list[Any], tokens: int, device: str) -> dict[str, Any]:
    """What a token's kernels took, by kind and by name, and what the host did for them.

    On a CPU operators stand for kernels.
    """
    field = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    # On a device an annotation is no kernel; on a CPU one stands for the kernel in C.
    own = [row for row in rows if device == "cpu" or not row.is_user_annotation]
    kernels = [
        (row.key, row.count / tokens, getattr(row, field) / tokens / 1e6)
        for row in own
        if row.device_type.name == device.upper()
    ]
    kinds: dict[str, float] = defaultdict(float)
    for name, _, took in kernels:
        kind = (kind for kind, words in KINDS.items() if re.search(words, name.lower()))
        kinds[next(kind, "other")] += took
    counted: dict[str, str] = {
        "launches": r"(cuda|cu)(Launch|GraphLaunch)",
        "waits": r"cuda(Stream|Event)Synchronize",
        "copies_to_host": r"Memcpy DtoH",
        "copies_to_device": r"Memcpy HtoD",
    }
    kernels.sort(key=lambda kernel: -kernel[2])
    return {
        "busy_s": sum(kinds.values()),
        "kinds_s": dict(kinds),
        "counts": {
            name: sum(row.count for row in rows if re.match(words, row.key)) / tokens
            for name, words in counted.items()
        },
        "top": [
            {"name": name[:120], "calls": calls, "seconds": took}
            for name, calls, took in kernels[:15]
        ],
    }


RUN: dict[str, Callable[[Stage], str | None]] = {
    "table": table,
    "environment": environment,
    "tests": tests,
    "parity": parity,
    "memory": memory,
    "profile": profile,
}


def main(path: Path) -> None:
    """Run the stage of a record."""
    stage = Stage(path)
    stage.end(RUN[path.stem](stage))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
