"""Which model made some KV: everything that decides its bytes, in four short digests."""

import json
import weakref
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import torch
from torch import Tensor, nn
from xxhash import xxh3_128, xxh3_128_hexdigest

from kvtier_client.errors import InvalidArgument, LayoutMismatch

_NOT_OF_KV: Final = frozenset(
    {
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "pad_token_id",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""What a configuration says of where a model came from or how it ends, and not of its KV. The
dtype of the weights is in their digest, that of KV in the layout."""


class Identity(msgspec.Struct, frozen=True):
    """What two models must share so that one may read the other's KV."""

    architecture: str
    config: str
    weights: str
    adapters: str

    def refuse_other(self, other: "Identity") -> None:
        """Errors: LayoutMismatch, naming what is not the same."""
        differing = [
            f"{name} ({ours} here, {theirs} there)"
            for name in self.__struct_fields__
            if (ours := getattr(self, name)) != (theirs := getattr(other, name))
        ]
        if differing:
            raise LayoutMismatch(
                f"the KV was computed by another model: it differs in {', '.join(differing)}; "
                "resume it with the model, adapters and settings that it was suspended with"
            )


def model_identity(model: Any, weights: str | None = None) -> Identity:
    """Who `model` is: its class, configuration (RoPE and quantisation too), weights and adapters.

    `weights` names them (a repository and its commit), in place of a hash over all of them, which
    costs about a second for 10 GB and is made once for each model and change of its weights.
    Errors: InvalidArgument when weights cannot be read, or are one rank's part only.
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    config = model.config.get_text_config(decoder=True).to_dict()
    told = {name: value for name, value in config.items() if name not in _NOT_OF_KV}
    return Identity(
        architecture=type(model).__name__,
        config=_digest(told),
        weights=_weights(model) if weights is None else weights,
        adapters=_digest(list(_adapters(model))),
    )


def layer_devices(model: Any, layers: int) -> list[torch.device]:
    """The device on which each layer's attention runs, and so keeps its KV."""
    devices = [model.device] * layers
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        first = next(module.parameters(), None)
        if isinstance(layer, int) and layer < layers and first is not None:
            devices[layer] = first.device
    return devices


def _digest(value: Any) -> str:
    return xxh3_128_hexdigest(json.dumps(value, sort_keys=True, default=str).encode())


def _adapters(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Which adapters (LoRA and its kin, as peft attaches them) are switched on, and how strongly;
    their weights are among the model's own."""
    for name, module in model.named_modules():
        if isinstance(getattr(module, "disable_adapters", None), bool):
            told = [
                str(getattr(module, word, None))
                for word in ("disable_adapters", "active_adapters", "merged_adapters", "scaling")
            ]
            yield name, " ".join(told)


_known: "weakref.WeakKeyDictionary[nn.Module, tuple[list[Any], str]]" = weakref.WeakKeyDictionary()
"""The digest of each model's weights, and the state of its tensors when it was taken."""


def _weights(model: nn.Module) -> str:
    tensors = model.state_dict()
    state = [
        (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)
        for tensor in tensors.values()
        if isinstance(tensor, Tensor)
    ]
    known = _known.get(model)
    if known is not None and known[0] == state:
        return known[1]
    digest = xxh3_128()
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            digest.update(f"{name} {tensor}".encode())
            continue
        if hasattr(tensor, "device_mesh"):
            raise InvalidArgument(
                f"{name} is spread over several ranks: a cache is of a whole model; load the model "
                "without tensor parallelism"
            )
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        try:
            digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        except (NotImplementedError, RuntimeError, TypeError) as problem:
            raise InvalidArgument(
                f"the weights {name} cannot be read to tell this model from others ({problem}); "
                "name them instead: identity='REPOSITORY@COMMIT'"
            ) from problem
    _known[model] = (state, digest.hexdigest())
    return digest.hexdigest()
