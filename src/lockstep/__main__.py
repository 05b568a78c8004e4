"""``python -m lockstep``: the command ``lockstep``."""

import sys

from lockstep.cli import main

sys.exit(main())
