"""What a GGUF file says: types, header, metadata, tensors."""
