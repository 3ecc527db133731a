"""The command `gguf-dio`: one file per subcommand."""
