"""Optimizers whose ranks exchange compressed vectors instead of whole gradients."""
