"""A cache for Hugging Face transformers that kvtierd keeps between turns.

    cache = KvtierCache(model, client)
    ids = model.generate(ids, cache=cache)
    token = cache.suspend(input_ids=ids)            # this process may end now

    cache = KvtierCache.resume(token, model, client)
    ids = model.generate(torch.cat([cache.saved["input_ids"], question], -1), cache=cache)

`cache.py` is what callers hold; `branch.py` knows what the daemon has of it; `pages.py` moves KV
between the layers' tensors and the daemon; `identity.py` says which model made it; `saved.py` is
what a save point holds besides KV.
"""

from kvtier_client.engines.transformers.cache import KvtierCache
from kvtier_client.engines.transformers.identity import model_identity

__all__ = ["KvtierCache", "model_identity"]
