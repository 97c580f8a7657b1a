"""The example for engine authors runs, and the page that explains it shows this very file."""

import subprocess
import sys
from pathlib import Path

from tests.support.fixtures import MakeDaemon, make_daemon  # noqa: F401

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "client" / "examples" / "engine_in_fifty_lines.py"


def test_the_example_swaps_out_and_in(make_daemon: MakeDaemon) -> None:  # noqa: F811
    daemon = make_daemon().start()
    subprocess.run([sys.executable, EXAMPLE, daemon.client_path], check=True, timeout=60)
    assert daemon.tenant()["held_blocks"] == 0


def test_the_page_shows_the_example() -> None:
    page = (ROOT / "docs" / "ENGINES.md").read_text()
    assert f"```python\n{EXAMPLE.read_text()}```" in page


def test_the_page_lists_every_counter_of_the_vllm_connector() -> None:
    from kvtier_client.engines.vllm.stats import COUNTERS

    page = (ROOT / "docs" / "ENGINES.md").read_text()
    assert all(f"| `{name}` |" in page for name in COUNTERS)
