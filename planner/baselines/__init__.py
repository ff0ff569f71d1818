"""What other training software was told: its configuration becomes a `Setting`.

One module a format (Megatron-LM's command line, torchtitan's TOML, DeepSpeed's JSON, Accelerate's
YAML); `recognise` tells them apart by what they contain. `planner.baseline` turns a Setting into a
candidate for a cluster, which the search must not lose to.
"""
