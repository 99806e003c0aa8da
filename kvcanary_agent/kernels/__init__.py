"""The device work of the canary: hashes, records, comparisons and the violation ring."""
