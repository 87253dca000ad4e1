"""Adapters from other frameworks to `hal`; each imports its framework only when used."""
