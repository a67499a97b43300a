"""Adapter: the command line: `python -m muster.local.kubernetes`."""

import sys

from muster.local.kubernetes import server

if __name__ == "__main__":
    sys.exit(server.main())
