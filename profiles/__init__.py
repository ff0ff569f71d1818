"""What hardware is, and what has been measured on it.

A cluster file becomes a `Cluster`; the keys of every cost are `OpWork` and `CollectiveWork`; runs
leave `Measurement`s, which a `Profile` collects; the cost models answer "how long does this
work take here?" from the profile first and from physics second. This room also holds what all
rooms share: units, errors and the reading and writing of files. It never imports torch.
"""
