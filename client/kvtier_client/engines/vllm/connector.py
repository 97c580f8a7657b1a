"""The class that vLLM knows: hands its calls to the scheduler's side or to a worker's side."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import vllm
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from kvtier_client import wire
from kvtier_client.client import Client
from kvtier_client.crew import Crew, usual_threads
from kvtier_client.engines.vllm.config import settings_of
from kvtier_client.engines.vllm.fingerprint import facts_of, layout_of
from kvtier_client.engines.vllm.groups import Group, Groups
from kvtier_client.engines.vllm.keys import KEY_BYTES
from kvtier_client.engines.vllm.link import Link
from kvtier_client.engines.vllm.messages import Orders, Report
from kvtier_client.engines.vllm.metrics import KvtierProm, KvtierStats
from kvtier_client.engines.vllm.paged import HostMemory, Stack, pages_of, record_bytes, stacks_of
from kvtier_client.engines.vllm.scheduler_side import SchedulerSide
from kvtier_client.engines.vllm.worker_side import Memory, Place, WorkerSide
from kvtier_client.errors import InvalidArgument

_encode = msgspec.msgpack.encode


@dataclass
class KvtierMetadata(Orders, KVConnectorMetadata):
    """Orders, as vLLM carries them to the workers."""


@dataclass
class KvtierWorkerMetadata(Report, KVConnectorWorkerMetadata):
    """A report, as vLLM carries it to the scheduler."""


@dataclass
class KvtierLayouts(KVConnectorHandshakeMetadata):
    """What a worker's blocks are, one layout for each KV-cache group."""

    layouts: list[wire.Layout]


