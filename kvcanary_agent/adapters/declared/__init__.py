"""Adapters that are a table, not code: the declarative form, for engines of a common shape.

The table is a TOML file, or ``[tool.kvcanary_agent]`` of a ``pyproject.toml``. Values that say where something is are
paths, see `kvcanary_agent.adapters.declared.paths`. Methods are ``Class.method`` of ``module``, or
``other.module:Class.method``.

::

    engine = "my-engine"                # its name in reports
    module = "my_engine.runner"         # where classes are unless they say otherwise

    [pool]
    class = "KVCache"                   # whose object leads to the buffers
    opened_by = "__init__"              # after which of its methods they exist, one name or several
    closed_by = "release"               # after which they are gone
    keys = "self.k[*]"                  # and values; or kv, where they are one tensor; key_scales, value_scales
    values = "self.v[*]"
    layout = "blocks tokens heads dim"  # see `kvcanary_agent.adapters.api.axes`; of scales: scale_layout
    block_size = "self.block_size"      # only where the layout has slots
    null_block = 0                      # the block that padding points at
    window = 4096                       # of sliding-window attention
    used_by = ["self.runner"]           # the objects that act on this pool, where there can be several pools

    [[step]]                            # a call that runs the model; as many as there are
    method = "ModelRunner.forward"
    requests = "args.batch.request_ids" # [rows] ids
    block_table = "..."                 # [rows, blocks]; [rows] where a request is one block
    table_rows = "args.batch.rows"      # [rows], where block_table has a row for every possible request
    token_ids = "..."                   # [tokens], or [rows, tokens of each]
    # optional: write_slots, positions [tokens]; prefix_lens, seq_lens, query_lens [rows]; query_offsets [rows + 1];
    # known_tokens [rows][tokens so far]; namespaces [rows]; unless: the call is no step if it is true (a warm-up)

    [[event]]                           # what the allocator does
    kind = "allocated"                  # shared, freed, copied
    method = "BlockManager.allocate"
    when = "after"                      # or "before"; freed is read before, the others after, unless it says so
    blocks = "result"
    request = "args.seq.request_id"
    # added = true: only the blocks that the call has added to this list
    # shared_tokens = "...": the first so many tokens are a prefix hit; their blocks are shared, not allocated
    # cached = true: of freed, the contents may be shared later; copied has source and destination

    [[remember]]                        # a value of one call that a step needs
    name = "sequences"
    method = "ModelRunner.build_batch"
    value = "args.sequences"

    [[write]]                           # instead of steps: a method of the pool that writes
    method = "KVCache.write"
    slots = "args.slots"                # [tokens]
    layer = "args.layer"                # an index; without it a call writes all layers
"""
