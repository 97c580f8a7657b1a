"""The engine without a connector, whose text is what all others have to say too."""

import pytest

from tests.vllm.engine import engine
from tests.vllm.stage import AT_ONCE, POOL, Run, prompts, speak


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """What vLLM alone says, and recomputes, when requests are preempted."""
    with engine(tmp_path_factory.mktemp("plain"), None, **POOL) as alone:
        run = speak(alone, prompts(AT_ONCE))
    assert run.counts.preemptions > 0
    return run
