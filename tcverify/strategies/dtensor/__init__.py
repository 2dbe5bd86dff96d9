"""Programs of whole tensors for DTensor to divide."""
