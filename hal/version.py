"""The three versions that every report carries."""

from __future__ import annotations

__version__ = "0.1.0"

#: Version of the backend interface (`hal.spec`). A backend states the one it was written for.
API_VERSION = 1

#: Version of the op contracts (`hal.ops`): it rises whenever the meaning of an op changes.
CONTRACT_VERSION = "1.1"
