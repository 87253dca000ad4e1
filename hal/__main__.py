"""`python -m hal` is the `hal` command."""

from __future__ import annotations

from hal.cli import main

if __name__ == "__main__":
    main()
