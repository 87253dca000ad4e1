"""`hal bench moe`: routing and the expert layer of mixtures of experts."""
