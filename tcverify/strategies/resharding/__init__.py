"""Programs of tensors with layouts, which are moved between meshes."""
