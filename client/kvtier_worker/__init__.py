"""The decode worker: a small real engine that swaps its KV to kvtierd when memory runs out.

A request's life: `engine.submit` makes a `Sequence`; `scheduler.plan` admits it and gives it
pages; `tile.build_tile` lays its tokens out; `model.forward` writes their KV into the `pool`;
`sampler.choose` takes the next token. When pages run out the scheduler preempts it: a `store`
keeps its KV (`swap.DaemonStore`) or lets it go (`store.RecomputeStore`), and it is admitted again
when there is room.
"""
