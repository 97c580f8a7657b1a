"""The decode worker: a small real engine that swaps its KV to kvtierd when memory runs out.

A request's life: `engine.submit` makes a `Sequence`; `scheduler.plan` admits it and gives it
pages; `tile.build_tile` lays its tokens out; `model.forward` writes their KV into the `pool`;
`sampler.choose` takes the next token. When pages run out the scheduler preempts it: a `store`
keeps its KV (`swap.DaemonStore`) or lets it go (`store.RecomputeStore`), and it is admitted again
when there is room.

A thought's life beside that: `steps.StepScanner` says where a step ends; `folding.Folder` lets the
store have the step's KV and leaves of it what an operator of `folds` makes, or brings it back;
`thoughts` remembers which steps are folded and since when, `entries` which slots of the pool that
leaves; `engine.fork` and `engine.prune` make and end branches, whose nodes in the daemon are in
`branches`, and `saved` is what a suspended one leaves there.
"""
