"""The tensor_cast dialect."""
