"""Benchmarks behind `hal bench`. Imports nothing heavy; each command imports its own modules."""
