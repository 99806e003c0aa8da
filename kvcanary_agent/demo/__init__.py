"""A small paged-attention engine and server on torch: the workload of `kvcanary-agent demo` and of the fault cases.

It knows nothing of the agent, which attaches to it from outside as it does to any other engine. Read in this order:
`config`, `sequence`, `block_manager`, `scheduler`, `kv_pool`, `model`, `model_runner`, `engine`, `server`.

`command` is the demonstration itself, a client of that server: with `server_process`, `observations` and `screen` it
runs in a process of its own, without torch.
"""
