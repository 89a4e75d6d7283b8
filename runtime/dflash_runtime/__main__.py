"""`python -m dflash_runtime` is `dflash`."""

from .cli import main

if __name__ == "__main__":
    main()
