"""`python -m nestpipe` is `nestpipe`."""

from nestpipe.cli.app import main

if __name__ == "__main__":
    main()
