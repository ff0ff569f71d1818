"""Planning on several kinds of devices; begin with `planning`.

`kinds` divides a cluster into devices that are alike, `plan` says what a way over unlike ones is.
`shares` lets kinds share the batch; `space`, `cut`, `bound` and `search` lay one pipeline over
kinds; `lower` and `score` judge both by the one simulator. `result` and `writer` make the plan.
"""
