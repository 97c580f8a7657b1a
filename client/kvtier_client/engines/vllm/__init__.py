"""The vLLM connector: preempted requests come back from kvtierd instead of being recomputed.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvtierConnector",
        "kv_connector_module_path": "kvtier_client.engines.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute"}'

The life of a preempted request: `scheduler_side.py` plans its save in the step that preempts it;
`worker_side.py` copies its blocks into the arena before anybody overwrites them, one rank and
KV-cache group each (`paged.py` knows where they lie); the scheduler's side holds them for the
request and offers them when it is resumed; the workers load them while other requests run.
`keys.py` names blocks by content, `fingerprint.py` separates what must never be mixed, `link.py`
bounds every wait for the daemon. Only `connector.py` and `metrics.py` import vLLM.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier_client.engines.vllm.connector import KvtierConnector

__all__ = ["KvtierConnector"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvtier_client.engines.vllm.connector import KvtierConnector

    return KvtierConnector
