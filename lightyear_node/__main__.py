"""`python -m lightyear_node` is the command line."""

from lightyear_node.cli import main

if __name__ == "__main__":
    main()
