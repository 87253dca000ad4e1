"""The conformance suite: what every operation means, run against any backend.

    pytest --pyargs hal.conformance --hal-backend NAME
    hal conformance --backend NAME --json report.json

| module          | duty                                                              |
|-----------------|-------------------------------------------------------------------|
| `plugin`        | pytest options and hooks; inert in other runs                     |
| `run`           | the suite as a function, for the command line                     |
| `setup`         | options -> the session                                            |
| `session`       | outcomes of one run                                               |
| `outcomes`      | the kinds of outcome, and the exceptions that carry them          |
| `verdict`       | what a finished case amounts to                                   |
| `terminal`      | the summary in the terminal                                       |
| `waivers`       | known deviations, with reasons and links                          |
| `report`        | JSON and Markdown                                                 |
| `subject`       | the backend under test, observed                                  |
| `oracle`        | attention and cache writes in naive float64                       |
| `moe_oracle`    | routing and the expert pipeline in naive float64                  |
| `moe_judge`     | results of routing and of the pipeline against that               |
| `moe_inputs`    | expert-pipeline calls as data, and their arguments, poisoned      |
| `moe_cases`     | the tables of expert-pipeline cases                               |
| `routing_inputs`| sizes and bad rows for routing                                    |
| `tensors`       | the tensors among arguments, also inside tuples                   |
| `quantised`     | what a quantised element must be                                  |
| `caches`        | paged caches in every layout and stride, poisoned                 |
| `shared_slots`  | rows that share a slot of a cache, and their judge                |
| `inputs`        | a case -> the arguments of a call                                 |
| `cases`         | the tables of cases                                               |
| `reported`      | inputs of public bug reports as stated, and grids of sizes        |
| `long_contexts` | long caches filled on the device, and their float64 judge         |
| `compare`       | tolerances, with their reasons                                    |
| `test_*`        | the tests, one module per op or theme                             |
"""

from __future__ import annotations

__all__ = ["SUITE_VERSION"]

#: Version of the suite: it rises whenever a backend that passed may fail.
SUITE_VERSION = "1.2"
