"""`python -m loader` is the same as `gguf-dio`."""

from loader.cli.main import run

if __name__ == "__main__":
    run()
