"""Collectives of our own over any backend's point-to-point messages, and what travels in them.

`group.create_group` is the front door. `algorithms` runs the rounds that
`profiles.collective_schedules` describes; `compressed` sends codes instead of numbers; `selector`
says which algorithm to use, and `checksum` whether what came is what was sent.
"""
