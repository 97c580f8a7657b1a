"""The cache that `generate` is given: transformers' own, with save points in the daemon.

    open ──suspend──► suspended          open ──save, crop, update──► open
      └────close────► closed             KvtierCache.resume ──► open

Only an open cache can be used. Save points outlive it, until they are forgotten.
"""

import contextlib
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Self

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvtier_client.client import Client
from kvtier_client.engines.transformers import branch as branches
from kvtier_client.engines.transformers.branch import Branch
from kvtier_client.engines.transformers.identity import layer_devices, model_identity
from kvtier_client.engines.transformers.pages import (
    Shape,
    gather,
    new_stage,
    new_tensors,
    scatter,
    shape_of,
    valid_tokens,
    windows,
)
from kvtier_client.engines.transformers.saved import (
    SavedBranch,
    decode_saved,
    encode_saved,
    format_token,
    pack_state,
    parse_token,
    unpack_state,
)
from kvtier_client.errors import (
    BlockLost,
    DataError,
    InvalidArgument,
    KvtierError,
    LayoutMismatch,
    QuotaExceeded,
    UnknownBranch,
    UnknownSession,
)

PAGE_TOKENS: Final = 16
WAIT_S: Final = 30.0


class KvtierCache(DynamicCache):
    """A `DynamicCache` that can be put into kvtierd, and be brought back by any process.

    What was saved once is not written again: a save writes the pages that are new, and the partly
    filled one. A token names a save point. Only the cache that made it moves it on: its next save
    gives the same token, unless tokens were taken away in between, which gives another one. What
    others make of it are branches of their own, which share its pages. Crop, beam search and
    batches work as in transformers.
    """

    layers: list[Any]

    def __init__(
        self,
        model: Any,
        client: Client,
        *,
        page_tokens: int = PAGE_TOKENS,
        identity: str | None = None,
        name: str = "",
        wait_s: float = WAIT_S,
    ) -> None:
        """An empty cache for `model`; nothing is in the daemon before the first save.

        `identity` names the weights (repository and commit) where they should not be hashed, as
        `model_identity` says; `name` is shown to the daemon's operator; `wait_s` is how long a
        page may wait for room. Errors: InvalidArgument for a model whose KV is not full attention
        of all tokens (sliding windows, linear attention, encoders), and for `page_tokens` < 1.
        """
        if page_tokens < 1:
            raise InvalidArgument(f"page_tokens is {page_tokens}: a page holds at least one token")
        super().__init__(config=model.config)
        _refuse_others(model.config, self.layers)
        self.saved: dict[str, Tensor] = {}
        """What was given to the `save` or `suspend` that this cache was resumed from."""
        self._client = client
        self._page_tokens = page_tokens
        self._identity = model_identity(model, identity)
        self._devices = layer_devices(model, len(self.layers))
        self._name = name
        self._wait_s = wait_s
        self._branch: Branch | None = None
        self._token: str | None = None
        self._ended = ""

    # ------------------------------------------------------------ save points

    @property
    def token(self) -> str | None:
        """The save point that this cache was last resumed from or saved to."""
        return self._token

    def save(self, **state: Tensor) -> str:
        """Write what is new to the daemon and return the token of this save point.

        `state` are tensors that belong to it (`input_ids`, `attention_mask`): a resume gives them
        back in `saved`. The cache goes on as it was, also when this fails. The token is the one of
        the last save as long as the cache has only grown: forget an old one if it is another.
        Durability: when it returns, the save point survives this process and the daemon.
        Errors: ArenaFull or SpillFull after `wait_s`; ConnectionLost; InvalidArgument or
        QuotaExceeded for state that cannot be kept (then nothing was written).
        """
        self._check_open()
        tokens = self._common_tokens()
        shape = shape_of(self.layers, self._page_tokens)
        layout = shape.layout(self._identity)
        known = self._branch
        unchanged = known is not None and known.layout == layout and known.stored_tokens == tokens
        if self._token is not None and unchanged and not state:
            return self._token
        blob = encode_saved(SavedBranch(self._identity, shape, tokens, pack_state(state)))
        self._check_blob(blob)
        try:
            self._token = self._store(shape, tokens, blob)
        except (UnknownBranch, UnknownSession):
            # Somebody forgot the conversation while it was here: it goes on under a new token.
            self._branch = None
            self._token = self._store(shape, tokens, blob)
        return self._token

    def suspend(self, **state: Tensor) -> str:
        """`save`, then free the tensors: only the token is needed to go on."""
        token = self.save(**state)
        self._end("this cache is suspended: bring it back with KvtierCache.resume(token, ...)")
        return token

    @classmethod
    def resume(
        cls,
        token: str,
        model: Any,
        client: Client,
        *,
        identity: str | None = None,
        partial: bool = False,
        name: str = "",
        wait_s: float = WAIT_S,
    ) -> Self:
        """Bring a save point back, bit for bit, on the device of `model`.

        With `partial`, pages that are lost cut the cache short before the first of them, instead
        of an error: `generate` with all `input_ids` computes the rest again.
        Errors: LayoutMismatch when another model computed it; BlockLost with the lost `pages`;
        UnknownSession or UnknownBranch when it was forgotten; InvalidArgument for what is no
        token; ArenaFull after `wait_s`.
        """
        secret, node = parse_token(token)
        cache = cls(model, client, identity=identity, name=name, wait_s=wait_s)
        session = client.resume_session(secret)
        path = branches.path_to(session.nodes(), node)
        saved = decode_saved(session.get_blob(node)[1])
        saved.identity.refuse_other(cache._identity)
        layout = saved.shape.layout(cache._identity)
        if session.layouts != [layout.fingerprint()] or len(saved.shape.layers) != len(cache):
            raise LayoutMismatch(
                "the token's session holds pages of another layout than its save point says"
            )
        client.register_layout(layout)
        cache._page_tokens = saved.shape.page_tokens
        cache.saved = unpack_state(saved.state)
        cache._branch = Branch(session, layout, [(each.node, each.fork_tokens) for each in path])
        valid = valid_tokens(saved.shape, 0, saved.shape.pages(saved.tokens), saved.tokens)
        missing = branches.missing_pages(path, valid, saved.shape.page_tokens).tolist()
        if missing and not partial:
            raise _lost(saved, tuple(missing))
        kept = min(missing[0] * saved.shape.page_tokens, saved.tokens) if missing else saved.tokens
        kept = cache._load(saved, kept, partial)
        cache._branch.stored_tokens = kept
        cache._token = token if kept == saved.tokens else None
        return cache

    @staticmethod
    def forget(token: str, client: Client, *, conversation: bool = False) -> None:
        """Drop a save point, and the pages that no other one needs; it may be repeated.

        With `conversation`, drop all save points that were made from the same first one.
        Errors: InvalidArgument for what is no token.
        """
        secret, node = parse_token(token)
        try:
            session = client.resume_session(secret)
            if conversation:
                session.close()
            else:
                branches.forget(session, node)
        except UnknownSession:
            return

    def fork(self) -> "KvtierCache":
        """A second cache that begins as this one is now; `copy.deepcopy` does the same.

        They share tensors, which no update changes, and the pages that are stored.
        """
        self._check_open()
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.layers = [_twin_layer(layer) for layer in self.layers]
        twin.saved = dict(self.saved)
        twin._branch = None if self._branch is None else self._branch.shared()
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> "KvtierCache":
        return self.fork()

    def close(self) -> None:
        """Free the tensors, and in the daemon what no save point names; it may be repeated.

        Save points stay: `forget` them. Errors: ConnectionLost.
        """
        branch, self._branch = self._branch, None
        self._end(self._ended or "this cache is closed: make a new one")
        if branch is not None:
            branch.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if problem is None:
            self.close()
            return
        with contextlib.suppress(KvtierError):  # the first problem is the one to see
            self.close()

    # ---------------------------------------------------- what generate calls

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append KV of new tokens to a layer.

        Errors: LayoutMismatch when they are of another dtype or batch size than what is there.
        """
        self._check_open()
        held = self.layers[layer_idx].keys
        if (
            held is not None
            and held.numel()
            and (held.dtype != key_states.dtype or held.shape[0] != key_states.shape[0])
        ):
            raise LayoutMismatch(
                f"layer {layer_idx} holds {held.dtype} of batch size {held.shape[0]}, and the model"
                f" gave {key_states.dtype} of {key_states.shape[0]}; run it as it was run before"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many tokens the cache holds."""
        self._check_open()
        return int(super().get_seq_length(layer_idx))

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens (a negative number of them), as transformers' own caches do."""
        self._check_open()
        super().crop(tokens_to_remove)
        self._keep(self.get_seq_length())

    def reset(self) -> None:
        """Drop all tokens."""
        super().reset()  # type: ignore[no-untyped-call]
        self._keep(0)

    def reorder_cache(self, beam_idx: Any) -> None:
        """Reorder the batch, as beam search does."""
        super().reorder_cache(beam_idx)
        self._keep(0)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence of the batch."""
        super().batch_repeat_interleave(repeats)
        self._keep(0)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some sequences of the batch."""
        super().batch_select_indices(indices)
        self._keep(0)

    # ------------------------------------------------------------------ parts

    def _check_open(self) -> None:
        if self._ended:
            raise InvalidArgument(self._ended)

    def _end(self, why: str) -> None:
        self.layers = []
        self._ended = why

    def _keep(self, tokens: int) -> None:
        if self._branch is not None:
            self._branch.keep(tokens)

    def _common_tokens(self) -> int:
        """The tokens that all layers have; what a forward pass that was interrupted has added to
        some of them is cut off. Errors: InvalidArgument without any."""
        lengths = [layer.get_seq_length() for layer in self.layers]
        tokens: int = min(lengths)
        if not tokens:
            raise InvalidArgument("the cache is empty: there is nothing to save before a forward")
        for layer, length in zip(self.layers, lengths, strict=True):
            layer.crop(tokens - length)
        return tokens

    def _check_blob(self, blob: bytes) -> None:
        self._client.connect()
        most = self._client.limits.blob_bytes
        if len(blob) > most:
            raise QuotaExceeded(
                f"what is kept beside the KV has {len(blob)} bytes, more than the daemon's {most} "
                "(limits.blob_bytes): give fewer or smaller tensors"
            )

    def _store(self, shape: Shape, tokens: int, blob: bytes) -> str:
        """Write pages and blob; returns the token."""
        layout = shape.layout(self._identity)
        before = self._branch
        branch = branches.branch_to_write(self._client, before, layout, self._name)
        self._branch = branch
        if before is not None and before is not branch:
            before.leave()
        branch.named_tokens = max(branch.named_tokens, tokens)
        branch.agreed_tokens = tokens
        first, end = branch.stored_tokens // shape.page_tokens, shape.pages(tokens)
        stage = new_stage(shape, min(shape.window_pages(), end - first))
        for a, b in windows(shape, first, end):
            part = stage[: b - a]
            part[-1:].zero_()
            gather(shape, _tensors(self.layers), a, tokens, part)
            valid = valid_tokens(shape, a, b, tokens)
            branch.session.swap_out(part, (a, b), valid, branch.node, wait_s=self._wait_s)
        branch.stored_tokens = tokens
        branch.session.put_blob(blob, branch.node, version=branch.version + 1)
        branch.version += 1
        return format_token(branch.session.token, branch.node)

    def _load(self, saved: SavedBranch, tokens: int, partial: bool) -> int:
        """Fill the layers with leading tokens; returns how many there are of them."""
        assert self._branch is not None
        shape, session, node = saved.shape, self._branch.session, self._branch.node
        held = new_tensors(shape, tokens, self._devices)
        flat = [tensor for pair in held for tensor in pair]
        end = shape.pages(tokens)
        stage = new_stage(shape, min(shape.window_pages(), end))
        at = 0
        while at < end:
            b = min(end, at + len(stage))
            try:
                session.swap_in(stage[: b - at], (at, b), node, wait_s=self._wait_s)
            except DataError as problem:
                if not partial:
                    raise _lost(saved, problem.pages) from problem
                end = min(problem.pages, default=at)  # lost since it was looked at
                continue
            scatter(shape, flat, at, tokens, stage[: b - at])
            at = b
        tokens = min(tokens, end * shape.page_tokens)
        for layer, (keys, values) in zip(self.layers, held, strict=True):
            if tokens:
                layer.lazy_initialization(keys, values)
                layer.keys, layer.values = keys[:, :, :tokens], values[:, :, :tokens]
        return tokens


