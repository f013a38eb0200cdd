from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedConfig

from rag_windows import APE, WindowedLM
from rag_windows.calibration import Profile
from rag_windows.calibration.method_json import label, method_to_json
from rag_windows.calibration.stamp import ModelStamp
from rag_windows.errors import ProfileError
from rag_windows.methods import DeepThinking, MateICL
from tests.rag_windows import small
from tests.rag_windows.calibration.profiles import GUARD, profile


def test_a_profile_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    for made in (profile(), profile(guard=GUARD)):
        made.save(path)
        assert Profile.load(path) == made == Profile.of(str(path))
    assert [one.name for one in tmp_path.iterdir()] == ["profile.json"]
    data = json.loads(path.read_text())
    assert data["method"] == {"name": "ape", "temperature": 0.95, "scale": 0.949, "form": "as used"}
    assert (data["version"], data["model"]["name"]) == (1, "some/model")


def damaged(**changes: Any) -> dict[str, Any]:
    from rag_windows.calibration.profile_json import dump

    data: dict[str, Any] = json.loads(dump(profile(guard=GUARD)))
    return {**data, **changes}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "is no rag-windows calibration profile"),
        (damaged(format="x"), "is no rag-windows calibration profile"),
        (damaged(version=2), "version 2 and this rag-windows reads version 1; calibrate again"),
        (damaged(method={"name": "apex"}), "entry 'method': .*apex.* names no method of"),
        (damaged(method={"name": "ape", "scale": -1}), "entry 'method': APE scale must be"),
        (damaged(method={"name": "ape", "scale": "0.9"}), "entry 'method': APE scale must be"),
        (damaged(method={"name": "ape", "beta": 1}), "entry 'method': .*beta"),
        (damaged(best="ape"), "entry 'best': must be an object"),
        (damaged(beats_default=1), "entry 'beats_default': must be true or false"),
        (damaged(criteria=["beauty"]), r"entry 'criteria': \[0\] unknown figure 'beauty'"),
        (damaged(criteria=[]), "entry 'criteria': must name at least one"),
        (damaged(criteria=["metric"]), r"'settings': \[0\] lacks the figures \['metric'\]"),
        (damaged(examples=-1), "entry 'examples': must be a whole number"),
        (damaged(settings=[{}]), r"entry 'settings': \[0\] the entry 'method' is missing"),
        (damaged(held_out={}), "entry 'held_out': must be a list"),
        (damaged(model={"name": "x"}), "entry 'model': the entry 'fingerprint' is missing"),
        (damaged(guard={"threshold": 2}), "entry 'guard': must be null or an object"),
    ],
)
def test_a_damaged_profile_is_told(tmp_path: Path, data: Any, message: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ProfileError, match=message) as error:
        Profile.load(path)
    assert str(error.value).startswith(f"The profile {str(path)!r} can't be used: ")


def test_numbers_must_be_finite(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile().save(path)
    path.write_text(path.read_text().replace('"low": 0.', '"low": NaN, "was": 0.', 1))
    with pytest.raises(ProfileError, match="'NaN' is no number that JSON has"):
        Profile.load(path)


def test_a_file_that_is_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"can't be read.*rag-windows calibrate"):
        Profile.load(tmp_path / "none.json")
    (tmp_path / "torn.json").write_text('{"format": ')
    with pytest.raises(ProfileError, match="not valid JSON"):
        Profile.load(tmp_path / "torn.json")
    with pytest.raises(ProfileError, match="can't be written"):
        profile().save(tmp_path / "no" / "folder.json")
    with pytest.raises(ProfileError, match="must be a Profile or the path of one, not int"):
        Profile.of(3)  # type: ignore[arg-type] # that is the point


def test_methods_that_can_not_be_read_back_are_refused() -> None:
    method = DeepThinking(steps=2, reader=APE(0.8, 0.7))
    assert method_to_json(method)["reader"]["name"] == "ape"
    with pytest.raises(ProfileError, match="numbers and text as parameters"):
        method_to_json(MateICL(lambda windows: 2.0))


def test_labels_show_what_matters() -> None:
    assert label(APE()) == "ape(temperature=0.9, scale=0.9)"
    assert label(MateICL()) == "mateicl(schedule='sqrt')"
    assert label(APE(0.5, 1.0, "fixed ratio")).endswith("scale=1, form='fixed ratio')")
    assert "reader=ape(temperature=0.9, scale=0.9)" in label(DeepThinking(reader=APE()))


def test_rows_are_found_and_ranked() -> None:
    made = profile()
    assert made.ranked()[0].method == made.best
    assert made.setting(APE()).figures["agreement"].value == pytest.approx(0.69)
    with pytest.raises(ProfileError, match="no row of ape"):
        made.setting(APE(0.1, 0.1))


def stamped() -> Profile:
    import dataclasses

    return dataclasses.replace(profile(), model=ModelStamp.of(small.model()))


def test_a_model_takes_its_method_from_the_profile(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    stamped().save(path)
    lm = WindowedLM.from_pretrained(small.model(), tokenizer=small.tokenizer(), profile=path)
    assert lm.method == APE(0.95, 0.949)
    assert lm.profile == stamped()
    assert lm.with_cache(None).profile == stamped()
    explicit = WindowedLM.from_pretrained(
        small.model(), tokenizer=small.tokenizer(), profile=stamped(), method="pcw"
    )
    assert (explicit.method.name, explicit.profile) == ("pcw", stamped())
    plain = WindowedLM.from_pretrained(small.model(), tokenizer=small.tokenizer())
    assert (plain.method, plain.profile) == (APE(), None)


def test_another_model_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="made for 'LlamaForCausalLM' .* calibrate again") as told:
        WindowedLM.from_pretrained(small.model(1), tokenizer=small.tokenizer(), profile=stamped())
    assert len(told) == 1


def test_a_stamp_tells_weights_and_precisions_apart() -> None:
    import copy

    one = ModelStamp.of(small.model())
    assert ModelStamp.of(copy.deepcopy(small.model())) == one
    assert ModelStamp.of(small.model(1)).fingerprint != one.fingerprint
    assert ModelStamp.of(copy.deepcopy(small.model()).bfloat16()).fingerprint != one.fingerprint


def test_a_stamp_says_nothing_about_the_version_that_read_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = ModelStamp.of(small.model())
    module = sys.modules[PreTrainedConfig.__module__]
    monkeypatch.setattr(module, "__version__", "9.9.9")
    assert small.model().config.to_dict()["transformers_version"] == "9.9.9"
    assert ModelStamp.of(small.model()) == before
