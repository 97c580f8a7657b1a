"""The queries of a step's last tokens: computed again when a fold operator wants to see them.

Nothing is kept for it while decoding. A token computed again gives the bits that it gave before,
so a fold of a session that was suspended meanwhile is the same fold.
"""

import torch
from torch import Tensor

from kvtier_worker.model import Llama, Watch
from kvtier_worker.pool import PagedPool
from kvtier_worker.sequence import Sequence
from kvtier_worker.thoughts import Step
from kvtier_worker.tile import Row, build_tile


def probe_queries(
    model: Llama, pool: PagedPool, sequence: Sequence, step: Step, tokens: int
) -> Tensor:
    """The queries of a step's last tokens, turned as if they stood behind the step.

    The step is whole and in the pool; nothing in the pool changes but the scratch page.
    Shapes: [layers, tokens, heads, head_dim].
    """
    config, kv = model.config, sequence.kv
    shift = sequence.thoughts.first_entry(step) - step.first
    parts = []
    rows_max = model.tile_sizes[-1]
    for start in range(step.end - tokens, step.end, rows_max):
        rows = [
            Row(
                token=sequence.tokens[at],
                position=at,
                slots=kv.slots[: at + shift + 1],
                biased=bool(pool.bias_pages),
                write=False,
            )
            for at in range(start, min(start + rows_max, step.end))
        ]
        tile = build_tile(rows, model.tile_sizes, pool.scratch_slot, model.device)
        queries = torch.empty(
            config.layers, len(rows), config.heads, config.head_dim, device=model.device
        )
        model.forward(tile, pool.kv, Watch(queries=queries))
        parts.append(queries)
    return model.rotated(torch.cat(parts, dim=1), step.tokens)
