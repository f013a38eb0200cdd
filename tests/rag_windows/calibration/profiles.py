"""A profile made by hand."""

from __future__ import annotations

from rag_windows import APE, Method, Profile, calibration


def mean(value: float) -> calibration.Mean:
    return calibration.Mean(value, value - 0.1, value + 0.1)


def setting(method: Method, divergence: float, *, fine: bool = False) -> calibration.Setting:
    return calibration.Setting(
        method, {"divergence": mean(divergence), "agreement": mean(1 - divergence)}, fine
    )


def profile() -> Profile:
    settings = [
        setting(APE(T, S), 0.3 + abs(T - S) + (1 - T) / 10)
        for T in (0.5, 0.9, 1.0)
        for S in (0.5, 0.9, 1.0)
    ]
    settings.append(setting(APE(0.95, 0.949), 0.2, fine=True))
    comparison = calibration.Comparison("divergence", mean(0.2), mean(0.3), mean(0.11))
    return Profile(
        method=APE(0.95, 0.949),
        best=APE(0.95, 0.949),
        default=APE(),
        beats_default=True,
        verdict="It does.",
        criteria=("divergence",),
        settings=tuple(settings),
        held_out=(comparison,),
        examples=12,
        folds=4,
        seed=3,
        left_out=("Example 1 was left out: it has no passages.",),
        model=calibration.ModelFingerprint("some/model", "ab" * 32),
    )
