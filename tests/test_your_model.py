"""The table of memory in docs/your_model.md, worked out again from its own columns."""

from __future__ import annotations

import re

from tests.test_repository import ROOT

ROW = re.compile(
    r"^\| [\w.-]+ \| [\d.]+ GiB \| (\d+) x (\d+) x (\d+) \| (\d+) KiB \| ([\d.]+) GiB \|$",
    flags=re.MULTILINE,
)
PASSAGES, LENGTH, BFLOAT16 = 64, 256, 2


def test_keys_and_values_take_what_the_table_says() -> None:
    rows = ROW.findall((ROOT / "docs" / "your_model.md").read_text(encoding="utf-8"))
    assert len(rows) == 7
    for layers, heads, size, token, passages in rows:
        number = 2 * int(layers) * int(heads) * int(size) * BFLOAT16
        assert number == int(token) * 1024
        assert f"{number * PASSAGES * LENGTH / 2**30:.2f}" == passages
