"""One process on one engine, for the tests of portable checkpoints: `ENGINE`, then one JSON list of orders on stdin.

Each order is the name of a function of Modelyard and its arguments; the answers come as one JSON list.
"""

from __future__ import annotations

import json
import os
import sys

from modelyard.config.backend import select_engine

engine = sys.argv[1]
select_engine(engine)
sys.path.insert(0, os.environ["PARTS"])

import modelyard  # noqa: E402
import parts  # noqa: E402, F401 - registers the models of the tests

answers = []
for name, words, options in json.load(sys.stdin):
    result = getattr(modelyard, name)(*words, engine=engine, **options)
    answers.append({"step": result.step, "metrics": result.metrics})
print(json.dumps(answers))
