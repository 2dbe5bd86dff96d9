"""Programs of tensors with layouts, brought from mesh to mesh."""
