"""The other commands: passage cache, labels, calibration, demo, methods; where models go."""

from __future__ import annotations

import json
import re
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from rag_windows import APE, METHODS, Auto, MateICL, Profile, Sequential, WindowedLM
from rag_windows.calibration import Cost, Mean, ModelFingerprint, Setting
from rag_windows.calibration.profile import Figure
from rag_windows.methods import resolve
from tests.blackbox.cli.conftest import INSTRUCTION, QUESTION, Told, refused
from tests.blackbox.conftest import ROOT, Run
from tests.rag_windows import small


def told(run: Run, *args: str | Path) -> Any:
    """The JSON that a command prints."""
    result = run(*args, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_what_was_encoded_and_what_was_cached_are_told_apart(
    run: Run, model: str, docs: Path, tmp_path: Path
) -> None:
    where = ("--docs", docs, "--model", model, "--cache-dir", tmp_path, "--max-new-tokens", "2")
    lines = [
        run("ask", question, *where, *more).stdout.splitlines()[-1]
        for question in (QUESTION, QUESTION)
        for more in (("--top-k", "1"), ())
    ]
    counts = [re.search(r"windows: (.*), ready after ", line) for line in lines]
    first, more, again, all_again = (found[1] if found else "" for found in counts)
    assert first == "1 encoded"
    assert re.fullmatch(r"[1-9]\d* encoded, 1 read from the cache", more)
    assert again == "1 read from the cache"
    assert re.fullmatch(r"[2-9]\d* read from the cache", all_again)


def test_a_second_question_finds_the_first_ones_windows(
    ask: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = tmp_path / "default"
    monkeypatch.setenv("RAG_WINDOWS_CACHE_DIR", str(default))
    ask("--no-cache")
    assert not default.exists()
    for where in (), ("--cache-dir", tmp_path / "windows"):
        assert ask(*where)["usage"]["cached_tokens"] == 0
        assert ask(*where)["usage"]["cached_tokens"] > 50
        assert ask("--no-cache", *where)["usage"]["cached_tokens"] == 0
    taken = tmp_path / "file"
    taken.write_text("no folder")
    monkeypatch.setenv("RAG_WINDOWS_CACHE_DIR", str(taken))
    assert "not cached" in ask()["stderr"]


@pytest.mark.slow
def test_warm_stats_verify_prune_invalidate_clear(
    run: Run, ask: Told, model: str, docs: Path, tmp_path: Path
) -> None:
    place = ("--cache-dir", tmp_path / "windows")
    warm = ("cache", "warm", "--docs", "docs", "--model", model, *place)
    warmed = told(run, *warm)
    assert warmed["encoded"] == warmed["passages"] > 3
    again = told(run, *warm)
    assert (again["encoded"], again["present"]) == (0, warmed["encoded"])
    assert ask(*place)["usage"]["cached_tokens"] > 50
    held = told(run, "cache", "stats", *place)
    assert held["entries"] == warmed["encoded"] + 1
    assert held["folder"] == str(tmp_path / "windows")
    assert 0 < held["bytes"] < held["limit_bytes"]
    verified = told(run, "cache", "verify", *place)
    assert verified == {"checked": held["entries"], "quarantined": 0}
    assert told(run, "cache", "prune", *place)["removed"] == 0
    assert told(run, "cache", "invalidate", "lamps", *place) == {"removed": 1}
    pruned = told(run, "cache", "prune", "--disk", str(held["bytes"] // 2), *place)
    assert 0 < pruned["entries"] < held["entries"]
    cleared = told(run, "cache", "clear", *place)
    assert cleared == {"removed": pruned["entries"], "indexes": 1}
    assert told(run, "cache", "stats", *place)["entries"] == 0
    words = {"stats": "windows, ", "verify": "checked", "prune": "removed", "clear": "removed"}
    for command, word in words.items():
        assert word in run("cache", command, *place).stdout
    assert "windows encoded" in run(*warm).stdout
    damaged = max(tmp_path.rglob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    assert told(run, "cache", "verify", *place)["quarantined"] == 1


@pytest.mark.slow
def test_the_commands_reach_a_store_that_machines_share(
    run: Run, ask: Told, model: str, docs: Path, tmp_path: Path
) -> None:
    url = f"file://{tmp_path / 'store'}"
    place = ("--shared", url)
    first, second, third = (("--cache-dir", tmp_path / name, *place) for name in "abc")
    warm = ("cache", "warm", "--docs", "docs", "--model", model)
    warmed = told(run, *warm, *first)
    assert told(run, *warm, "--shared-wait", "20", *second)["present"] == warmed["encoded"]
    patient = ("--shared-wait", "20", *third)
    assert ask(*patient)["usage"]["cached_tokens"] > 50
    held = told(run, "cache", "stats", *place)
    assert (held["shared"], held["entries"]) == (url, warmed["encoded"] + 1)
    assert told(run, "cache", "verify", *place) == {"checked": held["entries"], "quarantined": 0}
    assert told(run, "cache", "invalidate", "lamps", *place) == {"removed": 1}
    assert told(run, "cache", "prune", *place)["removed"] == 0
    # What another machine still has on disk is written to the store again.
    assert told(run, *warm, *first)["encoded"] == 0
    assert told(run, "cache", "stats", *place)["entries"] == held["entries"]
    pruned = told(run, "cache", "prune", "--older-than", "0", *place)
    assert pruned == {"removed": held["entries"], "shared": url, "entries": 0, "bytes": 0}
    told(run, *warm, *first)
    cleared = {"removed": warmed["encoded"], "indexes": 0}
    assert told(run, "cache", "clear", *place) == cleared
    assert "0 windows" in run("cache", "stats", *place).stdout
    for wrong, word in (
        (("stats", "--shared", url, "--cache-dir", tmp_path), "exclude"),
        (("prune", "--shared", url, "--disk", "1GiB"), "--older-than"),
        (("prune", "--older-than", "3"), "--shared"),
        (("stats", "--shared", "nonsense://x"), "fsspec"),
    ):
        refused = run("cache", *wrong)
        assert refused.exit_code == 2
        assert word in refused.stderr
        assert len(refused.stderr.splitlines()) == 1


SHOWN = [("good film", "up"), ("bad film", "down"), ("fine book", "up"), ("dull book", "down")]


def test_labels_and_probabilities_are_those_of_the_model(
    run: Run, tmp_path: Path, model: str
) -> None:
    demos = tmp_path / "demos.jsonl"
    rows = [json.dumps({"text": text, "label": label}) for text, label in SHOWN]
    demos.write_text("\n".join([*rows[:2], "", *rows[2:]]), encoding="utf-8")
    given = ("classify", "a film", "a [red]book\x07", "--demos", demos, "--model", model)
    labels = ("--label", "up", "--label", "down", "--label", "so", "--windows", "2")
    answer = told(run, *given, *labels)
    assert (answer["demonstrations"], answer["windows"], answer["method"]) == (4, 2, "ape")
    lm = WindowedLM.from_pretrained(model)
    texts = ["a film", "a [red]book\x07"]
    expected = lm.classify(texts, SHOWN, ["up", "down", "so"], windows=2)
    for row, one in zip(answer["texts"], expected, strict=True):
        assert row.keys() == {"text", "label", "probabilities", "scores"}
        assert (row["text"], row["label"]) == (one.text, one.label)
        assert row["probabilities"] == pytest.approx(dict(one.probabilities), abs=1e-4)
        assert row["scores"] == pytest.approx(dict(one.scores), abs=1e-3)
    second = told(run, *given, "--calibrate-with", "N/A")["texts"][1]
    shown = run(*given, "--calibrate-with", "N/A").stdout
    (line,) = (one for one in shown.splitlines() if "a [red]book\\x07" in one)
    share = f"{second['probabilities'][second['label']]:.0%}"
    assert line.split()[:2] == [second["label"], share]
    assert "4 demonstrations in 1 window," in shown


FAST = ("--grid", "mateicl", "--max-new-tokens", "4")


@pytest.fixture
def examples(docs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Questions over ./docs, and two settings instead of eleven, which are tested elsewhere."""
    grid = "rag_windows.calibration.compare.default_grid"
    monkeypatch.setattr(grid, lambda _: (MateICL(2.0), MateICL(4.0)))
    path = docs.parent / "examples.jsonl"
    rows: list[dict[str, Any]] = [
        {"query": f"Who built the bridge at Halden, part {number}?", "kind": "single-hop"}
        for number in range(7)
    ]
    rows.append({"query": "Lamps?", "passages": ["Lamps.", "Lights."], "answer": "lights"})
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.slow
def test_a_profile_is_made_shown_drawn_and_used(
    run: Run, ask: Told, examples: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    given = ("compare", "--questions", examples, "--docs", "docs", "--model", model, *FAST)
    result = run(*given, "--out", "profile.json", "--plot", "heat.png")
    assert (result.exit_code, result.stderr) == (0, "")
    profile = Profile.load("profile.json")
    assert (profile.examples, profile.base, profile.criteria) == (8, Auto(), ("divergence",))
    assert {MateICL(), MateICL(2.0), MateICL(4.0)} <= {one.method for one in profile.settings}
    assert Path("heat.png").read_bytes().startswith(b"\x89PNG")
    shown = " ".join(result.stdout.split())
    assert "\nmateicl:schedule=2.0 " in result.stdout  # whole, however wide the figures are
    for text in ("take this", profile.verdict[:40], "--profile "):
        assert text in shown
    asked = ask("--profile", "profile.json")
    assert asked["method"] == profile.method.name
    assert "made for" not in asked["stderr"]
    assert ask("--profile", "profile.json", "--method", "pcw")["method"] == "pcw"
    other = ask("--profile", "profile.json", "--model", "tiny-reader")
    assert "Note: The profile was made for" in other["stderr"]
    as_json = told(run, *given, "--by", "agreement", "--limit", "8", "--out", "profile.json")
    assert as_json == json.loads(Path("profile.json").read_text())
    question = ("ask", QUESTION, "--docs", "docs", "--model", model, "--profile")
    assert "No such file" in refused(run, *question, "none.json")
    numbers = refused(run, *question, "profile.json", "--rag-scale", "0.5")
    assert "--profile sets the method's numbers" in numbers


LONG = "ensemble:weights=entropy,pooling=minimum,beta=0.25"


def measured(interrupted: bool = False) -> Profile:
    """A comparison's result with a long name and wide figures, made by hand."""
    figures: dict[Figure, Mean] = {
        "contains": Mean(10 / 12, 7 / 12, 1.0),
        "log-probability": Mean(-12.345, -23.456, -1.2345),
    }
    cost = Cost(12.345, 0.12345, 1234)
    methods = [resolve(LONG), Auto(), Sequential()]
    return Profile(
        method=methods[0],
        best=methods[0],
        base=methods[2],
        verdict="Take it.",
        criteria=("contains", "log-probability"),
        settings=tuple(Setting(one, figures, cost=cost) for one in methods),
        held_out=(),
        examples=9,
        folds=4,
        seed=0,
        left_out=(),
        model=ModelFingerprint("some/model", "ab" * 32),
        interrupted=interrupted,
    )


COMPARE = ("compare", "--model", "tiny-reader", "--no-cache")


@pytest.mark.parametrize("width", [None, 80, 40])
def test_names_of_methods_are_whole_at_any_width(
    run: Run, monkeypatch: pytest.MonkeyPatch, width: int | None
) -> None:
    monkeypatch.setattr(WindowedLM, "compare", lambda *_, **__: measured())
    if width is None:
        monkeypatch.delenv("COLUMNS", raising=False)
    else:
        monkeypatch.setenv("COLUMNS", str(width))
    lines = run(*COMPARE).stdout.splitlines()
    long, auto, one_prompt = (
        next(line for line in lines if line.startswith(name))
        for name in (LONG, "auto", "sequential")
    )
    figures = r"83\.3% \(58\.3 to 100\) +-12\.3 \(-23\.5 to -1\.23\) +12\.3 s +0\.123 s +1,234"
    if width is None:
        for line, mark in ((long, "take this"), (auto, ""), (one_prompt, "the baseline")):
            assert re.fullmatch(rf"\S+ +{figures} *{mark} *", line)
        assert len(lines) == 6
    else:
        assert (long, auto) == (f"{LONG}  (take this)", "auto")
        assert one_prompt == "sequential  (the baseline)"
        assert all(re.fullmatch(figures, lines[place].strip()) for place in (2, 4, 6))
        assert max(map(len, lines[:7])) <= 80


@pytest.mark.parametrize("out", [(), ("--out", "profile.json")])
@pytest.mark.usefixtures("docs")
def test_ctrl_c_leaves_what_was_compared(
    run: Run, monkeypatch: pytest.MonkeyPatch, out: tuple[str, ...]
) -> None:
    monkeypatch.setattr(WindowedLM, "compare", lambda *_, **__: measured(interrupted=True))
    stopped = run(*COMPARE, *out)
    assert (stopped.exit_code, "Take it." in stopped.stdout) == (130, True)
    (line,) = stopped.stderr.splitlines()
    kept = " The profile is in profile.json." if out else ""
    assert line == f"Stopped. 9 questions were asked.{kept}"
    assert Path("profile.json").exists() == bool(out)

    def interrupt(*_: Any, **__: Any) -> Profile:
        raise KeyboardInterrupt

    monkeypatch.setattr(WindowedLM, "compare", interrupt)
    early = run(*COMPARE, "--out", "other.json")
    assert (early.exit_code, early.stdout) == (130, "")
    (line,) = early.stderr.splitlines()
    assert line.startswith("Stopped before there was a profile, for which every method has")
    assert not Path("other.json").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("examples")
def test_the_sample_questions_are_the_default(run: Run) -> None:
    profile = told(run, "compare", "--limit", "8", "--device", "cpu", "--no-cache", *FAST)
    assert (profile["examples"], profile["criteria"][0]) == (8, "contains")


@pytest.mark.usefixtures("examples")
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--docs", "docs"], "questions about the documents of --docs"),
        (["--questions", "examples.jsonl"], "Question 1 of 'examples.jsonl' has no passages"),
        (["--questions", "none.jsonl"], "can't be read"),
        (
            ["--out", "no/profile.json"],
            "--out 'no/profile.json' can't be written: its folder does not exist",
        ),
        (
            ["--plot", "docs"],
            "--plot 'docs' can't be written: its folder does not exist, or it is a folder",
        ),
    ],
)
def test_errors_come_before_the_model(run: Run, args: list[str], message: str) -> None:
    assert message in refused(run, "compare", "--model", "./no-such-model", *args)


@pytest.mark.slow
def test_the_demo_answers_every_question_both_ways(run: Run) -> None:
    rows = told(run, "demo", "--device", "cpu")
    assert [(row["passages"], row["method"]) for row in rows] == [
        (passages, method) for passages in (8, 16, 32) for method in ("sequential", "ape")
    ]
    assert all(row["right"] and row["first_token_s"] > 0 for row in rows)
    assert all(row["answer"] == row["expected"] for row in rows)
    assert rows[0].keys() == {
        "model", "question", "passages", "method", "answer", "expected", "first_token_s", "right",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--device", "cpu"]])
def test_the_demo_takes_another_model(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    # Another folder's name: such a model gets the default instruction.
    asked: list[Any] = []
    folder = tmp_path / "copied"
    shutil.copytree(ROOT / "rag_windows" / "models" / "tiny-reader", folder)
    generate = WindowedLM.generate

    def seen(self: WindowedLM, *args: Any, **options: Any) -> Any:
        asked.append(options["prefix"])
        return generate(self, *args, **options)

    monkeypatch.setattr(WindowedLM, "generate", seen)
    rows = told(run, "demo", "--model", str(folder), *more)
    assert {row["model"] for row in rows} == {str(folder)}
    assert (len(rows), set(asked)) == (6, {INSTRUCTION})


def test_methods_are_listed(run: Run) -> None:
    rows = told(run, "methods")
    assert [row["name"] for row in rows] == list(METHODS)
    lines = run("methods").stdout.splitlines()
    for row in rows:
        kind = METHODS[row["name"]]
        assert (row["formula"], row["paper"]) == (kind.formula, kind.paper)
        (number,) = (i for i, one in enumerate(lines) if one.split()[0] == row["name"])
        assert kind.formula in lines[number]
        assert kind.paper == "-" or kind.paper in lines[number]
        assert lines[number + 1].strip() == row["summary"]


def test_what_is_asked_of_a_model_reaches_its_loading(
    run: Run, small_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = small.lm()  # made while loading is what it is
    loaded: list[dict[str, Any]] = []

    def load(name: Any, **settings: Any) -> WindowedLM:
        loaded.append({"name": name, **settings})
        return lm

    monkeypatch.setattr(WindowedLM, "from_pretrained", load)
    shown = run(
        *("ask", "Zelwick?", "--model", small_folder, "--device", "cpu", "--no-cache"),
        *(
            "--dtype",
            "bfloat16",
            "--dequantize",
            "--quantization",
            "int8",
            "--rag-scale",
            "0.5",
            "--top-k",
            "1",
            "--max-new-tokens",
            "1",
        ),
    )
    assert shown.exit_code == 0
    assert loaded[0] == {
        "name": str(small_folder),
        "dtype": "bfloat16",
        "dequantize": True,
        "quantization": "int8",
        "device_map": "cpu",
        "method": APE(scale=0.5),
        "max_window_tokens": None,
        "profile": None,
        "cache": None,
        "template_kwargs": {},
    }


@pytest.mark.parametrize("proxy", [{}, {"https": "http://proxy.invalid"}])
def test_without_a_way_to_the_hub_only_the_cache_is_used(
    run: Run, monkeypatch: pytest.MonkeyPatch, proxy: dict[str, str]
) -> None:
    asked: list[Any] = []

    def refuse(address: Any, timeout: float) -> Any:
        asked.append(address)
        raise OSError("unreachable")

    def load(*args: Any, **settings: Any) -> WindowedLM:
        raise RuntimeError(f"offline: {constants.is_offline_mode()}")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid:8443")
    monkeypatch.setattr("rag_windows.cli.model_loading.getproxies", lambda: proxy)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(WindowedLM, "from_pretrained", load)
    result = run("ask", "Zelwick?", "--model", "no/such-model", "--no-cache")
    assert str(result.exception) == f"offline: {not proxy}"
    assert asked == ([] if proxy else [("hub.invalid", 8443)])


BENCH = ("--rounds", "1", "--new-tokens", "2", "--dtype", "float32", "--no-memory")


def test_a_model_of_ones_own_is_timed(run: Run, small_folder: Path) -> None:
    ways = ("--way", "transformers", "--way", "windows, cold", "--window", "16")
    timed = run("bench", "--model", small_folder, "--context", "64", *BENCH, *ways)
    assert timed.exit_code == 0, timed.stderr
    assert str(small_folder) in timed.stdout
    assert "| windows, cold |" in timed.stdout
    long = ("bench", "--model", small_folder, "--context", "1024")
    assert "1024 positions" in refused(run, *long)
