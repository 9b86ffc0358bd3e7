"""Two processes of pytest run every test, and fail where either fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from in_halves import FIRST, TESTS, commands, run


def test_no_test_is_left_out_or_run_twice() -> None:
    first, second = commands(["-m", "long"])
    assert all((TESTS / name).is_dir() for name in FIRST)
    chosen = {Path(one) for one in first[5:]}
    assert chosen == {TESTS / name for name in FIRST}
    assert second[5:] == [str(TESTS), *(f"--ignore={folder}" for folder in sorted(chosen))]
    assert first[:5] == second[:5] == [sys.executable, "-m", "pytest", "-m", "long"]


@pytest.mark.parametrize("codes", [(0, 0), (1, 0), (0, 1), (-9, 5)])
def test_both_have_to_end_well(codes: tuple[int, int], capfd: pytest.CaptureFixture[str]) -> None:
    ends = {code: f"os._exit({code})" if code >= 0 else f"os.kill(os.getpid(), {-code})" for code in codes}
    scripts = [f"import os; print('half {half}', flush=True); {ends[code]}" for half, code in enumerate(codes)]
    first, second = ([sys.executable, "-c", script] for script in scripts)
    assert run(first, second) == (codes == (0, 0))
    assert sorted(capfd.readouterr().out.split("\n")) == ["", "half 0", "half 1"]
