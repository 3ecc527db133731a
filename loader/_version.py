"""The version of the distribution, read from here by the build as well."""

__version__ = "0.1.0"
