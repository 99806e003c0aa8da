"""Fault injection: cases in a small language that say what breaks in a pool, and what the canary has to report."""
