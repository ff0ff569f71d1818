"""From model.py to a Plan.

The order in which the code reads: `model_source` finds the model, `trace` records it into a
`ModelGraph` (`graph`), `space` lists the `Candidate`s, `lower` makes a TaskGraph of one, `score`
simulates it, `search` finds the best and proves it, `plan` writes it down, `explain` says why.
"""
