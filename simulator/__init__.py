"""Time and memory: a `TaskGraph` comes in, a `Timeline` goes out.

Nothing here knows of models, plans or torch. Two engines share one semantics: `engine` is
compiled and scores candidates, `reference` is written in SimPy to be read; tests hold them equal
to the nanosecond. `bounds` never exceeds what either says.
"""
