"""Other people's recordings of training become `RankTrace`s: one reader a format.

`read.read_traces` finds the format by looking into the file. Nothing here computes; `replay`
makes an analysis and `resimulate` a TaskGraph of what is read.
"""
