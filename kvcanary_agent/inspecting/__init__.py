"""``kvcanary-agent inspect``: looks at a pool and its engine, and proposes the table that declares them."""
