"""Faces that users of other libraries know."""
