"""The checks of a module on two ranks, all in one world."""

from __future__ import annotations

import pytest
from tiny import on_two_ranks


@pytest.fixture(scope="module")
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What each of the module's ``CHECKS`` has to complain of, by its name."""
    return on_two_ranks(request.module.CHECKS, tmp_path_factory.mktemp("ranks"))
