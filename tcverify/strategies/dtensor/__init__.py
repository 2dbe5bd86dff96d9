"""Programs of whole tensors for DTensor to shard."""
