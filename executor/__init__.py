"""From a Plan to training on torch.distributed, and from training back to Measurements."""