class KvtierConnector(KVConnectorBase_V1, SupportsHMA):
    """Swaps preempted requests to kvtierd and back."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """One side of the connector. Errors: InvalidArgument for what cannot be served."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings = settings_of(
            transfer.kv_connector_extra_config, transfer.kv_load_failure_policy
        )
        self._groups = groups_of(vllm_config, kv_cache_config)
        self._config = vllm_config
        self._cache = kv_cache_config
        self._link: Link | None = None
        self._worker: WorkerSide | None = None
        self._scheduler: SchedulerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(
                self._settings,
                self._groups,
                extras,
                overwrites_first=vllm_config.use_v2_model_runner,
            )

    def _connect(self, layouts: list[wire.Layout], memories: Sequence[Memory] = ()) -> Link:
        """A link of this process; all processes of the engine are one client group."""
        transfer = self._config.kv_transfer_config
        identity = f"{transfer.engine_id}:{self._config.instance_id}"
        group, secret = (
            hashlib.sha256(f"{what}:{identity}".encode()).digest()[:16]
            for what in ("kvtierd-vllm-group", "kvtierd-vllm-secret")
        )

        def greet(client: Client) -> None:
            client.connect()
            for memory in memories:
                assert client.arena is not None, "a client that is connected has an arena"
                memory.prepare(client.arena)
            for layout in layouts:
                client.register_layout(layout)
            client.lookup(bytes(KEY_BYTES), layouts)

        name = f"vllm-{self.role.name.lower()}"
        answer_s = self._settings.answer_s
        return Link(Client(self._settings.socket, name, answer_s, group, secret), greet)

    # --------------------------------------------------------------- a worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The blocks lie in these tensors."""
        facts = facts_of(self._config, vllm.__version__)
        rank = get_pp_group().rank_in_group, get_tensor_model_parallel_rank()
        crew = Crew(usual_threads())
        places = []
        for index, group in enumerate(self._cache.kv_cache_groups):
            tensors = {name: kv_caches[name] for name in group.layer_names}
            blocks = self._cache.num_blocks
            pages = {name: pages_of(tensor, blocks) for name, tensor in tensors.items()}
            order = sorted(pages, key=lambda name: (pages[name].address, name))
            stacks = stacks_of(list(pages.values()))
            kernels = [
                kernel.full_cls_name() for kernel in get_current_attn_backends(self._config, order)
            ]
            layout = layout_of(
                facts, index, group.kv_cache_spec, order, kernels, record_bytes(stacks), rank
            )
            memory = memory_of(stacks, blocks, list(tensors.values()), crew)
            stores = not layout.replicated or rank[1] == 0
            places.append(Place(layout, memory, stores, self._groups[index].block_tokens))
        self._link = self._connect(
            [place.layout for place in places], [place.memory for place in places]
        )
        self._worker = WorkerSide(places, self._link, self._settings.deadline_s)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Tell the scheduler's side what this rank's blocks are."""
        if self._worker is None:
            return None
        return KvtierLayouts([place.layout for place in self._worker.places])

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Store blocks of preempted requests, before the step overwrites them."""
        assert isinstance(kv_connector_metadata, KvtierMetadata)
        if self._worker is not None:
            self._worker.store(kv_connector_metadata.rescues)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the step's loads."""
        orders = self._get_connector_metadata()
        assert isinstance(orders, KvtierMetadata)
        if self._worker is not None:
            self._worker.load(orders.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing that the forward reads is under way: requests wait until their loads end."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Blocks are saved whole, after the forward."""

    def wait_for_save(self) -> None:
        """Store the blocks that are full now."""
        orders = self._get_connector_metadata()
        assert isinstance(orders, KvtierMetadata)
        if self._worker is not None:
            self._worker.store(orders.writes)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests whose loads have ended.

        With several KV-cache groups block ids are not unique: then whole requests are reported as
        failed, else single blocks by `get_block_ids_with_load_errors`.
        """
        if self._worker is None:
            return KVConnectorTransferResults()
        ended, failed = self._worker.ended()
        if len(self._groups) == 1:
            failed = set()
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that the engine has to compute after all."""
        if self._worker is None:
            return set()
        bad = self._worker.bad_ids()
        return bad if len(self._groups) == 1 else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What this rank has done since the last step."""
        report = None if self._worker is None else self._worker.report()
        if report is None:
            return None
        return KvtierWorkerMetadata(report.ended, report.failed, report.short)

    # ----------------------------------------------------------- the scheduler

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is lost is recomputed: nothing has to wait for one."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """On a GPU blocks in one piece, so that each is one DMA; CPU kernels read one layout."""
        return None if current_platform.is_cpu() else "BLHNC"

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """The workers' layouts: from now on requests are served."""
        ranks = []
        for _, told in sorted(metadata.items()):
            assert isinstance(told, KvtierLayouts)
            ranks.append(told.layouts)
        groups = Groups(self._groups, ranks)
        self._link = self._connect([layout for part in groups.parts for layout in part])
        self._side.begin(groups, self._link)

    @property
    def _side(self) -> SchedulerSide:
        assert self._scheduler is not None, "a worker was asked what the scheduler knows"
        return self._scheduler

    def on_new_request(self, request: Any) -> None:
        """Ask whether its prefix is stored."""
        self._side.added(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """What can be loaded behind what the engine has; no wait, no message."""
        return self._side.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks are there for what was offered."""
        if num_external_tokens:
            self._side.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Orders for the workers in this step."""
        orders = self._side.orders(scheduler_output)
        return KvtierMetadata(orders.rescues, orders.writes, orders.loads)

    def update_connector_output(self, connector_output: Any) -> None:
        """What came of earlier orders."""
        report = connector_output.kv_connector_worker_meta
        assert report is None or isinstance(report, KvtierWorkerMetadata)
        self._side.heard(report, connector_output.finished_recving or ())

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Let go of what is held for it; its blocks may be freed at once."""
        self._side.finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same with several KV-cache groups."""
        return self.request_finished(request, [])

    def take_events(self) -> Iterable[Any]:
        """The daemon tells nobody about single blocks."""
        return ()

    def reset_cache(self) -> bool:
        """Offer nothing that was stored so far."""
        self._side.reset()
        return True

    # ------------------------------------------------------------------- both

    def get_kv_connector_stats(self) -> KvtierStats | None:
        """Counters since the last call."""
        counts: dict[str, float] = {}
        if self._scheduler is not None:
            counts = self._scheduler.tally.take()
        elif self._worker is not None:
            counts = self._worker.take_stats()
        return KvtierStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvtierStats:
        """Statistics from what travelled."""
        return KvtierStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvtierProm:
        """Our counters for Prometheus."""
        return KvtierProm(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Let go of what is held and close the connection."""
        if self._scheduler is not None:
            self._scheduler.close()
        if self._link is not None:
            self._link.close()


def extras(request: Any, start: int, end: int) -> bytes:
    """What beside its tokens decides a block: pictures, adapters, salts, embeddings."""
    keys, _ = generate_block_hash_extra_keys(request, start, end, 0)
    return b"" if keys is None else _encode(keys)


def memory_of(stacks: list[Stack], blocks: int, tensors: list[Any], crew: Crew) -> Memory:
    """Copies for where the tensors are. Errors: InvalidArgument for an unknown device."""
    device = tensors[0].device.type
    if device == "cpu":
        return HostMemory(stacks, blocks, tensors, crew)
    if device == "cuda":
        from kvtier_client.engines.vllm.paged_cuda import CudaMemory

        return CudaMemory(stacks, blocks, tensors)
    raise InvalidArgument(f"KV caches on device {device} are unknown to kvtierd: cpu and cuda are")


def groups_of(config: Any, cache: Any) -> list[Group]:
    """The engine's KV-cache groups. Errors: InvalidArgument for what cannot be served."""
    parallel = config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise InvalidArgument(
            "kvtierd does not serve context parallelism: a block's tokens are on several ranks"
        )
    groups = []
    for group in cache.kv_cache_groups:
        spec = group.kv_cache_spec
        specs = getattr(spec, "kv_cache_specs", None)
        first = spec if specs is None else next(iter(specs.values()))
        if isinstance(first, SlidingWindowSpec):
            window = first.sliding_window + first.extra_retained_tokens
            groups.append(Group(spec.block_size, window))
        elif isinstance(first, FullAttentionSpec) and first.prefix_cacheable:
            groups.append(Group(spec.block_size))
        else:
            raise InvalidArgument(
                f"kvtierd serves full and sliding-window attention; this model has layers of "
                f"{type(first).__name__}, whose state has no blocks that can be named by content"
            )
    return groups
