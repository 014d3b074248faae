"""`python -m repaconv`."""

from repaconv.cli.main import main

if __name__ == "__main__":
    main()
