"""The command that fits heads and writes them into a profile."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from rag_windows import cli
from rag_windows.calibration import Profile
from rag_windows.errors import DataError, InputError
from rag_windows_eval.heads import fit
from rag_windows_eval.run import RunFolder


def fit_again(folder: Path, profile: str, out: Path, method: str | None, *, as_json: bool) -> None:
    """Fit, write the profile, and show what the weights gave on unseen questions."""
    run, chosen = RunFolder.open(folder), Profile.load(profile)
    if (there := run.manifest.settings["model"]["sha256"]) != chosen.model.fingerprint:
        raise InputError(
            f"The run in {folder} has another model ({there[:12]}) than the profile "
            f"({chosen.model.fingerprint[:12]}). Compare with the model of the run."
        )
    names = [one for one, records in run.records.items() if any(r.heads for r in records.values())]
    if (method is not None and method not in names) or not names:
        known = f"Those that have are {', '.join(names)}. " if names else ""
        raise DataError(
            f"No answer of {method or 'the run'} says what each head looked at. {known}Run "
            "`rag-windows eval citations --heads` with a method that reads all passages together, "
            "such as ape."
        )
    records = [*run.records[method or names[0]].values()]
    layers = max(one.layers for one in records)
    with cli.progress("Fitting"):
        fitted = fit(records, layers)
    heads = tuple(tuple(round(float(one), 6) for one in row) for row in fitted.weights)
    replace(chosen, heads=heads).save(out)
    figures = {name: asdict(mean) for name, mean in fitted.lds.items()}
    if as_json:
        cli.write_json({"questions": fitted.questions, "lds": figures, "profile": str(out)})
        return
    table = cli.plain_table("citations by", "LDS on unseen questions")
    for name, mean in fitted.lds.items():
        table.add_row(name, f"{mean.value:.2f} ({mean.low:.2f} to {mean.high:.2f})")
    cli.console().print(table)
    cli.show(f"{fitted.questions} answers; wrote {out}. Use it: --profile {out}", "dim")
