"""``python -m modelyard``."""

from modelyard.cli.app import main

if __name__ == "__main__":
    main()
