"""Programs of whole tensors with layouts, from which the graph of each rank is derived."""
