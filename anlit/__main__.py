"""`python -m anlit` is `anlit`."""

import sys

from anlit.cli import main

sys.exit(main())
