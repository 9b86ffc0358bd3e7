"""References shared by every parity test."""

from __future__ import annotations

import pytest
from parity_run import References


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("parity"))
