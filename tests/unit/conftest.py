"""What most tests of the core begin with."""

from collections.abc import Iterator

import pytest

from tests.unit.core_host import Fixture, Host


@pytest.fixture
def core() -> Iterator[Fixture]:
    core = Fixture(Host())
    yield core
    core.host.check()
    core.host.close()