def _refuse_others(config: Any, layers: Sequence[Any]) -> None:
    """Errors: InvalidArgument for caches that pages of tokens cannot hold."""
    if config.is_encoder_decoder:
        raise InvalidArgument(
            f"{config.model_type} has an encoder, whose KV is no pages of tokens; use DynamicCache"
        )
    for i, layer in enumerate(layers):
        if type(layer) is not DynamicLayer:
            raise InvalidArgument(
                f"layer {i} of this {config.model_type} keeps a {type(layer).__name__}: only full "
                "attention can be kept page by page; use DynamicCache"
            )


def _tensors(layers: Sequence[Any]) -> list[Tensor]:
    return [tensor for layer in layers for tensor in (layer.keys, layer.values)]


def _twin_layer(layer: Any) -> DynamicLayer:
    twin = DynamicLayer.__new__(DynamicLayer)
    twin.__dict__.update(layer.__dict__)
    return twin


def _lost(saved: SavedBranch, pages: tuple[int, ...]) -> BlockLost:
    size = saved.shape.page_tokens
    spans = ", ".join(f"{p * size}..{min(saved.tokens, (p + 1) * size)}" for p in pages)
    return BlockLost(
        f"of {saved.tokens} tokens, {spans} are lost; the first {min(pages, default=0) * size} are "
        "there: resume with partial=True and give generate all input_ids, and it computes the rest",
        pages,
    )
